"""The dense caches of docs/decoding.md are written in place: values, memory, and copies in the compiled program."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_ops import flash_attention
from tests.pages import blocks

PAGE = Path(__file__).parents[3] / "docs" / "decoding.md"
BATCH, HEADS, KV_HEADS, DIM, LEFT = 2, 4, 2, 16, 9
#: Of a cache and of a ring. Large beside all else in a program, and no multiple of a block of keys.
SLOTS, RING = 16411, 12301
#: How many tokens the rows of a cache have before the first step, and those of a ring, in which the second row wraps.
FILLED = {"cache": np.array([900, 0], np.int32), "ring": np.array([5, RING - 3], np.int32)}
Step = Callable[[Any, Any], tuple[Any, jax.Array]]


def names_of_page() -> dict[str, Any]:
    """The functions of the page, for caches of these sizes."""
    attention = lambda *arrays, **options: flash_attention(*arrays, **options, backend="xla")
    names: dict[str, Any] = {"jax": jax, "jnp": jnp, "flash_attention": attention}
    names |= {"BATCH": BATCH, "RING": RING, "LEFT": LEFT, "QUERIES": RING - LEFT}
    definitions = r"^from ejkernel_ops\S* import ring_\w+|^def (?:write|attend|attend_in_ring)\(.*?(?=\n\n\n|\Z)"
    for block in blocks(PAGE):
        if block.language == "python":
            for code in re.findall(definitions, block.content, re.M | re.S):
                exec(code, names)
    return names


def step_of(kind: str) -> Step:
    """From the two arrays and the lengths before it, and the new query, key and value."""
    attend = names_of_page()["attend" if kind == "cache" else "attend_in_ring"]

    def step(carry: Any, new: Any) -> tuple[Any, jax.Array]:
        caches, lengths, out = attend(*carry, *new)
        return (caches, lengths), out

    return step


def tokens(seed: int, *shape: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(seed), 3)
    return tuple(
        jax.random.normal(key, (*shape, heads, DIM))
        for key, heads in zip(keys, (HEADS, KV_HEADS, KV_HEADS), strict=True)
    )


def filled(kind: str, seed: int) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray, list[list[np.ndarray]]]:
    """A cache, the lengths of its rows, and the keys and values of each row by position. What is empty is NaN."""
    slots = SLOTS if kind == "cache" else RING
    rng = np.random.default_rng(seed)
    arrays = np.full((2, BATCH, slots, KV_HEADS, DIM), np.nan, np.float32)
    rows = [list(rng.normal(size=(2, length, KV_HEADS, DIM)).astype(np.float32)) for length in FILLED[kind]]
    for b, length in enumerate(FILLED[kind]):
        arrays[:, b, np.arange(length) % slots] = rows[b]
    return (arrays[0], arrays[1]), FILLED[kind], rows


def assert_in_place(program: Any, carry: Any, *others: Any) -> tuple[Any, Any]:
    """The results, of a program that copies no cache, has no room for one, and returns the memory that it was given."""
    arrays = [jnp.array(x) for x in jax.tree.leaves(carry)]
    caches = [array for array in arrays if array.ndim == 4]
    places = [cache.unsafe_buffer_pointer() for cache in caches]
    given = jax.tree.unflatten(jax.tree.structure(carry), arrays)
    compiled = jax.jit(program, donate_argnums=0).lower(given, *others).compile()
    shapes = {",".join(map(str, cache.shape)) for cache in caches}
    assert not re.findall(rf"= f32\[(?:{'|'.join(shapes)})\]\S* copy\(", compiled.as_text())
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(cache.nbytes for cache in caches)
    assert memory.temp_size_in_bytes < caches[0].nbytes / 2
    new, outs = compiled(given, *others)
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(new) if x.ndim == 4] == places
    return new, outs


def assert_right(kind: str, new: Any, outs: Any, rows: Any, given: Any) -> None:
    """Beside attention over each row's tokens alone, without a cache; the slots that were not written are as before."""
    window = {} if kind == "cache" else {"sliding_window": (LEFT, 0)}
    queries, *news = (np.asarray(array) for array in given)
    for b, old in enumerate(rows):
        keys, values = (np.concatenate([one, more[b]]) for one, more in zip(old, news, strict=True))
        expected = flash_attention(queries[b][None], keys[None], values[None], causal=True, **window)
        np.testing.assert_allclose(outs[b], expected[0], atol=2e-5)
        slots = new[0].shape[1]
        for array, right in zip(new, (keys, values), strict=True):
            whole = np.full(array.shape[1:], np.nan, np.float32)
            for place in range(len(right)):
                whole[place % slots] = right[place]
            np.testing.assert_array_equal(array[b], whole)


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("kind", ["cache", "ring"])
def test_a_step(kind: str, length: int) -> None:
    caches, lengths, rows = filled(kind, 3)
    given = tokens(4, BATCH, length)
    (new, ends), outs = assert_in_place(step_of(kind), (caches, lengths), given)
    assert_right(kind, new, outs, rows, given)
    np.testing.assert_array_equal(ends, lengths + length)


