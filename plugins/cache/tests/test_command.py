"""The command ``ejkernel cache``: what it shows and writes, and that nothing is lost where something is wrong."""

from __future__ import annotations

import doctest
import errno
import functools
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from ejkernel_cache import PackagedRecords, PersistentCache, _contents, _exchange, _names, default_cache
from ejkernel_cache._contents import call_lines, contents_of, document_of, is_better, margins
from ejkernel_cache._exchange import package_name
from ejkernel_core import Key, Provenance, Record, RecordError, record_to_json
from ejkernel_core.extend import Shortfall

Run = Callable[..., Any]


@pytest.fixture
def run(run_command: Run) -> Run:
    """``run("ls", ...)``: the exit code and the output of ``ejkernel cache ls ...``."""
    return functools.partial(run_command, "cache")


@attrs.frozen
class Config:
    block: int = 1


def key(rows: int = 3, op: str = "scale", device: str = "NVIDIA H100", field: str = "arguments") -> Key:
    arguments = {"x": {"!array": ["float32", "rows", 8]}, "causal": True, "window": None}
    problem = {"operation": [op, 1], "device": ["gpu", device], field: arguments, "sizes": {"rows": rows}}
    return Key(op, device, json.dumps(problem, sort_keys=True, separators=(",", ":")))


def measured(milliseconds: float, *backends: str, budget_s: float | None = None, jax: str = "1") -> Provenance:
    names = backends or ("two",)
    tried = (
        *((f"{name} Config(block={n})", milliseconds * (n + 1)) for n, name in enumerate(names)),
        ("two bad", "wrong"),
    )
    shortfall = None if budget_s is None else Shortfall(3, budget_s)
    return Provenance(
        when=f"2026-11-20T12:00:{milliseconds:02.0f}+00:00",
        device="NVIDIA H100",
        milliseconds=milliseconds,
        backends=names,
        software={"jax": jax},
        tried=tried,
        shortfall=shortfall,
    )


def record(block: int, provenance: Provenance | None, backend: str = "two") -> Record:
    return Record(Config(block), backend, provenance)


def stored(cache: PersistentCache, call: Key | None = None) -> list[tuple[str | None, Any, float | None]]:
    """Backend, block and time of what is on disk."""
    documents = [d for d in contents_of(cache.path).documents if call is None or d.key == call]
    return [(d.backend, d.config and d.config["block"], d.milliseconds) for d in documents]


@pytest.fixture
def cache(folder: Path) -> PersistentCache:
    """The default cache with four records: of two operations, by hand, and on another device."""
    cache = PersistentCache()
    cache.put(key(3), record(64, measured(2.0, "two", "xla")))
    cache.put(key(4), record(32, measured(1.0)))
    cache.put(key(4, op="scale_bwd"), record(16, None))
    cache.put(key(4, device="NVIDIA H200"), record(8, measured(3.0)))
    return cache


# -- look --------------------------------------------------------------------------------------------------------------


def test_ls_has_a_row_for_each_device_and_operation(run: Run, cache: PersistentCache) -> None:
    lines = [line.split() for line in run("ls").text.splitlines()]
    assert ["NVIDIA", "H100"] in lines
    assert ["scale", "2", "1", "KiB", "2026-11-20", "12:00"] in lines
    assert ["scale_bwd", "1", "0", "KiB"] in lines
    assert lines[-1] == ["4", "records", "in", str(cache.path)]
    assert "4 records" in run("ls", "--op", "scale*").text
    assert "3 records" in run("ls", "--op", "scale").text
    assert "1 record in" in run("ls", "--device", "h200").text
    rows = json.loads(run("ls", "--json", "--device", "H100").text)["rows"]
    assert [(row["operation"], row["records"], row["newest"]) for row in rows] == [
        ("scale", 2, "2026-11-20T12:00:02+00:00"),
        ("scale_bwd", 1, ""),
    ]


def test_an_empty_cache_is_no_error(run: Run, folder: Path) -> None:
    assert run("ls") == (0, f"no records in {folder}; 'ejkernel tune' measures them\n", "")
    assert run("clear", "--yes").code == 0
    assert not folder.exists()
    assert (
        run("show", "scale").errors == f"ejkernel: no records of 'scale' in {folder}; 'ejkernel tune' measures them\n"
    )


