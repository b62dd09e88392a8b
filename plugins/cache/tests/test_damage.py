"""What is damaged is moved aside, what is of another kind stays; a call goes on, and its explanation tells why."""

from __future__ import annotations

import errno
import json
import os
import warnings
from pathlib import Path
from typing import Any

import attrs
import jax.numpy as jnp
import pytest

from ejkernel_cache import CacheWarning, PersistentCache
from ejkernel_cache._names import stem
from ejkernel_core import Key, Record, RecordError

MIB = 1 << 20


def aside(folder: Path) -> list[Path]:
    return sorted(folder.joinpath(".damaged").glob("*"))


# -- what is damaged -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda data: b"", "no JSON: Expecting value"),
        (lambda data: data[: len(data) // 2], "no JSON"),
        (lambda data: data[:-1], "no JSON"),
        (lambda data: bytes(len(data)), "no JSON"),
        (lambda data: b"[1, 2]", "$ is a list, no object"),
        (lambda data: b"\xff\xfe" + data, "no UTF-8"),
        (lambda data: b'{"schema": 2}', "$ lacks config, kernel"),
        (lambda data: b'"' + b"x" * 10 * MIB + b'"', "larger than 1048576 bytes"),
        (lambda data: data + b" " * MIB, "larger than 1048576 bytes"),
        (lambda data: b"[" * 100_000, "no JSON"),
        (lambda data: b'{"a":' * 100_000, "no JSON"),
    ],
    ids=["empty", "half", "short", "zeros", "a list", "no text", "lacks", "huge", "padded", "deep list", "deep object"],
)
def test_a_damaged_file_is_moved_aside_and_told_once(scale_op, folder, damage, why):
    file = scale_op.on_disk()
    damaged = damage(file.read_bytes())
    file.write_bytes(damaged)
    scale_op.fresh()
    with pytest.warns(CacheWarning) as told:
        reason = scale_op.reason()
    (moved,) = aside(folder)
    assert moved.read_bytes() == damaged
    assert moved.name.startswith(f"scale.two.{stem(scale_op.keys()[0])}.")
    assert reason.startswith(f"{file}: {why}")
    assert str(moved) in reason
    (warning,) = told
    for part in (str(file), why, str(moved)):
        assert part in str(warning.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert scale_op.reason() == ""
        assert scale_op.used() == 2
    assert not file.exists()
    scale_op.on_disk()
    scale_op.fresh()
    assert scale_op.used() == 7


def test_two_damaged_files_of_one_key_lie_side_by_side(scale_op, folder):
    for _ in range(2):
        scale_op.on_disk().write_bytes(b"")
        with pytest.warns(CacheWarning):
            assert PersistentCache().get(scale_op.keys()[0], "nothing") == "nothing"
    assert len(aside(folder)) == 2


def test_a_good_file_that_takes_the_place_of_a_damaged_one_is_not_moved(scale_op, folder, monkeypatch):
    file = scale_op.on_disk()
    good, really_rename = file.read_bytes(), os.rename
    file.write_bytes(b"")

    def rename(source, target):
        """A writer is quicker."""
        file.with_suffix(".new").write_bytes(good)
        os.replace(file.with_suffix(".new"), file)
        really_rename(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RecordError, match="no JSON"):
            PersistentCache().read(scale_op.keys()[0], "two", scale_op.Config)
    assert PersistentCache().read(scale_op.keys()[0], "two", scale_op.Config) == scale_op.record(7)
    assert aside(folder) == []


def test_what_another_process_has_moved_is_told_by_that_one(scale_op, monkeypatch):
    file = scale_op.on_disk()
    file.write_bytes(b"")

    def rename(source, target):
        os.unlink(source)
        raise FileNotFoundError(errno.ENOENT, "gone", source)

    monkeypatch.setattr(os, "rename", rename)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert scale_op.reason() == f"{file}: no JSON: Expecting value: line 1 column 1 (char 0)"


def test_what_cannot_be_moved_aside_is_a_miss_all_the_same(scale_op, monkeypatch):
    file = scale_op.on_disk()
    file.write_bytes(b"")

    def rename(source, target):
        raise PermissionError(errno.EACCES, "Permission denied", source)

    monkeypatch.setattr(os, "rename", rename)
    assert "no JSON" in scale_op.reason()
    assert "and cannot be moved aside: [Errno 13] Permission denied" in scale_op.reason()
    assert scale_op.used() == 2
    assert file.exists()


# -- what is of another kind -----------------------------------------------------------------------------------------


def edited(file: Path, **changes: object) -> None:
    document = json.loads(file.read_text())
    for path, value in changes.items():
        *way, last = path.split("__")
        part = document
        for name in way:
            part = part[name]
        part[last] = value
    file.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"schema": 99}, "$.schema is 99; this version reads 2"),
        ({"provenance__software": {"jax": "0.1"}}, "there is a record of other versions (jax was 0.1, is "),
        ({"problem": {}}, "$.problem is another one than that of the key"),
        ({"config": None}, "$.config is null, and Config is wanted"),
        ({"config__factor": "7"}, '$.config.factor is "7"'),
        ({"config__factor": [[[[]]]]}, "@ $.config.factor"),
        ({"provenance__milliseconds": None}, "@ $.provenance.milliseconds"),
        ({"provenance__more": 1}, "more"),
        ({"kernel": "scale.three"}, "is for backend 'three'"),
        ({"kernel": "another.two"}, '$.kernel is "another.two", no kernel of scale'),
        ({"kernel": None}, "is for backend None"),
    ],
    ids=str,
)
def test_another_kind_of_record_is_a_miss_with_a_reason_and_stays(scale_op, folder, changes, why):
    file = scale_op.on_disk()
    edited(file, **changes)
    scale_op.fresh()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reason = scale_op.reason()
        assert scale_op.used() == 2
    assert why in reason
    assert reason.startswith(("there is", f"{file}: "))
    assert file.exists()
    assert aside(folder) == []


