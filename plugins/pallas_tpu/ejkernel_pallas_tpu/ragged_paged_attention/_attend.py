"""Tiles of queries against the pages of their sequence: one step a tile, which walks the blocks of slots that it sees.

The pages stay in main memory. A step copies one block after another into one of two buffers, while it computes with the
other, and with its last block the first one of the core's next tile. A block has all key heads, so that each page is
fetched once for a tile.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel_core import Invocation
from ejkernel_ops.flash_attention.statistics import LOG2E
from ejkernel_ops.pages import pages_of
from ejkernel_ops.ragged_paged_attention.definition import output_dtype
from ejkernel_pallas_tpu.launch import Launch, Operand, Output, Scratch, Semaphores, grid_indices
from ejkernel_pallas_tpu.launch._arrays import LANES
from ejkernel_pallas_tpu.online_softmax import heads
from ejkernel_pallas_tpu.online_softmax.products import matmul, matmul_transposed, widen
from ejkernel_pallas_tpu.online_softmax.statistics import LOWEST, divisors, natural_lse, sink_statistics, weigh

from ._copies import copies
from ._plan import Plan, Tile
from ._sizes import Sizes
from ._tokens import rows, to_tiles


def attend(inv: Invocation, s: Sizes, plan: Plan, cores: int) -> Launch:
    """The launch. Its scalars are the numbers of tiles and the pages of all sequences."""
    width = inv["block_tables"].shape[1]
    outputs = {"out": _of_tiles(s, plan, s.v_dim, output_dtype(inv))}
    if inv.needs("lse"):
        outputs["lse"] = _of_tiles(s, plan, LANES, jnp.dtype(jnp.float32))
    pools = _pools(inv, s)
    # Where a row of vector memory has the heads of a slot, each is read out at a stride.
    words = {
        f"{name}_words": heads.words(pool.dtype, s.slot_rows, s.k_block, pool.shape[-1]) for name, pool in pools.items()
    }
    blocks = {
        f"{name}_blocks": Scratch((2, s.pages, s.part, *pool.shape[2:]), pool.dtype) for name, pool in pools.items()
    }
    return Launch(
        name="ragged_paged_attention",
        kernel=lambda numbers, table, refs: _kernel(s, plan, cores, width, numbers, table, refs),
        grid=(cores, plan.steps),
        semantics=("parallel" if cores > 1 else "arbitrary", "arbitrary"),
        tile_map=lambda core, step, *_: (step * cores + core,),
        operands={
            "query": _by_tile(to_tiles(inv["query"], s, plan)),
            **_numbers_of_rows(inv, s),
            **{f"{name}_pages": Operand(pool, memory="any") for name, pool in pools.items()},
        },
        outputs=outputs,
        scratch={
            **dict.fromkeys(("row_max", "row_sum"), Scratch((s.kv_heads, s.rows, LANES))),
            "sums": Scratch((s.kv_heads, s.rows, s.v_dim)),
            **blocks,
            **words,
            "arrived": Semaphores((2,)),
        },
    )


def pages_of_table(inv: Invocation) -> jax.Array:
    """The pages of all sequences, one behind the other. Entries that are not read are of any page."""
    table, first = inv["block_tables"], inv["first_page"]
    return jnp.clip(table if first is None else table + first, 0, pages_of(inv)[0].shape[0] - 1).reshape(-1)


def _pools(inv: Invocation, s: Sizes) -> dict[str, jax.Array]:
    """The pages, by name. One row of a slot has no axis: in main memory, the slots are then beside each other."""
    pages = pages_of(inv)
    names = ("kv",) if len(pages) == 1 else ("key", "value")
    return {name: x if s.slot_rows > 1 else x[:, :, 0] for name, x in zip(names, pages, strict=True)}


def _by_tile(x: jax.Array) -> Operand:
    return Operand(x, (None, *x.shape[1:]), lambda tile: (tile, 0, 0, 0))


def _of_tiles(s: Sizes, plan: Plan, width: int, dtype: Any) -> Output:
    shape = (plan.count, s.kv_heads, s.rows, width)
    return Output(shape, dtype, (None, *shape[1:]), lambda tile: (tile, 0, 0, 0))


def _numbers_of_rows(inv: Invocation, s: Sizes) -> dict[str, Operand]:
    """(key heads, 2, rows, lanes), the same for all tiles: the two statistics of the sinks of a row's head, and what
    its products and its sums are multiplied by.
    """
    numbers = {}
    if s.has_sinks:
        numbers["sinks"] = sink_statistics(inv["softmax_aux"])
    if s.has_scales:
        of_heads = (jnp.ones(1) if inv[name] is None else inv[name] for name in ("q_scale", "k_scale", "v_scale"))
        q, k, v = (x if x.shape[0] == 1 else jnp.repeat(x, s.kv_heads * s.group // x.shape[0]) for x in of_heads)
        both = jnp.broadcast_arrays(q * k * _factor(s), v, jnp.ones(s.kv_heads * s.group))
        numbers["factors"] = jnp.stack(both[:2], 1).astype(jnp.float32)
    operands = {}
    for name, x in numbers.items():
        x = x.reshape(s.kv_heads, s.group, 2).swapaxes(1, 2)[..., None, None]
        x = rows(jnp.broadcast_to(x, (s.kv_heads, 2, s.group, s.q_tile, LANES)), s)
        operands[name] = Operand(x, x.shape, lambda tile: (0, 0, 0, 0))
    return operands


def _factor(s: Sizes) -> float:
    """What a product is multiplied by: a soft cap needs it relative to the cap, and others in units of log2."""
    return s.scale / s.cap if s.cap else s.scale * LOG2E


def _kernel(s: Sizes, plan: Plan, cores: int, width: int, numbers: Any, table: Any, refs: Any) -> None:
    core, step = grid_indices(2)
    start, wait = copies(s, width, table, refs)
    tile = plan.read(numbers, step * cores + core)
    first = tile.first_slot // s.k_block
    count = -(-tile.end_slot // s.k_block) - first
    shape = (s.kv_heads, s.rows, LANES)
    # Sinks are logits without a value: they come before the first block.
    refs.row_max[...] = refs.sinks[:, 0] if s.has_sinks else jnp.full(shape, LOWEST, jnp.float32)
    refs.row_sum[...] = refs.sinks[:, 1] if s.has_sinks else jnp.zeros(shape, jnp.float32)
    refs.sums[...] = jnp.zeros((*shape[:2], s.v_dim), jnp.float32)

    # Nobody has started the first block of a core; another one was started with the block before it.
    @pl.when((count > 0) & (tile.before == 0))
    def _() -> None:
        start(tile, first, 0)

    def block_step(number: Any, carry: None) -> None:
        buffer = (tile.before + number) % 2
        block = first + number
        is_last = number + 1 == count

        @pl.when(jnp.logical_not(is_last))
        def _() -> None:
            start(tile, block + 1, 1 - buffer)

        @pl.when(is_last & (tile.following >= 0))
        def _() -> None:
            following = plan.read(numbers, tile.following)
            start(following, following.first_slot // s.k_block, 1 - buffer)

        wait(tile, block, buffer)
        sources = _sources(s, refs, buffer)
        for source in sources:
            heads.put(*source, s.slot_rows)
        first_slot = block * s.k_block
        is_full = _sees_all(s, tile, first_slot)
        pl.when(is_full)(partial(_attend_to_block, s, tile, first_slot, sources, refs, False))
        pl.when(jnp.logical_not(is_full))(partial(_attend_to_block, s, tile, first_slot, sources, refs, True))

    lax.fori_loop(0, count, block_step, None)
    for head in range(s.kv_heads):
        has_keys, divisor = divisors(refs.row_sum.at[head])
        factor = jnp.where(has_keys, 1.0 / divisor, 0.0)
        if s.has_scales:
            factor = factor * refs.factors[head, 1]
        refs.out[head] = (refs.sums[head] * widen(factor, s.v_dim)).astype(refs.out.dtype)
        if hasattr(refs, "lse"):
            refs.lse[head] = jnp.where(has_keys, natural_lse(refs.row_max.at[head], divisor), -jnp.inf)


def _sees_all(s: Sizes, tile: Tile, first_slot: Any) -> Any:
    """Whether all queries of a tile see all slots of a block."""
    last_slot = first_slot + s.k_block - 1
    is_full = last_slot < tile.end_slot
    if s.left is not None:
        is_full &= first_slot >= tile.position + tile.queries - 1 - s.left
    if s.right is not None:
        is_full &= last_slot <= tile.position + s.right
    return is_full


def _sources(s: Sizes, refs: Any, buffer: Any) -> list[tuple[Any, Any]]:
    """A block of each array, and its memory for words."""
    names = ("kv",) if s.is_interleaved else ("key", "value")
    return [(getattr(refs, f"{name}_blocks").at[buffer], getattr(refs, f"{name}_words")) for name in names]


def _attend_to_block(s: Sizes, tile: Tile, first_slot: Any, sources: Any, refs: Any, is_masked: bool) -> None:
    """Add the slots of a block to the sums of all rows."""
    mask: Any = _mask(s, tile, first_slot) if is_masked else None

    def head_tile(head: Any, parity: int) -> None:
        if s.is_interleaved:
            sides = [(*sources[0], 2 * head + side, side) for side in (0, 1)]
        else:
            sides = [(*source, head, parity) for source in sources]
        key, value = (
            heads.take(block, words, s.slot_rows, row, row_parity, dtype)
            for (block, words, row, row_parity), dtype in zip(sides, (s.dtype, s.value_dtype), strict=True)
        )
        x = matmul_transposed(refs.query[head], key)
        x = x * (widen(refs.factors[head, 0], s.k_block) if s.has_scales else _factor(s))
        x = jnp.tanh(x) * (s.cap * LOG2E) if s.cap else x
        if is_masked:
            x = jnp.where(mask, x, -jnp.inf)
            value = _filled(value, tile, first_slot)
        weights, correction = weigh(x, refs.row_max.at[head], refs.row_sum.at[head])
        refs.sums[head] = refs.sums[head] * widen(correction, s.v_dim) + matmul(weights, value)

    heads.for_each_head(s.kv_heads, head_tile)


def _mask(s: Sizes, tile: Tile, first_slot: Any) -> Any:
    """(rows, slots): which slots each query sees. Those of the rows of a head are one after another."""
    slot = lax.broadcasted_iota(jnp.int32, (s.rows, s.k_block), 1)
    distance = slot - (lax.broadcasted_iota(jnp.int32, (s.rows, s.k_block), 0) & (s.q_tile - 1))
    own = tile.position - first_slot
    mask = slot < tile.end_slot - first_slot
    if s.left is not None:
        mask &= distance >= own - s.left
    if s.right is not None:
        mask &= distance <= own + s.right
    return mask


def _filled(value: Any, tile: Tile, first_slot: Any) -> Any:
    """The values, with 0 in slots that no query sees: what stands there may be NaN, of which 0 times is NaN."""
    slot = lax.broadcasted_iota(jnp.int32, value.shape, 0)
    is_seen = (slot >= tile.first_slot - first_slot) & (slot < tile.end_slot - first_slot)
    # It is chosen in float32: the mask of 16 bits would have another layout.
    return jnp.where(is_seen, value.astype(jnp.float32), 0.0).astype(value.dtype)
