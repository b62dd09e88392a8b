"""Which tiles: how many rows and columns a program holds, by how many warps, and whether rows are read once or twice.

The numbers follow from measurements on an H100 (docs/measurements), and from the registers that a tile takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import TypeVar

import attrs

from ejkernel_core import Invocation, Unsupported
from ejkernel_ops.rms_norm.axes import FORMATS
from ejkernel_triton.launch._cards import multiprocessors
from ejkernel_triton.launch._requirements import require_card, require_float8
from ejkernel_triton.norms import BackwardConfig, Config

DTYPES = ("float16", "bfloat16", "float32")
#: The longest rows that the forward holds in registers, 32 entries a thread, of 512 threads; and of 1,024, with one
#: program on a multiprocessor. Of longer rows there is one on each, too: then they stay in the L2 cache until they are
#: read the second time.
LONGEST, LONGEST_OF_32_WARPS = 16384, 32768
#: The same for the backward, which holds several arrays.
LONGEST_BACKWARD = 8192
#: The entries that a program of the backward holds for a row that it reads twice.
MOST_HELD = 16384
#: The tiles of the backward have 2,048 entries for rows up to the first length, 4,096 up to the second, with more
#: entries a thread there; and 8,192 from the third on, where there are many rows.
NARROW, MIDDLE, WIDE = 512, 1024, 4096
#: The columns of the narrowest tile.
LEAST_COLUMNS = 16
#: The entries of a tile that a thread may have: with more, the compiler would work for minutes, and spill registers.
MOST_ENTRIES = 64
REGISTERS, MOST_REGISTERS, THREADS = 65536, 224, 32
#: Calls of so many entries or fewer are left to XLA. After a product of this size, whose sums it divides among several
#: programs, XLA normalizes in the kernels that add them up.
FEW_ENTRIES, FEW_ENTRIES_BACKWARD = 1 << 21, 1 << 15
#: Fewer rows of more than LONGEST entries are left to XLA, too: one multiprocessor has to read each.
FEW_ROWS = 8
#: The same for the backward. Of rows of more entries than a key, fewer than these for each multiprocessor are left.
FEW_ROWS_BACKWARD = {4096: 1, 8192: 3}

C = TypeVar("C")


# -- what can be done ------------------------------------------------------------------------------------------------


def check(inv: Invocation) -> None:
    """Raise where this card, these versions, or these arrays are not for Triton."""
    require_card(inv)
    for name, array in inv.arguments.items():
        dtype = getattr(array, "dtype", None)
        if dtype is not None and str(dtype) not in DTYPES:
            raise Unsupported(f"the Triton kernels take {', '.join(DTYPES)}; {name} is {dtype}")


def check_quantized(inv: Invocation) -> None:
    """The same for results in 8 bits."""
    check(inv)
    if inv["quantize"].startswith("fp8"):
        require_float8(inv)


def check_config(inv: Invocation, cfg: Config | BackwardConfig) -> None:
    """Raise where a configuration of the caller's cannot be compiled, or has what the call does not use."""
    entries = cfg.rows * (cfg.block or width(inv))
    most = MOST_ENTRIES * THREADS * cfg.num_warps
    if entries > most:
        raise Unsupported(
            f"{cfg.num_warps} warps hold {most} entries, and a tile has {entries}: "
            "take fewer rows, more warps, or a block"
        )
    if isinstance(cfg, BackwardConfig) and cfg.columns and (cfg.programs != 1 or not cfg.block):
        raise Unsupported("a second kernel for columns takes programs=1, and a block for the first one")
    if isinstance(cfg, BackwardConfig) and cfg.block and not cfg.columns and cfg.rows * _held(inv) > MOST_HELD:
        raise Unsupported(f"a program holds {MOST_HELD} entries of rows or their sums at most: take columns")
    if isinstance(cfg, Config) and cfg.programs and (cfg.block or "quantize" in inv):
        raise Unsupported("only whole rows without quantize are taken one after the other: programs must be 0")


def rank(inv: Invocation) -> int:
    """Before XLA where a launch brings more than it costs."""
    return _rank(inv, FEW_ENTRIES, _are_few_long_rows)


def quantized_rank(inv: Invocation) -> int:
    """The same for results in 8 bits, for which XLA needs several kernels also where it joins them with others."""
    return _rank(inv, 0, _are_few_long_rows)


def backward_rank(inv: Invocation) -> int:
    """The same for the gradients."""

    def are_few(rows: int, dim: int) -> bool:
        limits = FEW_ROWS_BACKWARD.items()
        return any(dim > least and rows < count * multiprocessors(inv) for least, count in limits)

    return _rank(inv, FEW_ENTRIES_BACKWARD, are_few)


