"""A budget that is too short for all: what was measured counts, the rest is told, and a larger budget goes on there."""

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
from ejkernel_core._choice import candidates_for
from ejkernel_core._records import Shortfall
from ejkernel_tuning import Tuned, _measurement, _threads, autotune_recorded, recording
from ejkernel_tuning._autotune import tune


@attrs.frozen
class Config:
    number: int = 0


# -- the record ------------------------------------------------------------------------------------------------------

KEY = Key("op", "cpu", '"p"')
WHOLE = Provenance(when="2026-11-20T12:00:00+00:00", device="cpu", milliseconds=0.25, backends=("a",))
SHORT = attrs.evolve(WHOLE, shortfall=Shortfall(unreached=12, budget_s=5.0))


def test_a_record_tells_how_many_were_not_reached_and_is_read_back() -> None:
    record = Record(Config(1), "a", SHORT)
    text = record_to_json(KEY, record)
    assert json.loads(text)["provenance"]["shortfall"] == {"unreached": 12, "budget_s": 5.0}
    assert record_from_json(text, KEY, Config) == record
    assert str(SHORT).endswith(
        ": 0.25 ms; 12 configurations were not reached in 5 s, and a larger budget goes on there"
    )


def test_what_reached_all_is_written_as_it_always_was_and_old_records_are_read() -> None:
    record = Record(Config(1), "a", WHOLE)
    text = record_to_json(KEY, record)
    assert sorted(json.loads(text)["provenance"]) == ["backends", "device", "milliseconds", "software", "tried", "when"]
    assert record_from_json(text, KEY, Config) == record


@pytest.mark.parametrize(
    ("field", "wrong"),
    [("tried", r"\$.provenance.tried is missing"), ("software", r"\$.provenance.software is missing")],
)
def test_no_other_field_may_be_missing(field: str, wrong: str) -> None:
    data = json.loads(record_to_json(KEY, Record(Config(1), "a", WHOLE)))
    del data["provenance"][field]
    with pytest.raises(RecordError, match=wrong):
        record_from_json(json.dumps(data), KEY, Config)


@pytest.mark.parametrize("shortfall", [None, 3, {}, {"unreached": "3", "budget_s": 1.0}, {"unreached": 3}])
def test_a_shortfall_that_is_none_is_refused(shortfall: object) -> None:
    data = json.loads(record_to_json(KEY, Record(Config(1), "a", SHORT)))
    data["provenance"]["shortfall"] = shortfall
    with pytest.raises(RecordError, match="shortfall"):
        record_from_json(json.dumps(data), KEY, Config)


def test_the_published_records_have_none() -> None:
    files = (Path(__file__).parents[1] / "plugins" / "tuned_h200").rglob("*.jsonl")
    records = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert len(records) > 100
    assert not any("shortfall" in record["provenance"] for record in records)


# -- the contest -----------------------------------------------------------------------------------------------------

X = jnp.arange(1.0, 9.0)
RELEASE = threading.Event()


def registry(space: Callable[[Any], Any], compiling: Callable[[int], None] = lambda number: None) -> Registry:
    """``triple`` with the configurations of that space, compiled after a call of ``compiling``; 0 is the heuristic's."""
    fresh = Registry(plugins="ejkernel-tuning")

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

    fresh.register(Operation(name="triple", signature=lambda x: None, outputs=lambda a: (a["x"],)))
    kernel = SimpleNamespace(
        Config=Config, heuristic_cfg=heuristic_cfg, config_space=config_space, run_backend=run_backend
    )
    fresh.register(kernel, "triple.kinds")
    plain = SimpleNamespace(PLATFORMS={"cpu": 0}, heuristic_cfg=no_cfg, run_backend=hookimpl(lambda inv: inv["x"] * 3))
    fresh.register(plain, "triple.reference")
    return fresh


def run_tuner(fresh: Registry, budget_s: float, **more: Any) -> Tuned:
    inv = fresh.invocation("triple", X)
    candidates, _ = candidates_for(inv, fresh.kernels(inv.op)[0], None, None)
    return tune(inv, candidates, fresh.judge(inv), budget_s, {"x": X}, calls=(1, 4), **more)


