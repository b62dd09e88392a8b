"""Few queries against a cache: all queries of the heads that share a key head are the rows of one tile.

A block has the keys of all heads, and each is fetched once. With two splits, the grid has a row of steps for each core
of a chip, and the results are parts, which `_combine` adds up.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel_core import Invocation
from ejkernel_ops.flash_attention.geometry import pad_to
from ejkernel_pallas_tpu.flash_attention import _operands
from ejkernel_pallas_tpu.flash_attention._problem import LANES, Arguments, Problem
from ejkernel_pallas_tpu.flash_attention._scalars import read_entry
from ejkernel_pallas_tpu.flash_attention._steps import FIRST, FULL, LAST, VISIBLE, is_set
from ejkernel_pallas_tpu.flash_attention._tile import in_base_2, position_mask, zero_unfilled
from ejkernel_pallas_tpu.flash_attention_decode._visits import Visits
from ejkernel_pallas_tpu.launch import Launch, Operand, Output, Scratch, grid_indices
from ejkernel_pallas_tpu.online_softmax import heads
from ejkernel_pallas_tpu.online_softmax.products import matmul, matmul_transposed, widen
from ejkernel_pallas_tpu.online_softmax.statistics import LOWEST, divisors, natural_lse, weigh


def attend(inv: Invocation, p: Problem, visits: Visits, splits: int) -> Launch:
    """The launch. One split has the results: the output and, if it is needed, the lse. Two have sums of values, the
    maximum of each row, and the sum of its weights. ``p.q_block`` are the rows of a tile.
    """

    def tile_map(split: Any, step: Any, table: Any, fetched: Any, numbers: Any) -> tuple[Any, ...]:
        source = visits.word(fetched, split, step)
        entry = visits.batch_of(visits.word(table, split, step))
        return split, entry, visits.batch_of(source), visits.block_of(source)

    count, rows = p.kv_heads, p.q_block
    out_dtype = jnp.dtype(p.dtype if splits == 1 else jnp.float32)
    outputs = {"out": _by_entry(splits, p, p.v_dim, out_dtype)}
    if splits > 1:
        outputs |= dict.fromkeys(("maxima", "totals"), _by_entry(splits, p, LANES, jnp.dtype(jnp.float32)))
    elif inv.needs("lse"):
        outputs["lse"] = _by_entry(splits, p, LANES, jnp.dtype(jnp.float32))
    return Launch(
        name="flash_attention_decode",
        kernel=lambda table, fetched, numbers, refs: _kernel(p, visits, splits, outputs, table, numbers, refs),
        grid=(splits, visits.count),
        semantics=("parallel" if splits > 1 else "arbitrary", "arbitrary"),
        tile_map=tile_map,
        operands=_inputs(inv, p),
        outputs=outputs,
        scratch={
            **dict.fromkeys(("row_max", "row_sum"), Scratch((count, rows, LANES))),
            "sums": Scratch((count, rows, p.v_dim)),
            "key_words": heads.words(p.dtype, count, p.k_block, p.dim),
            "value_words": heads.words(p.dtype, count, p.k_block, p.v_dim),
        },
    )


def _by_entry(splits: int, p: Problem, width: int, dtype: Any) -> Output:
    shape = (splits, p.batch, p.kv_heads, p.q_block, width)
    return Output(shape, dtype, (None, None, *shape[2:]), lambda split, entry, b, j: (split, entry, 0, 0, 0))


def _inputs(a: Arguments, p: Problem) -> dict[str, Operand]:
    inputs = {"query": _by_group(a["query"], p), "key": _by_slots(a["key"], p), "value": _by_slots(a["value"], p)}
    if p.empty == "positions":
        positions = pad_to(a["kv_positions"][:, None], 2, p.k_count * p.k_block, -1)
        inputs["k_positions"] = Operand(positions, (None, 1, p.k_block), lambda split, entry, b, j: (b, 0, j))
    if p.sinks:
        inputs["sinks"] = _sinks(a["softmax_aux"], p)
    return inputs


def _by_group(query: jax.Array, p: Problem) -> Operand:
    """(batch, key heads, rows, dim): for each query the heads of the group, then padding."""
    x = query.reshape(p.batch, p.q_length, p.kv_heads, p.group, p.dim).swapaxes(1, 2)
    x = pad_to(x.reshape(p.batch, p.kv_heads, p.q_length * p.group, p.dim), 2, p.q_block)
    return Operand(x, (None, *x.shape[1:]), lambda split, entry, b, j: (entry, 0, 0, 0))


def _by_slots(x: jax.Array, p: Problem) -> Operand:
    """(batch, slots * heads, dim), which is how a cache lies in memory. What is behind its end is not padded: blocks of
    that part hold anything. A cache that is shorter than a block is padded.
    """
    x = pad_to(x, 1, max(p.k_block, p.k_length))
    x = x.reshape(p.batch, -1, x.shape[3])
    block = (None, p.k_block * p.kv_heads, x.shape[2])
    return Operand(x, block, lambda split, entry, b, j: (b, j, 0))


def _sinks(sinks: jax.Array, p: Problem) -> Operand:
    """The two numbers that the general kernel has of the sinks of a head, for each row: (key heads, 2, rows, lanes)."""
    of_heads = _operands.sinks(sinks).array.reshape(p.kv_heads, p.group, 2, LANES).swapaxes(1, 2)
    x = pad_to(jnp.tile(of_heads, (1, 1, p.q_length, 1)), 2, p.q_block)
    return Operand(x, x.shape, lambda split, entry, b, j: (0, 0, 0, 0))


def unpacked(x: jax.Array, p: Problem) -> jax.Array:
    """(..., key heads, rows, width) of queries as (..., queries, heads, width)."""
    *batch, _, _, width = x.shape
    x = x[..., : p.q_length * p.group, :].reshape(*batch, p.kv_heads, p.q_length, p.group, width)
    return jnp.moveaxis(x, -4, -3).reshape(*batch, p.q_length, p.heads, width)


def _kernel(p: Problem, visits: Visits, splits: int, outputs: Any, table: Any, numbers: Any, refs: Any) -> None:
    split, step = grid_indices(2)
    word = visits.word(table, split, step)
    entry, j = read_entry(p, numbers, visits.batch_of(word)), visits.block_of(word)
    shape = (p.kv_heads, p.q_block, LANES)

    @pl.when(is_set(word, FIRST))
    def _() -> None:
        refs.row_max[...] = jnp.full(shape, LOWEST, jnp.float32)
        refs.row_sum[...] = jnp.zeros(shape, jnp.float32)
        refs.sums[...] = jnp.zeros((*shape[:2], p.v_dim), jnp.float32)
        if p.sinks:
            # Sinks are logits without a value: they are in the sum of the first split, before its first block.

            @pl.when(split == 0)
            def _() -> None:
                refs.row_max[...] = refs.sinks[:, 0]
                refs.row_sum[...] = refs.sinks[:, 1]

    def tile(is_masked: bool) -> None:
        mask = position_mask(p, refs, entry, 0, j, query=_query_of_row(p)) if is_masked else None
        heads.put(refs.key, refs.key_words, p.kv_heads)
        heads.put(refs.value, refs.value_words, p.kv_heads)

        def head_tile(head: Any, parity: int) -> None:
            key, value = (
                heads.take(block, words, p.kv_heads, head, parity, block.dtype)
                for block, words in ((refs.key, refs.key_words), (refs.value, refs.value_words))
            )
            x, _ = in_base_2(p, matmul_transposed(refs.query[head], key))
            if is_masked:
                x = x if mask is None else jnp.where(mask, x, -jnp.inf)
                value = zero_unfilled(value, p, refs, entry, j)
            weights, correction = weigh(x, refs.row_max.at[head], refs.row_sum.at[head])
            refs.sums[head] = refs.sums[head] * widen(correction, p.v_dim) + matmul(weights, value)

        heads.for_each_head(p.kv_heads, head_tile)

    is_visible = is_set(word, VISIBLE)
    if visits.masked == "sometimes":
        is_full = is_set(word, FULL)
        pl.when(jnp.logical_and(is_visible, is_full))(lambda: tile(False))
        pl.when(jnp.logical_and(is_visible, jnp.logical_not(is_full)))(lambda: tile(True))
    else:
        pl.when(is_visible)(lambda: tile(visits.masked == "always"))

    @pl.when(is_set(word, LAST))
    def _() -> None:
        if splits > 1:
            refs.out[...], refs.maxima[...], refs.totals[...] = refs.sums[...], refs.row_max[...], refs.row_sum[...]
            return
        for head in range(p.kv_heads):
            has_keys, divisor = divisors(refs.row_sum.at[head])
            factor = jnp.where(has_keys, 1.0 / divisor, 0.0)
            refs.out[head] = (refs.sums[head] * widen(factor, p.v_dim)).astype(refs.out.dtype)
            if "lse" in outputs:
                refs.lse[head] = jnp.where(has_keys, natural_lse(refs.row_max.at[head], divisor), -jnp.inf)


def _query_of_row(p: Problem) -> Any:
    """The number of the query of each row, as wide as a tile; 0 with one query."""
    if p.q_length == 1:
        return 0
    row = lax.broadcasted_iota(jnp.int32, (p.q_block, LANES), 0)
    # A division of vectors would take longer.
    query = sum((row >= number * p.group).astype(jnp.int32) for number in range(1, p.q_length))
    return widen(query, p.k_block)
