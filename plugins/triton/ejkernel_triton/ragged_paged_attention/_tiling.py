"""The tokens of tiles, how keys are split, and the blocks, warps and stages of programs, from shapes and the card.

A shape is (splits, block, warps, stages); the first is the heuristic, and a tuner measures all of them. With a
``split_size``, nothing that the bits depend on follows from the number of tokens, sequences or pages: the tile has the
least rows, and blocks and warps are the same in all shapes.
"""

from __future__ import annotations

from ejkernel_core import Invocation, Unsupported
from ejkernel_ops.flash_attention.tokens import band
from ejkernel_ops.pages import pages_of
from ejkernel_ops.ragged_paged_attention.definition import kv_heads, most_keys, output_dtype, value_dim
from ejkernel_ops.ragged_paged_attention.tiles import tile_bound
from ejkernel_triton.flash_attention._problem import width
from ejkernel_triton.flash_attention_decode._tiling import (
    BLOCKS,
    LEAST_BLOCKS,
    LEAST_ROWS,
    MOST_ROWS,
    PROGRAMS,
    SPLITS,
    STEP_BYTES,
    limit,
)
from ejkernel_triton.launch._cards import capability, multiprocessors

Shape = tuple[int, int, int, int]

#: The most bytes of the sums of all parts. Where there would be more, one program has all parts of a tile.
PART_BYTES = 256 << 20


def sides(inv: Invocation) -> tuple[int, int]:
    """How many positions to the left and to the right of its own a token sees; -1 for a side without a limit, also
    where that is farther than any key is. So sums of them and of positions are int32.
    """
    left, right = band(inv["causal"], inv["sliding_window"])
    farthest = most_keys(inv) + int(inv["query"].shape[0])
    return tuple(-1 if side is None or side >= farthest else side for side in (left, right))  # type: ignore[return-value]


def group(inv: Invocation) -> int:
    """The heads that share a key head."""
    return int(inv["query"].shape[1]) // kv_heads(inv)


