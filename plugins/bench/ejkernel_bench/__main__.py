"""``python -m ejkernel_bench [name ...] [--backend B] [--rounds N] [--json FILE]``: run benchmarks, or list them."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ._report import Report, heading

#: The name of each benchmark is that of its module.
BENCHMARKS = {
    "run": "causal attention forward and backward on this device: checked, explained, timed",
    "overhead": "what the framework costs: an eager call, what is remembered, the import",
    "path": "which files of the core a call enters, how long they are, and how often it moves between them",
    "flash_attention": "on a GPU, by case: time, rate; with --peers against cuDNN, Pallas and torch in the same run",
    "hopper": "on a Hopper GPU, by its clock: against cuDNN, our own plain rate, and every kernel that might be chosen",
    "shapes": "on a GPU, 1,000 shapes drawn at random: right, the same bits twice, none far slower than its neighbours",
    "choice": "on a GPU, what tuning chooses for each pass against each kernel that it chooses from",
    "attention": "against jax.nn.dot_product_attention, S 4096, causal and full",
    "memory": "peak of forward and backward at S 16384",
    "tuning": "what tuning gives against the heuristic, in a second process, and when something hangs",
    "window": "a window of 256 against none at S 16384",
    "packed": "ids of packed tokens against jnp.repeat, 1 M tokens; segment ids of a 4096 x 4096 mask",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 where a result was wrong. A bar that is not held is told, and left to the reader to judge."""
    parser = _parser()
    asked = parser.parse_args(arguments)
    if unknown := set(asked.names) - set(BENCHMARKS):
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    if not asked.names:
        print(listing())
        return 0
    print(heading(), end="\n\n")
    reports = []
    for name in asked.names:
        reports.append(_run(name, asked))
        print(reports[-1], end="\n\n", flush=True)
    if asked.json:
        asked.json.write_text(json.dumps([report.data() for report in reports], indent=1) + "\n")
    return 1 if any(report.faults for report in reports) else 0


def listing() -> str:
    """What there is to run."""
    width = max(map(len, BENCHMARKS))
    return "\n".join(f"{name:<{width}}  {what}" for name, what in BENCHMARKS.items())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m ejkernel_bench", epilog=listing(), formatter_class=_RAW)
    parser.add_argument("names", nargs="*", metavar="benchmark", help="one or more of these")
    parser.add_argument("--backend", help="measure this kernel, not the one that the core chooses")
    parser.add_argument("--rounds", type=int, help="how often each contender runs")
    parser.add_argument("--peers", action="store_true", dest="against", help="flash_attention: with everybody else's")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    return parser


_RAW = argparse.RawDescriptionHelpFormatter
#: What a benchmark says that does not take an option.
_REFUSALS = {
    "against": "has its peers always; --peers is for flash_attention",
    "rounds": "counts the same every time; --rounds is for what takes time",
}


def _run(name: str, asked: argparse.Namespace) -> Report:
    options = {key: getattr(asked, key) for key in ("backend", "rounds", "against")}
    given: dict[str, Any] = {key: option for key, option in options.items() if option}
    run = importlib.import_module(f".{name}", __package__).run
    for option in given.keys() - inspect.signature(run).parameters:
        raise SystemExit(f"python -m ejkernel_bench: {name} {_REFUSALS[option]}")
    report: Report = run(**given)
    return report


if __name__ == "__main__":
    sys.exit(main())
