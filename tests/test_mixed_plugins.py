"""A valid kernel together with broken plugins of every kind: its calls are right, and all broken ones are reported."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_core import PluginError, Registry, policy_override
from tests.distributions import KERNEL, OPERATION, MakeDistribution
from tests.test_plugin_traps import BROKEN_KERNELS

X = np.array([1.0, 2.0, 3.0], np.float32)

TYPED_KERNEL = """
    import attrs
    from ejkernel_core import Unsupported, hookimpl

    @attrs.frozen
    class Config:
        n: object = 2

    @hookimpl
    def heuristic_cfg(inv):
        return Config()

    @hookimpl
    def run_backend(inv, cfg):
        return inv["x"] * 2
"""
PANIC = "class PanicException(BaseException): ...\n\n    "


def typed_kernel(old: str = "", new: str = "", space: str = "") -> str:
    """The kernel with a change, and with a ``config_space`` that has the body ``space``."""
    hook = f"\n    @hookimpl\n    def config_space(inv):\n        {space}\n" if space else ""
    return TYPED_KERNEL.replace(old, new, 1) + hook


#: Kernels that are broken when they are loaded: the module, and the reason.
BROKEN_AT_LOAD = {
    **BROKEN_KERNELS,
    "config is not frozen": (
        typed_kernel("@attrs.frozen", "@attrs.define"),
        "Config takes values that cannot be changed; a Config is not",
    ),
    "platforms": (KERNEL + "\n    PLATFORMS = ['cpu']\n", "PLATFORMS takes {platform: rank} with whole numbers"),
}
#: Kernels whose ``heuristic_cfg`` is broken: the module, and the reason.
BROKEN_HEURISTICS = {
    "raising": (
        typed_kernel("return Config()", "raise ZeroDivisionError('blocks of 0')"),
        "ZeroDivisionError: blocks of 0",
    ),
    "exiting": (
        typed_kernel("return Config()", "raise SystemExit('no licence')"),
        "heuristic_cfg raised SystemExit: no licence",
    ),
    "panicking": (
        typed_kernel("@hookimpl", PANIC + "@hookimpl").replace("return Config()", "raise PanicException('index')"),
        "heuristic_cfg raised PanicException: index",
    ),
    "another type": (
        typed_kernel("return Config()", "return 3"),
        "heuristic_cfg gives a value of type int, not its Config",
    ),
    "holding a list": (
        typed_kernel("return Config()", "return Config([1])"),
        "heuristic_cfg gives what can be changed: a Config",
    ),
    "without a type": (
        KERNEL.replace("return None", "return {'n': 2}"),
        "heuristic_cfg gives what can be changed: a dict has no hash",
    ),
}
#: Kernels whose ``config_space`` is broken, which breaks no call: the module, and the reason.
BROKEN_SPACES = {
    "space raising": (typed_kernel(space="raise ValueError('no blocks')"), "config_space raised ValueError: no blocks"),
    "space of others": (
        typed_kernel(space="return [Config(1), 3]"),
        "config_space gives a value of type int, not its Config",
    ),
    "space without end": (
        typed_kernel(space="while True: yield None"),
        "config_space gives a value of type NoneType, not its Config",
    ),
    "no space": (typed_kernel(space="return None"), "config_space raised TypeError: 'NoneType' object is not iterable"),
}

POLICY = """
    from ejkernel_core import Choice, hookimpl

    @hookimpl
    def select_config(inv, candidates):
        {}

    @hookimpl
    def config_selected(inv):
        {}

    @hookimpl
    def tuning_started(inv):
        {}

    @hookimpl
    def tuning_progress(inv):
        {}
