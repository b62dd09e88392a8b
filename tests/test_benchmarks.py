"""The benchmarks of this repository, in their smallest settings: values and faults. No time is judged."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name: str, *words: str) -> str:
    program = [sys.executable, FOLDER / f"{name}.py", *words]
    process = subprocess.run(program, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def test_a_repeated_call_is_that_of_the_bare_function():
    report = load("overhead").repeated_call(2)
    assert report.faults == ()
    assert [row[0] for row in report.tables[0].rows] == [
        "ejkernel_core.call",
        "with a record in memory",
        "bare jax.jit",
    ]


def test_another_result_and_an_unused_record_are_faults(monkeypatch):
    overhead = load("overhead")
    monkeypatch.setattr(overhead.Registry, "call", lambda self, op, *arrays, **options: arrays[0])
    monkeypatch.setattr(overhead.Registry, "remember", lambda *arguments: None)
    assert overhead.repeated_call(1).faults == (
        "ejkernel_core.call has another result",
        "with a record in memory has another result",
        "the record in memory was not used, but heuristic",
    )


def test_records_on_disk_are_found_and_lost_ones_are_faults(monkeypatch):
    overhead = load("overhead")
    report = overhead.disk_lookup(entries=30, lookups=10)
    assert (report.faults, report.tables[0].rows[0][0]) == ((), "10 of 30 records")
    monkeypatch.setattr(overhead.Path, "write_text", lambda *arguments, **options: None)
    assert overhead.disk_lookup(entries=30, lookups=10).faults == ("9 of 10 records are not found",)


@pytest.mark.long
def test_the_import_is_measured():
    assert "the import, median: " in run("overhead", "--calls=1", "--entries=2", "--lookups=1", "--imports=1")


@pytest.mark.long
def test_the_first_call_is_measured_with_empty_and_with_full_caches():
    lines = run("first_call", "--rounds=1", "--tokens=32", "--backend=xla").splitlines()
    assert [line.split()[:2] for line in lines[2:6]] == [
        [name, caches] for name in ("ejkernel_core.call", "jax.nn") for caches in ("empty", "full")
    ]


def test_a_first_call_is_right_or_a_fault(monkeypatch):
    first_call = load("first_call")
    right = first_call.in_this_process(first_call.OURS, "xla", (1, 32, 2, 16), "float32")
    assert right["faults"] == []
    call = first_call.ejkernel_core.call
    monkeypatch.setattr(first_call.ejkernel_core, "call", lambda *arrays, **options: 1.01 * call(*arrays, **options))
    wrong = first_call.in_this_process(first_call.OURS, "xla", (1, 32, 2, 16), "float32")
    assert wrong["faults"][0].startswith("out is off by 1.0e-02 (norm)")
    outcomes = {first_call.OURS: wrong | {"seconds": 3.0}, first_call.PEER: right | {"seconds": 1.0}}
    keys = [(name, caches) for name in outcomes for caches in first_call.LIMITS_S]
    report = first_call.report_of({key: [outcomes[key[0]]] for key in keys})
    assert report.faults == (f"{first_call.OURS}: {wrong['faults'][0]}",)
    assert [(bar.measured, bar.is_held) for bar in report.bars] == [(2.0, True), (2.0, False)]
