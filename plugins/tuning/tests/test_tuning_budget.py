"""A budget too short to measure everything: results count, the record has the shortfall, a larger budget continues."""

from __future__ import annotations

import itertools
import json
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_core import (
    ConfigCache,
    Key,
    Operation,
    Provenance,
    Record,
    RecordError,
    Registry,
    hookimpl,
    overlay_cache,
    policy_override,
    record_from_json,
    record_to_json,
)
from ejkernel_core.extend import Shortfall
from ejkernel_tuning import Reason, Tuned, _measurement, _threads, autotune_recorded, recording
from ejkernel_tuning._autotune import tune


@attrs.frozen
class Config:
    number: int = 0


# -- records ---------------------------------------------------------------------------------------------------------

KEY = Key("op", "cpu", '"p"')
COMPLETE = Provenance(when="2026-11-20T12:00:00+00:00", device="cpu", milliseconds=0.25, backends=("a",))
INCOMPLETE = attrs.evolve(COMPLETE, shortfall=Shortfall(unreached=12, budget_s=5.0))


def test_a_record_with_a_shortfall_is_read_back() -> None:
    record = Record(Config(1), "a", INCOMPLETE)
    text = record_to_json(KEY, record)
    assert json.loads(text)["provenance"]["shortfall"] == {"unreached": 12, "budget_s": 5.0}
    assert record_from_json(text, KEY, Config) == record
    assert str(INCOMPLETE).endswith(
        ": 0.25 ms; 12 configurations were not measured in 5 s, and a larger budget goes on there"
    )


def test_a_record_without_a_shortfall_has_no_such_field() -> None:
    record = Record(Config(1), "a", COMPLETE)
    text = record_to_json(KEY, record)
    assert sorted(json.loads(text)["provenance"]) == ["backends", "device", "milliseconds", "software", "tried", "when"]
    assert record_from_json(text, KEY, Config) == record


@pytest.mark.parametrize(
    ("field", "message"),
    [("tried", r"\$.provenance.tried is missing"), ("software", r"\$.provenance.software is missing")],
)
def test_a_provenance_without_a_field_is_refused(field: str, message: str) -> None:
    data = json.loads(record_to_json(KEY, Record(Config(1), "a", COMPLETE)))
    del data["provenance"][field]
    with pytest.raises(RecordError, match=message):
        record_from_json(json.dumps(data), KEY, Config)


@pytest.mark.parametrize("shortfall", [None, 3, {}, {"unreached": "3", "budget_s": 1.0}, {"unreached": 3}])
def test_an_invalid_shortfall_is_refused(shortfall: object) -> None:
    data = json.loads(record_to_json(KEY, Record(Config(1), "a", INCOMPLETE)))
    data["provenance"]["shortfall"] = shortfall
    with pytest.raises(RecordError, match="shortfall"):
        record_from_json(json.dumps(data), KEY, Config)


def test_the_published_records_have_no_shortfall() -> None:
    files = (Path(__file__).parents[2]).glob("tuned/ejkernel_*/*/*.jsonl")
    records = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert len(records) > 100
    assert not any("shortfall" in record["provenance"] for record in records)


# -- measurements ----------------------------------------------------------------------------------------------------

X = jnp.arange(1.0, 9.0)
RELEASE = threading.Event()


def make_registry(space: Callable[[Any], Any], compiling: Callable[[int], None] = lambda number: None) -> Registry:
    """``triple`` with the configurations of ``space``. Each compilation calls ``compiling``. 0 is the heuristic."""
    registry = Registry(plugins="ejkernel-tuning")

    @hookimpl
    def heuristic_cfg(inv):
        return Config(0)

    config_space = hookimpl(space)

    @hookimpl
    def run_backend(inv, cfg):
        compiling(cfg.number)
        return inv["x"] * 3

    @hookimpl
    def no_cfg(inv):
        return None

    registry.register(Operation(name="triple", signature=lambda x: None, outputs=lambda a: (a["x"],)))
    kernel = SimpleNamespace(
        Config=Config, heuristic_cfg=heuristic_cfg, config_space=config_space, run_backend=run_backend
    )
    registry.register(kernel, "triple.kinds")
    reference_kernel = SimpleNamespace(
        PLATFORMS={"cpu": 0}, heuristic_cfg=no_cfg, run_backend=hookimpl(lambda inv: inv["x"] * 3)
    )
    registry.register(reference_kernel, "triple.reference")
    return registry


def run_tuner(registry: Registry, budget_s: float, **keywords: Any) -> Tuned:
    inv = registry.invocation("triple", X)
    candidates, _ = registry.candidates(inv)
    return tune(inv, candidates, registry.reference(inv), budget_s, {"x": X}, calls=(1, 4), **keywords)


def measured_numbers(tuned: Tuned) -> set[int]:
    return {e.cfg.number for e in tuned.entries if e.backend == "kinds" and e.milliseconds is not None}


