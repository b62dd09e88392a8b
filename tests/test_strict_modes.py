"""Every operation under the modes in which JAX is strictest, forward and backward, by the kernels for CPUs.

Each is a mode in which a program that is right may fail: implicit broadcasts of ranks and promotions of dtypes are
refused, NaNs and infinities that a kernel meets on its way end the program, and JAX checks types and leaks. A program
that turns them on is to work as without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_core
from ejkernel_core import Example
from ejkernel_core.extend import OPERATIONS

REGISTRY = ejkernel_core.registry
MODES: dict[str, dict[str, Any]] = {
    "rank promotion": {"jax_numpy_rank_promotion": "raise"},
    "dtype promotion": {"jax_numpy_dtype_promotion": "strict"},
    "NaNs": {"jax_debug_nans": True},
    "infinities": {"jax_debug_infs": True},
    "checks": {"jax_enable_checks": True},
    "leaks": {"jax_check_tracer_leaks": True},
}
#: Those whose examples are made for a mesh: ``ejkernel_context`` has tests of its own.
ON_A_MESH = {"context_attention"}
OPS = [op for op in REGISTRY.names(OPERATIONS) if REGISTRY.operation(op).examples and op not in ON_A_MESH]


def plain_example(op: str) -> Example:
    """The smallest example with gradients, if there is one, and the fewest arguments. No array of it is empty."""
    operation = REGISTRY.operation(op)
    examples = [e for e in operation.examples() if e.dtype == "float32" and not (e.uses or e.long)]

    def rank(example: Example) -> tuple[bool, bool, int, int]:
        arguments = example.arguments(0)
        sizes = [np.size(value) for name, value in arguments.items() if name in operation.arrays]
        return not example.wrt, 0 in sizes, len(arguments), sum(sizes)

    return min(examples, key=rank)


def gradients(op: str, backend: str | None) -> Iterator[Any]:
    """The results of the example and the gradients of a sum of all of them."""
    example, operation = plain_example(op), REGISTRY.operation(op)
    call = {name: example.rounded(value) for name, value in example.arguments(0).items()}
    arrays = {
        name: jnp.asarray(value) for name, value in call.items() if name in operation.arrays and value is not None
    }
    options = {name: value for name, value in call.items() if name not in arrays}

    def results(arrays: Any) -> list[Any]:
        return jax.tree.leaves(REGISTRY.call(op, **arrays, **options, backend=backend))

    def loss(differentiated: Any) -> Any:
        leaves = results({**arrays, **differentiated})
        return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact))

    yield from results(arrays)
    if example.wrt:
        yield from jax.tree.leaves(jax.jit(jax.grad(loss))({name: arrays[name] for name in example.wrt}))


def results_and_gradients(op: str, backend: str | None) -> list[Any]:
    return [np.asarray(array) for array in gradients(op, backend)]


def under(mode: dict[str, Any], function: Callable[[], Any]) -> Any:
    before = {name: getattr(jax.config, name) for name in mode}
    for name, value in mode.items():
        jax.config.update(name, value)
    try:
        return function()
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", OPS)
def test_an_operation_has_the_same_results_in_a_strict_mode(op: str, mode: str) -> None:
    for backend in (None, "reference"):
        expected = results_and_gradients(op, backend)
        arrays = under(MODES[mode], partial(results_and_gradients, op, backend))
        assert len(expected) == len(arrays)
        for one, other in zip(arrays, expected, strict=True):
            np.testing.assert_array_equal(one, other)
