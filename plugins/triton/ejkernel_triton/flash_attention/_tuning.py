"""The blocks, warps and stages of each pass: tables, and which of their shapes fit a card.

A shape is (query block, key block, warps, stages). The first of a table that fits is the heuristic, and a tuner
measures all that fit. The order of Hopper's tables was measured on an H200, full and causal, from 2k to 16k tokens, at
head dims 64, 128 and in part 256 (docs/measurements); the order of the others is a guess. In a causal call no shape
spills registers, except in float32 beyond a head dim of 128. A call with many features may spill, and with segments of
100k tokens it does. docs/triton.md says what each shape takes, and which of them tests compile.
"""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel_core import Invocation, Unsupported
from ejkernel_ops.calibration import (
    estimate_shared_memory_bytes,
    get_shared_memory_limit,
    select_num_stages,
    select_num_warps,
)
from ejkernel_triton.flash_attention._problem import sides, width
from ejkernel_triton.launch._cards import capability

Shape = tuple[int, int, int, int]
Table = Mapping[int, tuple[Shape, ...]]

#: For 16-bit inputs, by padded head dim: a call has the first entry that its head dim does not exceed. With wgmma.
HOPPER: dict[str, Table] = {
    "forward": {
        64: ((64, 64, 4, 3), (128, 64, 8, 3), (128, 64, 4, 3), (128, 128, 8, 3), (64, 64, 4, 2), (128, 32, 4, 3)),
        128: ((128, 128, 8, 3), (128, 64, 8, 3), (64, 64, 4, 3), (128, 128, 8, 2), (64, 64, 4, 2), (64, 32, 4, 3)),
        256: ((128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 2), (64, 32, 8, 1)),
    },
    "keys": {
        64: ((64, 64, 4, 2), (32, 64, 4, 3), (32, 64, 4, 2), (64, 128, 8, 3), (32, 32, 4, 2)),
        128: ((64, 64, 4, 2), (32, 64, 4, 3), (32, 128, 8, 3), (32, 64, 4, 2), (32, 32, 4, 2)),
        256: ((32, 64, 8, 3), (32, 64, 8, 2), (32, 32, 8, 2), (32, 32, 4, 1)),
    },
    "queries": {
        64: ((64, 64, 4, 2), (128, 64, 8, 2), (128, 32, 8, 3), (64, 64, 4, 3), (64, 32, 4, 2), (32, 32, 4, 2)),
        128: ((128, 64, 8, 3), (128, 32, 8, 3), (64, 64, 4, 2), (128, 64, 8, 2), (64, 32, 4, 2), (32, 32, 4, 2)),
        256: ((128, 32, 8, 3), (128, 32, 8, 2), (64, 32, 8, 2), (32, 32, 4, 2)),
    },
}
#: The same for Blackwell, without shapes that spill there. Not measured.
BLACKWELL: dict[str, Table] = {
    "forward": {
        64: HOPPER["forward"][64],
        128: ((128, 64, 8, 3), (64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 3)),
        256: ((128, 32, 8, 2), (64, 32, 8, 1)),
    },
    "keys": HOPPER["keys"],
    "queries": {
        64: HOPPER["queries"][64],
        128: ((128, 32, 8, 3), (64, 64, 4, 2), (128, 64, 8, 2), (64, 32, 4, 2), (32, 32, 4, 2)),
        256: HOPPER["queries"][256],
    },
}
#: Compute capability 8, where matrix instructions read their operands from registers.
AMPERE: dict[str, Table] = {
    "forward": {
        64: ((128, 64, 8, 3), (64, 64, 4, 3), (128, 32, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2)),
        128: ((128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 2)),
        256: ((64, 64, 8, 2), (64, 32, 8, 2), (64, 32, 8, 1), (64, 16, 4, 2)),
    },
    "keys": {
        64: ((64, 128, 8, 2), (32, 64, 4, 3), (32, 64, 4, 2), (64, 64, 8, 2), (32, 32, 4, 2)),
        128: ((32, 64, 4, 2), (32, 64, 8, 2), (64, 64, 8, 2), (32, 32, 4, 2)),
        256: ((64, 32, 8, 2), (32, 32, 8, 2), (32, 32, 4, 2), (32, 32, 4, 1)),
    },
    "queries": {
        64: ((128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 2), (64, 32, 4, 2), (32, 32, 4, 2)),
        128: ((128, 32, 8, 2), (64, 32, 4, 2), (64, 32, 8, 2), (32, 32, 4, 2)),
        256: ((64, 32, 8, 2), (32, 32, 4, 2), (32, 32, 4, 1)),
    },
}
#: Three products of TF32 parts need three times the operands. Head dims above 128 spill in any shape: there is one.
FLOAT32: dict[str, Table] = {
    "forward": {
        64: ((64, 32, 8, 2), (32, 32, 4, 2)),
        128: ((32, 32, 8, 1), (16, 64, 8, 1), (16, 32, 8, 1)),
        256: ((16, 32, 8, 1),),
    },
    "keys": {
        64: ((64, 32, 8, 2), (32, 32, 4, 2), (32, 32, 4, 1)),
        128: ((32, 16, 8, 1), (16, 16, 4, 1)),
        256: ((16, 16, 8, 1),),
    },
    "queries": {
        64: ((32, 32, 4, 2), (32, 64, 8, 1), (32, 32, 4, 1)),
        128: ((16, 64, 8, 1), (16, 32, 8, 1), (16, 16, 4, 1)),
        256: ((16, 16, 8, 1),),
    },
}
#: For the gradient of a bias, which is rare, by the size of an element: one shape, which fits every card.
BIAS: dict[int, Table] = {
    2: {128: ((32, 32, 4, 1),), 256: ((32, 32, 8, 1),)},
    4: {64: ((32, 32, 4, 1),), 256: ((16, 16, 4, 1),)},
}
#: Windows up to this many keys: blocks of 64 queries were faster from 256 to 4,096 on an H200, at head dim 128.
NARROW = 4096
#: The shared memory that CUDA reserves on a multiprocessor, for cards whose limit is that of the data sheet.
RESERVED_BY_CUDA = {(8, 0): 1024}


