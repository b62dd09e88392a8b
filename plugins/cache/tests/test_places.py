"""Links and other things in place of files: a miss with a reason, and nothing outside of the cache is touched."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import warnings
from pathlib import Path
from typing import Any

import attrs
import pytest

from ejkernel_cache import CacheWarning, PackagedRecords, PersistentCache
from ejkernel_cache._directory import Directory
from ejkernel_cache._names import component
from ejkernel_core import Key
from ejkernel_tuning import Entry, Trial


def fifo_for_file(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def folder_for_file(file: Path) -> None:
    file.unlink()
    file.mkdir()


def file_for_folder(depth: int):
    def replace(file: Path) -> None:
        shutil.rmtree(file.parents[depth])
        file.parents[depth].write_text("no folder")

    return replace


def link_for_file(file: Path) -> None:
    outside = file.parents[4] / "outside.json"
    file.rename(outside)
    file.symlink_to(outside)


def link_for_folder(depth: int):
    def replace(file: Path) -> None:
        outside = file.parents[4] / "outside"
        file.parents[depth].rename(outside)
        file.parents[depth].symlink_to(outside, target_is_directory=True)

    return replace


def device_for_file(file: Path) -> None:
    file.unlink()
    os.mknod(file, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero, which is endless


REPLACEMENTS = [
    pytest.param(fifo_for_file, "is not a regular file", id="fifo"),
    pytest.param(folder_for_file, "is not a regular file", id="folder for file"),
    pytest.param(link_for_file, "is a symbolic link", id="link for file"),
    *(pytest.param(file_for_folder(d), "is not a folder", id=f"file for folder {d}") for d in range(3)),
    *(pytest.param(link_for_folder(d), "is a symbolic link", id=f"link for folder {d}") for d in range(3)),
    pytest.param(file_for_folder(3), "Not a directory", id="file for the cache"),
]


@pytest.mark.parametrize(("replace", "message"), REPLACEMENTS)
def test_something_else_in_place_of_a_file_is_a_miss_with_a_reason(scale_op, folder, replace, message):
    replace(scale_op.on_disk())
    scale_op.reset()
    reason = scale_op.reason()
    assert message in reason
    assert reason.startswith(str(folder))
    assert scale_op.used_factor() == 2


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root makes devices")
def test_a_device_does_not_hang_the_call(scale_op):
    file = scale_op.on_disk()
    try:
        device_for_file(file)
    except PermissionError:
        pytest.skip("not even root may, here")
    scale_op.reset()
    assert scale_op.reason() in (f"{file}: is not a regular file", f"{file}: Permission denied")


def test_an_unreadable_file_is_a_miss_with_a_reason(scale_op, monkeypatch):
    file = scale_op.on_disk()
    original_open = os.open

    def refuse(path, *args, **kwargs):
        if os.fspath(path) == str(file):
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return original_open(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    scale_op.reset()
    assert scale_op.reason() == f"{file}: Permission denied"
    assert scale_op.used_factor() == 2


@pytest.mark.parametrize("depth", range(3))
def test_nothing_is_written_through_a_link(scale_op, tmp_path, depth):
    file = scale_op.on_disk()
    shutil.rmtree(file.parents[depth])
    outside = tmp_path / "outside"
    outside.mkdir()
    file.parents[depth].symlink_to(outside, target_is_directory=True)
    with pytest.warns(CacheWarning, match="is a symbolic link"):
        PersistentCache().put(scale_op.keys()[0], scale_op.record(3))
    assert list(outside.iterdir()) == []


def test_a_link_in_place_of_a_file_is_replaced_and_not_followed(scale_op, tmp_path):
    file = scale_op.on_disk()
    link_for_file(file)
    before = (tmp_path / "outside.json").read_bytes()
    PersistentCache().put(scale_op.keys()[0], scale_op.record(3))
    assert (tmp_path / "outside.json").read_bytes() == before
    assert not file.is_symlink()
    scale_op.reset()
    assert scale_op.used_factor() == 3


@pytest.mark.parametrize("name", [".tmp", ".damaged"])
def test_links_in_place_of_the_caches_own_folders_are_not_followed(scale_op, folder, tmp_path, name):
    file = scale_op.on_disk()
    shutil.rmtree(folder / name, ignore_errors=True)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "old").write_text("somebody's")
    os.utime(outside / "old", (0, 0))
    (folder / name).symlink_to(outside, target_is_directory=True)
    file.write_bytes(b"")
    cache = PersistentCache()
    with warnings.catch_warnings(record=True) as warning_records:
        warnings.simplefilter("always")
        assert cache.get(scale_op.keys()[0]) is None
        cache.put(scale_op.keys()[0], scale_op.record(3))
    assert "symbolic link" in " ".join(str(warning.message) for warning in warning_records)
    assert os.listdir(outside) == ["old"]


def test_keys_are_listed_without_following_links(scale_op, folder, tmp_path):
    scale_op.on_disk().parents[2].rename(tmp_path / "outside")
    (folder / component(scale_op.keys()[0].device)).symlink_to(tmp_path / "outside", target_is_directory=True)
    cache = PersistentCache()
    assert (list(cache), len(cache), cache.items()) == ([], 0, [])
    cache.clear()
    assert len(list((tmp_path / "outside").rglob("*.json"))) == 1


def test_the_cache_itself_may_be_a_link(scale_op, folder, tmp_path):
    (tmp_path / "scratch").mkdir()
    folder.symlink_to(tmp_path / "scratch", target_is_directory=True)
    scale_op.on_disk()
    scale_op.reset()
    assert scale_op.used_factor() == 7


# -- what processes share of unfinished measurements -------------------------------------------------------------------


@attrs.frozen
class Config:
    factor: int = 2


KEY = Key("scale", "cpu", '{"a":1}')
SUFFIXES = ("json", "crashed", "trying", "lock")


def outside_state(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def use_unfinished() -> tuple[Any, ...]:
    """All that a process does with the unfinished measurements of a key, and what it has read."""
    cache = PersistentCache()
    text = cache.crashes(KEY)
    unfinished = cache.unfinished
    assert unfinished.take(KEY, 0.0)
    outcome = text, unfinished.describe_crashes(KEY), unfinished.entries(KEY), unfinished.crashed(KEY)
    unfinished.note(KEY, (Trial("two", Config(3), "running"),))
    unfinished.keep(KEY, (Entry("two", Config(3), 1.5),))
    unfinished.end(KEY, (Entry("two", Config(3), 1.5),), is_interrupted=False)
    cache.forget_crashes()
    return outcome


def hard_link_for_file(file: Path) -> None:
    os.link(file.parents[2] / "outside" / "somebodys.crashed", file)


IN_THE_WAY = {
    "fifo": os.mkfifo,
    "folder": os.mkdir,
    "link": lambda file: file.symlink_to(file.parents[2] / "outside" / "somebodys.crashed"),
    "link to a fifo": lambda file: file.symlink_to(file.parents[2] / "outside" / "fifo"),
    "link to a folder": lambda file: file.symlink_to(file.parents[2] / "outside"),
    "link to a device": lambda file: file.symlink_to("/dev/zero"),
    "hard link": hard_link_for_file,
}


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder outside of the cache, with what a link may lead to."""
    outside = tmp_path / "outside"
    outside.mkdir()
    for suffix in SUFFIXES:
        (outside / f"somebodys.{suffix}").write_text("somebody's")
        (outside / f"{KEY.digest}.{suffix}").write_text("[]")
    os.mkfifo(outside / "fifo")
    return outside


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("kind", IN_THE_WAY)
def test_nothing_in_place_of_a_shared_file_is_followed_or_waited_for(folder, outside, watchdog, kind, suffix):
    before = outside_state(outside)
    (folder / ".tuning").mkdir(parents=True)
    IN_THE_WAY[kind](folder / ".tuning" / f"{KEY.digest}.{suffix}")
    for _ in range(2):
        assert use_unfinished() == ("", "", (), ())
    assert outside_state(outside) == before


