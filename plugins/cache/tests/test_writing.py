"""A folder that cannot be written to, and what writers leave behind."""

from __future__ import annotations

import errno
import os
import shutil
import time
import warnings

import pytest

from ejkernel_cache import CacheWarning, PersistentCache, default_cache
from ejkernel_cache import _directory as directory
from ejkernel_cache import _temporary as temporary


def fails(name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this function of ``os`` fail when something is written."""
    real = getattr(os, name)

    def fail(path, *args, **kwargs):
        if name == "open" and not (args and args[0] & os.O_CREAT):
            return real(path, *args, **kwargs)
        raise OSError(number, os.strerror(number), path if isinstance(path, (str, os.PathLike)) else None)

    monkeypatch.setattr(os, name, fail)


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("name", ["open", "replace", "mkdir", "fsync"])
def test_a_folder_that_cannot_be_written_to_is_told_once(scale_op, folder, monkeypatch, name, number):
    scale_op.on_disk(20)
    scale_op.fresh()
    scale_op.tuner(5)
    if name == "mkdir":
        shutil.rmtree(folder)
    fails(name, number, monkeypatch)
    with pytest.warns(CacheWarning) as told:  # noqa: PT031
        assert [scale_op.used(length) for length in (5, 9, 30, 31)] == [5] * 4
        default_cache().put(scale_op.keys()[0], scale_op.Config(3))
    assert len(told) == 1
    assert f"{folder} cannot be written to ([Errno {number}]" in str(told[0].message)
    assert "set EJKERNEL_CACHE_DIR to a folder that can be" in str(told[0].message)
    if name != "mkdir":
        assert os.listdir(folder / ".tmp") == []
        assert default_cache().get(scale_op.keys(20)[0], kind=scale_op.Config) == scale_op.Config(7)
    monkeypatch.undo()


def test_a_file_in_the_place_of_the_cache_breaks_nothing(scale_op, folder):
    folder.write_text("no folder")
    scale_op.tuner(5)
    with pytest.warns(CacheWarning, match="cannot be written to") as told:
        assert scale_op.used() == 5
    assert len(told) == 1
    cache = PersistentCache()
    assert (list(cache), len(cache), cache.get(scale_op.keys()[0])) == ([], 0, None)
    assert folder.read_text() == "no folder"


def test_warnings_as_errors_break_no_call(scale_op, folder):
    folder.write_text("no folder")
    scale_op.tuner(5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert scale_op.used() == 5


# -- temporary files -------------------------------------------------------------------------------------------------


def test_a_write_that_fails_leaves_nothing(scale_op, folder, monkeypatch):
    file = scale_op.on_disk()
    before = file.read_bytes()
    fails("replace", errno.EIO, monkeypatch)
    with pytest.warns(CacheWarning):
        PersistentCache().put(scale_op.keys()[0], scale_op.record(3))
    assert os.listdir(folder / ".tmp") == []
    assert file.read_bytes() == before


KILLED_IN_A_WRITE = """
    import os, signal
    from ejkernel_cache import PersistentCache
    from ejkernel_core import Key, Provenance
    os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
    PersistentCache().put(Key("op", "cpu", "{}"), Provenance(when="", device="", milliseconds=1.0, backends=()))
"""


def test_a_process_killed_in_a_write_leaves_a_file_that_the_next_one_sweeps(scale_op, folder, python):
    scale_op.on_disk()
    with pytest.raises(AssertionError):
        python(KILLED_IN_A_WRITE)
    assert len(os.listdir(folder / ".tmp")) == 1
    assert len(list(folder.rglob("*.json"))) == 1
    PersistentCache().get(scale_op.keys()[0])
    assert os.listdir(folder / ".tmp") == []
    assert PersistentCache().get(scale_op.keys()[0]) == scale_op.Config(7)


def test_the_file_of_a_live_writer_is_never_swept(scale_op, folder, monkeypatch):
    scale_op.on_disk()
    mine = folder / ".tmp" / temporary.new_name()
    mine.write_text("half a rec")
    os.utime(mine, (0, 0))
    elsewhere = [folder / ".tmp" / name for name in ("0123456789ab-1-0123", "what is this")]
    for file in elsewhere:
        file.write_text("of another host")
    directory.Directory(folder).sweep()
    assert len(os.listdir(folder / ".tmp")) == 3
    hours = time.time() - 3700
    for file in elsewhere:
        os.utime(file, (hours, hours))
    directory.Directory(folder).sweep()
    assert os.listdir(folder / ".tmp") == [mine.name]
    monkeypatch.setattr(temporary, "_is_alive", lambda pid: False)
    directory.Directory(folder).sweep()
    assert os.listdir(folder / ".tmp") == []
