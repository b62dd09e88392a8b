"""Measure suites of benchmarks, or an operation at given shapes, with peers.

A row is printed as soon as it is measured, and the whole table at the end, or when the run is cut off.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ejkernel_cli import Failure, print_line

if TYPE_CHECKING:  # they import JAX
    from ejkernel_bench._report import Report
    from ejkernel_bench._suites import Suite

GROUP = "ejkernel.benchmarks"
WORDS = "ejkernel_bench.words"

#: Why a suite does not take an option, by the parameter of its function.
REFUSALS = {
    "backend": "runs no kernel; --backend is for suites of kernels",
    "rounds": "has no rounds; --rounds is for suites that time calls in turn",
    "small": "has one set of sizes; --small is for the suites of operations",
    "part": "has no parts; --part is for devices, grouped_matmul, loss, moe-step, paged, sampling and serve-step",
    "quick": "has one set of sizes; --quick is for rms_norm, layer_norm and moe-step",
    "kernels": "chooses its kernels itself; --kernels is for decode, loss, paged and sampling, and calls by --shape",
    "with_peers": "always has its peers; --peers is for flash_attention",
}
#: The options that a call at given shapes does not have.
SUITES_ALONE = {"small": "--small", "quick": "--quick", "part": "--part"}


class _Bench(click.Command):
    """A command whose help also describes the suites that are named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[WORDS] = list(args)
        return super().parse_args(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        names = [word for word in ctx.meta[WORDS] if not word.startswith("-")]
        if names:  # only then JAX is imported
            installed = _suites()
            for suite in (installed[name] for name in names if name in installed):
                formatter.write(f"\n{suite.name}: {suite.documentation}\n")


def _matching_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    points = [point for group in (GROUP, "ejkernel.operations") for point in metadata.entry_points(group=group)]
    return sorted({point.name for point in points if point.name.startswith(incomplete)})


@click.command("bench", cls=_Bench, context_settings={"ignore_unknown_options": True})
@click.argument(
    "words",
    nargs=-1,
    type=click.UNPROCESSED,
    shell_complete=_matching_names,
    metavar="[SUITE]... | OPERATION --shape SHAPE [ITS OPTIONS]...",
)
@click.option("--backend", help="Measure this kernel instead of the one that the core chooses.")
@click.option(
    "--kernels", metavar="NAMES", help="Also measure these kernels: names with commas, or all. With --shape, all are."
)
@click.option("--rounds", type=click.IntRange(min=1), help="How often each contender is timed.")
@click.option("--peers", "with_peers", is_flag=True, help="Measure the peers that are installed, too.")
@click.option("--small", is_flag=True, help="Small sizes, which a CPU can run.")
@click.option("--quick", is_flag=True, help="Fewer sizes.")
@click.option("--part", help="One part of a suite that has parts, which is a run of its own.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write the reports as JSON.")
@click.option(
    "--picture", type=click.Path(path_type=Path), metavar="FILE", help="Draw bars by case, and the roofline of a card."
)
@click.option(
    "--from", "recorded", type=click.Path(path_type=Path), metavar="FILE", help="Draw what --json has written before."
)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    words: Sequence[str],
    json_file: Path | None,
    picture: Path | None,
    recorded: Path | None,
    **options: Any,
) -> int:
    """Measure suites of benchmarks, or an operation at given shapes.

    Without a name, it lists the suites. With one, --help describes it. --shape may be given several times:

      ejkernel bench flash_attention --shape 1x1024x8x64 --causal --peers
    """
    check_files(json_file, picture)
    if recorded is not None:
        _draw_again(words, recorded, picture)
        return 0
    if not words:
        _list(_suites())
        return 0
    from ejkernel_bench._processes import join_processes
    from ejkernel_bench._report import heading

    join_processes()
    runs = _runs(words, options)
    print_line(f"{heading()}\n")
    reports: list[dict[str, Any]] = []
    is_right = True

    def show(report: Report) -> None:
        reports.append(report.data())
        print_line(f"\n{report.in_columns(_width())}\n")
        if json_file is not None:  # after each suite, because the next one may be interrupted
            write(json_file, reports)

    with _ended_as_by_hand():
        for name, run in runs:
            report = _report(ctx, name, run, show)
            is_right &= report is not None and not report.faults
            if report is not None:
                show(report)
    if picture is not None:
        draw(reports, picture)
    return 0 if is_right else 1


