"""No configuration is selected where the expected results tell nothing about the kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_core
from ejkernel_core import Axes, Operation, Registry, hookimpl, policy_override
from ejkernel_core._samples import random_array
from ejkernel_core.extend import OPERATIONS, LoadedKernel
from ejkernel_tuning import Tuned
from ejkernel_tuning._autotune import tune
from ejkernel_tuning._calls import passes_of
from ejkernel_tuning._checks import is_constant
from ejkernel_tuning._measurement import NOTHING_TO_SEE
from ejkernel_tuning._samples import sample_inputs


@attrs.frozen
class Config:
    is_right: bool = True


AXES = Axes({"words": "n", "x": "n"}, {"out": "n"}, whole="n", dtypes={"out": "float32"})


def make_registry() -> Registry:
    """``unpack``: the sum of the two nibbles of each word, times x. Half of its configurations return zeros."""
    registry = Registry(plugins="ejkernel-tuning")

    def unpack(inv: Any) -> Any:
        words = inv["words"].astype(jnp.float32)
        return (words % 16 + words // 16) * inv["x"]

    @hookimpl
    def heuristic_cfg(inv: Any) -> Any:
        return Config()

    @hookimpl
    def config_space(inv: Any) -> Any:
        return [Config(True), Config(False)]

    @hookimpl
    def run_backend(inv: Any, cfg: Any) -> Any:
        return unpack(inv) if cfg.is_right else jnp.zeros_like(inv["x"])

    registry.register(Operation(name="unpack", signature=lambda words, x: None, axes=AXES))
    kernel = SimpleNamespace(
        Config=Config, heuristic_cfg=heuristic_cfg, config_space=config_space, run_backend=run_backend
    )
    registry.register(kernel, "unpack.kinds")
    reference = SimpleNamespace(run_backend=hookimpl(lambda inv, cfg: unpack(inv)), PLATFORMS={"cpu": 0})
    registry.register(reference, "unpack.reference")
    return registry


X = jax.ShapeDtypeStruct((512,), "float32")


def tuned(words: Any, x: Any = X) -> Tuned:
    """Measured on these arrays, or on samples where they are abstract."""
    registry = make_registry()
    inv = registry.invocation("unpack", words, x)
    candidates, _ = registry.candidates(inv)
    given = {name: array for name, array in (("words", words), ("x", x)) if isinstance(array, jax.Array)}
    return tune(inv, candidates, registry.reference(inv), 20.0, sample_inputs(inv, given), calls=(1, 4))


def test_a_kernel_of_zeros_is_not_selected() -> None:
    """Of eight bits, samples are not zeros."""
    result = tuned(jax.ShapeDtypeStruct((512,), "uint8"))
    assert result.best is not None
    assert result.best.cfg != Config(False)
    (zeros,) = (entry for entry in result.entries if entry.cfg == Config(False))
    assert zeros.reason.startswith("wrong: ")
    assert zeros.is_checked


@pytest.mark.parametrize(
    "arrays",
    [
        (jnp.zeros(512, "uint8"),),
        (jax.ShapeDtypeStruct((512,), "int32"),),
        (jnp.full(512, 17, "uint8"), jnp.ones(512)),
    ],
    ids=["zeros", "samples of wide integers", "one value"],
)
def test_results_of_one_value_prove_nothing(arrays: Any) -> None:
    result = tuned(*arrays)
    assert result.best is None
    assert result.records == ()
    assert NOTHING_TO_SEE in result.notes
    assert not any(entry.is_checked for entry in result.entries)


def test_the_heuristic_stays_where_nothing_is_proved() -> None:
    registry, words = make_registry(), jnp.arange(512, dtype="int32")  # of which the samples are zeros
    with policy_override(autotune=True, budget_s=20), pytest.warns(RuntimeWarning, match="one value alone"):
        registry.call("unpack", words, jnp.arange(512.0))
    plan = registry.plan("unpack", words, jnp.arange(512.0))
    assert (plan.cfg, plan.origin) == (Config(True), "heuristic")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([2.0, 2.0, 2.0], True),
        ([2.0, 2.0, 2.5], False),
        ([np.nan, np.nan], True),
        ([np.nan, 1.0], False),
        ([1.0, np.nan], False),
        ([], True),
        ([0.0], True),
        ([3.0], False),
        (3.0, False),
        (0.0, True),
        ([True, True], True),
        ([7, 7, 8], False),
        ([-np.inf, -np.inf], True),
    ],
)
def test_constant_results(values: Any, expected: bool) -> None:
    assert is_constant(jnp.asarray(values)) is expected


# -- samples -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int4", "uint4", "int2", "uint2"])
def test_samples_of_narrow_integers_are_all_their_values(dtype: str) -> None:
    sample = np.asarray(random_array("words", jax.ShapeDtypeStruct((5000,), dtype), jax.random.key(1)).astype(int))
    limits = jnp.iinfo(dtype)
    assert set(sample) == {*range(int(limits.min), int(limits.max) + 1)}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("rhs_scale", "float32"),
        ("scales", "bfloat16"),
        ("scale", "float8_e4m3fn"),
        ("x", "float8_e8m0fnu"),
        ("k_scale", "float8_e8m0fnu"),
    ],
)
def test_samples_of_scales_are_positive_and_finite(name: str, dtype: str) -> None:
    sample = np.asarray(random_array(name, jax.ShapeDtypeStruct((500,), dtype), jax.random.key(1)).astype("float32"))
    assert set(sample) == {2.0**exponent for exponent in range(-4, 1)}


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "bfloat16", "float64"])
def test_samples_of_narrow_numbers_have_both_signs(dtype: str) -> None:
    with jax.enable_x64(True):
        sample = random_array("upscale", jax.ShapeDtypeStruct((500,), dtype), jax.random.key(1))
    assert sample.dtype == dtype
    assert 0.8 < float(sample.astype("float32").std()) < 1.3
    assert abs(float(sample.astype("float32").mean())) < 0.2


def forward_operations() -> list[str]:
    registry = ejkernel_core.registry
    operations = (registry.operation(name) for name in registry.names(OPERATIONS))
    # Context attention says that it is not measured by itself.
    return [o.name for o in operations if o.examples is not None and o.name != "context_attention"]


@pytest.mark.parametrize("op", forward_operations())
def test_the_samples_of_each_operation_prove_something(op: str) -> None:
    """A kernel of zeros would be found: no result of the reference is constant, forward or backward."""
    registry = ejkernel_core.registry
    examples = registry.operation(op).examples
    assert examples is not None
    arguments = next(e.abstract() for e in examples() if not e.long and "values" in e.checks)
    passes = passes_of(op, arguments)
    assert [inv.op for inv in passes] == [name for name in (op, registry.operation(op).backward) if name]
    for inv in passes:
        reference = registry.reference(inv)
        assert isinstance(reference, LoadedKernel)
        run = jax.jit(lambda arrays, inv=inv, reference=reference: reference.run_backend(inv.with_arrays(arrays), None))
        results = run(sample_inputs(inv))
        assert len(results) == len(inv.arguments.get("wrt") or inv.operation.results)
        assert not [place for place, result in enumerate(results) if is_constant(result)], inv
