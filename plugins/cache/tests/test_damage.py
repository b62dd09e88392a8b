"""Damaged files are moved aside, records of other versions stay. Calls run, and explanations have the reason."""

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


def files_moved_aside(folder: Path) -> list[Path]:
    return sorted(folder.joinpath(".damaged").glob("*"))


#: What is said of a lone surrogate, by the library as by the commands.
HALF = 'a text in it has half of a character, "\\ud800"'


# -- damaged files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"", "not JSON: Expecting value"),
        (lambda data: data[: len(data) // 2], "not JSON"),
        (lambda data: data[:-1], "not JSON"),
        (lambda data: bytes(len(data)), "not JSON"),
        (lambda data: b"[1, 2]", "$ is a list, not an object"),
        (lambda data: b"\xff\xfe" + data, "no UTF-8"),
        (lambda data: b'{"schema": 2}', "$ lacks config, kernel"),
        (lambda data: b'"' + b"x" * 10 * MIB + b'"', "larger than 1048576 bytes"),
        (lambda data: data + b" " * MIB, "larger than 1048576 bytes"),
        (lambda data: b"[" * 100_000, "not JSON"),
        (lambda data: b'{"a":' * 100_000, "not JSON"),
        (lambda data: data.replace(b'"device": "cpu"', b'"device": "cpu\\ud800"'), HALF),
        (lambda data: data.replace(b'"tried": []', b'"tried": [["two a", "\\ud800"]]'), HALF),
        (lambda data: data.replace(b'"software": {}', b'"software": {"\\ud800": "1"}'), HALF),
        (lambda data: data.replace(b'"scale.two"', b'"scale.two\\ud800"'), HALF),
    ],
    ids=[
        *("empty", "half", "short", "zeros", "a list", "no text", "lacks", "huge", "padded"),
        *("deep list", "deep object"),
        *(f"half of a character in {place}" for place in ("device", "tried", "software", "kernel")),
    ],
)
def test_a_damaged_file_is_moved_aside_with_one_warning(scale_op, folder, damage, message):
    file = scale_op.on_disk()
    whole = file.read_bytes()
    content = damage(whole)
    file.write_bytes(content)
    scale_op.reset()
    with pytest.warns(CacheWarning) as warning_records:
        reason = scale_op.reason()
    (moved_file,) = files_moved_aside(folder)
    assert moved_file.read_bytes() == content != whole
    assert moved_file.name.startswith(f"scale.two.{stem(scale_op.keys()[0])}.")
    assert reason.startswith(f"{file}: {message}")
    assert str(moved_file) in reason
    (warning,) = warning_records
    for part in (str(file), message, str(moved_file)):
        assert part in str(warning.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert scale_op.reason() == ""
        assert scale_op.used_factor() == 2
    assert not file.exists()
    scale_op.on_disk()
    scale_op.reset()
    assert scale_op.used_factor() == 7


def test_two_damaged_files_of_one_key_are_both_kept(scale_op, folder):
    for _ in range(2):
        scale_op.on_disk().write_bytes(b"")
        with pytest.warns(CacheWarning):
            assert PersistentCache().get(scale_op.keys()[0], "nothing") == "nothing"
    assert len(files_moved_aside(folder)) == 2


def test_a_valid_file_that_replaces_a_damaged_one_is_not_moved(scale_op, folder, monkeypatch):
    file = scale_op.on_disk()
    content, original_rename = file.read_bytes(), os.rename
    file.write_bytes(b"")

    def rename(source, target):
        """Rename after another process has written the file again."""
        file.with_suffix(".new").write_bytes(content)
        os.replace(file.with_suffix(".new"), file)
        original_rename(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RecordError, match="not JSON"):
            PersistentCache().read(scale_op.keys()[0], "two", scale_op.Config)
    assert PersistentCache().read(scale_op.keys()[0], "two", scale_op.Config) == scale_op.record(7)
    assert files_moved_aside(folder) == []


def test_a_file_that_another_process_moves_causes_no_warning(scale_op, monkeypatch):
    file = scale_op.on_disk()
    file.write_bytes(b"")

    def rename(source, target):
        os.unlink(source)
        raise FileNotFoundError(errno.ENOENT, "gone", source)

    monkeypatch.setattr(os, "rename", rename)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert scale_op.reason() == f"{file}: not JSON: Expecting value: line 1 column 1 (char 0)"


def test_a_damaged_file_that_cannot_be_moved_is_a_miss(scale_op, monkeypatch):
    file = scale_op.on_disk()
    file.write_bytes(b"")

    def rename(source, target):
        raise PermissionError(errno.EACCES, "Permission denied", source)

    monkeypatch.setattr(os, "rename", rename)
    assert "not JSON" in scale_op.reason()
    assert "and cannot be moved aside: [Errno 13] Permission denied" in scale_op.reason()
    assert scale_op.used_factor() == 2
    assert file.exists()


# -- records of other versions ---------------------------------------------------------------------------------------


def edit(file: Path, **changes: object) -> None:
    document = json.loads(file.read_text())
    for path, value in changes.items():
        *parents, last = path.split("__")
        part = document
        for name in parents:
            part = part[name]
        part[last] = value
    file.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 99}, "$.schema is 99; this version reads 2"),
        ({"provenance__software": {"jax": "0.1"}}, "there is a record of other versions (jax was 0.1, is "),
        ({"problem": {}}, "$.problem is another one than that of the key"),
        ({"config": None}, "$.config is null, and Config is wanted"),
        ({"config__factor": "7"}, '$.config.factor is "7"'),
        ({"config__factor": [[[[]]]]}, "@ $.config.factor"),
        ({"provenance__milliseconds": None}, "@ $.provenance.milliseconds"),
        ({"provenance__tried": [["two a", 1.0], ["two b", -5.0]]}, "tried[1]: takes a finite number of at least 0"),
        ({"provenance__tried": [["two a", -5.0]]}, "tried[0]: takes a finite number of at least 0; got -5.0"),
        ({"provenance__more": 1}, "more"),
        ({"kernel": "scale.three"}, "is for backend 'three'"),
        ({"kernel": "another.two"}, '$.kernel is "another.two", not a kernel of scale'),
        ({"kernel": None}, "is for backend None"),
    ],
    ids=str,
)
def test_a_record_that_does_not_apply_is_a_miss_with_a_reason_and_stays(scale_op, folder, changes, message):
    file = scale_op.on_disk()
    edit(file, **changes)
    scale_op.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reason = scale_op.reason()
        assert scale_op.used_factor() == 2
    assert message in reason
    assert reason.startswith(("there is", f"{file}: "))
    assert file.exists()
    assert files_moved_aside(folder) == []


