"""``plan`` and ``explain`` measure nothing: they say what a call would measure."""

from __future__ import annotations

from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_core import Operation, Registry, hookimpl, policy_override
from ejkernel_tuning import Progress

X = jnp.linspace(0.1, 1.0, 16)


@attrs.frozen
class Config:
    factor: int = 1


def kernel(heuristic: Config) -> SimpleNamespace:
    @hookimpl
    def heuristic_cfg(inv):
        return heuristic

    @hookimpl
    def config_space(inv):
        return [Config(1), Config(2)]

    @hookimpl
    def run_backend(inv, cfg):
        return inv["x"] * 3

    return SimpleNamespace(
        Config=Config, heuristic_cfg=heuristic_cfg, config_space=config_space, run_backend=run_backend
    )


@pytest.fixture
def registry() -> Registry:
    registry = Registry(plugins="ejkernel-tuning")
    registry.register(
        Operation(
            name="triple",
            signature=lambda x: None,
            outputs=lambda a: (a["x"],),
            reference="one",
        )
    )
    registry.register(kernel(Config(1)), "triple.one")
    registry.register(kernel(Config(2)), "triple.two")
    return registry


@pytest.fixture
def reports(registry: Registry) -> list[Progress]:
    reports: list[Progress] = []

    @hookimpl
    def select_config(inv):
        return None

    @hookimpl
    def tuning_progress(progress):
        reports.append(progress)

    registry.register(SimpleNamespace(select_config=select_config, tuning_progress=tuning_progress), "listener")
    return reports


REASON = "would be measured: 2 kernels; this is the plan until then"


@pytest.mark.parametrize("method", ["plan", "explain"])
def test_plan_and_explain_say_what_would_be_measured(registry: Registry, reports: list[Progress], method: str) -> None:
    with policy_override(autotune=True):
        answer: Any = getattr(registry, method)("triple", X)
    plan = answer if method == "plan" else answer.plan
    assert (plan.origin, plan.cfg, plan.kernel.name) == ("heuristic", Config(1), "triple.one")
    assert [str(v) for v in plan.verdicts if v.name == "tuner"] == [
        f"tuner (ejkernel-tuning {version('ejkernel-tuning')}): no answer, {REASON}"
    ]
    assert REASON in str(answer)
    assert reports == []
    assert len(registry.memory) == 0


def test_the_reason_for_one_kernel_is_in_the_singular(registry: Registry) -> None:
    with policy_override(autotune=True):
        plan = registry.plan("triple", X, backend="two")
    assert "would be measured: 1 kernel; this is the plan until then" in str(plan)


def test_a_call_after_plan_measures_eagerly_and_under_jit(registry: Registry) -> None:
    for number, call in enumerate((registry.call, jax.jit(lambda op, x: registry.call(op, x), static_argnums=0))):
        x = jnp.ones(8 + number)
        with policy_override(autotune=True):
            registry.plan("triple", x)
            np.testing.assert_array_equal(call("triple", x), x * 3)
            assert registry.plan("triple", x).origin == "memory"
    assert len(registry.memory) == 2
