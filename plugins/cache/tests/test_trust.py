"""A folder that others can write to: one warning for each process, or an error."""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from ejkernel_cache import CacheWarning, PersistentCache, _trust
from ejkernel_cli import _findings
from ejkernel_core import UntrustedFolder
from ejkernel_tuning import Entry, Trial


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder has been told of."""
    monkeypatch.setattr(_trust, "_told", set())


def parts_of(file: Path, folder: Path) -> list[Path]:
    """The record and all folders above it, up to that of the cache."""
    return [file, *(parent for parent in file.parents if parent.is_relative_to(folder))]


@pytest.mark.parametrize("permissions", [stat.S_IWGRP, stat.S_IWOTH])
@pytest.mark.parametrize("depth", range(5))
def test_what_others_can_write_to_is_told_once_or_an_error(
    scale_op: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, permissions: int, depth: int
) -> None:
    path = parts_of(scale_op.on_disk(), folder)[depth]
    path.chmod(path.stat().st_mode | permissions)
    scale_op.reset()
    with pytest.warns(CacheWarning) as told:  # noqa: PT031
        assert [scale_op.used_factor(), scale_op.used_factor()] == [7, 7]
        scale_op.reset()
        assert scale_op.used_factor() == 7
    advice = f"run chmod -R go-w {folder}, or set EJKERNEL_CACHE_DIR to a folder of your own"
    assert [str(warning.message) for warning in told] == [
        f"ejkernel-cache: {path} can be written to by other users, who choose configurations then; if they should not, "
        f"{advice}"
    ]
    monkeypatch.setenv("EJKERNEL_CACHE_STRICT", "1")
    scale_op.reset()
    with pytest.raises(UntrustedFolder, match="EJKERNEL_CACHE_STRICT forbids it") as error:
        scale_op.used_factor()
    assert advice in str(error.value)
    explanation = scale_op.registry.explain("scale", jnp.ones(5))
    assert explanation.plan is None
    assert str(error.value) == f"{explanation.error}\ncalled at {error.value.line}"
    os.system(f"chmod -R go-w {folder}")
    scale_op.reset()
    assert scale_op.used_factor() == 7


@pytest.mark.parametrize("value", ["", "0", None])
def test_a_folder_of_ones_own_is_not_told_of(scale_op: Any, monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.setenv("EJKERNEL_CACHE_STRICT", "1" if value is None else value)
    scale_op.on_disk()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scale_op.reset()
        assert scale_op.used_factor() == 7


def use_everything(scale_op: Any) -> None:
    """Write all kinds of files."""
    cache, key = PersistentCache(), scale_op.keys()[-1]
    assert cache.unfinished.take(key)
    cache.unfinished.note(key, (Trial("two", scale_op.Config(3), "running"),))
    cache.unfinished.keep(key, (Entry("two", scale_op.Config(3), 1.5),))
    scale_op.on_disk().write_bytes(b"")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert cache.get(scale_op.keys()[0]) is None
    scale_op.on_disk()


@pytest.mark.filterwarnings("ignore:.*can be written to by other users")
@pytest.mark.parametrize("is_shared", [False, True])
def test_what_is_made_is_for_others_only_where_the_folder_is(scale_op: Any, folder: Path, is_shared: bool) -> None:
    before = os.umask(0o002)
    try:
        if is_shared:
            folder.mkdir()
            folder.chmod(0o775)
        use_everything(scale_op)
    finally:
        os.umask(before)
    paths = [folder, *folder.rglob("*")]
    assert {".tmp", ".damaged", ".tuning"} < {path.name for path in paths}
    assert {bool(path.stat().st_mode & stat.S_IWGRP) for path in paths} == {is_shared}


def test_commands_warn_or_fail(
    scale_op: Any, folder: Path, run_command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    scale_op.on_disk()
    folder.chmod(0o777)
    output = run_command("cache", "ls")
    assert (output.code, "1 record in" in output.text) == (0, True)
    assert output.errors.startswith(f"ejkernel: warning: ejkernel-cache: {folder} can be written to by other users")
    (finding,) = _findings.cache()
    assert (finding.status, finding.advice) == (
        _findings.NOTE,
        f"chmod -R go-w {folder}, or set EJKERNEL_CACHE_DIR to a folder of your own",
    )
    monkeypatch.setenv("EJKERNEL_CACHE_STRICT", "1")
    for words in (["ls"], ["pack", folder.parent / "package", "--name", "mine"], ["clear", "--yes"]):
        output = run_command("cache", *words)
        assert (output.code, output.text, output.errors.count("\n")) == (1, "", 1)
        assert f"run chmod -R go-w {folder}" in output.errors
    (finding,) = _findings.cache()
    assert finding.status == _findings.BROKEN
    assert not (folder.parent / "package").exists()
