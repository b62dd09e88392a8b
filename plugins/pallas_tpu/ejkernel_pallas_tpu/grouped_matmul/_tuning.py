"""The sizes of tiles: the best, and all that fit into vector memory; and the calls that the kernels refuse."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import attrs
from attrs.validators import and_, ge, in_, instance_of, le, optional

from ejkernel_core import Invocation, Unsupported
from ejkernel_ops.grouped_matmul.axes import AXES, D_RHS_AXES, result_dtype
from ejkernel_ops.symbolic import refuse_symbolic
from ejkernel_pallas_tpu.grouped_matmul._tiles import LANES, Tile
from ejkernel_pallas_tpu.grouped_matmul._visits import NUMBERS, most_visits
from ejkernel_pallas_tpu.launch._devices import check_device
from ejkernel_pallas_tpu.launch._generations import Generation, generation

DTYPES = ("bfloat16", "float32")
ROWS, CHUNKS = (128, 256, 512, 1024), (32, 64, 128, 256, 512)
#: The sizes of tiles that are tried: of rows, and along k and n.
TRIED_ROWS, TARGETS = (512, 256), (16384, 4096, 2048, 1536, 1024, 512, 256, 128)
#: The most entries of a tile of matrices, times the passes of the matrix unit. Larger tiles take long to compile, and
#: to fetch before the first product.
MOST_ENTRIES = 2**23
#: The passes of the matrix unit for a product in float32.
EXACT_PASSES = 6
#: How many shapes of tiles are worth measuring.
SHAPES = 3
#: The rows that are multiplied at a time, by generation: the quickest by the estimates of ``ejkernel tpu``. Fewer rows
#: are wasted less where a group ends; wider matrix units need more of them, to have a matrix while the next one comes.
FORWARD_CHUNKS = {"v4": 64, "v5e": 64, "v5p": 64, "v6e": 128, "v7x": 128}
TRANSPOSED_CHUNKS = {"v4": 64, "v5e": 64, "v5p": 64, "v6e": 256, "v7x": 256}
#: In groups of so many chunks on average, a chunk has twice the rows: less is wasted where they end.
MANY_CHUNKS = 16
D_RHS_CHUNKS = {"v4": 128, "v5e": 128, "v5p": 128, "v6e": 256, "v7x": 256}
#: How many operations of a product take as long as a byte that is moved, and how many bytes as long as a step.
PRODUCTS = {"v4": 220, "v5e": 240, "v5p": 165, "v6e": 560, "v7x": 310}
STEP = 2**18
#: Bytes for what registers do not hold, and the part of the bytes of matrices that comes to them in long programs.
SPILLS, SPILLED = 2**18, 16
#: Words of scalar memory, of which there is 1 MiB, that a table may have.
MOST_NUMBERS = 2**17


def power_of_two(size: int) -> int:
    """The largest power of two that is at most ``size``."""
    return 1 << max(size.bit_length() - 1, 0)


def _whole_lanes(_: Any, field: Any, value: int) -> None:
    if value % LANES:
        raise ValueError(f"{field.name}: takes a multiple of {LANES}; got {value}")


#: The longest side of a tile, far more than any memory holds: places are counted in 32 bits.
LARGEST = 1 << 30
SIZE = and_(instance_of(int), ge(LANES), le(LARGEST), _whole_lanes)


@attrs.frozen
class Config:
    """The sizes of a tile: rows of ``lhs``, columns of n, and entries of k, or None for all of them."""

    rows: int = attrs.field(default=512, validator=in_(ROWS))
    columns: int = attrs.field(default=512, validator=SIZE)
    depth: int | None = attrs.field(default=None, validator=optional(SIZE))
    #: How many rows are multiplied at a time: those of other groups among them are multiplied in vain.
    chunk: int = attrs.field(default=128, validator=in_(CHUNKS))
    #: Run in the interpreter of Pallas, on any device, for debugging.
    interpret: bool = attrs.field(default=False, validator=instance_of(bool))


# -- tiles -----------------------------------------------------------------------------------------------------------


def is_gated(inv: Invocation) -> bool:
    """Whether the kernel applies the activation: it needs gates and values apart, from a multiple of the lanes on."""
    columns = _columns(inv) // 2
    return inv["activation"] in ("silu_gated", "gelu_gated") and columns > 0 and columns % LANES == 0


def _columns(inv: Invocation) -> int:
    return int(inv["rhs"].shape[1 if inv["transpose_rhs"] else 2])


def forward_tile(inv: Invocation, cfg: Config) -> Tile:
    """The tile of a product. Columns are those of its result."""
    (rows, depth), columns = inv["lhs"].shape, _columns(inv)
    if not is_gated(inv):
        return _tile(cfg, rows, columns, depth)
    columns //= 2
    size = columns if cfg.columns >= columns else math.gcd(cfg.columns, columns)  # the values begin with a tile
    return _tile(attrs.evolve(cfg, columns=size), rows, columns, depth)


def d_rhs_tile(inv: Invocation, cfg: Config) -> Tile:
    """The tile of a gradient: ``depth`` and ``columns`` are those of its matrices."""
    (output,) = D_RHS_AXES.outputs(inv)
    _, depth, columns = output.shape
    return _tile(cfg, inv["lhs"].shape[0], columns, depth)


def _tile(cfg: Config, *sizes: int) -> Tile:
    """For so many rows, columns and entries. A call without any has the tile of one, which is not used."""
    rows, columns, depth = (max(size, 1) for size in sizes)
    row_size = min(cfg.rows, power_of_two(rows)) if rows >= LANES else rows
    chunk = min(cfg.chunk, row_size) if rows >= LANES else row_size
    return Tile(row_size, min(cfg.columns, columns), min(cfg.depth or depth, depth), chunk, rows, columns, depth)


def vmem_limit(inv: Invocation) -> int | None:
    """How much vector memory a kernel requests from the compiler."""
    chip = generation(inv.device_kind or "")
    return chip.budget if chip else None


@attrs.frozen
class Kernel:
    """One of the two kernels, as a call uses it."""

    tile_of: Callable[[Invocation, Config], Tile]
    #: At most how many bytes of vector memory a tile takes.
    vmem: Callable[[Invocation, Tile], int]
    #: The bytes that are moved with a tile.
    traffic: Callable[[Invocation, Tile], int]
    #: Whether tiles of k are independent, and how many rows are best multiplied at a time.
    has_parallel_depth: bool
    chunks: Callable[[Invocation], Mapping[str, int]]
    #: How often the matrix unit goes over an entry of a tile of k and columns: for each matrix, and each pass.
    passes: Callable[[Invocation], int]
    groups: Callable[[Invocation], int]


def configs(inv: Invocation, kernel: Kernel) -> list[Config]:
    """Those that fit into vector memory and are worth measuring, the best first."""
    chip = generation(inv.device_kind or "")
    assert chip is not None  # `check` refuses others
    chunk = kernel.chunks(inv)[chip.name]
    tile = kernel.tile_of(inv, Config(depth=None, columns=2**30))
    if tile.all_rows >= MANY_CHUNKS * chunk * kernel.groups(inv):
        chunk *= 2
    columns, depths = _sizes(tile.all_columns), _sizes(tile.all_depth)
    sizes = {
        kernel.tile_of(inv, cfg): cfg
        for rows, column, depth in product(TRIED_ROWS, columns, depths)
        if column * depth * kernel.passes(inv) <= MOST_ENTRIES
        for cfg in [Config(rows, column, depth, chunk)]
    }
    limit = chip.budget
    fits = [tile for tile in sizes if kernel.vmem(inv, tile) <= limit and _has_table(inv, tile, kernel)]
    if not fits:
        raise Unsupported(
            f"the visits of {tile.all_rows} rows in {kernel.groups(inv)} groups do not fit into the scalar memory of a "
            f"TPU, which has a table of {MOST_NUMBERS // len(NUMBERS)} of them"
        )
    costs = {tile: _cost(inv, tile, kernel, chip) for tile in fits}
    best = [sizes[tile] for tile in sorted(fits, key=costs.__getitem__)[:SHAPES]]
    others = (attrs.evolve(best[0], chunk=size) for size in (chunk // 2, 2 * chunk) if size in CHUNKS)
    same = {kernel.tile_of(inv, cfg) for cfg in best}
    return best + [cfg for cfg in others if kernel.tile_of(inv, cfg) not in same and _fits(inv, cfg, kernel, limit)]


def _fits(inv: Invocation, cfg: Config, kernel: Kernel, limit: int) -> bool:
    return kernel.vmem(inv, kernel.tile_of(inv, cfg)) <= limit


def _sizes(size: int) -> list[int]:
    """Sizes of pieces that are similar: a whole, or multiples of the lanes."""
    pieces = (-(-size // parts) for parts in (-(-max(size, 1) // target) for target in TARGETS))
    return list(dict.fromkeys(-(-max(piece, 1) // LANES) * LANES for piece in pieces))


def _has_table(inv: Invocation, tile: Tile, kernel: Kernel) -> bool:
    return len(NUMBERS) * most_visits(tile.all_rows, kernel.groups(inv), tile.rows) <= MOST_NUMBERS


def _cost(inv: Invocation, tile: Tile, kernel: Kernel, chip: Generation) -> float:
    """How long a tile takes, in bytes that are moved in this time. It only ranks."""
    tiles = tile.column_tiles * (tile.depth_tiles if kernel.has_parallel_depth else 1)
    idle = chip.cores * -(-tiles // chip.cores) / tiles
    steps = tile.column_tiles * tile.depth_tiles * most_visits(tile.all_rows, kernel.groups(inv), tile.rows)
    rows = tile.all_rows + kernel.groups(inv) * kernel.chunks(inv)[chip.name]
    columns, depth = tile.column_tiles * tile.columns, tile.depth_tiles * tile.depth
    products = 2 * rows * columns * depth * kernel.passes(inv) / PRODUCTS[chip.name]
    return idle * (max(kernel.traffic(inv, tile), products) + STEP * steps) + kernel.vmem(inv, tile) / 2


# -- the product -----------------------------------------------------------------------------------------------------


def _parts(inv: Invocation) -> int:
    return 2 if is_gated(inv) else 1


def _forward_vmem(inv: Invocation, tile: Tile) -> int:
    """Blocks count twice, because the next ones are fetched early."""
    lhs, parts = inv["lhs"].dtype.itemsize, _parts(inv)
    # An activation outside of the kernel gets float32.
    size = result_dtype(inv).itemsize if inv["activation"] is None or is_gated(inv) else 4
    matrix = (
        register_bytes(tile.columns, tile.depth, lhs)
        if inv["transpose_rhs"]
        else register_bytes(tile.depth, tile.columns, lhs)
    )
    moving = register_bytes(tile.rows, tile.depth, lhs) + parts * (matrix + register_bytes(8, tile.columns, 4))
    moving += register_bytes(tile.rows, tile.columns, size)
    kept = parts * register_bytes(tile.rows, tile.columns, 4) if tile.depth_tiles > 1 else 0
    kept += (2 + 2 * parts) * register_bytes(tile.chunk, tile.columns, 4) + register_bytes(tile.chunk, tile.depth, lhs)
    if tile.all_depth % tile.depth:  # the entries behind the end are masked
        kept += 2 * (matrix + register_bytes(tile.chunk, tile.depth, lhs)) * (1 + 4 // lhs)
    split = _split(inv, parts * (matrix + register_bytes(tile.chunk, tile.depth, lhs)))
    return 2 * moving + kept + split + parts * matrix // SPILLED + SPILLS


def _forward_traffic(inv: Invocation, tile: Tile) -> int:
    """A matrix whose columns are not divided by k stays while the rows of its group go by."""
    size, groups = inv["lhs"].dtype.itemsize, inv["rhs"].shape[0]
    (output,) = AXES.outputs(inv)
    rows, visits = tile.all_rows, most_visits(tile.all_rows, groups, tile.rows)
    if tile.depth_tiles > 1:
        rows = visits * tile.rows
    matrices = visits if tile.depth_tiles > 1 else groups
    read = tile.all_depth * size * (rows * tile.column_tiles + matrices * tile.all_columns * _parts(inv))
    return int(read + tile.all_rows * tile.all_columns * output.dtype.itemsize)


FORWARD = Kernel(
    tile_of=forward_tile,
    vmem=_forward_vmem,
    traffic=_forward_traffic,
    has_parallel_depth=False,
    chunks=lambda inv: TRANSPOSED_CHUNKS if inv["transpose_rhs"] else FORWARD_CHUNKS,
    passes=lambda inv: _parts(inv) * _passes(inv),
    groups=lambda inv: inv["rhs"].shape[0],
)


# -- the gradient of matrices ----------------------------------------------------------------------------------------


def _d_rhs_vmem(inv: Invocation, tile: Tile) -> int:
    size = inv["lhs"].dtype.itemsize
    (output,) = D_RHS_AXES.outputs(inv)
    moving = register_bytes(tile.rows, tile.depth, size) + register_bytes(tile.rows, tile.columns, size)
    moving += register_bytes(tile.depth, tile.columns, output.dtype.itemsize)
    chunk = max(tile.chunk, LANES)  # fewer rows are transposed as so many
    chunks = register_bytes(chunk, tile.depth, size) + register_bytes(chunk, tile.columns, size)
    # The sums, and what is masked and transposed.
    return 2 * moving + register_bytes(tile.depth, tile.columns, 4) + 3 * chunks + _split(inv, 2 * chunks) + SPILLS


def _d_rhs_traffic(inv: Invocation, tile: Tile) -> int:
    (output,) = D_RHS_AXES.outputs(inv)
    read = tile.all_depth * tile.column_tiles + tile.all_columns * tile.depth_tiles
    written = output.size * output.dtype.itemsize
    return int(tile.all_rows * read * inv["lhs"].dtype.itemsize + written)


D_RHS = Kernel(
    tile_of=d_rhs_tile,
    vmem=_d_rhs_vmem,
    traffic=_d_rhs_traffic,
    has_parallel_depth=True,
    chunks=lambda inv: D_RHS_CHUNKS,
    passes=lambda inv: _passes(inv),
    groups=lambda inv: inv["boundaries"].shape[0] - 1,
)


def register_bytes(rows: int, lanes: int, size: int) -> int:
    """Of an array in vector memory, where registers of 4096 bytes are filled up."""
    multiple = 32 // size
    return -(-rows // multiple) * multiple * -(-lanes // LANES) * LANES * size


def _passes(inv: Invocation) -> int:
    return EXACT_PASSES if inv["lhs"].dtype.itemsize == 4 and inv["precision"] != "default" else 1


def _split(inv: Invocation, operands: int) -> int:
    """For a product in float32, each operand is split into three arrays of bfloat16."""
    return 6 * operands // 4 if inv["lhs"].dtype.itemsize == 4 else 0


# -- refusals --------------------------------------------------------------------------------------------------------


def check(inv: Invocation) -> None:
    """Raise `Unsupported` for a device or arguments that the kernels do not support."""
    check_device(inv)
    check_arguments(inv)


def check_config(inv: Invocation, cfg: Config, kernel: Kernel) -> None:
    """Raise `Unsupported` for a call that is not supported, and for tiles that do not fit into vector memory."""
    if cfg.interpret:
        check_arguments(inv)
        return
    check(inv)
    limit = vmem_limit(inv)
    if limit is not None and not _fits(inv, cfg, kernel, limit):
        raise Unsupported(f"these tiles take more than the {limit >> 20} MiB of vector memory: take smaller ones")
    tile = kernel.tile_of(inv, cfg)
    if not _has_table(inv, tile, kernel):
        raise Unsupported(f"{tile.all_rows} rows in tiles of {tile.rows} are too many: take larger tiles")


def check_arguments(inv: Invocation) -> None:
    """Raise for arguments that the kernels do not support, interpreted or not."""
    refuse_symbolic(inv)
    dtypes = {name: inv.get(name) for name in ("lhs", "rhs", "d_out", "rhs_bias")}
    dtypes = {name: str(array.dtype) for name, array in dtypes.items() if array is not None}
    if inv.get("preferred_element_type") is not None:
        dtypes["preferred_element_type"] = str(inv["preferred_element_type"])
    for name, dtype in dtypes.items():
        if dtype not in DTYPES:
            raise Unsupported(
                f"the Pallas TPU kernels take {' and '.join(DTYPES)}; {name} is {dtype}, which a TPU does not multiply"
            )
