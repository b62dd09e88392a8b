"""A program ends with its own exit code, even where a configuration that it has measured still runs."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from ejkernel_tuning import _threads

#: A kernel with an endless loop, on the device and not in Python.
PROGRAM = """
import sys
import attrs, jax, jax.numpy as jnp
from types import SimpleNamespace
from ejkernel_core import Axes, Operation, Registry, hookimpl, policy_override
from ejkernel_tuning import _threads

_threads.LAST_WAIT_S = 0.5

@attrs.frozen
class Config:
    is_endless: bool = False

@hookimpl
def heuristic_cfg(inv):
    return Config()

@hookimpl
def config_space(inv):
    return [Config(), Config(is_endless=True)]

@hookimpl
def run_backend(inv, cfg):
    x = inv["x"]
    if cfg.is_endless:
        x = jax.lax.while_loop(lambda c: c.sum() > -jnp.inf, lambda c: jnp.sin(c) + 1, x)
    return x * 2

def double(x): ...

registry = Registry()
axes = Axes({"x": "n"}, {"out": "n"}, whole="n")
registry.register(Operation(name="double", signature=double, axes=axes, reference="loop"))
members = dict(heuristic_cfg=heuristic_cfg, config_space=config_space, run_backend=run_backend)
registry.register(SimpleNamespace(Config=Config, PLATFORMS={"cpu": 0}, **members), "double.loop")
with policy_override(autotune=True, budget_s=6):
    print(registry.call("double", jnp.ones(1000))[0])
print(any(thread.is_alive() for thread in _threads._running))
"""


@pytest.mark.long
@pytest.mark.parametrize(("end", "code"), [("", 0), ("sys.exit(3)", 3), ("raise LookupError('mine')", 1)])
def test_a_program_ends_with_its_own_code_while_a_configuration_hangs(end: str, code: int) -> None:
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM + end], capture_output=True, text=True, timeout=120, check=False
    )
    assert process.stdout == "2.0\nTrue\n", process.stderr
    assert process.returncode == code, process.stderr
    assert "terminate called" not in process.stderr
    assert ("LookupError: mine" in process.stderr) == (code == 1)


@pytest.fixture
def parked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Has an item for each time that the end of the process would park threads, which is not done here."""
    calls: list[bool] = []
    monkeypatch.setattr(_threads, "_park_threads_in_cpp", lambda: calls.append(True))
    monkeypatch.setattr(_threads, "LAST_WAIT_S", 0.01)
    monkeypatch.setattr(_threads, "_running", set())
    return calls


@pytest.fixture
def waiting_thread(parked: list[bool]) -> Iterator[threading.Thread]:
    release = threading.Event()

    def wait() -> None:
        release.wait()

    thread = _threads.start_thread(wait)
    yield thread
    release.set()
    thread.join()


def test_threads_are_parked_only_where_one_still_runs(parked: list[bool], waiting_thread: threading.Thread) -> None:
    _threads._wait_for_threads()
    assert parked == [True]


def test_nothing_is_parked_where_all_threads_have_ended(parked: list[bool]) -> None:
    _threads.start_thread(lambda: None).join()
    _threads._wait_for_threads()
    assert parked == []
