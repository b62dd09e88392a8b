"""Links and other things in place of files: a miss with a reason, and nothing outside of the cache is touched."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import warnings
from pathlib import Path

import pytest

from ejkernel_cache import CacheWarning, PersistentCache
from ejkernel_cache._names import component


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
    pytest.param(fifo_for_file, "is no regular file", id="fifo"),
    pytest.param(folder_for_file, "is no regular file", id="folder for file"),
    pytest.param(link_for_file, "is a symbolic link", id="link for file"),
    *(pytest.param(file_for_folder(d), "is no folder", id=f"file for folder {d}") for d in range(3)),
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
    assert scale_op.reason() in (f"{file}: is no regular file", f"{file}: Permission denied")


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
