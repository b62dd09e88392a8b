"""What the compiler for TPUs reports of the installed kernels, in rows of Markdown, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jax.sharding import AxisType

from . import _memory, _sharded, _time
from ._compiler import TOPOLOGIES, Compiler, versions
from ._kernels import installed_kernels
from ._schedule import CHIPS

MIB = 2**20

Report = Callable[[str], object]


def fits(compiler: Compiler, generation: str, text: str, report: Report) -> int:
    """Every configuration of every kernel fits, and takes at most the memory that is estimated."""
    faults = 0
    report("| generation | call | kernel | configuration | MiB | at most |\n| --- | --- | --- | --- | --- | --- |")
    for use in _memory.uses(compiler, generation, installed_kernels(), text):
        reported = "does not fit" if use.bytes is None else f"{use.bytes / MIB:.1f}"
        note = "" if use.is_right else " **wrong**"
        cells = generation, use.call, use.kernel, use.cfg, reported, f"{use.estimate / MIB:.1f}{note}"
        report(f"| {' | '.join(map(str, cells))} |")
        faults += not use.is_right
    return faults


def sharded(compiler: Compiler, generation: str, text: str, report: Report) -> int:
    """Batch and heads on four chips: no communication."""
    faults = 0
    for kind, where in ((AxisType.Auto, "in shard_map"), (AxisType.Explicit, "with explicit axes")):
        kernels, collectives = _sharded.kernels_and_collectives(compiler, generation, kind)
        communication = ", ".join(collectives) or "none"
        report(f"{generation}, 2 x 2, {where}: {', '.join(kernels)}; communication: {communication}")
        faults += len(collectives) + (len(kernels) < 2)
    return faults


def estimates(compiler: Compiler, generation: str, text: str, report: Report) -> int:
    """No kernel is slower than the minimum ratios to its peers allow."""
    if generation not in CHIPS:
        report(f"{generation}: nothing is estimated")
        return 0
    faults = 0
    report("| chip | call | | kernels, blocks | us | ours / theirs | spills | VMEM MiB | HBM MB | bundles |")
    report("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for comparison in _time.comparisons(compiler, generation, installed_kernels(), text):
        for row in (comparison.ours, *comparison.peers):
            is_too_slow = row is not comparison.ours and comparison.is_too_slow(row)
            ratio = f"{comparison.ours.microseconds / row.microseconds:.2f}" if row is not comparison.ours else ""
            cells = (
                *(generation, comparison.call, comparison.direction, f"{row.name} {row.variant}".strip()),
                *(f"{row.microseconds:.0f}", f"{ratio}{' **too slow**' * is_too_slow}"),
                *(row.spills, f"{row.vmem / MIB:.1f}", f"{row.bytes / 1e6:.0f}", row.bundles),
            )
            report(f"| {' | '.join(map(str, cells))} |")
            faults += is_too_slow
    return faults


PARTS: dict[str, Callable[[Compiler, str, str, Report], int]] = {
    "fits": fits,
    "sharded": sharded,
    "estimates": estimates,
}


def check(parts: Sequence[str], generations: Sequence[str], text: str, report: Report) -> int:
    """The number of faults in these parts, for these generations of TPUs, or all, and the calls with this text in their
    names. Every row is reported when it is there.
    """
    report(versions())
    compiler = Compiler.start()
    try:
        return sum(
            PARTS[part](compiler, generation, text, report)
            for part in parts
            for generation in generations or TOPOLOGIES
        )
    finally:
        compiler.stop()
