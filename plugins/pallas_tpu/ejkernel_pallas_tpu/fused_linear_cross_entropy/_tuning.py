"""The sizes of tiles: the best, and those that fit into vector memory; and the calls that the kernels refuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import attrs
from attrs.validators import in_, instance_of, optional

from ejkernel_core import Invocation, Unsupported
from ejkernel_ops.fused_linear_cross_entropy.definition import rows as rows_of
from ejkernel_ops.fused_linear_cross_entropy.definition import vocab as vocab_of
from ejkernel_ops.symbolic import refuse_symbolic
from ejkernel_pallas_tpu.grouped_matmul._tiles import LANES, Tile
from ejkernel_pallas_tpu.grouped_matmul._tuning import (
    EXACT_PASSES,
    MOST_ENTRIES,
    PRODUCTS,
    SIZE,
    SPILLED,
    SPILLS,
    STEP,
    power_of_two,
    register_bytes,
)
from ejkernel_pallas_tpu.launch._devices import check_device
from ejkernel_pallas_tpu.launch._generations import generation

DTYPES = ("bfloat16", "float32")
ROWS, CHUNKS = (128, 256, 512, 1024, 2048), (32, 64, 128, 256, 512)
#: The sizes of tiles that are tried: of rows, columns, and entries of the hidden states. A weight is read once for each
#: tile of rows: the more of them, the less the memory has to do.
TRIED_ROWS, TRIED_COLUMNS, TRIED_DEPTHS = (2048, 1024, 512, 256, 128), (1024, 512, 256, 128), (None, 4096, 2048, 1024)
#: The rows that are multiplied and folded at a time.
CHUNK = 128
#: How many shapes of tiles are worth measuring.
SHAPES = 4
#: Of a chunk, the float32 arrays of its logits that are alive at a time.
CHUNK_ARRAYS = 5
#: Columns are numbered in float32, which has all integers up to here.
MOST_WORDS = 2**24


@attrs.frozen
class Config:
    """The sizes of a tile: rows, words of the vocabulary, and entries of a hidden state, or None for all of them."""

    rows: int = attrs.field(default=512, validator=in_(ROWS))
    columns: int = attrs.field(default=512, validator=SIZE)
    depth: int | None = attrs.field(default=None, validator=optional(SIZE))
    #: How many rows are multiplied at a time.
    chunk: int = attrs.field(default=CHUNK, validator=in_(CHUNKS))
    #: Run in the interpreter of Pallas, on any device, for debugging.
    interpret: bool = attrs.field(default=False, validator=instance_of(bool))


#: At most how many bytes of vector memory a tile takes.
Memory = Callable[[Invocation, Tile], int]


def tile_of(inv: Invocation, cfg: Config) -> Tile:
    """The tile of a configuration. A call without rows has that of one row, which is not used."""
    rows, columns, depth = max(rows_of(inv), 1), vocab_of(inv), inv["hidden"].shape[-1]
    row_size = min(cfg.rows, power_of_two(rows)) if rows >= LANES else rows
    chunk = min(cfg.chunk, row_size) if rows >= LANES else row_size
    width = -(-columns // LANES) * LANES
    return Tile(row_size, min(cfg.columns, width), min(cfg.depth or depth, depth), chunk, rows, columns, depth)


def configs(inv: Invocation, memory: Memory, depths: Sequence[int | None] = TRIED_DEPTHS) -> list[Config]:
    """Those that fit into vector memory and are worth measuring, the best first."""
    chip = generation(inv.device_kind or "")
    assert chip is not None  # `check` refuses others
    depth = inv["hidden"].shape[-1]
    depths = [size for size in depths if size is None or size < depth]
    fits: list[Tile] = []
    for chunk in (CHUNK, CHUNKS[0]):  # fewer rows only where nothing fits otherwise
        sizes = {
            tile_of(inv, cfg): cfg
            for rows, columns, size in product(TRIED_ROWS, TRIED_COLUMNS, depths)
            if columns == LANES or columns * (size or depth) * passes(inv) <= MOST_ENTRIES
            for cfg in [Config(rows, columns, size, chunk)]
        }
        fits = [tile for tile in sizes if memory(inv, tile) <= chip.budget]
        if fits:
            break
    if not fits:
        raise Unsupported(f"no tile of this call fits into the {chip.budget >> 20} MiB that {chip.name} has")
    costs = {tile: _cost(inv, tile, memory(inv, tile), chip.name, chip.cores) for tile in fits}
    return [sizes[tile] for tile in sorted(fits, key=costs.__getitem__)[:SHAPES]]


def _cost(inv: Invocation, tile: Tile, memory: int, chip: str, cores: int) -> float:
    """How long a call takes, in bytes that are moved in this time. It only ranks."""
    size = inv["hidden"].dtype.itemsize
    idle = cores * -(-tile.row_tiles // cores) / tile.row_tiles
    hidden = tile.row_tiles * tile.rows * (tile.column_tiles if tile.depth_tiles > 1 else 1)
    moved = (hidden + tile.row_tiles * tile.all_columns) * tile.all_depth * size
    columns = tile.column_tiles * tile.columns
    products = 2 * tile.row_tiles * tile.rows * columns * tile.all_depth * passes(inv) / PRODUCTS[chip]
    steps = tile.row_tiles * tile.column_tiles * tile.depth_tiles
    cost: float = idle * (max(moved, products) + STEP * steps) + memory / 2
    return cost


def passes(inv: Invocation) -> int:
    """How often the matrix unit goes over an entry."""
    return EXACT_PASSES if inv["hidden"].dtype.itemsize == 4 else 1


def statistics_memory(inv: Invocation, tile: Tile, options: int = 0) -> int:
    """That of the statistics of a softmax. ``options`` are the further numbers of a row."""
    # Labels, largest logits, sums, logits of labels; an option has one or two.
    return forward_memory(inv, tile, 4 + 2 * options, 3 + options)


def forward_memory(inv: Invocation, tile: Tile, kept_of_rows: int, results: int) -> int:
    """Blocks count twice, because the next ones are fetched early. ``kept_of_rows`` are the arrays of a fold."""
    size = inv["hidden"].dtype.itemsize
    weight, hidden = matrix_bytes(inv, tile), register_bytes(tile.rows, tile.depth, size)
    moving = weight + hidden + register_bytes(8, tile.columns, 4) + register_bytes(8, tile.rows, 4)
    moving += register_bytes(results, tile.rows, 4)
    kept = kept_of_rows * register_bytes(tile.rows, LANES, 4)
    kept += CHUNK_ARRAYS * register_bytes(tile.chunk, tile.columns, 4)
    kept += register_bytes(tile.rows, tile.columns, 4) if tile.depth_tiles > 1 else 0
    part = weight + register_bytes(tile.chunk, tile.depth, size)
    if tile.all_depth % tile.depth:  # the entries behind the end are masked
        kept += 2 * part * (1 + 4 // size)
    return 2 * moving + kept + split_bytes(inv, part) + weight // SPILLED + SPILLS


def gradient_memory(inv: Invocation, tile: Tile) -> int:
    """That of either kernel of the gradients: which of them takes more depends on the sides of a tile."""
    size, side = inv["hidden"].dtype.itemsize, max(tile.rows, tile.columns)
    weight, hidden = matrix_bytes(inv, tile), register_bytes(tile.rows, tile.depth, size)
    result = 4 if inv["partial_sums"] else size
    moving = weight + hidden + 2 * register_bytes(8, tile.columns, 4) + register_bytes(8, tile.rows, 4)
    moving += max(register_bytes(side, tile.depth, result), register_bytes(tile.depth, side, result))
    kept = max(register_bytes(side, tile.depth, 4), register_bytes(tile.depth, side, 4))
    kept += 6 * register_bytes(tile.rows, LANES, 4) + (CHUNK_ARRAYS + 2) * register_bytes(tile.chunk, tile.columns, 4)
    chunk = register_bytes(tile.chunk, tile.depth, 4)
    part = weight + 2 * chunk
    if tile.all_columns % tile.columns:  # the words behind the end are masked
        kept += weight * (1 + 4 // size)
    return 2 * moving + kept + 3 * chunk + split_bytes(inv, part) + weight // SPILLED + SPILLS


def matrix_bytes(inv: Invocation, tile: Tile) -> int:
    """Of a tile of the weight."""
    sides = (tile.columns, tile.depth) if inv["transpose_weight"] else (tile.depth, tile.columns)
    return register_bytes(*sides, inv["weight"].dtype.itemsize)


def split_bytes(inv: Invocation, operands: int) -> int:
    """For a product in float32, each operand is split into three arrays of bfloat16."""
    return 6 * operands // 4 if inv["hidden"].dtype.itemsize == 4 else 0


def vmem_limit(inv: Invocation) -> int | None:
    """How much vector memory a kernel requests from the compiler."""
    chip = generation(inv.device_kind or "")
    return chip.budget if chip else None


# -- refusals --------------------------------------------------------------------------------------------------------


def check(inv: Invocation) -> None:
    """Raise `Unsupported` for a device or arguments that the kernels do not support."""
    check_device(inv)
    check_arguments(inv)


def check_config(inv: Invocation, cfg: Config, memory: Memory) -> None:
    """Raise `Unsupported` for a call that is not supported, and for tiles that do not fit into vector memory."""
    if cfg.interpret:
        check_arguments(inv)
        return
    check(inv)
    limit = vmem_limit(inv)
    if limit is not None and memory(inv, tile_of(inv, cfg)) > limit:
        raise Unsupported(f"these tiles take more than the {limit >> 20} MiB of vector memory: take smaller ones")


def check_arguments(inv: Invocation) -> None:
    """Raise for arguments that the kernels do not support, interpreted or not."""
    refuse_symbolic(inv)
    for name in ("hidden", "bias"):  # the weight has the dtype of the first
        array: Any = inv[name]
        if array is not None and str(array.dtype) not in DTYPES:
            raise Unsupported(
                f"the Pallas TPU kernels take {' and '.join(DTYPES)}; {name} is {array.dtype}, which a TPU does not "
                "multiply"
            )
    if vocab_of(inv) > MOST_WORDS:
        raise Unsupported(f"the Pallas TPU kernels number up to {MOST_WORDS} words; weight has {vocab_of(inv)}")


def has_rows(inv: Invocation) -> bool:
    """Whether there is anything to compute."""
    return bool(rows_of(inv))
