"""Tuning progress is shown on a terminal or in a notebook, and logged otherwise."""

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
from ejkernel_core.extend import processor
from ejkernel_tuning import Entry, Progress, Trial, _progress

X = jnp.arange(8.0)


@attrs.frozen
class Config:
    factor: int = 1


def make_registry(reports: list[Progress]) -> Registry:
    registry = Registry(plugins="ejkernel-tuning")

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
        reports.append(progress)

    operation = Operation(name="triple", signature=lambda x: None, outputs=lambda a: (a["x"],), reference="one")
    registry.register(operation)
    kernel = SimpleNamespace(
        Config=Config, heuristic_cfg=heuristic_cfg, config_space=config_space, run_backend=run_backend
    )
    registry.register(kernel, "triple.one")
    registry.register(SimpleNamespace(select_config=select_config, tuning_progress=tuning_progress), "listener")
    return registry


def call(registry: Registry) -> None:
    with policy_override(autotune=True):
        np.testing.assert_array_equal(registry.call("triple", X), X * 3)


@pytest.fixture
def progress() -> Progress:
    trials = (Trial("one", Config(1), "compiling"), Trial("one", Config(2), "compiling"))
    inv = make_registry([]).invocation("triple", X)
    return Progress(inv, (Entry("one", Config(1), 1.5), Entry("one", Config(2))), 3.0, 60.0, trials=trials)


def test_progress_has_the_call_and_the_current_configuration(progress: Progress) -> None:
    assert str(progress) == (
        "tuning triple: 1 of 2 measured, 0 out, best 1.5 ms, 3 of 60 s; "
        "compiling one Config(factor=2) and 1 more, of "
        f"triple(x=float32[8]) on cpu ({processor()})"
    )


def test_every_step_is_reported_and_the_last_report_has_no_trials() -> None:
    reports: list[Progress] = []
    call(make_registry(reports))
    steps = [(trial.step, trial.cfg) for progress in reports for trial in progress.trials]
    for cfg in (Config(1), Config(2)):
        assert ("compiling", cfg) in steps
        assert ("running", cfg) in steps
    assert (reports[-1].finished, reports[-1].trials) == (True, ())
    assert {entry.cfg for entry in reports[-1].entries} == {Config(1), Config(2)}


def test_reports_are_in_the_order_of_time() -> None:
    reports: list[Progress] = []
    call(make_registry(reports))
    seconds = [progress.seconds for progress in reports]
    assert seconds[:-1] == sorted(seconds[:-1])


def test_without_a_terminal_progress_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ejkernel.tuning"):
        call(make_registry([]))
    assert {record.name for record in caplog.records} == {"ejkernel.tuning"}
    assert "compiling one Config(factor=1)" in caplog.messages[0]
    assert "triple(x=float32[8])" in caplog.messages[0]
    assert caplog.messages[-1].startswith("tuning triple: 2 of 2 measured")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_is_not_longer_than_the_terminal(
    progress: Progress, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with caplog.at_level(logging.INFO, "ejkernel.tuning"):
        call(make_registry([]))
    lines = terminal.getvalue().split("\r\x1b[2K")[1:]
    assert max(map(len, lines)) == 40  # the last one, with its line end
    assert lines[-1].endswith("\n")
    assert caplog.messages == []


def notebook(monkeypatch: pytest.MonkeyPatch, shell: Any) -> io.StringIO:
    stream = io.StringIO()
    ipython: Any = ModuleType("IPython")
    ipython.get_ipython = lambda: shell
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    monkeypatch.setattr(sys, "stdout", stream)
    return stream


def test_in_a_notebook_one_line_is_overwritten(progress: Progress, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    stream = notebook(monkeypatch, SimpleNamespace(kernel=object()))
    assert _progress.show(progress, io.StringIO())
    assert _progress.show(attrs.evolve(progress, trials=(), finished=True), io.StringIO())
    first, second = stream.getvalue().split("\r")[1:]
    assert (len(first), len(second)) == (59, 60)  # the shorter text covers the longer one
    assert second.endswith("\n")
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize("shell", [None, SimpleNamespace()])
def test_a_program_that_imports_ipykernel_is_no_notebook(
    progress: Progress, monkeypatch: pytest.MonkeyPatch, shell: Any
) -> None:
    stream = notebook(monkeypatch, shell)
    assert not _progress.show(progress, io.StringIO())
    assert stream.getvalue() == ""
