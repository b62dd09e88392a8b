"""Pictures of reports: bars by case, lines by tokens, and the roofline of a card whose rates are known.

A picture is drawn from a report as ``--json`` writes it, so that it can be drawn again, on another machine. A table
says by ``Table.series`` which of its columns are drawn. Where it also has a rate, the bars are rates, because times of
calls of different sizes do not fit on one axis. A table whose first column is that of tokens is drawn as lines.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs

from ._calls import PASSES
from ._report import Cell, cell_text
from ._roof import CARDS, Card
from .suite import COPY

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".svg", ".png", ".pdf")
#: Ours first. They differ in brightness, too, so that they can be told apart without colour.
COLOURS = ("#1f5fa8", "#9aa5b1", "#d9822b", "#5b8c5a", "#8e6bbf", "#c4b04a", "#6b4f3a")
ROOF = "#b3261e"
#: In inches: the width of a picture, the height of a bar, and what a panel takes besides its bars.
WIDTH, BAR, MARGIN, ROOFLINE = 9.0, 0.16, 0.75, 4.5
#: Operations for each byte, above which a call is shown by its arithmetic and not by its traffic.
INTENSITY = 10.0
RATES = ("TFLOP/s", "TB/s")
#: The first column of a table that is drawn as lines.
TOKENS = "tokens"


Panel: TypeAlias = "Bars | Lines | Roofline"


def is_picture(path: Path) -> bool:
    """Whether the name ends like that of a picture that can be drawn."""
    return path.suffix.lower() in FORMATS


def draw(reports: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the reports into one file. Raises ``ValueError`` where they have nothing to draw."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    panels: list[Panel] = [panel for report in reports for panel in panels_of(report)]
    if not panels:
        raise ValueError("there is nothing to draw: no table has measured cases")
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "ejkernel", "axes.spines.right": False}):
        heights = [panel.height for panel in panels]
        figure = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
        axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
        for panel, (panel_axes,) in zip(panels, axes, strict=True):
            panel.draw(panel_axes)
        is_svg = path.suffix.lower() == ".svg"
        figure.savefig(path, dpi=150, metadata={"Date": None} if is_svg else None)


def panels_of(report: Mapping[str, Any]) -> Iterator[Panel]:
    """Bars for each pass of each table, or lines, and a roofline where the rates of the card are known."""
    device = report["circumstances"]["device"]
    card = CARDS.get(device.partition(" ")[2])
    for table in report["tables"]:
        rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
        if table.get("series") and rows and table["columns"][0] == TOKENS:
            yield lines(f"{report['benchmark']}, {device}\n{table['title']}", rows, table["series"])
        elif table.get("series") and rows:
            for name, rows_of_pass in _by_pass(rows).items():
                title = ", ".join(part for part in (report["benchmark"], name, device) if part)
                yield bars(f"{title}\n{table['title']}", rows_of_pass, table["series"])
            if card is not None and all(isinstance(row.get(rate), float) for row in rows for rate in RATES):
                yield Roofline(f"{report['benchmark']}: roofline of {device}", card, device, rows)


Row = Mapping[str, Cell]


def _by_pass(rows: Sequence[Row]) -> dict[str, list[dict[str, Cell]]]:
    """The rows of each pass, with the name of the pass in its key and no longer in the rows."""
    groups: dict[str, list[dict[str, Cell]]] = {}
    for row in rows:
        label_column, label = next(iter(row.items()))
        name = next((name for name in PASSES if str(label).endswith(f", {name}")), "")
        case = str(label).removesuffix(f", {name}") if name else str(label)
        groups.setdefault(name, []).append({**row, label_column: case})
    return groups


@attrs.frozen
class Bars:
    """A group of bars for each case, one for each contender that was measured."""

    title: str
    unit: str
    cases: Sequence[str]
    #: By contender; None where it does not take the case.
    lengths: Mapping[str, Sequence[float | None]]
    #: Of each case, the rate that the card allows, if it is known.
    roofs: Sequence[float | None]

    @property
    def height(self) -> float:
        count = sum(length is not None for lengths in self.lengths.values() for length in lengths)
        return MARGIN + BAR * (count + 1.2 * len(self.cases))

    def draw(self, axes: Axes) -> None:
        """Bars from top to bottom. Each has its contender and its figure beside it, so there is no legend."""
        colours = dict(zip(self.lengths, itertools.cycle(COLOURS), strict=False))
        place, ticks = 0.0, []
        for number, roof in enumerate(self.roofs):
            first = place
            for contender, lengths in self.lengths.items():
                length = lengths[number]
                if length is not None:
                    axes.barh(place, length, height=0.9, color=colours[contender])
                    axes.text(length, place, f" {contender} {cell_text(length)}", va="center", fontsize=7)
                    place += 1
            ticks.append((first + place - 1) / 2)
            if roof is not None:
                axes.plot([roof, roof], [first - 0.6, place - 0.4], color=ROOF, linewidth=1.5)
            place += 1.2
        axes.set_yticks(ticks, self.cases, fontsize=8)
        axes.set_ylim(place - 1, -1)
        longest = max((length for lengths in self.lengths.values() for length in lengths if length), default=1.0)
        axes.set_xlim(0, 1.22 * max([longest, *(roof for roof in self.roofs if roof is not None)]))
        axes.set_title(self.title, fontsize=9, loc="left")
        note = "; the line is the roof of the case" if any(self.roofs) else ""
        axes.set_xlabel(f"{self.unit}{note}", fontsize=8)
        axes.tick_params(axis="x", labelsize=8)
        axes.tick_params(axis="y", length=0)
        axes.spines["top"].set_visible(False)


def bars(title: str, rows: Sequence[Row], series: Sequence[str]) -> Bars:
    """The bars of a table: rates where it has them, and otherwise its figures as they are."""
    unit, scale = _rate(rows)
    ours = series[0]

    def length(row: Row, contender: str) -> float | None:
        value, own = row.get(contender), row.get(ours)
        if not isinstance(value, int | float):
            return None
        if unit is None:
            return float(value)
        assert isinstance(own, int | float)
        return scale * float(row[unit]) * own / value  # the same work in another time

    drawn = [name for name in series if name != COPY or unit != RATES[0]]  # a copy computes nothing
    lengths = {contender: [length(row, contender) for row in rows] for contender in drawn}
    measured = {name: values for name, values in lengths.items() if any(value is not None for value in values)}
    roofs = [row.get("roof") if unit == RATES[0] else None for row in rows]
    cases = [str(next(iter(row.values()))) for row in rows]
    name = "as in the table" if unit is None else f"{unit} (more is better)" if scale == 1 else f"G{unit[1:]}"
    is_known = [float(roof) if isinstance(roof, int | float) else None for roof in roofs]
    return Bars(title, "milliseconds (less is better)" if _is_time(title, unit) else name, cases, measured, is_known)


def _is_time(title: str, unit: str | None) -> bool:
    return unit is None and "millisecond" in title


def _rate(rows: Sequence[Row]) -> tuple[str | None, float]:
    """The rate that says most about these rows, None where they have none; and 1000 where it is better in giga."""
    rates = {rate: [row.get(rate) for row in rows] for rate in RATES}
    known = {
        rate: [float(value) for value in values if isinstance(value, int | float)] for rate, values in rates.items()
    }
    flops, traffic = (known[rate] if len(known[rate]) == len(rows) else [] for rate in RATES)
    if not flops and not traffic:
        return None, 1.0
    is_arithmetic = not traffic or (flops and median(flops) / max(median(traffic), 1e-12) > INTENSITY)
    unit, values = (RATES[0], flops) if is_arithmetic else (RATES[1], traffic)
    return unit, 1.0 if max(values) >= 1 else 1e3


@attrs.frozen
class Lines:
    """A line for each contender by the number of tokens, on logarithmic axes."""

    title: str
    #: By contender: tokens, and a figure.
    points: Mapping[str, Sequence[tuple[float, float]]]
    height: float = ROOFLINE

    def draw(self, axes: Axes) -> None:
        """Each has its name and its last figure at its end, so there is no legend."""
        for colour, (contender, points) in zip(itertools.cycle(COLOURS), self.points.items(), strict=False):
            tokens, amounts = zip(*points, strict=True)
            axes.plot(tokens, amounts, color=colour, marker="o", markersize=4)
            text = f" {contender} {cell_text(amounts[-1])}"
            axes.text(tokens[-1], amounts[-1], text, va="center", fontsize=7, color=colour)
        every = sorted({tokens for points in self.points.values() for tokens, _ in points})
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(every, [f"{tokens:,.0f}" for tokens in every])
        axes.set_xlim(every[0] / 1.1, every[-1] * 1.6)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.set_title(self.title, fontsize=9, loc="left")
        axes.set_xlabel(TOKENS, fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(axis="y", linewidth=0.5)
        axes.spines["top"].set_visible(False)


def lines(title: str, rows: Sequence[Row], series: Sequence[str]) -> Lines:
    """The lines of a table: a contender has the points that were measured."""
    points = {
        contender: [
            (float(row[TOKENS]), float(value)) for row in rows if isinstance(value := row.get(contender), int | float)
        ]
        for contender in series
    }
    return Lines(title, {contender: measured for contender, measured in points.items() if measured})


@attrs.frozen
class Roofline:
    """Each case by its operations for a byte and its rate, under the lines of what the card can do."""

    title: str
    card: Card
    device: str
    rows: Sequence[Row]
    height: float = ROOFLINE

    def draw(self, axes: Axes) -> None:
        """On logarithmic axes: left of the ridge memory is the limit, right of it the matrix products."""
        intensities = [_number(row, RATES[0]) / _number(row, RATES[1]) for row in self.rows]
        rates = [_number(row, RATES[0]) for row in self.rows]
        peak, bandwidth = self.card.flops / 1e12, self.card.bytes / 1e12
        ridge = peak / bandwidth
        left, right = min([*intensities, ridge]) / 3, max([*intensities, ridge]) * 3
        axes.plot([left, ridge, right], [left * bandwidth, peak, peak], color=ROOF, linewidth=1.5)
        axes.text(right, peak, f"{peak:.0f} TFLOP/s", ha="right", va="bottom", fontsize=8, color=ROOF)
        axes.text(ridge / 3, peak / 3, f"{bandwidth:.2g} TB/s ", ha="right", va="bottom", fontsize=8, color=ROOF)
        axes.scatter(intensities, rates, s=14, color=COLOURS[0], zorder=3)
        for row, intensity, rate in zip(self.rows, intensities, rates, strict=True):
            axes.text(intensity, rate, f" {next(iter(row.values()))}", fontsize=6, va="center")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(left, right)
        axes.set_title(self.title, fontsize=9, loc="left")
        axes.set_xlabel("operations for each byte", fontsize=8)
        axes.set_ylabel(RATES[0], fontsize=8)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.tick_params(which="both", labelsize=8)
        axes.spines["top"].set_visible(False)


def _number(row: Row, column: str) -> float:
    value = row[column]
    assert isinstance(value, int | float)
    return float(value)