def endless(inv: Any) -> Iterator[Config]:
    return map(Config, itertools.count())


def slow(inv: Any) -> Iterator[Config]:
    for number in range(1, 10):
        time.sleep(0.5 * number)
        yield Config(number)


def repetitive(inv: Any) -> Iterator[Config]:
    yield Config(1)
    yield from itertools.repeat(Config(0))


def hanging(inv: Any) -> Iterator[Config]:
    yield Config(1)
    RELEASE.wait(60)


@pytest.mark.parametrize("space", [endless, slow, hanging])
def test_an_endless_space_is_measured_within_the_budget(space: Callable[[Any], Any]) -> None:
    RELEASE.clear()
    tuned = run_tuner(make_registry(space), 4.0)
    RELEASE.set()
    assert {0, 1} <= measured_numbers(tuned)
    assert len(tuned.entries) <= _measurement.MAX_VARIANTS + 2
    shortfall = tuned.records[0].provenance.shortfall
    assert shortfall is not None
    assert shortfall.budget_s == 4.0
    assert str(shortfall) in tuned.notes


def test_a_space_that_repeats_itself_is_complete() -> None:
    tuned = run_tuner(make_registry(repetitive), 10.0)
    assert measured_numbers(tuned) == {0, 1}
    assert tuned.records[0].provenance.shortfall is None


def test_with_a_hanging_space_only_the_heuristic_is_measured() -> None:
    def space(inv: Any) -> Any:
        RELEASE.wait(60)
        return []

    RELEASE.clear()
    tuned = run_tuner(make_registry(space), 2.0)
    RELEASE.set()
    assert (measured_numbers(tuned), tuned.best.backend in ("kinds", "reference")) == ({0}, True)


def test_a_configuration_that_compiles_slowly_is_measured() -> None:
    # Longer than the limit for compiling while there are others to measure.
    tuned = run_tuner(make_registry(lambda inv: [Config(1), Config(2)], lambda number: time.sleep(1.7)), 4.0)
    assert 0 in measured_numbers(tuned)


def test_configurations_before_a_fault_of_the_space_are_measured() -> None:
    def space(inv: Any) -> Iterator[Config]:
        yield Config(1)
        raise KeyError("no table")

    tuned = run_tuner(make_registry(space), 20.0)
    assert measured_numbers(tuned) == {0, 1}
    assert "triple.kinds: config_space raised KeyError: 'no table'" in tuned.notes


# -- continuing ------------------------------------------------------------------------------------------------------


class Compiler:
    """A compiler that is fast for 0 and 1 and hangs for others until it is released, and records its calls."""

    def __init__(self) -> None:
        self.is_released = threading.Event()
        self.numbers: list[int] = []

    def __call__(self, number: int) -> None:
        if number > 1:
            self.is_released.wait(30)
        self.numbers.append(number)

    def release(self) -> None:
        """Let the hanging compilations end, and wait for their threads."""
        self.is_released.set()
        for thread in list(_threads._running):
            thread.join()
        self.numbers.clear()

    def registry(self) -> Registry:
        return make_registry(lambda inv: [Config(number) for number in range(1, 4)], self)


def call(registry: Registry, budget_s: float) -> None:
    with policy_override(autotune=True, budget_s=budget_s):
        np.testing.assert_array_equal(registry.call("triple", X), X * 3)


def shortfall_of(registry: Registry) -> Shortfall | None:
    return registry.plan("triple", X).choice.record.provenance.shortfall


def test_a_larger_budget_continues_where_a_smaller_one_ended() -> None:
    compiler = Compiler()
    registry = compiler.registry()
    call(registry, 2.0)
    assert shortfall_of(registry) == Shortfall(3 - 1, 2.0)
    assert "2 configurations were not measured in 2 s, and a larger budget goes on there" in str(
        registry.explain("triple", X)
    )
    compiler.release()
    call(registry, 2.0)  # the same budget measures nothing more
    call(registry, 1.0)
    assert shortfall_of(registry) == Shortfall(2, 2.0)
    with policy_override(autotune=True, budget_s=20.0):
        assert "would be measured further: 2 configurations were not measured" in str(registry.plan("triple", X))
    assert shortfall_of(registry) == Shortfall(2, 2.0)  # plan() changes nothing
    fastest = registry.plan("triple", X).choice.record
    call(registry, 20.0)
    assert shortfall_of(registry) is None
    slower_numbers = {0, 1} - {fastest.cfg.number if fastest.backend == "kinds" else 0, 0}
    assert {2, 3} <= set(compiler.numbers)
    assert not slower_numbers & set(compiler.numbers)  # slower configurations are not measured again
    tried = dict(registry.plan("triple", X).choice.record.provenance.tried)
    assert all(isinstance(tried[f"kinds {Config(number)}"], float) for number in range(4))