def test_a_configuration_that_is_nested_too_deep_is_a_miss(scale_op, folder):
    @attrs.frozen
    class AnyConfig:
        factor: Any = 2

    scale_op.use(AnyConfig())
    PersistentCache().put(scale_op.keys()[0], Record(AnyConfig(7), "two"))
    file = PersistentCache().file(scale_op.keys()[0], "two")
    file.write_text(file.read_text().replace('"factor": 7', f'"factor": {"[" * 700}{"]" * 700}'))
    scale_op.reset()
    scale_op.use(AnyConfig())
    assert scale_op.reason() == f"{file}: $.config is nested too deep"
    assert (scale_op.used_factor(), files_moved_aside(folder)) == (2, [])


def config_with_renamed_field() -> type:
    return attrs.make_class("Config", {"size": attrs.field(type=int, default=2)}, frozen=True)


def config_with_another_field() -> type:
    fields = {"factor": attrs.field(type=int, default=2), "extra": attrs.field(type=int, default=0)}
    return attrs.make_class("Config", fields, frozen=True)


def config_without_field() -> type:
    return attrs.make_class("Config", {}, frozen=True, class_body={"factor": 2})


def config_of_another_type() -> type:
    return attrs.make_class("Config", {"factor": attrs.field(type=str, default="2")}, frozen=True)