def _suites() -> dict[str, Suite]:
    from ejkernel_bench._suites import suites

    return suites()


def _list(installed: Mapping[str, Suite]) -> None:
    width = max(map(len, installed), default=0)
    for name, suite in installed.items():
        print_line(f"{name:<{width}}  {suite.description}")


def _width() -> int | None:
    """That of the terminal. In a pipe, a row is one line, however long."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


# -- what is measured --------------------------------------------------------------------------------------------------

Run = Callable[[], "Report"]


def _runs(words: Sequence[str], options: Mapping[str, Any]) -> list[tuple[str, Run]]:
    """What the words name, in order."""
    if any(word.partition("=")[0] == "--shape" for word in words):
        return [_run_of_call(words, options)]
    installed = _suites()
    first = installed.get(words[0])
    if first is not None and any(word.startswith("-") for word in words) and (own := first.options()):
        return [_run_with_own_options(first, own, words[1:], options)]
    for word in words:
        if word.startswith("-"):
            raise click.UsageError(f"there is no option {word}; the options of an operation follow its --shape")
        if word not in installed:
            raise click.UsageError(_unknown(word, installed))
    return [(name, _run_of_suite(installed[name], options)) for name in words]


def _run_with_own_options(
    suite: Suite, own: Sequence[click.Option], words: Sequence[str], options: Mapping[str, Any]
) -> tuple[str, Run]:
    """A suite that is measured alone, with options that no other one has."""
    parser = click.Command(suite.name, params=[*own], add_help_option=False)
    values = parser.make_context(f"ejkernel bench {suite.name}", [*words]).params
    return suite.name, _run_of_suite(suite, {**options, **values})


def _unknown(name: str, installed: Mapping[str, Suite]) -> str:
    import difflib

    from ejkernel_core import registry
    from ejkernel_core.extend import OPERATIONS

    if name in registry.names(OPERATIONS):
        return f"{name!r} has no suite of its own; measure it at given shapes, as --shape 16384x4096"
    similar = difflib.get_close_matches(name, installed, 1)
    hint = f"did you mean {similar[0]!r}?" if similar else f"there are {', '.join(installed)}"
    return f"no benchmark is called {name!r}; {hint}"


def _run_of_suite(suite: Suite, options: Mapping[str, Any]) -> Run:
    """Options without effect are refused, where the suite can be loaded; where it cannot, its run says so."""
    import inspect

    from ejkernel_bench._suites import BrokenSuite

    values = {name: value for name, value in options.items() if value}
    try:
        function, _ = suite.load()
    except BrokenSuite as error:
        fault = error

        def run_broken() -> Report:
            raise fault

        return run_broken
    for name in values.keys() - inspect.signature(function).parameters:
        raise click.UsageError(f"{suite.name} {REFUSALS[name]}")
    _check_backend(suite.name, options["backend"])
    return lambda: function(**values)


def _run_of_call(words: Sequence[str], options: Mapping[str, Any]) -> tuple[str, Run]:
    from ejkernel_bench import suite
    from ejkernel_bench._calls_of_words import examples_of

    operation, *others = words
    for name, option in SUITES_ALONE.items():
        if options[name]:
            raise click.UsageError(f"{option} is for suites, and --shape is for an operation")
    examples = examples_of(operation, others)
    _check_backend(operation, options["backend"])
    backends = suite.backends_of(operation, options["kernels"] or "all")

    def run() -> Report:
        return suite.run(
            operation,
            _peers(operation) if options["with_peers"] else {},
            examples=examples,
            names={example.name for example in examples},
            backend=options["backend"],
            backends=backends,
            rounds=options["rounds"] or suite.ROUNDS,
        )

    return operation, run


def _check_backend(name: str, backend: str | None) -> None:
    """Refuse a backend that the operation does not have, before anything is compiled. A suite may have another name."""
    from ejkernel_core import UnknownBackend, registry
    from ejkernel_core.extend import OPERATIONS

    if backend is None or name not in registry.names(OPERATIONS) or backend in registry.backends(name):
        return
    try:
        registry.kernel(name, backend)
    except UnknownBackend as error:
        raise click.UsageError(str(error)) from None


def _peers(operation: str) -> Mapping[str, Any]:
    """Those of the suite with the name of the operation."""
    from ejkernel_bench._suites import peers_of

    peers = peers_of(operation)
    if not peers:
        print_line(f"{operation}: there are no peers; a suite of this name may have a function 'peers'")
    return peers


@contextmanager
def _ended_as_by_hand() -> Iterator[None]:
    """Be interrupted by SIGTERM, with which ``timeout`` ends a command, as by Control-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _report(ctx: click.Context, name: str, run: Run, show: Callable[[Report], object]) -> Report | None:
    """The report, or None where the suite failed, which is told in one line. The others run all the same.

    Of a suite that is interrupted, what it has measured is shown.
    """
    from ejkernel_bench._calls import describe_fault
    from ejkernel_bench._report import Report
    from ejkernel_bench._rows import listening
    from ejkernel_bench._suites import BrokenSuite

    try:
        with listening(print_line) as begun:
            try:
                return run()
            except KeyboardInterrupt:
                tables = [rows.table() for rows in begun]
                show(Report(name, tables, text=f"{name}: interrupted; the rest was not measured"))
                raise
    except BrokenSuite as fault:
        text = f"BROKEN: {fault}"
    except (click.ClickException, BrokenPipeError):
        raise
    except Exception as fault:
        if ctx.find_root().params.get("debug") or "--debug" in sys.argv:
            raise
        text = f"{name} failed: {' '.join(describe_fault(fault).split())} (--debug shows where)"
    click.echo(f"ejkernel: {' '.join(text.split())}", err=True)
    return None


