"""How a configuration is chosen: the order of policies, explicit choices, and what is remembered."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_core
from ejkernel_core import (
    Choice,
    ConfigCache,
    Invocation,
    NoConfig,
    NoKernel,
    Operation,
    Provenance,
    Record,
    Registry,
    Unsupported,
    hookimpl,
    overlay_cache,
    policy_override,
)

X = jnp.arange(1.0, 6.0)


@attrs.frozen
class Config:
    factor: int = 2


@attrs.frozen
class Other:
    factor: int = 2


def scale(x, *, shift=0.0): ...


def bucket(arguments: Any) -> Any:
    (length,) = arguments["x"].shape
    return {"x": jax.ShapeDtypeStruct((1 << (length - 1).bit_length(),), arguments["x"].dtype)}


def operation(**fields: Any) -> Operation:
    return Operation(name="scale", signature=scale, outputs=lambda a: (a["x"],), tuning_key=bucket, **fields)


def kernel(heuristic: Any = Config(), rank: int = 10, refusal: str | None = None) -> SimpleNamespace:
    """``scale`` by the configuration's factor, so that the result shows which configuration was used."""

    @hookimpl
    def heuristic_cfg(inv):
        if refusal:
            raise Unsupported(refusal)
        return heuristic

    @hookimpl
    def run_backend(inv, cfg):
        return inv["x"] * cfg.factor + inv["shift"]

    return SimpleNamespace(
        Config=type(heuristic), PLATFORMS={"cpu": rank}, heuristic_cfg=heuristic_cfg, run_backend=run_backend
    )


def policy(origin: str, cfg: Any = None, **attributes: Any) -> SimpleNamespace:
    """A policy that answers ``cfg``, if it has one; ``selections`` are the choices that it is notified of."""
    selections: list[Any] = []

    @hookimpl(tryfirst=attributes.pop("tryfirst", False), trylast=attributes.pop("trylast", False))
    def select_config(inv, candidates):
        return None if cfg is None else Choice(candidates[0].backend, cfg, origin)

    @hookimpl
    def config_selected(inv, choice):
        selections.append((inv.key, choice))

    return SimpleNamespace(
        select_config=select_config, config_selected=config_selected, selections=selections, **attributes
    )


def provenance(milliseconds: float = 1.0, backends: tuple[str, ...] = ("two",)) -> Provenance:
    return Provenance(when="2026-11-20T12:00:00+00:00", device="cpu", milliseconds=milliseconds, backends=backends)


def tuner(cfg: Any, backend: str = "two", backends: tuple[str, ...] = ("two",)) -> SimpleNamespace:
    """A policy that returns a measured choice for each key; ``keys`` are those it was called with."""
    keys: list[Any] = []

    @hookimpl
    def select_config(inv, candidates):
        keys.append(inv.key)
        return Choice(
            backend, cfg, "the tuner", record=Record(cfg, backend, provenance(backends=backends)), measured=True
        )

    return SimpleNamespace(RANK=20, select_config=select_config, keys=keys)


@pytest.fixture
def registry() -> Registry:
    fresh = Registry(plugins="ejkernel-tuning")
    fresh.register(operation())
    fresh.register(kernel(), "scale.two")
    return fresh


def used_factor(registry: Registry, **options: Any) -> int:
    """The factor that a call was computed with, which is also the plan's."""
    result = registry.call("scale", X, **options)
    factor = round(float(result[0]))
    np.testing.assert_allclose(result, X * factor)
    assert registry.plan("scale", X, **options).cfg.factor == factor
    return factor


def origin(registry: Registry, **options: Any) -> str:
    return registry.plan("scale", X, **options).origin


