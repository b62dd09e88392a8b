"""The report of a benchmark: tables, limits of figures, and faults of results; as text and as data."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import jax

Cell = str | int | float


def _rows(rows: Iterable[Iterable[Cell]]) -> tuple[tuple[Cell, ...], ...]:
    return tuple(map(tuple, rows))


@attrs.frozen
class Table:
    """Rows with a heading for each column."""

    title: str
    columns: tuple[str, ...] = attrs.field(converter=tuple[str, ...])
    rows: tuple[tuple[Cell, ...], ...] = attrs.field(converter=_rows)

    def __str__(self) -> str:
        lines = [self.columns, *([_text(cell) for cell in row] for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join([self.title, *("  " + _aligned(line, widths) for line in lines)])


@attrs.frozen
class Bar:
    """A figure, and its greatest allowed value, or with ``at_least`` its least."""

    name: str
    measured: float
    limit: float
    unit: str
    at_least: bool = False

    @property
    def is_held(self) -> bool:
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    def __str__(self) -> str:
        side = "at least" if self.at_least else "at most"
        verdict = "held" if self.is_held else "NOT held"
        return f"{self.name}: {_text(self.measured)} {self.unit}, {side} {_text(self.limit)} {self.unit}: {verdict}"


@attrs.frozen
class Report:
    """The outcome of one benchmark."""

    benchmark: str
    tables: tuple[Table, ...] = attrs.field(converter=tuple[Table, ...])
    bars: tuple[Bar, ...] = attrs.field(default=(), converter=tuple[Bar, ...])
    #: Wrong results, and calls that failed. The time of a wrong result means nothing.
    faults: tuple[str, ...] = attrs.field(default=(), converter=tuple[str, ...])
    text: str = ""

    def __str__(self) -> str:
        parts = [*([self.text] if self.text else []), *map(str, self.tables)]
        parts += ["\n".join(map(str, self.bars))] if self.bars else []
        parts += ["\n".join(f"WRONG: {fault}" for fault in self.faults)] if self.faults else []
        return "\n\n".join(parts)

    def data(self) -> dict[str, Any]:
        """Plain values for JSON, with the circumstances of the measurement."""
        bars = [{**attrs.asdict(bar), "held": bar.is_held} for bar in self.bars]
        return {**attrs.asdict(self, recurse=True), "bars": bars, "circumstances": circumstances()}


def joined(benchmark: str, reports: Iterable[Report]) -> Report:
    """One report of several, whose names are before those of their bars and faults."""
    reports = list(reports)
    return Report(
        benchmark,
        [table for report in reports for table in report.tables],
        [attrs.evolve(bar, name=f"{report.benchmark}, {bar.name}") for report in reports for bar in report.bars],
        [f"{report.benchmark}: {fault}" for report in reports for fault in report.faults],
        "\n".join(report.text for report in reports if report.text),
    )


def circumstances() -> dict[str, Any]:
    """Versions, device and load, without which a figure means little."""
    device = jax.devices()[0]
    return {
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "ejkernel-core")},
        "device": f"{device.platform} {device.device_kind}",
        "cores": os.cpu_count(),
        "load": os.getloadavg() if hasattr(os, "getloadavg") else None,
    }


def heading() -> str:
    """One line of circumstances."""
    values = circumstances()
    versions = " ".join(f"{name} {version}" for name, version in values["versions"].items())
    load = f", load {values['load'][0]:.1f}" if values["load"] else ""
    return f"Python {values['python']}, {versions}, on {values['device']}, {values['cores']} cores{load}"


def _text(cell: Cell) -> str:
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int) or cell == 0:
        return str(cell)
    if not 0.01 <= abs(cell) < 1e7:
        return f"{cell:.1e}"
    return f"{cell:.3g}" if abs(cell) < 1000 else f"{cell:.0f}"


def _aligned(line: Sequence[str], widths: Sequence[int]) -> str:
    """Names to the left, figures to the right."""
    figures = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
    return "  ".join([line[0].ljust(widths[0]), *figures]).rstrip()