def forward(inv: Invocation) -> list[Shape]:
    """The shapes of the forward pass that fit, the best first."""
    return _shapes(inv, "forward")


def keys(inv: Invocation) -> list[Shape]:
    """Those of the pass for keys and values."""
    return _shapes(inv, "keys")


def queries(inv: Invocation) -> list[Shape]:
    """Those of the pass for queries."""
    return _shapes(inv, "queries")


def bias(inv: Invocation) -> list[Shape]:
    """Those of the pass for a bias."""
    return _shapes(inv, "bias")


def reads_shared_memory(inv: Invocation) -> bool:
    """Whether matrix instructions read their operands from shared memory, as on data-center cards since Hopper."""
    return _major(inv) in (9, 10)


def _major(inv: Invocation) -> int:
    return (capability(inv) or (0,))[0]


def _shapes(inv: Invocation, which: str) -> list[Shape]:
    dim = max(width(inv["query"].shape[3]), width(inv["value"].shape[3]))
    table = BIAS[min(inv["query"].dtype.itemsize, 4)] if which == "bias" else _tables(inv)[which]
    shapes = table[next(widest for widest in table if dim <= widest)]
    if _tables(inv) is HOPPER and dim <= 128 and (is_narrow(inv) or (which == "forward" and _is_small_work(inv))):
        shapes = tuple(sorted(shapes, key=lambda shape: shape[0] != 64))
    compute_capability = capability(inv)
    limit = get_shared_memory_limit(compute_capability=compute_capability)
    limit -= RESERVED_BY_CUDA.get(compute_capability or (0, 0), 0)
    fits = [shape for shape in shapes if shared_memory(inv, which, shape) <= limit]
    fits = fits or [_with_fewer_stages(inv, which, shapes[-1], limit)]
    return list(dict.fromkeys(_shortened(inv, shape) for shape in fits))