def test_what_is_nested_too_deep_to_be_compared_is_a_miss(scale_op, folder):
    @attrs.frozen
    class Loose:
        factor: Any = 2

    scale_op.use(Loose())
    PersistentCache().put(scale_op.keys()[0], Record(Loose(7), "two"))
    file = PersistentCache().file(scale_op.keys()[0], "two")
    file.write_text(file.read_text().replace('"factor": 7', f'"factor": {"[" * 700}{"]" * 700}'))
    scale_op.fresh()
    scale_op.use(Loose())
    assert scale_op.reason() == f"{file}: $.config is nested too deep"
    assert (scale_op.used(), aside(folder)) == (2, [])


def renamed() -> type:
    return attrs.make_class("Config", {"size": attrs.field(type=int, default=2)}, frozen=True)


def with_another_field() -> type:
    fields = {"factor": attrs.field(type=int, default=2), "extra": attrs.field(type=int, default=0)}
    return attrs.make_class("Config", fields, frozen=True)


def with_a_field_less() -> type:
    return attrs.make_class("Config", {}, frozen=True, class_body={"factor": 2})


def with_another_type() -> type:
    return attrs.make_class("Config", {"factor": attrs.field(type=str, default="2")}, frozen=True)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (renamed, "factor"),
        (with_another_field, "$.config.extra is missing"),
        (with_a_field_less, "factor"),
        (with_another_type, "$.config.factor is 7"),
    ],
)
def test_a_new_version_of_a_configuration_does_not_take_the_old_ones(scale_op, make, why):
    file = scale_op.on_disk()
    kind = make()
    kind.__module__, kind.__qualname__ = scale_op.Config.__module__, scale_op.Config.__qualname__
    scale_op.fresh()
    assert scale_op.used() == 7
    scale_op.use(kind())
    plan = scale_op.registry.plan("scale", jnp.ones(5))
    (told,) = (v for v in plan.verdicts if v.name == "cache")
    assert (plan.origin, plan.cfg, told.status) == ("heuristic", kind(), "no answer")
    assert told.reason.startswith(f"{file}: ")
    assert why in told.reason
    assert file.exists()


