"""Configurations that take the process with them: the next one knows of which, and blames nobody else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import attrs
import pytest

from ejkernel_cache import PersistentCache, default_cache
from ejkernel_core import Key
from ejkernel_tuning import DIED, Entry, Trial

#: ``triple`` with innocent configurations and one that dies, as and where the environment says.
MODULE = """
    import os, signal, sys
    from types import SimpleNamespace

    import attrs
    import jax, jax.numpy as jnp
    import ejkernel_cache
    from ejkernel_cache import policy
    from ejkernel_core import Operation, Registry, hookimpl, policy_override

    WHERE, WHO = os.environ["DIES"].split(" ", 1)

    def die():
        os.kill(os.getpid(), signal.SIGSEGV)
        signal.pause()

    @attrs.frozen
    class Config:
        kind: str = "usual"

    def dying(value):
        die()
        return value

    def slowly(x):
        return x + 0 * jax.lax.fori_loop(0, 300, lambda _, v: jnp.sin(v) * 0.5, jnp.full((50_000,), x[0])).sum()

    @hookimpl
    def heuristic_cfg(inv):
        return Config()

    @hookimpl
    def config_space(inv):
        return [Config(kind) for kind in ("fast", "slow", "dies", "slower", "slowest")]

    @hookimpl
    def run_backend(inv, cfg):
        x = inv["x"]
        if cfg.kind == WHO:
            if WHERE == "compiling":
                die()
            x = jax.pure_callback(dying, x, x)
        return (x if cfg.kind in ("fast", "dies") else slowly(x)) * 3

    @hookimpl
    def no_cfg(inv):
        return Config("reference")

    def registry():
        made = Registry(plugins="ejkernel-tuning")
        made.register(policy, "cache")
        made.register(Operation(name="triple", signature=lambda x: None, outputs=lambda a: (a["x"],)))
        kernel = dict(Config=Config, run_backend=run_backend)
        made.register(SimpleNamespace(**kernel, heuristic_cfg=heuristic_cfg, config_space=config_space), "triple.kinds")
        made.register(
            SimpleNamespace(**kernel, PLATFORMS={"cpu": 0}, heuristic_cfg=no_cfg), "triple.reference"
        )
        return made

    def main():
        made, x = registry(), jnp.arange(8.0)
        with policy_override(autotune=True, budget_s=60):
            result = made.call("triple", x)
        assert (result == x * 3).all()
        plan = made.plan("triple", x)
        print(plan.kernel.backend, plan.cfg.kind)
        print(made.explain("triple", x))
        for what, outcome in plan.choice.record.provenance.tried:
            print("tried", what, outcome)

    def ask():
        print(registry().explain("triple", jnp.arange(8.0)))
