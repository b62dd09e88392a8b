"""What measures: order, statistics, errors and how they are shown. Nothing here depends on how long anything takes."""

from __future__ import annotations

import doctest

import jax
import numpy as np
import pytest

from ejkernel_bench import _errors, _timing
from ejkernel_bench._errors import error, faults
from ejkernel_bench._fresh import in_fresh_process
from ejkernel_bench._report import Bar, Report, Table
from ejkernel_bench._timing import Times, interleaved


def test_every_contender_runs_in_every_round_in_turns():
    ran = []
    times = interleaved({"a": lambda: ran.append("a"), "b": lambda: ran.append("b")}, rounds=3, warm_up=1)
    assert "".join(ran) == "ab" + "abbaab"
    assert {name: len(taken.seconds) for name, taken in times.items()} == {"a": 3, "b": 3}


def test_statistics_are_numpys():
    seconds = np.random.default_rng(0).exponential(size=37)
    times = Times(seconds)
    assert times.median == pytest.approx(np.median(seconds))
    for percent in (0, 10, 33, 99, 100):
        assert times.percentile(percent) == pytest.approx(np.percentile(seconds, percent))
    assert times.spread == pytest.approx(np.percentile(seconds, 75) - np.percentile(seconds, 25))
    assert times.scaled(1e-3) == pytest.approx(
        (np.median(seconds) * 1e3, times.spread * 1e3, seconds.min() * 1e3, seconds.max() * 1e3)
    )


def test_doctests():
    outcome = doctest.testmod(_timing)
    assert outcome.attempted
    assert not outcome.failed


def test_an_error_in_one_row_shows():
    right = np.random.default_rng(0).normal(size=(1000, 64))
    given = right.copy()
    given[7] = 0
    assert error(right, right).within(0)
    assert error(given, right).norm < 0.1
    assert error(given, right).worst > 0.3
    assert not error(given, right).within(0.1)


def test_an_error_is_the_same_where_an_accelerator_finds_it(monkeypatch):
    right = jax.random.normal(jax.random.key(0), (300, 7, 64))
    given = right.at[7, 3, 5].add(0.01).astype("bfloat16")
    here = error(given, right)
    monkeypatch.setattr(_errors, "_elsewhere", lambda array: True)
    monkeypatch.setattr(_errors, "_sizes", None)
    there = error(given, right)
    np.testing.assert_allclose([there.norm, there.worst], [here.norm, here.worst], rtol=1e-5)
    assert not error(right.at[7, 3, 5].set(np.nan), right).within(1e9)


def test_nan_is_never_within_tolerance():
    assert not error(np.array([1.0, np.nan]), np.ones(2)).within(1e9)


def test_a_fault_names_what_is_wrong():
    found = {"out": error(np.ones(3), np.ones(3)), "d_key": error(np.ones(3), 2 * np.ones(3))}
    assert [fault.partition(" ")[0] for fault in faults(found, 1e-3)] == ["d_key"]


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


def test_bars_have_two_sides():
    assert Bar("a", 1.0, 2.0, "us").held
    assert not Bar("a", 3.0, 2.0, "us").held
    assert Bar("a", 3.0, 2.0, "times", at_least=True).held
    assert not Bar("a", float("nan"), 2.0, "us").held
    assert str(Bar("a call", 20.0, 15.0, "us")) == "a call: 20 us, at most 15 us: NOT held"


def test_a_report_shows_and_keeps_everything():
    report = Report("b", [Table("t", ("", "x"), [("row", 1)])], [Bar("bar", 1.0, 2.0, "s")], ["out is off"])
    assert str(report).startswith("t\n       x\n  row  1\n")
    assert "bar: 1 s, at most 2 s: held" in str(report)
    assert "WRONG: out is off" in str(report)
    data = report.data()
    assert data["bars"][0]["held"] is True
    assert data["faults"] == ("out is off",)
    assert data["circumstances"]["versions"]["jax"]


def test_a_fresh_process_answers_or_tells_why_not():
    assert in_fresh_process("import sys, json; print('noise'); print(json.dumps(sys.argv[1:]))", "a", "b") == ["a", "b"]
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        in_fresh_process("1 / 0")