def test_a_link_in_place_of_the_shared_folder_is_not_followed(folder, outside, watchdog):
    """``forget_crashes`` would remove the files of somebody else."""
    before = outside_state(outside)
    folder.mkdir()
    (folder / ".tuning").symlink_to(outside, target_is_directory=True)
    assert use_unfinished() == ("", "", (), ())
    assert outside_state(outside) == before


def test_forget_crashes_removes_what_it_can(folder, watchdog):
    (folder / ".tuning" / "a.crashed").mkdir(parents=True)
    os.mkfifo(folder / ".tuning" / "b.crashed")
    for name in ("c.crashed", "d.json"):
        (folder / ".tuning" / name).write_text("[]")
    PersistentCache().forget_crashes()
    assert sorted(os.listdir(folder / ".tuning")) == ["a.crashed", "b.crashed", "d.json"]


@pytest.mark.parametrize("kind", [kind for kind in IN_THE_WAY if kind != "hard link"])
def test_the_commands_follow_and_wait_for_nothing(folder, scale_op, outside, watchdog, run_command, tmp_path, kind):
    """In the place of a file with a record in each line, beside a record that is right."""
    file = scale_op.on_disk()
    before = outside_state(outside)
    device = file.parents[2]
    IN_THE_WAY[kind](lines := device / "other.jsonl")
    reason = "is a symbolic link" if "link" in kind else "is not a regular file"
    for words in (
        ["ls"],
        ["pack", tmp_path / "package", "--name", "mine"],
        ["import", folder, "--path", tmp_path / "b"],
    ):
        output = run_command("cache", *words)
        assert (output.code, output.errors.splitlines()[0]) == (1, f"ejkernel: {lines}: {reason}")
        assert len(output.errors.splitlines()) == 2
    assert len(list((tmp_path / "package").rglob("*.jsonl"))) == 1
    assert run_command("cache", "clear", "--yes").code == 0
    assert outside_state(outside) == before


