"""Several processes share a measurement: one measures, the others wait, and after a kill another continues."""

from __future__ import annotations

import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import attrs
import jax.numpy as jnp
import pytest

import ejkernel_core
from ejkernel_cache import PersistentCache, default_cache, policy
from ejkernel_cache._unfinished import _try_lock
from ejkernel_core import Key, policy_override, to_json
from ejkernel_core.extend import EMPTY
from ejkernel_tuning import Earlier, Entry, Progress, autotune

#: ``triple`` with some configurations. Each trace of one is logged in a file.
MODULE = """
    import os, sys, time
    from pathlib import Path
    from types import SimpleNamespace

    import attrs
    import jax, jax.numpy as jnp
    from ejkernel_cache import policy
    from ejkernel_core import Operation, Registry, hookimpl, policy_override
    from ejkernel_core.extend import current_scope

    LOG = Path(os.environ["TRACED"])

    @attrs.frozen
    class Config:
        kind: str = "usual"

    def add_passes(x, steps):
        return x + 0 * jax.lax.fori_loop(0, steps, lambda _, v: jnp.sin(v) * 0.5, jnp.full((50_000,), x[0])).sum()

    @hookimpl
    def heuristic_cfg(inv):
        return Config()

    @hookimpl
    def config_space(inv):
        return [Config("fast"), Config("wrong"), Config("waits")]

    @hookimpl
    def run_backend(inv, cfg):
        with LOG.open("a") as log:
            log.write(f"{os.getpid()} {cfg.kind}\\n")
        x = inv["x"]
        if cfg.kind == "usual":
            x = add_passes(x, 300)
        if cfg.kind == "waits":
            time.sleep(float(os.environ["WAITS"]))
        return x * (4 if cfg.kind == "wrong" else 3)

    @hookimpl
    def no_cfg(inv):
        return None

    @hookimpl
    def run_reference(inv, cfg):
        return add_passes(inv["x"], 900) * 3

    def registry():
        registry_of_triple = Registry(plugins="ejkernel-tuning")
        registry_of_triple.register(policy, "cache")
        registry_of_triple.register(Operation(name="triple", signature=lambda x: None, outputs=lambda a: (a["x"],)))
        registry_of_triple.register(
            SimpleNamespace(
                Config=Config, heuristic_cfg=heuristic_cfg, config_space=config_space, run_backend=run_backend
            ),
            "triple.kinds",
        )
        registry_of_triple.register(
            SimpleNamespace(PLATFORMS={"cpu": 0}, heuristic_cfg=no_cfg, run_backend=run_reference), "triple.reference"
        )
        return registry_of_triple

    def main():
        with policy_override(autotune=True, budget_s=float(os.environ.get("BUDGET", "40"))):
            registry_of_triple = registry()
            inv = registry_of_triple.invocation("triple", jnp.ones(8))
            choice = registry_of_triple.choose(inv, None, None, current_scope()).choice
        print(os.getpid(), choice.origin.split()[0], choice.cfg.kind)
"""


