"""Which blocks, warps and stages: tables made by measuring, and what of them fits a card.

A shape is (query block, key block, warps, stages). Each table has the best first: it is the heuristic's answer, and
the whole table is what a tuner measures. The order of Hopper's was measured on an H200, full and causal, from 2k to
16k, at head dims 64, 128 and in part 256 (docs/performance.md); the others' is a guess. A causal call spills no
registers in any of them, but in float32 beyond a head dim of 128; one with many features may, and with segments of
100k tokens does. docs/triton.md has what each takes, and which of them tests compile.
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

#: By padded head dim; a head dim has the first table that it does not exceed. 16-bit inputs, wgmma.
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
#: The same for Blackwell, but for what spills there: nobody has measured it.
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
#: Compute capability 8, whose matrix instructions take their operands from registers.
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
#: Three products of TF32 parts need three times the operands. Head dims above 128 spill in any shape: one is offered.
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
#: The gradient of a bias is rare, and has nothing to choose: it fits everywhere. By the size of an element.
BIAS: dict[int, Table] = {
    2: {128: ((32, 32, 4, 1),), 256: ((32, 32, 8, 1),)},
    4: {64: ((32, 32, 4, 1),), 256: ((16, 16, 4, 1),)},
}
#: Windows up to this many keys: blocks of 64 queries were faster from 256 to 4,096 on an H200, at head dim 128.
NARROW = 4096
#: What CUDA keeps for itself of a multiprocessor's shared memory, where the limit is that of the data sheet.
KEPT_BY_CUDA = {(8, 0): 1024}


def forward(inv: Invocation) -> list[Shape]:
    """What the forward pass may be cut into, the best first."""
    return _fitting(inv, "forward")


def keys(inv: Invocation) -> list[Shape]:
    """The pass for keys and values."""
    return _fitting(inv, "keys")


def queries(inv: Invocation) -> list[Shape]:
    """The pass for queries."""
    return _fitting(inv, "queries")


def bias(inv: Invocation) -> list[Shape]:
    """The pass for a bias."""
    return _fitting(inv, "bias")


def reads_shared_memory(inv: Invocation) -> bool:
    """Whether matrix instructions take their operands from there: on data-center cards since Hopper."""
    return _major(inv) in (9, 10)


def _major(inv: Invocation) -> int:
    return (capability(inv) or (0,))[0]


def _fitting(inv: Invocation, which: str) -> list[Shape]:
    dim = max(width(inv["query"].shape[3]), width(inv["value"].shape[3]))
    table = BIAS[min(inv["query"].dtype.itemsize, 4)] if which == "bias" else _tables(inv)[which]
    shapes = table[next(most for most in table if dim <= most)]
    if _tables(inv) is HOPPER and dim <= 128 and (is_narrow(inv) or (which == "forward" and _is_small_work(inv))):
        shapes = tuple(sorted(shapes, key=lambda shape: shape[0] != 64))
    known = capability(inv)
    limit = get_shared_memory_limit(compute_capability=known)
    limit -= KEPT_BY_CUDA.get(known or (0, 0), 0)
    fitting = [shape for shape in shapes if shared_memory(inv, which, shape) <= limit]
    fitting = fitting or [_with_fewer_stages(inv, which, shapes[-1], limit)]
    return list(dict.fromkeys(_shortened(inv, shape) for shape in fitting))


def _with_fewer_stages(inv: Invocation, which: str, shape: Shape, limit: int) -> Shape:
    """The last resort of a small card, or of a user who allows little."""
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
    """Whether programs have so little to do that many small ones at a time beat a few large ones."""
    before, after = sides(inv)
    return before >= 0 and after >= 0 and before + after <= NARROW


def _is_small_work(inv: Invocation) -> bool:
    """What small programs also did faster on an H200, forward and at head dim 128: a soft cap, whose exponentials leave
    matrix units idle, by 11 %; packed sequences of 2,048 and of 256 tokens on average, by 7 % and 17 %.
    """
    bounds = inv["cum_seqlens_q"]
    are_short = bounds is not None and inv["query"].shape[1] <= 2048 * max(1, bounds.shape[0] - 1)
    return bool(inv["logits_soft_cap"]) or are_short


def _shortened(inv: Invocation, shape: Shape) -> Shape:
    """No blocks of which the most would be empty: a single query needs no room for 128."""
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
    """At most so many bytes a program needs: what it keeps, what is on its way for each stage, and tiles of planes."""
    q_block, k_block, _, stages = shape
    dim, dtype = max(width(inv["query"].shape[3]), width(inv["value"].shape[3])), inv["query"].dtype
    kept, moving = (k_block, q_block) if which == "keys" else (q_block, k_block)
    # The backward keeps two tiles, queries and gradients of the output, or keys and values.
    needed = estimate_shared_memory_bytes(kept if which == "forward" else 2 * kept, moving * stages, dim, dtype)
    # Operands turned round: where nothing is on its way, the backward makes room for them, and float32 always does.
    turned = 0
    if stages == 1 and which != "forward":
        turned = q_block if which == "queries" else q_block + k_block
    elif stages > 1 and dtype.itemsize == 4:
        turned = 2 * max(q_block, k_block)
    if _major(inv) == 10:
        # Blackwell's instructions want both operands in shared memory, and barriers beside them.
        turned += {"forward": 0, "keys": 2 * q_block}.get(which, k_block)
        needed += 1024
    needed += turned * dim * dtype.itemsize
    planes = (0 if inv["bias"] is None else inv["bias"].dtype.itemsize) + (inv["attention_mask"] is not None)
    return needed + q_block * k_block * planes * max(1, stages - 1)
