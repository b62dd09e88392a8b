"""What a file has in its texts: it reaches no terminal and no program, and one bad record is one line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from ejkernel_cache import PackagedRecords, PersistentCache
from ejkernel_cache._contents import contents_of
from ejkernel_core import Key, Provenance, Record, RecordError

ESCAPES = "\x1b[2J\x07\x9b31m\x7f\r\u202e\x00"
SURROGATE = "\ud800"
#: What each place of a record gets; rich and Python read some of these as more than text.
HOSTILE = [ESCAPES, "[/bold][link=file:///]", '"""\nimport os\nos.abort()\n"""', "a\nb"]


def is_harmless(text: str) -> bool:
    return all(character.isprintable() or character == "\n" for character in text)


def hostile_document(text: str, op: str = "scale", device: str = "a device") -> dict[str, Any]:
    """A record that is right, with this text in all places that take any text."""
    problem = {
        "operation": [op, 1],
        "device": ["gpu", device],
        "arguments": {f"x{text}": {"!array": [f"float32{text}", 8]}, text: text},
    }
    provenance = {
        "when": "2026-11-20T12:00:00+00:00",
        "device": text,
        "milliseconds": 1.5,
        "backends": ["two", text],
        "software": {"jax": text, text: "1"},
        "tried": [[f"two {text}", 1.5], [text, text], [f"one{text}", f"the process crashed {text}"]],
        "shortfall": {"unreached": 3, "budget_s": 1.0},
    }
    return {
        "schema": 2,
        "problem": problem,
        "kernel": f"{op}.{text}",
        "config": {text: text},
        "provenance": provenance,
    }


def write_lines(file: Path, *documents: dict[str, Any]) -> Path:
    file.write_text("".join(f"{json.dumps(document)}\n" for document in documents))
    return file


@pytest.mark.parametrize("text", HOSTILE)
def test_no_command_shows_control_characters_or_markup(
    run_command: Callable[..., Any], folder: Path, tmp_path: Path, text: str
) -> None:
    lines = write_lines(tmp_path / "records.jsonl", hostile_document(text, f"op{text}", f"device{text}"))
    digest = contents_of(lines).documents[0].key.digest
    for words in (
        ["import", lines],
        ["ls"],
        ["ls", "--json"],
        ["show", f"op{text}"],
        ["show", digest],
        ["show", digest, "--json"],
        ["diff", folder, tmp_path],
        ["export", "-"],
        ["show", text],
        ["import", tmp_path / text.replace("\0", "").replace("/", "")],
        ["pack", tmp_path / "package", "--name", "mine"],
        ["clear", "--yes"],
    ):
        output = run_command("cache", *words)
        assert is_harmless(output.text + output.errors), words
        assert "--debug" not in output.errors, output.errors
    source = (tmp_path / "package" / "mine" / "__init__.py").read_text()
    assert "import os" not in source
    assert is_harmless((tmp_path / "package" / "README.md").read_text())
    assert list(PersistentCache(folder)) == []


def test_what_is_exported_is_the_same_record(run_command: Callable[..., Any], tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "records.jsonl", document := hostile_document(ESCAPES))
    run_command("cache", "import", lines)
    assert json.loads(run_command("cache", "export", "-").text) == document


@pytest.mark.parametrize("source", ["disk", "packaged"])
def test_no_explanation_has_control_characters(scale_op: Any, folder: Path, tmp_path: Path, source: str) -> None:
    """Neither of a record that is used, nor of one that cannot be used."""
    file = scale_op.on_disk()
    document = json.loads(file.read_text())
    provenance = hostile_document(ESCAPES)["provenance"] | {"backends": ["two"]}
    used = document | {"provenance": provenance | {"software": {"jax": f"1{ESCAPES}"}}}
    unused = document | {"config": {f"factor{ESCAPES}\n": f"7{ESCAPES}", "factor": 7}, "provenance": None}
    if source == "packaged":
        folder.rename(tmp_path / "package")
        file = tmp_path / "package" / file.relative_to(folder)
    for content, origin in ((used, source), (unused, "heuristic")):
        file.write_text(json.dumps(content))
        scale_op.reset()
        if source == "packaged":
            scale_op.registry.register(PackagedRecords(tmp_path / "package"), "packaged")
        from ejkernel_core import policy_override

        with policy_override(other_versions=True):
            explanation = scale_op.registry.explain("scale", jnp.ones(5))
        plan = explanation.plan
        assert plan.origin.startswith(origin)
        texts = [str(explanation), repr(explanation), str(plan), repr(plan), str(plan.choice), repr(plan.choice)]
        texts += [text for verdict in plan.verdicts for text in (str(verdict), repr(verdict), verdict.reason)]
        assert all(map(is_harmless, texts))
        assert "u001b[2J" in texts[0]
        assert all(len(verdict.reason.splitlines()) <= 1 for verdict in plan.verdicts)


def test_the_texts_of_records_are_harmless() -> None:
    provenance = Provenance(
        when=ESCAPES, device=ESCAPES, milliseconds=1.0, backends=(ESCAPES,), software={"a": ESCAPES},
        tried=((ESCAPES, 1.0), (ESCAPES, f"the process crashed{ESCAPES}")),
    )  # fmt: skip
    key = Key(ESCAPES, ESCAPES, json.dumps(ESCAPES))
    for value in (provenance, key, Record(None, ESCAPES, provenance), RecordError(ESCAPES)):
        assert is_harmless(str(value) + repr(value)), value
    assert is_harmless("".join(provenance.crashes) + provenance.changes({"a": ""}))


# -- one bad record ----------------------------------------------------------------------------------------------------


def with_value(document: dict[str, Any], place: str, value: Any) -> dict[str, Any]:
    changed = json.loads(json.dumps(document))
    *parents, last = place.split("/")
    part = changed
    for name in parents:
        part = part[int(name) if name.isdecimal() else name]
    part[int(last) if last.isdecimal() else last] = value
    return changed


BAD_VALUES = [
    *((place, SURROGATE) for place in ("kernel", "config/x", "problem/device/1", "problem/arguments/x", "provenance/device")),
    ("provenance/software/jax", SURROGATE),
    ("problem/arguments/x", float("nan")),
    ("problem/arguments/x", {"!array": []}),
    ("problem/arguments/x", {"!array": ["float32", []]}),
    ("problem/arguments", None),
    ("problem/sizes", [3]),
    ("config/x", float("nan")),
    ("provenance/when", "2242-01-01T00:00:00+00:00"),
    ("provenance/tried/0/1", 10**400),
    ("provenance/tried/0/1", -5.0),
    ("provenance/tried", [["two a", float("nan")]]),
    ("kernel", ["two"]),
    ("type", 5),
]  # fmt: skip


@pytest.mark.parametrize(("place", "value"), BAD_VALUES, ids=str)
def test_a_bad_record_is_one_line_and_the_others_are_shown_and_packed(
    run_command: Callable[..., Any], folder: Path, tmp_path: Path, place: str, value: Any
) -> None:
    good = hostile_document("x")
    bad = with_value(hostile_document("x", device="b device"), place, value)
    lines = write_lines(tmp_path / "records.jsonl", good, bad)
    contents = contents_of(lines)
    if contents.faults:
        assert (len(contents.documents), len(contents.faults)) == (1, 1)
    assert contents.faults or not place.startswith("provenance/")
    for words in (
        ["import", lines],
        ["diff", lines, folder],
        ["pack", tmp_path / "package", "--name", "mine", "--path", folder],
        ["show", "scale"],
    ):
        output = run_command("cache", *words)
        assert "--debug" not in output.errors, output.errors
        assert len(output.errors.splitlines()) in (0, 2)
    assert [json.loads(file.read_text()) for file in folder.rglob("a%20device/**/*.json")] == [good]
    assert len(list((tmp_path / "package").rglob("a%20device/*.jsonl"))) == 1
    if value == SURROGATE:
        (fault,) = contents.faults
        assert fault.text == f'{lines}, line 2: a text in it has half of a character, "\\ud800"'
        (folder / "a%20device" / "scale.jsonl").write_text(json.dumps(bad))
        output = run_command("cache", "ls")
        assert (output.code, "1 record in" in output.text) == (1, True)
        assert len(output.errors.splitlines()) == 2


# -- a package that cannot be made -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("written", range(4))
@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "Ctrl-C"])
def test_pack_leaves_nothing_behind(
    scale_op: Any,
    run_command: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: BaseException,
    written: int,
    is_there: bool,
) -> None:
    scale_op.on_disk()
    package, sync, count = tmp_path / "some" / "package", os.fsync, 0
    if is_there:
        package.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))

    def fail(descriptor: int) -> None:
        nonlocal count
        count += 1
        if count > written:
            raise fault
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    assert run_command("cache", "pack", package, "--name", "mine").code in (1, 130)
    assert sorted(tmp_path.rglob("*")) == before
    monkeypatch.undo()