def tile(inv: Invocation) -> tuple[int, int, int]:
    """The tokens of a tile, a power of two; its heads of a key head; and its rows, a power of two of at least 16."""
    dim = max(width(inv["query"].shape[2]), width(value_dim(inv)))
    columns = dim * (4 if output_dtype(inv).itemsize == 4 else 1)
    most = next((rows for most_columns, rows in MOST_ROWS if columns <= most_columns), LEAST_ROWS)
    heads = min(group(inv), most)
    if inv["split_size"] is not None:
        most = max(LEAST_ROWS, 1 << (heads - 1).bit_length())
    size = 1 << ((most // heads).bit_length() - 1)
    if inv["split_size"] is None:
        size = min(size, 1 << (longest(inv) - 1).bit_length())
    return size, heads, max(LEAST_ROWS, 1 << (size * heads - 1).bit_length())


def longest(inv: Invocation) -> int:
    """The most tokens of a sequence. Where nothing is said, no more tokens than sequences are taken for decoding."""
    tokens, sequences = int(inv["query"].shape[0]), int(inv["kv_lens"].shape[0])
    return int(inv["max_query_len"] or (1 if tokens <= sequences else tokens))


def tile_count(inv: Invocation) -> int:
    """The places for tiles."""
    return tile_bound(inv["query"].shape[0], inv["kv_lens"].shape[0], tile(inv)[0])


def program_count(inv: Invocation) -> int:
    """The programs of one split."""
    return tile_count(inv) * kv_heads(inv) * -(-group(inv) // tile(inv)[1])


def part_count(inv: Invocation, splits: int) -> int:
    """The parts whose sums are combined."""
    return splits if inv["split_size"] is None else -(-most_keys(inv) // inv["split_size"])


def shapes(inv: Invocation) -> list[Shape]:
    """The shapes that fit the card, the best first."""
    block = _block(inv)
    splits = split_count(inv, block)
    programs = _programs(inv, block)
    others = (2 * splits, splits // 2, 4 * splits)
    candidates = [(splits, *program) for program in programs] + [(count, *programs[0]) for count in others]
    fits = [one for one in candidates if one[0] in SPLITS and one[1] in BLOCKS and is_possible(inv, one)]
    return list(dict.fromkeys(fits)) or [_smallest(inv)]


def _programs(inv: Invocation, block: int) -> list[tuple[int, int, int]]:
    """Blocks, warps and stages."""
    if inv["split_size"] is not None:
        warps = 8 if output_dtype(inv).itemsize == 4 else 4
        fits = [(block, warps, stages) for stages in (3, 2, 4, 1) if is_possible(inv, (1, block, warps, stages))]
        return fits or [(BLOCKS[0], warps, 1)]
    if output_dtype(inv).itemsize == 4:  # fewer warps have too few registers
        return [(block, 8, 3), (block, 8, 2), (block, 8, 4)]
    if tile(inv)[2] >= 64 and not has_asynchronous_products(inv):  # four warps have too few registers for 64 keys
        return [(block, 8, 3), (block, 8, 2), (block // 2, 4, 4), (block // 2, 4, 3)]
    others = [(block, 4, 2), (block // 2, 4, 4), (block, 8, 3)]
    if pages_of(inv)[0].dtype.itemsize == 1:  # half as many bytes; twice as many keys would have too few registers
        return [(block, 4, 4), (block, 4, 3), *others]
    return [(block, 4, 3), (block, 4, 4), *others, (2 * block, 8, 2)]


def check_shape(inv: Invocation, shape: Shape) -> None:
    """Raise for a shape that the card or the call cannot have."""
    if shared_memory(inv, shape) > limit(inv):
        raise Unsupported(
            f"splits, block, warps and stages {shape} need {shared_memory(inv, shape)} bytes of shared memory, and "
            f"there are {limit(inv)} (the card's, or EJKERNEL_TRITON_SMEM_LIMIT)"
        )
    if not is_possible(inv, shape):
        raise Unsupported(f"{shape[0]} splits need {part_bytes(inv, shape[0])} bytes; there may be {PART_BYTES}")


def is_possible(inv: Invocation, shape: Shape) -> bool:
    return shared_memory(inv, shape) <= limit(inv) and (shape[0] == 1 or part_bytes(inv, shape[0]) <= PART_BYTES)


def part_bytes(inv: Invocation, splits: int) -> int:
    """Of the sums of all parts."""
    tokens, heads, _ = inv["query"].shape
    return int(tokens * heads * part_count(inv, splits) * (value_dim(inv) + 2) * 4)


def _smallest(inv: Invocation) -> Shape:
    shape = (1, BLOCKS[0], 4, 1)
    check_shape(inv, shape)
    return shape


def shared_memory(inv: Invocation, shape: Shape) -> int:
    """An upper bound of the bytes of a program: keys and values of each stage, queries and weights of a tile."""
    _, block, _, stages = shape
    _, _, rows = tile(inv)
    size, dims = output_dtype(inv).itemsize, [width(inv["query"].shape[2]), width(value_dim(inv))]
    pages = pages_of(inv)[0].dtype.itemsize
    from_shared_memory = has_asynchronous_products(inv)
    # Keys, values and the entries of the table.
    steps = max(1, stages - (not from_shared_memory)) * block * (sum(dims) * pages + 16)
    converted = block * sum(dims) * size if pages < size and from_shared_memory else 0
    operands = rows * (dims[0] * size + block * 4)
    return int(steps + converted + operands * (2 if size == 4 else 1) + 1024)  # float32 is two parts of TF32


def has_asynchronous_products(inv: Invocation) -> bool:
    """Whether the tensor cores read keys from shared memory while the next ones are fetched: those of Hopper, for 64
    rows. Smaller tiles, and other cards, have them in registers.
    """
    return tile(inv)[2] >= 64 and (capability(inv) or (0,))[0] in (9, 10)


def _block(inv: Invocation) -> int:
    """The keys of a step."""
    # Those of 8 bits become as wide as queries, in registers.
    of_key = (width(inv["query"].shape[2]) + width(value_dim(inv))) * int(output_dtype(inv).itemsize)
    most = STEP_BYTES // of_key
    block = min(128, max(16, 1 << (most.bit_length() - 1)))
    if inv["split_size"] is not None:
        return block
    return min(block, max(16, 1 << (most_seen(inv) - 1).bit_length()))


def split_count(inv: Invocation, block: int) -> int:
    """The splits: as many as give each multiprocessor its programs, if the keys that a tile sees are so many."""
    programs = program_count(inv)
    least = LEAST_BLOCKS * block if inv["split_size"] is None else inv["split_size"]
    most = max(1, most_seen(inv) // least)
    enough = PROGRAMS * multiprocessors(inv)
    counts = (count for count in SPLITS if count <= most and programs * count // 2 < enough)
    return max((count for count in counts if part_bytes(inv, count) <= PART_BYTES), default=1)


def most_seen(inv: Invocation) -> int:
    """The most keys that the tokens of a tile see."""
    left, right = sides(inv)
    return most_keys(inv) if left < 0 or right < 0 else min(most_keys(inv), left + right + tile(inv)[0])
