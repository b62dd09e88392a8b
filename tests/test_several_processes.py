"""A program of several processes: the hook ``settle`` has the whole choice; without it, only what is the same everywhere
counts, and nothing is measured.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel_cache import PackagedRecords
from ejkernel_core import (
    Choice,
    Invocation,
    NoConfig,
    NoKernel,
    Operation,
    Plan,
    PluginError,
    Provenance,
    Record,
    Registry,
    UnknownBackend,
    Unsupported,
    _processes,
    hookimpl,
    overlay_cache,
    policy_override,
)
from ejkernel_core._devices import processes_of
from ejkernel_core._jax_versions import lowering_processes
from ejkernel_core.extend import Plugins, current_scope

X = jnp.arange(1.0, 6.0)


@attrs.frozen
class Config:
    factor: int = 2


def scale(x): ...


@hookimpl
def run_backend(inv, cfg):
    return inv["x"] * cfg.factor


def kernel(refusal: str | None = None) -> SimpleNamespace:
    @hookimpl
    def heuristic_cfg(inv):
        if refusal:
            raise Unsupported(refusal)
        return Config()

    return SimpleNamespace(Config=Config, heuristic_cfg=heuristic_cfg, run_backend=run_backend)


def make_registry(refusal: str | None = None) -> Registry:
    """The operation ``scale`` with the kernel ``scale.one``, whose heuristic is the factor 2."""
    registry = Registry(plugins="")
    registry.register(Operation(name="scale", signature=scale, outputs=lambda a: (a["x"],)))
    registry.register(kernel(refusal), "scale.one")
    return registry


def provenance(backends: tuple[str, ...] = ("one",)) -> Provenance:
    return Provenance(when="2026-11-20T12:00:00+00:00", device="cpu", milliseconds=1.0, backends=backends)


def policy(factor: int, **attributes: Any) -> SimpleNamespace:
    """A policy that answers with a factor; ``processes`` has those of each invocation that it was asked for."""
    processes: list[Any] = []

    @hookimpl
    def select_config(inv, candidates):
        processes.append(inv.processes)
        return Choice("one", Config(factor), "a policy")

    return SimpleNamespace(select_config=select_config, processes=processes, **attributes)


def tuner(factor: int) -> SimpleNamespace:
    """A tuner that finds this factor; ``measured`` has the keys of what it has measured."""
    measured: list[Any] = []

    @hookimpl
    def measure(inv):
        measured.append(inv.key)
        return (Record(Config(factor), "one", provenance()),)

    return SimpleNamespace(measure=measure, measured=measured)


def settler(function: Callable[..., Any]) -> SimpleNamespace:
    """A policy whose ``settle`` is ``function`` of its arguments by name; ``calls`` has those of each call."""
    calls: list[Any] = []

    @hookimpl
    def settle(inv, candidates, verdicts, backend, scope, choose):
        calls.append(
            SimpleNamespace(
                inv=inv, candidates=candidates, verdicts=verdicts, backend=backend, scope=scope, choose=choose
            )
        )
        return function(calls[-1])

    return SimpleNamespace(settle=settle, calls=calls)


def choose(registry: Registry, processes: Any = (0, 1), backend: str | None = None, cfg: Any = None) -> Plan:
    """The plan of a call in a program of these processes."""
    inv = attrs.evolve(registry.invocation("scale", X), processes=processes)
    return registry.choose(inv, backend, cfg, current_scope())


def verdict_of(plan: Plan, name: str) -> str:
    return next(str(verdict) for verdict in plan.verdicts if verdict.name == name)


@pytest.fixture(autouse=True)
def _first_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_processes, "_warnings", {})


# -- the hook ---------------------------------------------------------------------------------------------------------


def test_settle_has_the_whole_choice() -> None:
    registry, decided = make_registry(), settler(lambda call: Choice("one", Config(7), "all of us"))
    registry.register(decided, "settler")
    store = policy(5)
    registry.register(store, "store")
    with policy_override(budget_s=3):
        plan = choose(registry, backend="one")
    assert (plan.cfg, plan.origin) == (Config(7), "all of us")
    (call,) = decided.calls
    assert call.inv.processes == (0, 1)
    assert [candidate.kernel.name for candidate in call.candidates] == ["scale.one"]
    assert (call.backend, call.scope.policy.budget_s) == ("one", 3)
    assert store.processes == []


def test_choose_asks_all_policies_as_in_a_program_of_one_process() -> None:
    registry, store = make_registry(), policy(5)
    registry.register(settler(lambda call: call.choose()), "settler")
    registry.register(store, "store")
    assert choose(registry).cfg == Config(5)
    assert store.processes == [()]


def test_choose_measures_and_the_record_is_stored() -> None:
    registry, measuring = make_registry(), tuner(9)
    registry.register(settler(lambda call: call.choose()), "settler")
    registry.register(measuring, "tuner")
    with policy_override(autotune=True):
        plan = choose(registry)
    assert (plan.cfg, plan.origin) == (Config(9), "autotuned")
    assert measuring.measured == [plan.invocation.key]
    assert choose(registry, ()).origin == "memory"


def test_the_verdicts_of_the_own_choice_are_kept() -> None:
    @hookimpl
    def select_config(inv):
        raise Unsupported("nothing is stored")

    registry = make_registry()
    registry.register(SimpleNamespace(select_config=select_config), "store")
    registry.register(settler(lambda call: call.choose()), "settler")
    assert verdict_of(choose(registry), "store").endswith("no answer, nothing is stored")


@pytest.mark.parametrize(("processes", "cfg"), [((), None), ((0,), None), ((0, 1), Config(3)), (None, None)], ids=str)
def test_nothing_is_settled_for_one_process_nor_for_unknown_ones_nor_with_an_explicit_cfg(
    processes: Any, cfg: Any
) -> None:
    registry, decided = make_registry(), settler(lambda call: Choice("one", Config(7), "all of us"))
    registry.register(decided, "settler")
    assert choose(registry, processes, cfg=cfg).cfg == (cfg or Config(2))
    assert decided.calls == []


def test_a_process_without_a_kernel_is_settled_too() -> None:
    registry, refusals = make_registry("not here"), []

    def settle(call: Any) -> Any:
        refusals.append((list(call.candidates), [str(verdict) for verdict in call.verdicts]))
        return call.choose()

    registry.register(settler(settle), "settler")
    with pytest.raises(NoKernel, match="not here"):
        choose(registry)
    assert refusals == [([], ["scale.one (registered at run time): refused, not here"])]


def test_a_wrong_overlay_is_a_failure_of_choose() -> None:
    registry, faults = make_registry(), []

    def settle(call: Any) -> Any:
        try:
            return call.choose()
        except UnknownBackend as fault:
            faults.append(str(fault))
            raise

    registry.register(settler(settle), "settler")
    key = registry.invocation("scale", X).key
    with overlay_cache({key: Record(Config(3), "two")}), pytest.raises(UnknownBackend):
        choose(registry)
    assert "no backend 'two'" in faults[0]


def test_what_settle_raises_ends_the_call_and_names_the_policy() -> None:
    def settle(call: Any) -> Any:
        raise LookupError("process 1 has another version")

    registry = make_registry()
    registry.register(settler(settle), "settler")
    with pytest.raises(LookupError, match="process 1 has another version") as error:
        choose(registry)
    assert error.value.__notes__ == ["in settle of settler (registered at run time)"]


def test_an_invalid_choice_is_a_fault_of_the_policy() -> None:
    registry = make_registry()
    registry.register(settler(lambda call: Choice("two", Config(7), "all of us")), "settler")
    with pytest.raises(
        PluginError, match=r"settle of settler \(.*\): all of us chose backend 'two', which is not among"
    ):
        choose(registry)


def test_a_settler_without_a_choice_leaves_it_to_what_is_the_same_everywhere() -> None:
    registry = make_registry()
    registry.register(settler(lambda call: None), "settler")
    registry.register(policy(5), "store")
    plan = choose(registry)
    assert (plan.cfg, plan.origin) == (Config(2), "heuristic")
    assert "it has no choice. processes 0 and 1 have to choose alike" in verdict_of(plan, "settler")


def test_an_explanation_has_this_processs_own_choice_until_there_is_an_agreement() -> None:
    registry, choices = make_registry(), [None, Choice("one", Config(7), "all of us")]
    decided = settler(lambda call: choices[len(decided.calls) - 1])
    registry.register(decided, "settler")
    registry.register(policy(5), "store")
    inv = attrs.evolve(registry.invocation("scale", X), processes=(0, 1))
    scope = attrs.evolve(current_scope(), may_measure=False)
    before, after = (registry.choose(inv, None, None, scope) for _ in range(2))
    assert (before.cfg, after.cfg) == (Config(5), Config(7))
    assert "processes 0 and 1 agree when the call is compiled; this is what" in verdict_of(before, "settler")
    assert [call.scope.may_measure for call in decided.calls] == [False, False]


def test_policies_of_a_scope_do_not_remove_the_settler() -> None:
    registry = make_registry()
    registry.register(settler(lambda call: Choice("one", Config(7), "all of us")), "settler")
    inv = attrs.evolve(registry.invocation("scale", X), processes=(0, 1))
    scope = attrs.evolve(current_scope(), policies=(("mine", policy(5)),), state="mine")
    assert registry.choose(inv, None, None, scope).cfg == Config(7)


def test_settle_alone_makes_a_policy_and_its_mistakes_are_found() -> None:
    registry = make_registry()
    registry.register(settler(lambda call: None), "settler")
    assert "1 policy" in repr(registry)

    @hookimpl
    def settle(inv, processes): ...

    with pytest.raises(PluginError, match="settle takes no argument 'processes'"):
        registry.register(SimpleNamespace(settle=settle), "wrong")
    with pytest.raises(PluginError, match="IS_SAME_EVERYWHERE takes True or False; got 'yes'"):
        registry.register(policy(5, IS_SAME_EVERYWHERE="yes"), "wrong")


# -- without the hook -------------------------------------------------------------------------------------------------


def test_without_a_settler_only_what_is_the_same_everywhere_counts() -> None:
    registry, own, equal = make_registry(), policy(5), policy(6, RANK=10, IS_SAME_EVERYWHERE=True)
    registry.register(own, "own")
    registry.register(equal, "equal")
    with pytest.warns(RuntimeWarning, match="'pip install ejkernel-agree', for all of them"):
        plan = choose(registry)
    assert plan.cfg == Config(6)
    assert own.processes == []
    assert "its answers may differ between the processes" in verdict_of(plan, "own")
    assert choose(registry, ()).cfg == Config(5)


@pytest.mark.filterwarnings("ignore:scale:RuntimeWarning")
def test_without_a_settler_memory_answers_with_what_was_put_there_by_hand() -> None:
    registry = make_registry()
    key = registry.invocation("scale", X).key
    registry.remember(key, Record(Config(8), "one", provenance()))
    assert (choose(registry).origin, choose(registry, ()).cfg) == ("heuristic", Config(8))
    registry.remember(key, Config(4))
    registry.remember(key, Record(Config(8), "one", provenance()))
    assert (choose(registry).cfg, choose(registry, ()).cfg) == (Config(4), Config(8))


@pytest.mark.filterwarnings("ignore:scale:RuntimeWarning")
def test_without_a_settler_overlays_count() -> None:
    registry = make_registry()
    with overlay_cache({registry.invocation("scale", X).key: Config(3)}):
        assert choose(registry).cfg == Config(3)


@pytest.mark.filterwarnings("ignore:scale:RuntimeWarning")
@pytest.mark.parametrize("processes", [(0, 1), None])
def test_without_a_settler_nothing_is_measured(processes: Any) -> None:
    registry, measuring = make_registry(), tuner(9)
    registry.register(measuring, "tuner")
    with policy_override(autotune=True):
        plan = choose(registry, processes)
    assert (plan.cfg, plan.origin, measuring.measured) == (Config(2), "heuristic", [])
    assert "nothing is measured" in verdict_of(plan, "built-in agreement")
    with policy_override(mode="error_on_miss"), pytest.raises(NoConfig, match="tune the call"):
        choose(registry, processes)


def test_the_warning_is_given_once_and_not_by_an_explanation() -> None:
    registry = make_registry()
    inv = attrs.evolve(registry.invocation("scale", X), processes=(0, 1, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = registry.choose(inv, None, None, attrs.evolve(current_scope(), may_measure=False))
    assert "processes 0, 1 and 2 have to choose alike" in verdict_of(plan, "built-in agreement")
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        for _ in range(2):
            choose(registry)
    assert len(records) == 1
    text = str(records[0].message)
    assert text.startswith(
        "scale: processes 0 and 1 have to choose alike: nothing is measured, and only answers that are"
    )


def test_listeners_get_the_invocation_of_one_process() -> None:
    registry, invocations = make_registry(), []
    scope = attrs.evolve(current_scope(), listeners=(lambda inv, plugins: invocations.append(inv),), state="listening")
    inv = attrs.evolve(registry.invocation("scale", X), processes=(0, 1))
    registry.register(settler(lambda call: call.choose()), "settler")
    registry.choose(inv, None, None, scope)
    assert [one.processes for one in invocations] == [()]


def test_records_of_a_package_are_the_same_everywhere_and_those_of_a_folder_are_not(tmp_path: Path) -> None:
    assert PackagedRecords("ejkernel_tuned").IS_SAME_EVERYWHERE is True
    assert PackagedRecords(tmp_path).IS_SAME_EVERYWHERE is False


# -- which processes --------------------------------------------------------------------------------------------------


def test_the_processes_are_those_of_the_devices_that_the_program_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = jax.make_mesh((5,), ("i",), devices=jax.devices()[:5])
    sharded = jax.device_put(X, NamedSharding(mesh, P("i")))

    registry, choose = make_registry(), Plugins.choose
    processes: list[Any] = []

    def noting(self: Plugins, inv: Invocation, *arguments: Any) -> Plan:
        processes.append(inv.processes)
        return choose(self, inv, *arguments)

    monkeypatch.setattr(Plugins, "choose", noting)

    def call(x: Any) -> Any:
        return registry.call("scale", x)

    part = jax.shard_map(call, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    for function, x in ((call, X), (jax.jit(call), sharded), (jax.jit(part), sharded)):
        np.testing.assert_array_equal(function(x), 2 * X)
    assert processes == [(0,), (0,), (0,)]


def context(**fields: Any) -> Any:
    """A lowering context with an axis context of these fields."""
    return SimpleNamespace(module_context=SimpleNamespace(axis_context=SimpleNamespace(**fields)))


def test_processes_come_from_the_devices_of_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = tuple(SimpleNamespace(process_index=index) for index in (2, 0, 2, 1))
    assert lowering_processes(context(device_assignment=devices)) == (0, 1, 2)
    assert lowering_processes(context(mesh=jax.make_mesh((2,), ("i",)), manual_axes={"i"})) == (0,)
    abstract = context(mesh=AbstractMesh((8,), ("i",)), manual_axes={"i"})
    part = context(mesh=AbstractMesh((4,), ("i",)), manual_axes={"i"})
    unknown = context(device_assignment=None)
    assert [lowering_processes(each) for each in (abstract, part, unknown)] == [(), (), ()]
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    assert [lowering_processes(each) for each in (abstract, part, unknown)] == [(0, 1, 2), None, None]


def test_processes_of_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert processes_of([X]) == ()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert processes_of([X, np.ones(3)]) == (0,)
    abstract = jax.ShapeDtypeStruct((4,), "float32", sharding=NamedSharding(AbstractMesh((4,), ("i",)), P("i")))
    assert processes_of([X, abstract]) is None
    traced: list[Any] = []
    jax.make_jaxpr(lambda x: traced.append(processes_of([x])) or x)(X)
    assert traced == [None]


def test_the_processes_are_no_part_of_keys() -> None:
    inv = make_registry().invocation("scale", X)
    assert attrs.evolve(inv, processes=(0, 1)).tuning_keys == inv.tuning_keys
