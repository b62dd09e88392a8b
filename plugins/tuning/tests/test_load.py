"""Tuning under load: samples in queues, and a ranking by them, on a device whose times are known."""

from __future__ import annotations

import functools
import threading
from types import SimpleNamespace

import attrs
import jax.numpy as jnp
import pytest

from ejkernel_core import Candidate, Operation, Registry, hookimpl
from ejkernel_tuning import _load, _measurement, _timing
from ejkernel_tuning._autotune import tune
from ejkernel_tuning._in_place import InPlace
from ejkernel_tuning._measurement import Measurement

X = jnp.arange(2000.0)
HOST_S = 20e-6


# -- one sample --------------------------------------------------------------------------------------------------------


class Device:
    """A device that runs one call after another, and takes 32 that it has not begun."""

    def __init__(self):
        self.now, self.free, self.idle_s, self.ends, self.calls = 0.0, 0.0, 0.0, [], 0

    def call(self, seconds, host_s=HOST_S):
        self.calls += 1
        waiting = [end for end in self.ends if end > self.now]
        if len(waiting) >= 32:
            self.now = waiting[-32]
        self.now += host_s
        self.idle_s += max(0.0, self.now - self.free)
        self.free = max(self.now, self.free) + seconds
        self.ends = [*waiting, self.free]
        return Result(self, self.free)


class Result:
    is_deleted = False

    def __init__(self, device, end):
        self.device, self.end = device, end

    def block_until_ready(self):
        assert not self.is_deleted
        self.device.now = max(self.device.now, self.end)
        return self


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(_load.time, "perf_counter", lambda: device.now)
    return device


@pytest.mark.parametrize("milliseconds", [0.1, 0.7, 5.0, 90.0])
def test_a_sample_is_the_time_of_a_call_without_a_pause(device, milliseconds):
    (measured,) = _load.sample(device.call, [milliseconds * 1e-3], milliseconds, 0.02)
    assert measured == pytest.approx(milliseconds, rel=1e-6)
    assert device.idle_s == pytest.approx(HOST_S)  # before the first call
    assert device.calls == sum(_load.calls_of(milliseconds, 0.02))


def test_the_calls_before_are_not_timed(device):
    def call(array):
        return device.call(0.5e-3 if device.calls < 10 else 1e-3)  # at a higher clock, after a pause

    assert _load.sample(call, [None], 1.0, 0.02) == [pytest.approx(1.0, rel=1e-6)]


def test_a_call_that_the_host_cannot_start_fast_enough_has_no_sample(device):
    assert _load.sample(functools.partial(device.call, host_s=2e-4), [1e-4], 0.15, 0.02) == []
    assert len(_load.sample(functools.partial(device.call, host_s=1e-4), [2e-4], 0.2, 0.02)) == 1


def test_arrays_that_are_taken_away_are_not_waited_for(device):
    last = []

    class Updated(InPlace):
        def __call__(self, *arrays):
            if last:
                last.pop().is_deleted = True
            last.append(device.call(1e-3))
            return last[0]

    (measured,) = _load.sample(Updated(None, {0: 0}), [None], 1.0, 0.02)
    assert measured == pytest.approx(1.0, rel=2e-3)


def test_the_last_rounds_have_the_longest_queues():
    lengths = [_load.queue_s(share) for share, _ in _measurement.ROUNDS]
    assert lengths == pytest.approx([0.02, 0.02, 0.0312, 0.0624])


# -- a measurement -----------------------------------------------------------------------------------------------------


@attrs.frozen
class Config:
    name: str


def kernel(*names):
    """It computes the same with each configuration, the first of which is that of the heuristic."""

    @hookimpl
    def heuristic_cfg(inv):
        return Config(names[0])

    @hookimpl
    def config_space(inv):
        return [Config(name) for name in names]

    @hookimpl
    def run_backend(inv, cfg):
        return inv["x"] * 2

    return SimpleNamespace(
        Config=Config, heuristic_cfg=heuristic_cfg, config_space=config_space, run_backend=run_backend
    )


def registry_of(*names):
    registry = Registry(plugins="")
    registry.register(Operation(name="double", signature=lambda x: None, outputs=lambda a: (a["x"],)))
    registry.register(kernel(*names), "double.kinds")
    registry.register(kernel("reference"), "double.reference")
    return registry


