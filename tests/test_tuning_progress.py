"""Progress says what is at hand, where somebody looks: on a terminal, in a notebook, in the log."""

from __future__ import annotations

import io
import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import attrs
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_core import Operation, Registry, hookimpl, policy_override
from ejkernel_core._devices import processor
from ejkernel_tuning import Entry, Progress, Trial, _progress

X = jnp.arange(8.0)


@attrs.frozen
class Config:
    factor: int = 1


def registry(heard: list[Progress]) -> Registry:
    fresh = Registry(plugins="ejkernel-tuning")

    @hookimpl
    def heuristic_cfg(inv):
        return Config()

    @hookimpl
    def config_space(inv):
        return [Config(2)]

    @hookimpl
    def run_backend(inv, cfg):
        return inv["x"] * 3

    @hookimpl
    def select_config(inv):
        return None

    @hookimpl
    def tuning_progress(progress):
        heard.append(progress)

    operation = Operation(name="triple", signature=lambda x: None, outputs=lambda a: (a["x"],), reference="one")
    fresh.register(operation)
    kernel = SimpleNamespace(
        Config=Config, heuristic_cfg=heuristic_cfg, config_space=config_space, run_backend=run_backend
    )
    fresh.register(kernel, "triple.one")
    fresh.register(SimpleNamespace(select_config=select_config, tuning_progress=tuning_progress), "listener")
    return fresh


def call(fresh: Registry) -> None:
    with policy_override(autotune=True):
        np.testing.assert_array_equal(fresh.call("triple", X), X * 3)


@pytest.fixture
def progress() -> Progress:
    trials = (Trial("one", Config(1), "compiling"), Trial("one", Config(2), "compiling"))
    inv = registry([]).invocation("triple", X)
    return Progress(inv, (Entry("one", Config(1), 1.5), Entry("one", Config(2))), 3.0, 60.0, trials=trials)


def test_it_names_the_call_and_the_configuration_at_hand(progress: Progress) -> None:
    assert str(progress) == (
        "tuning triple: 1 of 2 measured, 0 out, best 1.5 ms, 3 of 60 s; "
        "compiling one Config(factor=2) and 1 more, of "
        f"triple(x=float32[8]) on cpu ({processor()})"
    )


def test_everything_is_told_before_it_is_tried_and_nothing_is_left_at_the_end() -> None:
    heard: list[Progress] = []
    call(registry(heard))
    tried = [(trial.step, trial.cfg) for progress in heard for trial in progress.trials]
    for cfg in (Config(1), Config(2)):
        assert ("compiling", cfg) in tried
        assert ("running", cfg) in tried
    assert (heard[-1].finished, heard[-1].trials) == (True, ())
    assert {entry.cfg for entry in heard[-1].entries} == {Config(1), Config(2)}


def test_a_hook_is_told_by_one_thread_at_a_time_what_holds() -> None:
    heard: list[Progress] = []
    call(registry(heard))
    seconds = [progress.seconds for progress in heard]
    assert seconds[:-1] == sorted(seconds[:-1])


def test_where_there_is_no_terminal_the_log_has_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ejkernel.tuning"):
        call(registry([]))
    assert {record.name for record in caplog.records} == {"ejkernel.tuning"}
    assert "compiling one Config(factor=1)" in caplog.messages[0]
    assert "triple(x=float32[8])" in caplog.messages[0]
    assert caplog.messages[-1].startswith("tuning triple: 2 of 2 measured")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_the_line_is_no_longer_than_the_terminal(
    progress: Progress, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with caplog.at_level(logging.INFO, "ejkernel.tuning"):
        call(registry([]))
    lines = terminal.getvalue().split("\r\x1b[2K")[1:]
    assert max(map(len, lines)) == 40  # the last one, with its line end
    assert lines[-1].endswith("\n")
    assert caplog.messages == []


def notebook(monkeypatch: pytest.MonkeyPatch, shell: Any) -> io.StringIO:
    out = io.StringIO()
    ipython: Any = ModuleType("IPython")
    ipython.get_ipython = lambda: shell
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    monkeypatch.setattr(sys, "stdout", out)
    return out


def test_in_a_notebook_one_line_updates_in_place(progress: Progress, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    out = notebook(monkeypatch, SimpleNamespace(kernel=object()))
    assert _progress.show(progress, io.StringIO())
    assert _progress.show(attrs.evolve(progress, trials=(), finished=True), io.StringIO())
    first, second = out.getvalue().split("\r")[1:]
    assert (len(first), len(second)) == (59, 60)  # the shorter text covers the longer one
    assert second.endswith("\n")
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize("shell", [None, SimpleNamespace()])
def test_a_program_that_only_imports_ipykernel_is_no_notebook(
    progress: Progress, monkeypatch: pytest.MonkeyPatch, shell: Any
) -> None:
    out = notebook(monkeypatch, shell)
    assert not _progress.show(progress, io.StringIO())
    assert out.getvalue() == ""
