"""Configurations that kill the process: the next process excludes them, and no others."""

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
from ejkernel_tuning import Entry, Reason, Trial

#: ``triple`` with several configurations, one of which dies in the step that the environment names.
MODULE = """
    import os, signal, sys
    from types import SimpleNamespace

    import attrs
    import jax, jax.numpy as jnp
    import ejkernel_cache
    from ejkernel_cache import policy
    from ejkernel_core import Operation, Registry, hookimpl, policy_override

    STEP, KIND = os.environ["DIES"].split(" ", 1)

    def die():
        os.kill(os.getpid(), signal.SIGSEGV)
        signal.pause()

    @attrs.frozen
    class Config:
        kind: str = "usual"

    def die_and_return(value):
        die()
        return value

    def add_passes(x):
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
        if cfg.kind == KIND:
            if STEP == "compiling":
                die()
            x = jax.pure_callback(die_and_return, x, x)
        return (x if cfg.kind in ("fast", "dies") else add_passes(x)) * 3

    @hookimpl
    def no_cfg(inv):
        return Config("reference")

    def make_registry():
        registry = Registry(plugins="ejkernel-tuning")
        registry.register(policy, "cache")
        registry.register(Operation(name="triple", signature=lambda x: None, outputs=lambda a: (a["x"],)))
        kernel = dict(Config=Config, run_backend=run_backend)
        registry.register(
            SimpleNamespace(**kernel, heuristic_cfg=heuristic_cfg, config_space=config_space), "triple.kinds"
        )
        registry.register(
            SimpleNamespace(**kernel, PLATFORMS={"cpu": 0}, heuristic_cfg=no_cfg), "triple.reference"
        )
        return registry

    def main():
        registry, x = make_registry(), jnp.arange(8.0)
        with policy_override(autotune=True, budget_s=60):
            result = registry.call("triple", x)
        assert (result == x * 3).all()
        plan = registry.plan("triple", x)
        print(plan.kernel.backend, plan.cfg.kind)
        print(registry.explain("triple", x))
        for name, outcome in plan.choice.record.provenance.tried:
            print("tried", name, outcome)

    def explain():
        print(make_registry().explain("triple", jnp.arange(8.0)))
"""


def run(folder: Path, dies: str, function: str = "main") -> subprocess.CompletedProcess[str]:
    (folder / "dangerous.py").write_text(textwrap.dedent(MODULE))
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", f"import dangerous; dangerous.{function}()"],
        env={**os.environ, "PYTHONPATH": path, "DIES": dies},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def run_until_success(folder: Path, dies: str) -> tuple[list[int], list[str]]:
    """The exit codes of successive processes until one succeeds, and the output lines of that one."""
    codes: list[int] = []
    while len(codes) < 3:
        process = run(folder, dies)
        codes.append(process.returncode)
        if process.returncode == 0:
            return codes, process.stdout.splitlines()
        assert process.returncode == -signal.SIGSEGV, process.stderr
    raise AssertionError("no process succeeds")


