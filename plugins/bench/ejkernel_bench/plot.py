"""``python -m ejkernel_bench.plot REPORT.json FOLDER``: the results of `hopper` as pictures, one for each pass."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from ._calls import PASSES

#: In pixels: the height of a row and of a bar, where bars begin, the width of the longest, and the height of the title.
ROW, BAR, LEFT, WIDTH, HEADER = 34, 11, 330, 460, 58
COLOURS = {"ejkernel": "#2563a8", "cuDNN": "#9aa5b1"}
ROOF = "#c2410c"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 where the file has nothing to draw."""
    parser = argparse.ArgumentParser("python -m ejkernel_bench.plot", description=__doc__.partition(": ")[2])
    parser.add_argument("report", type=Path, help="written by `python -m ejkernel_bench hopper --json`")
    parser.add_argument("folder", type=Path, help="where the pictures go: hopper-forward.svg and so on")
    options = parser.parse_args(arguments)
    reports = [report for report in json.loads(options.report.read_text()) if report["benchmark"] == "hopper"]
    if not reports or not reports[0]["tables"]:
        print(f"{options.report}: has no results of `hopper`")
        return 1
    options.folder.mkdir(parents=True, exist_ok=True)
    for pass_name in PASSES:
        file = options.folder / f"hopper-{pass_name.replace('+', '-')}.svg"
        file.write_text(picture(reports[0], pass_name))
        print(file)
    return 0


def picture(report: dict[str, Any], pass_name: str) -> str:
    """Bars of TFLOP/s, ours above cuDNN's, with a mark where the roof is."""
    (table,) = report["tables"]
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"] if row[0].endswith(f", {pass_name}")]
    greatest = max((row["roof"] for row in rows), default=1.0)
    parts = [
        _text(0, 18, f"flash_attention, {pass_name}: TFLOP/s on {report['circumstances']['device']}", size=15),
        *(_legend(column, name, colour) for column, (name, colour) in enumerate([*COLOURS.items(), ("roof", ROOF)])),
    ]
    for number, row in enumerate(rows):
        y = HEADER + number * ROW
        parts.append(_text(0, y + BAR + 4, row[""].removesuffix(f", {pass_name}").replace(" bfloat16", "")))
        rates = {"ejkernel": row["TFLOP/s"]}
        if row["cuDNN"] != "-":
            rates["cuDNN"] = row["TFLOP/s"] * row["ejkernel"] / row["cuDNN"]
        for line, (name, rate) in enumerate(rates.items()):
            width = WIDTH * rate / greatest
            parts.append(_box(LEFT, y + line * (BAR + 1), width, BAR, COLOURS[name]))
            parts.append(_text(LEFT + width + 4, y + line * (BAR + 1) + BAR - 1, f"{rate:.0f}", size=10))
        parts.append(_box(LEFT + WIDTH * row["roof"] / greatest, y - 2, 2, 2 * BAR + 5, ROOF))
    size = f'width="{LEFT + WIDTH + 50}" height="{HEADER + ROW * len(rows)}"'
    style = 'font-family="sans-serif" fill="#1f2933"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', *parts, "</svg>", ""])


def _legend(column: int, name: str, colour: str) -> str:
    x = LEFT + 110 * column
    return _box(x, 30, BAR, BAR, colour) + _text(x + BAR + 5, 40, name)


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{colour}"/>'


def _text(x: float, y: float, text: str, size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y}" font-size="{size}">{escape(text)}</text>'


if __name__ == "__main__":
    raise SystemExit(main())
