"""A call as the device code takes it: pointers, scalars, and the constants that select its features."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_core import Invocation
from ejkernel_ops.flash_attention.dropout import threshold
from ejkernel_ops.flash_attention.geometry import (
    block_count,
    key_intervals,
    query_intervals,
    segment_extremes,
    slot_extremes,
)
from ejkernel_ops.flash_attention.positions import MAX_POSITION, has_positions
from ejkernel_ops.flash_attention.statistics import BackwardRows
from ejkernel_ops.flash_attention.tokens import band

Arguments = Mapping[str, Any]

LOWEST = float(np.finfo(np.float32).min)
BIAS_AND_MASK = ("bias", "attention_mask")
#: The largest number of elements that a thread loads at once: 16 bytes.
VECTOR = 16


def width(dim: int) -> int:
    """The power of two that a head dim is padded to in registers; the hardware multiplies no less than 16.

    >>> width(64), width(80), width(8)
    (64, 128, 16)
    """
    return max(16, 1 << (dim - 1).bit_length())


def sides(a: Arguments) -> tuple[int, int]:
    """How many keys to the left and to the right of its own a query sees; -1 for a side on which that hides no key."""
    left, right = band(a["causal"], a["sliding_window"])
    q_length, k_length = a["query"].shape[1], a["key"].shape[1]
    if has_positions(a):
        # No two positions are so far apart, and sums of two with a narrower window are int32.
        left = None if left is not None and left >= 2 * MAX_POSITION - 2 else left
        right = None if right is not None and right >= 2 * MAX_POSITION - 2 else right
    elif a["cum_seqlens_q"] is None:
        left = None if left is not None and left >= k_length - 1 else left
        right = None if right is not None and right >= q_length - 1 else right
    return -1 if left is None else left, -1 if right is None else right


def constants(a: Arguments) -> dict[str, Any]:
    """The constants that all kernels have in common, except the blocks."""
    _, _, heads, dim = a["query"].shape
    v_dim, group = a["value"].shape[3], heads // a["key"].shape[2]
    left, right = sides(a)
    dropout = a["dropout_prob"]
    return {
        "HEADS": heads,
        "GROUP": group,
        "DIM": dim,
        "V_DIM": v_dim,
        "WIDTH": width(dim),
        "V_WIDTH": width(v_dim),
        "SCALE": float(a["softmax_scale"]),
        "CAP": float(a["logits_soft_cap"] or 0.0),
        "LEFT": left,
        "RIGHT": right,
        "PACKED": a["cum_seqlens_q"] is not None,
        "START": has_positions(a),
        "LENGTHS": a["kv_lengths"] is not None,
        "MASK": a["attention_mask"] is not None,
        **_units(a),
        "DROPOUT": float(dropout),
        "THRESHOLD": threshold(dropout) if dropout else 0,
        "PRECISION": precision(a),
    }


def sink_constants(a: Arguments) -> dict[str, int]:
    """How many sinks a head has, and the power of two that they are padded to in registers."""
    count = 0 if a["softmax_aux"] is None else a["softmax_aux"].shape[1]
    return {"SINKS": count, "SINK_WIDTH": 1 << (count - 1).bit_length() if count else 1}


def precision(a: Arguments) -> str:
    """The precision of products: "ieee" is exact for 16-bit factors.

    Three products of TF32 parts are within one or two roundings of float32, and several times as fast as float32
    arithmetic. With a soft cap they are not used: a product that overflows has to become the cap, and its parts could
    be infinities of both signs, whose sum is NaN.
    """
    return "tf32x3" if a["query"].dtype == jnp.float32 and a["logits_soft_cap"] is None else "ieee"


def aligned(inv: Invocation) -> Invocation:
    """The same call with rows of bias and mask padded, so that a thread can load many elements at once.

    Loads of single elements took five times as long as the copy and all else together.
    """
    arrays = {name: inv[name] for name in BIAS_AND_MASK}
    return inv.with_arrays({name: _aligned(x) for name, x in arrays.items() if x is not None})


def _aligned(x: jax.Array) -> jax.Array:
    keys = x.shape[3]
    if keys == 1 or keys % 8 == 0:
        return x
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, -keys % VECTOR)))


def _units(a: Arguments) -> dict[str, int]:
    """What the rows of bias and mask are multiples of, up to a vector; 0 for rows of one element and without rows."""
    bias, mask = (
        0 if a[name] is None or a[name].shape[3] == 1 else math.gcd(a[name].shape[3], VECTOR) for name in BIAS_AND_MASK
    )
    return {"BIAS_UNIT": bias, "MASK_UNIT": mask}


def scalars(a: Arguments) -> tuple[int, ...]:
    """The lengths, and the strides of bias and mask, divided by their units."""
    units = _units(a)
    bias, mask = strides(a["bias"]), strides(a["attention_mask"])
    return (
        a["query"].shape[1],
        a["key"].shape[1],
        *(stride // max(1, units["BIAS_UNIT"]) for stride in bias),
        *(stride // max(1, units["MASK_UNIT"]) for stride in mask),
    )


def operands(a: Arguments, arrays: Iterable[jax.Array | None]) -> list[jax.Array]:
    """The arrays, with any pointer in place of an absent one, which no kernel reads."""
    return [a["query"] if array is None else array for array in arrays]


def even_blocks(a: Arguments, q_block: int, k_block: int) -> dict[str, bool]:
    """Whether the lengths are multiples of the blocks, so that no access needs a bounds check."""
    is_full = a["kv_lengths"] is None and a["kv_positions"] is None
    return {"EVEN_Q": a["query"].shape[1] % q_block == 0, "EVEN_K": is_full and a["key"].shape[1] % k_block == 0}


def strides(x: Any) -> tuple[int, int, int]:
    """The strides of batch, heads and queries of a bias or mask: 0 along an axis that broadcasts."""
    if x is None:
        return 0, 0, 0
    _, heads, queries, keys = x.shape
    steps = (heads * queries * keys, queries * keys, keys)
    return tuple(step if size > 1 else 0 for size, step in zip(x.shape[:3], steps, strict=True))  # type: ignore[return-value]


def packed_key_intervals(a: Arguments) -> tuple[jax.Array | None, jax.Array | None]:
    """For each query, the start and the end of the keys it may see, if sequences are packed."""
    return (None, None) if a["cum_seqlens_q"] is None else key_intervals(a)


def packed_query_intervals(a: Arguments) -> tuple[jax.Array | None, jax.Array | None]:
    """For each key, the start and the end of the queries that may see it, if sequences are packed."""
    return (None, None) if a["cum_seqlens_q"] is None else query_intervals(a)


def row_arrays(a: Arguments) -> tuple[jax.Array | None, jax.Array | None]:
    """What says which keys a query may see: `packed_key_intervals`, or the positions of a call that has them.

    They take the same two parameters of a kernel, because no call has both.
    """
    return positions(a) if has_positions(a) else packed_key_intervals(a)


def column_arrays(a: Arguments) -> tuple[jax.Array | None, jax.Array | None]:
    """The same for keys."""
    return positions(a) if has_positions(a) else packed_query_intervals(a)


def positions(a: Arguments) -> tuple[jax.Array | None, jax.Array | None]:
    """Where queries start, and the lengths or the positions of keys, of which no call has both."""
    return a["q_start"], a["kv_lengths"] if a["kv_positions"] is None else a["kv_positions"]


def key_table(a: Arguments, block: int) -> tuple[jax.Array | None, dict[str, int]]:
    """(batch, 3 or 6, blocks): `segment_extremes` of each block of keys if there are segments, `slot_extremes` if keys
    have positions; and the constants for them, powers of two that the number of blocks is padded to in registers.
    """
    segments, slots = a["kv_segment_ids"], a["kv_positions"]
    rows = [] if segments is None else segment_extremes(segments, block)
    rows = rows if slots is None else (*rows, *slot_extremes(a, block))
    count = 1 << (block_count(a["key"].shape[1], block) - 1).bit_length()
    table = jnp.stack([row.astype(jnp.int32) for row in rows], 1) if rows else None
    return table, {"SEGMENTS": 0 if segments is None else count, "SLOTS": 0 if slots is None else count}


def query_table(a: Arguments, block: int) -> tuple[jax.Array | None, dict[str, int]]:
    """The same for blocks of queries, whose positions are known from that of the first."""
    segments = a["q_segment_ids"]
    count = 1 << (block_count(a["query"].shape[1], block) - 1).bit_length()
    constants = {"SEGMENTS": 0 if segments is None else count, "SLOTS": int(a["kv_positions"] is not None)}
    return None if segments is None else jnp.stack(segment_extremes(segments, block), 1).astype(jnp.int32), constants


def backward_rows(a: Arguments) -> BackwardRows:
    """What every backward pass reads for each query; an lse is not lower than the product of the lowest logit."""
    return BackwardRows.of(a, LOWEST / 2)
