"""``python -m ejkernel_bench.records FOLDER``: measure the calls that the benchmarks make, and keep what is best.

The folder is laid out as ``ejkernel-cache`` lays out its own, so it can be published as it is. A run goes on where one
before was interrupted; several cards can share the work, by ``--part``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from ejkernel_core import Invocation
from ejkernel_tuning import autotune_recorded, recording

from . import flash_attention, hopper
from ._problem import Problem, through_core
from .tuning import kept_in

#: Each once.
PROBLEMS = tuple(dict.fromkeys([*flash_attention.ANCHORS, *hopper.MORE, *hopper.ALONE, *flash_attention.MORE]))
#: For one contest. What is still compiled when its time is up would disturb the next one.
SECONDS = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 where something could not be measured."""
    parser = argparse.ArgumentParser("python -m ejkernel_bench.records", description=__doc__.partition(": ")[2])
    parser.add_argument("folder", type=Path, help="where the records go")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each pass of each problem at most")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="every N-th of the problems, from the I-th on")
    asked = parser.parse_args(arguments)
    part, parts = map(int, asked.part.split("/"))
    failed = 0
    with kept_in(asked.folder):
        for problem in PROBLEMS[part - 1 :: parts]:
            for inv in calls_of(problem):
                for tuned in autotune_recorded([inv], asked.seconds).tuned:
                    failed += not tuned.records
                    print(problem, tuned, sep="\n", flush=True)
    return 1 if failed else 0


def calls_of(problem: Problem) -> list[Invocation]:
    """Forward, backward for query, key and value, and backward for all else that has gradients, too."""
    attention = through_core(problem)
    *arrays, d_out = jax.eval_shape(problem.arrays)
    extras = jax.eval_shape(problem.extras)
    smooth = {name: x for name, x in extras.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    with recording() as found:
        for wanted in ({}, smooth) if smooth else ({},):
            rest = {name: x for name, x in extras.items() if name not in wanted}

            def gradients(wanted, rest, d_out, *qkv):  # type: ignore[no-untyped-def]
                _, pull_back = jax.vjp(lambda wanted, *qkv: attention(*qkv, **wanted, **rest), wanted, *qkv)
                return pull_back(d_out)

            jax.jit(gradients).lower(wanted, rest, d_out, *arrays)
    return list(found)


if __name__ == "__main__":
    raise SystemExit(main())
