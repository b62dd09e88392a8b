"""Compile the kernels for TPUs without one: memory, communication, time.

It needs no TPU, but its compiler: ``pip install "jax[tpu]"``, in an environment of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError

import click

from ejkernel_cli import Failure, print_line

PARTS = ("fits", "sharded", "estimates")


@click.command("tpu")
@click.argument("parts", nargs=-1, type=click.Choice(PARTS), metavar="[fits|sharded|estimates]...")
@click.option("--generation", "generations", multiple=True, metavar="NAME", help="Only this generation, as v5e.")
@click.option("--call", default="", metavar="TEXT", help="Only the calls with this text in their names.")
def command(parts: Sequence[str], generations: Sequence[str], call: str) -> int:
    """What the compiler for TPUs reports of the installed kernels.

    "fits" checks the memory of every configuration, "sharded" communication, and "estimates" time. By default, all but
    the estimates, which take long. The exit code is 1 if something is wrong.
    """
    from .testing._compiler import TOPOLOGIES
    from .testing._parts import check

    for generation in generations:
        if generation not in TOPOLOGIES:
            raise click.UsageError(f"no generation is called {generation!r}; there are {', '.join(TOPOLOGIES)}")
    try:
        faults = check(parts or PARTS[:2], generations, call, print_line)
    except PackageNotFoundError as error:
        raise Failure(
            f"{error.name} is not installed; the compiler for TPUs comes with 'pip install \"jax[tpu]\"'"
        ) from error
    print_line(f"{faults} wrong" if faults else "right")
    return int(faults > 0)
