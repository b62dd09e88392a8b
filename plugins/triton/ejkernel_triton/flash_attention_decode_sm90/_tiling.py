"""How keys are split, and the blocks, stages and warps of programs, from the shapes of a call and the card.

A multiprocessor has one program or two, and nearly all of its shared memory are rings of blocks that are on their way.
A shape is (splits, block, stages, warps, programs); the first is the heuristic, and a tuner measures all of them.
"""

from __future__ import annotations

from ejkernel_core import Invocation, Unsupported
from ejkernel_ops.calibration import get_shared_memory_limit
from ejkernel_triton.flash_attention_decode._tiling import LEAST_BLOCKS, SPLITS, most_seen, rows
from ejkernel_triton.flash_attention_sm90._launch import width
from ejkernel_triton.launch._cards import capability
from ejkernel_triton.launch._multiprocessors import multiprocessors

Shape = tuple[int, int, int, int, int]

#: The keys of a step, which are rows of the first product: the hardware multiplies 64 at a time.
BLOCKS = (64, 128)
STAGES = (1, 2, 3, 4, 5, 6, 8, 12)
WARPS = (4, 8)
PROGRAMS = (1, 2)
#: Tiles of so many rows are not transposed.
MANY_ROWS = 64
#: Of a step, keys and values, by default.
STEP_BYTES = 32 << 10
#: Of all stages: so much is on its way to a multiprocessor at a time.
RING_BYTES = 192 << 10
#: The least share of the multiprocessors that has a part; with `MANY_ROWS` of the programs, for then products take as
#: long as the memory. Otherwise, with so much on its way to each of them, the others use the whole bandwidth of the
#: memory, and parts that are not split need no second launch. On an H200 10 x 16384 keys of 8 heads take 160 us, and
#: 183 in two parts; 16 x 32768 keys 476 and 484.
BUSY = 0.6
#: The numbers of logits and sums of a step for each warp: more would not stay in registers. Of tiles with `MANY_ROWS`,
#: whose weights are in registers too, in one program.
WARP_NUMBERS, MANY_ROWS_NUMBERS = 3072, 4096
#: Of a multiprocessor, and of the warp that fetches and the three that Triton adds to it.
REGISTERS, OTHER_WARPS = 64 << 10, 4
#: What CUDA takes of the shared memory for each program, of which the limit leaves one out.
RESERVED_BY_CUDA = 1 << 10
#: Barriers, and what Triton keeps beside them.
OTHER_BYTES = 1 << 10