def _are_few_long_rows(rows: int, dim: int) -> bool:
    return rows < FEW_ROWS and dim > LONGEST


def _rank(inv: Invocation, few_entries: int, are_few: Callable[[int, int], bool]) -> int:
    shape = inv["x"].shape
    if not all(isinstance(size, int) for size in shape):
        return 50  # refused, with a reason
    rows, dim = math.prod(shape[:-1]), shape[-1]
    return 5 if rows * dim <= few_entries or are_few(rows, dim) else 50


# -- tiles -----------------------------------------------------------------------------------------------------------


def pieces(dim: int) -> tuple[int, int]:
    """The columns of the head and of the tail of a row that is held in registers, each a power of two.

    >>> pieces(4096), pieces(5120), pieces(7168), pieces(1000), pieces(3)
    ((4096, 0), (4096, 1024), (8192, 0), (1024, 0), (16, 0))
    """
    whole = padded(dim)
    head = whole // 2
    tail = padded(dim - head)
    return (head, tail) if 1024 <= head < dim and tail <= head // 2 else (whole, 0)


def padded(dim: int, least: int = LEAST_COLUMNS) -> int:
    """The power of two of columns that a tile of such rows has, where it has no tail."""
    return max(least, 1 << (dim - 1).bit_length())


def width(inv: Invocation) -> int:
    """The columns that a kernel holds of a row."""
    dim = inv["x"].shape[-1]
    if "quantize" in inv:
        return padded(dim, FORMATS[inv["quantize"]][2] or LEAST_COLUMNS)
    return padded(dim) if "wrt" in inv else sum(pieces(dim))


def is_centered(inv: Invocation) -> bool:
    """Whether the mean of each row is subtracted."""
    return inv.op.startswith("layer_norm")


def count_rows(inv: Invocation) -> int:
    return math.prod(inv["x"].shape[:-1])


