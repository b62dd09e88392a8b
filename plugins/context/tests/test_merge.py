"""``merge`` makes the results of parts of the keys those of all keys, with their gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from ejkernel_context import merge
from ejkernel_ops import flash_attention

#: Where the keys are cut; the second part has none that the first rows see.
CUTS = ((0, 5), (5, 8), (8, 13))


def arrays(dtype: str = "float32") -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (2, 7, 4, 8), (2, 13, 2, 8), (2, 13, 2, 8)
    return tuple(3 * jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))


def by_parts(query: Any, key: Any, value: Any) -> Any:
    """Causal attention from position 2 on, by parts whose keys stand where they stood in the whole."""
    parts = [
        flash_attention(query, key[:, a:b], value[:, a:b], q_start=2 - a, causal=True, return_lse=True) for a, b in CUTS
    ]
    return merge(*map(jnp.stack, zip(*parts, strict=True)))


def by_numpy(query: Any, key: Any, value: Any) -> Any:
    q, k, v = (np.asarray(array, np.float64) for array in (query, key, value))
    k, v = (np.repeat(array, 2, axis=2) for array in (k, v))
    logits = np.einsum("bthd,bshd->bhts", q, k) / 8**0.5
    logits = np.where(np.arange(13) <= 2 + np.arange(7)[:, None], logits, -np.inf)
    lse = np.log(np.exp(logits).sum(-1))
    return np.einsum("bhts,bshd->bthd", np.exp(logits - lse[..., None]), v), lse


@pytest.mark.parametrize(("dtype", "atol"), [("float32", 2e-5), ("bfloat16", 5e-2)])
def test_parts_are_the_whole(dtype: str, atol: float) -> None:
    out, lse = by_parts(*arrays(dtype))
    expected_out, expected_lse = by_numpy(*arrays(dtype))
    assert (out.dtype, lse.dtype) == (jnp.dtype(dtype), jnp.float32)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected_out, atol=atol)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-4)


def test_gradients_are_those_of_the_whole() -> None:
    """Of the output and of the lse, through rows that a part does not see."""

    def loss(function: Any, *arrays: Any) -> Any:
        out, lse = function(*arrays)
        return (jnp.sin(out) ** 2).sum() + jnp.cos(lse).sum()

    whole = lambda q, k, v: flash_attention(q, k, v, q_start=2, causal=True, return_lse=True)
    actual, expected = (jax.grad(loss, (1, 2, 3))(function, *arrays()) for function in (by_parts, whole))
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4, rtol=1e-4)


def test_what_a_row_does_not_see_is_not_used() -> None:
    """A part without a key has no weight, even if its numbers are NaN; no part at all gives 0."""
    outs = jnp.array([3.0, jnp.nan]).reshape(2, 1, 1, 1, 1)
    lses = jnp.array([2.5, -jnp.inf]).reshape(2, 1, 1, 1)
    gradient = jax.grad(lambda outs: merge(outs, lses)[0].sum())(outs)
    np.testing.assert_array_equal(merge(outs, lses)[0].ravel(), [3.0])
    np.testing.assert_array_equal(merge(outs, lses)[1].ravel(), [2.5])
    np.testing.assert_array_equal(gradient.ravel(), [1.0, 0.0])
    out, lse = merge(outs, jnp.full_like(lses, -jnp.inf))
    assert (float(out.sum()), float(lse.sum())) == (0.0, -np.inf)


def test_a_cache_that_is_cut_over_devices() -> None:
    query, key, value = arrays()
    mesh = jax.make_mesh((4,), ("cache",), (AxisType.Auto,), devices=jax.devices()[:4])
    key, value = (jnp.pad(array, [(0, 0), (0, 3), (0, 0), (0, 0)], constant_values=jnp.nan) for array in (key, value))
    lengths, sinks = jnp.array([13, 6]), jax.random.normal(jax.random.key(9), query.shape[2:3])

    def attend(query: Any, key: Any, value: Any) -> Any:
        first = jax.lax.axis_index("cache") * key.shape[1]
        positions = {"q_start": lengths - 1 - first, "kv_lengths": jnp.clip(lengths - first, 0, key.shape[1])}
        positions["softmax_aux"] = jnp.where(first == 0, sinks, -jnp.inf)
        results = flash_attention(query[:, :1], key, value, **positions, causal=True, return_lse=True)
        return merge(*jax.lax.all_gather(results, "cache", to="invarying"))

    spec, whole = jax.P(None, "cache"), jax.P()
    on_devices = jax.shard_map(attend, mesh=mesh, in_specs=(whole, spec, spec), out_specs=(whole, whole))
    out, lse = jax.jit(on_devices)(query, key, value)
    for row, length in enumerate([13, 6]):
        one = slice(row, row + 1)
        parts = query[one, :1], key[one, :length], value[one, :length]
        expected = flash_attention(*parts, softmax_aux=sinks, return_lse=True)
        np.testing.assert_allclose(out[one], expected[0], atol=1e-5)
        np.testing.assert_allclose(lse[one], expected[1], atol=1e-5)


def test_wrong_shapes_are_refused() -> None:
    outs = jnp.zeros((2, 1, 5, 4, 8))
    with pytest.raises(ValueError, match=r"lses: takes \(parts, batch, heads, length\) for outs"):
        merge(outs, jnp.zeros((2, 1, 5, 4)))
    with pytest.raises(ValueError, match=r"got \(1, 4, 5\) and \(1, 5, 4, 8\)"):
        merge(outs[0], jnp.zeros((1, 4, 5)))
    with pytest.raises(TypeError, match=r"outs: takes one array with the parts in front, such as jnp.stack\(outs\)"):
        merge([*outs], jnp.zeros((2, 1, 4, 5)))  # type: ignore[arg-type]
