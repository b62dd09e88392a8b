"""The values that hooks get are the same for all of them, so no hook can change them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_core import (
    Axes,
    Choice,
    Operation,
    PluginError,
    Provenance,
    Record,
    Registry,
    hookimpl,
    overlay_cache,
    policy_override,
)
from ejkernel_core._hooks import KernelHooks, PolicyHooks, specifications
from ejkernel_core._policies import kernel_of
from ejkernel_core.extend import Earlier, Entry, Progress, Trial

X = jnp.arange(1.0, 6.0)


@attrs.frozen
class Config:
    factor: int = 2


def scale(x, *, mode="plain"): ...


AXES = Axes(
    {"x": "length"},
    {"out": "length"},
    whole="length",
    counts="length",
    when={("mode", "other"): {"out": "length"}},
    dtypes={"out": "float32"},
)


def mutable_parts(value: Any, path: str, seen: set[int]) -> Iterator[str]:
    """The paths of all containers in a value that can be changed."""
    if id(value) in seen or isinstance(value, Registry):
        return
    seen.add(id(value))
    if isinstance(value, (dict, list, set)):
        yield f"{path}: {type(value).__name__}"
    elif isinstance(value, Mapping) and not attrs.has(type(value)):
        for key, inner in value.items():
            yield from mutable_parts(inner, f"{path}[{key!r}]", seen)
    elif isinstance(value, tuple):
        for place, inner in enumerate(value):
            yield from mutable_parts(inner, f"{path}[{place}]", seen)
    elif attrs.has(type(value)):
        for field in attrs.fields(type(value)):
            if not field.name.startswith("_hooks"):  # pluggy's
                yield from mutable_parts(getattr(value, field.name), f"{path}.{field.name}", seen)
        for name in ("sizes",) if hasattr(value, "problem") else ("key", "tuning_keys") if hasattr(value, "op") else ():
            yield from mutable_parts(getattr(value, name, None), f"{path}.{name}", seen)


def observing_plugin(hooks: type, bodies: Mapping[str, Any], parts: dict[str, list[str]], **fields: Any) -> Any:
    """A plugin with all hooks of a kind. Each first notes what could be changed in its arguments."""

    def hook(name: str, specification: Any) -> Any:
        parameters = ", ".join(inspect.signature(specification).parameters)

        def observe(arguments: Mapping[str, Any]) -> Any:
            found = parts.setdefault(name, [])
            for argument, value in arguments.items():
                found += mutable_parts(value, argument, set())
            return bodies[name](SimpleNamespace(**arguments))

        namespace: dict[str, Any] = {"observe": observe}
        exec(f"def {name}({parameters}): return observe(locals())", namespace)
        return hookimpl(namespace[name])

    return SimpleNamespace(**{name: hook(name, spec) for name, spec in specifications(hooks).items()}, **fields)


def provenance() -> Provenance:
    return Provenance(
        when="2026-11-27T00:00:00+00:00", device="cpu", milliseconds=1.0, backends=("two",), software={"jax": "0"}
    )


def measure(arguments: Any) -> tuple[Record, ...]:
    entries = (Entry("two", Config(3), 1.0),)
    arguments.report(Progress(arguments.inv, entries, 1.0, 60.0, trials=(Trial("two", Config(3), "running"),)))
    return (Record(Config(3), "two", provenance()),)


@pytest.fixture
def registry() -> Registry:
    registry = Registry(plugins="")
    registry.register(
        Operation(name="scale", signature=scale, axes=AXES, other_names={"data": "x"}, reference="two"), "scale"
    )
    return registry


def test_no_hook_gets_a_container_that_it_can_change(registry: Registry) -> None:
    parts: dict[str, list[str]] = {}
    kernel_bodies = {
        "heuristic_cfg": lambda a: Config(),
        "config_space": lambda a: [Config(), Config(3)],
        "check_cfg": lambda a: None,
        "run_backend": lambda a: a.inv["x"] * a.cfg.factor,
    }
    policy_bodies = {
        "select_config": lambda a: None,
        "config_selected": lambda a: None,
        "tuning_started": lambda a: Earlier(),
        "tuning_progress": lambda a: None,
        "measure": measure,
        "settle": lambda a: a.choose(),
    }
    kernel = observing_plugin(KernelHooks, kernel_bodies, parts, Config=Config, PLATFORMS={"cpu": 10})
    policy = observing_plugin(PolicyHooks, policy_bodies, parts)
    registry.register(kernel, "scale.two")
    registry.register(policy, "observer")
    inv = registry.invocation("scale", jnp.ones(7))
    with overlay_cache({inv.key: Config(5)}), policy_override(autotune=True):
        np.testing.assert_array_equal(registry.call("scale", X), X * 3)
        np.testing.assert_array_equal(registry.call("scale", X, cfg=Config(4)), X * 4)
        registry.explain("scale", X)
        registry.choose(attrs.evolve(inv, processes=(0, 1)), None, None, policy_scope())
    assert {*parts} == {*kernel_bodies, *policy_bodies}
    assert {name: found for name, found in parts.items() if found} == {}


def policy_scope() -> Any:
    from ejkernel_core.extend import current_scope

    return current_scope()


def test_the_walk_finds_what_can_be_changed() -> None:
    value = attrs.make_class("Value", ["records"], frozen=True)(({"a": [1]}, (set(),)))
    assert [*mutable_parts(value, "v", set())] == ["v.records[0]: dict", "v.records[1][0]: set"]


def test_a_hook_that_clears_the_arguments_is_broken_and_the_others_run(registry: Registry) -> None:
    @hookimpl
    def heuristic_cfg(inv):
        inv.arguments.clear()

    @hookimpl
    def run_backend(inv, cfg):
        return inv["x"] * 2

    registry.register(SimpleNamespace(heuristic_cfg=heuristic_cfg, run_backend=run_backend), "scale.vandal")
    registry.register(SimpleNamespace(run_backend=run_backend, PLATFORMS={"cpu": 1}), "scale.two")
    np.testing.assert_array_equal(registry.call("scale", X), X * 2)
    (vandal,) = [v for v in registry.explain("scale", X).verdicts if v.name == "scale.vandal"]
    assert (vandal.status, "has no attribute 'clear'" in vandal.reason) == ("broken", True)


def test_the_arguments_of_an_invocation_are_a_copy(registry: Registry) -> None:
    arguments = {"x": X, "mode": "plain"}
    inv = attrs.evolve(registry.invocation("scale", X), arguments=arguments)
    arguments["mode"] = "other"
    assert inv["mode"] == "plain"
    with pytest.raises(TypeError):
        inv.arguments["mode"] = "other"  # type: ignore[index]
    assert inv.key == registry.invocation("scale", jax.ShapeDtypeStruct(X.shape, X.dtype)).key


def test_a_policy_that_clears_the_candidates_is_broken_and_the_heuristic_runs(registry: Registry) -> None:
    @hookimpl
    def run_backend(inv, cfg):
        return inv["x"] * 2

    @hookimpl
    def select_config(inv, candidates):
        candidates.clear()

    registry.register(SimpleNamespace(run_backend=run_backend), "scale.two")
    registry.register(SimpleNamespace(select_config=select_config), "vandal")
    plan = registry.plan("scale", X)
    assert (plan.kernel.name, plan.origin) == ("scale.two", "heuristic")
    (vandal,) = [v for v in plan.verdicts if v.name == "vandal"]
    assert vandal.reason == "select_config raised AttributeError: 'tuple' object has no attribute 'clear'"


def test_a_choice_without_its_kernel_is_an_error_in_words() -> None:
    with pytest.raises(PluginError, match="a model chose backend 'two', which is not among the candidates"):
        kernel_of(Choice("two", None, "a model"), ())


def test_a_settler_that_raises_stop_iteration_is_named(registry: Registry) -> None:
    @hookimpl
    def run_backend(inv, cfg):
        return inv["x"] * 2

    @hookimpl
    def settle(inv):
        return next(iter(()))

    registry.register(SimpleNamespace(run_backend=run_backend), "scale.two")
    registry.register(SimpleNamespace(settle=settle), "empty")
    inv = attrs.evolve(registry.invocation("scale", X), processes=(0, 1))
    with pytest.raises(PluginError, match=r"settle of empty \(registered at run time\) raised StopIteration"):
        registry.choose(inv, None, None, policy_scope())
