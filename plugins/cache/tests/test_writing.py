"""A folder that cannot be written to, and temporary files of writers."""

from __future__ import annotations

import errno
import os
import shutil
import time
import warnings

import jax.numpy as jnp
import pytest

from ejkernel_cache import CacheWarning, PersistentCache, default_cache
from ejkernel_cache import _directory as directory
from ejkernel_cache import _temporary as temporary


def make_fail(name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this function of ``os`` fail when something is written."""
    original = getattr(os, name)

    def fail(path, *args, **kwargs):
        if name == "open" and not (args and args[0] & os.O_CREAT):
            return original(path, *args, **kwargs)
        raise OSError(number, os.strerror(number), path if isinstance(path, (str, os.PathLike)) else None)

    monkeypatch.setattr(os, name, fail)


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("name", ["open", "replace", "mkdir", "fsync"])
def test_a_folder_that_cannot_be_written_to_causes_one_warning(scale_op, folder, monkeypatch, name, number):
    scale_op.on_disk(20)
    scale_op.reset()
    scale_op.tuner(5)
    if name == "mkdir":
        shutil.rmtree(folder)
    make_fail(name, number, monkeypatch)
    with pytest.warns(CacheWarning) as warning_records:  # noqa: PT031
        assert [scale_op.used_factor(length) for length in (5, 9, 30, 31)] == [5] * 4
        default_cache().put(scale_op.keys()[0], scale_op.Config(3))
    assert len(warning_records) == 1
    assert f"{folder} cannot be written to ([Errno {number}]" in str(warning_records[0].message)
    assert "set EJKERNEL_CACHE_DIR to a folder that can be" in str(warning_records[0].message)
    if name != "mkdir":
        assert os.listdir(folder / ".tmp") == []
        assert default_cache().get(scale_op.keys(20)[0], kind=scale_op.Config) == scale_op.Config(7)
    monkeypatch.undo()


def test_every_explanation_says_that_nothing_was_stored_until_something_is(scale_op, monkeypatch):
    scale_op.tuner(5)
    assert failures_of_cache(scale_op) == []
    with monkeypatch.context() as full_disk:
        make_fail("fsync", errno.ENOSPC, full_disk)
        with pytest.warns(CacheWarning):
            assert [scale_op.used_factor(length) for length in (5, 9)] == [5, 5]
        failure = "config_selected raised OSError: [Errno 28] No space left on device"
        assert [failures_of_cache(scale_op) for _ in range(2)] == [[failure]] * 2
        assert f": broken, {failure}" in str(scale_op.registry.explain("scale", jnp.ones(20)))
    assert [failures_of_cache(scale_op) for _ in range(2)] == [[failure]] * 2
    assert scale_op.used_factor(30) == 5
    assert failures_of_cache(scale_op) == []


def failures_of_cache(scale_op):
    """The reasons why the policy is broken, from the explanation of a call that measures nothing."""
    verdicts = scale_op.registry.explain("scale", jnp.ones(20)).plan.verdicts
    return [verdict.reason for verdict in verdicts if (verdict.name, verdict.status) == ("cache", "broken")]


def test_a_file_in_place_of_the_cache_breaks_no_call(scale_op, folder):
    folder.write_text("no folder")
    scale_op.tuner(5)
    with pytest.warns(CacheWarning, match="cannot be written to") as warning_records:
        assert scale_op.used_factor() == 5
    assert len(warning_records) == 1
    cache = PersistentCache()
    assert (list(cache), len(cache), cache.get(scale_op.keys()[0])) == ([], 0, None)
    assert folder.read_text() == "no folder"


def test_warnings_as_errors_break_no_call(scale_op, folder):
    folder.write_text("no folder")
    scale_op.tuner(5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert scale_op.used_factor() == 5


# -- temporary files -------------------------------------------------------------------------------------------------


def test_a_failed_write_leaves_no_file(scale_op, folder, monkeypatch):
    file = scale_op.on_disk()
    before = file.read_bytes()
    make_fail("replace", errno.EIO, monkeypatch)
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


def test_the_temporary_file_of_a_killed_process_is_removed_by_the_next(scale_op, folder, run_python):
    scale_op.on_disk()
    with pytest.raises(AssertionError):
        run_python(KILLED_IN_A_WRITE)
    assert len(os.listdir(folder / ".tmp")) == 1
    assert len(list(folder.rglob("*.json"))) == 1
    PersistentCache().get(scale_op.keys()[0])
    assert os.listdir(folder / ".tmp") == []
    assert PersistentCache().get(scale_op.keys()[0]) == scale_op.Config(7)


def test_the_temporary_file_of_a_live_writer_is_not_removed(scale_op, folder, monkeypatch):
    scale_op.on_disk()
    own_file = folder / ".tmp" / temporary.new_name()
    own_file.write_text("half a rec")
    os.utime(own_file, (0, 0))
    files_of_other_hosts = [folder / ".tmp" / name for name in ("0123456789ab-1-0123", "what is this")]
    for file in files_of_other_hosts:
        file.write_text("of another host")
    directory.Directory(folder).sweep()
    assert len(os.listdir(folder / ".tmp")) == 3
    an_hour_ago = time.time() - 3700
    for file in files_of_other_hosts:
        os.utime(file, (an_hour_ago, an_hour_ago))
    directory.Directory(folder).sweep()
    assert os.listdir(folder / ".tmp") == [own_file.name]
    monkeypatch.setattr(temporary, "_is_alive", lambda pid: False)
    directory.Directory(folder).sweep()
    assert os.listdir(folder / ".tmp") == []
