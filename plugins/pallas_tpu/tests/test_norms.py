"""Normalizations on TPUs: their blocks, what they refuse, and their kernels in the interpreter of a whole TPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import ejkernel_core as core
from ejkernel_core import Example
from ejkernel_pallas_tpu.launch._generations import KINDS
from ejkernel_pallas_tpu.norms import Config
from ejkernel_pallas_tpu.norms.kernels import backward, forward, quantized
from ejkernel_pallas_tpu.testing import interpreted_registry
from ejkernel_testing import KernelProofs

KERNELS = {"": forward, "_bwd": backward, "_quantized": quantized}
RMS_NORM = {f"rms_norm{suffix}.pallas_tpu": kernel for suffix, kernel in KERNELS.items()}
LAYER_NORM = {f"layer_norm{suffix}.pallas_tpu": kernel for suffix, kernel in KERNELS.items()}
BY_OP = {name.removesuffix(".pallas_tpu"): kernel for name, kernel in (RMS_NORM | LAYER_NORM).items()}


# -- with races detected ---------------------------------------------------------------------------------------------


class DetectingRaces(KernelProofs):
    """On a chip with two cores, which have their own parts of the rows."""

    refuses = frozenset({"float64", "float16"})
    roundings = 1.5
    names: Sequence[str] = ()

    def examples(self) -> Sequence[Example]:
        examples = [example for example in super().examples() if example.name in self.names]
        return [attrs.evolve(example, checks=frozenset({"values"}), variations=(), long=False) for example in examples]

    @pytest.fixture(autouse=True)
    def _fresh_memory(self):
        pltpu.reset_tpu_interpret_mode_state()
        yield
        pltpu.reset_tpu_interpret_mode_state()


class TestRmsNormDetectingRaces(DetectingRaces):
    kernel = "rms_norm.pallas_tpu"
    backward = "rms_norm_bwd.pallas_tpu"
    registry = interpreted_registry(RMS_NORM, device_kind="TPU v5p", races=True)
    names = ("plain", "a-residual-that-cancels-bfloat16")


class TestLayerNormDetectingRaces(DetectingRaces):
    kernel = "layer_norm.pallas_tpu"
    backward = "layer_norm_bwd.pallas_tpu"
    registry = interpreted_registry(LAYER_NORM, device_kind="TPU v5p", races=True)
    names = ("more-rows-than-programs",)


class TestQuantizedDetectingRaces(DetectingRaces):
    kernel = "rms_norm_quantized.pallas_tpu"
    registry = interpreted_registry(RMS_NORM, races=True)
    names = ("rows-of-zeros-int8_row", "rows-of-zeros-fp8_block128")


# -- blocks ----------------------------------------------------------------------------------------------------------


def arrays(op: str, rows: int, dim: int, dtype: str = "bfloat16", residual: str | None = None) -> dict[str, Any]:
    """A call of an operation, with all arrays it can have, and its options."""

    def array(*sizes: int, dtype: str = dtype) -> Any:
        return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))

    arguments = {"x": array(rows, dim), "weight": array(dim), "bias": array(dim, dtype="float32")}
    if residual is not None:
        arguments["residual"] = array(rows, dim, dtype=residual)
    if op.endswith("_quantized"):
        return {**arguments, "quantize": "fp8_block128"}
    if op.endswith("_bwd"):
        statistics = ("mean", "rstd") if op.startswith("layer") else ("rstd",)
        total = array(rows, dim, dtype=residual or dtype)
        arguments |= {
            "out": arguments["x"],
            "sum": total,
            "d_out": arguments["x"],
            "d_sum": total,
            "wrt": (*arguments,),
        }
        arguments |= {name: array(rows, dtype="float32") for name in statistics}
    return arguments


def invocation(op: str, *sizes: Any, device_kind: str = "TPU v5e", **changes: Any) -> Any:
    inv = core.plan(op, **{**arrays(op, *sizes), **changes}, backend="reference").invocation
    return attrs.evolve(inv, platform="tpu", device_kind=device_kind)


@pytest.mark.parametrize("op", BY_OP)
@pytest.mark.parametrize("device_kind", ["TPU v4", "TPU v5e", "TPU v5p", "TPU v6e", "TPU7x"])
def test_every_configuration_lowers(op, device_kind):
    """Blocks of one group and of several, in the rows and the entries of a row."""
    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(device_kind, 1, "tpu"))
    for sizes in ((1000, 300, "bfloat16", "float32"), (20, 9001, "float32", "float32"), (3, 1, "bfloat16", None)):
        call = arrays(op, *sizes)
        shapes = {name: value for name, value in call.items() if isinstance(value, jax.ShapeDtypeStruct)}
        options = {name: value for name, value in call.items() if name not in shapes}
        for cfg in BY_OP[op].config_space(invocation(op, *sizes, device_kind=device_kind)):

            def function(shapes: Any, options: Any = options, cfg: Any = cfg) -> Any:
                return core.call(op, **shapes, **options, backend="pallas_tpu", cfg=cfg)

            with use_abstract_mesh(mesh):
                lowered = jax.jit(function).trace(shapes).lower(lowering_platforms=("tpu",))
            assert lowered.as_text().count("tpu_custom_call") == 1


@pytest.mark.parametrize("op", BY_OP)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_configurations_fit_and_the_first_is_the_heuristics(op, dtype):
    kernel = BY_OP[op]
    for kind in KINDS:
        for rows, dim in ((1, 1), (1, 32768), (7, 4096), (65536, 64), (16384, 8192)):
            inv = invocation(op, rows, dim, dtype, device_kind=kind)
            space = list(kernel.config_space(inv))
            assert space[0] == kernel.heuristic_cfg(inv)
            assert all(kernel.vmem(inv, cfg) <= KINDS[kind].budget for cfg in space)


@pytest.mark.parametrize("op", BY_OP)
def test_only_v4_has_no_room_for_the_longest_rows(op):
    for kind, chip in KINDS.items():
        inv = invocation(op, 64, 65536, "float32", "float32", device_kind=kind)
        if chip.name == "v4":
            with pytest.raises(core.Unsupported, match="rows of 65536 entries do not fit into the 15 MiB that v4 has"):
                BY_OP[op].heuristic_cfg(inv)
        else:
            assert BY_OP[op].heuristic_cfg(inv)


def test_a_block_that_does_not_fit_is_refused():
    with pytest.raises(core.Unsupported, match="8192 rows of 4096 entries take more than 100 MiB"):
        forward.check_cfg(invocation("rms_norm", 65536, 4096), Config(8192))


@pytest.mark.parametrize("op", BY_OP)
@pytest.mark.parametrize("name", ["x", "weight", "bias"])
def test_dtypes_that_a_tpu_does_not_have_are_refused(op, name):
    inv = invocation(op, 8, 64)
    half = jax.ShapeDtypeStruct(inv[name].shape, jnp.float16)
    inv = attrs.evolve(inv, arguments={**inv.arguments, name: half})
    for cfg in (Config(), Config(interpret=True)):
        with pytest.raises(core.Unsupported, match=f"take bfloat16 and float32; {name} is float16"):
            BY_OP[op].check_cfg(inv, cfg)


def test_plain_jax_is_preferred_except_for_scales_of_128_entries():
    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice("TPU v5e", 1, "tpu"))
    x = jax.ShapeDtypeStruct((64, 256), jnp.bfloat16)

    def backend(op: str, **options: Any) -> str:
        with use_abstract_mesh(mesh):
            lowered = jax.jit(lambda x: core.call(op, x, **options)).trace(x).lower(lowering_platforms=("tpu",))
        return "pallas_tpu" if "tpu_custom_call" in lowered.as_text() else "xla"

    assert backend("rms_norm") == "xla"
    assert backend("rms_norm_quantized", quantize="int8_row") == "xla"
    assert backend("layer_norm_quantized", quantize="fp8_block128") == "pallas_tpu"


# -- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_every_configuration_has_the_same_results(op):
    """Only the order of the sum over rows differs."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, weight, d_out = (
        jax.random.normal(key, shape) for key, shape in zip(keys, ((200, 72), (72,), (200, 72)), strict=True)
    )
    for rows in (8, 16, 64, 128, 256):
        cfg = Config(rows, interpret=True)
        out = core.call(op, x, weight, cfg=cfg)
        assert jnp.allclose(out, core.call(op, x, weight, backend="reference"), atol=1e-5)
        statistics = {"rstd": jax.lax.rsqrt(x.var(1) + 1e-6), "mean": x.mean(1)}
        if op == "rms_norm":
            statistics = {"rstd": jax.lax.rsqrt((x * x).mean(1) + 1e-6)}
        call = {"x": x, "weight": weight, "out": out, "sum": x, "d_out": d_out, **statistics}
        gradients = core.call(f"{op}_bwd", **call, wrt=("weight", "x"), cfg=cfg)
        expected = core.call(f"{op}_bwd", **call, wrt=("weight", "x"), backend="xla")
        assert all(jnp.allclose(result, other, atol=1e-4) for result, other in zip(gradients, expected, strict=True))


def test_without_a_residual_the_sum_is_x():
    x = jnp.ones((4, 16))
    inv = attrs.evolve(core.plan("rms_norm", x, backend="reference").invocation).with_arrays({"x": x})
    assert forward.run_backend(inv, Config(interpret=True))[1] is x
    call = core.plan("rms_norm_quantized", x, quantize="int8_row", backend="reference").invocation
    assert quantized.run_backend(call.with_arrays({"x": x}), Config(interpret=True))[2] is x


@pytest.mark.parametrize("op", BY_OP)
def test_a_call_without_rows_has_a_configuration_and_results(op):
    inv = invocation(op, 0, 64)
    cfg = BY_OP[op].heuristic_cfg(inv)
    zeros = {name: jnp.zeros(a.shape, a.dtype) for name, a in inv.items() if isinstance(a, jax.ShapeDtypeStruct)}
    results = BY_OP[op].run_backend(inv.with_arrays(zeros), cfg)
    expected = core.call(op, **{**arrays(op, 0, 64), **zeros}, backend="reference")
    for result, other in zip(results, expected if isinstance(expected, tuple) else (expected,), strict=False):
        assert (result.shape, result.dtype) == (other.shape, other.dtype)