"""
#: Policies that are broken when they are loaded: the module, and the reason.
POLICIES_BROKEN_AT_LOAD = {
    "policy import": ("import no_such_module_anywhere", "No module named 'no_such_module_anywhere'"),
    "policy none": ("select_config = None", "the hook select_config is missing"),
    "policy skip": ("import pytest\n\npytest.skip('no device', allow_module_level=True)", "Skipped: no device"),
}
POLICIES_BROKEN_WHEN_CALLED = {
    "policy raising": (
        POLICY.format("raise KeyError('boom')", *["pass"] * 3),
        ["select_config raised KeyError: 'boom'"],
    ),
    "policy exiting": (POLICY.format("raise SystemExit(3)", *["pass"] * 3), ["select_config raised SystemExit: 3"]),
    "policy guessing": (
        POLICY.format("return Choice('good', [1], 'a guess')", *["pass"] * 3),
        ["a guess chose what can be changed for double.good: a list has no hash"],
    ),
    "policy forgetting": (
        POLICY.format("return None", *["raise SystemExit('full')"] * 3),
        [f"{hook} raised SystemExit: full" for hook in ("config_selected", "tuning_started", "tuning_progress")],
    ),
}
OPERATIONS = {
    "operation import": ("1/0", "ZeroDivisionError: division by zero"),
    "operation of nothing": ("operation = 3", "is of type int, not an Operation"),
}


def slug(name: str) -> str:
    return name.replace(" ", "_")


@pytest.fixture
def registry(distribution: MakeDistribution) -> Registry:
    """A valid kernel and all broken plugins, each from its own distribution."""
    valid_kernel = KERNEL + "\n    PLATFORMS = {'cpu': 90}\n"
    distribution(
        "mixed-good-dist",
        {"mixed_operation": OPERATION, "mixed_good": valid_kernel, "mixed_reference": KERNEL},
        operations={"double": "mixed_operation:operation"},
        kernels={"double.good": "mixed_good", "double.reference": "mixed_reference"},
    )
    sources = {
        **BROKEN_AT_LOAD,
        **BROKEN_HEURISTICS,
        **BROKEN_SPACES,
        "half": (KERNEL, ""),
        "twin": (KERNEL, ""),
        "other twin": (KERNEL, ""),
    }
    names = {"half": "double.", "twin": "double.twin", "other twin": "double.twin"}
    for case, (source, _) in sources.items():
        module = f"mixed_{slug(case)}"
        kernels = {names.get(case, f"double.{slug(case)}"): module}
        distribution(f"dist-of-{slug(case)}", {module: source}, kernels=kernels)
    for case, (source, _) in {**POLICIES_BROKEN_AT_LOAD, **POLICIES_BROKEN_WHEN_CALLED}.items():
        distribution(
            f"dist-of-{slug(case)}", {f"mixed_{slug(case)}": source}, policies={slug(case): f"mixed_{slug(case)}"}
        )
    for case, (source, _) in OPERATIONS.items():
        module = f"mixed_{slug(case)}"
        distribution(f"dist-of-{slug(case)}", {module: source}, operations={slug(case): f"{module}:operation"})
    distributions = {point.dist.name for group in GROUPS for point in metadata.entry_points(group=group) if point.dist}
    return Registry(plugins=", ".join(name for name in distributions if name.startswith(("dist-of-", "mixed-"))))


GROUPS = ("ejkernel.kernels", "ejkernel.operations", "ejkernel.policies")


def check_valid_kernel(registry: Registry) -> None:
    def call(x: Any) -> jax.Array:
        return registry.call("double", x)

    np.testing.assert_array_equal(call(X), 2 * X)
    np.testing.assert_array_equal(jax.jit(call)(X), 2 * X)
    np.testing.assert_array_equal(jax.vmap(call)(jnp.stack([X, 3 * X])), [2 * X, 6 * X])
    np.testing.assert_array_equal(jax.grad(lambda x: (call(x) * X).sum())(X), 2 * X)
    np.testing.assert_array_equal(registry.call("double", X, backend="good"), 2 * X)


def verdicts_by_name(registry: Registry) -> dict[str, tuple[str, list[str]]]:
    """The verdicts of an explanation by name: provider, and the statuses with reasons."""
    plan = registry.explain("double", X).plan
    assert plan is not None
    assert (plan.kernel.name, plan.origin) == ("double.good", "heuristic")
    verdicts: dict[str, tuple[str, list[str]]] = {}
    for verdict in plan.verdicts:
        verdicts.setdefault(verdict.name, (verdict.provider, []))[1].append(f"{verdict.status}: {verdict.reason}")
    return verdicts


def test_the_valid_kernel_runs_and_all_broken_plugins_are_reported(registry: Registry) -> None:
    check_valid_kernel(registry)
    verdicts = verdicts_by_name(registry)
    assert verdicts["double.good"] == ("mixed-good-dist 1.0", ["chosen: "])
    assert verdicts["double.reference"] == ("mixed-good-dist 1.0", ["able: with a lower rank"])
    for status, faults in (("broken", BROKEN_AT_LOAD), ("broken", BROKEN_HEURISTICS), ("able", BROKEN_SPACES)):
        for case, (_, reason) in faults.items():
            provider, (line,) = verdicts[f"double.{slug(case)}"]
            assert provider == f"dist-of-{slug(case)} 1.0"
            assert line.startswith(f"{status}: ")
            assert reason in line
            if status == "broken":
                with pytest.raises(PluginError) as error:
                    registry.call("double", X, backend=slug(case))
                assert provider in str(error.value)
            else:
                np.testing.assert_array_equal(registry.call("double", X, backend=slug(case)), 2 * X)
    assert verdicts["double."][0] == "dist-of-half 1.0"
    assert all(name in verdicts["double.twin"][1][0] for name in ("dist-of-twin 1.0", "dist-of-other_twin 1.0"))
    for case, (_, reason) in POLICIES_BROKEN_AT_LOAD.items():
        provider, (line,) = verdicts[slug(case)]
        assert (provider, line.startswith("broken: "), reason in line) == (f"dist-of-{slug(case)} 1.0", True, True)
    for case, (_, reasons) in POLICIES_BROKEN_WHEN_CALLED.items():
        if case != "policy forgetting":
            assert verdicts[slug(case)] == (f"dist-of-{slug(case)} 1.0", [f"broken: {reason}" for reason in reasons])


def test_the_tuner_measures_despite_broken_plugins(registry: Registry) -> None:
    # The tuner would read an endless space until its budget is spent.
    distributions = {entry.distribution for entry, _ in registry.inspect()} - {"dist-of-space_without_end"}
    registry = Registry(plugins=", ".join([*distributions, "ejkernel-tuning"]))
    with policy_override(autotune=True, budget_s=60):
        np.testing.assert_array_equal(registry.call("double", X), 2 * X)
    np.testing.assert_array_equal(jax.grad(lambda x: (registry.call("double", x) * X).sum())(X), 2 * X)
    plan = registry.explain("double", X).plan
    assert plan is not None
    assert plan.origin == "memory"
    lines = {f"{v.status}: {v.reason}" for v in plan.verdicts if v.name == "policy_forgetting"}
    assert lines == {f"broken: {reason}" for reason in POLICIES_BROKEN_WHEN_CALLED["policy forgetting"][1]}


def test_an_inspection_reports_all_broken_plugins(registry: Registry) -> None:
    reasons: dict[str, list[str]] = {}
    for entry, fault in registry.inspect():
        reasons.setdefault(f"{entry.name} {entry.provider}", []).append(" ".join(fault.reason.split()) if fault else "")
    broken = {f"double.{slug(case)}": (case, reason) for case, (_, reason) in BROKEN_AT_LOAD.items()}
    broken |= {slug(case): (case, reason) for case, (_, reason) in {**POLICIES_BROKEN_AT_LOAD, **OPERATIONS}.items()}
    broken |= {"double.": ("half", "a kernel is named <operation>.<backend>")}
    for name, (case, reason) in broken.items():
        (text,) = reasons[f"{name} dist-of-{slug(case)} 1.0"]
        assert " ".join(reason.split()) in text
    for twin in ("twin", "other_twin"):
        (text,) = reasons[f"double.twin dist-of-{twin} 1.0"]
        assert text.startswith("'double.twin' is claimed by ")
    for name in ("double", "double.good", "double.reference"):
        assert reasons[f"{name} mixed-good-dist 1.0"] == [""]