@pytest.mark.parametrize("kind", ["cache", "ring"])
def test_steps_in_a_scan(kind: str) -> None:
    """Five steps of one token, after which the ring's second row has gone around its end."""
    caches, lengths, rows = filled(kind, 5)
    steps = tokens(6, 5, BATCH, 1)
    step = step_of(kind)
    scan = lambda carry, steps: jax.lax.scan(step, carry, steps)
    (new, ends), outs = assert_in_place(scan, (caches, lengths), steps)
    joined = [jnp.moveaxis(array[:, :, 0], 0, 1) for array in (*steps, outs)]
    assert_right(kind, new, joined[3], rows, joined[:3])
    np.testing.assert_array_equal(ends, lengths + 5)


def test_layers_of_both_kinds_in_a_scan() -> None:
    """Each has arrays of its own. The second attends to what the first returns."""
    layers = {kind: filled(kind, seed) for seed, kind in enumerate(FILLED)}
    steps = {kind: step_of(kind) for kind in FILLED}
    news = tokens(8, 3, BATCH, 1)

    def step(carry: Any, new: Any) -> Any:
        query, key, value = new
        carry = dict(carry)
        for kind, one in steps.items():
            carry[kind], query = one(carry[kind], (query, key, value))
        return carry, query

    carry = {kind: (caches, lengths) for kind, (caches, lengths, _) in layers.items()}
    new, outs = assert_in_place(lambda carry, news: jax.lax.scan(step, carry, news), carry, news)
    queries, keys, values = (jnp.moveaxis(array[:, :, 0], 0, 1) for array in news)
    first = jnp.stack([_whole(rows, queries[b], keys[b], values[b]) for b, rows in enumerate(layers["cache"][2])])
    assert_right("cache", new["cache"][0], first, layers["cache"][2], (queries, keys, values))
    assert_right("ring", new["ring"][0], jnp.moveaxis(outs[:, :, 0], 0, 1), layers["ring"][2], (first, keys, values))


def _whole(old: Any, query: Any, key: Any, value: Any) -> jax.Array:
    keys, values = (jnp.concatenate([one, new])[None] for one, new in zip(old, (key, value), strict=True))
    return flash_attention(query[None], keys, values, causal=True)[0]


def test_a_program_that_keeps_the_old_cache_is_found() -> None:
    """The check fails where a copy is needed: here two steps from one cache."""
    caches, lengths, _ = filled("cache", 3)
    step = step_of("cache")

    def twice(carry: Any, new: Any) -> Any:
        other = step(carry, tuple(2 * array for array in new))[1]
        new_carry, out = step(carry, new)
        return new_carry, out + other

    with pytest.raises(AssertionError, match=r"copy\("):
        assert_in_place(twice, (caches, lengths), tokens(4, BATCH, 1))