def _with_fewer_stages(inv: Invocation, which: str, shape: Shape, limit: int) -> Shape:
    """The last resort for a small card, or a low limit of the user's."""
    needed = shared_memory(inv, which, (*shape[:3], 1))
    if needed > limit:
        raise Unsupported(
            f"the Triton kernels need {needed} bytes of shared memory for such heads, and there are {limit} "
            "(the card's, or EJKERNEL_TRITON_SMEM_LIMIT)"
        )
    return (*shape[:3], min(shape[3], select_num_stages(needed, limit)))


def _tables(inv: Invocation) -> dict[str, Table]:
    if inv["query"].dtype.itemsize == 4:
        return FLOAT32
    return {9: HOPPER, 10: BLACKWELL}.get(_major(inv), AMPERE)


def is_narrow(inv: Invocation) -> bool:
    """Whether the window is so narrow that many small programs are faster than a few large ones."""
    left, right = sides(inv)
    return left >= 0 and right >= 0 and left + right <= NARROW


def _is_small_work(inv: Invocation) -> bool:
    """Other calls for which small programs were faster on an H200, forward and at head dim 128: by 11 % with a soft
    cap, whose exponentials leave matrix units idle, and by 7 % and 17 % with packed sequences of 2,048 and of 256
    tokens on average.
    """
    bounds = inv["cum_seqlens_q"]
    is_short = bounds is not None and inv["query"].shape[1] <= 2048 * max(1, bounds.shape[0] - 1)
    return bool(inv["logits_soft_cap"]) or is_short


def _shortened(inv: Invocation, shape: Shape) -> Shape:
    """Blocks that are no longer than the call needs: a single query needs no block of 128."""
    q_block, k_block, warps, stages = shape
    q_block, k_block = (
        min(block, max(16, 1 << (length - 1).bit_length()) if length else 16)
        for block, length in ((q_block, inv["query"].shape[1]), (k_block, inv["key"].shape[1]))
    )
    if (q_block, k_block) != shape[:2]:
        dim = max(width(inv["query"].shape[3]), width(inv["value"].shape[3]))
        warps = min(warps, select_num_warps(q_block, k_block, dim, inv["query"].dtype))
    return q_block, k_block, warps, stages


def shared_memory(inv: Invocation, which: str, shape: Shape) -> int:
    """An upper bound of the bytes of a program: what it keeps, the loads of each stage, and tiles of bias and mask."""
    q_block, k_block, _, stages = shape
    dim, dtype = max(width(inv["query"].shape[3]), width(inv["value"].shape[3])), inv["query"].dtype
    own, loaded = (k_block, q_block) if which == "keys" else (q_block, k_block)
    # The backward keeps two tiles, queries and gradients of the output, or keys and values.
    needed = estimate_shared_memory_bytes(own if which == "forward" else 2 * own, loaded * stages, dim, dtype)
    # Transposed operands: the backward has room for them if there is one stage, float32 always.
    transposed = 0
    if stages == 1 and which != "forward":
        transposed = q_block if which == "queries" else q_block + k_block
    elif stages > 1 and dtype.itemsize == 4:
        transposed = 2 * max(q_block, k_block)
    if _major(inv) == 10:
        # Blackwell's instructions read both operands from shared memory, which also holds barriers.
        transposed += {"forward": 0, "keys": 2 * q_block}.get(which, k_block)
        needed += 1024
    needed += transposed * dim * dtype.itemsize
    tile_bytes = (0 if inv["bias"] is None else inv["bias"].dtype.itemsize) + (inv["attention_mask"] is not None)
    return int(needed + q_block * k_block * tile_bytes * max(1, stages - 1))
