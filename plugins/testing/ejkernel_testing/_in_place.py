"""The check of an operation that updates an argument in place: who owns the array, and that nothing is copied."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_core import Example, Registry

from ._outcome import inputs, options

Arrays = Mapping[str, Any]


def in_place(registry: Registry, kernel: str, example: Example) -> None:
    """Without donation all arrays of the caller stay as they are; with it, the updated ones are taken away. Under
    ``jax.jit`` with donation, and as the carry of a scan, the compiled program copies none of them. That of a kernel in
    plain JAX has no other arrays of their size either, such as those of another dtype. An array that is a part of a
    larger one is updated in a copy, and the larger one stays as it is.
    """
    operation = registry.operation(example.op)
    updated, backend = [*operation.aliases.values()], kernel.rpartition(".")[2]
    values, prefix = inputs(registry, example), f"in_place: {kernel} on {example.name}"
    # Of others, this device runs something else than theirs.
    is_plain = not registry.kernel(example.op, backend).opaque

    def call(**arguments: Any) -> tuple[Any, ...]:
        results = registry.call(example.op, **options(registry, example), backend=backend, **arguments)
        return tuple(jax.tree.leaves(results))

    given = _on_device(values)
    expected = jax.device_get(call(**given))
    for name, value in values.items():
        assert _is_same(given[name], value), f"{prefix}: it writes into {name}, which the caller has not given away"
    results = call(donate=True, **given)
    _check_equal(prefix, "an eager call with donate=True", results, expected)
    kept = [name for name in updated if not given[name].is_deleted()]
    assert not kept, f"{prefix}: donate=True does not take {', '.join(kept)} away"
    _check_program(f"{prefix}: under jit with donation", call, values, updated, expected, is_plain)
    places = {array: operation.results.index(result) for result, array in operation.aliases.items()}

    def twice(**arrays: Any) -> tuple[Any, ...]:
        """The updated arrays are the carry of a scan."""

        def step(carry: Any, _: Any) -> tuple[Any, tuple[Any, ...]]:
            results = call(**{**arrays, **carry})
            others = tuple(result for i, result in enumerate(results) if i not in places.values())
            return {array: results[place] for array, place in places.items()}, others

        carry, others = jax.lax.scan(step, {name: arrays[name] for name in updated}, length=2)
        return (*carry.values(), *(other[-1] for other in others))

    once = {array: expected[place] for array, place in places.items()}
    again = jax.device_get(call(**_on_device({**values, **once})))
    others = [result for i, result in enumerate(again) if i not in places.values()]
    expected_of_scan = [*(again[places[name]] for name in updated), *others]
    _check_program(f"{prefix}: as the carry of a scan", twice, values, updated, expected_of_scan, is_plain)
    _check_parts(prefix, call, values, places, expected)


def _check_parts(
    prefix: str, call: Callable[..., tuple[Any, ...]], values: Arrays, places: Mapping[str, int], expected: Any
) -> None:
    """The updated arrays are parts of larger ones, into which the results are stored, or are not."""

    def parts(**arrays: Any) -> tuple[Any, ...]:
        return call(**{**arrays, **{name: arrays[name][1] for name in places}})

    def stored(**arrays: Any) -> tuple[Any, ...]:
        results = parts(**arrays)
        return tuple(arrays[name].at[1].set(results[place]) for name, place in places.items())

    arrays = {name: np.stack([value[::-1], value]) if name in places else value for name, value in values.items()}
    given = _on_device(arrays)
    expected_of_stored = [np.stack([arrays[name][0], expected[place]]) for name, place in places.items()]
    for function, results in ((parts, expected), (stored, expected_of_stored)):
        _check_equal(prefix, "an update of a part of a larger array", jax.jit(function)(**given), results)
        for name in places:
            is_kept = _is_same(given[name], arrays[name])
            assert is_kept, f"{prefix}: it writes into the array of which {name} is a part"


def _check_program(
    prefix: str, function: Callable[..., Any], values: Arrays, updated: list[str], expected: Any, is_plain: bool
) -> None:
    arrays = _on_device(values)
    compiled: Any = jax.jit(function, donate_argnames=updated).lower(**arrays).compile()
    text = compiled.as_text()
    # An interpreter's callback gets copies, and returns other arrays.
    if "callback" not in text:
        for name in updated:
            count = len(re.findall(rf"= \w+\[{','.join(map(str, arrays[name].shape))}\]\S* copy\(", text))
            assert not count, f"{prefix}, the program copies {name} {count} times"
        size = sum(arrays[name].nbytes for name in updated)
        memory = compiled.memory_analysis()
        aliased, temporary = memory.alias_size_in_bytes, memory.temp_size_in_bytes
        assert aliased >= size, f"{prefix}, {aliased} bytes are updated in place; the arrays have {size}"
        is_small = not is_plain or temporary < size
        assert is_small, f"{prefix}, the program needs {temporary} bytes more; the arrays have {size}"
    _check_equal(prefix, "the program", compiled(**arrays), expected)


def _check_equal(prefix: str, what: str, results: Any, expected: Any) -> None:
    for place, (result, value) in enumerate(zip(results, expected, strict=True)):
        assert _is_same(result, value), f"{prefix}: {what} has another result {place}"


def _on_device(values: Arrays) -> dict[str, jax.Array]:
    """New arrays, of which each may be given away."""
    return {name: jnp.array(value) for name, value in values.items()}


def _is_same(array: Any, value: Any) -> bool:
    """Whether all bits are equal."""
    return np.asarray(array).tobytes() == np.asarray(value, np.asarray(array).dtype).tobytes()
