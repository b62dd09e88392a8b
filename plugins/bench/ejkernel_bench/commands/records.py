"""Tune the calls that benchmarks measure, and write records of the best.

A command of its own, not a suite of ``ejkernel bench``: a suite reports and leaves nothing behind, and this one fills a
folder over hours.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from ejkernel_cli import Failure, print_line

#: For one measurement. What still compiles at its end would disturb the next one.
SECONDS = 60.0


def _part(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, int]:
    """The two numbers of I/N."""
    number, _, count = value.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise click.BadParameter(f"a part is I/N, as 2/3 for the second of three; got {value!r}")
    return int(number), int(count)


@click.command("records")
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("operations", nargs=-1, metavar="[OPERATION]...")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=SECONDS,
    show_default=True,
    help="For each call at most.",
)
@click.option(
    "--part",
    metavar="I/N",
    callback=_part,
    default="1/1",
    help="Every N-th of the examples, from the I-th on: for several cards.",
)
def command(folder: Path, operations: Sequence[str], seconds: float, part: tuple[int, int]) -> int:
    """Tune the calls that benchmarks measure, and write records of the best.

    FOLDER gets a file <device>/<operation>.jsonl with the best configuration of each call, as packages of records have
    them. The measurements themselves are stored in FOLDER/measurements, so that the same command continues an
    interrupted run. Without an OPERATION, it measures all that have examples.
    """
    from ejkernel_bench import records
    from ejkernel_core import UnknownOperation

    try:
        folder.mkdir(parents=True, exist_ok=True)
        failures = records.measure(folder, operations, seconds, part, print_line)
        files = records.write_records(folder)
    except UnknownOperation as error:
        raise click.UsageError(str(error)) from error
    except BrokenPipeError:  # of the output
        raise
    except OSError as error:
        raise Failure(f"{folder}: {error.strerror or error}; name a folder that can be written") from error
    for file in files:
        print_line(str(file))
    return 1 if failures else 0
