"""A good plugin among all that are broken, one of each kind: its calls are right, and every broken one is named."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_core import PluginError, Registry, policy_override
from ejkernel_core.__main__ import listing
from tests.conftest import KERNEL, OPERATION, MakeDistribution
from tests.test_plugin_traps import BROKEN

X = np.array([1.0, 2.0, 3.0], np.float32)

TYPED = """
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


def typed(old: str = "", new: str = "", space: str = "") -> str:
    """The kernel with a change, and with this body of a ``config_space``."""
    hook = f"\n    @hookimpl\n    def config_space(inv):\n        {space}\n" if space else ""
    return TYPED.replace(old, new, 1) + hook


#: What is found where the kernel is loaded, and by whom it is claimed.
LOADED = {
    **BROKEN,
    "config is not frozen": (
        typed("@attrs.frozen", "@attrs.define"),
        "Config takes values that cannot be changed; a Config is not",
    ),
    "platforms": (KERNEL + "\n    PLATFORMS = ['cpu']\n", "PLATFORMS takes {platform: rank} with whole numbers"),
}
#: What is found where the kernel is asked.
ASKED = {
    "raising": (typed("return Config()", "raise ZeroDivisionError('blocks of 0')"), "ZeroDivisionError: blocks of 0"),
    "exiting": (
        typed("return Config()", "raise SystemExit('no licence')"),
        "heuristic_cfg raised SystemExit: no licence",
    ),
    "panicking": (
        typed("@hookimpl", PANIC + "@hookimpl").replace("return Config()", "raise PanicException('index')"),
        "heuristic_cfg raised PanicException: index",
    ),
    "another type": (typed("return Config()", "return 3"), "heuristic_cfg gives a value of type int, not its Config"),
    "holding a list": (
        typed("return Config()", "return Config([1])"),
        "heuristic_cfg gives what can be changed: a Config",
    ),
    "without a type": (
        KERNEL.replace("return None", "return {'n': 2}"),
        "heuristic_cfg gives what can be changed: a dict has no hash",
    ),
}
#: What is found where the kernel is asked for its space, and breaks no call.
SPACED = {
    "space raising": (typed(space="raise ValueError('no blocks')"), "config_space raised ValueError: no blocks"),
    "space of others": (typed(space="return [Config(1), 3]"), "config_space gives a value of type int, not its Config"),
    "space without end": (
        typed(space="while True: yield None"),
        "config_space gives a value of type NoneType, not its Config",
    ),
    "no space": (typed(space="return None"), "config_space raised TypeError: 'NoneType' object is not iterable"),
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
#: The module, and what is told where it is loaded.
POLICIES_LOADED = {
    "policy import": ("import no_such_module_anywhere", "No module named 'no_such_module_anywhere'"),
    "policy none": ("select_config = None", "the hook select_config is missing"),
    "policy skip": ("import pytest\n\npytest.skip('no device', allow_module_level=True)", "Skipped: no device"),
}
POLICIES_ASKED = {
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
    "operation of nothing": ("operation = 3", "is a int, no Operation"),
}


def slug(name: str) -> str:
    return name.replace(" ", "_")


@pytest.fixture
def registry(distribution: MakeDistribution) -> Registry:
    """The good one, and every broken one from a distribution of its own."""
    good = KERNEL + "\n    PLATFORMS = {'cpu': 90}\n"
    distribution(
        "mixed-good-dist",
        {"mixed_operation": OPERATION, "mixed_good": good, "mixed_reference": KERNEL},
        operations={"double": "mixed_operation:operation"},
        kernels={"double.good": "mixed_good", "double.reference": "mixed_reference"},
    )
    sources = {**LOADED, **ASKED, **SPACED, "half": (KERNEL, ""), "twin": (KERNEL, ""), "other twin": (KERNEL, "")}
    names = {"half": "double.", "twin": "double.twin", "other twin": "double.twin"}
    for what, (source, _) in sources.items():
        module = f"mixed_{slug(what)}"
        kernels = {names.get(what, f"double.{slug(what)}"): module}
        distribution(f"dist-of-{slug(what)}", {module: source}, kernels=kernels)
    for what, (source, _) in {**POLICIES_LOADED, **POLICIES_ASKED}.items():
        distribution(
            f"dist-of-{slug(what)}", {f"mixed_{slug(what)}": source}, policies={slug(what): f"mixed_{slug(what)}"}
        )
    for what, (source, _) in OPERATIONS.items():
        module = f"mixed_{slug(what)}"
        distribution(f"dist-of-{slug(what)}", {module: source}, operations={slug(what): f"{module}:operation"})
    everybody = {point.dist.name for group in GROUPS for point in metadata.entry_points(group=group) if point.dist}
    return Registry(plugins=", ".join(name for name in everybody if name.startswith(("dist-of-", "mixed-"))))


GROUPS = ("ejkernel.kernels", "ejkernel.operations", "ejkernel.policies")


def check_the_good_one(registry: Registry) -> None:
    def call(x: Any) -> jax.Array:
        return registry.call("double", x)

    np.testing.assert_array_equal(call(X), 2 * X)
    np.testing.assert_array_equal(jax.jit(call)(X), 2 * X)
    np.testing.assert_array_equal(jax.vmap(call)(jnp.stack([X, 3 * X])), [2 * X, 6 * X])
    np.testing.assert_array_equal(jax.grad(lambda x: (call(x) * X).sum())(X), 2 * X)
    np.testing.assert_array_equal(registry.call("double", X, backend="good"), 2 * X)


def told(registry: Registry) -> dict[str, tuple[str, list[str]]]:
    """What an explanation says of everybody but the chosen one: provider, and status with reason, by name."""
    plan = registry.explain("double", X).plan
    assert plan is not None
    assert (plan.kernel.name, plan.origin) == ("double.good", "heuristic")
    found: dict[str, tuple[str, list[str]]] = {}
    for verdict in plan.verdicts:
        found.setdefault(verdict.name, (verdict.provider, []))[1].append(f"{verdict.status}: {verdict.reason}")
    return found


def test_the_good_one_is_right_and_every_broken_one_is_named(registry: Registry) -> None:
    check_the_good_one(registry)
    verdicts = told(registry)
    assert verdicts["double.good"] == ("mixed-good-dist 1.0", ["chosen: "])
    assert verdicts["double.reference"] == ("mixed-good-dist 1.0", ["able: "])
    for status, faults in (("broken", LOADED), ("broken", ASKED), ("able", SPACED)):
        for what, (_, reason) in faults.items():
            provider, (line,) = verdicts[f"double.{slug(what)}"]
            assert provider == f"dist-of-{slug(what)} 1.0"
            assert line.startswith(f"{status}: ")
            assert reason in line
            if status == "broken":
                with pytest.raises(PluginError) as caught:
                    registry.call("double", X, backend=slug(what))
                assert provider in str(caught.value)
            else:
                np.testing.assert_array_equal(registry.call("double", X, backend=slug(what)), 2 * X)
    assert verdicts["double."][0] == "dist-of-half 1.0"
    assert all(name in verdicts["double.twin"][1][0] for name in ("dist-of-twin 1.0", "dist-of-other_twin 1.0"))
    for what, (_, reason) in POLICIES_LOADED.items():
        provider, (line,) = verdicts[slug(what)]
        assert (provider, line.startswith("broken: "), reason in line) == (f"dist-of-{slug(what)} 1.0", True, True)
    for what, (_, reasons) in POLICIES_ASKED.items():
        if what != "policy forgetting":
            assert verdicts[slug(what)] == (f"dist-of-{slug(what)} 1.0", [f"broken: {reason}" for reason in reasons])


def test_it_is_measured_among_them(registry: Registry) -> None:
    # A space without an end is looked at for as long as the budget lasts.
    here = {entry.distribution for entry, _ in registry.inspect()} - {"dist-of-space_without_end"}
    registry = Registry(plugins=", ".join([*here, "ejkernel-tuning"]))
    with policy_override(autotune=True, budget_s=60):
        np.testing.assert_array_equal(registry.call("double", X), 2 * X)
    np.testing.assert_array_equal(jax.grad(lambda x: (registry.call("double", x) * X).sum())(X), 2 * X)
    plan = registry.explain("double", X).plan
    assert plan is not None
    assert plan.origin == "memory"
    lines = {f"{v.status}: {v.reason}" for v in plan.verdicts if v.name == "policy_forgetting"}
    assert lines == {f"broken: {reason}" for reason in POLICIES_ASKED["policy forgetting"][1]}


def test_the_listing_names_every_broken_one(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ejkernel_core.__main__.registry", registry)
    lines = [" ".join(line.split()) for line in listing().splitlines()]
    at = {line: lines[number + 1 : number + 2] for number, line in enumerate(lines)}
    broken = {f"double.{slug(what)}": (what, reason) for what, (_, reason) in LOADED.items()}
    broken |= {slug(what): (what, reason) for what, (_, reason) in {**POLICIES_LOADED, **OPERATIONS}.items()}
    broken |= {"double.": ("half", "a kernel is named <operation>.<backend>")}
    for name, (what, reason) in broken.items():
        (line,) = at[f"{name} dist-of-{slug(what)} 1.0"]
        assert line.startswith("broken: ")
        assert " ".join(reason.split()) in line
    for twin in ("twin", "other_twin"):
        (line,) = at[f"double.twin dist-of-{twin} 1.0"]
        assert line.startswith("broken: 'double.twin' is claimed by ")
    for name in ("double", "double.good", "double.reference"):
        assert not at[f"{name} mixed-good-dist 1.0"][0].startswith("broken")
