"""The examples that every kernel of ``ragged_paged_attention`` is tested on, and the calls that are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_core import Example

from .tiles import paged_attention_metadata

Arguments = dict[str, Any]
Change = Callable[[Arguments, np.random.Generator], Arguments]

OP = "ragged_paged_attention"
TRANSFORMS = frozenset({"jit", "vmap", "vmap_of_other_axes", "checkpoint", "sharding"})
_ARRAYS = ("num_seqs", "metadata", "softmax_aux", "first_page")
_OPTIONAL = (*_ARRAYS, "max_query_len", "sliding_window", "logits_soft_cap", "split_size")
#: By the word of examples: the dtype of the pages.
EIGHT_BITS = {"fp8_pages": "float8_e4m3fn", "int8_pages": "int8"}


@attrs.frozen
class Sizes:
    """The sizes of a call: of each sequence its new tokens and its keys, and the cache."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    page_size: int = 4
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    v_dim: int | None = None
    #: The tokens behind the last sequence.
    padding: int = 0


#: Decoding, chunks of prompts, several queries each, and all of them in one call.
DECODE = Sizes((1, 1, 1, 1), (9, 1, 20, 13))
MIXED = Sizes((1, 7, 0, 3, 20), (17, 7, 5, 30, 33), padding=3)
#: With pages that kernels for the copy engine take.
ON_PAGES_OF_8 = attrs.evolve(MIXED, page_size=8)
SIZES = {
    "decode": DECODE,
    "a-prompt": Sizes((37,), (37,), 16),
    "mixed": MIXED,
    "speculative": Sizes((4, 4, 3), (40, 9, 21), 8, 8, 2),
    "pages-of-1": Sizes((1, 5), (11, 6), 1),
    "pages-of-256": Sizes((2, 1), (260, 300), 256),
    "no-keys": Sizes((2, 1, 0), (0, 5, 0)),
    "one-head": Sizes((1, 3), (8, 19), 4, 1, 1, 80),
    "queries-of-16-heads": Sizes((1, 2), (30, 12), 8, 16, 1, 128),
    "heads-of-96": Sizes((1, 6), (12, 26), 16, 6, 2, 96),
    "heads-of-192": Sizes((3, 1), (14, 9), 4, 4, 4, 192),
    "heads-of-256": Sizes((1, 2), (9, 13), 4, 2, 1, 256),
}


def examples() -> Iterator[Example]:
    """Small calls of every kind, and those that are measured."""
    for name, sizes in SIZES.items():
        yield example(name, partial(drawn, sizes))
    for name, change in CHANGES.items():
        yield example(name, changed(partial(drawn, ON_PAGES_OF_8), change))
    for dtype in ("float16", "bfloat16", "float64"):
        yield example(f"mixed-{dtype}", partial(drawn, ON_PAGES_OF_8), dtype=dtype)
    for word, dtype in EIGHT_BITS.items():
        narrow = changed(partial(drawn, ON_PAGES_OF_8), partial(_narrow, dtype))
        yield example(word, narrow, word)
        yield example(f"{word}-with-scales-of-heads", changed(narrow, _scales_of_heads), word)
        yield example(f"{word}-of-bfloat16", narrow, word, dtype="bfloat16")
    yield example("fp8-queries", changed(partial(drawn, attrs.evolve(DECODE, page_size=8)), _all_narrow), "fp8_query")
    other = partial(drawn, attrs.evolve(ON_PAGES_OF_8, v_dim=48))
    yield example("pair-with-values-of-48", changed(other, lambda call, rng: {}), "pair", "other v_head_dim")
    yield example("transformed", partial(drawn, DECODE), checks=TRANSFORMS)
    blocks = Sizes((1, 70, 130, 4), (300, 70, 257, 129), 16)
    yield example("blocks-and-tails", partial(drawn, blocks), checks=frozenset({"configurations"}))
    yield from _measured()


def example(name: str, draw: Callable[[int], Arguments], *words: str, dtype: str = "float32", **fields: Any) -> Example:
    given = draw(0)
    pair = {"pair"} if "key_pages" in given else set()
    features = {dtype, *words, *pair, *(word for word in _OPTIONAL if given.get(word) is not None)}
    return Example(name, OP, draw, dtype, features=frozenset(features), **fields)


