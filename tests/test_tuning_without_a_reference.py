"""Where no reference says what is right, and results differ, nobody wins: whatever keeps the reference from it."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attrs
import jax.numpy as jnp
import pytest

from ejkernel_core import Operation, Registry, Unsupported, hookimpl
from ejkernel_core._choice import candidates_for
from ejkernel_tuning import DIED, Entry, Trial, Tuned
from ejkernel_tuning._autotune import tune
from ejkernel_tuning._measurement import NO_WINNER

X = jnp.arange(1.0, 9.0)


@attrs.frozen
class Config:
    factor: int = 3


def refusing(inv: Any) -> Any:
    raise Unsupported("not on Mondays")


def faulty(inv: Any) -> Any:
    raise KeyError("no table")


def raising(x: Any) -> Any:
    raise MemoryError("all of it")


def too_large(x: Any) -> Any:
    return x * 3 + 0 * jnp.sort(jnp.sin(jnp.arange(2.0**38) + x[0]))[5]


def sleeping(x: Any) -> Any:
    time.sleep(6)
    return x * 3


def good(x: Any) -> Any:
    return x * 3


def nothing(inv: Any) -> Any:
    return None


def registry(reference: tuple[Callable[[Any], Any], Callable[[Any], Any]] | None, rank: int | None = 0) -> Registry:
    """``triple`` with a heuristic that doubles, and a right configuration; the reference runs nowhere without a rank."""
    fresh = Registry(plugins="ejkernel-tuning")

    @hookimpl
    def heuristic_cfg(inv):
        return Config(2)

    @hookimpl
    def config_space(inv):
        return [Config(2), Config(3)]

    @hookimpl
    def run_backend(inv, cfg):
        return inv["x"] * cfg.factor

    fresh.register(Operation(name="triple", signature=lambda x: None, outputs=lambda a: (a["x"],)))
    kernel = SimpleNamespace(
        Config=Config, heuristic_cfg=heuristic_cfg, config_space=config_space, run_backend=run_backend
    )
    fresh.register(kernel, "triple.kinds")
    if reference is not None:
        heuristic, run = reference

        @hookimpl
        def reference_cfg(inv):
            return heuristic(inv)

        @hookimpl
        def run_reference(inv):
            return run(inv["x"])

        plain = SimpleNamespace(
            PLATFORMS={"tpu": 0} if rank is None else {"cpu": rank},
            heuristic_cfg=reference_cfg,
            run_backend=run_reference,
        )
        fresh.register(plain, "triple.reference")
    return fresh


def run_tuner(fresh: Registry, budget_s: float = 20.0, **more: Any) -> Tuned:
    inv = fresh.invocation("triple", X)
    candidates, _ = candidates_for(inv, fresh.kernels(inv.op)[0], None, None)
    return tune(inv, candidates, fresh.judge(inv), budget_s, {"x": X}, calls=(1, 4), **more)


def check_no_config_is_selected(tuned: Tuned, why: str) -> None:
    assert tuned.records == ()
    assert tuned.best is None
    assert NO_WINNER in tuned.notes
    (checked,) = (note for note in tuned.notes if note.startswith("checked against"))
    assert why in checked


#: How the reference fails, with the budget it has and what is said of it.
FAILING = {
    "is not there": (None, 20.0, "there is no reference"),
    "refuses": ((refusing, good), 20.0, "triple.reference: refused, not on Mondays"),
    "fails to choose": ((faulty, good), 20.0, "triple.reference: heuristic_cfg raised KeyError"),
    "raises": ((nothing, raising), 20.0, "triple.reference: compiling raised MemoryError: all of it"),
    "is too large": ((nothing, too_large), 20.0, "triple.reference: "),
    "is out of time": ((nothing, sleeping), 4.0, "triple.reference: out of time"),
}


@pytest.mark.parametrize("how", FAILING)
@pytest.mark.parametrize("rank", [0, None], ids=["taking part", "beside the contest"])
def test_no_config_is_selected(how: str, rank: int | None) -> None:
    reference, budget_s, why = FAILING[how]
    check_no_config_is_selected(run_tuner(registry(reference, rank), budget_s), why)


def test_no_config_is_selected_where_the_reference_does_not_load(distribution: Any) -> None:
    distribution(
        "broken-dist",
        {"broken_kernel": "raise ImportError('no driver')"},
        kernels={"triple.reference": "broken_kernel"},
    )
    fresh = Registry(plugins="broken-dist")
    for name, plugin in {"triple.kinds": registry(None).kernel("triple", "kinds")}.items():
        hooks = plugin._hooks
        fresh.register(
            SimpleNamespace(
                Config=Config,
                heuristic_cfg=hooks.heuristic_cfg.get_hookimpls()[0].function,
                config_space=hooks.config_space.get_hookimpls()[0].function,
                run_backend=hooks.run_backend.get_hookimpls()[0].function,
            ),
            name,
        )
    fresh.register(Operation(name="triple", signature=lambda x: None, outputs=lambda a: (a["x"],)))
    tuned = run_tuner(fresh)
    check_no_config_is_selected(tuned, "there is no reference")
    assert any("the reference is broken" in note and "no driver" in note for note in tuned.notes)


def test_no_config_is_selected_where_the_reference_took_processes_with_it() -> None:
    dead = Entry("reference", None, reason=f"{DIED} while it was run, twice")
    check_no_config_is_selected(
        run_tuner(registry((nothing, good)), earlier=(dead,)), f"triple.reference: {DIED} while it was run"
    )


def test_a_suspected_reference_is_still_asked() -> None:
    tuned = run_tuner(registry((nothing, good)), suspects=(Trial("reference", None, "running"),))
    assert tuned.best.cfg in (Config(3), None)  # None is the reference's own
    assert "checked against triple.reference" in tuned.notes


@pytest.mark.parametrize("is_checked", [False, True])
def test_what_an_interrupted_contest_measured_counts_if_the_reference_saw_it(is_checked: bool) -> None:
    earlier = (Entry("kinds", Config(2), 1e-9, is_checked=is_checked),)
    tuned = run_tuner(registry((nothing, good)), earlier=earlier)
    assert (tuned.best.cfg == Config(2)) == is_checked


def test_no_config_is_selected_by_what_an_interrupted_contest_measured_without_a_reference() -> None:
    earlier = (Entry("kinds", Config(2), 1e-9), Entry("kinds", Config(3), reason="wrong: it is another"))
    check_no_config_is_selected(run_tuner(registry(None), earlier=earlier), "there is no reference")
    tuned = run_tuner(registry((nothing, good)), earlier=earlier)  # now there is one, and it knows better
    reasons = {e.cfg: e.reason for e in tuned.entries if e.backend == "kinds"}
    assert reasons[Config(2)].startswith("wrong")
    assert not reasons[Config(3)].startswith("wrong")


def test_where_all_agree_the_fastest_wins_without_a_reference() -> None:
    fresh = registry(None)
    tuned = run_tuner(fresh, configs=[Config(2)])
    assert tuned.best.cfg == Config(2)
