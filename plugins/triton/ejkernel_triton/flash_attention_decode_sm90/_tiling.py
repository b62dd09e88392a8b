"""How keys are split, and the blocks, stages and warps of programs, from the shapes of a call and the card.

A multiprocessor has one program, and nearly all of its shared memory is a ring of blocks that are on their way. A shape
is (splits, block, stages, warps); the first is the heuristic, and a tuner measures all of them.
"""

from __future__ import annotations

from ejkernel_core import Invocation, Unsupported
from ejkernel_ops.calibration import get_shared_memory_limit
from ejkernel_triton.flash_attention_decode._tiling import LEAST_BLOCKS, SPLITS, most_seen, rows
from ejkernel_triton.flash_attention_sm90._launch import width
from ejkernel_triton.launch._cards import capability
from ejkernel_triton.launch._multiprocessors import multiprocessors

Shape = tuple[int, int, int, int]

#: The keys of a step, which are rows of the first product: the hardware multiplies 64 at a time.
BLOCKS = (64, 128)
STAGES = (1, 2, 3, 4, 5, 6, 8, 12)
WARPS = (4, 8)
#: So many rows are shared by eight warps: four would take nearly as long for them as the memory takes for the keys.
MANY_ROWS = 64
#: Of a step, keys and values, by default.
STEP_BYTES = 32 << 10
#: Of all stages: so much is on its way to a multiprocessor at a time.
RING_BYTES = 192 << 10
#: The least parts of a multiprocessor, by default. The last parts leave some multiprocessors idle, and the others, with
#: so much on its way to each, still use the whole bandwidth of the memory.
PARTS = 3
#: The numbers of logits and sums of a step for each warp: more would not stay in registers.
WARP_NUMBERS = 3072
#: Barriers, and what Triton keeps beside them.
OTHER_BYTES = 1 << 10


def shapes(inv: Invocation) -> list[Shape]:
    """The shapes that fit the card, the best first."""
    block = next((size for size in BLOCKS[::-1] if size * _key_bytes(inv) <= STEP_BYTES), BLOCKS[0])
    splits = _splits(inv, block)
    warps = 8 if rows(inv)[0] >= MANY_ROWS else 4
    most = _most_stages(inv, block, warps)
    candidates = [
        *((splits, block, stages, warps) for stages in (most, 4, 2)),
        *((splits, block, most, count) for count in WARPS),
        *((splits, 128, _most_stages(inv, 128, count), count) for count in WARPS),
        *((count, block, most, warps) for count in (2 * splits, splits // 2, splits // 4, 4 * splits)),
    ]
    fits = [shape for shape in dict.fromkeys(candidates) if shape[2] > 1 and _reason(inv, shape) is None]
    return fits or [_smallest(inv, splits)]


def _splits(inv: Invocation, block: int) -> int:
    """So many that each multiprocessor has its parts, if the keys that a query sees are so many."""
    batch, _, kv_heads, _ = inv["key"].shape
    parts = batch * kv_heads * rows(inv)[1]
    most = max(1, most_seen(inv) // (LEAST_BLOCKS * block))
    enough = PARTS * multiprocessors(inv)
    return max(count for count in SPLITS if count == 1 or (count <= most and parts * count // 2 < enough))


def _smallest(inv: Invocation, splits: int) -> Shape:
    shape = (splits, BLOCKS[0], STAGES[0], WARPS[0])
    check_fits(inv, shape)
    return shape


def check_fits(inv: Invocation, shape: Shape) -> None:
    """Raise for a shape that the card or its products do not take."""
    if (reason := _reason(inv, shape)) is not None:
        raise Unsupported(f"splits, block, stages and warps {shape} {reason}")


def _reason(inv: Invocation, shape: Shape) -> str | None:
    """Why a shape does not fit; None if it does."""
    splits, block, _, warps = shape
    if splits not in SPLITS:
        return f"do not fit: the splits are {', '.join(map(str, SPLITS))}"
    if (block + width(inv["value"].shape[3])) * rows(inv)[0] > WARP_NUMBERS * warps:
        return f"do not fit: logits and sums of {rows(inv)[0]} rows are too many for the registers of {warps} warps"
    if (size := shared_memory(inv, shape)) > (limit := get_shared_memory_limit(compute_capability=capability(inv))):
        return f"need {size} bytes of shared memory, and there are {limit} (the card's, or EJKERNEL_TRITON_SMEM_LIMIT)"
    return None


def shared_memory(inv: Invocation, shape: Shape) -> int:
    """An upper bound of the bytes of a program: keys and values of each stage, queries and weights of a tile, and what
    warps exchange, eight numbers of each of four warps for each row.
    """
    _, block, stages, _ = shape
    tile, _ = rows(inv)
    operands = tile * (width(inv["query"].shape[3]) + block) * int(inv["query"].dtype.itemsize)
    return stages * block * _key_bytes(inv) + operands + tile * 4 * 8 * 4 + OTHER_BYTES


def _most_stages(inv: Invocation, block: int, warps: int) -> int:
    """As many as fit into the ring and the card; the least if none do."""
    fits = [count for count in STAGES if count * block * _key_bytes(inv) <= RING_BYTES]
    return max((count for count in fits if _reason(inv, (1, block, count, warps)) is None), default=STAGES[0])


def _key_bytes(inv: Invocation) -> int:
    """Of a key and its value in shared memory."""
    return sum(width(inv[name].shape[3]) for name in ("key", "value")) * int(inv["key"].dtype.itemsize)
