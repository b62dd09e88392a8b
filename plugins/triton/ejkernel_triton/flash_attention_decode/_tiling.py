"""How keys are split, and the blocks, warps and stages of programs, from the shapes of a call and the card.

Decoding is as fast as the card reads keys and values. So there are enough programs to keep all multiprocessors busy to
the end, and each has steps of about `STEP_BYTES` in flight. A shape is (splits, block, warps, stages); the first is the
heuristic, and a tuner measures all of them.
"""

from __future__ import annotations

from ejkernel_core import Invocation, Unsupported
from ejkernel_ops.calibration import get_shared_memory_limit
from ejkernel_ops.flash_attention.tokens import band
from ejkernel_triton.flash_attention._problem import width
from ejkernel_triton.launch._cards import capability, multiprocessors

Shape = tuple[int, int, int, int]

SPLITS = (1, 2, 4, 8, 16, 32, 64, 128)
BLOCKS = (16, 32, 64, 128)
#: Keys and values of a step: three steps of two programs fit into the shared memory of a Hopper GPU.
STEP_BYTES = 32 << 10
#: The least programs of a multiprocessor; two run at a time, so the last ones to end leave little of it idle.
PROGRAMS = 4
#: From so many keys of a split on, and for tiles of so many rows, more and shorter steps in flight are faster: on an
#: H100 64 x 8192 keys take 708 us in place of 745. Shorter splits take up to 2 % longer.
LONG_SPLIT, LOW_TILE = 4096, 32
#: The least keys of a split, in blocks: a program needs some to have several steps in flight.
LEAST_BLOCKS = 2
#: The most rows of a tile, queries times heads of a key head, by padded head dim: for more, threads have too few
#: registers. A number of float32 takes as many as two of 16 bits, and is two parts of TF32.
MOST_ROWS = ((128, 64), (256, 32))
LEAST_ROWS = 16
#: The shared memory that CUDA reserves on a multiprocessor, for cards whose limit is that of the data sheet.
RESERVED_BY_CUDA = {(8, 0): 1024}


def sides(inv: Invocation) -> tuple[int, int]:
    """How many positions to the left and to the right of its own a query sees; -1 for a side without a limit."""
    left, right = band(inv["causal"], inv["sliding_window"])
    return -1 if left is None else left, -1 if right is None else right


def rows(inv: Invocation) -> tuple[int, int]:
    """The rows of a tile, a power of two of at least 16, and how many tiles the rows of a key head are."""
    _, queries, heads, dim = inv["query"].shape
    count = queries * (heads // inv["key"].shape[2])
    columns = max(width(dim), width(inv["value"].shape[3])) * (4 if inv["query"].dtype.itemsize == 4 else 1)
    most = next((rows for most_columns, rows in MOST_ROWS if columns <= most_columns), LEAST_ROWS)
    size = min(most, max(LEAST_ROWS, 1 << (count - 1).bit_length()))
    return size, -(-count // size)


def shapes(inv: Invocation) -> list[Shape]:
    """The shapes that fit the card, the best first."""
    block = _block(inv)
    splits = split_count(inv, block)
    programs = _programs(inv, block, splits)
    others = (2 * splits, splits // 2, 4 * splits)
    candidates = [(splits, *program) for program in programs] + [(count, *programs[0]) for count in others]
    fits = [one for one in candidates if one[0] in SPLITS and one[1] in BLOCKS and _fits(inv, one)]
    return fits or [_smallest(inv, splits)]


def _programs(inv: Invocation, block: int, splits: int) -> list[tuple[int, int, int]]:
    """Blocks, warps and stages."""
    if inv["query"].dtype.itemsize == 4:  # fewer warps have too few registers
        return [(block, 8, 3), (block, 8, 2), (block, 8, 4)]
    short, others = (block // 2, 4, 4), [(block, 4, 3), (block, 4, 2), (2 * block, 8, 2), (block, 8, 3), (block, 4, 4)]
    is_long = most_seen(inv) >= LONG_SPLIT * splits and rows(inv)[0] <= LOW_TILE
    return [short, *others] if is_long else [*others[:3], short, *others[3:]]


def check_fits(inv: Invocation, shape: Shape) -> None:
    """Raise for a shape that needs more shared memory than the card has."""
    if not _fits(inv, shape):
        raise Unsupported(
            f"splits, block, warps and stages {shape} need {shared_memory(inv, shape)} bytes of shared memory, and "
            f"there are {limit(inv)} (the card's, or EJKERNEL_TRITON_SMEM_LIMIT)"
        )


def _smallest(inv: Invocation, splits: int) -> Shape:
    shape = (splits, BLOCKS[0], 4, 1)
    check_fits(inv, shape)
    return shape


def _fits(inv: Invocation, shape: Shape) -> bool:
    return shared_memory(inv, shape) <= limit(inv)


def limit(inv: Invocation) -> int:
    """The bytes of shared memory that a program may take."""
    own = capability(inv)
    return get_shared_memory_limit(compute_capability=own) - RESERVED_BY_CUDA.get(own or (0, 0), 0)


def shared_memory(inv: Invocation, shape: Shape) -> int:
    """An upper bound of the bytes of a program: keys and values of each stage, queries and weights of a tile."""
    _, block, _, stages = shape
    tile, _ = rows(inv)
    size = inv["query"].dtype.itemsize
    # The tensor cores of Hopper read the last step from shared memory while the next ones are fetched. Tiles that are
    # small, and those of other cards, have it in registers.
    from_shared_memory = tile >= 64 and (capability(inv) or (0,))[0] in (9, 10)
    steps = max(1, stages - (not from_shared_memory)) * block * (_key_bytes(inv) + 4)
    operands = tile * (width(inv["query"].shape[3]) * size + block * 4)
    return int(steps + operands * (2 if size == 4 else 1) + 1024)  # float32 is two parts of TF32


def _key_bytes(inv: Invocation) -> int:
    """Of a key and its value in shared memory."""
    dims = (width(inv[name].shape[3]) for name in ("key", "value"))
    return sum(dims) * int(inv["key"].dtype.itemsize)


def _block(inv: Invocation) -> int:
    """The keys of a step."""
    most = STEP_BYTES // _key_bytes(inv)
    block = min(128, max(16, 1 << (most.bit_length() - 1)))
    return min(block, max(16, 1 << (most_seen(inv) - 1).bit_length()))


def split_count(inv: Invocation, block: int) -> int:
    """The splits: as many as give each multiprocessor its programs, if the keys that a query sees are so many."""
    batch, _, kv_heads, _ = inv["key"].shape
    programs = batch * kv_heads * rows(inv)[1]
    most = max(1, most_seen(inv) // (LEAST_BLOCKS * block))
    enough = PROGRAMS * multiprocessors(inv)
    return max(count for count in SPLITS if count == 1 or (count <= most and programs * count // 2 < enough))


def most_seen(inv: Invocation) -> int:
    """The most keys that the queries of a row of the batch see."""
    left, right = sides(inv)
    length = int(inv["key"].shape[1])
    return length if left < 0 or right < 0 else min(length, left + right + int(inv["query"].shape[1]))
