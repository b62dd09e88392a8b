"""The pictures of the README and of the pages show what the tables of docs/measurements say."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
TIMES = "\N{MULTIPLICATION SIGN}"
SVG = "{http://www.w3.org/2000/svg}"
#: Of the pages from whose tables pictures are drawn.
PAGES = ("h200-2026-11-22", "h100-2026-11-25", "h100-h200-2026-11-27", "cpu-2026-11-21")
TEXT = "".join((ROOT / "docs" / "measurements" / f"{page}.md").read_text() for page in PAGES)
#: What the tables of the two cards begin with, and how many rows are drawn.
H200, H100 = "| 4, 4096, 16, 128, full | forward | 0.797 |", "| 4, 4096, 16, 128, full | 0.799 |"


def rows(first: str, count: int) -> list[list[str]]:
    lines = TEXT[TEXT.index(first) :].splitlines()[:count]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def texts(name: str) -> Counter[str]:
    picture = ElementTree.parse(ROOT / "docs" / "pictures" / name)
    return Counter("".join(element.itertext()) for element in picture.iter(f"{SVG}text"))


@pytest.mark.parametrize("theme", ["", "-dark"])
def test_the_ratios_to_cudnn_are_those_of_both_tables(theme):
    ratios = [row[6] for row in rows(H200, 14)] + [ratio for row in rows(H100, 7) for ratio in (row[3], row[6])]
    expected = Counter(f"{float(ratio):.2f} {TIMES}" for ratio in ratios)
    assert len(ratios) == expected.total() == 28
    shown = texts(f"attention{theme}.svg")
    assert {text: count for text, count in shown.items() if text.endswith(TIMES)} == dict(expected)
    assert shown[f"4 {TIMES} 4096, 16 {TIMES} 128 causal"] >= 1
    assert {"ejkernel", "cuDNN", "NVIDIA H100, forward", "NVIDIA H200, forward and backward"} <= {*shown}


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md"])
def test_the_description_has_the_least_and_the_greatest_ratio(page):
    h200, h100 = rows(H200, 14), rows(H100, 7)
    forward = [row[6] for row in h200[::2]] + [row[3] for row in h100]
    both = [row[6] for row in h200[1::2]] + [row[6] for row in h100]
    first, second = (f"{min(ratios, key=float)} to {max(ratios, key=float)}" for ratios in (forward, both))
    description = f"for seven sizes: {first} times the speed of cuDNN forward, {second} forward and backward."
    assert description in " ".join((ROOT / page).read_text().split())


def size(mib: str) -> str:
    gib = float(mib) / 1024
    return f"{float(mib):.0f} MiB" if gib < 1 else f"{gib:.0f} GiB" if gib >= 10 else f"{gib:.1f} GiB"


@pytest.mark.parametrize("theme", ["", "-dark"])
@pytest.mark.parametrize(("name", "first"), [("memory", "| 1024 | "), ("loss-memory", "| 2048 | 1049 | ")])
def test_the_memory_is_that_of_the_table(name, first, theme):
    tokens = rows(first, 5)
    shown = texts(f"{name}{theme}.svg")
    assert [shown[f"{int(row[0]):,}"] for row in tokens] == [1] * 5
    ends = Counter(size(mib) for row in (tokens[0], tokens[-1]) for mib in row[1:])
    assert {end: shown[end] for end in ends} == dict(ends)
    words = f"at {int(tokens[-1][0]):,} tokens {size(tokens[-1][1])} by ejkernel and {size(tokens[-1][2])}"
    assert words in " ".join(TEXT.split())


@pytest.mark.parametrize("theme", ["", "-dark"])
def test_the_parts_of_a_step_are_those_of_the_table(theme):
    parts = rows("| products of experts | ", 10)
    assert parts[-1][0] == "Adam"
    shown = texts(f"training-step{theme}.svg")
    assert [shown[name] for name, *_ in parts] == [1] * 10
    sums = [f"{sum(float(cell or 0) for cell in cells):.1f}" for _, *row in parts for cells in (row[:3], row[3:])]
    sums[:2] = f"{sums[0]}  ejkernel", f"{sums[1]}  tokamax"
    assert {text: count for text, count in shown.items() if re.match(r"\d+\.\d", text)} == dict(Counter(sums))


@pytest.mark.parametrize("name", ["attention", "memory", "loss-memory", "training-step"])
def test_each_theme_has_a_background_and_the_same_words(name):
    light, dark = (f"{name}{theme}.svg" for theme in ("", "-dark"))
    assert texts(light) == texts(dark)
    for file, background in ((light, "#ffffff"), (dark, "#0d1117")):
        content = (ROOT / "docs" / "pictures" / file).read_text()
        patch = content[content.index('id="patch_1"') :][:500]  # the first thing that is drawn covers the whole picture
        assert re.search(rf"fill: {background}", patch)


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("pictures", ROOT / ".ci" / "pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_rates_are_those_of_the_table(drawing):
    cases = list(drawing.on_h200())
    table_rates = [float(row[4]) for row in rows(H200, 14)]
    rates = [rate for case in cases for rate in case.ours]
    assert rates == pytest.approx(table_rates, rel=0.02)  # the milliseconds of the table are rounded
    assert [case.name for case in cases] == [row[0].removesuffix(", causal") for row in rows(H200, 14)[::2]]