def test_a_kernel_checks_an_explicit_configuration() -> None:
    @attrs.frozen
    class Config:
        interpret: bool = False
        beads: int = 1

    @hookimpl
    def check_cfg(inv, cfg):
        if not cfg.interpret:
            raise Unsupported(f"it runs on an abacus; this is {inv.platform}")
        if cfg.beads > len(inv["x"]):
            raise Unsupported(f"there are but {len(inv['x'])} beads")

    @hookimpl
    def heuristic_cfg(inv):
        raise Unsupported("it is for an abacus")

    @hookimpl
    def run_backend(inv, cfg):
        return inv["x"] * 7 + inv["shift"]

    registry = Registry(plugins="ejkernel-tuning")
    registry.register(operation())
    hooks = {"heuristic_cfg": heuristic_cfg, "check_cfg": check_cfg, "run_backend": run_backend}
    registry.register(SimpleNamespace(Config=Config, PLATFORMS={"abacus": 9}, **hooks), "scale.bead")
    np.testing.assert_allclose(registry.call("scale", X, cfg=Config(interpret=True)), X * 7)
    for method in (registry.call, registry.plan):
        with pytest.raises(NoKernel, match=r"scale.bead.*: refused, it runs on an abacus; this is cpu"):
            method("scale", X, cfg=Config())
        with pytest.raises(NoKernel, match=r"scale.bead.*: refused, there are but \d+ beads"):
            method("scale", X, cfg=Config(interpret=True, beads=10**6))
    with pytest.raises(NoKernel, match="it runs on abacus; this is cpu"):
        registry.call("scale", X)


def test_a_kernel_checks_a_remembered_configuration() -> None:
    @hookimpl
    def heuristic_cfg(inv):
        return 2

    @hookimpl
    def check_cfg(inv, cfg):
        if cfg > 4:
            raise Unsupported(f"{cfg} does not fit into 4")

    @hookimpl
    def run_backend(inv, cfg):
        return inv["x"] * cfg + inv["shift"]

    registry = Registry(plugins="")
    registry.register(operation())
    hooks = {"heuristic_cfg": heuristic_cfg, "check_cfg": check_cfg, "run_backend": run_backend}
    registry.register(SimpleNamespace(Config=int, **hooks), "scale.small")
    key = registry.invocation("scale", X).key
    registry.remember(key, 3)
    assert (registry.plan("scale", X).cfg, registry.plan("scale", X).origin) == (3, "memory")
    registry.remember(key, 5)
    plan = registry.plan("scale", X)
    assert (plan.cfg, plan.origin) == (2, "heuristic")
    assert [v.reason for v in plan.verdicts if v.status == "no answer"] == ["5 does not fit into 4"]
    np.testing.assert_allclose(registry.call("scale", X), X * 2)
    with overlay_cache({key: 5}), pytest.raises(Unsupported, match=r"overlay has 5 for scale.small.*5 does not fit"):
        registry.call("scale", X)


# -- the order -------------------------------------------------------------------------------------------------------


def test_the_order_of_the_origins(registry: Registry) -> None:
    key = registry.invocation("scale", X).key
    assert (used_factor(registry), origin(registry)) == (2, "heuristic")
    registry.register(policy("last", Config(3), trylast=True), "zz")
    assert (used_factor(registry), origin(registry)) == (3, "last")
    registry.register(policy("model", Config(4)), "model")
    assert (used_factor(registry), origin(registry)) == (4, "model")
    registry.register(policy("store", Config(5), RANK=70), "a store")
    assert (used_factor(registry), origin(registry)) == (5, "store")
    registry.register(policy("first", Config(6), tryfirst=True), "first")
    assert (used_factor(registry), origin(registry)) == (6, "first")
    registry.remember(key, Config(7))
    assert (used_factor(registry), origin(registry)) == (7, "memory")
    with overlay_cache({key: Config(8)}):
        assert (used_factor(registry), origin(registry)) == (8, "overlay")
        with overlay_cache({key: Config(9)}):
            assert (used_factor(registry), origin(registry)) == (9, "overlay")
            assert (used_factor(registry, cfg=Config(10)), origin(registry, cfg=Config(10))) == (10, "explicit cfg")
            assert used_factor(registry) == 9
        assert used_factor(registry) == 8
    assert used_factor(registry) == 7


def test_policies_are_ordered_by_rank_and_not_by_name(registry: Registry) -> None:
    registry.register(policy("low", Config(3), RANK=10), "a")
    registry.register(policy("high", Config(4), RANK=90), "m")
    registry.register(policy("middle", Config(5)), "z")
    assert origin(registry) == "high"


def test_an_overlay_without_the_key_does_not_choose(registry: Registry) -> None:
    other = registry.invocation("scale", jnp.ones(100)).key
    with overlay_cache({other: Config(8)}):
        assert (used_factor(registry), origin(registry)) == (2, "heuristic")