def forward(inv: Invocation) -> Config:
    """Without measuring: tiles of 2,048 entries at least and 4,096 at most, 32 or 16 for a thread."""
    rows, columns, wanted = count_rows(inv), width(inv), 4 * multiprocessors(inv)
    tile = max(_rows(4096 // columns, rows, wanted), _rows(2048 // columns, rows, 1))
    warps = _warps(tile * columns, 32 if rows >= tile * wanted else 16, 16)
    if columns <= LONGEST and _resident(inv, tile * columns, warps, is_persistent=False):
        return Config(tile, warps)
    if not _are_narrow(inv, "x", "residual"):
        return Config(1, 16, 0, 8192)
    return Config(1, 32) if columns <= LONGEST_OF_32_WARPS else Config(1, 32, 0, 16384)


def forward_space(inv: Invocation) -> Iterator[Config]:
    """Smaller and larger tiles, more and fewer warps, programs that stay, and rows that are read twice."""
    rows, columns = count_rows(inv), width(inv)
    if columns <= LONGEST:
        for tile, per_thread in _choices(columns, rows, (8, 16, 32)):
            warps = _warps(tile * columns, per_thread, 16)
            if not _resident(inv, tile * columns, warps, is_persistent=False):
                continue
            yield Config(tile, warps)
            programs = _resident(inv, tile * columns, warps, is_persistent=True)
            if programs and "quantize" not in inv and rows >= 2 * programs * multiprocessors(inv) * tile:
                yield Config(tile, warps, programs)
    if LONGEST <= columns <= LONGEST_OF_32_WARPS and _are_narrow(inv, "x", "residual"):
        yield Config(1, 32)
    if columns >= LONGEST // 2:
        yield from (Config(1, warps, 0, block) for block, warps in ((8192, 16), (16384, 32), (8192, 32)))


def _resident(inv: Invocation, entries: int, warps: int, is_persistent: bool) -> int:
    """An estimate of the programs that a multiprocessor has registers for: for the rows in float32, and the weight and
    the bias as they are, or in float32 where a program keeps them.
    """
    columns = [inv[name].dtype.itemsize / 4 for name in ("weight", "bias") if inv[name] is not None]
    arrays = 1 + (len(columns) if is_persistent else sum(columns))
    registers = _registers(math.ceil(entries / (warps * THREADS)), arrays) + 8
    return min(32, REGISTERS // (registers * warps * THREADS))


def backward(inv: Invocation) -> BackwardConfig:
    """Without measuring: as many entries on their way as a multiprocessor's registers have room for."""
    rows, columns = count_rows(inv), width(inv)
    choices: tuple[tuple[int, tuple[int, ...]], ...] = ((4096, (16, 32, 8)),)
    if columns <= MIDDLE:
        choices = ((2048 if columns <= NARROW else 4096, (32, 16, 8)),)
    elif columns >= WIDE and rows >= 8 * multiprocessors(inv):
        choices = ((8192, (32,)), *choices)
    for entries, entries_per_thread in choices if columns <= LONGEST_BACKWARD else ():
        tile = _rows(entries // columns, rows, multiprocessors(inv))
        for per_thread in entries_per_thread:
            warps = _warps(tile * columns, per_thread, 16)
            if _fits(inv, tile * columns, warps):
                largest = _backward(inv, tile, warps)
                # Each program has sums of its own, which have to be added up: with few tiles, one is better.
                is_few = columns > NARROW and rows < 4 * tile * largest.programs * multiprocessors(inv)
                return attrs.evolve(largest, programs=1) if is_few else largest
    return BackwardConfig(1, 32, 1, columns) if _held(inv) <= MOST_HELD else BackwardConfig(1, 16, 1, 4096, 128)


def backward_space(inv: Invocation) -> Iterator[BackwardConfig]:
    """Smaller and larger tiles, more and fewer warps and programs, and a kernel of its own for the weight."""
    held = width(inv)
    if held <= LONGEST_BACKWARD:
        for rows, per_thread in _choices(held, count_rows(inv), (8, 16, 32)):
            entries = rows * held
            warps = _warps(entries, per_thread, 16)
            if _fits(inv, entries, warps):
                largest = _backward(inv, rows, warps)
                yield largest
                if largest.programs > 1:
                    yield attrs.evolve(largest, programs=(largest.programs + 1) // 2)
    if held >= LONGEST_BACKWARD and _held(inv) <= MOST_HELD:
        yield from (BackwardConfig(1, 32, 1, block) for block in (4096, 8192, 16384))
    if held >= LONGEST_BACKWARD:
        yield from (BackwardConfig(1, 16, 1, block, columns) for block in (4096, 8192) for columns in (128, 256))


def _are_narrow(inv: Invocation, *names: str) -> bool:
    """Whether these arrays have 16 bits, where the call has them."""
    return all(inv[name] is None or inv[name].dtype.itemsize < 4 for name in names)


def _held(inv: Invocation) -> int:
    """The entries that a program holds for a row that it reads twice: those of the sums, or without sums of the row."""
    return width(inv) * max(1, sum(name in inv["wrt"] for name in ("weight", "bias")))


def unique(first: C, others: Iterable[C]) -> list[C]:
    """The heuristic configuration, and the others after it."""
    return list(dict.fromkeys([first, *others]))


def _backward(inv: Invocation, rows: int, warps: int) -> BackwardConfig:
    """With as many programs as the registers of a multiprocessor have room for, at most 8."""
    needed = _backward_registers(inv, rows * width(inv), warps)
    programs = max(1, min(8, REGISTERS // (needed * warps * THREADS)))
    return BackwardConfig(rows, warps, programs)


def _fits(inv: Invocation, entries: int, warps: int) -> bool:
    needed = _backward_registers(inv, entries, warps)
    # An estimate below the limit, as one above it would mean spilled registers.
    return needed <= min(MOST_REGISTERS, REGISTERS * 15 // 16 // (warps * THREADS))


def _backward_registers(inv: Invocation, entries: int, warps: int) -> int:
    """An estimate of a thread's registers: two arrays at work and on their way, the weight, the gradient of the sum,
    and two sums at most.
    """
    arrays = 2 + (1 if _are_narrow(inv, "sum", "d_out") else 2) + (inv["weight"] is not None)
    arrays += sum(name in inv["wrt"] for name in ("weight", "bias"))
    arrays += inv.get("d_sum") is not None
    return _registers(math.ceil(entries / (warps * THREADS)), arrays)


def _registers(per_thread: int, arrays: float) -> int:
    """For so many entries of so many arrays, and for addresses; a multiple of 8, as on the card."""
    return 8 * math.ceil((32 + per_thread * arrays) / 8)


def _choices(columns: int, rows: int, per_thread: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Rows of a tile of 2,048, 4,096 and 8,192 entries, with each of these numbers of entries a thread."""
    tiles = dict.fromkeys(_rows(entries // columns, rows, 1) for entries in (4096, 2048, 8192))
    return product(tiles, per_thread)


def _rows(most: int, rows: int, programs: int) -> int:
    """The largest power of two of rows of which there are still so many tiles, if possible."""
    tile = max(1, min(most, rows // programs if programs else most))
    return 1 << (tile.bit_length() - 1)


def _warps(entries: int, per_thread: int, most: int) -> int:
    """A power of two."""
    return max(1, min(most, 1 << (max(1, entries // (THREADS * per_thread)).bit_length() - 1)))
