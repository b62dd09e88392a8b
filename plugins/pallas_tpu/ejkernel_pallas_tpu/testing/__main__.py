"""``python -m ejkernel_pallas_tpu.testing [PART ...] [--generation NAME ...] [--call TEXT]``: what the compiler for
TPUs reports of the installed kernels.

``fits`` checks the memory of every configuration, ``sharded`` communication, ``estimates`` time. By default, all but
the estimates, which take long. This needs no TPU, but its compiler: ``pip install "jax[tpu]"``, in an environment of
its own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from jax.sharding import AxisType

from . import _memory, _sharded, _time
from ._compiler import TOPOLOGIES, Compiler, versions
from ._kernels import installed_kernels
from ._schedule import CHIPS

MIB = 2**20


def fits(compiler: Compiler, generation: str, text: str) -> int:
    """Every configuration of every kernel fits, and takes at most the memory that is estimated."""
    faults = 0
    print("| generation | call | kernel | configuration | MiB | at most |\n| --- | --- | --- | --- | --- | --- |")
    for use in _memory.uses(compiler, generation, installed_kernels(), text):
        reported = "does not fit" if use.bytes is None else f"{use.bytes / MIB:.1f}"
        note = "" if use.is_right else " **wrong**"
        cells = generation, use.call, use.kernel, use.cfg, reported, f"{use.estimate / MIB:.1f}{note}"
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
        faults += not use.is_right
    return faults


def sharded(compiler: Compiler, generation: str, text: str) -> int:
    """Batch and heads on four chips: no communication."""
    faults = 0
    for kind, where in ((AxisType.Auto, "in shard_map"), (AxisType.Explicit, "with explicit axes")):
        kernels, collectives = _sharded.kernels_and_collectives(compiler, generation, kind)
        communication = ", ".join(collectives) or "none"
        print(f"{generation}, 2 x 2, {where}: {', '.join(kernels)}; communication: {communication}", flush=True)
        faults += len(collectives) + (len(kernels) < 2)
    return faults


def estimates(compiler: Compiler, generation: str, text: str) -> int:
    """No kernel is slower than the minimum ratios to its peers allow."""
    if generation not in CHIPS:
        print(f"{generation}: nothing is estimated")
        return 0
    faults = 0
    print("| chip | call | | kernels, blocks | us | ours / theirs | spills | VMEM MiB | HBM MB | bundles |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for comparison in _time.comparisons(compiler, generation, installed_kernels(), text):
        for row in (comparison.ours, *comparison.peers):
            is_too_slow = row is not comparison.ours and comparison.is_too_slow(row)
            ratio = f"{comparison.ours.microseconds / row.microseconds:.2f}" if row is not comparison.ours else ""
            cells = (
                *(generation, comparison.call, comparison.direction, f"{row.name} {row.variant}".strip()),
                *(f"{row.microseconds:.0f}", f"{ratio}{' **too slow**' * is_too_slow}"),
                *(row.spills, f"{row.vmem / MIB:.1f}", f"{row.bytes / 1e6:.0f}", row.bundles),
            )
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
            faults += is_too_slow
    return faults


PARTS: dict[str, Callable[[Compiler, str, str], int]] = {"fits": fits, "sharded": sharded, "estimates": estimates}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ejkernel_pallas_tpu.testing", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--generation", action="append", choices=[*TOPOLOGIES])
    parser.add_argument("--call", default="", metavar="TEXT", help="only the calls with this text in their names")
    options = parser.parse_args(arguments)
    print(versions(), flush=True)
    compiler = Compiler.start()
    try:
        faults = sum(
            PARTS[part](compiler, generation, options.call)
            for part in options.parts or ("fits", "sharded")
            for generation in options.generation or TOPOLOGIES
        )
    finally:
        compiler.stop()
    print(f"{faults} wrong" if faults else "right")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