def test_a_good_record_is_used_although_another_cannot_be(scale_op):
    file = scale_op.on_disk()
    cache = PersistentCache()
    cache.put(scale_op.keys()[1], Record(scale_op.Config(4), "two"))
    edited(file, schema=99)
    scale_op.fresh()
    assert scale_op.used() == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.put(scale_op.keys()[0], scale_op.Config(5))
        assert cache.get(scale_op.keys()[0]) == scale_op.Config(5)


def test_by_hand_a_miss_is_told_as_a_warning(scale_op):
    file = scale_op.on_disk()
    edited(file, schema=99)
    with pytest.warns(CacheWarning, match=r"\$.schema is 99"):
        assert PersistentCache().get(scale_op.keys()[0], "nothing") == "nothing"
    with pytest.raises(RecordError, match=r"\$.schema is 99"):
        PersistentCache().read(scale_op.keys()[0], "two")
    assert scale_op.keys()[0] in PersistentCache()
    assert PersistentCache().read(scale_op.keys()[1], "two") is None


# -- listing a cache that strangers have written to ------------------------------------------------------------------


ODD_PROBLEMS = [
    {"device": 5},
    {"device": "cpu"},
    {"device": {}},
    {"device": []},
    {"device": None},
    {"device": ["cpu", 5, None]},
    {"device": [["cpu"], ["kind"]]},
    {"device": [{"!tuple": []}, None]},
    {"operation": 5},
    {"operation": []},
    {"operation": [5]},
    {"operation": [["scale"], 1]},
    {"operation": {"scale": 1}},
    {"operation": None},
]


def listed(cache: PersistentCache) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return [list(cache), [key for key, _ in cache.items()]]


@pytest.mark.parametrize("change", ODD_PROBLEMS, ids=str)
def test_a_document_with_an_odd_name_does_not_break_the_list(scale_op, folder, change):
    good = scale_op.on_disk()
    document = json.loads(good.read_text())
    document["problem"] |= change
    good.with_name("stranger.json").write_text(json.dumps(document))
    cache = PersistentCache(folder)
    assert listed(cache) == [[scale_op.keys()[0]], [scale_op.keys()[0]]]
    assert len(cache) == 2


@pytest.mark.parametrize("name", [b"%FF", b"%", b"%ZZ", b"\xff", "ü".encode(), b"a\nb", b"%-%-"])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_folder_with_an_odd_name_does_not_break_the_list(scale_op, folder, name, level):
    good = scale_op.on_disk()
    parts = list(good.relative_to(folder).parts)
    parts[level] = os.fsdecode(name)
    stranger = folder.joinpath(*parts)
    stranger.parent.mkdir(parents=True)
    stranger.write_bytes(good.read_bytes())
    cache = PersistentCache(folder)
    assert listed(cache) == [[scale_op.keys()[0]], [scale_op.keys()[0]]]


@attrs.frozen
class Nobodys:
    size: int = 1


def test_a_record_of_nobodys_operation_and_type_does_not_break_the_list(scale_op, folder):
    good = scale_op.on_disk()
    key = Key("nobodys\udcff", "no device\n", '{"n":1}')
    PersistentCache(folder).put(key, Record(Nobodys(), "nobody"))
    file = PersistentCache(folder).file(key, "nobody")
    cache = PersistentCache(folder)
    assert (set(cache), len(cache)) == ({scale_op.keys()[0], key}, 2)
    with pytest.warns(CacheWarning, match="nobodys\udcff.nobody, which is not known here; pass kind="):
        assert [key for key, _ in cache.items()] == [scale_op.keys()[0]]
    assert good.is_file()
    assert file.is_file()
