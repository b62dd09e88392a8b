"""The calls that a command line describes, as examples that a suite measures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import click
import jax
import jax.numpy as jnp

import ejkernel_core
from ejkernel_cli import Call, clear_refusals, parse_call
from ejkernel_core import Example, Invocation
from ejkernel_tuning._samples import sample_inputs

SHAPE = "--shape"


def examples_of(operation: str, words: Sequence[str]) -> list[Example]:
    """An example for each ``--shape``. The other words describe all of them."""
    return [example_of(parse_call(operation, call_words)) for call_words in by_shape(words)]


def by_shape(words: Sequence[str]) -> Iterator[list[str]]:
    """The words of each call: one shape, and all that is not a shape.

    >>> list(by_shape(["--shape", "2x8", "--causal", "--shape=4x8"]))
    [['--shape', '2x8', '--causal'], ['--shape', '4x8', '--causal']]
    """
    shapes, others = [], []
    remaining = iter(words)
    for word in remaining:
        name, has_value, value = word.partition("=")
        if name == SHAPE:
            shapes.append(value if has_value else next(remaining, ""))
            if not shapes[-1]:
                raise click.UsageError(f"{SHAPE} takes a value, as {SHAPE} 4x4096x16x128")
        else:
            others.append(word)
    for shape in shapes:
        yield [SHAPE, shape, *others]


def example_of(call: Call) -> Example:
    """The call with random arrays, differentiated for every array of real numbers that has a gradient."""
    operation = ejkernel_core.registry.operation(call.operation)
    # The operation checks the call here, so that a mistake is told before anything is compiled.
    with clear_refusals(call.operation):
        _invocation(call)
    floating = {name: array for name, array in call.arrays.items() if jnp.issubdtype(array.dtype, jnp.floating)}
    wrt = [name for name in operation.differentiable if name in floating] if operation.backward else ()
    dtype = next((array.dtype.name for array in floating.values()), "float32")
    return Example(name_of(call), call.operation, partial(arguments_of, call), dtype, tuple(wrt))


def name_of(call: Call) -> str:
    """Such as "4x4096x16x128 bfloat16, causal"."""
    shapes = {name: "x".join(map(str, array.shape)) for name, array in call.arrays.items()}
    first, *others = shapes
    dtype = next(iter(call.arrays.values())).dtype.name
    words = [f"{name} {shapes[name]}" for name in others if shapes[name] != shapes[first]]
    words += [_option_text(name, value) for name, value in call.options.items()]
    return ", ".join([f"{shapes[first]} {dtype}", *words])


def _option_text(name: str, value: Any) -> str:
    name = name.replace("_", " ")
    return name if value is True else f"no {name}" if value is False else f"{name} {value}"


def arguments_of(call: Call, draw: int) -> Mapping[str, Any]:
    """Samples of the operation where it has some, such as boundaries in order."""
    del draw  # a benchmark draws once
    samples = sample_inputs(_invocation(call))
    arrays = {
        name: samples[name] if name in samples and _is_alike(samples[name], array) else _normal(number, array)
        for number, (name, array) in enumerate(call.arrays.items())
    }
    return {**arrays, **call.options}


def _invocation(call: Call) -> Invocation:
    arguments: dict[str, Any] = {**call.arrays, **call.options}
    return ejkernel_core.invocation(call.operation, **arguments)


def _is_alike(array: Any, expected: jax.ShapeDtypeStruct) -> bool:
    return bool(array.shape == expected.shape and array.dtype == expected.dtype)


def _normal(number: int, array: jax.ShapeDtypeStruct) -> jax.Array:
    """For an argument that the operation's canonical form has in another shape."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"integers of shape {array.shape} cannot be drawn; write a suite for this call")
    key = jax.random.fold_in(jax.random.key(0), number)
    return jax.random.normal(key, array.shape, jnp.float32).astype(array.dtype)
