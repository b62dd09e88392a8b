"""Masks by ranges of keys and indices of tokens, as tokamax has them, by positions of a cache."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_ops
from ejkernel_ops import flash_attention
from tests.pages import blocks

PAGE = Path(__file__).parents[3] / "docs" / "coming-from-elsewhere.md"
BATCH, T, S = 2, 5, 19
STARTS, ENDS, FIRSTS = (np.array(values, np.int32)[:, None, None] for values in ([3, 0], [17, 8], [9, 2]))
Q_INDICES = FIRSTS + np.arange(T, dtype=np.int32)
#: A ring: the slots' tokens in another order, and one that was never written.
K_INDICES = np.stack([np.roll(np.arange(S), 7), np.arange(S)[::-1]])[:, None].astype(np.int32)


def inputs() -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(11), 4)
    shapes = (BATCH, T, 4, 8), (BATCH, S, 2, 8), (BATCH, S, 2, 8), (BATCH, T, 4, 8)
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def positions_of(*arguments: Any, **options: Any) -> jax.Array:
    """The function of the page."""
    code = next(block.content for block in blocks(PAGE) if re.search(r"^def positions_of", block.content, re.M))
    names: dict[str, Any] = {"jax": jax, "jnp": jnp, "flash_attention": ejkernel_ops.flash_attention}
    exec(code.split("\n\n\n")[0], names)
    result: jax.Array = names["positions_of"](*arguments, **options)
    return result


#: By name: the mask and the indices of tokamax, and the options here.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "k_end": ({"k_end": ENDS}, {"q_start": 0, "kv_lengths": ENDS[:, 0, 0]}),
    "k_end, causal": (
        {"k_end": ENDS, "is_causal": True},
        {"q_start": 0, "kv_lengths": ENDS[:, 0, 0], "causal": True},
    ),
    "k_start and k_end": (
        {"k_start": STARTS, "k_end": ENDS},
        {"q_start": 0, "kv_positions": positions_of(np.arange(S), STARTS, ENDS)},
    ),
    "q_indices": (
        {"is_causal": True, "q_indices": Q_INDICES},
        {"causal": True, "q_start": FIRSTS[:, 0, 0]},
    ),
    "q_indices, k_end": (
        {"is_causal": True, "q_indices": Q_INDICES, "k_end": ENDS},
        {"causal": True, "q_start": FIRSTS[:, 0, 0], "kv_lengths": ENDS[:, 0, 0]},
    ),
    "k_indices": (
        {"is_causal": True, "q_indices": Q_INDICES, "k_indices": K_INDICES},
        {"causal": True, "q_start": FIRSTS[:, 0, 0], "kv_positions": positions_of(K_INDICES)},
    ),
    "k_indices, k_start, k_end": (
        {"is_causal": True, "q_indices": Q_INDICES, "k_indices": K_INDICES, "k_start": STARTS, "k_end": ENDS},
        {"causal": True, "q_start": FIRSTS[:, 0, 0], "kv_positions": positions_of(K_INDICES, STARTS, ENDS)},
    ),
    "a window by k_start": (
        {"is_causal": True, "q_indices": Q_INDICES, "k_start": Q_INDICES - 3, "k_indices": K_INDICES},
        {
            "causal": True,
            "sliding_window": (3, 0),
            "q_start": FIRSTS[:, 0, 0],
            "kv_positions": positions_of(K_INDICES),
        },
    ),
}


def seen_by(
    k_start: Any = 0, k_end: Any = S, is_causal: bool = False, q_indices: Any = None, k_indices: Any = None
) -> Any:
    """Which query sees which key, (B, T, S), in loops over the definition."""
    rows = np.broadcast_to(np.arange(T) if q_indices is None else q_indices, (BATCH, 1, T))
    columns = np.broadcast_to(np.arange(S) if k_indices is None else k_indices, (BATCH, 1, S))
    first, end = (np.broadcast_to(limit, (BATCH, 1, T)) for limit in (k_start, k_end))
    seen = np.zeros((BATCH, T, S), bool)
    for b, i, j in itertools.product(range(BATCH), range(T), range(S)):
        is_in_range = first[b, 0, i] <= columns[b, 0, j] < end[b, 0, i]
        seen[b, i, j] = is_in_range and (not is_causal or columns[b, 0, j] <= rows[b, 0, i])
    return seen


def in_float64(seen: Any, query: Any, key: Any, value: Any) -> Any:
    """Each query head has a key head of its own."""
    logits = np.einsum("bthd,bshd->bhts", query, key) / np.sqrt(query.shape[-1])
    weights = np.where(seen[:, None], np.exp(logits), 0)
    total = weights.sum(-1, keepdims=True)
    return np.einsum("bhts,bshd->bthd", weights / np.where(total, total, 1), value)


@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    theirs, here = CASES[name]
    query, key, value, _ = inputs()
    wide = [np.asarray(array, np.float64) for array in (query, key, value)]
    wide[1:] = [array.repeat(2, axis=2) for array in wide[1:]]
    seen = seen_by(**theirs)
    assert seen.any()
    assert not seen.all()
    out = flash_attention(query, key, value, **here)
    np.testing.assert_allclose(out, in_float64(seen, *wide), atol=2e-6)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_of_tokamax(name: str) -> None:
    base = base_of_tokamax()
    theirs, here = CASES[name]
    indices = {name: jnp.array(array) for name, array in theirs.items() if name.endswith("indices")}
    limits = {name: jnp.array(theirs[name]) for name in ("k_start", "k_end") if name in theirs}
    mask = base.Mask(**limits, is_causal=theirs.get("is_causal", False))
    has_keys = jnp.array(seen_by(**theirs).any(-1))[..., None, None]  # tokamax gives other rows the mean of all values
    assert_same(
        lambda *arrays: flash_attention(*arrays, **here) * has_keys,
        lambda *arrays: base.DotProductAttention()(*arrays, mask=mask, **indices) * has_keys,
    )


def test_other_ranges_are_masks_of_tokamax() -> None:
    """Ends of their own for each query, each head and each key."""
    base = base_of_tokamax()
    ends = jax.random.randint(jax.random.key(12), (BATCH, 4, T), 1, S)
    q_end = jax.random.randint(jax.random.key(13), (BATCH, 1, S), 1, 20).at[:, :, 0].set(99)  # of the first key: never
    mask = base.Mask(k_end=ends, q_end=q_end)
    here = {"attention_mask": mask.as_array(jnp.array(Q_INDICES), S)}
    assert_same(
        lambda *arrays: flash_attention(*arrays, **here),
        lambda *arrays: base.DotProductAttention()(*arrays, mask=mask, q_indices=jnp.array(Q_INDICES)),
    )


def base_of_tokamax() -> Any:
    """The module of its attention. It reads flags of absl, which nobody has parsed in a test."""
    base = pytest.importorskip("tokamax._src.ops.attention.base", reason="tokamax is not in the environment")
    pytest.importorskip("absl.flags").FLAGS.mark_as_parsed()
    return base


def assert_same(function: Any, other: Any) -> None:
    """In the output and the gradients of a weighted sum of it."""
    *arrays, weights = inputs()

    def results(function: Any) -> Any:
        loss = lambda *arrays: (function(*arrays) * weights).sum()
        return function(*arrays), jax.grad(loss, (0, 1, 2))(*arrays)

    pairs = zip(*(jax.tree.leaves(results(f)) for f in (function, other)), strict=True)
    for actual, expected in pairs:
        np.testing.assert_allclose(actual, expected, atol=1e-5)