"""


def run(folder: Path, dies: str, what: str = "main") -> subprocess.CompletedProcess[str]:
    (folder / "dangerous.py").write_text(textwrap.dedent(MODULE))
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", f"import dangerous; dangerous.{what}()"],
        env={**os.environ, "PYTHONPATH": path, "DIES": dies},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def until_it_lives(folder: Path, dies: str) -> tuple[list[int], list[str]]:
    """The exit codes of one process after another, until one comes through; and what that one prints."""
    codes: list[int] = []
    while len(codes) < 3:
        done = run(folder, dies)
        codes.append(done.returncode)
        if done.returncode == 0:
            return codes, done.stdout.splitlines()
        assert done.returncode == -signal.SIGSEGV, done.stderr
    raise AssertionError("it never comes through")


@pytest.mark.parametrize("where", ["compiling", "running"])
def test_what_kills_the_process_is_out_and_nobody_else(tmp_path: Path, folder: Path, where: str) -> None:
    codes, printed = until_it_lives(tmp_path, f"{where} dies")
    assert codes == [-signal.SIGSEGV, -signal.SIGSEGV, 0]
    assert printed[0] == "kinds fast"
    dead = [line for line in printed if line.startswith("tried") and DIED in line]
    step = {"compiling": "compiled", "running": "run"}[where]
    assert [line.split(": ")[0] for line in dead] == [
        f"tried kinds Config(kind='dies') {DIED} while it was {step}, twice, so it is out; to change that"
    ]
    assert len([line for line in printed if line.startswith("tried")]) == 7
    told = "\n".join(printed)
    assert f"\n  kinds Config(kind='dies'): {DIED}" in told  # by explain
    assert "ejkernel_cache.default_cache().forgive()" in told
    (died,) = (folder / ".tuning").iterdir()
    assert f"or remove {died}" in told
    default_cache().forgive()
    assert list((folder / ".tuning").iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("who", ["usual", "reference"])
@pytest.mark.parametrize("where", ["compiling", "running"])
def test_the_heuristics_own_and_the_reference_may_die_too(tmp_path: Path, folder: Path, where: str, who: str) -> None:
    codes, printed = until_it_lives(tmp_path, f"{where} {who}")
    assert codes[-1] == 0
    assert printed[0] in ("kinds fast", "kinds dies")  # which lives here: one is as fast as the other
    dead = [line for line in printed if line.startswith("tried") and DIED in line]
    assert [f"'{who}'" in line for line in dead] == [True]


def test_after_a_death_explain_tells_of_it_without_measuring(tmp_path: Path, folder: Path) -> None:
    told = "cache (registered at run time): no answer, there is no record; kinds Config(kind='dies'): "
    assert run(tmp_path, "running dies").returncode == -signal.SIGSEGV
    once = run(tmp_path, "running dies", "ask").stdout
    assert f"{told}{DIED} while it was run; it will be tried last, and alone" in once
    assert run(tmp_path, "running dies").returncode == -signal.SIGSEGV
    lock = next((folder / ".tuning").glob("*.lock"))
    assert run(tmp_path, "running dies", "ask").stdout.startswith(
        "triple.kinds with Config(kind='usual'), by heuristic"
    )
    lock.write_text(f"{lock.read_text().split('-')[0]}-{os.getpid()}-0")  # somebody who lives is measuring
    twice = run(tmp_path, "running dies", "ask").stdout
    assert f"{told}{DIED} while it was run, once, so it is tried last, and alone; to change that: " in twice
    assert DIED not in twice.partition("to change that")[2]


# -- whose fault it is -----------------------------------------------------------------------------------------------


@attrs.frozen
class Config:
    factor: int = 2


KEY = Key("scale", "cpu", '{"a":1}')


def die(*factors: int, step: str = "compiling") -> Any:
    """A process notes these, and ends without a word; what the next one finds."""
    one = PersistentCache().unfinished
    assert one.take(KEY)
    one.note(KEY, tuple(Trial("two", Config(factor), step) for factor in factors))
    os.close(one._locks.pop(KEY.digest))  # as the system does
    other = PersistentCache().unfinished
    assert other.take(KEY)
    return other


def suspects(unfinished: Any) -> list[int]:
    return [trial.cfg.factor for trial in unfinished.suspects(KEY)]


def out(unfinished: Any) -> list[int]:
    return [entry.cfg.factor for entry in unfinished.entries(KEY)]


def test_all_that_were_compiled_are_suspects_and_the_one_that_dies_alone_is_out() -> None:
    after = die(3, 4, 5)
    assert (suspects(after), out(after)) == ([3, 4, 5], [])
    after.release(KEY)
    after = die(4)
    assert (suspects(after), out(after)) == ([3, 5], [4])
    after.release(KEY)


def test_nobody_is_out_for_being_compiled_beside_another_however_often() -> None:
    for _ in range(4):
        after = die(3, 4)
        after.release(KEY)
    assert (suspects(after), out(after)) == ([3, 4], [])


def test_who_is_forgiven_is_so_in_an_interrupted_measurement_too() -> None:
    die(3).release(KEY)
    after = die(3)
    assert out(after) == [3]
    after.end(KEY, after.entries(KEY), is_interrupted=True)
    PersistentCache().forgive()
    assert after.take(KEY)
    assert (suspects(after), out(after)) == ([], [])
    after.release(KEY)


def test_who_comes_through_is_no_suspect_any_more() -> None:
    after = die(3, 4, 5)
    after.end(KEY, (Entry("two", Config(3), 1.0), Entry("two", Config(4), reason="out of time: later")), False)
    again = die(7)
    assert (suspects(again), out(again)) == ([4, 5, 7], [])
    again.release(KEY)


def test_a_note_is_there_before_it_is_tried_and_gone_afterwards(folder: Path) -> None:
    unfinished = PersistentCache().unfinished
    assert unfinished.take(KEY)
    file = folder / ".tuning" / f"{KEY.digest}.trying"
    unfinished.note(KEY, (Trial("two", Config(3), "running"),))
    assert [(d["backend"], d["step"]) for d in json.loads(file.read_text())] == [("two", "running")]
    unfinished.note(KEY, ())
    assert not file.exists()
    unfinished.note(KEY, (Trial("two", Config(3), "running"),))
    unfinished.end(KEY, (), is_interrupted=False)  # a living one is at an end: nobody died
    assert list((folder / ".tuning").iterdir()) == []


def test_who_has_no_lock_writes_nothing(folder: Path) -> None:
    one, other = PersistentCache().unfinished, PersistentCache().unfinished
    assert one.take(KEY)
    one.note(KEY, (Trial("two", Config(3), "running"),))
    before = sorted(file.name for file in (folder / ".tuning").iterdir())
    assert not other.take(KEY)
    other.note(KEY, (Trial("two", Config(4), "running"),))
    other.keep(KEY, (Entry("two", Config(4), 1.0),))
    other.end(KEY, (), is_interrupted=False)
    assert sorted(file.name for file in (folder / ".tuning").iterdir()) == before
    one.release(KEY)


@pytest.mark.parametrize(
    "text", ["", "[", "{}", "3", '[{"backend": 1}]', '[{"config": "{}"}]', "[[]]", '[{"backend": "b", "config": "{}"}]']
)
def test_what_is_damaged_blames_nobody(text: str, folder: Path) -> None:
    unfinished = PersistentCache().unfinished
    for suffix in ("trying", "died"):
        unfinished.files.write_at((".tuning",), f"{KEY.digest}.{suffix}", text.encode())
    assert unfinished.take(KEY)
    assert (suspects(unfinished), out(unfinished)) == ([], [])
    assert isinstance(unfinished.describe_dangers(KEY), str)
    unfinished.release(KEY)