def test_the_plan_has_the_reason_why_a_policy_has_no_answer(registry: Registry) -> None:
    @hookimpl
    def select_config(inv):
        raise Unsupported("the record is of 1987")

    registry.register(SimpleNamespace(select_config=select_config), "old store")
    plan = registry.plan("scale", X)
    assert plan.origin == "heuristic"
    (verdict,) = (v for v in plan.verdicts if v.name == "old store")
    assert (verdict.status, verdict.reason) == ("no answer", "the record is of 1987")
    assert "old store (registered at run time): no answer, the record is of 1987" in str(plan)


def test_a_policy_sees_the_scope(registry: Registry) -> None:
    budgets = []

    @hookimpl
    def select_config(scope):
        budgets.append(scope.policy.budget_s)

    registry.register(SimpleNamespace(select_config=select_config), "listener")
    registry.plan("scale", X)
    with policy_override(budget_s=7.5):
        registry.plan("scale", X)
    assert budgets == [60.0, 7.5]


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (SimpleNamespace(select_config=policy("p").select_config, RANK="high"), "RANK takes a whole number"),
        (SimpleNamespace(select_config=lambda inv: None), "select_config is not marked @hookimpl"),
    ],
)
def test_a_malformed_policy_is_refused_at_registration(registry: Registry, plugin: Any, message: str) -> None:
    with pytest.raises(ejkernel_core.PluginError, match=message):
        registry.register(plugin, "bad")


def test_a_policy_may_have_the_name_of_a_built_in_origin(registry: Registry) -> None:
    for name in ("memory", "overlay", "override", "heuristic"):
        registry.register(policy(f"my {name}", None), name)
    assert used_factor(registry) == 2
    with pytest.raises(ejkernel_core.PluginError, match="'built-in memory', registered at run time: such names are"):
        registry.register(policy("mine", None), "built-in memory")
    assert used_factor(registry) == 2


def test_a_policy_that_raises_no_config_does_not_end_the_call(registry: Registry) -> None:
    @hookimpl
    def select_config(inv):
        raise NoConfig("not mine to say")

    registry.register(SimpleNamespace(select_config=select_config), "stern")
    assert used_factor(registry) == 2
    (verdict,) = (v for v in registry.plan("scale", X).verdicts if v.name == "stern")
    assert (verdict.status, verdict.reason) == ("broken", "select_config raised NoConfig: not mine to say")
    with policy_override(mode="error_on_miss"), pytest.raises(NoConfig, match=r"(?s)error_on_miss.*stern: broken"):
        registry.call("scale", X)


# -- explicit choices ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["off", "on_miss", "error_on_miss"])
def test_an_explicit_cfg_is_used_in_every_mode_and_never_remembered(registry: Registry, mode: str) -> None:
    listener = policy("listener")
    tuning_policy = tuner(Config(3))
    registry.register(listener, "listener")
    registry.register(tuning_policy, "tuner")
    with policy_override(mode=mode):
        assert used_factor(registry, cfg=Config(5)) == 5
    assert tuning_policy.keys == []
    assert listener.selections == []
    assert len(registry.memory) == 0
    assert used_factor(registry) == 3  # the explicit configuration is not remembered


def test_an_explicit_backend_runs_with_its_chosen_configuration(registry: Registry) -> None:
    registry.register(kernel(Other(3), rank=1), "scale.three")
    key = registry.invocation("scale", X).key
    registry.remember(key, Record(Other(7), "three", provenance(0.1, ("two", "three"))))
    registry.remember(key, Record(Config(4), "two", provenance(0.2, ("two", "three"))))
    assert used_factor(registry) == 7
    assert used_factor(registry, backend="two") == 4
    assert used_factor(registry, backend="three") == 7


def test_error_on_miss_raises_for_a_call_without_a_key(registry: Registry) -> None:
    class Shift(float):
        __hash__ = float.__hash__

    with policy_override(mode="error_on_miss"), pytest.raises(NoConfig, match="the policy is error_on_miss"):
        registry.call("scale", X, shift=Shift(1.0))


def test_without_a_record_error_on_miss_raises(registry: Registry) -> None:
    with policy_override(mode="error_on_miss"):
        with pytest.raises(NoConfig, match=r"scale\(x=float32\[5\], shift=0.0\) on cpu.*error_on_miss"):
            registry.call("scale", X)
        assert "error_on_miss" in str(registry.explain("scale", X))
        registry.remember(registry.invocation("scale", X).key, Config(4))
        assert used_factor(registry) == 4
    assert used_factor(registry) == 4


