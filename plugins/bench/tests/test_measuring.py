"""Measuring: order, statistics, errors and how they are shown. Nothing here depends on times."""

from __future__ import annotations

import doctest

import jax
import numpy as np
import pytest

from ejkernel_bench import _errors, _roof, _timing
from ejkernel_bench._errors import error, fault_messages
from ejkernel_bench._report import Bar, Report, Table
from ejkernel_bench._rows import Rows, listening
from ejkernel_bench._timing import Times, interleaved


def test_every_contender_runs_in_every_round_in_turns():
    runs = []
    times = interleaved({"a": lambda: runs.append("a"), "b": lambda: runs.append("b")}, rounds=3, warm_up=1)
    assert "".join(runs) == "ab" + "abbaab"
    assert {name: len(contender_times.seconds) for name, contender_times in times.items()} == {"a": 3, "b": 3}


def test_statistics_are_those_of_numpy():
    seconds = np.random.default_rng(0).exponential(size=37)
    times = Times(seconds)
    assert times.median == pytest.approx(np.median(seconds))
    for percent in (0, 10, 33, 99, 100):
        assert times.percentile(percent) == pytest.approx(np.percentile(seconds, percent))
    assert times.spread == pytest.approx(np.percentile(seconds, 75) - np.percentile(seconds, 25))
    assert times.scaled(1e-3) == pytest.approx(
        (np.median(seconds) * 1e3, times.spread * 1e3, seconds.min() * 1e3, seconds.max() * 1e3)
    )


@pytest.mark.parametrize("module", [_timing, _roof])
def test_doctests(module):
    results = doctest.testmod(module)
    assert results.attempted
    assert not results.failed


def test_an_error_in_one_row_shows():
    expected = np.random.default_rng(0).normal(size=(1000, 64))
    result = expected.copy()
    result[7] = 0
    assert error(expected, expected).is_within(0)
    assert error(result, expected).norm < 0.1
    assert error(result, expected).worst > 0.3
    assert not error(result, expected).is_within(0.1)


def test_an_error_is_the_same_on_an_accelerator(monkeypatch):
    expected = jax.random.normal(jax.random.key(0), (300, 7, 64))
    result = expected.at[7, 3, 5].add(0.01).astype("bfloat16")
    local_error = error(result, expected)
    monkeypatch.setattr(_errors, "_is_elsewhere", lambda array: True)
    monkeypatch.setattr(_errors, "_sizes", None)
    remote_error = error(result, expected)
    np.testing.assert_allclose(
        [remote_error.norm, remote_error.worst], [local_error.norm, local_error.worst], rtol=1e-5
    )
    assert not error(expected.at[7, 3, 5].set(np.nan), expected).is_within(1e9)


def test_nan_is_never_within_tolerance():
    assert not error(np.array([1.0, np.nan]), np.ones(2)).is_within(1e9)


def test_a_fault_names_the_wrong_result():
    errors = {"out": error(np.ones(3), np.ones(3)), "d_key": error(np.ones(3), 2 * np.ones(3))}
    assert [fault.partition(" ")[0] for fault in fault_messages(errors, 1e-3)] == ["d_key"]


def test_a_table_lines_up():
    table = Table("times", ("", "median"), [("a", 1.5), ("longer", 1234.5), ("tiny", 1e-6), ("count", 12)])
    assert str(table).splitlines() == [
        "times",
        "           median",
        "  a           1.5",
        "  longer     1234",
        "  tiny    1.0e-06",
        "  count        12",
    ]


def test_a_wide_table_is_divided_and_nothing_is_cut_off():
    table = Table("times", ("", "ours", "range", "theirs", "kernels"), [("case", 1.5, "-", 20.25, "by xla")])
    assert str(table).splitlines() == ["times", "        ours  theirs  kernels", "  case   1.5    20.2   by xla"]
    assert table.text(24).splitlines() == [
        "times",
        "        ours  theirs",
        "  case   1.5    20.2",
        "",
        "        kernels",
        "  case   by xla",
    ]


def test_a_row_is_announced_with_the_columns_that_a_picture_draws():
    lines = []
    rows = Rows("milliseconds", ("", "ours", "range", "theirs"), series=("ours", "theirs"))
    with listening(lines.append):
        rows.add("first", 1.5, 0.1, 2.0)
        assert lines == ["milliseconds", "  first: ours 1.5, theirs 2"]
        rows.add("second", 1.25, 0.1, "-")
    rows.add("third", 1, 1, 1)  # nobody listens
    assert lines[2:] == ["  second: ours 1.25"]
    assert rows.table().rows == (("first", 1.5, 0.1, 2.0), ("second", 1.25, 0.1, "-"), ("third", 1, 1, 1))


def test_bars_have_two_sides():
    assert Bar("a", 1.0, 2.0, "us").is_held
    assert not Bar("a", 3.0, 2.0, "us").is_held
    assert Bar("a", 3.0, 2.0, "times", at_least=True).is_held
    assert not Bar("a", float("nan"), 2.0, "us").is_held
    assert str(Bar("a call", 20.0, 15.0, "us")) == "a call: 20 us, at most 15 us: NOT held"


def test_a_report_has_everything_as_text_and_as_data():
    report = Report("b", [Table("t", ("", "x"), [("row", 1)])], [Bar("bar", 1.0, 2.0, "s")], ["out is off"])
    assert str(report).startswith("t\n       x\n  row  1\n")
    assert "bar: 1 s, at most 2 s: held" in str(report)
    assert "WRONG: out is off" in str(report)
    data = report.data()
    assert data["bars"][0]["held"] is True
    assert data["faults"] == ("out is off",)
    assert data["circumstances"]["versions"]["jax"]
