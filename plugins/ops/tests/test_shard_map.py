"""Every operation inside ``shard_map``, differentiated in forward mode and twice, which the reference computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ejkernel_core
from ejkernel_core import Example
from ejkernel_core.extend import OPERATIONS

EXAMPLES = [
    next(example for example in operation.examples() if "forward_mode" in example.checks)
    for operation in map(ejkernel_core.registry.operation, ejkernel_core.registry.names(OPERATIONS))
    if operation.examples and any("forward_mode" in example.checks for example in operation.examples())
]


def test_most_operations_are_here() -> None:
    assert {"flash_attention", "rms_norm", "layer_norm", "grouped_matmul", "moe_permute_matmul"} <= {
        example.op for example in EXAMPLES
    }


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.op)
def test_the_reference_in_shard_map(example: Example) -> None:
    """Each of two devices has arrays of its own, also by ``jax.jvp`` and in a gradient of a gradient."""
    halves = [_arrays(example, draw) for draw in (0, 1)]
    options = {name: value for name, value in example.arguments(0).items() if name not in halves[0]}

    def loss(arrays: dict[str, Any], backend: str | None = None) -> jax.Array:
        results = ejkernel_core.call(example.op, **arrays, **options, backend=backend)
        total = sum((leaf.astype(float) ** 3).sum() for leaf in jax.tree.leaves(results) if leaf.dtype.kind == "f")
        return jnp.asarray(total)

    def tangent(arrays: dict[str, Any]) -> jax.Array:
        wrt, function = _differentiated(loss, arrays, example)
        return jax.jvp(function, (wrt,), (jax.tree.map(jnp.cos, wrt),))[1]

    def twice(arrays: dict[str, Any]) -> jax.Array:
        wrt, function = _differentiated(loss, arrays, example)
        squares = lambda wrt: sum((leaf**2).sum() for leaf in jax.tree.leaves(jax.grad(function)(wrt)))
        return jnp.asarray(sum(leaf.sum() for leaf in jax.tree.leaves(jax.grad(squares)(wrt))))

    reference = ejkernel_core.registry.operation(example.op).reference
    mesh = jax.make_mesh((2,), ("halves",), axis_types=(jax.sharding.AxisType.Auto,))
    stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *halves)
    for function in (loss, lambda arrays: loss(arrays, reference), tangent, twice):
        of_half = lambda arrays, function=function: function(jax.tree.map(lambda array: array[0], arrays))[None]
        sharded = jax.jit(jax.shard_map(of_half, mesh=mesh, in_specs=P("halves"), out_specs=P("halves")))
        np.testing.assert_allclose(sharded(stacked), [*map(jax.jit(function), halves)], rtol=1e-4)


def _arrays(example: Example, draw: int) -> dict[str, Any]:
    names = ejkernel_core.registry.operation(example.op).arrays
    return {name: jnp.asarray(value) for name, value in example.arguments(draw).items() if name in names}


def _differentiated(
    loss: Callable[..., Any], arrays: dict[str, Any], example: Example
) -> tuple[dict[str, Any], Callable[[dict[str, Any]], Any]]:
    """The arrays that have gradients, and the loss as a function of them."""
    return {name: arrays[name] for name in example.wrt}, lambda wrt: loss({**arrays, **wrt})