def test_without_a_record_one_kernel_without_configurations_runs(registry: Registry) -> None:
    fixed = SimpleNamespace(PLATFORMS={"cpu": 1}, run_backend=hookimpl(lambda inv, cfg: 7 * inv["x"]))
    registry.register(fixed, "scale.fixed")
    with policy_override(mode="error_on_miss"):
        with pytest.raises(NoConfig):
            registry.call("scale", X)
        np.testing.assert_array_equal(registry.call("scale", X, backend="fixed"), 7 * X)


# -- what is remembered ----------------------------------------------------------------------------------------------


def test_only_measured_choices_are_remembered(registry: Registry) -> None:
    listener = policy("listener")
    registry.register(listener, "listener")
    assert used_factor(registry) == 2
    assert (listener.selections, len(registry.memory)) == ([], 0)
    registry.register(policy("model", Config(3), RANK=10), "model")
    assert used_factor(registry) == 3
    assert (listener.selections, len(registry.memory)) == ([], 0)
    tuning_policy = tuner(Config(4))
    registry.register(tuning_policy, "tuner")
    np.testing.assert_allclose(registry.call("scale", X), X * 4)
    ((key, choice),) = listener.selections
    assert key == registry.invocation("scale", X).key
    assert (choice.backend, choice.cfg, choice.record.provenance.milliseconds) == ("two", Config(4), 1.0)
    assert (used_factor(registry), origin(registry)) == (4, "memory")
    assert len(tuning_policy.keys) == 1


def test_a_compiled_call_uses_a_record_that_is_remembered_later(registry: Registry) -> None:
    assert used_factor(registry) == 2
    registry.remember(registry.invocation("scale", X).key, Config(9))
    assert used_factor(registry) == 9


def test_a_call_uses_a_record_that_is_stored_while_the_call_before_it_is_compiled(registry: Registry) -> None:
    @hookimpl
    def run_backend(inv, cfg):  # runs while the call is compiled, after the choice
        registry.remember(inv.key, Config(9))
        return inv["x"] * cfg.factor

    registry.register(SimpleNamespace(**{**vars(kernel()), "run_backend": run_backend}), "scale.two")
    assert [float(registry.call("scale", X)[0]) for _ in range(3)] == [2, 9, 9]


def test_a_compiled_call_follows_changes_of_the_memory(registry: Registry) -> None:
    key = registry.invocation("scale", X).key
    assert used_factor(registry) == 2
    registry.memory.put(key, Config(9))
    assert (used_factor(registry), origin(registry)) == (9, "memory")
    registry.memory.clear()
    assert (used_factor(registry), origin(registry)) == (2, "heuristic")


def test_a_compiled_call_does_not_use_a_record_that_a_full_memory_drops(registry: Registry) -> None:
    registry.memory = ConfigCache(maxsize=1)
    registry.memory.put(registry.invocation("scale", X).key, Config(9))
    assert used_factor(registry) == 9
    registry.memory.put(registry.invocation("scale", jnp.ones(50)).key, Config(5))
    assert (used_factor(registry), origin(registry)) == (2, "heuristic")


def test_a_compiled_call_uses_a_new_memory(registry: Registry) -> None:
    other = ConfigCache()
    other.put(registry.invocation("scale", X).key, Config(9))
    assert used_factor(registry) == 2
    registry.memory = other
    assert (used_factor(registry), origin(registry)) == (9, "memory")


def test_a_registry_with_the_policies_of_another_shares_its_memory(registry: Registry) -> None:
    inner = Registry(plugins="", policies_of=registry)
    inner.register(operation())
    inner.register(kernel(), "scale.two")
    assert used_factor(inner) == 2
    inner.remember(inner.invocation("scale", X).key, Config(9))
    assert (used_factor(inner), origin(inner)) == (9, "memory")
    registry.memory.clear()
    assert (used_factor(inner), origin(inner)) == (2, "heuristic")


def test_a_memory_does_not_keep_its_registry_alive(registry: Registry) -> None:
    inner = weakref.ref(Registry(plugins="", policies_of=registry))
    gc.collect()
    assert inner() is None


def test_a_measured_choice_needs_its_provenance(registry: Registry) -> None:
    @hookimpl
    def select_config(candidates):
        return Choice("two", Config(3), "a guess", measured=True)

    registry.register(SimpleNamespace(select_config=select_config), "guess")
    assert used_factor(registry) == 2
    assert "a guess measured, and gives no record with a provenance" in str(registry.plan("scale", X))


