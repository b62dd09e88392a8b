"""After the step in which calls are measured, a program runs as one whose calls have records: nothing is traced or
compiled again, and nothing is left in threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from ejkernel_core import Record, Registry, policy_override
from ejkernel_tuning import _measurement, _threads
from plugins.tuning.tests.test_samples_of_gradients import LABELS, LOGITS, make_registry
from plugins.tuning.tests.test_tuning_budget import Config, run_tuner
from plugins.tuning.tests.test_tuning_budget import make_registry as make_triple


def counting_traces(registry: Registry) -> list[str]:
    """The names of kernels, one for each time that one is traced from now on."""
    traces: list[str] = []
    kernels = [k for op in ("softmax_cross_entropy", "softmax_cross_entropy_bwd") for k in registry.kernels(op)[0]]
    for kernel in kernels:
        run = kernel._hooks.run_backend

        def run_backend(run: Any = run, name: str = kernel.name, **arguments: Any) -> Any:
            traces.append(name)
            return run(**arguments)

        kernel._hooks.run_backend = run_backend
    return traces


@pytest.mark.parametrize("compile", [lambda step: step, jax.jit], ids=["eager", "jit"])
def test_the_second_step_traces_nothing(compile: Callable[..., Any]) -> None:
    registry, threads_of_others = make_registry(1.0), {*_threads._running}
    traces = counting_traces(registry)

    def loss(logits: Any) -> Any:
        return (registry.call("softmax_cross_entropy", logits, LABELS) ** 2).sum()

    step = compile(jax.grad(loss))
    with policy_override(autotune=True, budget_s=30):
        first = step(LOGITS)
        assert {"softmax_cross_entropy.plain", "softmax_cross_entropy_bwd.by_lse"} <= {*traces}
        traces.clear()
        for _ in range(2):
            np.testing.assert_array_equal(step(LOGITS), first)
    assert traces == []
    assert not any(thread.is_alive() for thread in _threads._running - threads_of_others)


@pytest.mark.parametrize("op", ["softmax_cross_entropy", "softmax_cross_entropy_bwd"])
def test_a_record_of_another_thread_is_used_by_a_function_that_is_just_compiled(op: str) -> None:
    """It is stored between the choice and the moment at which the function is known to depend on it."""
    registry = make_registry(1.0)
    choose, stored = registry.choose, []

    def choose_and_store(inv: Any, *arguments: Any) -> Any:
        plan = choose(inv, *arguments)
        if not stored and inv.op == op:
            stored.append(inv)
            registry.remember(inv.key, Record(None, "reference"))
        return plan

    registry.choose = choose_and_store  # type: ignore[method-assign]
    traces = counting_traces(registry)
    for expected in (False, True):
        jax.grad(lambda x: registry.call("softmax_cross_entropy", x, LABELS).sum())(LOGITS)
        assert (f"{op}.reference" in traces) is expected
        traces.clear()


def numbers(count: int) -> Callable[[Any], Any]:
    return lambda inv: [Config(number) for number in range(count)]


def test_a_configuration_that_would_not_be_compiled_in_time_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[int] = []
    registry = make_triple(numbers(4), compiled.append)
    # Each is taken for one that compiles for longer than the budget, as soon as one of its kernel has been compiled.
    has_time = _measurement.Measurement._has_time_for

    def after_the_heuristic(self: Any, variant: Any, until: float) -> bool:
        self._compile_s = dict.fromkeys(self._compile_s, 1000.0)
        return has_time(self, variant, until)

    monkeypatch.setattr(_measurement.Measurement, "_has_time_for", after_the_heuristic)
    tuned = run_tuner(registry, 20.0)
    assert compiled == [0]
    reasons = {entry.cfg.number: entry.reason for entry in tuned.entries if entry.backend == "kinds"}
    assert reasons == {0: "", **dict.fromkeys((1, 2, 3), "out of time: not reached within the budget")}
    assert tuned.records[0].provenance.shortfall.unreached == 3


def test_a_measurement_waits_for_compilations_that_were_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    release, ended = threading.Event(), threading.Event()

    def compiling(number: int) -> None:
        if number == 1:
            release.wait(20)
            ended.set()

    wait = _measurement.Measurement._wait_for_compilations

    def release_and_wait(self: Any) -> None:
        threading.Timer(0.2, release.set).start()
        wait(self)

    monkeypatch.setattr(_measurement.Measurement, "_wait_for_compilations", release_and_wait)
    monkeypatch.setattr(_measurement, "COMPILING_SHARE", 0.1)
    tuned = run_tuner(make_triple(numbers(2), compiling), 15.0)
    assert ended.is_set()
    (reason,) = [entry.reason for entry in tuned.entries if entry.cfg == Config(1)]
    assert reason == "out of time: not compiled within the budget; left behind in a thread"
