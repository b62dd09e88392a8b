"""What answers where nothing is remembered of a call itself: other versions' records, and those of calls near it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_core import (
    Axes,
    ConfigCache,
    NoConfig,
    Operation,
    Provenance,
    Record,
    Registry,
    hookimpl,
    overlay_cache,
    policy_override,
)

AXES = Axes({"x": "rows dim", "weight": "dim"}, {"out": "rows dim"}, independent="rows", whole="dim", counts="rows")


def scaled(x, weight=None, *, by=1.0): ...


@attrs.frozen
class Config:
    block: int = 1


def kernel(*blocks: int, version: int | None = 1, heuristic: int = 1) -> SimpleNamespace:
    """Its results tell the block that it ran with; it offers these blocks, or says nothing of what it offers."""

    @hookimpl
    def heuristic_cfg(inv):
        return Config(heuristic)

    @hookimpl
    def config_space(inv):
        return [Config(block) for block in blocks]

    @hookimpl
    def run_backend(inv, cfg):
        return inv["x"] * inv["by"] * cfg.block

    made = SimpleNamespace(Config=Config, heuristic_cfg=heuristic_cfg, run_backend=run_backend)
    if version is not None:
        made.VERSION = version
    if blocks:
        made.config_space = config_space
    return made


@pytest.fixture
def registry() -> Registry:
    made = Registry(plugins="")
    made.register(Operation(name="scaled", signature=scaled, axes=AXES))
    made.register(kernel(), "scaled.one")
    return made


def struct(rows: int, dim: int = 8) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, dim), "float32")


def learn(registry: Registry, rows: int, block: int, backend: str = "one", dim: int = 8, **fields: Any) -> None:
    """Remember this as measured here, for the call and those like it."""
    inv = registry.invocation("scaled", struct(rows, dim))
    software = {name: v for each in registry.kernels("scaled")[0] for name, v in each.software.items()}
    known = {"when": "2026-11-20T12:00:00+00:00", "device": "cpu", "milliseconds": 1.0, "software": software}
    provenance = Provenance(**{**known, "backends": registry.backends("scaled"), **fields})
    for key in inv.tuning_keys:
        registry.remember(key, Record(Config(block), backend, provenance))


def used(registry: Registry, rows: int, dim: int = 8, **options: Any) -> tuple[int, str]:
    """The block that a call ran with, and who chose it."""
    x = jnp.arange(1.0, rows * dim + 1).reshape(rows, dim)
    result = registry.call("scaled", x, **options)
    block = round(float(result[0, 0] / options.get("by", 1.0)))
    np.testing.assert_allclose(result, x * options.get("by", 1.0) * block, rtol=1e-6)
    return block, registry.plan("scaled", x, **options).origin


# -- calls near one --------------------------------------------------------------------------------------------------


def test_the_nearest_record_goes_before_the_heuristic(registry: Registry) -> None:
    assert used(registry, 100) == (1, "heuristic")
    learn(registry, 16, 4)
    learn(registry, 2048, 7)
    assert used(registry, 100) == (4, "memory")  # 128 is 8 times 16, and a sixteenth of 2048
    assert used(registry, 200) == (7, "memory")
    assert used(registry, 30) == (4, "memory")
    choice = registry.plan("scaled", struct(30)).choice
    assert (choice.distance, choice.note) == (1.0, "the nearest that is remembered: rows 16 for 32")
    told = str(registry.explain("scaled", struct(30)))
    assert "by memory (the nearest that is remembered: rows 16 for 32)" in told
    assert registry.plan("scaled", struct(16)).choice.distance == 0
    assert registry.plan("scaled", struct(15)).choice.distance == 0  # they are alike


def test_only_axes_that_count_things_may_differ(registry: Registry) -> None:
    learn(registry, 64, 4)
    assert used(registry, 128) == (4, "memory")
    assert used(registry, 64, dim=9) == (1, "heuristic")
    assert used(registry, 64, by=2.0) == (1, "heuristic")
    x = jnp.ones((64, 8), jnp.bfloat16)
    assert registry.plan("scaled", x).origin == "heuristic"
    assert registry.plan("scaled", jnp.ones((64, 8)), jnp.ones(8)).origin == "heuristic"


def test_what_is_too_far_away_says_nothing(registry: Registry) -> None:
    learn(registry, 2, 4)
    assert used(registry, 512) == (4, "memory")
    assert used(registry, 513) == (1, "heuristic")


def test_the_nearest_has_to_be_something_that_its_kernel_offers_here(registry: Registry) -> None:
    registry.register(kernel(1, 3), "scaled.one")
    learn(registry, 64, 4)
    learn(registry, 256, 3)
    assert used(registry, 64) == (4, "memory")  # what was measured for the call itself is taken as it is
    assert used(registry, 32) == (3, "memory")


def test_a_race_of_others_says_nothing_nearby_either(registry: Registry) -> None:
    learn(registry, 64, 4)
    registry.register(kernel(heuristic=2), "scaled.two")
    assert used(registry, 64)[1] == used(registry, 128)[1] == "heuristic"


def test_of_two_stores_the_nearer_answers(registry: Registry) -> None:
    learn(registry, 512, 4)
    other = Registry(plugins="")
    other.register(Operation(name="scaled", signature=scaled, axes=AXES))
    other.register(kernel(), "scaled.one")
    learn(other, 64, 5)

    @hookimpl
    def select_config(inv, candidates):
        from ejkernel_core import recall

        return recall(inv, candidates, "another store", other.memory.find, near=other.memory.near)

    registry.register(SimpleNamespace(select_config=select_config), "another")
    assert used(registry, 100) == (5, "another store")
    assert used(registry, 300) == (4, "memory")
    assert used(registry, 50) == (5, "another store")  # its own record, for all that memory has something near
    assert registry.plan("scaled", struct(50)).choice.distance == 0


def test_an_overlay_is_for_its_own_calls_alone(registry: Registry) -> None:
    learn(registry, 64, 4)
    overlay, registry.memory = registry.memory, ConfigCache()
    with overlay_cache(overlay):
        assert used(registry, 64) == (4, "overlay")
        assert used(registry, 128) == (1, "heuristic")


def test_a_policy_that_wants_a_record_does_not_take_a_near_one(registry: Registry) -> None:
    learn(registry, 64, 4)
    with policy_override(mode="error_on_miss"):
        assert used(registry, 64) == (4, "memory")
        with pytest.raises(NoConfig, match="no configuration is remembered"):
            registry.call("scaled", jnp.ones((128, 8)))


def test_what_measures_goes_before_the_nearest_record(registry: Registry) -> None:
    learn(registry, 64, 4)

    @hookimpl
    def measure(inv, candidates, report):
        provenance = Provenance(when="", device="cpu", milliseconds=0.5, backends=("one",))
        return (Record(Config(9), "one", provenance),)

    registry.register(SimpleNamespace(measure=measure), "tuner")
    with policy_override(autotune=True):
        assert registry.plan("scaled", struct(128)).choice.distance == 1.0  # a question measures nothing
        np.testing.assert_array_equal(registry.call("scaled", jnp.ones((128, 8))), np.full((128, 8), 9.0))
    assert used(registry, 128) == (9, "memory")
    assert used(registry, 64) == (4, "memory")
    # The versions are the core's to write down.
    record = registry.plan("scaled", struct(128)).choice.record
    assert record.provenance.software == dict(registry.kernel("scaled", "one").software)


def test_who_tunes_what_was_recorded_tunes_what_only_has_something_near(registry: Registry) -> None:
    from ejkernel_tuning import autotune_recorded, recording

    learn(registry, 64, 4)
    with recording() as invocations:
        assert used(registry, 128) == (4, "memory")
    (tuned,) = autotune_recorded(invocations, budget_s=30).tuned
    assert [record.cfg for record in tuned.records] == [Config(1)]
    assert registry.plan("scaled", struct(128)).choice.distance == 0


# -- other versions --------------------------------------------------------------------------------------------------


def test_a_record_of_other_versions_is_told_and_used_where_the_policy_says_so(registry: Registry) -> None:
    learn(registry, 64, 4, software={"jax": "0.1", "scaled.one": "1"})
    assert used(registry, 64) == (1, "heuristic")
    (verdict,) = (v for v in registry.plan("scaled", struct(64)).verdicts if v.name == "built-in memory")
    assert verdict.status == "no answer"
    assert verdict.reason == (
        f"there is a record of other versions (jax was 0.1, is {jax.__version__}): tune again, "
        "or set other_versions=True"
    )
    with policy_override(other_versions=True):
        assert used(registry, 64) == (4, "memory")
        assert used(registry, 128) == (4, "memory")
        note = f"measured with other versions: jax was 0.1, is {jax.__version__}"
        assert registry.plan("scaled", struct(64)).choice.note == note
    assert used(registry, 128) == (1, "heuristic")
    with policy_override(mode="error_on_miss"), pytest.raises(NoConfig, match=r"jax was 0\.1, is .*: tune again"):
        registry.call("scaled", jnp.ones((64, 8)))


def test_a_near_record_of_these_versions_answers_for_one_of_others(registry: Registry) -> None:
    learn(registry, 64, 4, software={"jax": "0.1"})
    learn(registry, 128, 5)
    assert used(registry, 64) == (5, "memory")
    note = registry.plan("scaled", struct(64)).choice.note
    assert note.startswith("the nearest that is remembered: rows 128 for 64; there is a record of other versions (jax")


def test_a_new_version_of_a_kernel_is_measured_again(registry: Registry) -> None:
    learn(registry, 64, 4)
    registry.register(kernel(version=1), "scaled.one")
    assert used(registry, 64) == (4, "memory")
    registry.register(kernel(version=2), "scaled.one")
    assert used(registry, 64) == (1, "heuristic")
    assert "scaled.one was 1, is 2" in str(registry.explain("scaled", struct(64)))


def test_a_kernel_that_cannot_do_the_call_changes_no_answer(registry: Registry) -> None:
    """As a backend for another platform, or a new version of it."""
    learn(registry, 64, 4)
    for version in (1, 2):
        elsewhere = kernel(version=version, heuristic=3)
        elsewhere.PLATFORMS = {"tpu": 90}
        elsewhere.COMPILERS = ("pytest",)
        registry.register(elsewhere, "scaled.elsewhere")
        assert used(registry, 64) == (4, "memory")
        assert used(registry, 128) == (4, "memory")


def test_a_version_is_a_whole_number(registry: Registry) -> None:
    with pytest.raises(Exception, match=r"VERSION takes a whole number; got '1\.0'"):
        registry.register(kernel(version="1.0"), "scaled.one")  # type: ignore[arg-type]


# -- forgotten by kind -----------------------------------------------------------------------------------------------


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...]]]:
    """The operation and the options of every call that is made a function of."""
    from ejkernel_core import _call

    made: list[tuple[str, tuple[Any, ...]]] = []
    really_compile = _call._compile

    def compile(form: Any, options: Any, context: Any) -> Any:
        made.append((form.operation.name, tuple(options)))
        return really_compile(form, options, context)

    monkeypatch.setattr(_call, "_compile", compile)
    return made


def test_what_is_remembered_has_calls_of_its_kind_alone_choose_anew(
    registry: Registry, traces: list[tuple[str, tuple[Any, ...]]]
) -> None:
    registry.register(Operation(name="other", signature=scaled, axes=AXES))
    registry.register(kernel(), "other.one")
    x, narrow = jnp.ones((64, 8)), jnp.ones((64, 4))

    def everything() -> list[tuple[str, tuple[Any, ...]]]:
        """What is traced for these calls."""
        traces.clear()
        registry.call("scaled", x)
        registry.call("scaled", x, by=2.0)
        registry.call("scaled", x, by=3.0)
        registry.call("scaled", narrow, by=3.0)
        registry.call("other", x)
        return list(traces)

    assert len(everything()) == 4
    assert everything() == []
    learn(registry, 64, 4)
    assert everything() == [("scaled", ())]
    assert everything() == []
    registry.remember(registry.invocation("scaled", struct(1024), by=2.0).key, Config(3))
    assert everything() == [("scaled", (2.0,))]  # a call near it may take this
    registry.remember(registry.invocation("scaled", struct(1024, 5), by=3.0).key, Config(3))
    assert everything() == []  # nothing was called with this dim
    registry.remember(registry.invocation("scaled", struct(64, 4), by=3.0).key, Config(3))
    assert everything() == [("scaled", (3.0,))]
    registry.forget()
    assert sorted(everything()) == [("scaled", ()), ("scaled", (2.0,)), ("scaled", (3.0,))]
    assert everything() == []
    registry.register(kernel(), "other.two")
    assert len(everything()) == 4


def test_what_others_learn_while_a_call_is_compiled_does_not_matter_to_it(
    registry: Registry, traces: list[tuple[str, tuple[Any, ...]]]
) -> None:
    x, meanwhile = jnp.ones((64, 8)), [lambda: learn(registry, 64, 4, dim=5), lambda: learn(registry, 128, 4)]

    @hookimpl
    def run_backend(inv, cfg):
        meanwhile.pop(0)() if meanwhile else None
        return inv["x"]

    slow = kernel()
    slow.run_backend = run_backend
    registry.register(slow, "scaled.one")
    registry.call("scaled", x)
    registry.call("scaled", x)
    assert len(traces) == 1  # a record for another dim
    registry.call("scaled", x, by=1.0)  # written out it is another function; a record of its own kind
    registry.call("scaled", x, by=1.0)
    registry.call("scaled", x, by=1.0)
    assert len(traces) == 3


def test_a_record_of_the_backward_has_the_calls_choose_anew_that_are_differentiated(
    traces: list[tuple[str, tuple[Any, ...]]],
) -> None:
    registry = Registry(plugins="ejkernel-ops,ejkernel-xla")
    query = jax.random.normal(jax.random.key(0), (1, 40, 2, 8))

    def gradient(**options: Any) -> tuple[jax.Array, ...]:
        def loss(*arrays: jax.Array) -> jax.Array:
            return (registry.call("flash_attention", *arrays, **options) ** 2).sum()

        return jax.grad(loss, (0, 1, 2))(query, query, query)

    plain, causal = gradient(), gradient(causal=True)
    traces.clear()
    plan = registry.explain("flash_attention", query, query, query).backward.plan
    registry.remember(plan.invocation.key, attrs.evolve(plan.cfg, q_block=16, kv_block=16))
    np.testing.assert_allclose(gradient(causal=True), causal, rtol=1e-5, atol=1e-5)
    assert traces == []
    np.testing.assert_allclose(gradient(), plain, rtol=1e-5, atol=1e-5)
    assert traces == [("flash_attention", ())]