@pytest.fixture
def measured(monkeypatch):
    """Tunes configurations with known times, in bursts and under load. What was sampled, in order, is in ``.order``."""
    names, order = {}, []
    set_compiled = Measurement._set_compiled

    def keep_name(self, variant, outcome, settings):
        names[id(outcome)] = variant.cfg.name
        set_compiled(self, variant, outcome, settings)

    monkeypatch.setattr(Measurement, "_set_compiled", keep_name)
    monkeypatch.setattr(_load, "is_possible", lambda platform: True)
    monkeypatch.setattr(_load, "WARM_S", 0.01)
    monkeypatch.setattr(_timing, "batch_size", lambda fn, args: 1)

    def run(bursts, loaded, sample=None, budget_s=20.0, **options):
        def burst(fn, args, calls):
            order.append(("burst", names[id(fn)]))
            return bursts.get(names[id(fn)], 1.0) * 1e-3

        def under_load(fn, args, milliseconds, seconds):
            order.append(("load", names[id(fn)]))
            return sample(names[id(fn)]) if sample else [loaded[names[id(fn)]]]

        monkeypatch.setattr(_timing, "seconds", burst)
        monkeypatch.setattr(_load, "sample", under_load)
        registry = registry_of(*bursts)
        inv = registry.invocation("double", X)
        candidates = [Candidate(registry.kernel("double", "kinds"), Config(next(iter(bursts))))]
        return tune(inv, candidates, registry.reference(inv), budget_s, {"x": X}, **options)

    return SimpleNamespace(run=run, order=order)


BURSTS = {"usual": 1.0, "hungry": 0.8, "frugal": 0.85, "slow": 2.0}
LOADED = {"usual": 1.1, "hungry": 0.95, "frugal": 0.86, "slow": 2.1}


def test_what_is_the_fastest_under_load_is_selected(measured):
    tuned = measured.run(BURSTS, LOADED)
    assert (tuned.best.cfg, tuned.best.milliseconds) == (Config("frugal"), 0.86)
    by_name = {entry.cfg.name: entry.milliseconds for entry in tuned.entries}
    assert by_name == LOADED  # no burst is among the samples
    assert tuned.records[0].provenance.milliseconds == 0.86
    assert "measured under load" in str(tuned)
    assert tuned.burst_ranking == ()
    # After the first call of each, in turns.
    first = next(place for place, (kind, _) in enumerate(measured.order) if kind == "load")
    assert {kind for kind, _ in measured.order[first:]} == {"load"}
    assert [name for _, name in measured.order[first : first + 8]] == ["usual", "hungry", "frugal", "slow"] * 2


@pytest.mark.parametrize(
    ("platform", "scale"), [(True, 0.1), (False, 1.0)], ids=["short calls", "without a queue of the device"]
)
def test_others_are_measured_in_bursts(measured, monkeypatch, platform, scale):
    monkeypatch.setattr(_load, "is_possible", lambda name: platform)
    tuned = measured.run({name: scale * time for name, time in BURSTS.items()}, LOADED, has_burst_ranking=True)
    assert tuned.best.cfg == Config("hungry")
    assert tuned.burst_ranking == ()
    assert {kind for kind, _ in measured.order} == {"burst"}


def test_load_is_for_gpus():
    assert [_load.is_possible(platform) for platform in ("gpu", "cpu", "tpu")] == [True, False, False]


def test_times_of_two_kinds_are_not_compared(measured):
    """One that the host cannot start fast enough has no time under load, so that all have bursts."""
    tuned = measured.run(BURSTS, LOADED, lambda name: [] if name == "frugal" else [0.01], has_burst_ranking=True)
    assert tuned.best.cfg == Config("hungry")
    assert {entry.cfg.name: entry.milliseconds for entry in tuned.entries} == BURSTS
    assert tuned.burst_ranking == ()


def test_one_that_fails_under_load_is_excluded_alone(measured):
    def sample(name):
        if name == "frugal":
            raise ValueError("illegal memory access")
        return [LOADED[name]]

    tuned = measured.run(BURSTS, LOADED, sample)
    assert (tuned.best.cfg, tuned.best.milliseconds) == (Config("hungry"), 0.95)
    reasons = {entry.cfg.name: entry.reason for entry in tuned.entries}
    assert reasons["frugal"] == "measuring raised ValueError: illegal memory access"


def test_one_that_hangs_under_load_is_left_behind(measured):
    is_over = threading.Event()

    def sample(name):
        if name == "frugal":
            is_over.wait()
        return [LOADED[name]]

    tuned = measured.run(BURSTS, LOADED, sample, budget_s=4.0)
    is_over.set()
    frugal = next(entry for entry in tuned.entries if entry.cfg == Config("frugal"))
    assert tuned.best is None or tuned.best.cfg != Config("frugal")
    assert "still measuring" in frugal.reason + str(tuned)


def test_a_ranking_by_bursts_is_there_for_a_comparison(measured):
    tuned = measured.run(BURSTS, LOADED, has_burst_ranking=True)
    assert tuned.best.cfg == Config("frugal")
    assert {entry.cfg.name: entry.milliseconds for entry in tuned.entries} == LOADED
    ranked = {entry.cfg.name: entry.milliseconds for entry in tuned.burst_ranking}
    assert [*ranked][:2] == ["hungry", "frugal"]
    assert ranked == BURSTS
    usual_wins = measured.run({"usual": 1.0, "other": 0.99}, {"usual": 1.0, "other": 0.9}, has_burst_ranking=True)
    assert [entry.cfg.name for entry in usual_wins.burst_ranking] == ["usual", "other"]
    assert usual_wins.best.cfg == Config("other")