def test_a_store_that_cannot_write_does_not_break_the_call(registry: Registry) -> None:
    @hookimpl
    def select_config(inv):
        return None

    @hookimpl
    def config_selected(inv):
        raise OSError("disk full")

    registry.register(
        SimpleNamespace(select_config=select_config, config_selected=config_selected, RANK=1), "a full disk"
    )
    registry.register(tuner(Config(3)), "tuner")
    plan = registry.plan("scale", X)
    (verdict,) = (v for v in plan.verdicts if v.name == "a full disk")
    assert (verdict.status, verdict.reason) == ("broken", "config_selected raised OSError: disk full")
    assert used_factor(registry) == 3


def test_the_user_can_bound_the_memory(registry: Registry) -> None:
    registry.memory = ConfigCache(maxsize=2)
    keys = [registry.invocation("scale", jnp.ones(n)).key for n in (3, 5, 9)]
    for key in keys:
        registry.remember(key, Config(4))
    assert [key in registry.memory for key in keys] == [False, True, True]


# -- which record applies --------------------------------------------------------------------------------------------


def test_the_exact_key_comes_before_the_bucket(registry: Registry) -> None:
    exact, bucket_key = registry.invocation("scale", X).tuning_keys
    assert exact == registry.invocation("scale", X).key != bucket_key
    registry.remember(bucket_key, Config(3))
    assert used_factor(registry) == 3
    np.testing.assert_allclose(registry.call("scale", jnp.ones(8)), 3)  # 5 and 8 have one bucket
    np.testing.assert_allclose(registry.call("scale", jnp.ones(9)), 2)
    registry.remember(exact, Config(4))
    assert used_factor(registry) == 4
    np.testing.assert_allclose(registry.call("scale", jnp.ones(8)), 3)


def test_a_measurement_applies_to_all_calls_of_its_bucket(registry: Registry) -> None:
    tuning_policy = tuner(Config(4))
    registry.register(tuning_policy, "tuner")
    for length in (5, 6, 7, 8, 6):
        np.testing.assert_allclose(registry.call("scale", jnp.ones(length)), 4)
    assert len(tuning_policy.keys) == 1
    registry.call("scale", jnp.ones(4))
    assert len(tuning_policy.keys) == 2


def test_a_record_does_not_exclude_a_backend_that_was_not_measured(registry: Registry) -> None:
    key = registry.invocation("scale", X).key
    registry.remember(key, Record(Config(4), "two", provenance(backends=("two",))))
    assert used_factor(registry) == 4
    registry.register(kernel(Other(3), rank=99), "scale.three")
    registry.remember(registry.invocation("scale", X).key, Record(Config(4), "two", provenance(backends=("two",))))
    assert (used_factor(registry), origin(registry)) == (3, "heuristic")
    assert used_factor(registry, backend="two") == 4


def test_the_fastest_of_several_records_answers(registry: Registry) -> None:
    registry.register(kernel(Other(3), rank=1), "scale.three")
    key = registry.invocation("scale", X).key
    both = ("two", "three")
    registry.remember(key, Record(Other(5), "three", provenance(0.5, both)))
    registry.remember(key, Record(Config(6), "two", provenance(0.7, both)))
    assert used_factor(registry) == 5
    registry.remember(key, Record(Config(8), "two", provenance(0.3, both)))
    assert used_factor(registry) == 8


def test_a_record_of_a_kernel_that_now_refuses_is_not_used(registry: Registry) -> None:
    registry.register(kernel(Other(3), refusal="not today"), "scale.three")
    key = registry.invocation("scale", X).key
    registry.remember(key, Record(Other(5), "three", provenance(0.5, ("two", "three"))))
    assert used_factor(registry) == 2


def test_a_remembered_configuration_of_another_type_is_not_used(registry: Registry) -> None:
    registry.remember(registry.invocation("scale", X).key, Other(5))
    assert used_factor(registry) == 2


def test_a_call_with_an_option_without_content_has_no_key_and_runs(registry: Registry) -> None:
    registry.register(kernel(), "scale.two")

    class Shift:
        def __radd__(self, x: jax.Array) -> jax.Array:
            return x + 1

    registry.remember(registry.invocation("scale", X).key, Config(5))
    np.testing.assert_allclose(registry.call("scale", X, shift=Shift()), X * 2 + 1)
    assert "has no content that could be written down" in str(registry.plan("scale", X, shift=Shift()))


# -- explanations ----------------------------------------------------------------------------------------------------


