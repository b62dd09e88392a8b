"""A call as the device code takes it: pointers, numbers, and the constants that decide which code there is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_core import Invocation
from ejkernel_ops.flash_attention.dropout import threshold
from ejkernel_ops.flash_attention.tokens import band, tokens

Arguments = Mapping[str, Any]

NO_INT = jnp.iinfo(jnp.int32).max
#: What has an element for each query and key.
PLANES = ("bias", "attention_mask")
#: The elements that a thread loads at once, where they are bytes.
MOST_AT_ONCE = 16


def width(dim: int) -> int:
    """The power of two that a head dim is padded to in registers; the hardware multiplies no less than 16.

    >>> width(64), width(80), width(8)
    (64, 128, 16)
    """
    return max(16, 1 << (dim - 1).bit_length())


def sides(a: Arguments) -> tuple[int, int]:
    """How far a query sees before its place and behind it; -1 where nothing limits it, or nothing that exists does."""
    left, right = band(a["causal"], a["sliding_window"])
    q_length, k_length = a["query"].shape[1], a["key"].shape[1]
    if a["cum_seqlens_q"] is None:
        left = None if left is not None and left >= k_length - 1 else left
        right = None if right is not None and right >= q_length - 1 else right
    return -1 if left is None else left, -1 if right is None else right


def constants(a: Arguments) -> dict[str, Any]:
    """The compile-time constants that all kernels have in common, blocks aside."""
    _, _, heads, dim = a["query"].shape
    v_dim, group = a["value"].shape[3], heads // a["key"].shape[2]
    before, after = sides(a)
    drop = a["dropout_prob"]
    return {
        "HEADS": heads,
        "GROUP": group,
        "DIM": dim,
        "V_DIM": v_dim,
        "WIDTH": width(dim),
        "V_WIDTH": width(v_dim),
        "SCALE": float(a["softmax_scale"]),
        "CAP": float(a["logits_soft_cap"] or 0.0),
        "BEFORE": before,
        "AFTER": after,
        "PACKED": a["cum_seqlens_q"] is not None,
        "MASK": a["attention_mask"] is not None,
        **_units(a),
        "DROP": float(drop),
        "THRESHOLD": threshold(drop) if drop else 0,
        "PRECISION": _precision(a),
    }


def of_sinks(a: Arguments) -> dict[str, int]:
    """How many sinks a head has, and the power of two that they are padded to in registers."""
    count = 0 if a["softmax_aux"] is None else a["softmax_aux"].shape[1]
    return {"SINKS": count, "SINK_WIDTH": 1 << (count - 1).bit_length() if count else 1}


def _precision(a: Arguments) -> str:
    """How products are multiplied: "ieee" is exact for 16-bit factors.

    Three products of TF32 parts come within a rounding or two of float32, at a multiple of the speed that the
    processor's own float32 has. Only where a soft cap takes what overflows back to a number, parts must not: infinity
    and minus infinity would add up to NaN.
    """
    return "tf32x3" if a["query"].dtype == jnp.float32 and a["logits_soft_cap"] is None else "ieee"


def aligned(inv: Invocation) -> Invocation:
    """The same call with rows of bias and mask that begin where a thread can load many elements at once.

    Loads of one element each took five times as long as the copy and all the rest.
    """
    planes = {name: inv[name] for name in PLANES}
    return inv.with_arrays({name: _aligned(x) for name, x in planes.items() if x is not None})


def _aligned(plane: jax.Array) -> jax.Array:
    keys = plane.shape[3]
    if keys == 1 or keys % 8 == 0:
        return plane
    return jnp.pad(plane, ((0, 0), (0, 0), (0, 0), (0, -keys % MOST_AT_ONCE)))


def _units(a: Arguments) -> dict[str, int]:
    """What the lengths of rows of planes are multiples of, as far as it matters; 0 where a row has one element."""
    bias, mask = (
        0 if a[name] is None or a[name].shape[3] == 1 else math.gcd(a[name].shape[3], MOST_AT_ONCE) for name in PLANES
    )
    return {"BIAS_UNIT": bias, "MASK_UNIT": mask}


def numbers(a: Arguments) -> tuple[int, ...]:
    """The lengths, and the strides of planes: each of these divided by its unit as `_units` has it."""
    units = _units(a)
    bias, mask = strides(a["bias"]), strides(a["attention_mask"])
    return (
        a["query"].shape[1],
        a["key"].shape[1],
        *(stride // max(1, units["BIAS_UNIT"]) for stride in bias),
        *(stride // max(1, units["MASK_UNIT"]) for stride in mask),
    )


def operands(a: Arguments, arrays: Iterable[jax.Array | None]) -> list[jax.Array]:
    """What a call does not have is not read: any pointer will do in its place."""
    return [a["query"] if array is None else array for array in arrays]


def evenness(a: Arguments, q_block: int, k_block: int) -> dict[str, bool]:
    """Whether blocks come out even, so that no access has to be checked."""
    return {"EVEN_Q": a["query"].shape[1] % q_block == 0, "EVEN_K": a["key"].shape[1] % k_block == 0}


def strides(x: Any) -> tuple[int, int, int]:
    """How far apart two batches, heads and queries of a bias or mask are: 0 where there is one for all."""
    if x is None:
        return 0, 0, 0
    _, heads, queries, keys = x.shape
    steps = (heads * queries * keys, queries * keys, keys)
    return tuple(step if size > 1 else 0 for size, step in zip(x.shape[:3], steps, strict=True))  # type: ignore[return-value]


def intervals(a: Arguments) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Of packed sequences: which keys each query may see, start and end, and which queries may see each key."""
    where, (before, after) = tokens(a), sides(a)
    q_ids, k_ids = (ids[0] for ids in where.groups[0])
    bounds_q, bounds_k = a["cum_seqlens_q"], a["cum_seqlens_k"]
    q_length, k_length = a["query"].shape[1], a["key"].shape[1]
    rows = _interval(q_ids, where.q_position[0], bounds_k, k_length, before, after)
    place = jnp.arange(k_length, dtype=jnp.int32) + (bounds_q[1:] - bounds_k[1:])[k_ids - 1]
    return *rows, *_interval(k_ids, place, bounds_q, q_length, after, before)


def _interval(
    ids: jax.Array, place: jax.Array, bounds: jax.Array, length: int, before: int, after: int
) -> tuple[jax.Array, jax.Array]:
    # Boundaries beyond the tokens are wrong, and nobody can see it here; but nothing beyond them is read.
    start, end = bounds[ids - 1], jnp.minimum(bounds[ids], length)
    if before >= 0:
        start = jnp.maximum(start, place - before)
    if after >= 0:
        end = jnp.minimum(end, place + after + 1)
    return jnp.where(ids > 0, start, 0).astype(jnp.int32), jnp.where(ids > 0, end, 0).astype(jnp.int32)


def extremes(ids: jax.Array, block: int) -> jax.Array:
    """(batch, 3, blocks): of each block of ids the lowest and the highest, padding aside, and the lowest with it."""
    batch, length = ids.shape
    count = max(1, math.ceil(length / block))
    cut = jnp.pad(ids, ((0, 0), (0, count * block - length))).reshape(batch, count, block)
    low = jnp.where(cut > 0, cut, NO_INT).min(-1)
    return jnp.stack([low, cut.max(-1), cut.min(-1)], 1).astype(jnp.int32)


def blocks(length: int, block: int) -> int:
    """How many blocks there are, at least one."""
    return max(1, math.ceil(length / block))