def measured(tuned: Tuned) -> set[int]:
    return {e.cfg.number for e in tuned.entries if e.backend == "kinds" and e.milliseconds is not None}


def numbers(inv: Any) -> Iterator[Config]:
    return map(Config, itertools.count())


def sleeping(inv: Any) -> Iterator[Config]:
    for number in range(1, 10):
        time.sleep(0.5 * number)
        yield Config(number)


def repeating(inv: Any) -> Iterator[Config]:
    yield Config(1)
    yield from itertools.repeat(Config(0))


def hanging(inv: Any) -> Iterator[Config]:
    yield Config(1)
    RELEASE.wait(60)


@pytest.mark.parametrize("space", [numbers, sleeping, hanging])
def test_a_space_without_an_end_costs_no_more_than_the_budget(space: Callable[[Any], Any]) -> None:
    RELEASE.clear()
    tuned = run_tuner(registry(space), 4.0)
    RELEASE.set()
    assert {0, 1} <= measured(tuned)
    assert len(tuned.entries) <= _measurement.MAX_VARIANTS + 2
    shortfall = tuned.records[0].provenance.shortfall
    assert shortfall is not None
    assert shortfall.budget_s == 4.0
    assert str(shortfall) in tuned.notes


def test_a_space_that_only_repeats_itself_is_at_its_end() -> None:
    tuned = run_tuner(registry(repeating), 10.0)
    assert measured(tuned) == {0, 1}
    assert tuned.records[0].provenance.shortfall is None


def test_a_space_that_hangs_at_once_leaves_the_heuristics_own() -> None:
    def space(inv: Any) -> Any:
        RELEASE.wait(60)
        return []

    RELEASE.clear()
    tuned = run_tuner(registry(space), 2.0)
    RELEASE.set()
    assert (measured(tuned), tuned.best.backend in ("kinds", "reference")) == ({0}, True)


def test_what_is_compiled_slowly_is_measured_all_the_same() -> None:
    # Longer than compiling may take, if there were anything else to measure.
    tuned = run_tuner(registry(lambda inv: [Config(1), Config(2)], lambda number: time.sleep(1.7)), 4.0)
    assert 0 in measured(tuned)


def test_a_fault_of_a_space_is_told_and_what_it_gave_before_takes_part() -> None:
    def space(inv: Any) -> Iterator[Config]:
        yield Config(1)
        raise KeyError("no table")

    tuned = run_tuner(registry(space), 20.0)
    assert measured(tuned) == {0, 1}
    assert "triple.kinds: config_space raised KeyError: 'no table'" in tuned.notes


# -- going on --------------------------------------------------------------------------------------------------------