def start(folder: Path, waits: float) -> subprocess.Popen[str]:
    (folder / "several.py").write_text(textwrap.dedent(MODULE))
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", "import several; several.main()"],
        env={**os.environ, "PYTHONPATH": path, "TRACED": str(folder / "traced"), "WAITS": str(waits)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output_words(process: subprocess.Popen[str]) -> list[str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.split()


def trace_log(folder: Path) -> list[tuple[str, str]]:
    file = folder / "traced"
    lines = file.read_text().splitlines() if file.exists() else []
    return [(pid, kind) for pid, kind in map(str.split, lines)]


@pytest.mark.long
def test_one_of_two_processes_measures_and_the_other_reads_the_record(tmp_path: Path, folder: Path) -> None:
    first, second = start(tmp_path, 2.0), start(tmp_path, 2.0)
    outputs = [output_words(first), output_words(second)]
    assert sorted(output[1] for output in outputs) == ["autotuned", "disk"]
    assert [output[2] for output in outputs] == [outputs[0][2]] * 2
    (measuring,) = (pid for pid, origin, _ in outputs if origin == "autotuned")
    assert {pid for pid, _ in trace_log(tmp_path)} == {measuring}
    assert sorted(kind for _, kind in trace_log(tmp_path)) == ["fast", "usual", "waits", "wrong"]
    assert list((folder / ".tuning").iterdir()) == []


@pytest.mark.long
def test_entries_before_a_kill_are_not_measured_again(tmp_path: Path, folder: Path) -> None:
    process = start(tmp_path, 600.0)
    folder_of_entries = folder / ".tuning"
    for _ in range(600):
        documents = (
            [json.loads(file.read_text()) for file in folder_of_entries.glob("*.json")]
            if folder_of_entries.exists()
            else []
        )
        # After the budget for compiling, the others are measured while one hangs.
        if documents and len(documents[0]) >= 5:  # heuristic, reference, and the space
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert PersistentCache().items() == []
    traces_before = trace_log(tmp_path)
    (note,) = folder_of_entries.glob("*.trying")
    notes = [json.loads(trial["config"])["fields"] for trial in json.loads(note.read_text())]
    trial_kinds = [fields["kind"] for fields in notes if fields]
    pid, origin, selected_kind = output_words(start(tmp_path, 0.0))
    assert origin == "autotuned"
    kinds_measured_again = [
        traced_kind for process_id, traced_kind in trace_log(tmp_path)[len(traces_before) :] if process_id == pid
    ]
    # Only unfinished ones are measured again: the one that hung in the compiler, and the one that was running.
    assert sorted(kinds_measured_again) == sorted(trial_kinds)
    assert "waits" in trial_kinds
    assert len(trial_kinds) <= 2
    assert selected_kind in ("fast", "waits")
    assert list(folder_of_entries.iterdir()) == []
    assert len(list(folder.rglob("kinds/*.json"))) == 1


@attrs.frozen
class Config:
    factor: int = 2


def key() -> Key:
    return Key("scale", "cpu", '{"a":1}')


def test_entries_are_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ejkernel_core, "config_type", {"scale.two": Config}.get)
    unfinished = PersistentCache().unfinished
    entries = (
        Entry("two", Config(3), 1.5, is_checked=True),
        Entry("two", Config(4), None, reason="wrong: NaN"),
        Entry("two", Config(5)),  # not measured yet
        Entry("two", object(), 1.0),  # cannot be written down
    )
    assert unfinished.take(key())
    unfinished.keep(key(), entries)
    assert PersistentCache().unfinished.entries(key()) == entries[:2]
    unfinished.end(key(), entries, is_interrupted=True)
    assert unfinished.entries(key()) == entries[:2]
    assert unfinished.take(key())
    unfinished.end(key(), entries, is_interrupted=False)
    assert unfinished.entries(key()) == ()


def test_a_damaged_file_has_no_entries(folder: Path) -> None:
    unfinished = PersistentCache().unfinished
    for text in ("", "[", "{}", "3", '[{"backend": 1}]', '[{"config": "{}"}]', "[[]]", "[" * 10_000):
        unfinished.files.write_at((".tuning",), f"{key().digest}.json", text.encode())
        assert unfinished.entries(key()) == ()


def entry_document(**changes: Any) -> dict[str, Any]:
    config = to_json(Config(3))
    return {"backend": "two", "config": config, "milliseconds": 1.5, "reason": "", "is_checked": True, **changes}


def crashed_document(**changes: Any) -> dict[str, Any]:
    config = to_json(Config(3))
    fields = {"step": "running", "crashes": 2, "is_out": True, "reason": "the process crashed", **changes}
    return {"backend": "two", "config": config, **fields}


INVALID_ENTRIES: list[dict[str, Any]] = [
    *({"milliseconds": time} for time in (math.nan, -1.5, math.inf, -math.inf, True, "1.5", [1.5], {}, 10**400, 1e300)),
    *({"reason": reason} for reason in (None, 3, ["wrong"], {})),
    *({"is_checked": flag} for flag in (None, 1, "yes", [])),
    *({"backend": backend} for backend in (None, 3, ["two"], "three", "../two", "two\n", "more.two", "")),
    *(
        {"config": config}
        for config in (None, 3, "", "{", "{}", '{"schema": 2, "fields": {"factor": "3"}}', "[" * 9999)
    ),
    {"when": "2242-01-01"},
]
INVALID_CRASHES: list[dict[str, Any]] = [
    *({"step": step} for step in (None, 3, ["running"], {}, "sleeping", "\x1b[2J")),
    *({"crashes": crashes} for crashes in (None, True, "2", 2.0, -2, 0, math.nan, [2])),
    *({"is_out": flag} for flag in (None, 1, "yes")),
    *({"reason": reason} for reason in (None, 3, [])),
    {"more": 1},
]
INVALID_TRIALS = [change for change in INVALID_CRASHES if change.keys() & {"step", "more"}]


@pytest.mark.parametrize("change", INVALID_ENTRIES, ids=lambda change: repr(change)[:40])
def test_an_entry_that_nobody_has_measured_is_measured_again(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    types = {"scale.two": Config, "scale.more.two": Config}
    monkeypatch.setattr(ejkernel_core, "config_type", types.get)
    unfinished = PersistentCache().unfinished
    documents = [entry_document(**change), entry_document(config=to_json(Config(4)))]
    unfinished.files.write_at((".tuning",), f"{key().digest}.json", json.dumps(documents).encode())
    assert unfinished.entries(key()) == (Entry("two", Config(4), 1.5, is_checked=True),)


@pytest.mark.parametrize(
    ("suffix", "change"),
    [("crashed", change) for change in INVALID_CRASHES] + [("trying", change) for change in INVALID_TRIALS],
    ids=lambda value: repr(value)[:40],
)
def test_a_death_that_nobody_has_noted_excludes_nothing(
    monkeypatch: pytest.MonkeyPatch, suffix: str, change: Any
) -> None:
    monkeypatch.setattr(ejkernel_core, "config_type", {"scale.two": Config}.get)
    cache, valid = PersistentCache(), crashed_document(config=to_json(Config(4)))
    cache.unfinished.files.write_at((".tuning",), f"{key().digest}.crashed", json.dumps([valid]).encode())
    document = crashed_document(**change)
    if suffix == "trying":
        document = {name: document[name] for name in document if name not in ("crashes", "is_out", "reason")}
        document |= change
    documents = [document, valid] if suffix == "crashed" else [document]
    cache.unfinished.files.write_at((".tuning",), f"{key().digest}.{suffix}", json.dumps(documents).encode())
    assert cache.crashes(key()).startswith(
        "two Config(factor=4): the process crashed while it was run, twice, so it is out"
    )
    assert "Config(factor=3)" not in cache.crashes(key())
    assert cache.unfinished.take(key())
    assert [entry.cfg for entry in cache.unfinished.entries(key())] == [Config(4)]
    assert cache.unfinished.crashed(key()) == ()
    cache.unfinished.release(key())


def test_a_lock_is_taken_once_and_released() -> None:
    first, second = PersistentCache().unfinished, PersistentCache().unfinished
    first.take(key())
    first.take(key())  # the lock is already its own
    path = first._path(key(), "lock")
    assert _try_lock(path) is None
    first.release(key())
    assert not path.exists()
    second.take(key())
    assert path.exists()
    second.release(key())


@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_lock_of_a_file_that_its_last_owner_removes_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_made_again: bool
) -> None:
    path, flock = tmp_path / "lock", fcntl.flock

    def remove_and_lock(descriptor: int, operation: int) -> None:
        path.unlink()
        if is_made_again:
            path.touch()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_and_lock)
    assert _try_lock(path) is None