@pytest.mark.parametrize("depth", range(3))
@pytest.mark.parametrize(("replace", "reason"), [(os.mkfifo, "is not a regular file"), (Path.touch, "is not a folder")])
def test_ls_tells_what_is_in_place_of_a_folder(folder, scale_op, watchdog, run_command, depth, replace, reason):
    file = scale_op.on_disk()
    shutil.rmtree(file.parents[depth])
    replace(file.parents[depth])
    output = run_command("cache", "ls")
    assert output.errors.splitlines()[0] == f"ejkernel: {file.parents[depth]}: {reason}"


@pytest.mark.parametrize("kind", ["fifo", "folder", "link to a fifo", "link to a device", "link to a folder"])
def test_a_package_waits_for_nothing(scale_op, outside, watchdog, tmp_path, kind):
    device = tmp_path / "package" / component(scale_op.keys()[0].device)
    device.mkdir(parents=True)
    IN_THE_WAY[kind](device / "scale.jsonl")
    scale_op.registry.register(PackagedRecords(tmp_path / "package"), "packaged")
    assert scale_op.reason("packaged") == f"{device.name}/scale.jsonl: is not a regular file"
    assert scale_op.used_factor() == 2


def test_a_temporary_file_of_the_future_does_not_stay(folder):
    (folder / ".tmp").mkdir(parents=True)
    for name, year in (("of the past", 0), ("of the future", 2242 - 1970)):
        (folder / ".tmp" / name).touch()
        os.utime(folder / ".tmp" / name, (year * 31_556_952, year * 31_556_952))
    Directory(folder).sweep()
    assert os.listdir(folder / ".tmp") == []
