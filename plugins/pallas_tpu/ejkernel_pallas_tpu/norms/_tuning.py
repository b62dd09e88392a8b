"""The rows of blocks: the best, and all that fit into vector memory; and the calls that the kernels refuse."""

from __future__ import annotations

from ejkernel_core import Invocation, Unsupported
from ejkernel_ops.symbolic import refuse_symbolic
from ejkernel_pallas_tpu.launch._devices import check_device
from ejkernel_pallas_tpu.launch._generations import generation
from ejkernel_pallas_tpu.norms import BLOCKS, Config
from ejkernel_pallas_tpu.norms._blocks import Blocks, lanes, power_of_two, rows_of
from ejkernel_pallas_tpu.norms._traffic import traffic_of

DTYPES = ("bfloat16", "float32")
#: The bytes of x in the best block, and how many blocks a core should have, to copy one while it works on another.
BYTES, STEPS = 2**20, 8


def block_rows(inv: Invocation) -> list[int]:
    """Rows of a block that fit into vector memory, the best first."""
    chip, traffic = generation(inv.device_kind or ""), traffic_of(inv)
    assert chip is not None  # `check` refuses others
    rows, dim = rows_of(inv["x"]), inv["x"].shape[-1]
    longest = max(traffic.multiple, power_of_two(rows))
    sizes = [size for size in BLOCKS if traffic.multiple <= size <= longest]
    fits = [size for size in sizes if vmem(inv, size) <= chip.budget]
    if not fits:
        raise Unsupported(f"rows of {dim} entries do not fit into the {chip.budget >> 20} MiB that {chip.name} has")
    by_bytes = BYTES // (lanes(dim) * inv["x"].dtype.itemsize)
    best = min(by_bytes, max(rows // (STEPS * chip.cores), 1))
    first = max((size for size in fits if size <= best), default=fits[0])
    similar = (size for size in fits if first <= 4 * size and size <= 4 * first)
    return sorted(similar, key=lambda size: (size != first, size))


def blocks_of(inv: Invocation, rows: int) -> Blocks:
    """Blocks of at most this many rows. A call without rows has the blocks of one row, which are not used."""
    return Blocks.of(max(rows_of(inv["x"]), 1), inv["x"].shape[-1], rows, traffic_of(inv).multiple)


def vmem(inv: Invocation, rows: int) -> int:
    """At most how many bytes of vector memory the kernel takes with blocks of at most this many rows."""
    return traffic_of(inv).bytes(blocks_of(inv, rows))


def vmem_limit(inv: Invocation) -> int | None:
    """How much vector memory a kernel requests from the compiler."""
    chip = generation(inv.device_kind or "")
    return chip.budget if chip else None


# -- refusals --------------------------------------------------------------------------------------------------------


def check(inv: Invocation) -> None:
    """Raise `Unsupported` for a device or arguments that the kernels do not support."""
    check_device(inv)
    check_arguments(inv)


def check_config(inv: Invocation, cfg: Config) -> None:
    """Raise `Unsupported` for a call that is not supported, and for blocks that do not fit into vector memory."""
    if cfg.interpret:
        check_arguments(inv)
        return
    check(inv)
    limit = vmem_limit(inv)
    if limit is not None and vmem(inv, cfg.rows) > limit:
        raise Unsupported(f"{cfg.rows} rows of {inv['x'].shape[-1]} entries take more than {limit >> 20} MiB of memory")


def check_arguments(inv: Invocation) -> None:
    """Raise for arguments that the kernels do not support, interpreted or not."""
    refuse_symbolic(inv)
    for name in ("x", "weight", "bias", "residual"):
        array = inv[name]
        if array is not None and str(array.dtype) not in DTYPES:
            raise Unsupported(f"the Pallas TPU kernels take {' and '.join(DTYPES)}; {name} is {array.dtype}")
