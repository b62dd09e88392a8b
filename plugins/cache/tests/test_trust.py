"""A folder that others can write to: one warning for each process, or an error."""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
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


def commands_that_read(folder: Path) -> list[list[object]]:
    """All commands that read the records in a folder, but for "import", which is tested with a file."""
    new = folder.parent
    return [
        ["ls"],
        ["show", "scale"],
        ["export", new / "exported.jsonl"],
        ["pack", new / "package", "--name", "mine"],
        ["diff", folder, folder],
        ["clear", "--yes"],
    ]


@pytest.mark.parametrize("depth", range(6))
def test_commands_warn_or_fail(
    scale_op: Any, folder: Path, run_command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    file = scale_op.on_disk()
    path = [*parts_of(file, folder), folder / ".tmp"][depth]
    path.chmod(0o777)
    warning = f"{path} can be written to by other users, who choose configurations then"
    output = run_command("cache", "ls")
    assert (output.code, "1 record in" in output.text) == (0, True)
    assert output.errors.startswith(f"ejkernel: warning: ejkernel-cache: {warning}")
    (finding,) = _findings.cache()
    assert attrs.astuple(finding) == (
        "cache", _findings.NOTE, warning, f"chmod -R go-w {folder}, or set EJKERNEL_CACHE_DIR to a folder of your own"
    )  # fmt: skip
    monkeypatch.setenv("EJKERNEL_CACHE_STRICT", "1")
    records = folder.parent / "records.jsonl"
    records.write_bytes(b"".join(file.read_bytes().splitlines()))
    for words in [*commands_that_read(folder), ["import", records]]:
        output = run_command("cache", *words)
        assert (output.code, output.text, output.errors.count("\n")) == (1, "", 1), words
        assert warning in output.errors
        assert f"run chmod -R go-w {folder}" in output.errors
    (finding,) = _findings.cache()
    assert (finding.status, finding.text) == (_findings.BROKEN, warning)
    assert {path.name for path in folder.parent.iterdir()} == {"cache", "records.jsonl"}
    assert file.is_file()


def test_commands_accept_links_and_what_they_are_told_to_read(
    scale_op: Any, folder: Path, run_command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EJKERNEL_CACHE_STRICT", "1")
    (scale_op.on_disk().parent / "link").symlink_to(folder)  # whose permissions are 777
    assert run_command("cache", "export", folder.parent / "records.jsonl").code == 0
    assert run_command("cache", "pack", folder.parent / "package", "--name", "mine").code == 0
    for source in (folder.parent / "records.jsonl", folder.parent / "package"):
        source.chmod(0o777)
        output = run_command("cache", "import", source)
        assert (output.code, output.text, output.errors) == (0, "1 the same\n", "")