@pytest.mark.parametrize("step", ["compiling", "running"])
def test_only_the_configuration_that_kills_the_process_is_excluded(tmp_path: Path, folder: Path, step: str) -> None:
    codes, lines = run_until_success(tmp_path, f"{step} dies")
    assert codes == [-signal.SIGSEGV, -signal.SIGSEGV, 0]
    assert lines[0] == "kinds fast"
    lines_of_crashes = [line for line in lines if line.startswith("tried") and Reason.CRASHED in line]
    participle = {"compiling": "compiled", "running": "run"}[step]
    assert [line.split(": ")[0] for line in lines_of_crashes] == [
        f"tried kinds Config(kind='dies') {Reason.CRASHED} while it was {participle}, twice, so it is out; to change that"
    ]
    assert len([line for line in lines if line.startswith("tried")]) == 7
    text = "\n".join(lines)
    assert f"\n  kinds Config(kind='dies'): {Reason.CRASHED}" in text  # from explain
    assert "ejkernel_cache.default_cache().forget_crashes()" in text
    (file_of_deaths,) = (folder / ".tuning").iterdir()
    assert f"or remove {file_of_deaths}" in text
    default_cache().forget_crashes()
    assert list((folder / ".tuning").iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("kind", ["usual", "reference"])
@pytest.mark.parametrize("step", ["compiling", "running"])
def test_the_heuristic_and_the_reference_may_die(tmp_path: Path, folder: Path, step: str, kind: str) -> None:
    codes, lines = run_until_success(tmp_path, f"{step} {kind}")
    assert codes[-1] == 0
    assert lines[0] in ("kinds fast", "kinds dies")  # "dies" lives here, and both are equally fast
    lines_of_crashes = [line for line in lines if line.startswith("tried") and Reason.CRASHED in line]
    assert [f"'{kind}'" in line for line in lines_of_crashes] == [True]


@pytest.mark.long
def test_explain_reports_a_death_without_measuring(tmp_path: Path, folder: Path) -> None:
    prefix = "cache (registered at run time): no answer, there is no record; kinds Config(kind='dies'): "
    assert run(tmp_path, "running dies").returncode == -signal.SIGSEGV
    text_after_one_crash = run(tmp_path, "running dies", "explain").stdout
    assert f"{prefix}{Reason.CRASHED} while it was run; it will be tried last, and alone" in text_after_one_crash
    assert run(tmp_path, "running dies").returncode == -signal.SIGSEGV
    lock_file = next((folder / ".tuning").glob("*.lock"))
    assert run(tmp_path, "running dies", "explain").stdout.startswith(
        "triple.kinds with Config(kind='usual'), by heuristic"
    )
    lock_file.write_text(f"{lock_file.read_text().split('-')[0]}-{os.getpid()}-0")  # a live process is measuring
    text_after_two_crashes = run(tmp_path, "running dies", "explain").stdout
    assert (
        f"{prefix}{Reason.CRASHED} while it was run, once, so it is tried last, and alone; to change that: "
        in text_after_two_crashes
    )
    assert Reason.CRASHED not in text_after_two_crashes.partition("to change that")[2]


# -- crashes and exclusions -----------------------------------------------------------------------------------------


@attrs.frozen
class Config:
    factor: int = 2


KEY = Key("scale", "cpu", '{"a":1}')


@pytest.fixture(autouse=True)
def _kernel(scale_op: Any) -> None:
    """The kernel ``scale.two``, whose ``Config`` the configurations in files are read as."""


def die_with_trials(*factors: int, step: str = "compiling") -> Any:
    """Note trials of these factors as a process that dies; return what the next process reads."""
    unfinished = PersistentCache().unfinished
    assert unfinished.take(KEY)
    unfinished.note(KEY, tuple(Trial("two", Config(factor), step) for factor in factors))
    os.close(unfinished._locks.pop(KEY.digest))  # the system does this when a process ends
    next_unfinished = PersistentCache().unfinished
    assert next_unfinished.take(KEY)
    return next_unfinished


def crashed(unfinished: Any) -> list[int]:
    return [trial.cfg.factor for trial in unfinished.crashed(KEY)]


def excluded(unfinished: Any) -> list[int]:
    return [entry.cfg.factor for entry in unfinished.entries(KEY)]


def test_all_trials_are_tried_last_and_one_that_crashes_alone_is_excluded() -> None:
    unfinished = die_with_trials(3, 4, 5)
    assert (crashed(unfinished), excluded(unfinished)) == ([3, 4, 5], [])
    unfinished.release(KEY)
    unfinished = die_with_trials(4)
    assert (crashed(unfinished), excluded(unfinished)) == ([3, 5], [4])
    unfinished.release(KEY)


def test_trials_that_never_ran_alone_are_never_excluded() -> None:
    for _ in range(4):
        unfinished = die_with_trials(3, 4)
        unfinished.release(KEY)
    assert (crashed(unfinished), excluded(unfinished)) == ([3, 4], [])


def test_forget_crashes_applies_to_an_interrupted_measurement() -> None:
    die_with_trials(3).release(KEY)
    unfinished = die_with_trials(3)
    assert excluded(unfinished) == [3]
    unfinished.end(KEY, unfinished.entries(KEY), is_interrupted=True)
    PersistentCache().forget_crashes()
    assert unfinished.take(KEY)
    assert (crashed(unfinished), excluded(unfinished)) == ([], [])
    unfinished.release(KEY)


def test_a_measured_configuration_is_no_longer_tried_last() -> None:
    unfinished = die_with_trials(3, 4, 5)
    unfinished.end(KEY, (Entry("two", Config(3), 1.0), Entry("two", Config(4), reason="out of time: later")), False)
    next_unfinished = die_with_trials(7)
    assert (crashed(next_unfinished), excluded(next_unfinished)) == ([4, 5, 7], [])
    next_unfinished.release(KEY)


def test_a_note_exists_only_during_its_trial(folder: Path) -> None:
    unfinished = PersistentCache().unfinished
    assert unfinished.take(KEY)
    file = folder / ".tuning" / f"{KEY.digest}.trying"
    unfinished.note(KEY, (Trial("two", Config(3), "running"),))
    assert [(d["backend"], d["step"]) for d in json.loads(file.read_text())] == [("two", "running")]
    unfinished.note(KEY, ())
    assert not file.exists()
    unfinished.note(KEY, (Trial("two", Config(3), "running"),))
    unfinished.end(KEY, (), is_interrupted=False)  # the process is alive and has ended its measurement
    assert list((folder / ".tuning").iterdir()) == []


def test_a_process_without_the_lock_writes_nothing(folder: Path) -> None:
    first, second = PersistentCache().unfinished, PersistentCache().unfinished
    assert first.take(KEY)
    first.note(KEY, (Trial("two", Config(3), "running"),))
    files_before = sorted(file.name for file in (folder / ".tuning").iterdir())
    assert not second.take(KEY)
    second.note(KEY, (Trial("two", Config(4), "running"),))
    second.keep(KEY, (Entry("two", Config(4), 1.0),))
    second.end(KEY, (), is_interrupted=False)
    assert sorted(file.name for file in (folder / ".tuning").iterdir()) == files_before
    first.release(KEY)


@pytest.mark.parametrize(
    "text", ["", "[", "{}", "3", '[{"backend": 1}]', '[{"config": "{}"}]', "[[]]", '[{"backend": "b", "config": "{}"}]']
)
def test_damaged_files_exclude_nothing(text: str, folder: Path) -> None:
    unfinished = PersistentCache().unfinished
    for suffix in ("trying", "crashed"):
        unfinished.files.write_at((".tuning",), f"{KEY.digest}.{suffix}", text.encode())
    assert unfinished.take(KEY)
    assert (crashed(unfinished), excluded(unfinished)) == ([], [])
    assert isinstance(unfinished.describe_crashes(KEY), str)
    unfinished.release(KEY)
