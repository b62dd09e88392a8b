"""Run attention on this device: checked, explained, and compared with jax.nn.

What is installed is printed before JAX is imported, and every step before it begins.
"""

from __future__ import annotations

import json
import os
import platform
import textwrap
from collections.abc import Iterator, MutableMapping
from importlib import metadata
from pathlib import Path

import click

from ejkernel_cli import Failure, print_line
from ejkernel_cli._findings import FUSION_FLAG, lacks_fusion_flag

WIDTH = 80


@click.command("run")
@click.option("--backend", help="Run this kernel instead of the one that the core chooses.")
@click.option("--rounds", type=click.IntRange(min=1), default=9, show_default=True, help="How often each is timed.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write the report as JSON.")
@click.option("--picture", type=click.Path(path_type=Path), metavar="FILE", help="Draw the times: .svg, .png or .pdf.")
def command(backend: str | None, rounds: int, json_file: Path | None, picture: Path | None) -> int:
    """Run attention on this device, forward and backward.

    It shows what is installed, which kernels are chosen and why, whether the results are those of the reference, and
    the time beside that of jax.nn.dot_product_attention. The exit code is 1 if a result is wrong.
    """
    from .bench import check_files

    check_files(json_file, picture)
    for line in (*installed(), *set_fusion_flag(os.environ)):
        print_line(line)
    from ejkernel_bench import demonstration
    from ejkernel_bench._rows import listening

    for line in _device():
        print_line(line)
    try:
        with listening(print_line):
            report = demonstration.run(backend, rounds)
    except LookupError as error:  # an unknown backend
        raise Failure(str(error)) from error
    data = json.loads(json.dumps(report.data()))
    if json_file is not None:
        from .bench import write

        write(json_file, [data])
    if picture is not None:
        print_line("\ndrawing the times")
        from .bench import draw

        draw([data], picture)
    else:
        print_line(
            "\n--picture FILE draws this; 'ejkernel bench' measures more, and 'ejkernel explain' explains a call"
        )
    return 1 if report.faults else 0


def installed() -> Iterator[str]:
    """The versions, from metadata alone."""
    versions = {name: _version(name) for name in ("ejkernel-core", "jax", "jaxlib")}
    texts = [f"{name} {version}" for name, version in versions.items()]
    yield f"{', '.join(texts)}, Python {platform.python_version()}"
    plugins = sorted({name for name in _distributions() if name.startswith("ejkernel-")} - {"ejkernel-core"})
    names = ", ".join(name.removeprefix("ejkernel-") for name in plugins)
    yield from textwrap.wrap(f"plugins: {names}", WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def set_fusion_flag(environment: MutableMapping[str, str]) -> Iterator[str]:
    """Set what the installed jaxlib needs for right sums on a CPU, before XLA reads it, and say so."""
    if lacks_fusion_flag(environment):
        environment["XLA_FLAGS"] = f"{FUSION_FLAG} {environment.get('XLA_FLAGS', '')}".rstrip()
        yield f"jaxlib {_version('jaxlib')} can give wrong sums in float32 on a CPU. This run sets the flag that helps;"
        yield f'for other programs: export XLA_FLAGS="{FUSION_FLAG} $XLA_FLAGS"'


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "is not installed"


def _distributions() -> Iterator[str]:
    for distribution in metadata.distributions():
        yield str(distribution.metadata["Name"] or "").lower().replace("_", "-")


def _device() -> Iterator[str]:
    """The device, and the backends that run there. Importing JAX and its plugins takes some seconds."""
    import jax

    from ejkernel_bench.demonstration import kernels_here
    from ejkernel_core.extend import device_fingerprint

    device = jax.devices()[0]
    count = f", one of {jax.device_count()}" if jax.device_count() > 1 else ""
    yield f"device: {device.platform}, {device_fingerprint(device)}{count}"
    yield "operations, and the backends that run here:"
    for operations, backends in kernels_here():
        names = ", ".join(operations)
        text = f"{names}: {', '.join(backends) or 'none'}"
        yield from textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    yield ""
