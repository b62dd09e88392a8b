"""The configuration of the kernels of the loss: the rows of a chunk, and how a program goes through a row."""

from __future__ import annotations

import math
from collections.abc import Iterable

import attrs
import jax.numpy as jnp
from attrs.validators import ge, in_, instance_of, not_

from ejkernel_core import Invocation, Unsupported, hookimpl
from ejkernel_ops.fused_linear_cross_entropy import chunks
from ejkernel_ops.fused_linear_cross_entropy.definition import vocab
from ejkernel_triton.launch._cards import multiprocessors
from ejkernel_triton.launch._requirements import require_card

DTYPES = ("float16", "bfloat16", "float32")
BLOCKS, WARPS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384), (1, 2, 4, 8, 16, 32)
#: Of a warp, and the most columns that a thread of it holds without spilling registers.
THREADS, MOST_COLUMNS = 32, 16
#: The most warps of the heuristic: two programs or three have room on a multiprocessor.
MOST_WARPS = 16
#: The most rows of a chunk and programs of a launch that a configuration may have.
MOST = 1 << 20


@attrs.frozen
class Config(chunks.Rows):
    """The most rows of a chunk; the columns of a step of a program, its warps, and how many programs there are."""

    #: The columns of a step.
    block: int = attrs.field(default=8192, validator=in_(BLOCKS))
    #: The warps of a program.
    num_warps: int = attrs.field(default=16, validator=in_(WARPS))
    #: The most programs, each with some rows; 0 for one for each row.
    programs: int = attrs.field(default=0, validator=[instance_of(int), not_(instance_of(bool)), ge(0)])


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """Chunks by memory; 16 columns for a thread, or 8 where it also has those of a bias, sums of logits or an entropy;
    as many programs as run at a time.
    """
    check(inv)
    is_simple = inv["bias"] is None and inv.get("label_smoothing") == 0
    columns = MOST_COLUMNS if is_simple else MOST_COLUMNS // 2
    # In float16 it also has the scale of a row: with Triton 3.6, 16 warps spill registers.
    most = MOST_WARPS if is_simple or inv["hidden"].dtype != jnp.float16 else MOST_WARPS // 2
    warps = max(1, min(most, vocab(inv) // (MOST_COLUMNS * THREADS)))
    warps = 1 << (warps - 1).bit_length()
    return Config(chunks.rows_of_memory(inv), columns * THREADS * warps, warps, _programs(inv))


def _programs(inv: Invocation) -> int:
    """Two for each multiprocessor, which read their rows again soon. If no row is read twice, one for each row."""
    return 2 * multiprocessors(inv) if _has_gradients(inv) else 0


def _has_gradients(inv: Invocation) -> bool:
    return inv.op not in ("fused_linear_cross_entropy", "linear_log_probs")


@hookimpl
def config_space(inv: Invocation) -> Iterable[Config]:
    """More and fewer rows, half and twice as many warps, and other numbers of programs."""
    first = heuristic_cfg(inv)
    rows = [attrs.evolve(first, rows=count) for count in chunks.neighbours(inv)]
    sizes = ((first.block // 2, first.num_warps // 2), (2 * first.block, 2 * first.num_warps))
    others = [
        attrs.evolve(first, block=block, num_warps=warps)
        for block, warps in sizes
        if block in BLOCKS and warps in WARPS
    ]
    count = multiprocessors(inv)
    programs = (0, count, count // 2) if first.programs else ()
    return dict.fromkeys([first, *rows, *others, *(attrs.evolve(first, programs=number) for number in programs)])


def _columns(cfg: Config) -> int:
    """The columns of a thread."""
    return math.ceil(cfg.block / (THREADS * cfg.num_warps))


@hookimpl
def check_cfg(inv: Invocation, cfg: Config) -> None:
    """The columns of a step have to fit into the registers of the warps."""
    check(inv)
    if max(cfg.rows, cfg.programs) > MOST:
        raise Unsupported(f"a chunk has up to {MOST} rows, and a launch as many programs")
    if _columns(cfg) > MOST_COLUMNS:
        raise Unsupported(
            f"a thread holds up to {MOST_COLUMNS} columns; {cfg.block} in {cfg.num_warps} warps are {_columns(cfg)}"
        )


def check(inv: Invocation) -> None:
    """Raise where this card, these versions, or this call is not for Triton."""
    require_card(inv)
    dtype = str(inv["hidden"].dtype)
    if dtype not in DTYPES:
        raise Unsupported(f"the Triton kernels take {', '.join(DTYPES)}; hidden is {dtype}")