def shapes(inv: Invocation) -> list[Shape]:
    """The shapes that fit the card, the best first."""
    block = next((size for size in BLOCKS[::-1] if size * _key_bytes(inv) <= STEP_BYTES), BLOCKS[0])
    one, two = ((block, _most_stages(inv, block, 4, count), 4, count) for count in PROGRAMS)
    long = (128, _most_stages(inv, 128, 4, 1), 4, 1)
    # Two tiles have long steps, in which each product reads its 64 rows less often.
    first = two if rows(inv)[1] == 1 else long if rows(inv)[0] == MANY_ROWS else one
    programs = [
        *(first, two, one, long),
        (128, _most_stages(inv, 128, 8, 1), 8, 1),
        *((block, stages, 4, 1) for stages in (4, 3)),
        (block, 2, 4, 2),
        (block, _most_stages(inv, block, 8, 1), 8, 1),
    ]
    splits = _splits(inv, block, first[3])
    others = (2 * splits, splits // 2, 4 * splits)
    candidates = [
        *((splits, *program) for program in programs),
        *((count, *program) for count in others for program in (two, one)),
    ]
    fits = [shape for shape in dict.fromkeys(candidates) if shape[2] > 1 and _reason(inv, shape) is None]
    return fits or [_smallest(inv, splits)]


def _splits(inv: Invocation, block: int, programs: int) -> int:
    """The fewest that keep the multiprocessors busy, if the keys that a query sees are so many."""
    most = max(1, most_seen(inv) // (LEAST_BLOCKS * block))
    enough = BUSY * multiprocessors(inv) * (programs if rows(inv)[0] == MANY_ROWS else 1)
    return max(
        count for count in SPLITS if count == 1 or (count <= most and parts(inv, programs) * count // 2 < enough)
    )


def parts(inv: Invocation, programs: int) -> int:
    """How many there are of each split."""
    batch, _, kv_heads, _ = inv["key"].shape
    return int(batch * kv_heads * tiles(inv, programs)[1])


def tiles(inv: Invocation, programs: int) -> tuple[int, int]:
    """How many tiles of a key head read the same blocks of a ring, and how many such sets of tiles there are. Of two
    programs on a multiprocessor each has too few registers for two.
    """
    count = rows(inv)[1]
    together = 2 if count > 1 and programs == 1 else 1
    return together, -(-count // together)


def _smallest(inv: Invocation, splits: int) -> Shape:
    shape = (splits, BLOCKS[0], STAGES[0], WARPS[0], PROGRAMS[0])
    check_fits(inv, shape)
    return shape


def check_fits(inv: Invocation, shape: Shape) -> None:
    """Raise for a shape that the card or its products do not take."""
    if (reason := _reason(inv, shape)) is not None:
        raise Unsupported(f"splits, block, stages, warps and programs {shape} {reason}")


def _reason(inv: Invocation, shape: Shape) -> str | None:
    """Why a shape does not fit; None if it does."""
    splits, block, _, warps, programs = shape
    if splits not in SPLITS:
        return f"do not fit: the splits are {', '.join(map(str, SPLITS))}"
    if warps > 4 and (programs > 1 or rows(inv)[0] == MANY_ROWS or rows(inv)[1] > 1):
        return f"do not fit: only one tile, of less than {MANY_ROWS} rows, in one program may have eight warps"
    numbers = MANY_ROWS_NUMBERS if rows(inv)[0] == MANY_ROWS and programs == 1 else WARP_NUMBERS
    if (block + width(inv["value"].shape[3])) * rows(inv)[0] > numbers * warps:
        return f"do not fit: logits and sums of {rows(inv)[0]} rows are too many for the registers of {warps} warps"
    limit = get_shared_memory_limit(compute_capability=capability(inv))
    limit = (limit + RESERVED_BY_CUDA) // programs - RESERVED_BY_CUDA
    if (size := shared_memory(inv, shape)) > limit:
        return f"need {size} bytes of shared memory, and there are {limit} (the card's, or EJKERNEL_TRITON_SMEM_LIMIT)"
    return None


def registers(warps: int, programs: int) -> int:
    """Of a thread, with which so many programs fit; a multiple of eight."""
    return REGISTERS // (programs * (warps + OTHER_WARPS) * 32) // 8 * 8


def shared_memory(inv: Invocation, shape: Shape) -> int:
    """An upper bound of the bytes of a program: keys and values of each stage, queries of a tile, and if they are
    columns their weights and what warps exchange, eight numbers of each of four warps for each row.
    """
    _, block, stages, _, programs = shape
    tile, _ = rows(inv)
    size = int(inv["query"].dtype.itemsize)
    exchanged = 0 if tile == MANY_ROWS else tile * (block * size + 4 * 8 * 4)
    own = tile * width(inv["query"].shape[3]) * size + exchanged
    return stages * block * _key_bytes(inv) + tiles(inv, programs)[0] * own + OTHER_BYTES


def _most_stages(inv: Invocation, block: int, warps: int, programs: int) -> int:
    """As many as fit into the ring and the card; the least if none do."""
    fits = [count for count in STAGES if count * block * _key_bytes(inv) <= RING_BYTES // programs]
    fits = [count for count in fits if _reason(inv, (1, block, count, warps, programs)) is None]
    return max(fits, default=STAGES[0])


def _key_bytes(inv: Invocation) -> int:
    """Of a key and its value in shared memory."""
    return sum(width(inv[name].shape[3]) for name in ("key", "value")) * int(inv["key"].dtype.itemsize)
