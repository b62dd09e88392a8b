"""A question is answered without measuring: ``plan`` and ``explain`` say what a call would do."""

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
    fresh = Registry(plugins="ejkernel-tuning")
    fresh.register(
        Operation(
            name="triple",
            signature=lambda x: None,
            outputs=lambda a: (a["x"],),
            reference="one",
        )
    )
    fresh.register(kernel(Config(1)), "triple.one")
    fresh.register(kernel(Config(2)), "triple.two")
    return fresh


@pytest.fixture
def heard(registry: Registry) -> list[Progress]:
    progress_heard: list[Progress] = []

    @hookimpl
    def select_config(inv):
        return None

    @hookimpl
    def tuning_progress(progress):
        progress_heard.append(progress)

    registry.register(SimpleNamespace(select_config=select_config, tuning_progress=tuning_progress), "listener")
    return progress_heard


WOULD = "would be measured: 2 kernels; this is the plan until then"


@pytest.mark.parametrize("ask", ["plan", "explain"])
def test_a_question_says_what_would_be_measured(registry: Registry, heard: list[Progress], ask: str) -> None:
    with policy_override(autotune=True):
        answer: Any = getattr(registry, ask)("triple", X)
    plan = answer if ask == "plan" else answer.plan
    assert (plan.origin, plan.cfg, plan.kernel.name) == ("heuristic", Config(1), "triple.one")
    assert [str(v) for v in plan.verdicts if v.name == "tuner"] == [
        f"tuner (ejkernel-tuning {version('ejkernel-tuning')}): no answer, {WOULD}"
    ]
    assert WOULD in str(answer)
    assert heard == []
    assert len(registry.memory) == 0


def test_one_kernel_is_told_as_one(registry: Registry) -> None:
    with policy_override(autotune=True):
        plan = registry.plan("triple", X, backend="two")
    assert "would be measured: 1 kernel; this is the plan until then" in str(plan)


def test_a_call_measures_eagerly_and_under_jit_whatever_was_asked_before(registry: Registry) -> None:
    for number, call in enumerate((registry.call, jax.jit(lambda op, x: registry.call(op, x), static_argnums=0))):
        x = jnp.ones(8 + number)
        with policy_override(autotune=True):
            registry.plan("triple", x)
            np.testing.assert_array_equal(call("triple", x), x * 3)
            assert registry.plan("triple", x).origin == "memory"
    assert len(registry.memory) == 2
