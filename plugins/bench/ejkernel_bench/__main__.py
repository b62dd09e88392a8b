"""``python -m ejkernel_bench [name ...] [--backend B] [--rounds N] [--json FILE]``: run suites, or list them."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ._processes import join_processes
from ._report import Report, heading
from ._suites import BrokenSuite, Suite, suites


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 for a wrong result or a broken suite. Whether a limit is held is for the reader to judge."""
    installed = suites()
    names = sys.argv[1:] if arguments is None else arguments
    parser = _parser([suite for name, suite in installed.items() if name in names])
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(installed):
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; there are {', '.join(installed)}")
    if not options.names:
        print(listing(installed))
        return 0
    join_processes()
    print(heading(), end="\n\n")
    reports, is_broken = [], False
    for name in options.names:
        try:
            report = _run(installed[name], options)
        except BrokenSuite as fault:
            print(f"BROKEN: {fault}", end="\n\n", file=sys.stderr)
            is_broken = True
            continue
        reports.append(report)
        print(report, end="\n\n", flush=True)
    if options.json:
        options.json.write_text(json.dumps([report.data() for report in reports], indent=1) + "\n")
    return 1 if is_broken or any(report.faults for report in reports) else 0


def listing(installed: Mapping[str, Suite]) -> str:
    """The names of the suites with their descriptions."""
    width = max(map(len, installed), default=0)
    return "\n".join(f"{name:<{width}}  {suite.description}" for name, suite in installed.items())


def _parser(named: Sequence[Suite]) -> argparse.ArgumentParser:
    """The parser, whose help describes the suites that are named."""
    parser = argparse.ArgumentParser(
        "python -m ejkernel_bench",
        description="Without a name, it lists the suites. With one, --help describes it.",
        epilog="\n\n".join(f"{suite.name}: {suite.documentation}" for suite in named),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="name", help="the suites to run")
    parser.add_argument("--backend", help="measure this kernel instead of the one that the core chooses")
    parser.add_argument("--rounds", type=int, help="how often each contender is timed")
    parser.add_argument("--small", action="store_true", help="small sizes, which a CPU can run")
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--part", help="devices: one part of the suite, which is a run of its own")
    parser.add_argument("--peers", action="store_true", dest="with_peers", help="flash_attention: with the peers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the reports to a file, too")
    return parser


#: Why a suite does not take an option.
_REFUSALS = {
    "backend": "runs no kernel; --backend is for suites of kernels",
    "rounds": "counts the same every time; --rounds is for suites that take time",
    "small": "has one set of sizes; --small is for the suites of operations",
    "part": "has no parts; --part is for devices",
    "quick": "has one set of sizes; --quick is for rms_norm and layer_norm",
    "with_peers": "always has its peers; --peers is for flash_attention",
}


def _run(suite: Suite, options: argparse.Namespace) -> Report:
    run, _ = suite.load()
    values = {name: getattr(options, name) for name in _REFUSALS if getattr(options, name)}
    for name in values.keys() - inspect.signature(run).parameters:
        raise SystemExit(f"python -m ejkernel_bench: {suite.name} {_REFUSALS[name]}")
    return run(**values)


if __name__ == "__main__":
    sys.exit(main())
