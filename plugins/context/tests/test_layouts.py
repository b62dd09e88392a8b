"""The order of tokens, on whole arrays and in a shard."""

from __future__ import annotations

import doctest
import importlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel_context import positions, unzigzag, zigzag

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def mesh_of(kind: AxisType = AUTO) -> Any:
    return jax.make_mesh((2, 4), ("data", "seq"), axis_types=(kind, kind))


@pytest.mark.parametrize("module", ["_attention", "gather", "layouts", "mesh", "positions"])
def test_doctests(module: str) -> None:
    results = doctest.testmod(importlib.import_module(f"ejkernel_context.{module}"))
    assert results.attempted
    assert not results.failed


def test_each_device_has_an_early_and_a_late_chunk() -> None:
    tokens = zigzag(np.arange(16), shards=4, dim=0)
    assert tokens.reshape(4, 4).tolist() == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    assert isinstance(tokens, np.ndarray)


def test_a_tree_of_arrays_and_back() -> None:
    batch = {"tokens": np.arange(32).reshape(2, 16), "labels": (jnp.ones((2, 16, 3)) * jnp.arange(16.0)[:, None],)}
    arranged = zigzag(batch, shards=2)
    assert arranged["tokens"][0].tolist() == [0, 1, 2, 3, 12, 13, 14, 15, 4, 5, 6, 7, 8, 9, 10, 11]
    jax.tree.map(np.testing.assert_array_equal, unzigzag(arranged, shards=2), batch)
    last = zigzag(jnp.arange(24.0).reshape(3, 8), shards=2, dim=-1)
    assert last[0].tolist() == [0, 1, 6, 7, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize("is_context", [True, False])
@pytest.mark.parametrize("jit", [True, False])
def test_the_result_is_sharded(kind: AxisType, is_context: bool, jit: bool) -> None:
    mesh = mesh_of(kind)
    tokens = jax.device_put(np.arange(64).reshape(2, 32), NamedSharding(mesh, P("data")))
    call = partial(zigzag, axis="seq", mesh=None if is_context else mesh)
    back = partial(unzigzag, axis="seq", mesh=None if is_context else mesh)
    with jax.set_mesh(mesh):
        result = (jax.jit(call) if jit else call)(tokens)
        original = (jax.jit(back) if jit else back)(result)
    assert result.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "seq")), 2)
    np.testing.assert_array_equal(result, zigzag(np.arange(64).reshape(2, 32), shards=4))
    np.testing.assert_array_equal(original, np.arange(64).reshape(2, 32))


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_positions_are_those_of_the_tokens(layout: str) -> None:
    mesh = mesh_of()
    run = jax.shard_map(lambda: positions(4, "seq", layout=layout), mesh=mesh, in_specs=(), out_specs=P("seq"))
    expected = np.arange(16)
    np.testing.assert_array_equal(run(), zigzag(expected, shards=4, dim=0) if layout == "zigzag" else expected)


def test_errors_name_the_argument() -> None:
    tokens = np.zeros((2, 12), int)
    with pytest.raises(ValueError, match=r"multiple of 2 \* 4 = 8 tokens.*got 12 in dimension 1.*pad it"):
        zigzag(tokens, shards=4)
    with pytest.raises(TypeError, match="axis, shards: takes one of the two"):
        zigzag(tokens)
    with pytest.raises(ValueError, match="shards: takes a number of devices, at least 1; got 0"):
        zigzag(tokens, shards=0)
    with pytest.raises(
        ValueError, match=r"dim: takes a dimension of every array; got 2 for an array of shape \(2, 12\)"
    ):
        zigzag(tokens, shards=2, dim=2)
    with pytest.raises(ValueError, match="mesh: takes the mesh with 'seq', by default that of jax.set_mesh; got None"):
        zigzag(tokens, "seq")
    with pytest.raises(ValueError, match="axis: takes axes of the mesh, 'data', 'seq'; got 'sq'"):
        zigzag(tokens, "sq", mesh=mesh_of())
    with pytest.raises(ValueError, match="axis: 'seq' is not an axis of a shard_map around this call"):
        positions(4, "seq")
