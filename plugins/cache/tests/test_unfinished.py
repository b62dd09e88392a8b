"""Several processes and one measurement: one measures, the others wait; one is killed, another goes on."""

from __future__ import annotations

import json
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
from ejkernel_core import Key
from ejkernel_core._scopes import EMPTY
from ejkernel_tuning import Earlier, Entry, Progress

#: ``triple`` with some configurations; every tracing of one is told in a file.
MODULE = """
    import os, sys, time
    from pathlib import Path
    from types import SimpleNamespace

    import attrs
    import jax, jax.numpy as jnp
    from ejkernel_cache import policy
    from ejkernel_core import Operation, Registry, hookimpl, policy_override
    from ejkernel_core._scopes import current

    LOG = Path(os.environ["TRACED"])

    @attrs.frozen
    class Config:
        kind: str = "usual"

    def slowly(x, steps):
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
            x = slowly(x, 300)
        if cfg.kind == "waits":
            time.sleep(float(os.environ["WAITS"]))
        return x * (4 if cfg.kind == "wrong" else 3)

    @hookimpl
    def no_cfg(inv):
        return None

    @hookimpl
    def run_plainly(inv, cfg):
        return slowly(inv["x"], 900) * 3

    def registry():
        made = Registry(plugins="ejkernel-tuning")
        made.register(policy, "cache")
        made.register(Operation(name="triple", signature=lambda x: None, outputs=lambda a: (a["x"],)))
        made.register(
            SimpleNamespace(
                Config=Config, heuristic_cfg=heuristic_cfg, config_space=config_space, run_backend=run_backend
            ),
            "triple.kinds",
        )
        made.register(
            SimpleNamespace(PLATFORMS={"cpu": 0}, heuristic_cfg=no_cfg, run_backend=run_plainly), "triple.reference"
        )
        return made

    def main():
        with policy_override(autotune=True, budget_s=float(os.environ.get("BUDGET", "40"))):
            made = registry()
            inv = made.invocation("triple", jnp.ones(8))
            choice = made.choose(inv, None, None, current()).choice
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


def told(process: subprocess.Popen[str]) -> list[str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.split()


def traced(folder: Path) -> list[tuple[str, str]]:
    file = folder / "traced"
    return [tuple(line.split()) for line in file.read_text().splitlines()] if file.exists() else []  # type: ignore[misc]


def test_one_of_two_processes_measures_and_the_other_reads_it(tmp_path: Path, folder: Path) -> None:
    first, second = start(tmp_path, 2.0), start(tmp_path, 2.0)
    answers = [told(first), told(second)]
    assert sorted(answer[1] for answer in answers) == ["autotuned", "disk"]
    assert [answer[2] for answer in answers] == [answers[0][2]] * 2
    (measuring,) = (pid for pid, origin, _ in answers if origin == "autotuned")
    assert {pid for pid, _ in traced(tmp_path)} == {measuring}
    assert sorted(kind for _, kind in traced(tmp_path)) == ["fast", "usual", "waits", "wrong"]
    assert list((folder / ".tuning").iterdir()) == []


@pytest.mark.long
def test_what_was_measured_before_a_kill_is_not_measured_again(tmp_path: Path, folder: Path) -> None:
    killed = start(tmp_path, 600.0)
    kept = folder / ".tuning"
    for _ in range(600):
        documents = [json.loads(file.read_text()) for file in kept.glob("*.json")] if kept.exists() else []
        # The compiler's part of the budget ends, and the others are measured while one hangs.
        if documents and len(documents[0]) >= 5:  # the heuristic's, the reference, and all that are offered
            break
        time.sleep(0.1)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert PersistentCache().items() == []
    before = traced(tmp_path)
    (note,) = kept.glob("*.trying")
    notes = [json.loads(noted["config"])["fields"] for noted in json.loads(note.read_text())]
    tried = [fields["kind"] for fields in notes if fields]
    pid, origin, kind = told(start(tmp_path, 0.0))
    assert origin == "autotuned"
    again = [what for who, what in traced(tmp_path)[len(before) :] if who == pid]
    # They had not come to an end: what hung in the compiler, and what was run at that moment.
    assert sorted(again) == sorted(tried)
    assert "waits" in tried
    assert len(tried) <= 2
    assert kind in ("fast", "waits")
    assert list(kept.iterdir()) == []
    assert len(list(folder.rglob("kinds/*.json"))) == 1


@attrs.frozen
class Config:
    factor: int = 2


def key() -> Key:
    return Key("scale", "cpu", '{"a":1}')


def test_what_is_kept_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ejkernel_core, "config_type", {"scale.two": Config}.get)
    unfinished = PersistentCache().unfinished
    entries = (
        Entry("two", Config(3), 1.5, is_checked=True),
        Entry("two", Config(4), None, reason="wrong: NaN"),
        Entry("two", Config(5)),  # nothing is known of it yet
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


def test_what_is_damaged_is_nothing(folder: Path) -> None:
    unfinished = PersistentCache().unfinished
    for text in ("", "[", "{}", "3", '[{"backend": 1}]', '[{"config": "{}"}]', "[[]]", "[" * 10_000):
        unfinished.files.write_at((".tuning",), f"{key().digest}.json", text.encode())
        assert unfinished.entries(key()) == ()


def test_a_lock_is_taken_once_and_released() -> None:
    one, other = PersistentCache().unfinished, PersistentCache().unfinished
    one.take(key())
    one.take(key())  # it is one's own
    path = one._path(key(), "lock")
    assert _try_lock(path) is None
    one.release(key())
    assert not path.exists()
    other.take(key())
    assert path.exists()
    other.release(key())


def test_who_has_the_lock_is_alive_however_silent() -> None:
    one, other = PersistentCache().unfinished, PersistentCache().unfinished
    assert one.take(key())
    os.utime(one._path(key(), "lock"), (1, 1))
    assert not other.take(key(), 0.3)
    assert other._locks == {}
    one.release(key())
    assert other.take(key())
    other.release(key())


def test_who_does_not_wait_is_told_that_another_is_busy() -> None:
    one, other = PersistentCache().unfinished, PersistentCache().unfinished
    assert one.take(key())
    assert not other.take(key(), 0.0)
    one.release(key())
    assert other.take(key(), 0.0)
    other.release(key())


def test_where_nothing_can_be_written_measuring_goes_on(monkeypatch: Any, tmp_path: Path) -> None:
    unfinished = PersistentCache(tmp_path / "file" / "in the way").unfinished
    (tmp_path / "file").write_text("")
    unfinished.take(key())
    unfinished.keep(key(), (Entry("two", Config(3), 1.5),))
    assert unfinished.entries(key()) == ()
    unfinished.end(key(), (), is_interrupted=False)


def test_a_measurement_that_finds_nothing_lets_the_others_go_on(scale_op: Any) -> None:
    inv = scale_op.registry.invocation("scale", jnp.ones(5))
    unfinished = default_cache().unfinished
    assert policy.tuning_started(inv, EMPTY) == Earlier()
    assert unfinished._locks
    policy.tuning_progress(inv, Progress(inv, (Entry("two", Config(3), reason="wrong"),), 1.0, 2.0))
    assert unfinished.entries(inv.tuning_keys[-1])
    failed = Entry("two", Config(3), 1.5, reason="measuring raised ValueError: late")
    policy.tuning_progress(inv, Progress(inv, (failed,), 1.0, 2.0, finished=True))
    assert (unfinished._locks, unfinished.entries(inv.tuning_keys[-1])) == ({}, ())
