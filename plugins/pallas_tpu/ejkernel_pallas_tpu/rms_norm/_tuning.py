"""The rows of blocks: the best, and all that fit into vector memory; and the calls that the kernels refuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
from attrs.validators import in_, instance_of

from ejkernel_core import Invocation, Unsupported
from ejkernel_ops.symbolic import refuse_symbolic
from ejkernel_pallas_tpu.launch._devices import check_device
from ejkernel_pallas_tpu.launch._generations import generation
from ejkernel_pallas_tpu.rms_norm._blocks import IN_REGISTERS, LANES, SUBLANES, Blocks, lanes, power_of_two, rows_of

DTYPES = ("bfloat16", "float32")
#: Rows of a block.
BLOCKS = tuple(2**power for power in range(3, 14))
#: The bytes of x in the best block, and how many blocks a core should have, to copy one while it works on another.
BYTES, STEPS = 2**20, 8
#: The float32 arrays of a group that are alive at a time. Registers may not hold all of them.
GROUP_ARRAYS = 4


@attrs.frozen
class Config:
    """How many rows are in vector memory at a time."""

    rows: int = attrs.field(default=256, validator=in_(BLOCKS))
    #: Run in the interpreter of Pallas, on any device, for debugging.
    interpret: bool = attrs.field(default=False, validator=instance_of(bool))


@attrs.frozen
class Traffic:
    """The arrays that a kernel has in vector memory: the dtypes of those of rows, and the number of other ones."""

    by_rows: Sequence[np.dtype[Any]]
    #: (dim,), for all rows, in float32.
    shared: int
    #: One number for each row.
    statistics: int
    #: Sums over rows, in float32.
    sums: int = 0
    #: The scales of each row, in float32.
    scales: int = 0

    @property
    def multiple(self) -> int:
        """The rows in a register of the narrowest dtype."""
        return 32 // min(dtype.itemsize for dtype in self.by_rows)

    def bytes(self, blocks: Blocks) -> int:
        """The most bytes of vector memory. Blocks count twice, because the next ones are fetched early."""
        dim, rows = lanes(blocks.dim), -(-blocks.block // self.multiple) * self.multiple
        moving = sum(rows * dim * dtype.itemsize for dtype in self.by_rows)
        depth = -(-blocks.depth // SUBLANES) * SUBLANES
        moving += 4 * dim * (self.shared + depth * self.sums) + 4 * rows * lanes(self.scales)
        moving += 4 * SUBLANES * lanes(blocks.block) * self.statistics
        columns = self.statistics * 4 * LANES * rows
        return 2 * moving + columns + 4 * GROUP_ARRAYS * IN_REGISTERS


def block_rows(inv: Invocation, traffic: Traffic) -> list[int]:
    """Rows of a block that fit into vector memory, the best first."""
    chip = generation(inv.device_kind or "")
    assert chip is not None  # `check` refuses others
    rows, dim = rows_of(inv["x"]), inv["x"].shape[-1]
    longest = max(traffic.multiple, power_of_two(rows))
    sizes = [size for size in BLOCKS if traffic.multiple <= size <= longest]
    fits = [size for size in sizes if traffic.bytes(blocks_of(inv, traffic, size)) <= chip.budget]
    if not fits:
        raise Unsupported(f"rows of {dim} entries do not fit into the {chip.budget >> 20} MiB that {chip.name} has")
    by_bytes = BYTES // (lanes(dim) * inv["x"].dtype.itemsize)
    best = min(by_bytes, max(rows // (STEPS * chip.cores), 1))
    first = max((size for size in fits if size <= best), default=fits[0])
    similar = (size for size in fits if first <= 4 * size and size <= 4 * first)
    return sorted(similar, key=lambda size: (size != first, size))


def blocks_of(inv: Invocation, traffic: Traffic, rows: int) -> Blocks:
    """Blocks of at most this many rows. A call without rows has the blocks of one row, which are not used."""
    return Blocks.of(max(rows_of(inv["x"]), 1), inv["x"].shape[-1], rows, traffic.multiple)


def vmem_limit(inv: Invocation) -> int | None:
    """How much vector memory a kernel requests from the compiler."""
    chip = generation(inv.device_kind or "")
    return chip.budget if chip else None


def is_centered(inv: Invocation) -> bool:
    """Whether the mean of each row is subtracted."""
    return inv.op.startswith("layer_norm")


# -- refusals --------------------------------------------------------------------------------------------------------


def check(inv: Invocation) -> None:
    """Raise `Unsupported` for a device or arguments that the kernels do not support."""
    check_device(inv)
    check_arguments(inv)


def check_config(inv: Invocation, cfg: Config, traffic: Callable[[Invocation], Traffic]) -> None:
    """Raise `Unsupported` for a call that is not supported, and for blocks that do not fit into vector memory."""
    if cfg.interpret:
        check_arguments(inv)
        return
    check(inv)
    arrays, limit = traffic(inv), vmem_limit(inv)
    if limit is not None and arrays.bytes(blocks_of(inv, arrays, cfg.rows)) > limit:
        raise Unsupported(f"{cfg.rows} rows of {inv['x'].shape[-1]} entries take more than {limit >> 20} MiB of memory")


def check_arguments(inv: Invocation) -> None:
    """Raise for arguments that the kernels do not support, interpreted or not."""
    refuse_symbolic(inv)
    for name in ("x", "weight", "bias", "residual"):
        array = inv[name]
        if array is not None and str(array.dtype) not in DTYPES:
            raise Unsupported(f"the Pallas TPU kernels take {' and '.join(DTYPES)}; {name} is {array.dtype}")