def drawn(sizes: Sizes, draw: int) -> Arguments:
    """Pages in any order, some of them of no sequence. Entries of tables that are not read are -1, or no page at all.
    What stands in pages behind the lengths is NaN.
    """
    rng = np.random.default_rng([draw, *sizes.queries, *sizes.keys, sizes.dim])
    size, sequences = sizes.page_size, len(sizes.queries)
    counts = [-(-keys // size) for keys in sizes.keys]
    tables = np.full((sequences, max(counts) + 1), -1, np.int32)
    tables[:, -1] = np.iinfo(np.int32).max
    order = rng.permutation(sum(counts) + 2).astype(np.int32)
    shape = (len(order), size, sizes.kv_heads)
    keys, values = (rng.normal(size=(*shape, dim)) for dim in (sizes.dim, sizes.v_dim or sizes.dim))
    is_filled = np.zeros((len(order), size), bool)
    for sequence, count in enumerate(counts):
        tables[sequence, :count], order = order[:count], order[count:]
        for place in range(sizes.keys[sequence]):
            is_filled[tables[sequence, place // size], place % size] = True
    keys[~is_filled], values[~is_filled] = np.nan, np.nan
    starts = np.concatenate([[0], np.cumsum(sizes.queries)]).astype(np.int32)
    call = {
        "query": rng.normal(size=(starts[-1] + sizes.padding, sizes.heads, sizes.dim)),
        "kv_lens": np.array(sizes.keys, np.int32),
        "block_tables": tables,
        "query_start_loc": starts,
    }
    if sizes.v_dim is not None:
        return call | {"key_pages": keys, "value_pages": values}
    return call | {"kv_pages": np.stack([keys, values], 3).reshape(*shape[:2], -1, sizes.dim)}


def changed(draw: Callable[[int], Arguments], change: Change) -> Callable[[int], Arguments]:
    """The same arguments, but for these. None takes one away."""

    def arguments(number: int) -> Arguments:
        before = draw(number)
        after = {**before, **change(before, np.random.default_rng([number, 77]))}
        return {name: value for name, value in after.items() if value is not None}

    return arguments


# -- what is changed -------------------------------------------------------------------------------------------------


def _as_pair(call: Arguments, rng: np.random.Generator) -> Arguments:
    pages = call["kv_pages"]
    return {"kv_pages": None, "key_pages": pages[:, :, ::2], "value_pages": pages[:, :, 1::2]}


def _first_sequences(call: Arguments, rng: np.random.Generator) -> Arguments:
    """Two of five, and what the others have is of no meaning."""
    starts, lengths = call["query_start_loc"].copy(), call["kv_lens"].copy()
    starts[3:], lengths[2:] = (-5, 1000, 3), (-1, 10**6, 2**31 - 1)
    return {"num_seqs": np.int32(2), "query_start_loc": starts, "kv_lens": lengths}


def _of_a_layer(call: Arguments, rng: np.random.Generator) -> Arguments:
    """The pages of the last of three layers."""
    pages = call["kv_pages"]
    others = np.full((2 * pages.shape[0], *pages.shape[1:]), np.nan)
    return {"kv_pages": np.concatenate([others, pages]), "first_page": np.int32(2 * pages.shape[0])}


def _shared_pages(call: Arguments, rng: np.random.Generator) -> Arguments:
    """Two sequences begin with the same page."""
    tables = call["block_tables"].copy()
    tables[3, 0] = tables[4, 0]
    return {"block_tables": tables}


def _metadata(call: Arguments, rng: np.random.Generator) -> Arguments:
    tokens = call["query"].shape[0]
    return {"metadata": paged_attention_metadata(call["kv_lens"], call["query_start_loc"], num_tokens=tokens)}


def _sinks(count: int, call: Arguments, rng: np.random.Generator) -> Arguments:
    return {"softmax_aux": rng.normal(size=(4, count) if count else 4)}


CHANGES: dict[str, Change] = {
    "pair": _as_pair,
    "first-two-sequences": _first_sequences,
    "first-page": _of_a_layer,
    "shared-pages": _shared_pages,
    "metadata": _metadata,
    "sinks": partial(_sinks, 0),
    "three-sinks": partial(_sinks, 3),
    "window": lambda call, rng: {"sliding_window": (6, 0)},
    "window-to-both-sides": lambda call, rng: {"sliding_window": (5, 2), "causal": False},
    "full": lambda call, rng: {"causal": False},
    "soft-cap": lambda call, rng: {"logits_soft_cap": 1.5},
    "scale": lambda call, rng: {"softmax_scale": 0.3},
    "at-most-20-queries": lambda call, rng: {"max_query_len": 20},
    "parts-of-128": lambda call, rng: {"split_size": 128},
}


def _narrow(dtype: str, call: Arguments, rng: np.random.Generator) -> Arguments:
    """Pages of 8 bits, of any values, with one scale."""
    pages = rng.integers(-100, 100, call["kv_pages"].shape).astype(jnp.dtype(dtype))
    return {"kv_pages": pages, "k_scale": 0.02, "v_scale": np.float32(0.03)}


def _scales_of_heads(call: Arguments, rng: np.random.Generator) -> Arguments:
    return {"k_scale": np.array([0.01, 0.03], np.float32), "v_scale": np.array([0.5, 0.02], np.float32)}


def _all_narrow(call: Arguments, rng: np.random.Generator) -> Arguments:
    fp8 = jnp.float8_e4m3fn
    query = (8 * rng.normal(size=call["query"].shape)).astype(fp8)
    scales = {"q_scale": 0.125, "k_scale": 1.0, "v_scale": 2.0}
    return {"query": query, "kv_pages": rng.normal(size=call["kv_pages"].shape).astype(fp8), **scales}


# -- the calls that are measured -------------------------------------------------------------------------------------


def _measured() -> Iterator[Example]:
    uses = frozenset({"benchmark"})
    for sequences, keys, queries in ((16, 4096, 1), (2, 2048, 512)):
        name = f"{sequences} x {keys} keys, {queries} queries"
        draw = partial(large, sequences, keys, queries)
        yield Example(name, OP, draw, "bfloat16", checks=frozenset(), uses=uses | {"resources"})


def large(
    sequences: int,
    keys: int,
    queries: int,
    draw: int,
    heads: int = 32,
    kv_heads: int = 8,
    dim: int = 128,
    page_size: int = 64,
    **options: Any,
) -> Arguments:
    """Sequences of as many keys, in pages of any order, and of as many new tokens."""
    numbers = jax.random.split(jax.random.key(draw), 3)
    table = -(-keys // page_size)
    pages = sequences * table
    return {
        "query": jax.random.normal(numbers[0], (sequences * queries, heads, dim), jnp.bfloat16),
        "kv_pages": jax.random.normal(numbers[1], (pages, page_size, 2 * kv_heads, dim), jnp.bfloat16),
        "kv_lens": jnp.full(sequences, keys, jnp.int32),
        "block_tables": jax.random.permutation(numbers[2], pages).reshape(sequences, table).astype(jnp.int32),
        "query_start_loc": jnp.arange(sequences + 1, dtype=jnp.int32) * queries,
        "max_query_len": queries,
        **options,
    }
