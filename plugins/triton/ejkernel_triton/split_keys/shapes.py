"""How keys are split, and the blocks, stages and warps of programs.

A multiprocessor has one program or two, and nearly all of its shared memory are rings of blocks that are on their way.
A shape is (splits, block, stages, warps, programs); the first is the heuristic, and a tuner measures all of them.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from ejkernel_core import Unsupported
from ejkernel_triton.flash_attention_decode._tiling import LEAST_BLOCKS, SPLITS

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
#: The same where keys or values are there, too, as two numbers in a register.
CONVERTED_NUMBERS = 4608
#: Of a multiprocessor, and of the warp that fetches and the three that Triton adds to it.
REGISTERS, OTHER_WARPS = 64 << 10, 4
#: What CUDA takes of the shared memory for each program, of which the limit leaves one out.
RESERVED_BY_CUDA = 1 << 10
#: Barriers, and what Triton keeps beside them.
OTHER_BYTES = 1 << 10


@attrs.frozen
class Problem:
    """What the shapes of a call are chosen by. Pairs are for one program on a multiprocessor, and for two."""

    #: Of a tile.
    rows: int
    #: How many tiles read the same blocks. Of two programs each has too few registers for two.
    together: tuple[int, int]
    #: How many parts there are of each split.
    parts: tuple[int, int]
    #: The most keys that the queries of a part see.
    most_seen: int
    #: The columns of queries and values in shared memory.
    width: int
    v_width: int
    #: The bytes of a number of queries and weights.
    itemsize: int
    multiprocessors: int
    #: The shared memory of a program, if a multiprocessor has one.
    shared_memory_limit: int
    #: The keys of a part, if their number is fixed; else 0.
    part_size: int = 0
    #: So many that the sums of all parts are not too large.
    most_splits: int = SPLITS[-1]
    #: The bytes of a number of keys and values.
    key_itemsize: int = 2

    @property
    def key_bytes(self) -> int:
        """Of a key and its value in shared memory."""
        return (self.width + self.v_width) * self.key_itemsize

    @property
    def has_rows(self) -> bool:
        """Whether queries are the rows of products."""
        return self.rows == MANY_ROWS and self.key_itemsize > 1


def shapes(problem: Problem) -> list[Shape]:
    """The shapes that fit the card, the best first."""
    if problem.part_size:
        return _shapes_of_parts(problem)
    block = _block(problem)
    one, two = ((block, _most_stages(problem, block, 4, count), 4, count) for count in PROGRAMS)
    long = (128, _most_stages(problem, 128, 4, 1), 4, 1)
    # Two tiles have long steps, in which each product reads its 64 rows less often.
    first = two if problem.together[0] == 1 else long if problem.rows == MANY_ROWS else one
    programs = [
        *(first, two, one, long),
        (128, _most_stages(problem, 128, 8, 1), 8, 1),
        *((block, stages, 4, 1) for stages in (4, 3)),
        (block, 2, 4, 2),
        (block, _most_stages(problem, block, 8, 1), 8, 1),
    ]
    if problem.key_itemsize == 1:
        programs.append((BLOCKS[0], _most_stages(problem, BLOCKS[0], 4, 2), 4, 2))
    splits = _splits(problem, block, first[3])
    others = (2 * splits, splits // 2, 4 * splits)
    candidates = [
        *((splits, *program) for program in programs),
        *((count, *program) for count in others for program in (two, one)),
    ]
    return _fitting(problem, candidates) or [_smallest(problem, splits)]


def _shapes_of_parts(problem: Problem) -> list[Shape]:
    """With parts of a fixed size. Blocks and warps are the same in all of them: the bits depend on these."""
    sizes = (size for size in BLOCKS[::-1] if size <= _block(problem) and _reason(problem, (1, size, 2, 4, 1)) is None)
    block = next(sizes, BLOCKS[0])
    two, one = ((block, _most_stages(problem, block, 4, count), 4, count) for count in PROGRAMS[::-1])
    splits = _splits(problem, block, 2)
    candidates = [
        *((splits, *program) for program in (two, one)),
        *((splits, block, stages, 4, 1) for stages in (4, 3)),
        (splits, block, 2, 4, 2),
        *((count, *program) for count in (2 * splits, splits // 2, 4 * splits) for program in (two, one)),
    ]
    return _fitting(problem, candidates) or [_smallest(problem, splits)]


def _fitting(problem: Problem, candidates: Iterable[Shape]) -> list[Shape]:
    """Those of more than one stage that fit."""
    return [shape for shape in dict.fromkeys(candidates) if shape[2] > 1 and _reason(problem, shape) is None]


def _block(problem: Problem) -> int:
    """The most keys of which a step has so many bytes; of 8 bits, as many as there are registers for."""
    sizes = (size for size in BLOCKS[::-1] if size * problem.key_bytes <= STEP_BYTES)
    if problem.key_itemsize == 1:
        sizes = (size for size in sizes if _has_registers(problem, size, 4, 1))
    return next(sizes, BLOCKS[0])


def _splits(problem: Problem, block: int, programs: int) -> int:
    """The fewest that keep the multiprocessors busy, if the keys that a query sees are so many."""
    most = min(problem.most_splits, max(1, problem.most_seen // (problem.part_size or LEAST_BLOCKS * block)))
    enough = BUSY * problem.multiprocessors * (programs if problem.rows == MANY_ROWS else 1)
    return max(
        count for count in SPLITS if count == 1 or (count <= most and problem.parts[programs - 1] * count // 2 < enough)
    )


def _smallest(problem: Problem, splits: int) -> Shape:
    shape = (splits, BLOCKS[0], STAGES[0], WARPS[0], PROGRAMS[0])
    check_fits(problem, shape)
    return shape


def check_fits(problem: Problem, shape: Shape) -> None:
    """Raise for a shape that the card or its products do not take."""
    if (reason := _reason(problem, shape)) is not None:
        raise Unsupported(f"splits, block, stages, warps and programs {shape} {reason}")


def _reason(problem: Problem, shape: Shape) -> str | None:
    """Why a shape does not fit; None if it does."""
    splits, block, _, warps, programs = shape
    if problem.part_size and warps > 4:
        return "do not fit: parts of a fixed size have four warps"
    if splits > problem.most_splits and splits in SPLITS:
        return f"do not fit: the sums of all parts are too large for more than {problem.most_splits} splits"
    if splits not in SPLITS:
        return f"do not fit: the splits are {', '.join(map(str, SPLITS))}"
    if warps > 4 and problem.key_itemsize == 1:
        return "do not fit: programs that read numbers of 8 bits have four warps"
    if warps > 4 and (programs > 1 or problem.rows == MANY_ROWS or problem.together[0] > 1):
        return f"do not fit: only one tile, of less than {MANY_ROWS} rows, in one program may have eight warps"
    if not _has_registers(problem, block, warps, programs):
        return f"do not fit: logits and sums of {problem.rows} rows are too many for the registers of {warps} warps"
    limit = (problem.shared_memory_limit + RESERVED_BY_CUDA) // programs - RESERVED_BY_CUDA
    if (size := shared_memory(problem, shape)) > limit:
        return f"need {size} bytes of shared memory, and there are {limit} (the card's, or EJKERNEL_TRITON_SMEM_LIMIT)"
    return None


def _has_registers(problem: Problem, block: int, warps: int, programs: int) -> bool:
    numbers = (block + problem.v_width) * problem.rows
    if problem.key_itemsize == 1:
        converted = block * max(problem.width, problem.v_width)
        return numbers + converted // 2 <= CONVERTED_NUMBERS * warps
    is_one = problem.rows == MANY_ROWS and programs == 1
    return numbers <= (MANY_ROWS_NUMBERS if is_one else WARP_NUMBERS) * warps


def registers(warps: int, programs: int) -> int:
    """Of a thread, with which so many programs fit; a multiple of eight."""
    return REGISTERS // (programs * (warps + OTHER_WARPS) * 32) // 8 * 8


def shared_memory(problem: Problem, shape: Shape) -> int:
    """An upper bound of the bytes of a program: keys and values of each stage, queries of a tile, and if they are
    columns their weights and what warps exchange, eight numbers of each of four warps for each row.
    """
    _, block, stages, _, programs = shape
    rows, size = problem.rows, problem.itemsize
    exchanged = 0 if problem.has_rows else rows * (block * size + 4 * 8 * 4)
    own = rows * problem.width * size + exchanged
    return stages * block * problem.key_bytes + problem.together[programs - 1] * own + OTHER_BYTES


def _most_stages(problem: Problem, block: int, warps: int, programs: int) -> int:
    """As many as fit into the ring and the card; the least if none do."""
    fits = [count for count in STAGES if count * block * problem.key_bytes <= RING_BYTES // programs]
    fits = [count for count in fits if _reason(problem, (1, block, count, warps, programs)) is None]
    return max(fits, default=STAGES[0])
