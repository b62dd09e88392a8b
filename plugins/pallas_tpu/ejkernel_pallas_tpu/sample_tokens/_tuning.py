"""The rows of blocks and the ways to search, and the calls that the kernel refuses."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import jax.numpy as jnp
from attrs.validators import in_, instance_of

from ejkernel_core import Invocation, Unsupported
from ejkernel_ops.symbolic import refuse_symbolic
from ejkernel_pallas_tpu.launch._devices import check_device
from ejkernel_pallas_tpu.launch._generations import MIB, Generation, generation

from ._blocks import IN_REGISTERS, LANES, Blocks

DTYPES = ("bfloat16", "float32")
ROWS = (8, 16, 32, 64)
BITS = (1, 2)
LANE_WORDS = (0, 4, 16)
#: The rows of the best block: few, because the first block is waited for, and more than one register has, because the
#: sums of a pass over rows of one register would wait for each other.
BEST_ROWS = 16
#: The arrays of a step that are alive at a time. Registers may not hold all of them.
STEP_ARRAYS = 8


@attrs.frozen
class Config:
    """How many rows are in vector memory at a time, and how the limits of filters are searched for."""

    rows: int = attrs.field(default=BEST_ROWS, validator=in_(ROWS))
    #: The bits of a limit that a pass over vector memory finds.
    bits: int = attrs.field(default=1, validator=in_(BITS))
    #: Whether the exponentials that ``top_p`` sums are in vector memory. Each pass computes them otherwise.
    has_weights: bool = attrs.field(default=True, validator=instance_of(bool))
    #: The words of a lane that are kept, up to which noise is made for them alone, with a pass over vector memory for
    #: each of them. It is made for all words otherwise.
    lane_words: int = attrs.field(default=16, validator=in_(LANE_WORDS))
    #: Run in the interpreter of Pallas, on any device, for debugging.
    interpret: bool = attrs.field(default=False, validator=instance_of(bool))


def configs(inv: Invocation) -> list[Config]:
    """The configurations that fit into vector memory, the best first, and each other in which one thing differs."""
    chip, rows = _chip(inv), inv["logits"].shape[0]
    multiple = _multiple(inv)
    longest = max(multiple, 1 << max(rows, 1).bit_length() - 1)
    sizes = [size for size in ROWS if multiple <= size <= longest]
    best = max(multiple, min(BEST_ROWS, rows // chip.cores))
    fits = [cfg for cfg in _by_preference(inv, sizes, best) if vmem_bytes(inv, cfg) <= chip.budget]
    if not fits:
        least = vmem_bytes(inv, Config(sizes[0], has_weights=False)) / MIB
        raise Unsupported(
            f"{sizes[0]} rows of {inv['logits'].shape[1]} words take {least:.1f} MiB of vector memory, of which "
            f"{chip.name} has {chip.budget // MIB}"
        )
    first = fits[0]
    others = [
        *(attrs.evolve(first, rows=size) for size in sizes),
        *(attrs.evolve(first, bits=bits) for bits in BITS if _has_filter(inv)),
        *(attrs.evolve(first, has_weights=has_weights) for has_weights in _weights(inv)),
        *(attrs.evolve(first, lane_words=words) for words in LANE_WORDS if _has_filter(inv)),
    ]
    return list(dict.fromkeys((first, *(cfg for cfg in others if vmem_bytes(inv, cfg) <= chip.budget))))


def _by_preference(inv: Invocation, sizes: list[int], best: int) -> Iterator[Config]:
    """With exponentials in memory before more rows."""
    for has_weights in _weights(inv):
        for size in sorted(sizes, key=lambda size: (size > best, abs(size - best))):
            yield Config(size, has_weights=has_weights)


def _weights(inv: Invocation) -> tuple[bool, ...]:
    """Whether there may be exponentials in memory, which only ``top_p`` has."""
    return (True,) if inv["top_p"] is None else (True, False)


def _has_filter(inv: Invocation) -> bool:
    """Whether there is a limit to search for."""
    return inv["top_k"] is not None or inv["top_p"] is not None


def blocks_of(inv: Invocation, cfg: Config) -> Blocks:
    """Blocks of at most so many rows. A call without rows has those of one row, which are not used."""
    rows, vocabulary = inv["logits"].shape
    return Blocks.of(max(rows, 1), vocabulary, cfg.rows)


def vmem_bytes(inv: Invocation, cfg: Config) -> int:
    """The most bytes of vector memory. Blocks count twice, because the next ones are fetched early."""
    blocks, logits, multiple = blocks_of(inv, cfg), inv["logits"], _multiple(inv)
    lanes = -(-logits.shape[1] // LANES) * LANES
    moving = -(-blocks.block // multiple) * multiple * lanes * int(logits.dtype.itemsize)
    numbers = 4 + sum(inv[name] is not None for name in ("temperature", "top_k", "top_p", "min_p"))
    moving += numbers * 4 * LANES * blocks.sublanes
    arrays = 1 + (inv["top_p"] is not None and cfg.has_weights)
    scratch = 4 * blocks.sublanes * (arrays * blocks.padded + LANES)
    return int(2 * moving + scratch + 4 * STEP_ARRAYS * IN_REGISTERS)


def vmem_limit(inv: Invocation) -> int | None:
    """How much vector memory the kernel requests from the compiler."""
    chip = generation(inv.device_kind or "")
    return chip.budget if chip else None


def _multiple(inv: Invocation) -> int:
    """The rows in a register of the logits."""
    return 32 // int(jnp.dtype(inv["logits"].dtype).itemsize)


def _chip(inv: Invocation) -> Generation:
    chip = generation(inv.device_kind or "")
    assert chip is not None  # `check` refuses others
    return chip


# -- refusals --------------------------------------------------------------------------------------------------------


def check(inv: Invocation) -> None:
    """Raise `Unsupported` for a device or arguments that the kernel does not support."""
    check_device(inv)
    check_arguments(inv)


def check_config(inv: Invocation, cfg: Config) -> None:
    """The same for a configuration, which may run in the interpreter."""
    if cfg.interpret:
        check_arguments(inv)
        return
    check(inv)
    needed, budget = vmem_bytes(inv, cfg), _chip(inv).budget
    if needed > budget:
        raise Unsupported(f"{cfg} needs {needed / MIB:.1f} MiB of vector memory, of which there are {budget // MIB}")


def check_arguments(inv: Invocation) -> None:
    """Raise for arguments that the kernel does not support, interpreted or not."""
    refuse_symbolic(inv)
    if str(inv["logits"].dtype) not in DTYPES:
        raise Unsupported(f"the Pallas TPU kernels take {' and '.join(DTYPES)}; logits is {inv['logits'].dtype}")
