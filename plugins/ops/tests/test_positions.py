"""Attention against a cache: ``q_start``, ``kv_lengths`` and ``kv_positions``."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_core
from ejkernel_core import registry
from ejkernel_ops import flash_attention
from ejkernel_ops.flash_attention.positions import ring_positions
from ejkernel_ops.flash_attention.random_calls import check
from ejkernel_xla.flash_attention import Config

RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal(shape, np.float32) for shape in ((2, 3, 4, 8), (2, 9, 2, 8), (2, 9, 2, 5)))
IDS = np.arange(9, dtype=np.int32)
attend = partial(flash_attention, Q, K, V)


@pytest.mark.parametrize("seed", range(0, 100, 7))
def test_random_calls_of_the_reference(seed: int) -> None:
    check(seed, backend="reference")


def test_the_reference_in_float64() -> None:
    with jax.enable_x64(True):
        check(3, backend="reference", dtype="float64")


@pytest.mark.parametrize("window", [None, (2, 0), 3])
def test_by_default_the_last_query_stands_at_the_last_key(window: Any) -> None:
    options = {"causal": True, "sliding_window": window}
    expected = attend(**options)
    close = partial(np.testing.assert_allclose, desired=expected, rtol=1e-5, atol=1e-6)
    for start in (6, np.int8(6), jnp.array([6, 6])):
        close(attend(q_start=start, **options))
    close(attend(kv_lengths=9, **options))
    close(attend(kv_positions=np.stack([IDS, IDS]), q_start=6, **options))


def test_a_length_is_a_call_with_fewer_keys() -> None:
    out, lse = attend(kv_lengths=jnp.array([7, 4]), causal=True, return_lse=True)
    for b, length in enumerate((7, 4)):
        alone = flash_attention(Q[b : b + 1], K[b : b + 1, :length], V[b : b + 1, :length], causal=True)
        np.testing.assert_allclose(out[b : b + 1], alone, rtol=1e-5, atol=1e-6)
    assert not attend(kv_lengths=0).any()
    assert np.isfinite(lse).all()


def test_queries_before_the_first_key_see_nothing() -> None:
    out, lse = attend(q_start=-2, causal=True, return_lse=True)
    assert not out[:, :2].any()
    assert (lse[..., :2] == -jnp.inf).all()
    np.testing.assert_allclose(out[:, 2], jnp.repeat(V[:, 0], 2, axis=1), rtol=1e-6)


def test_a_window_is_around_the_position() -> None:
    """Wider than all tokens of the call, in a ring whose keys are far apart."""
    positions = np.array([[5000, -1, 100, 3, 9000, 4990, 0, 2**29 - 1, 4995]] * 2, np.int32)
    options = {"kv_positions": positions, "q_start": 5000 - 2, "sliding_window": (4900, 0)}
    keys = [0, 2, 5, 8]  # position 100 is 4900 before the last query; 98 would be before the first one
    expected = flash_attention(
        Q, K[:, keys], V[:, keys], attention_mask=positions[0, keys] <= np.array([4998, 4999, 5000])[:, None]
    )
    np.testing.assert_allclose(attend(causal=True, **options), expected, rtol=1e-5, atol=1e-6)


def test_a_ring_is_a_cache_of_the_last_keys() -> None:
    """One step after the other, in a ring of the window's size, as over all keys."""
    keys, values = (RNG.standard_normal((2, 30, 2, 8), np.float32) for _ in range(2))
    queries = RNG.standard_normal((2, 30, 4, 8), np.float32)
    expected = flash_attention(queries, keys, values, causal=True, sliding_window=(4, 0))
    ring = (jnp.full((2, 5, 2, 8), jnp.nan), jnp.full((2, 5, 2, 8), jnp.nan))

    def step(ring: Any, inputs: Any) -> Any:
        t, query, key, value = inputs
        ring = tuple(cache.at[:, t % 5].set(new) for cache, new in zip(ring, (key, value), strict=True))
        positions = ring_positions(jnp.full(2, t + 1), 5)
        options = {"kv_positions": positions, "q_start": t, "causal": True, "sliding_window": (4, 0)}
        return ring, flash_attention(query[:, None], *ring, **options)[:, 0]

    by_step = (jnp.arange(30), *(jnp.swapaxes(x, 0, 1) for x in (queries, keys, values)))
    _, out = jax.lax.scan(step, ring, by_step)
    np.testing.assert_allclose(jnp.swapaxes(out, 0, 1), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ends", [5, jnp.int32(5), [5.0, 6.0], np.zeros((2, 1), int)])
def test_the_ends_of_rings_are_integers_of_each_batch_entry(ends: Any) -> None:
    with pytest.raises(ValueError, match="ends: takes integers, one for each batch entry; got"):
        ring_positions(ends, 4)


def test_the_ends_of_rings_may_be_a_list() -> None:
    assert ring_positions([6, 3], 4).tolist() == [[4, 5, 2, 3], [0, 1, 2, -1]]


def test_only_slots_without_a_key_may_hold_anything() -> None:
    """A key that is masked by its position alone is multiplied by a weight of 0, as without positions."""
    value = jnp.asarray(V).at[0, 8].set(jnp.nan)
    assert np.isnan(flash_attention(Q, K, value, q_start=3, causal=True)[0]).all()
    assert np.isfinite(flash_attention(Q, K, value, q_start=3, kv_lengths=8, causal=True)).all()


@pytest.mark.parametrize("backend", ["reference", None])
@pytest.mark.parametrize("shares_the_cache", [True, False])
def test_vmap_over_positions(shares_the_cache: bool, backend: str | None) -> None:
    """Each entry has a start and a length of its own; the cache is mapped, or the same for all."""
    starts, lengths = jnp.array([4, -1, 6]), jnp.array([[7, 2], [0, 9], [9, 9]])
    scales = jnp.array([1.0, -2.0, 0.5])

    def total(scale: Any, key: Any, start: Any, length: Any) -> Any:
        options = {"q_start": start, "kv_lengths": length, "causal": True, "backend": backend}
        return (flash_attention(scale * Q, key, V, **options) ** 2).sum()

    keys = K if shares_the_cache else jnp.stack([K, 2 * K, K[:, ::-1]])
    step = jax.value_and_grad(total, argnums=(0, 1))
    mapped = jax.jit(jax.vmap(step, (0, None if shares_the_cache else 0, 0, 0)))(scales, keys, starts, lengths)
    for n in range(3):
        alone = step(scales[n], keys if shares_the_cache else keys[n], starts[n], lengths[n])
        for actual, expected in zip(jax.tree.leaves(mapped), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(actual[n], expected, rtol=1e-4, atol=1e-5)


def test_the_time_follows_the_keys_that_are_seen() -> None:
    """Blocks that no query sees are not read: with NaN in all their keys, the results are finite."""
    keys, values = (np.full((2, 64, 2, 8), np.nan, np.float32) for _ in range(2))
    keys[:, 24:32], values[:, 24:32] = RNG.standard_normal((2, 2, 8, 2, 8), np.float32)
    options = {"q_start": 28, "sliding_window": (0, 0), "cfg": Config(8, 8)}
    out = jax.jit(partial(flash_attention, **options))(Q, keys, values)
    np.testing.assert_allclose(out, np.repeat(values[:, 28:31], 2, axis=2), rtol=1e-5)


BOUNDS = {"cum_seqlens_q": np.array([0, 3]), "cum_seqlens_k": np.array([0, 9])}
PACKED = {"query": Q[0], "key": K[0], "value": V[0], **BOUNDS}
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a float start": ({"q_start": 1.0}, TypeError, "q_start: takes integers; got float32"),
    "boolean lengths": ({"kv_lengths": np.array([True, False])}, TypeError, "kv_lengths: takes integers; got bool"),
    "float positions": (
        {"q_start": 1, "kv_positions": np.zeros((2, 9), np.float32)},
        TypeError,
        "kv_positions: takes integers; got float32",
    ),
    "starts of another batch": (
        {"q_start": np.zeros(3, np.int32)},
        ValueError,
        "q_start: takes one integer, or one for each of 2 batch entries; got (3,)",
    ),
    "lengths of rank 2": (
        {"kv_lengths": np.zeros((2, 1), np.int32)},
        ValueError,
        "kv_lengths: takes one integer, or one for each of 2 batch entries; got (2, 1)",
    ),
    "positions of rank 1": (
        {"q_start": 0, "kv_positions": IDS},
        ValueError,
        "kv_positions: takes (batch, kv_len); got shape (9,)",
    ),
    "positions of another batch": (
        {"q_start": 0, "kv_positions": IDS[None]},
        ValueError,
        "kv_positions: batch must be 2, as in query; got 1",
    ),
    "positions of other slots": (
        {"q_start": 0, "kv_positions": np.zeros((2, 8), np.int32)},
        ValueError,
        "kv_positions: kv_len must be 9, as in key; got 8",
    ),
    "positions without a start": (
        {"kv_positions": np.stack([IDS, IDS])},
        ValueError,
        "q_start: kv_positions need the position of the first query; got None",
    ),
    "positions and lengths": (
        {"q_start": 0, "kv_lengths": 3, "kv_positions": np.stack([IDS, IDS])},
        ValueError,
        "kv_lengths: takes None with kv_positions",
    ),
    "a start of packed sequences": ({**PACKED, "q_start": 0}, ValueError, "q_start: takes None with cum_seqlens_q"),
    "lengths of packed sequences": ({**PACKED, "kv_lengths": 1}, ValueError, "kv_lengths: takes None with cum_seqlens"),
    "positions of packed sequences": (
        {**PACKED, "kv_positions": IDS[None]},
        ValueError,
        "kv_positions: takes None with cum_seqlens_q",
    ),
    "their usual name elsewhere": ({"cache_seqlens": 3}, TypeError, "'cache_seqlens' is called 'kv_lengths' here"),
    "an offset": ({"q_offset": 3}, TypeError, "'q_offset' is called 'q_start' here"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named(case: str) -> None:
    arguments, error, message = WRONG[case]
    arguments = {"query": Q, "key": K, "value": V, **arguments}
    with pytest.raises(error, match=re.escape(message)):
        flash_attention(**arguments)
    with pytest.raises(error, match=re.escape(message)):
        ejkernel_core.call("flash_attention", **arguments)


DEFINED = {
    "lengths": {"kv_lengths": np.array([0, 9])},
    "a length": {"kv_lengths": 9},
    "a start": {"q_start": -(2**29)},
    "empty slots": {"q_start": 3, "kv_positions": np.array([[-1] * 9, [-1, -1, 3, 2, 0, 2**29 - 1, 5, -1, -1]])},
}
UNDEFINED: dict[str, tuple[dict[str, Any], str]] = {
    "a length below 0": (
        {"kv_lengths": np.array([3, -1])},
        "kv_lengths[1] must be from 0 to 9, the number of slots of key; got -1",
    ),
    "a length behind the cache": ({"kv_lengths": 10}, "kv_lengths must be from 0 to 9, the number of slots"),
    "a position below -1": (
        {"q_start": 0, "kv_positions": np.array([[0] + [-1] * 8, [-1] * 8 + [-2]])},
        f"kv_positions[1, 8] must be from -1 to {2**29 - 1}; got -2",
    ),
    "a position twice": (
        {"q_start": 0, "kv_positions": np.array([[0] + [-1] * 8, [7, -1, 3, -1, 4, 3, 7, -1, 9]])},
        "kv_positions[1, 5] must be another position than kv_positions[1, 2]; got 3 twice",
    ),
    "a start far away": ({"q_start": np.array([0, 2**29])}, f"q_start[1] must be from -{2**29} to {2**29 - 1}"),
    "a length that int32 does not hold": ({"kv_lengths": np.array([3, 2**32])}, "kv_lengths[1] must be from 0 to 9"),
}


@pytest.mark.parametrize("case", DEFINED)
def test_defined_values_are_valid(case: str) -> None:
    np.testing.assert_array_equal(attend(validate=True, **DEFINED[case]), attend(**DEFINED[case]))


@pytest.mark.parametrize("case", UNDEFINED)
def test_undefined_values_are_named(case: str) -> None:
    arguments, message = UNDEFINED[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        attend(validate=True, **arguments)


def test_kernels_get_a_start_wherever_there_is_a_position() -> None:
    calls: dict[str, dict[str, Any]] = {
        "q_start": {"q_start": 3},
        "q_start, kv_lengths": {"kv_lengths": np.int64(3)},
        "q_start, kv_positions": {"q_start": np.array([1, 2]), "kv_positions": np.zeros((2, 9), np.int16)},
        "": {},
    }
    for present, arguments in calls.items():
        inv = registry.plan("flash_attention", Q, K, V, **arguments).invocation
        arrays = {n: inv[n] for n in ("q_start", "kv_lengths", "kv_positions") if inv[n] is not None}
        assert ", ".join(arrays) == present
        for name, array in arrays.items():
            assert array.dtype == np.int32, name
            assert array.shape == ((2, 9) if name == "kv_positions" else (2,)), name


def test_calls_without_positions_have_none_and_a_window_of_all_tokens() -> None:
    inv = registry.plan("flash_attention", Q, K, V, causal=True, sliding_window=100).invocation
    assert inv["sliding_window"] == (12, 12)