def test_an_old_lock_of_a_live_process_stays_valid() -> None:
    first, second = PersistentCache().unfinished, PersistentCache().unfinished
    assert first.take(key())
    os.utime(first._path(key(), "lock"), (1, 1))
    assert not second.take(key(), 0.3)
    assert second._locks == {}
    first.release(key())
    assert second.take(key())
    second.release(key())


def test_a_process_that_does_not_wait_gets_no_lock() -> None:
    first, second = PersistentCache().unfinished, PersistentCache().unfinished
    assert first.take(key())
    assert not second.take(key(), 0.0)
    first.release(key())
    assert second.take(key(), 0.0)
    second.release(key())


def test_a_measurement_works_without_a_writable_folder(monkeypatch: Any, tmp_path: Path) -> None:
    unfinished = PersistentCache(tmp_path / "file" / "in the way").unfinished
    (tmp_path / "file").write_text("")
    unfinished.take(key())
    unfinished.keep(key(), (Entry("two", Config(3), 1.5),))
    assert unfinished.entries(key()) == ()
    unfinished.end(key(), (), is_interrupted=False)


def test_a_measurement_without_a_result_releases_its_lock(scale_op: Any) -> None:
    inv = scale_op.registry.invocation("scale", jnp.ones(5))
    unfinished = default_cache().unfinished
    assert policy.tuning_started(inv, EMPTY) == Earlier()
    assert unfinished._locks
    policy.tuning_progress(inv, Progress(inv, (Entry("two", Config(3), reason="wrong"),), 1.0, 2.0))
    assert unfinished.entries(inv.tuning_keys[-1])
    failed_entry = Entry("two", Config(3), 1.5, reason="measuring raised ValueError: late")
    policy.tuning_progress(inv, Progress(inv, (failed_entry,), 1.0, 2.0, finished=True))
    assert (unfinished._locks, unfinished.entries(inv.tuning_keys[-1])) == ({}, ())


@pytest.mark.parametrize("by_hand", [False, True])
def test_records_are_stored_under_the_lock(scale_op: Any, monkeypatch: pytest.MonkeyPatch, by_hand: bool) -> None:
    """The lock is the same for all versions, so that no process replaces a record of other versions unseen."""
    put, keys, stored = PersistentCache.put, scale_op.keys(), []

    def record_lock_and_put(cache: PersistentCache, key: Key, record: Any) -> None:
        lock = cache.unfinished._path(keys[-1], "lock")
        stored.append((key, _try_lock(lock) if lock.exists() else "no lock"))
        put(cache, key, record)

    monkeypatch.setattr(PersistentCache, "put", record_lock_and_put)
    x = jnp.arange(5.0)
    if by_hand:
        monkeypatch.setattr(ejkernel_core, "registry", scale_op.registry)
        autotune("scale", x, num_iters=2)
    else:
        with policy_override(autotune=True):
            scale_op.registry.call("scale", x)
    assert stored == [(key, None) for key in keys]
