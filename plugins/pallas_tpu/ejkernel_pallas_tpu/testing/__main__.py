"""``python -m ejkernel_pallas_tpu.testing [PART ...] [--generation NAME ...]``: what the compiler for TPUs says.

``fits`` of the memory that every configuration takes, ``sharded`` of communication, ``estimates`` of time. Without a
word, all but the estimates, which take long. No TPU is needed, but its compiler: ``pip install "jax[tpu]"``, in an
environment of its own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from . import _estimates, _fits, _sharded
from ._compiler import TOPOLOGIES, Compiler
from ._schedule import CHIPS

MIB = 2**20
BARS = {"forward": 1.05, "forward + backward": 1.10}


def fits(compiler: Compiler, generation: str) -> int:
    """Every configuration that is offered fits, and takes no more than was reckoned with."""
    wrong = 0
    print("| generation | call | pass | queries, keys | MiB | at most |\n| --- | --- | --- | --- | --- | --- |")
    for use in _fits.uses(compiler, generation):
        taken = "does not fit" if use.bytes is None else f"{use.bytes / MIB:.1f}"
        note = "" if use.right else " **wrong**"
        blocks = f"{use.blocks[0]}, {use.blocks[1]}"
        print(
            f"| {generation} | {use.call} | {use.which} | {blocks} | {taken} | {use.estimate / MIB:.1f}{note} |",
            flush=True,
        )
        wrong += not use.right
    return wrong


def sharded(compiler: Compiler, generation: str) -> int:
    """Batch and heads on four chips: no communication."""
    kernels, found = _sharded.collectives(compiler, generation)
    print(f"{generation}, 2 x 2: {', '.join(kernels)}; communication: {', '.join(found) or 'none'}", flush=True)
    return len(found) + (len(kernels) < 2)


def estimates(compiler: Compiler, generation: str) -> int:
    """Never slower than JAX's flash attention, and not much slower than its splash attention."""
    if generation not in CHIPS:
        print(f"{generation}: nothing is estimated")
        return 0
    wrong = 0
    print("| chip | call | | whose, blocks | us | of ours | spills | VMEM MiB | HBM MB | bundles |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for group in _estimates.groups(compiler, generation):
        ours = next(row for row in group if row.contender == "ours")
        for row in group:
            bar = BARS[row.direction] if row.contender == "splash" else 1.0
            missed = row is not ours and ours.microseconds > bar * row.microseconds
            wrong += missed
            words = (
                *(row.generation, row.shape, row.direction, f"{row.contender} {row.variant}".strip()),
                f"{row.microseconds:.0f}",
                f"{ours.microseconds / row.microseconds:.2f}{' **missed**' * missed}" if row is not ours else "",
                *(str(row.spills), f"{row.vmem / MIB:.1f}", f"{row.bytes / 1e6:.0f}", str(row.bundles)),
            )
            print(f"| {' | '.join(words)} |", flush=True)
    return wrong


PARTS: dict[str, Callable[[Compiler, str], int]] = {"fits": fits, "sharded": sharded, "estimates": estimates}


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ejkernel_pallas_tpu.testing", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--generation", action="append", choices=[*TOPOLOGIES])
    asked = parser.parse_args(given)
    compiler = Compiler.start()
    try:
        wrong = sum(
            PARTS[part](compiler, generation)
            for part in asked.parts or ("fits", "sharded")
            for generation in asked.generation or TOPOLOGIES
        )
    finally:
        compiler.stop()
    print(f"{wrong} wrong" if wrong else "right")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
