"""Calls without a record of their own: the nearest records, and records of other versions."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_cache import PackagedRecords
from ejkernel_cache._names import component
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
    record_to_json,
)

AXES = Axes({"x": "rows dim", "weight": "dim"}, {"out": "rows dim"}, independent="rows", whole="dim", counts="rows")


def scaled(x, weight=None, *, by=1.0): ...


@attrs.frozen
class Config:
    block: int = 1


def kernel(*blocks: int, version: int | None = 1, heuristic: int = 1) -> SimpleNamespace:
    """A kernel whose results show the block that it ran with; without ``blocks`` it has no ``config_space``."""

    @hookimpl
    def heuristic_cfg(inv):
        return Config(heuristic)

    @hookimpl
    def config_space(inv):
        return [Config(block) for block in blocks]

    @hookimpl
    def run_backend(inv, cfg):
        return inv["x"] * inv["by"] * cfg.block

    kernel = SimpleNamespace(Config=Config, heuristic_cfg=heuristic_cfg, run_backend=run_backend)
    if version is not None:
        kernel.VERSION = version
    if blocks:
        kernel.config_space = config_space
    return kernel


@pytest.fixture
def registry() -> Registry:
    registry = Registry(plugins="")
    registry.register(Operation(name="scaled", signature=scaled, axes=AXES))
    registry.register(kernel(), "scaled.one")
    return registry


def struct(rows: int, dim: int = 8) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, dim), "float32")


def remember(registry: Registry, rows: int, block: int, backend: str = "one", dim: int = 8, **fields: Any) -> None:
    """Remember a record for a call and for its bucket, as if it was measured on this machine."""
    inv = registry.invocation("scaled", struct(rows, dim))
    software = {name: v for kernel in registry.kernels("scaled")[0] for name, v in kernel.software.items()}
    fields_of_all = {"when": "2026-11-20T12:00:00+00:00", "device": "cpu", "milliseconds": 1.0, "software": software}
    provenance = Provenance(**{**fields_of_all, "backends": registry.backends("scaled"), **fields})
    for key in inv.tuning_keys:
        registry.remember(key, Record(Config(block), backend, provenance))


def used_block(registry: Registry, rows: int, dim: int = 8, **options: Any) -> tuple[int, str]:
    """The block that a call ran with, and its origin."""
    x = jnp.arange(1.0, rows * dim + 1).reshape(rows, dim)
    result = registry.call("scaled", x, **options)
    block = round(float(result[0, 0] / options.get("by", 1.0)))
    np.testing.assert_allclose(result, x * options.get("by", 1.0) * block, rtol=1e-6)
    return block, registry.plan("scaled", x, **options).origin


# -- nearest records -------------------------------------------------------------------------------------------------


@pytest.mark.always
def test_the_nearest_record_comes_before_the_heuristic(registry: Registry) -> None:
    assert used_block(registry, 100) == (1, "heuristic")
    remember(registry, 16, 4)
    remember(registry, 2048, 7)
    assert used_block(registry, 100) == (4, "memory")  # 128 is 8 times 16, and a sixteenth of 2048
    assert used_block(registry, 200) == (7, "memory")
    assert used_block(registry, 30) == (4, "memory")
    choice = registry.plan("scaled", struct(30)).choice
    assert (choice.distance, choice.note) == (1.0, "the nearest bucket that is remembered: rows 16 for 32")
    explanation = str(registry.explain("scaled", struct(30)))
    assert "by memory (the nearest bucket that is remembered: rows 16 for 32)" in explanation
    assert registry.plan("scaled", struct(16)).choice.distance == 0
    assert registry.plan("scaled", struct(15)).choice.distance == 0  # 15 and 16 have one bucket


def package_memory(registry: Registry, folder: Path) -> str:
    """Move what is remembered to a package of records, and return its name as an origin."""
    lines = [record_to_json(key, record) for key, records in registry.memory.items() for record in records]
    folder_of_device = folder / component(registry.invocation("scaled", struct(16)).key.device)
    folder_of_device.mkdir()
    (folder_of_device / "scaled.jsonl").write_text("\n".join(line.replace("\n", "") for line in lines))
    registry.memory.clear()
    registry.register(PackagedRecords(folder), "packaged")
    return f"packaged records ({folder})"


def test_a_package_with_another_kernel_for_a_call_does_not_answer_with_another_call(
    registry: Registry, tmp_path: Path
) -> None:
    """The best kernel of the call may not be a candidate. What was the best for a fraction of the rows says less."""
    registry.register(kernel(4, 7), "scaled.two")
    remember(registry, 16, 4, "two")
    remember(registry, 128, 7, "one")
    packaged = package_memory(registry, tmp_path)
    assert used_block(registry, 100) == (7, packaged)
    assert used_block(registry, 100, backend="two") == (1, "heuristic")
    assert used_block(registry, 30, backend="two") == (4, packaged)  # not measured itself


def test_a_package_whose_record_of_a_call_is_of_no_use_answers_with_another_call(
    registry: Registry, tmp_path: Path
) -> None:
    registry.register(kernel(4, 7), "scaled.two")
    remember(registry, 16, 4, "two")
    remember(registry, 128, 9, "two")  # a block that the kernel does not offer any more
    packaged = package_memory(registry, tmp_path)
    assert used_block(registry, 100) == (4, packaged)


def test_without_buckets_the_nearest_record_is_that_of_a_call(registry: Registry) -> None:
    registry.register(Operation(name="scaled", signature=scaled, axes=AXES, tuning_key=None))
    remember(registry, 16, 4)
    assert registry.plan("scaled", struct(30)).choice.note == "the nearest call that is remembered: rows 16 for 30"


LEADING_AXES = Axes({"x": "... dim", "weight": "dim"}, {"out": "... dim"}, independent="...", whole="dim", counts="...")


def test_a_record_answers_for_any_leading_axes(registry: Registry) -> None:
    registry.register(Operation(name="scaled", signature=scaled, axes=LEADING_AXES))
    remember(registry, 512, 4)

    def choice(*shape: int) -> Any:
        choice = registry.plan("scaled", jax.ShapeDtypeStruct(shape, "float32")).choice
        return choice.cfg.block, choice.distance, choice.note

    for shape in ((512, 8), (300, 8), (4, 128, 8), (3, 10, 17, 8)):
        assert choice(*shape) == (4, 0, "")
    assert choice(2, 500, 8) == (4, 1.0, "the nearest bucket that is remembered: leading axes: 512 for 1024")
    assert choice(8) == (1, 0, "")  # one row: 512 times fewer is too far
    remember(registry, 2, 5)
    assert choice(8) == (5, 1.0, "the nearest bucket that is remembered: leading axes: 2 for 1")


def test_only_axes_that_count_things_may_differ(registry: Registry) -> None:
    remember(registry, 64, 4)
    assert used_block(registry, 128) == (4, "memory")
    assert used_block(registry, 64, dim=9) == (1, "heuristic")
    assert used_block(registry, 64, by=2.0) == (1, "heuristic")
    x = jnp.ones((64, 8), jnp.bfloat16)
    assert registry.plan("scaled", x).origin == "heuristic"
    assert registry.plan("scaled", jnp.ones((64, 8)), jnp.ones(8)).origin == "heuristic"


def test_a_record_of_a_distant_call_is_not_used(registry: Registry) -> None:
    remember(registry, 2, 4)
    assert used_block(registry, 512) == (4, "memory")
    assert used_block(registry, 513) == (1, "heuristic")


def test_the_nearest_configuration_must_be_in_the_space_of_the_call(registry: Registry) -> None:
    registry.register(kernel(1, 3), "scaled.one")
    remember(registry, 64, 4)
    remember(registry, 256, 3)
    assert used_block(registry, 64) == (4, "memory")  # a record of the call itself is always used
    assert used_block(registry, 32) == (3, "memory")


def test_the_nearest_record_is_of_a_call_for_which_the_kernels_have_the_same_order(registry: Registry) -> None:
    """A kernel whose rank falls for small calls leaves them to others, whatever is the fastest for large ones."""
    large = kernel()
    large.PLATFORMS = {"cpu": lambda inv: 60 if inv["x"].shape[0] > 100 else 5}
    registry.register(large, "scaled.large")
    registry.register(kernel(heuristic=3), "scaled.one")
    remember(registry, 256, 4, backend="large")
    assert used_block(registry, 128) == (4, "memory")
    assert used_block(registry, 101) == (4, "memory")
    assert used_block(registry, 100) == (3, "heuristic")
    remember(registry, 64, 2)
    assert used_block(registry, 100) == (2, "memory")


def test_a_record_of_the_reference_is_for_its_own_size_alone(registry: Registry) -> None:
    """It wins where all kernels take as long as a launch, and is not known to be fast for larger calls."""
    registry.register(kernel(heuristic=3), "scaled.reference")
    remember(registry, 8, 4, backend="reference")
    assert used_block(registry, 8) == (4, "memory")
    assert used_block(registry, 64) == (1, "heuristic")
    assert used_block(registry, 64, backend="reference")[0] == 4  # there is nothing else to compare it with
    remember(registry, 256, 2)
    assert used_block(registry, 64) == (2, "memory")


def test_a_nearest_record_needs_all_backends_to_be_measured(registry: Registry) -> None:
    remember(registry, 64, 4)
    registry.register(kernel(heuristic=2), "scaled.two")
    assert used_block(registry, 64)[1] == used_block(registry, 128)[1] == "heuristic"


def test_the_nearest_record_of_all_stores_is_used(registry: Registry) -> None:
    remember(registry, 512, 4)
    other = Registry(plugins="")
    other.register(Operation(name="scaled", signature=scaled, axes=AXES))
    other.register(kernel(), "scaled.one")
    remember(other, 64, 5)

    @hookimpl
    def select_config(inv, candidates):
        from ejkernel_core import recall

        return recall(inv, candidates, "another store", other.memory.find, near=other.memory.near)

    registry.register(SimpleNamespace(select_config=select_config), "another")
    assert used_block(registry, 100) == (5, "another store")
    assert used_block(registry, 300) == (4, "memory")
    assert used_block(registry, 50) == (
        5,
        "another store",
    )  # the store's exact record comes before the nearest one in memory
    assert registry.plan("scaled", struct(50)).choice.distance == 0


def test_an_overlay_applies_only_to_its_own_calls(registry: Registry) -> None:
    remember(registry, 64, 4)
    overlay, registry.memory = registry.memory, ConfigCache()
    with overlay_cache(overlay):
        assert used_block(registry, 64) == (4, "overlay")
        assert used_block(registry, 128) == (1, "heuristic")


def test_error_on_miss_does_not_accept_the_nearest_record(registry: Registry) -> None:
    remember(registry, 64, 4)
    with policy_override(mode="error_on_miss"):
        assert used_block(registry, 64) == (4, "memory")
        with pytest.raises(NoConfig, match="no configuration is remembered"):
            registry.call("scaled", jnp.ones((128, 8)))


def test_the_tuner_comes_before_the_nearest_record(registry: Registry) -> None:
    remember(registry, 64, 4)

    @hookimpl
    def measure(inv, candidates, report):
        provenance = Provenance(when="", device="cpu", milliseconds=0.5, backends=("one",))
        return (Record(Config(9), "one", provenance),)

    registry.register(SimpleNamespace(measure=measure), "tuner")
    with policy_override(autotune=True):
        assert registry.plan("scaled", struct(128)).choice.distance == 1.0  # plan() measures nothing
        np.testing.assert_array_equal(registry.call("scaled", jnp.ones((128, 8))), np.full((128, 8), 9.0))
    assert used_block(registry, 128) == (9, "memory")
    assert used_block(registry, 64) == (4, "memory")
    # The core adds the versions to the provenance.
    record = registry.plan("scaled", struct(128)).choice.record
    assert record.provenance.software == dict(registry.kernel("scaled", "one").software)


def test_autotune_recorded_measures_calls_that_have_only_a_nearest_record(registry: Registry) -> None:
    from ejkernel_tuning import autotune_recorded, recording

    remember(registry, 64, 4)
    with recording() as invocations:
        assert used_block(registry, 128) == (4, "memory")
    (tuned,) = autotune_recorded(invocations, budget_s=30).tuned
    assert [record.cfg for record in tuned.records] == [Config(1)]
    assert registry.plan("scaled", struct(128)).choice.distance == 0


# -- other versions --------------------------------------------------------------------------------------------------


def test_a_record_of_other_versions_is_reported_and_used_if_the_policy_allows(registry: Registry) -> None:
    remember(registry, 64, 4, software={"jax": "0.1", "scaled.one": "1"})
    assert used_block(registry, 64) == (1, "heuristic")
    (verdict,) = (v for v in registry.plan("scaled", struct(64)).verdicts if v.name == "built-in memory")
    assert verdict.status == "no answer"
    assert verdict.reason == (
        f"there is a record of other versions (jax was 0.1, is {jax.__version__}): tune again, "
        "or set other_versions=True"
    )
    with policy_override(other_versions=True):
        assert used_block(registry, 64) == (4, "memory")
        assert used_block(registry, 128) == (4, "memory")
        note = f"measured with other versions: jax was 0.1, is {jax.__version__}"
        assert registry.plan("scaled", struct(64)).choice.note == note
    assert used_block(registry, 128) == (1, "heuristic")
    with policy_override(mode="error_on_miss"), pytest.raises(NoConfig, match=r"jax was 0\.1, is .*: tune again"):
        registry.call("scaled", jnp.ones((64, 8)))


def test_a_nearest_record_of_these_versions_comes_before_one_of_others(registry: Registry) -> None:
    remember(registry, 64, 4, software={"jax": "0.1"})
    remember(registry, 128, 5)
    assert used_block(registry, 64) == (5, "memory")
    note = registry.plan("scaled", struct(64)).choice.note
    assert note.startswith(
        "the nearest bucket that is remembered: rows 128 for 64; there is a record of other versions (jax"
    )


def test_a_new_version_of_a_kernel_is_measured_again(registry: Registry) -> None:
    remember(registry, 64, 4)
    registry.register(kernel(version=1), "scaled.one")
    assert used_block(registry, 64) == (4, "memory")
    registry.register(kernel(version=2), "scaled.one")
    assert used_block(registry, 64) == (1, "heuristic")
    assert "scaled.one was 1, is 2" in str(registry.explain("scaled", struct(64)))


def test_a_kernel_that_refuses_the_call_does_not_affect_records(registry: Registry) -> None:
    """For example a backend for another platform, or a new version of it."""
    remember(registry, 64, 4)
    for version in (1, 2):
        other_kernel = kernel(version=version, heuristic=3)
        other_kernel.PLATFORMS = {"tpu": 90}
        other_kernel.COMPILERS = ("pytest",)
        registry.register(other_kernel, "scaled.elsewhere")
        assert used_block(registry, 64) == (4, "memory")
        assert used_block(registry, 128) == (4, "memory")


def test_a_version_is_a_whole_number(registry: Registry) -> None:
    with pytest.raises(Exception, match=r"VERSION takes a whole number; got '1\.0'"):
        registry.register(kernel(version="1.0"), "scaled.one")  # type: ignore[arg-type]


# -- which calls are traced ------------------------------------------------------------------------------------------


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...]]]:
    """The operation and the options of each call that is compiled."""
    from ejkernel_core import _call

    traces: list[tuple[str, tuple[Any, ...]]] = []
    original_jit = _call.jitted

    def jitted(form: Any, options: Any, *others: Any) -> Any:
        traces.append((form.operation.name, tuple(options)))
        return original_jit(form, options, *others)

    monkeypatch.setattr(_call, "jitted", jitted)
    return traces


def test_a_new_record_retraces_only_calls_of_its_kind(
    registry: Registry, traces: list[tuple[str, tuple[Any, ...]]]
) -> None:
    registry.register(Operation(name="other", signature=scaled, axes=AXES))
    registry.register(kernel(), "other.one")
    x, narrow = jnp.ones((64, 8)), jnp.ones((64, 4))

    def traces_of_calls() -> list[tuple[str, tuple[Any, ...]]]:
        """The traces of these calls."""
        traces.clear()
        registry.call("scaled", x)
        registry.call("scaled", x, by=2.0)
        registry.call("scaled", x, by=3.0)
        registry.call("scaled", narrow, by=3.0)
        registry.call("other", x)
        return list(traces)

    assert len(traces_of_calls()) == 4
    assert traces_of_calls() == []
    remember(registry, 64, 4)
    assert traces_of_calls() == [("scaled", ())]
    assert traces_of_calls() == []
    registry.remember(registry.invocation("scaled", struct(1024), by=2.0).key, Config(3))
    assert traces_of_calls() == [("scaled", (2.0,))]  # its nearest record may now be this one
    registry.remember(registry.invocation("scaled", struct(1024, 5), by=3.0).key, Config(3))
    assert traces_of_calls() == []  # no call has this dim
    registry.remember(registry.invocation("scaled", struct(64, 4), by=3.0).key, Config(3))
    assert traces_of_calls() == [("scaled", (3.0,))]
    registry.forget()
    assert sorted(traces_of_calls()) == [("scaled", ()), ("scaled", (2.0,)), ("scaled", (3.0,))]
    assert traces_of_calls() == []
    registry.register(kernel(), "other.two")
    assert len(traces_of_calls()) == 4


def test_a_record_of_another_kind_during_a_compilation_does_not_retrace(
    registry: Registry, traces: list[tuple[str, tuple[Any, ...]]]
) -> None:
    x, actions = jnp.ones((64, 8)), [lambda: remember(registry, 64, 4, dim=5), lambda: remember(registry, 128, 4)]

    @hookimpl
    def run_backend(inv, cfg):
        actions.pop(0)() if actions else None
        return inv["x"]

    remembering_kernel = kernel()
    remembering_kernel.run_backend = run_backend
    registry.register(remembering_kernel, "scaled.one")
    registry.call("scaled", x)
    registry.call("scaled", x)
    assert len(traces) == 1  # the new record has another dim
    registry.call("scaled", x, by=1.0)  # an explicit option is another function; the new record is of the same kind
    registry.call("scaled", x, by=1.0)
    registry.call("scaled", x, by=1.0)
    assert len(traces) == 3


def test_a_record_of_the_backward_retraces_the_differentiated_calls(
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
