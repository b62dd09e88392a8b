"""What is drawn: rates where the work is known, times elsewhere, and the roofline of a known card."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from ejkernel_bench import pictures
from ejkernel_bench._roof import CARDS

SVG = "{http://www.w3.org/2000/svg}"
COLUMNS = ["", "ejkernel", "range", "TFLOP/s", "TB/s", "xla"]
#: As a suite writes them: forward 4 TFLOP in 10 ms, and both passes 14 TFLOP in 40 ms.
ROWS = [["long, forward", 10.0, 0.1, 400.0, 2.0, 20.0], ["long, forward+backward", 40.0, 0.1, 350.0, 1.0, "-"]]


def report(rows=ROWS, columns=COLUMNS, device="gpu NVIDIA H200", series=("ejkernel", "xla")):
    table = {"title": "milliseconds", "columns": columns, "rows": rows, "series": series}
    return {"benchmark": "suite", "tables": [table], "circumstances": {"device": device}}


def test_each_pass_has_a_panel_of_rates():
    forward, both, roofline = pictures.panels_of(report())
    assert (forward.cases, both.cases) == (["long"], ["long"])
    assert forward.lengths == {"ejkernel": [400.0], "xla": [200.0]}
    assert both.lengths == {"ejkernel": [350.0]}
    assert forward.unit == "TFLOP/s (more is better)"
    assert "forward" in forward.title
    assert isinstance(roofline, pictures.Roofline)


def test_small_rates_are_in_giga():
    rows = [["short, forward", 10.0, 0.1, 0.4, 0.002, 20.0]]
    (panel,) = pictures.panels_of(report(rows, device="cpu cpu"))
    assert panel.lengths == {"ejkernel": [400.0], "xla": [200.0]}
    assert panel.unit == "GFLOP/s"


def test_a_call_that_is_limited_by_memory_is_drawn_by_its_traffic():
    rows = [["norm, forward", 10.0, 0.1, 2.0, 4.0, 20.0]]
    panel, _ = pictures.panels_of(report(rows))
    assert panel.lengths == {"ejkernel": [4.0], "xla": [2.0]}
    assert panel.unit == "TB/s (more is better)"


def test_a_copy_is_drawn_beside_traffic_and_not_beside_arithmetic():
    columns, series = [*COLUMNS, "copy"], ("ejkernel", "copy")
    (panel,) = pictures.panels_of(report([[*ROWS[0], 5.0]], columns, "cpu cpu", series))
    assert panel.lengths == {"ejkernel": [400.0]}
    rows = [["norm, forward", 10.0, 0.1, 2.0, 4.0, 20.0, 5.0]]
    (panel,) = pictures.panels_of(report(rows, columns, "cpu cpu", series))
    assert panel.lengths == {"ejkernel": [4.0], "copy": [8.0]}


def test_without_rates_the_figures_are_drawn():
    (panel,) = pictures.panels_of(report([["forward, ejkernel", 2.5]], ["", "median"], series=("median",)))
    assert panel.cases == ["forward, ejkernel"]
    assert panel.lengths == {"median": [2.5]}
    assert panel.unit == "milliseconds (less is better)"


@pytest.mark.parametrize("change", [{"rows": []}, {"series": ()}])
def test_a_table_without_rows_or_series_is_not_drawn(tmp_path, change):
    assert list(pictures.panels_of(report(**change))) == []
    with pytest.raises(ValueError, match="there is nothing to draw"):
        pictures.draw([report(**change)], tmp_path / "picture.svg")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("device", ["cpu cpu", "gpu NVIDIA A100-SXM4-80GB"])
def test_an_unknown_card_has_no_roofline(device):
    assert not [panel for panel in pictures.panels_of(report(device=device)) if isinstance(panel, pictures.Roofline)]


def test_a_point_of_the_roofline_is_at_its_intensity_and_rate():
    from matplotlib.figure import Figure

    *_, roofline = pictures.panels_of(report())
    axes = Figure().subplots()
    roofline.draw(axes)
    assert axes.collections[0].get_offsets().tolist() == [[200.0, 400.0], [350.0, 350.0]]
    card = CARDS["NVIDIA H200"]
    xs, ys = axes.lines[0].get_xdata(), axes.lines[0].get_ydata()
    assert ys[1] == ys[2] == card.flops / 1e12
    assert ys[0] / xs[0] == pytest.approx(card.bytes / 1e12)
    assert math.isclose(xs[1], card.flops / card.bytes)


def test_a_picture_has_the_cases_the_contenders_and_the_roof(tmp_path):
    columns, series = [*COLUMNS, "roof"], ("ejkernel", "xla")
    picture = tmp_path / "picture.svg"
    pictures.draw([report([[*row, 989.0] for row in ROWS], columns, series=series)], picture)
    texts = [element.text for element in ElementTree.parse(picture).iter(f"{SVG}text")]
    for text in (" ejkernel 400", " xla 200", " ejkernel 350", "989 TFLOP/s"):
        assert texts.count(text) == 1
    assert texts.count("long") == 2
    assert sum("the line is the roof" in (text or "") for text in texts) == 2


def test_a_table_by_tokens_is_drawn_as_lines(tmp_path):
    rows = [["1024", 2.0, "-"], ["4096", 8.0, 30.0], ["16384", 32.0, 480.0]]
    given = report(rows, ["tokens", "ejkernel", "xla"])
    (panel,) = pictures.panels_of(given)
    assert panel.points == {"ejkernel": [(1024, 2), (4096, 8), (16384, 32)], "xla": [(4096, 30), (16384, 480)]}
    assert panel.title == "suite, gpu NVIDIA H200\nmilliseconds"
    assert [*pictures.lines("", [{"tokens": "8", "it": "-"}, {"tokens": "9", "it": 1}], ["it"]).points["it"]] == [
        (9, 1)
    ]
    picture = tmp_path / "picture.svg"
    pictures.draw([given], picture)
    texts = {element.text for element in ElementTree.parse(picture).iter(f"{SVG}text")}
    assert {" ejkernel 32", " xla 480", "1,024", "16,384", "tokens"} <= texts