def test_a_shortfall_ends_when_another_kernel_becomes_the_fastest() -> None:
    compiler = Compiler()
    registry = compiler.registry()
    call(registry, 2.0)
    (first_record, *_) = registry.memory.items()[0][1]
    registry.forget()
    other_backend = "reference" if first_record.backend == "kinds" else "kinds"
    # A record as if another kernel was the fastest by far.
    provenance = attrs.evolve(first_record.provenance, milliseconds=1e-9)
    inv = registry.invocation("triple", X)
    for key in inv.tuning_keys:
        registry.remember(key, Record(Config(7) if other_backend == "kinds" else None, other_backend, provenance))
    compiler.release()
    call(registry, 20.0)
    with policy_override(autotune=True, budget_s=20.0):
        plan = registry.plan("triple", X)
    assert plan.choice.record.provenance.shortfall is None
    assert plan.choice.record.provenance.milliseconds > 1e-9
    for record in registry.memory.records(inv.key):
        assert record.provenance.shortfall is None


def test_a_shortfall_of_other_versions_is_not_continued() -> None:
    compiler = Compiler()
    registry = compiler.registry()
    call(registry, 2.0)
    compiler.release()
    (key, *_), record = registry.invocation("triple", X).tuning_keys, registry.plan("triple", X).choice.record
    provenance = attrs.evolve(record.provenance, software={"jax": "0.0"})
    registry.forget()
    registry.remember(key, attrs.evolve(record, provenance=provenance))
    tuned = run_tuner(registry, 20.0, record=attrs.evolve(record, provenance=provenance))
    assert measured_numbers(tuned) == {0, 1, 2, 3}
    assert {0, 1, 2, 3} <= set(compiler.numbers)  # earlier results with other versions do not count


def test_a_shortfall_in_an_overlay_is_not_continued() -> None:
    compiler = Compiler()
    registry = compiler.registry()
    call(registry, 2.0)
    compiler.release()
    records = ConfigCache()
    for key, records_of_key in registry.memory.items():
        for record in records_of_key:
            records.put(key, record)
    with overlay_cache(records):
        call(registry, 20.0)
    assert not {2, 3} & set(compiler.numbers)


def test_autotune_recorded_continues_a_shortfall() -> None:
    compiler = Compiler()
    registry = compiler.registry()
    with recording() as invocations:
        jax.jit(lambda x: registry.call("triple", x)).lower(X)
    autotune_recorded(invocations, budget_s=2.0)
    assert shortfall_of(registry).unreached == 2
    compiler.release()
    assert autotune_recorded(invocations, budget_s=2.0).tuned == ()
    assert len(autotune_recorded(invocations, budget_s=20.0).tuned) == 1
    assert shortfall_of(registry) is None


# -- no measurement --------------------------------------------------------------------------------------------------


def test_a_call_warns_once_if_nothing_could_be_measured() -> None:
    registry = make_registry(lambda inv: [Config(1)])
    with warnings.catch_warnings(record=True) as warning_records:
        warnings.simplefilter("always")
        call(registry, 1e-6)
    (warning,) = (w for w in warning_records if "was selected" in str(w.message))
    message = str(warning.message)
    assert "triple(x=float32[8]) on cpu" in message
    assert "nothing was selected within 1e-06 s (out of time: " in message
    assert "so it runs as it would without tuning" in message
    assert "policy_override(budget_s=...)" in message


def test_nothing_is_selected_where_the_heuristic_was_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another configuration that was measured may be slower than what runs without tuning."""
    registry = make_registry(lambda inv: map(Config, range(3)))
    measure = _measurement.Measurement._check_results

    def without_the_heuristic(self: Any, variant: Any) -> None:
        if variant.is_usual:
            variant.reason = f"{Reason.OUT_OF_TIME}: the budget was spent"
        else:
            measure(self, variant)

    monkeypatch.setattr(_measurement.Measurement, "_check_results", without_the_heuristic)
    tuned = run_tuner(registry, 20.0)
    assert any(entry.milliseconds is not None for entry in tuned.entries)
    assert tuned.records == ()
    with policy_override(autotune=True, budget_s=20.0), pytest.warns(RuntimeWarning, match="nothing was selected"):
        registry.call("triple", jnp.ones((4, 16)))
    assert registry.plan("triple", jnp.ones((4, 16))).origin == "heuristic"


def test_an_exception_without_a_text_excludes_only_its_configuration() -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def compiling(number: int) -> None:
        if number == 1:
            raise Unprintable

    tuned = run_tuner(make_registry(lambda inv: map(Config, range(3)), compiling), 20.0)
    reasons = {entry.cfg.number: entry.reason for entry in tuned.entries if entry.backend == "kinds"}
    assert reasons[1] == "compiling raised Unprintable: Unprintable"
    assert tuned.records
