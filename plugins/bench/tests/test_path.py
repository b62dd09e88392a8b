"""The path of a call through files: counted by hand in a package of two files, and some facts of attention's."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

import ejkernel_core
from ejkernel_bench import path
from ejkernel_bench._call_path import CallPath, trace_files

OUTER = """
from . import inner

def alone():
    return own() + own()

def own():
    return 1

def there_and_back():
    return inner.leaf() + inner.leaf()

def through_sorted():
    return sorted([3, 1, 2], key=inner.negative)

def twice_back():
    return inner.calling(own)

def generated():
    return [number for number in inner.numbers()]

def failing():
    try:
        inner.fails()
    except KeyError:
        return own()
"""

INNER = """
def leaf():
    return 1

def negative(number):
    return -number

def calling(function):
    return function() + function()

def numbers():
    yield 1
    yield 2

def fails():
    raise KeyError
"""


@pytest.fixture
def outer(tmp_path, monkeypatch):
    folder = tmp_path / "traced"
    folder.mkdir()
    for name, text in {"__init__": "", "outer": OUTER, "inner": INNER}.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("traced.outer")
    for name in [name for name in sys.modules if name.partition(".")[0] == "traced"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "entries", "pairs"),
    [
        ("alone", {"outer.py": 3}, {}),
        ("there_and_back", {"outer.py": 1, "inner.py": 2}, {("outer.py", "inner.py"): 4}),
        ("through_sorted", {"outer.py": 1, "inner.py": 3}, {("outer.py", "inner.py"): 6}),
        (
            "twice_back",
            {"outer.py": 3, "inner.py": 1},
            {("outer.py", "inner.py"): 2, ("inner.py", "outer.py"): 4},
        ),
        ("failing", {"outer.py": 2, "inner.py": 1}, {("outer.py", "inner.py"): 2}),
    ],
)
def test_entries_and_moves_are_counted(outer, name, entries, pairs):
    traced = trace_files(getattr(outer, name), Path(outer.__file__).parent)
    assert (traced.entries, traced.pairs, traced.moves) == (entries, pairs, sum(pairs.values()))
    assert list(traced.entries) == list(entries)


def test_a_generator_is_entered_by_each_next(outer):
    traced = trace_files(outer.generated, Path(outer.__file__).parent)
    assert traced.entries["inner.py"] == 3
    assert traced.pairs == {("outer.py", "inner.py"): 6}


def test_a_call_from_other_code_moves_from_the_last_file_of_the_package(outer):
    inner = sys.modules["traced.inner"]
    traced = trace_files(lambda: (outer.own(), inner.leaf(), inner.leaf()), Path(outer.__file__).parent)
    assert traced == CallPath({"outer.py": 1, "inner.py": 2}, {("outer.py", "inner.py"): 1})


def test_a_folder_whose_name_is_a_prefix_is_another_one(outer):
    assert trace_files(outer.alone, Path(outer.__file__).parent.parent / "trace") == CallPath({}, {})


def test_the_previous_profiler_is_restored_even_after_an_error(outer):
    def previous(*event):
        pass

    sys.setprofile(previous)
    try:
        with pytest.raises(KeyError):
            trace_files(sys.modules["traced.inner"].fails, Path(outer.__file__).parent)
        assert sys.getprofile() is previous
    finally:
        sys.setprofile(None)


# -- the report ---------------------------------------------------------------------------------------------------


def test_a_report_has_sums_and_limits(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("\n" * 401)
    (tmp_path / "b.py").write_text("\n" * 3)
    monkeypatch.setattr(path, "LIMITS", {path.FIRST: (2, 5), path.GRADIENT: (0, 2)})
    monkeypatch.setattr(path, "PAIRS_SHOWN", 2)
    first = CallPath({"b.py": 2, "a.py": 1}, {("b.py", "a.py"): 2, ("a.py", "b.py"): 4})
    paths = {
        path.FIRST: first,
        path.REPEATED: CallPath({"b.py": 1}, {}),
        path.GRADIENT: CallPath({"b.py": 7}, {("c", "d"): 3}),
    }
    report = path.report(paths, tmp_path)
    sums, files, pairs = (table.rows for table in report.tables)
    assert sums == (
        (path.FIRST, 2, "a.py", 401, 6),
        (path.REPEATED, 1, "b.py", 3, 0),
        (path.GRADIENT, 1, "b.py", 3, 3),
    )
    assert files == (("b.py", 3, 2, 1, 7), ("a.py", 401, 1, 0, 0))
    assert pairs == (("a.py calls b.py", 4, 0, 0), ("c calls d", 0, 0, 3))
    assert [(bar.measured, bar.limit, bar.is_held) for bar in report.bars] == [
        (401, 400, False),
        (2, 2, True),
        (6, 5, False),
        (1, 0, False),
        (3, 2, False),
    ]


@pytest.mark.long
def test_a_call_of_attention_is_traced():
    report = path.run()
    sums, files = ({row[0]: row[1:] for row in table.rows} for table in report.tables[:2])
    folder = Path(ejkernel_core.__file__).parent
    assert report.tables[0].title == f"calls in {folder}"
    # What ends a traceback at the user's line is entered before the call itself.
    assert list(files)[:2] == ["_jax_versions.py", "_call.py"]
    assert all(files["_call.py"][1:])
    assert files["_call.py"][0] == len((folder / "_call.py").read_text(encoding="utf-8").splitlines())
    for place, name in enumerate((path.FIRST, path.REPEATED, path.GRADIENT)):
        assert sums[name][0] == sum(row[1 + place] > 0 for row in files.values())
        assert sums[name][2] == max(row[0] for row in files.values() if row[1 + place])
    # The second call is looked up, and the gradient is lowered.
    assert sums[path.REPEATED][0] < min(sums[path.GRADIENT][0], sums[path.FIRST][0])
    assert sums[path.REPEATED][3] < sums[path.FIRST][3]
