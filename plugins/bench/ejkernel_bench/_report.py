"""The report of a benchmark: tables, limits of figures, and faults of results; as text and as data."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import jax

from ejkernel_core.extend import device_name

Cell = str | int | float
#: Of what was not measured.
ABSENT = "-"


def _rows(rows: Iterable[Iterable[Cell]]) -> tuple[tuple[Cell, ...], ...]:
    return tuple(map(tuple, rows))


@attrs.frozen
class Table:
    """Rows with a heading for each column."""

    title: str
    columns: tuple[str, ...] = attrs.field(converter=tuple[str, ...])
    rows: tuple[tuple[Cell, ...], ...] = attrs.field(converter=_rows)
    #: The columns that a picture draws.
    series: tuple[str, ...] = attrs.field(default=(), converter=tuple[str, ...])

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """Lines of at most this width where the cells allow it: columns that do not fit are in a part below.

        Columns in which nothing was measured are left out.
        """
        shown = [place for place in range(len(self.columns)) if not self._is_empty(place)]
        rows = [[cell_text(row[place]) for place in shown] for row in self.rows]
        lines = [[self.columns[place] for place in shown], *rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        parts = []
        for columns in _parts(widths, width):
            part = [[line[column] for column in columns] for line in lines]
            parts.append("\n".join("  " + _aligned(line, [widths[column] for column in columns]) for line in part))
        return "\n".join([self.title, "\n\n".join(parts)])

    def _is_empty(self, place: int) -> bool:
        return bool(self.rows) and all(row[place] == ABSENT for row in self.rows)


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
        measured, limit = cell_text(self.measured), cell_text(self.limit)
        return f"{self.name}: {measured} {self.unit}, {side} {limit} {self.unit}: {verdict}"


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
        return self.in_columns()

    def in_columns(self, width: int | None = None) -> str:
        """The report in lines of at most this width, as far as its tables can be divided."""
        parts = [*([self.text] if self.text else []), *(table.text(width) for table in self.tables)]
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
        "device": f"{device.platform} {device_name(device)}",
        "cores": os.cpu_count(),
        "load": os.getloadavg() if hasattr(os, "getloadavg") else None,
    }


def heading() -> str:
    """One line of circumstances."""
    values = circumstances()
    versions = " ".join(f"{name} {version}" for name, version in values["versions"].items())
    load = f", load {values['load'][0]:.1f}" if values["load"] else ""
    cores = "" if values["device"].endswith("cores") else f", {values['cores']} cores"  # the name of a CPU has them
    return f"Python {values['python']}, {versions}, on {values['device']}{cores}{load}"


def cell_text(cell: Cell) -> str:
    """A cell as a table shows it."""
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int) or cell == 0:
        return str(cell)
    if not 0.01 <= abs(cell) < 1e7:
        return f"{cell:.1e}"
    return f"{cell:.3g}" if abs(cell) < 1000 else f"{cell:.0f}"


def _parts(widths: Sequence[int], width: int | None) -> list[list[int]]:
    """The places of the columns in each part of a table. Every part begins with the first column."""
    parts: list[list[int]] = [[0]]
    for column in range(1, len(widths)):
        taken = 2 + sum(widths[place] + 2 for place in parts[-1])
        if width is not None and taken + widths[column] > width and len(parts[-1]) > 1:
            parts.append([0])
        parts[-1].append(column)
    return parts


def _aligned(line: Sequence[str], widths: Sequence[int]) -> str:
    """Names to the left, figures to the right."""
    figures = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
    return "  ".join([line[0].ljust(widths[0]), *figures]).rstrip()