# -- files -------------------------------------------------------------------------------------------------------------


def check_files(json_file: Path | None, picture: Path | None) -> None:
    """Refuse files that cannot be written, before anything is measured."""
    from ejkernel_bench._files import fault_of

    for path in (json_file, picture):
        if path is not None and (fault := fault_of(path)):
            raise Failure(fault)
    formats = (".svg", ".png", ".pdf")
    if picture is not None and picture.suffix.lower() not in formats:
        raise click.UsageError(f"--picture takes a file that ends in {', '.join(formats)}; got {picture}")


def write(path: Path, reports: Sequence[Mapping[str, Any]]) -> None:
    """Write the reports as JSON."""
    from ejkernel_bench import _files

    try:
        _files.write(path, json.dumps(reports, indent=1) + "\n")
    except OSError as error:
        raise Failure(f"{path} cannot be written: {error.strerror or error}; the reports are above") from error


def draw(reports: Sequence[Mapping[str, Any]], picture: Path) -> None:
    """Draw the reports, and name the file."""
    from ejkernel_bench import pictures

    try:
        pictures.draw(reports, picture)
    except (OSError, ValueError) as error:
        raise Failure(f"{picture} is not drawn: {error}") from error
    print_line(f"picture: {picture}")


def _draw_again(words: Sequence[str], recorded: Path, picture: Path | None) -> None:
    """Draw the suites of these names, by default all, from a file."""
    if picture is None:
        raise click.UsageError("--from reads what --picture draws; name that file, too")
    try:
        reports = json.loads(recorded.read_text())
        chosen = [report for report in reports if not words or report["benchmark"] in words]
        is_readable = all(isinstance(report["tables"], list) for report in chosen)
    except OSError as error:
        raise Failure(f"{recorded} cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError, AttributeError):
        is_readable = False
    if not is_readable:
        raise Failure(f"{recorded} has no reports; 'ejkernel bench SUITE --json FILE' writes some")
    draw(chosen, picture)