def test_show_has_the_call_the_configuration_and_by_how_much_it_won(run: Run, cache: PersistentCache) -> None:
    output = run("show", "scale", "--device", "H100")
    assert output.code == 0
    for cell in ("3x8 float32", "causal=True", "block=64", "2 ms", "2x xla", "2026-11-20", "with jax 1"):
        assert cell in output.text
    assert "window" not in output.text  # it is off
    assert "block=8" not in output.text  # of the other device
    assert max(map(len, output.text.splitlines())) <= 80
    assert "by hand" in run("show", "scale_bwd").text
    (document,) = json.loads(run("show", key(3).digest[:8], "--json").text)
    assert (document["kernel"], document["config"], document["margins"]) == (
        "scale.two",
        {"block": 64},
        {"next": 2.0, "xla": 2.0},
    )


@attrs.frozen
class Blocks:
    rows: int
    columns: int | None = None


def test_a_configuration_is_written_as_its_type_has_it(run: Run, folder: Path) -> None:
    provenance = attrs.evolve(
        measured(2.0), tried=((f"two {Blocks(8)}", 2.0), (f"two {Blocks(16, 4)}", 3.0), ("xla None", 5.0))
    )
    PersistentCache().put(key(3), Record(Blocks(8), "two", provenance))
    file = default_cache().file(key(3), "two").read_text()
    assert file.index("columns") < file.index("rows")  # sorted, in a record
    lines = run("show", key(3).digest).text.splitlines()
    assert any("rows=8, columns=None" in line for line in lines)
    assert [line.split() for line in lines[-3:]] == [
        ["two", "rows=8,", "columns=None", "2"],
        ["two", "rows=16,", "columns=4", "3"],
        ["xla", "5"],
    ]


def test_the_record_of_one_key_has_all_that_was_tried(run: Run, cache: PersistentCache) -> None:
    cache.put(key(3), record(64, measured(2.0, "two", "xla", budget_s=5.0)))
    output = run("show", key(3).digest)
    assert ["two", "bad", "wrong"] in [line.split() for line in output.text.splitlines()]
    assert "3 configurations were not measured in 5 s" in output.text
    assert "bad" not in run("show", "scale").text


def test_diff_has_what_one_lacks_and_what_differs(run: Run, cache: PersistentCache, tmp_path: Path) -> None:
    other = PersistentCache(tmp_path / "other")
    other.put(key(3), record(64, measured(4.0, "two", "xla")))
    other.put(key(4), record(33, measured(3.0)))
    other.put(key(9), record(1, None))
    output = run("diff", cache.path, other.path, "--json")
    report = json.loads(output.text)
    assert {d["key"] for d in report["only_in_first"]} == {
        key(4, device="NVIDIA H200").digest,
        key(4, op="scale_bwd").digest,
    }
    assert [d["key"] for d in report["only_in_second"]] == [key(9).digest]
    assert [[d["config"]["block"] for d in pair] for pair in report["different"]] == [[32, 33]]
    assert [[d["config"]["block"] for d in pair] for pair in report["equal"]] == [[64, 64]]
    text = " ".join(run("diff", cache.path, other.path).text.split())
    assert "3x" in text
    assert (
        f"1 only in {other.path}, 1 different, 1 with the same configuration, which takes 2 times as long in the second"
        in text
    )
    assert "0 different, 4 with the same configuration, which takes as long" in run("diff", cache.path, cache.path).text


def test_diff_says_how_many_records_are_not_compared(run: Run, cache: PersistentCache, tmp_path: Path) -> None:
    other = PersistentCache(tmp_path / "other")
    other.put(key(3), record(64, measured(4.0, "two", "xla")))
    assert "not compared" not in run("diff", other.path, other.path).text
    other.put(key(3), attrs.evolve(record(1, measured(5.0, "two", "xla")), backend="xla"))
    text = " ".join(run("diff", other.path, other.path).text.split())
    assert f"not compared: 1 record in {other.path} and 1 record in {other.path}, of slower kernels" in text


def test_of_several_measurements_the_latest_is_compared() -> None:
    old, new = (document_of(record_to_json(key(), record(n, measured(n, jax=str(n)))), "here") for n in (9, 10))
    slower = attrs.evolve(new, provenance=attrs.evolve(new.provenance, milliseconds=11.0), backend="xla")
    by_hand = document_of(record_to_json(key(), record(1, None)), "here")
    contents = contents_of("/nowhere")
    for documents in ((old, new, slower, by_hand), (by_hand, slower, new, old)):
        assert attrs.evolve(contents, documents=documents).latest() == {key().problem: new}
    assert attrs.evolve(contents, documents=(by_hand,)).latest() == {key().problem: by_hand}