class Compiler:
    """Compiles some in no time, and others never before it is released; it knows which."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.compiled: list[int] = []

    def __call__(self, number: int) -> None:
        if number > 1:
            self.released.wait(30)
        self.compiled.append(number)

    def release(self) -> None:
        """And wait for those that were left behind in it."""
        self.released.set()
        for thread in list(_threads._running):
            thread.join()
        self.compiled.clear()

    def registry(self) -> Registry:
        return registry(lambda inv: [Config(number) for number in range(1, 4)], self)


def call(fresh: Registry, budget_s: float) -> None:
    with policy_override(autotune=True, budget_s=budget_s):
        np.testing.assert_array_equal(fresh.call("triple", X), X * 3)


def shortfall_of(fresh: Registry) -> Shortfall | None:
    return fresh.plan("triple", X).choice.record.provenance.shortfall


def test_a_larger_budget_goes_on_where_a_smaller_one_ended() -> None:
    compiler = Compiler()
    fresh = compiler.registry()
    call(fresh, 2.0)
    assert shortfall_of(fresh) == Shortfall(3 - 1, 2.0)
    assert "2 configurations were not reached in 2 s, and a larger budget goes on there" in str(
        fresh.explain("triple", X)
    )
    compiler.release()
    call(fresh, 2.0)  # the same budget would come no further
    call(fresh, 1.0)
    assert shortfall_of(fresh) == Shortfall(2, 2.0)
    with policy_override(autotune=True, budget_s=20.0):
        assert "would be measured further: 2 configurations were not reached" in str(fresh.plan("triple", X))
    assert shortfall_of(fresh) == Shortfall(2, 2.0)  # a question changes nothing
    winner = fresh.plan("triple", X).choice.record
    call(fresh, 20.0)
    assert shortfall_of(fresh) is None
    beaten = {0, 1} - {winner.cfg.number if winner.backend == "kinds" else 0, 0}
    assert {2, 3} <= set(compiler.compiled)
    assert not beaten & set(compiler.compiled)  # what the winner had beaten is not measured again
    tried = dict(fresh.plan("triple", X).choice.record.provenance.tried)
    assert all(isinstance(tried[f"kinds {Config(number)}"], float) for number in range(4))


def test_the_winner_before_is_not_gone_on_with_again_where_another_kernel_wins_now() -> None:
    compiler = Compiler()
    fresh = compiler.registry()
    call(fresh, 2.0)
    (first, *_) = fresh.memory.items()[0][1]
    fresh.forget()
    other = "reference" if first.backend == "kinds" else "kinds"
    # As if another kernel had won, and by far.
    before = attrs.evolve(first.provenance, milliseconds=1e-9)
    inv = fresh.invocation("triple", X)
    for key in inv.tuning_keys:
        fresh.remember(key, Record(Config(7) if other == "kinds" else None, other, before))
    compiler.release()
    call(fresh, 20.0)
    with policy_override(autotune=True, budget_s=20.0):
        plan = fresh.plan("triple", X)
    assert plan.choice.record.provenance.shortfall is None
    assert plan.choice.record.provenance.milliseconds > 1e-9
    for record in fresh.memory.records(inv.key):
        assert record.provenance.shortfall is None


def test_a_shortfall_of_other_versions_is_left_as_it_is() -> None:
    compiler = Compiler()
    fresh = compiler.registry()
    call(fresh, 2.0)
    compiler.release()
    (key, *_), record = fresh.invocation("triple", X).tuning_keys, fresh.plan("triple", X).choice.record
    other = attrs.evolve(record.provenance, software={"jax": "0.0"})
    fresh.forget()
    fresh.remember(key, attrs.evolve(record, provenance=other))
    tuned = run_tuner(fresh, 20.0, record=attrs.evolve(record, provenance=other))
    assert measured(tuned) == {0, 1, 2, 3}
    assert {0, 1, 2, 3} <= set(compiler.compiled)  # nothing that was measured with them counts here


def test_what_was_laid_over_everything_is_not_gone_on_with() -> None:
    compiler = Compiler()
    fresh = compiler.registry()
    call(fresh, 2.0)
    compiler.release()
    records = ConfigCache()
    for key, found in fresh.memory.items():
        for record in found:
            records.put(key, record)
    with overlay_cache(records):
        call(fresh, 20.0)
    assert not {2, 3} & set(compiler.compiled)


def test_tuning_by_hand_goes_on_too() -> None:
    compiler = Compiler()
    fresh = compiler.registry()
    with recording() as invocations:
        jax.jit(lambda x: fresh.call("triple", x)).lower(X)
    autotune_recorded(invocations, budget_s=2.0)
    assert shortfall_of(fresh).unreached == 2
    compiler.release()
    assert autotune_recorded(invocations, budget_s=2.0).tuned == ()
    assert len(autotune_recorded(invocations, budget_s=20.0).tuned) == 1
    assert shortfall_of(fresh) is None


# -- nothing at all --------------------------------------------------------------------------------------------------


def test_where_nothing_was_measured_one_warning_says_so() -> None:
    fresh = registry(lambda inv: [Config(1)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(fresh, 1e-6)
    (warning,) = (w for w in caught if "measured" in str(w.message))
    told = str(warning.message)
    assert "triple(x=float32[8]) on cpu" in told
    assert "nothing could be measured within 1e-06 s (out of time: " in told
    assert "so it runs as it would without tuning" in told
    assert "policy_override(budget_s=...)" in told
