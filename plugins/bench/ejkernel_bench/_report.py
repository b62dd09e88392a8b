"""What a benchmark finds: tables, bars, and whether the results were right; as text and as data."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from typing import Any

import attrs
import jax

Cell = str | int | float


@attrs.frozen
class Table:
    """Rows under headings."""

    title: str
    columns: tuple[str, ...] = attrs.field(converter=tuple)
    rows: tuple[tuple[Cell, ...], ...] = attrs.field(converter=lambda rows: tuple(map(tuple, rows)))

    def __str__(self) -> str:
        lines = [self.columns, *([_shown(cell) for cell in row] for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join([self.title, *("  " + _aligned(line, widths) for line in lines)])


@attrs.frozen
class Bar:
    """A figure and the most (or, with ``at_least``, the least) it may be."""

    what: str
    measured: float
    limit: float
    unit: str
    at_least: bool = False

    @property
    def held(self) -> bool:
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    def __str__(self) -> str:
        side = "at least" if self.at_least else "at most"
        verdict = "held" if self.held else "NOT held"
        return f"{self.what}: {_shown(self.measured)} {self.unit}, {side} {_shown(self.limit)} {self.unit}: {verdict}"


@attrs.frozen
class Report:
    """The outcome of one benchmark."""

    benchmark: str
    tables: tuple[Table, ...] = attrs.field(converter=tuple)
    bars: tuple[Bar, ...] = attrs.field(default=(), converter=tuple)
    #: What was wrong with the results. A time that belongs to a wrong result is worth nothing.
    faults: tuple[str, ...] = attrs.field(default=(), converter=tuple)
    text: str = ""

    def __str__(self) -> str:
        parts = [*([self.text] if self.text else []), *map(str, self.tables)]
        parts += ["\n".join(map(str, self.bars))] if self.bars else []
        parts += ["\n".join(f"WRONG: {fault}" for fault in self.faults)] if self.faults else []
        return "\n\n".join(parts)

    def data(self) -> dict[str, Any]:
        """Plain values for JSON, with the circumstances they were found in."""
        bars = [{**attrs.asdict(bar), "held": bar.held} for bar in self.bars]
        return {**attrs.asdict(self, recurse=True), "bars": bars, "circumstances": circumstances()}


def circumstances() -> dict[str, Any]:
    """What a figure means little without."""
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
    known = circumstances()
    versions = " ".join(f"{name} {version}" for name, version in known["versions"].items())
    load = f", load {known['load'][0]:.1f}" if known["load"] else ""
    return f"Python {known['python']}, {versions}, on {known['device']}, {known['cores']} cores{load}"


def _shown(cell: Cell) -> str:
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