# -- share -------------------------------------------------------------------------------------------------------------


def test_what_is_exported_can_be_imported(run: Run, cache: PersistentCache, tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    assert run("export", file) == (0, f"4 records written to {file}\n", "")
    assert run("export", "-", "--device", "H200").text.count("\n") == 1
    target = PersistentCache(tmp_path / "target")
    assert run("import", file, "--path", target.path).text == "4 added\n"
    assert run("import", file, "--path", target.path).text == "4 the same\n"
    assert run("import", cache.path, "--path", target.path).text == "4 the same\n"
    assert sorted(map(str, stored(target))) == sorted(map(str, stored(cache)))
    assert target.get(key(3), kind=Config) == Config(64)


def test_records_come_from_the_standard_input_and_from_a_pipe(
    run: Run, cache: PersistentCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = run("export", "-").text
    for number, text in enumerate((lines, lines + "{\n", "")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        reader, writer = os.pipe()
        os.write(writer, text.encode())
        os.close(writer)
        outputs = [run("import", file, "--path", tmp_path / f"{number}") for file in ("-", f"/dev/fd/{reader}")]
        os.close(reader)
        assert [output.code for output in outputs] == [min(number, 1)] * 2
        if text:
            assert [output.text for output in outputs] == ["4 added\n", "4 the same\n"]
            assert sorted(map(str, stored(PersistentCache(tmp_path / f"{number}")))) == sorted(map(str, stored(cache)))
        else:
            assert outputs[0].errors.startswith("ejkernel: no records in the standard input; import takes what")
        assert ("the standard input, line 5: no record" in outputs[0].errors) == (number == 1)


def test_an_imported_record_answers(run: Run, scale_op: Any, folder: Path, tmp_path: Path) -> None:
    other = PersistentCache(tmp_path / "other")
    other.put(scale_op.keys()[0], scale_op.record(7))
    assert scale_op.used_factor() == 2
    assert run("import", other.path).text == "1 added\n"
    scale_op.reset()
    assert (scale_op.used_factor(), scale_op.origin()) == (7, f"disk ({folder})")


#: The record in the cache, the one that is imported, and whether that replaces it.
MERGES = {
    "faster": (measured(2.0), measured(1.0), True),
    "slower": (measured(1.0), measured(2.0), False),
    "all configurations": (measured(1.0, budget_s=5), measured(2.0), True),
    "out of time": (measured(2.0), measured(1.0, budget_s=50), False),
    "a larger budget": (measured(1.0, budget_s=5), measured(2.0, budget_s=9), True),
    "more backends": (measured(1.0, "two"), measured(2.0, "two", "xla"), True),
    "fewer backends": (measured(2.0, "two", "xla"), measured(1.0, "two"), False),
    "by hand here": (None, measured(1.0), False),
    "by hand there": (measured(1.0), None, False),
}


@pytest.mark.parametrize("case", MERGES)
def test_the_record_that_was_measured_better_stays(run: Run, folder: Path, tmp_path: Path, case: str) -> None:
    old, new, is_replaced = MERGES[case]
    here, other = PersistentCache(), PersistentCache(tmp_path / "other")
    here.put(key(), record(1, old))
    other.put(key(), record(2, new))
    words = "replaced by better ones" if is_replaced else "not better than those here"
    assert run("import", other.path).text == f"1 {words}\n"
    assert [block for _, block, _ in stored(here)] == [2 if is_replaced else 1]
    assert is_better(new, old) == is_replaced


def test_records_of_other_versions_and_backends_stay_beside_each_other(run: Run, folder: Path, tmp_path: Path) -> None:
    here, other = PersistentCache(), PersistentCache(tmp_path / "other")
    here.put(key(), record(1, measured(1.0, jax="1")))
    other.put(key(), record(2, measured(2.0, jax="2")))
    other.put(key(), record(3, measured(3.0), backend="xla"))
    assert run("import", other.path).text == "2 added\n"
    assert run("import", other.path).text == "2 the same\n"
    assert sorted(stored(here)) == [("two", 1, 1.0), ("two", 2, 2.0), ("xla", 3, 3.0)]
    assert here.read(key(), "two", Config) == record(1, measured(1.0, jax="1"))  # the latest one stays
    other.put(key(), record(4, measured(1.5, jax="2")))
    assert run("import", other.path).text == "1 replaced by better ones, 1 the same\n"
    assert sorted(stored(here)) == [("two", 1, 1.0), ("two", 4, 1.5), ("xla", 3, 3.0)]


def test_a_package_answers_where_it_is_installed(
    run: Run, scale_op: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = PersistentCache()
    cache.put(scale_op.keys()[0], scale_op.record(5, 2.0))
    cache.put(scale_op.keys()[0], attrs.evolve(scale_op.record(6, 9.0), backend="slow"))  # of the same measurement
    package = tmp_path / "package"
    output = run("pack", package, "--name", "My-Records", "--version", "3.1")
    assert output.code == 0
    assert output.text.splitlines()[-1] == f"install it: pip install {package}"
    assert 'name = "My-Records"\nversion = "3.1"' in (package / "pyproject.toml").read_text()
    assert 'my_records = "my_records:records"' in (package / "pyproject.toml").read_text()
    assert run("import", package, "--path", tmp_path / "imported").text == "1 added\n"
    assert run("pack", package, "--name", "other").errors == (
        f"ejkernel: {package} exists and is not empty; name another folder\n"
    )
    (file,) = package.rglob("*.jsonl")
    assert [json.loads(line)["config"] for line in file.read_text().splitlines()] == [{"factor": 5}]
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "none"))
    scale_op.reset()
    assert scale_op.used_factor() == 2
    from my_records import records  # type: ignore[import-not-found]

    assert isinstance(records, PackagedRecords)
    scale_op.registry.register(records, "my_records")
    assert (scale_op.used_factor(), scale_op.origin()) == (5, "packaged records (my_records)")


@pytest.mark.long
def test_a_package_builds_and_installs(run: Run, cache: PersistentCache, tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    assert run("pack", tmp_path / "package", "--name", "my-records").code == 0
    words = ["install", "-q", "--no-deps", "--no-index", "--no-build-isolation", "--target", tmp_path / "site"]
    subprocess.run([sys.executable, "-m", "pip", *words, tmp_path / "package"], check=True, timeout=300)
    program = "import importlib.metadata as m; print([p.value for p in m.entry_points(group='ejkernel.policies', name='my_records')])"
    path = os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])
    output = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert output.stdout == "['my_records:records']\n"
    assert len(contents_of(tmp_path / "site" / "my_records").documents) == 4


# -- remove ------------------------------------------------------------------------------------------------------------


def test_clear_removes_what_is_selected(run: Run, cache: PersistentCache) -> None:
    cache.put(key(3), record(65, measured(2.5, jax="2")))  # beside the record of other versions
    assert run("clear", "--op", "scale", "--device", "H100", "--yes") == (0, f"3 removed from {cache.path}\n", "")
    assert sorted(map(str, stored(cache))) == ["('two', 16, None)", "('two', 8, 3.0)"]


def test_nothing_is_removed_without_an_answer(run: Run, cache: PersistentCache) -> None:
    output = run("clear")
    assert output.code == 2
    assert output.errors.startswith(
        f"ejkernel: this removes 4 records from {cache.path}: pass --yes to do it without asking"
    )
    assert len(stored(cache)) == 4


@pytest.mark.parametrize(("answer", "code", "left"), [("n\n", 1, 4), ("y\n", 0, 0), ("\x03", 130, 4)])
def test_clear_asks_in_a_terminal(
    run_in_terminal: Any, cache: PersistentCache, answer: str, code: int, left: int
) -> None:
    exit_code, text = run_in_terminal("cache", "clear", answers={"[y/N]": answer})
    assert (exit_code, len(stored(cache))) == (code, left)
    assert "Remove 4 records from" in text
    assert "Traceback" not in text


# -- something is wrong ------------------------------------------------------------------------------------------------


def test_a_damaged_line_is_told_and_the_others_are_imported(run: Run, cache: PersistentCache, tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    run("export", file)
    lines = file.read_text().splitlines()
    broken = [lines[0], lines[1][: len(lines[1]) // 2], lines[2], "", lines[3].replace('"schema":2', '"schema":9')]
    file.write_bytes("\n".join(broken).encode() + b"\n\xff\n[]\n")
    target = PersistentCache(tmp_path / "target")
    output = run("import", file, "--path", target.path)
    assert (output.code, output.text) == (1, "2 added\n")
    *faults, rest, last = output.errors.splitlines()
    assert [fault.split(": ")[1] for fault in faults] == [f"{file}, line {number}" for number in (2, 5, 6)]
    assert rest == "ejkernel: ... and 1 more"
    assert "$.schema is 9" in faults[1]
    assert "no UTF-8" in faults[2]
    assert last == "ejkernel: 4 records could not be read and are left out"
    assert len(contents_of(target.path).documents) == 2


def test_a_damaged_file_of_a_cache_is_told_and_stays(run: Run, cache: PersistentCache) -> None:
    file = cache.file(key(3), "two")
    file.write_text("{")
    output = run("ls")
    assert output.code == 1
    assert "3 records in" in output.text
    assert output.errors.startswith(f"ejkernel: {file}: ")
    assert file.read_text() == "{"


#: What is in the place of a record, and what is said of it.
NO_RECORDS = {
    "list": ("[]", "no record: it takes an object of JSON; got []"),
    "text": ('"x"', 'no record: it takes an object of JSON; got "x"'),
    "null": ("null", "no record: it takes an object of JSON; got null"),
    "empty": ("{}", "no record: it lacks 'problem', 'kernel', 'config', 'provenance'"),
    "half": ("{", "no record: not JSON: Expecting property name"),
    "other format": ('{"schema": 9}', "$.schema is 9; this version reads 2"),
    "link": (None, "is a symbolic link"),
    "folder": (..., "is not a regular file"),
}


@pytest.mark.parametrize("name", ["x.json", "the record"])
@pytest.mark.parametrize("case", NO_RECORDS)
def test_what_is_no_record_is_told_and_left_out_by_every_subcommand_that_reads(
    run: Run, cache: PersistentCache, tmp_path: Path, case: str, name: str
) -> None:
    content, message = NO_RECORDS[case]
    record_file = cache.file(key(3), "two")
    file = record_file if name == "the record" else record_file.with_name(name)
    file.unlink(missing_ok=True)
    if content is None:
        file.symlink_to("/nowhere")
    elif content is ...:
        file.mkdir()
    else:
        file.write_text(str(content))
    commands = (
        ["ls"],
        ["show", "scale"],
        ["export", tmp_path / "lines"],
        ["diff", cache.path, tmp_path / "lines"],
        ["pack", tmp_path / "package", "--name", "mine"],
        ["import", cache.path, "--path", tmp_path / "other"],
    )
    for words in commands:
        output = run(*words)
        fault, last = output.errors.splitlines()
        assert (output.code, bool(output.text)) == (1, True), words
        assert fault.startswith(f"ejkernel: {file}: {message}")
        assert last == "ejkernel: 1 record could not be read and is left out"
    assert json.loads(run("ls", "--json").text)["faults"] == [fault.removeprefix("ejkernel: ")]


def test_only_a_fault_of_what_is_selected_counts(run: Run, cache: PersistentCache, tmp_path: Path) -> None:
    file = cache.file(key(4, op="scale_bwd"), "two")
    file.write_text("[]")
    for words in (["ls"], ["ls", "--op", "scale*"], ["ls", "--device", "H100"], ["export", "-"]):
        assert run(*words).code == 1, words
    for words in (
        ["show", "scale"],
        ["show", key(3).digest],
        ["ls", "--op", "scale"],
        ["ls", "--device", "H200"],
        ["export", tmp_path / "lines", "--op", "scale"],
        ["diff", cache.path, cache.path, "--op", "scale"],
        ["import", cache.path, "--op", "scale", "--path", tmp_path / "other"],
        ["pack", tmp_path / "package", "--name", "mine", "--op", "scale"],
    ):
        output = run(*words)
        assert (output.code, output.errors) == (0, ""), words
    for words in (["show", "scale_bwd"], ["show", key(4, op="scale_bwd").digest[:8]]):
        output = run(*words)
        assert output.code == 1
        assert output.errors.startswith(f"ejkernel: {file}: no record: it takes an object of JSON; got []\n")


def test_a_file_without_any_record_is_told_in_few_lines(run: Run, cache: PersistentCache, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text("import jax\n" * 104)
    output = run("import", file)
    assert output.code == 1
    *faults, rest, last = output.errors.splitlines()
    assert [fault.partition(": no record: not JSON: ")[0] for fault in faults] == [
        f"ejkernel: {file}, line {number}" for number in (1, 2, 3)
    ]
    assert rest == "ejkernel: ... and 101 more"
    assert last == "ejkernel: 104 records could not be read and are left out"


def test_a_file_that_no_cache_makes_is_not_listed(run: Run, cache: PersistentCache) -> None:
    file = cache.file(key(3), "two")
    file.rename(file.with_name("0123456789abcdef-0123456789abcdef.json"))
    assert run("ls") == (0, run("ls").text, "")
    assert "3 records in" in run("ls").text


@pytest.fixture
def full_disk(cache: PersistentCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system refuses to write anything more."""

    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)


def test_a_full_disk_is_told_in_one_line_and_the_old_file_stays(
    run: Run, cache: PersistentCache, tmp_path: Path, full_disk: None
) -> None:
    file = tmp_path / "records.jsonl"
    file.write_text("old")
    words = f"ejkernel: {file} cannot be written: No space left on device; name a place with space that can be written to, and run it again\n"
    assert run("export", file) == (1, "", words)
    assert file.read_text() == "old"
    assert sorted(tmp_path.iterdir()) == [tmp_path / "cache", file]
    output = run("import", cache.path, "--path", tmp_path / "target")
    assert (output.code, output.text, output.errors.count("\n")) == (1, "", 1)
    assert "No space left on device" in output.errors
    assert len(stored(cache)) == 4
    assert isinstance(cache.write_fault(), OSError)


def test_a_device_is_written_to_and_not_replaced(run: Run, cache: PersistentCache, tmp_path: Path) -> None:
    output = run("export", "/dev/full")
    assert (output.code, output.text, output.errors.count("\n")) == (1, "", 1)
    assert "No space left on device" in output.errors
    assert not Path("/dev/full").is_file()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    assert run("export", tmp_path / "link").code == 0
    assert (tmp_path / "link").is_symlink()
    assert len(contents_of(tmp_path / "target").documents) == 4


def test_what_cannot_be_read_or_removed_says_what_to_do(
    run: Run, cache: PersistentCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's rights do not hold for root, who may run the tests."""

    def refuse(path: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    scan, unlink, folder = os.scandir, os.unlink, cache.path / "NVIDIA%20H200" / "scale"
    monkeypatch.setattr(os, "unlink", refuse)
    output = run("clear", "--device", "H200", "--yes")
    assert output.errors == (
        f"ejkernel: {cache.file(key(4, device='NVIDIA H200'), 'two')} cannot be removed: Permission denied; what is left "
        "stays: get the right to write to its folder, and run it again\n"
    )
    monkeypatch.setattr(os, "unlink", unlink)
    monkeypatch.setattr(os, "scandir", lambda path: refuse(path) if Path(path) == folder else scan(path))
    output = run("ls")
    assert (output.code, "3 records in" in output.text) == (1, True)
    assert output.errors.startswith(f"ejkernel: {folder}: Permission denied\n")
    monkeypatch.setattr(os, "scandir", refuse)
    for words in (["ls"], ["export", tmp_path / "lines"], ["clear", "--yes"]):
        assert run(*words) == (
            1,
            "",
            f"ejkernel: {cache.path} cannot be read: Permission denied; get the right to read it, or set "
            "EJKERNEL_CACHE_DIR, or pass --path, to another folder\n",
        )
    monkeypatch.setattr(os, "scandir", scan)
    assert len(stored(cache)) == 4


def test_help_has_the_whole_line_of_each_subcommand_in_a_narrow_terminal(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for columns in (40, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = run("--help").text.splitlines()
        assert "..." not in "".join(lines[3:])
        assert "what only one has, and where the best configurations differ" in " ".join(" ".join(lines).split())


def test_the_heading_of_a_table_is_folded(run: Run, cache: PersistentCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    cache.put(key(9), record(1, measured(1.0, jax="1 of a long name")))
    output = run("show", "scale")
    assert max(map(len, output.text.splitlines())) <= 40
    assert "scale on NVIDIA H100, with jax 1 of a long name" in " ".join(output.text.split())


def test_the_folder_of_a_cache_can_be_tried(cache: PersistentCache, tmp_path: Path) -> None:
    assert cache.write_fault() is None
    assert list((cache.path / ".tmp").iterdir()) == []
    (tmp_path / "file").write_text("")
    fault = PersistentCache(tmp_path / "file").write_fault()
    assert isinstance(fault, OSError)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("ls", "--path", "{file}"), 2, "Invalid value for '--path': Directory '{file}' is a file."),
        (("ls", "--path", "{missing}"), 2, "Invalid value for '--path': Directory '{missing}' does not exist."),
        (("show", "scale", "--path", "{missing}"), 2, "Directory '{missing}' does not exist."),
        (("export", "-", "--path", "{missing}"), 2, "Directory '{missing}' does not exist."),
        (("pack", "{missing}/a", "--name", "mine", "--path", "{missing}"), 2, "Directory '{missing}' does not exist."),
        (("clear", "--yes", "--path", "{missing}"), 2, "Directory '{missing}' does not exist."),
        (("import", "{missing}"), 2, "Invalid value for 'FILE': Path '{missing}' does not exist."),
        (("import", "{file}", "--path", "{file}/below"), 1, "Not a directory"),
        (("diff", "{missing}", "{file}"), 2, "does not exist"),
        (("export", "{file}/below"), 1, "cannot be written: Not a directory"),
        (("export", "{missing}", "--op", "none"), 1, "no records of 'none' in {cache}; there are 'scale', 'scale_bwd'"),
        (("ls", "--op", "scal"), 1, "no records of 'scal' in {cache}; did you mean 'scale'?"),
        (("ls", "--op", "none", "--json"), 1, "no records of 'none' in {cache}; there are 'scale', 'scale_bwd'"),
        (("ls", "--device", "abacus"), 1, "no records on 'abacus' in {cache}; there are 'NVIDIA H100', 'NVIDIA H200'"),
        (("clear", "--op", "scal_bwd", "--yes"), 1, "no records of 'scal_bwd' in {cache}; did you mean 'scale_bwd'?"),
        (("clear", "--op", "scale_bwd", "--device", "H200", "--yes"), 1, "no records of 'scale_bwd' on 'H200' in {cache}"),
        (("show", "scale", "--device", "H300"), 1, "on 'H300' in {cache}; there are 'NVIDIA H100', 'NVIDIA H200'"),
        (("diff", "{cache}", "{file}", "--op", "scales"), 1, "in {cache} and {file}; did you mean 'scale'?"),
        (("import", "{file}", "--op", "none"), 1, "no records of 'none' in {file}; there are 'scale'"),
        (("import", "/dev/null"), 1, "no records in /dev/null; import takes what 'export' and 'pack' have written"),
        (("export", "/dev/full"), 1, "/dev/full cannot be written: No space left on device; name a place with space"),
        (("pack", "{missing}", "--name", "json"), 2, "json is a module of Python; take another name"),
        (("pack", "{missing}", "--name", "1 2"), 2, "'--name': takes letters, digits and '-'"),
        (("pack", "{missing}", "--name", "mine", "--version", "no version"), 2, "'--version': takes numbers with dots, as"),
        (("pack", "{cache}", "--name", "mine"), 1, "{cache} exists and is not empty; name another folder"),
        (("show", "scal"), 1, "no records of 'scal' in {cache}; did you mean 'scale'?"),
        (("show", ""), 2, "it takes an operation or a key; 'ejkernel cache ls' has the operations"),
        (("sho",), 2, "No such command 'sho'."),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(
    run: Run, cache: PersistentCache, tmp_path: Path, words: tuple[str, ...], code: int, message: str
) -> None:
    lines = tmp_path / "file"
    lines.write_text(record_to_json(key(), record(1, None)).replace("\n", ""))
    places = {"file": lines, "missing": tmp_path / "missing", "cache": cache.path}
    output = run(*(word.format(**places) for word in words))
    assert (output.code, output.text) == (code, "")
    assert message.format(**places) in output.errors
    assert output.errors.count("\n") == 1
    assert not (tmp_path / "missing").exists()
    assert len(stored(cache)) == 4


def test_writers_and_readers_do_not_disturb_each_other(run: Run, cache: PersistentCache, tmp_path: Path) -> None:
    """Another thread stores and removes records while the command reads, exports and merges."""
    is_over = threading.Event()

    def write() -> None:
        writer, number = PersistentCache(cache.path), 0
        while not is_over.is_set():
            number += 1
            writer.put(key(100 + number % 5), record(number, measured(1.0)))
            if number % 7 == 0:
                writer.remove(lambda other: other is not None and other.sizes["rows"] >= 100)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(20):
            assert run("ls").code == 0
            assert run("export", tmp_path / "lines").code == 0
            assert run("import", tmp_path / "lines").code == 0
    finally:
        is_over.set()
        thread.join()
    assert {(3, "scale"), (4, "scale"), (4, "scale_bwd")} <= {
        (d.key.sizes["rows"], d.key.op) for d in contents_of(cache.path).documents
    }


@pytest.mark.parametrize("module", [_contents, _exchange, _names])
def test_the_examples_of_docstrings(module: Any) -> None:
    results = doctest.testmod(module)
    assert results.attempted
    assert not results.failed


# -- texts -------------------------------------------------------------------------------------------------------------


def test_the_lines_of_a_call() -> None:
    lines = ["x", "  3x8 float32", "causal=True"]
    assert call_lines(key(3)) == call_lines(key(3, field="bucket")) == lines
    problem = {
        "arguments": {
            "a": {"!array": ["int8"]},
            "b": {"!array": ["int8"]},
            "wrt": {"!tuple": ["a"]},
            "s": 1 / 3,
            "d": None,
        }
    }
    assert call_lines(Key("f", "cpu", json.dumps(problem))) == ["a, b", "  scalar int8", "wrt=(a)", "s=0.3333"]
    assert call_lines(Key("f", "cpu", '"by hand"')) == ['"by hand"']


def test_margins_are_of_the_backends_own_record() -> None:
    provenance = measured(2.0, "two", "xla", "slow")
    assert margins("two", provenance) == {"next": 2.0, "xla": 2.0, "slow": 3.0}
    loser = attrs.evolve(provenance, milliseconds=4.0)
    assert margins("xla", loser) == {"next": 0.5, "two": 0.5, "slow": 1.5}
    assert margins("two", None) == {}
    assert margins("two", attrs.evolve(provenance, tried=())) == {}


@pytest.mark.parametrize(
    "changes", [{"config": [1]}, {"kernel": "other.two"}, {"provenance": {"when": 1}}, {"problem": {}}]
)
def test_a_line_that_is_no_record_is_refused(changes: dict[str, Any]) -> None:
    text = record_to_json(key(), record(1, measured(1.0)))
    assert document_of(text, "here").config == {"block": 1}
    with pytest.raises(RecordError):
        document_of(json.dumps({**json.loads(text), **changes}), "here")


def test_pip_is_to_install_a_folder_and_not_a_name(
    run: Run, cache: PersistentCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("pack", "mine", "--name", "mine").text.splitlines()[-1] == "install it: pip install ./mine"


def test_a_place_without_records_is_no_import(run: Run, cache: PersistentCache, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    output = run("import", tmp_path / "empty")
    assert output.code == 1
    assert output.errors == (
        f"ejkernel: no records in {tmp_path / 'empty'}; import takes what 'export' and 'pack' have written\n"
    )


def test_a_file_in_the_place_of_the_folder_is_told(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("one\ntwo\n")
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "file"))
    default_cache.cache_clear()
    output = run("ls")
    assert output.code == 1
    assert output.errors == (
        f"ejkernel: {tmp_path / 'file'} is not a folder; set EJKERNEL_CACHE_DIR, or pass --path, to a folder\n"
    )


def test_a_package_gets_a_module_name() -> None:
    assert package_name("my-records.v2") == "my_records_v2"
    for name in ("", "a b", "2x", "class", "json", "x-", "x/y"):
        with pytest.raises(ValueError, match=r"^name: "):
            package_name(name)


def test_a_package_gets_a_version_that_pip_takes(tmp_path: Path) -> None:
    version = pytest.importorskip("packaging.version")
    texts = "1 1.0 2026.11.26 1!2.0 v1.0 1.0a1 1.0-rc.1 1.0.post2 1.0-2 1.0.dev3 1.0b2.post3.dev4+cu13.1 1.0c 1.0R4 "
    texts += "x 1. .1 1..0 1.0+ 1.0+a..b 1.0x 1.0-a-b 1.0post1a1 1.0.dev1.post1 1!1!1 1-2-3 \u0661"
    for text in ("", " ", "not a version", '1"', "1\n", *texts.split()):
        try:
            version.Version(text)
            is_valid = text == text.strip()
        except version.InvalidVersion:
            is_valid = False
        assert bool(_exchange._VERSION.fullmatch(text)) == is_valid, text


def test_a_file_that_is_not_whole_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        _exchange.write_lines(tmp_path / "lines", [])
    assert list(tmp_path.iterdir()) == []
