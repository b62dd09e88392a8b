"""No configuration is selected if results differ and no reference runs, for whatever reason it does not."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attrs
import jax.numpy as jnp
import pytest

from ejkernel_core import Operation, Registry, Unsupported, hookimpl
from ejkernel_tuning import Entry, Reason, Trial, Tuned
from ejkernel_tuning._autotune import tune
from ejkernel_tuning._measurement import NO_WINNER

X = jnp.arange(1.0, 9.0)


@attrs.frozen
class Config:
    factor: int = 3


def raise_unsupported(inv: Any) -> Any:
    raise Unsupported("not on Mondays")


def raise_key_error(inv: Any) -> Any:
    raise KeyError("no table")


def raise_memory_error(x: Any) -> Any:
    raise MemoryError("all of it")


def allocate_too_much(x: Any) -> Any:
    return x * 3 + 0 * jnp.sort(jnp.sin(jnp.arange(2.0**38) + x[0]))[5]


def sleep(x: Any) -> Any:
    time.sleep(6)
    return x * 3


def triple(x: Any) -> Any:
    return x * 3


def no_config(inv: Any) -> Any:
    return None


def make_registry(
    reference: tuple[Callable[[Any], Any], Callable[[Any], Any]] | None, rank: int | None = 0
) -> Registry:
    """``triple``, whose heuristic is wrong and doubles. Without a rank the reference does not run on this platform."""
    registry = Registry(plugins="ejkernel-tuning")

    @hookimpl
    def heuristic_cfg(inv):
        return Config(2)

    @hookimpl
    def config_space(inv):
        return [Config(2), Config(3)]

    @hookimpl
    def run_backend(inv, cfg):
        return inv["x"] * cfg.factor

    registry.register(Operation(name="triple", signature=lambda x: None, outputs=lambda a: (a["x"],)))
    kernel = SimpleNamespace(
        Config=Config, heuristic_cfg=heuristic_cfg, config_space=config_space, run_backend=run_backend
    )
    registry.register(kernel, "triple.kinds")
    if reference is not None:
        heuristic, run = reference

        @hookimpl
        def reference_cfg(inv):
            return heuristic(inv)

        @hookimpl
        def run_reference(inv):
            return run(inv["x"])

        reference_kernel = SimpleNamespace(
            PLATFORMS={"tpu": 0} if rank is None else {"cpu": rank},
            heuristic_cfg=reference_cfg,
            run_backend=run_reference,
        )
        registry.register(reference_kernel, "triple.reference")
    return registry


def run_tuner(registry: Registry, budget_s: float = 20.0, **keywords: Any) -> Tuned:
    inv = registry.invocation("triple", X)
    candidates, _ = registry.candidates(inv)
    return tune(inv, candidates, registry.reference(inv), budget_s, {"x": X}, calls=(1, 4), **keywords)


def check_no_config_is_selected(tuned: Tuned, reason: str) -> None:
    assert tuned.records == ()
    assert tuned.best is None
    assert NO_WINNER in tuned.notes
    (check_note,) = (note for note in tuned.notes if note.startswith("checked against"))
    assert reason in check_note


#: References that fail: the hooks, the budget, and the reason in the notes.
FAILING_REFERENCES = {
    "is not there": (None, 20.0, "there is no reference"),
    "refuses": ((raise_unsupported, triple), 20.0, "triple.reference: refused, not on Mondays"),
    "fails to choose": ((raise_key_error, triple), 20.0, "triple.reference: heuristic_cfg raised KeyError"),
    "raises": ((no_config, raise_memory_error), 20.0, "triple.reference: compiling raised MemoryError: all of it"),
    "is too large": ((no_config, allocate_too_much), 20.0, "triple.reference: "),
    "is out of time": ((no_config, sleep), 4.0, "triple.reference: out of time"),
}


@pytest.mark.parametrize("fault", FAILING_REFERENCES)
@pytest.mark.parametrize("rank", [0, None], ids=["taking part", "beside the contest"])
def test_no_config_is_selected_if_the_reference_fails(fault: str, rank: int | None) -> None:
    reference, budget_s, reason = FAILING_REFERENCES[fault]
    check_no_config_is_selected(run_tuner(make_registry(reference, rank), budget_s), reason)


def test_no_config_is_selected_if_the_reference_does_not_load(distribution: Any) -> None:
    distribution(
        "broken-dist",
        {"broken_kernel": "raise ImportError('no driver')"},
        kernels={"triple.reference": "broken_kernel"},
    )
    registry = Registry(plugins="broken-dist")
    for name, plugin in {"triple.kinds": make_registry(None).kernel("triple", "kinds")}.items():
        hooks = plugin._hooks
        registry.register(
            SimpleNamespace(
                Config=Config,
                heuristic_cfg=hooks.heuristic_cfg.get_hookimpls()[0].function,
                config_space=hooks.config_space.get_hookimpls()[0].function,
                run_backend=hooks.run_backend.get_hookimpls()[0].function,
            ),
            name,
        )
    registry.register(Operation(name="triple", signature=lambda x: None, outputs=lambda a: (a["x"],)))
    tuned = run_tuner(registry)
    check_no_config_is_selected(tuned, "there is no reference")
    assert any("the reference is broken" in note and "no driver" in note for note in tuned.notes)


def test_no_config_is_selected_if_processes_crashed_in_the_reference() -> None:
    entry = Entry("reference", None, reason=f"{Reason.CRASHED} while it was run, twice")
    check_no_config_is_selected(
        run_tuner(make_registry((no_config, triple)), earlier=(entry,)),
        f"triple.reference: {Reason.CRASHED} while it was run",
    )


def test_a_reference_that_may_crash_is_still_run() -> None:
    tuned = run_tuner(make_registry((no_config, triple)), crashed=(Trial("reference", None, "running"),))
    assert tuned.best.cfg in (Config(3), None)  # None is the configuration of the reference
    assert "checked against triple.reference" in tuned.notes


@pytest.mark.parametrize("is_checked", [False, True])
def test_an_earlier_entry_counts_only_if_the_reference_checked_it(is_checked: bool) -> None:
    earlier = (Entry("kinds", Config(2), 1e-9, is_checked=is_checked),)
    tuned = run_tuner(make_registry((no_config, triple)), earlier=earlier)
    assert (tuned.best.cfg == Config(2)) == is_checked


def test_earlier_entries_without_a_reference_are_checked_again() -> None:
    earlier = (Entry("kinds", Config(2), 1e-9), Entry("kinds", Config(3), reason="wrong: it is another"))
    check_no_config_is_selected(run_tuner(make_registry(None), earlier=earlier), "there is no reference")
    tuned = run_tuner(make_registry((no_config, triple)), earlier=earlier)  # now a reference checks the results
    reasons = {e.cfg: e.reason for e in tuned.entries if e.backend == "kinds"}
    assert reasons[Config(2)].startswith("wrong")
    assert not reasons[Config(3)].startswith("wrong")


def test_without_a_reference_the_fastest_is_selected_if_results_agree() -> None:
    registry = make_registry(None)
    tuned = run_tuner(registry, configs=[Config(2)])
    assert tuned.best.cfg == Config(2)