def test_an_explanation_has_origin_key_age_and_provenance(registry: Registry) -> None:
    key = registry.invocation("scale", X).key
    registry.remember(key, Record(Config(4), "two", attrs.evolve(provenance(0.125), when="2020-01-01T00:00:00+00:00")))
    explanation = str(registry.explain("scale", X))
    assert explanation.startswith("scale.two with Config(factor=4), by memory")
    assert f"remembered as scale {key.digest}, measured" in explanation
    assert "days ago on cpu: 0.125 ms" in explanation
    with overlay_cache({key: Config(5)}):
        assert f"remembered as scale {key.digest}, put there by hand" in str(registry.explain("scale", X))


# -- attention -------------------------------------------------------------------------------------------------------


def attention(length: int, **options: Any) -> Invocation:
    query = jax.ShapeDtypeStruct((3, length, 8, 64), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((3, length, 2, 64), jnp.bfloat16)
    return ejkernel_core.invocation("flash_attention", query, key, key, **options)


@pytest.mark.parametrize(
    ("first", "second", "has_one_bucket"),
    [
        (attention(1000), attention(1024), True),
        (attention(1000), attention(1025), False),
        (attention(1000), attention(1000, softmax_scale=0.3), True),
        (attention(1000), attention(1000, return_lse=True), True),
        (attention(1000), attention(1000, causal=True), False),
        (attention(1000), attention(1000, logits_soft_cap=20.0), False),
        (attention(1000, logits_soft_cap=30.0), attention(999, logits_soft_cap=20.0), True),
        (attention(1000), attention(1000, sliding_window=100), False),
        (attention(1000), attention(1000, dropout_prob=0.1, dropout_seed=1), False),
    ],
)
def test_attention_calls_of_one_bucket(first: Invocation, second: Invocation, has_one_bucket: bool) -> None:
    assert first.key != second.key
    assert (first.tuning_keys[1] == second.tuning_keys[1]) is has_one_bucket


@pytest.fixture
def process_registry() -> Iterator[Registry]:
    """The registry of the process, whose memory is cleared afterwards."""
    yield ejkernel_core.registry
    ejkernel_core.registry.forget()


def test_forward_and_backward_have_separate_configurations(process_registry: Registry) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = [jax.random.normal(k, (2, 37, 2, 8)) for k in keys]
    before = jax.grad(lambda *a: ejkernel_core.call("flash_attention", *a).sum())(*arrays)
    explanation = process_registry.explain("flash_attention", *arrays)
    for plan, cfg in ((explanation.plan, {"q_block": 16}), (explanation.backward.plan, {"kv_block": 8})):
        process_registry.remember(plan.invocation.key, attrs.evolve(plan.cfg, **cfg))
    explanation = process_registry.explain("flash_attention", *arrays)
    assert (explanation.plan.origin, explanation.plan.cfg.q_block) == ("memory", 16)
    assert (explanation.backward.plan.origin, explanation.backward.plan.cfg.kv_block) == ("memory", 8)
    after = jax.grad(lambda *a: ejkernel_core.call("flash_attention", *a).sum())(*arrays)
    np.testing.assert_allclose(after, before, atol=1e-5)


def test_a_rank_may_depend_on_the_call() -> None:
    registry = Registry(plugins="")
    registry.register(operation())
    registry.register(kernel(Config(2)), "scale.two")

    def rank(inv: Invocation) -> int:
        return 90 if inv["x"].shape[0] > 4 else 1

    other = kernel(Config(3))
    other.PLATFORMS = {"cpu": rank}
    registry.register(other, "scale.three")
    long, short = jnp.ones(5), jnp.ones(4)
    assert (registry.call("scale", long)[0], registry.call("scale", short)[0]) == (3, 2)
    other.PLATFORMS = {"cpu": lambda inv: None}
    registry.register(other, "scale.three")
    assert registry.call("scale", long)[0] == 2
    assert "its rank in PLATFORMS raised TypeError" in str(registry.explain("scale", long))
    other.PLATFORMS = {"cpu": lambda inv: 1 / 0}
    registry.register(other, "scale.three")
    assert registry.call("scale", long)[0] == 2
    (verdict,) = [v for v in registry.explain("scale", long).verdicts if v.name == "scale.three"]
    assert (verdict.status, verdict.reason) == (
        "broken",
        "its rank in PLATFORMS raised ZeroDivisionError: division by zero",
    )