@pytest.mark.parametrize(
    ("make_config_type", "message"),
    [
        (config_with_renamed_field, "factor"),
        (config_with_another_field, "$.config.extra is missing"),
        (config_without_field, "factor"),
        (config_of_another_type, "$.config.factor is 7"),
    ],
)
def test_a_record_of_an_older_config_class_is_not_used(scale_op, make_config_type, message):
    file = scale_op.on_disk()
    config_type = make_config_type()
    config_type.__module__, config_type.__qualname__ = scale_op.Config.__module__, scale_op.Config.__qualname__
    scale_op.reset()
    assert scale_op.used_factor() == 7
    scale_op.use(config_type())
    plan = scale_op.registry.plan("scale", jnp.ones(5))
    (verdict,) = (v for v in plan.verdicts if v.name == "cache")
    assert (plan.origin, plan.cfg, verdict.status) == ("heuristic", config_type(), "no answer")
    assert verdict.reason.startswith(f"{file}: ")
    assert message in verdict.reason
    assert file.exists()


def test_a_valid_record_is_used_beside_an_invalid_one(scale_op):
    file = scale_op.on_disk()
    cache = PersistentCache()
    cache.put(scale_op.keys()[1], Record(scale_op.Config(4), "two"))
    edit(file, schema=99)
    scale_op.reset()
    assert scale_op.used_factor() == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.put(scale_op.keys()[0], scale_op.Config(5))
        assert cache.get(scale_op.keys()[0]) == scale_op.Config(5)


def test_get_warns_of_a_record_that_cannot_be_read(scale_op):
    file = scale_op.on_disk()
    edit(file, schema=99)
    with pytest.warns(CacheWarning, match=r"\$.schema is 99"):
        assert PersistentCache().get(scale_op.keys()[0], "nothing") == "nothing"
    with pytest.raises(RecordError, match=r"\$.schema is 99"):
        PersistentCache().read(scale_op.keys()[0], "two")
    assert scale_op.keys()[0] in PersistentCache()
    assert PersistentCache().read(scale_op.keys()[1], "two") is None


# -- listing a cache with foreign files ------------------------------------------------------------------------------


INVALID_PROBLEMS = [
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


def keys_twice(cache: PersistentCache) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return [list(cache), [key for key, _ in cache.items()]]


@pytest.mark.parametrize("change", INVALID_PROBLEMS, ids=str)
def test_a_document_with_an_invalid_problem_does_not_break_the_list(scale_op, folder, change):
    valid_file = scale_op.on_disk()
    document = json.loads(valid_file.read_text())
    document["problem"] |= change
    valid_file.with_name("stranger.json").write_text(json.dumps(document))
    cache = PersistentCache(folder)
    assert keys_twice(cache) == [[scale_op.keys()[0]], [scale_op.keys()[0]]]
    assert len(cache) == 2


@pytest.mark.parametrize("name", [b"%FF", b"%", b"%ZZ", b"\xff", "ü".encode(), b"a\nb", b"%-%-"])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_folder_with_an_unusual_name_does_not_break_the_list(scale_op, folder, name, level):
    valid_file = scale_op.on_disk()
    parts = list(valid_file.relative_to(folder).parts)
    parts[level] = os.fsdecode(name)
    foreign_file = folder.joinpath(*parts)
    foreign_file.parent.mkdir(parents=True)
    foreign_file.write_bytes(valid_file.read_bytes())
    cache = PersistentCache(folder)
    assert keys_twice(cache) == [[scale_op.keys()[0]], [scale_op.keys()[0]]]


@attrs.frozen
class UnknownConfig:
    size: int = 1


def test_a_record_of_an_unknown_operation_and_type_does_not_break_the_list(scale_op, folder):
    valid_file = scale_op.on_disk()
    key = Key("nobodys\x9b", "no device\n", '{"n":1}')
    PersistentCache(folder).put(key, Record(UnknownConfig(), "nobody"))
    file = PersistentCache(folder).file(key, "nobody")
    cache = PersistentCache(folder)
    assert (set(cache), len(cache)) == ({scale_op.keys()[0], key}, 2)
    with pytest.warns(CacheWarning, match=r"nobodys\\u009b.nobody, which is not known here; pass kind="):
        assert [key for key, _ in cache.items()] == [scale_op.keys()[0]]
    assert valid_file.is_file()
    assert file.is_file()
