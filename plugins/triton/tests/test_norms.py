"""Normalizations in Triton: the values of every kind of configuration, and the resources that they take."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_core
from ejkernel_core import Invocation, Unsupported
from ejkernel_triton.interpreter import Compiled, compiled_for, interpreted, interpreted_registry
from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.norms import BackwardConfig as Backward
from ejkernel_triton.norms import Config as Forward
from ejkernel_triton.norms import _launch, kernels

if _jax_triton.unavailable_reason():
    pytest.skip(_jax_triton.unavailable_reason(), allow_module_level=True)

H200, A100 = "NVIDIA H200", "NVIDIA A100-SXM4-80GB"
CAPABILITIES = {H200: (9, 0), A100: (8, 0)}
NORMS = ("rms_norm", "layer_norm")
KERNELS = {
    f"{op}{suffix}": kernel
    for op in NORMS
    for suffix, kernel in (("", kernels.forward), ("_bwd", kernels.backward), ("_quantized", kernels.quantized))
}
FORMATS = ("fp8_row", "int8_row", "fp8_block128")


# -- values ----------------------------------------------------------------------------------------------------------

#: By the length of a row: whole rows, rows with a tail, and rows in blocks of which the last is partly filled or full.
FORWARD: dict[int, tuple[Forward, ...]] = {
    200: (Forward(4, 2), Forward(1, 1), Forward(8, 8, 1), Forward(1, 4, 0, 1024)),
    2600: (Forward(2, 4), Forward(1, 8), Forward(1, 16, 2), Forward(1, 4, 0, 1024), Forward(2, 8, 0, 2048)),
    2048: (Forward(1, 4), Forward(1, 4, 0, 1024)),
}
BACKWARD: dict[int, tuple[Backward, ...]] = {
    200: (Backward(4, 2, 2), Backward(1, 1, 1), Backward(8, 8, 1, 1024), Backward(1, 4, 1, 1024, 128)),
    2600: (Backward(1, 8, 2), Backward(1, 16, 1, 2048), Backward(1, 4, 1, 1024, 256), Backward(2, 8, 1, 2048, 64)),
    2048: (Backward(1, 8, 2), Backward(2, 8, 1, 1024), Backward(1, 4, 1, 1024, 256)),
}


@pytest.fixture(scope="module", name="registry")
def _registry() -> Iterator[Any]:
    with interpreted():
        yield interpreted_registry({f"{op}.triton": kernel for op, kernel in KERNELS.items()})


def arrays(dim: int, rows: int = 13, dtype: str = "float32") -> dict[str, jax.Array]:
    shapes = {"x": (rows, dim), "weight": (dim,), "bias": (dim,), "residual": (rows, dim)}
    draws = np.random.default_rng(dim)
    return {name: jnp.asarray(draws.standard_normal(shape) + 0.5, dtype) for name, shape in shapes.items()}


def close(actual: Any, expected: Any) -> None:
    for own, reference in zip(actual, expected, strict=True):
        assert own.dtype == reference.dtype
        np.testing.assert_allclose(own, reference, rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("op", NORMS)
@pytest.mark.parametrize(("dim", "cfg"), [(dim, cfg) for dim, configs in FORWARD.items() for cfg in configs], ids=str)
def test_every_kind_of_configuration_normalizes(registry: Any, op: str, dim: int, cfg: Any) -> None:
    arguments = arrays(dim)
    expected = ejkernel_core.call(op, **arguments, backend="reference")
    close(registry.call(op, **arguments, backend="triton", cfg=cfg), expected)


@pytest.mark.parametrize("op", NORMS)
@pytest.mark.parametrize(("dim", "cfg"), [(dim, cfg) for dim, configs in BACKWARD.items() for cfg in configs], ids=str)
def test_every_kind_of_configuration_differentiates(registry: Any, op: str, dim: int, cfg: Any) -> None:
    arguments = backward_arguments(op, dim)
    expected = ejkernel_core.call(f"{op}_bwd", **arguments, backend="reference")
    results = registry.call(f"{op}_bwd", **arguments, backend="triton", cfg=cfg)
    close(results, expected)
    again = registry.call(f"{op}_bwd", **arguments, backend="triton", cfg=cfg)
    for own, second in zip(results, again, strict=True):
        np.testing.assert_array_equal(own, second)


@pytest.mark.parametrize("op", NORMS)
def test_programs_take_one_tile_after_the_other(registry: Any, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "multiprocessors", lambda inv: 1)
    arguments = arrays(264, rows=83)
    expected = ejkernel_core.call(op, **arguments, backend="reference")
    close(registry.call(op, **arguments, backend="triton", cfg=Forward(4, 2, 3)), expected)
    arguments = backward_arguments(op, 264, rows=83)
    expected = ejkernel_core.call(f"{op}_bwd", **arguments, backend="reference")
    for cfg in (Backward(4, 4, 3), Backward(2, 4, 3, 1024), Backward(2, 4, 1, 1024, 64), Backward(4, 4, 1, 1024, 256)):
        results = registry.call(f"{op}_bwd", **arguments, backend="triton", cfg=cfg)
        close([result / max(1, abs(result).max()) for result in results], [e / max(1, abs(e).max()) for e in expected])


def backward_arguments(op: str, dim: int, rows: int = 13, **options: Any) -> dict[str, Any]:
    arguments = arrays(dim, rows)
    total = arguments["x"] + arguments["residual"]
    rest = total - total.mean(-1, keepdims=True) if op == "layer_norm" else total
    statistics = {"rstd": jax.lax.rsqrt((rest * rest).mean(-1) + 1e-6)}
    if op == "layer_norm":
        statistics["mean"] = total.mean(-1)
    cotangents = {"d_out": jnp.sin(total), "d_sum": jnp.cos(3 * total)}
    wrt = ("residual", "bias", "x", "weight")
    return {**arguments, "out": total, "sum": total, **statistics, **cotangents, "wrt": wrt, **options}


@pytest.mark.parametrize("op", NORMS)
@pytest.mark.parametrize("wrt", [("bias",), ("weight",), ("x",), ("residual", "weight")])
def test_only_the_requested_gradients_are_computed(registry: Any, op: str, wrt: tuple[str, ...]) -> None:
    arguments = backward_arguments(op, 200, wrt=wrt)
    expected = ejkernel_core.call(f"{op}_bwd", **arguments, backend="reference")
    close(registry.call(f"{op}_bwd", **arguments, backend="triton"), expected)


@pytest.mark.parametrize("op", NORMS)
@pytest.mark.parametrize(("dim", "is_held"), [(9001, True), (20000, False)])
def test_gradients_of_long_rows_alone(registry: Any, op: str, dim: int, is_held: bool) -> None:
    arguments = backward_arguments(op, dim, rows=3, wrt=("x",))
    card = invocation(f"{op}_bwd", H200, **arguments)
    heuristic = KERNELS[f"{op}_bwd"].heuristic_cfg(card)
    assert (heuristic.columns == 0) == is_held
    for cfg in KERNELS[f"{op}_bwd"].config_space(card):
        KERNELS[f"{op}_bwd"].check_cfg(card, cfg)
    expected = ejkernel_core.call(f"{op}_bwd", **arguments, backend="reference")
    close(registry.call(f"{op}_bwd", **arguments, backend="triton", cfg=heuristic), expected)


@pytest.mark.parametrize("op", NORMS)
@pytest.mark.parametrize("absent", [("d_out",), ("d_out", "d_sum"), ("d_sum",)], ids=str)
def test_cotangents_that_are_absent_are_zeros(registry: Any, op: str, absent: tuple[str, ...]) -> None:
    arguments = backward_arguments(op, 200, **dict.fromkeys(absent))
    expected = ejkernel_core.call(f"{op}_bwd", **arguments, backend="reference")
    close(registry.call(f"{op}_bwd", **arguments, backend="triton"), expected)


@pytest.mark.parametrize("op", NORMS)
@pytest.mark.parametrize("quantize", FORMATS)
@pytest.mark.parametrize(("dim", "cfg"), [(dim, cfg) for dim, configs in FORWARD.items() for cfg in configs], ids=str)
def test_every_kind_of_configuration_quantizes(registry: Any, op: str, quantize: str, dim: int, cfg: Any) -> None:
    cfg = attrs.evolve(cfg, programs=0)
    arguments = {**arrays(dim), "quantize": quantize}
    values, scales, total = registry.call(f"{op}_quantized", **arguments, backend="triton", cfg=cfg)
    expected, expected_scales, expected_total = ejkernel_core.call(f"{op}_quantized", **arguments, backend="reference")
    close((scales, total), (expected_scales, expected_total))
    assert values.dtype == expected.dtype
    differ = np.asarray(values, np.float32) != np.asarray(expected, np.float32)
    assert differ.mean() <= 1e-3  # numbers near the middle of two others


def test_halves_are_rounded_to_even(registry: Any) -> None:
    for scale in (1.0, 0.5, 4.0):
        weight = scale * jnp.asarray([0.5, 1.5, 2.5, -0.5, -3.5, 127.0])
        values, scales = registry.call(
            "rms_norm_quantized", jnp.ones((1, 6)), weight, epsilon=0.0, quantize="int8_row", backend="triton"
        )
        assert scales.tolist() == [[scale]]
        assert values.tolist() == [[0, 2, 2, 0, -4, 127]]


@pytest.mark.parametrize("op", NORMS)
def test_without_a_residual_the_sum_is_x_itself(op: str) -> None:
    x = jnp.ones((0, 8))
    inv = attrs.evolve(invocation(op, H200, x=x), arguments={**invocation(op, H200, x=x).arguments, "x": x})
    assert KERNELS[op].run_backend(inv, Forward())[1] is x


# -- resources -------------------------------------------------------------------------------------------------------

DIMS = (64, 1000, 1024, 2560, 4096, 5120, 8192, 16384, 32768, 65536)
FEW_DIMS = (64, 4096, 5120, 65536)
QUICK = (64, 4096)


def call_of(
    op: str, dim: int, dtype: str = "bfloat16", rows: int = 16384, quantize: str = "int8_row"
) -> dict[str, Any]:
    """The arguments of a call: without bias and residual for ``rms_norm``, with all for ``layer_norm``."""
    x, row = (jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in ((rows, dim), (dim,)))
    statistic = jax.ShapeDtypeStruct((rows,), jnp.promote_types(dtype, "float32"))
    arguments: dict[str, Any] = {"x": x, "weight": row}
    is_centered = op.startswith("layer_norm")
    if is_centered:
        arguments |= {"bias": row, "residual": x}
    if op.endswith("_bwd"):
        arguments |= {"out": x, "sum": x, "rstd": statistic, "d_out": x}
        arguments |= {"mean": statistic, "d_sum": x} if is_centered else {}
        arguments["wrt"] = ("x", "weight", "bias") if is_centered else ("x", "weight")
    return arguments | ({"quantize": quantize} if op.endswith("_quantized") else {})


def invocation(op: str, card: str, **arguments: Any) -> Invocation:
    inv = ejkernel_core.invocation(op, **arguments)
    return attrs.evolve(inv, platform="gpu", device_kind=card, compute_capability=CAPABILITIES[card])


def kernels_of(op: str, card: str, arguments: Mapping[str, Any], cfg: Any = None) -> list[Compiled]:
    given = {name: value for name, value in arguments.items() if hasattr(value, "shape")}
    options = {name: value for name, value in arguments.items() if name not in given}
    return compiled_for(card, lambda a: ejkernel_core.call(op, **a, **options, backend="triton", cfg=cfg), given)


def check(op: str, card: str, arguments: Mapping[str, Any], cfg: Any) -> None:
    for kernel in kernels_of(op, card, arguments, cfg):
        case = f"{op} {arguments['x'].shape} {arguments['x'].dtype} on {card}, {cfg}: {kernel}"
        # Only Triton 3.6 spills, two registers at most.
        is_exception = op.endswith("_quantized") and card == A100 and str(arguments["x"].dtype) == "float32"
        # Three registers at most: the times with them are in docs/measurements.
        is_wide = kernel.name == "differentiate_wide" and arguments["x"].shape[-1] > 8192
        # One program of 1,024 threads on a multiprocessor: measured as well, and the fastest also where it spills.
        is_alone = cfg.num_warps == 32 and arguments["x"].shape[-1] > 16384 and not op.endswith("_bwd")
        assert kernel.spilled <= (272 if is_alone else 12 if is_wide else 8 * is_exception), case
        assert ".local" not in kernel.ptx, case  # no array in local memory
        assert kernel.shared_memory <= 64 * 1024, case
        is_persistent = cfg.programs and kernel.name in ("normalize", "differentiate", "differentiate_wide")
        if is_persistent and card == H200:
            registers = 8 * -(-kernel.registers // 8) * 32 * kernel.num_warps
            assert cfg.programs * registers <= 65536, f"{case}: its programs do not run at the same time"


@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize("dim", QUICK)
def test_the_heuristics_configurations_spill_nothing(op: str, dim: int) -> None:
    arguments = call_of(op, dim)
    check(op, H200, arguments, KERNELS[op].heuristic_cfg(invocation(op, H200, **arguments)))


@pytest.mark.long
@pytest.mark.parametrize("card", CAPABILITIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize("dim", DIMS)
def test_every_heuristic_configuration_spills_nothing(op: str, dim: int, dtype: str, card: str) -> None:
    arguments = call_of(op, dim, dtype)
    check(op, card, arguments, KERNELS[op].heuristic_cfg(invocation(op, card, **arguments)))


@pytest.mark.long
@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize("dim", DIMS)
def test_every_configuration_spills_nothing(op: str, dim: int) -> None:
    for quantize in FORMATS if op.endswith("_quantized") else FORMATS[:1]:
        arguments = call_of(op, dim, quantize=quantize)
        for cfg in KERNELS[op].config_space(invocation(op, H200, **arguments)):
            check(op, H200, arguments, cfg)


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm_bwd"])
def test_threads_load_and_store_16_bytes(op: str) -> None:
    arguments = call_of(op, 4096)
    (kernel,) = kernels_of(op, H200, arguments)
    rows = KERNELS[op].heuristic_cfg(invocation(op, H200, **arguments)).rows
    wide = {verb: len(re.findall(rf"{verb}\.global[\w.:]*\.v4\.b32", kernel.ptx)) for verb in ("ld", "st")}
    every = {verb: kernel.count(f"{verb}.global") for verb in ("ld", "st")}
    statistics = rows * (2 if op.startswith("layer_norm") else 1)
    assert every["st"] - wide["st"] <= statistics
    assert every["ld"] - wide["ld"] <= 2 * statistics if op.endswith("_bwd") else every["ld"] == wide["ld"]


def test_float8_is_rounded_once() -> None:
    (kernel,) = kernels_of("rms_norm_quantized", H200, call_of("rms_norm_quantized", 4096, quantize="fp8_row"))
    assert kernel.count("cvt.rn.satfinite.e4m3x2.f32")
    assert not kernel.count("cvt.rn.satfinite.e4m3x2.f16x2")


@pytest.mark.parametrize("op", KERNELS)
def test_arrays_without_entries_launch_nothing(op: str) -> None:
    assert kernels_of(op, H200, call_of(op, 64, rows=0)) == []


# -- what is refused, and what is left to XLA --------------------------------------------------------------------------


@pytest.mark.parametrize("op", KERNELS)
def test_float64_is_refused(op: str) -> None:
    with jax.enable_x64(True), pytest.raises(Unsupported, match="take float16, bfloat16, float32; x is float64"):
        KERNELS[op].heuristic_cfg(invocation(op, H200, **call_of(op, 64, "float64")))


@pytest.mark.parametrize("op", ["rms_norm_quantized", "layer_norm_quantized"])
def test_float8_is_refused_before_ada(op: str) -> None:
    for quantize in ("fp8_row", "fp8_block128"):
        with pytest.raises(Unsupported, match=r"from compute capability 8.9 \(Ada\) on; this GPU has 8.0"):
            KERNELS[op].heuristic_cfg(invocation(op, A100, **call_of(op, 64, quantize=quantize)))
    assert KERNELS[op].heuristic_cfg(invocation(op, A100, **call_of(op, 64, quantize="int8_row")))


@pytest.mark.parametrize(
    ("op", "cfg", "message"),
    [
        ("rms_norm", Forward(4, 1), "1 warps hold 2048 entries, and a tile has 16384: take fewer rows"),
        ("rms_norm", Forward(1, 8, 2, 2048), "programs must be 0"),
        ("rms_norm_quantized", Forward(1, 8, 2), "programs must be 0"),
        ("layer_norm_bwd", Backward(1, 8, 1, 0, 256), "takes programs=1, and a block for the first one"),
        (
            "layer_norm_bwd",
            Backward(4, 32, 1, 2048, 0),
            "holds 16384 entries of rows or their sums at most: take columns",
        ),
    ],
)
def test_configurations_that_cannot_run_are_refused(op: str, cfg: Any, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        KERNELS[op].check_cfg(invocation(op, H200, **call_of(op, 4096)), cfg)


@pytest.mark.parametrize("op", KERNELS)
def test_every_offered_configuration_is_accepted(op: str) -> None:
    for dim in (1, 3, *DIMS, 40000):
        for rows in (1, 700, 65536):
            inv = invocation(op, H200, **call_of(op, dim, rows=rows))
            for cfg in KERNELS[op].config_space(inv):
                KERNELS[op].check_cfg(inv, cfg)


def ranks_of(op: str, sizes: Iterable[tuple[int, int]]) -> list[int]:
    rank = KERNELS[op].PLATFORMS["gpu"]
    return [rank(invocation(op, H200, **call_of(op, dim, rows=rows))) for rows, dim in sizes]


def test_few_entries_are_left_to_xla() -> None:
    sizes = [(1, 4096), (1024, 2048), (16384, 64), (7, 524288), (1025, 2048), (16384, 256), (8, 524288)]
    assert ranks_of("rms_norm", sizes) == [5, 5, 5, 5, 50, 50, 50]
    assert ranks_of("rms_norm_quantized", sizes) == [50, 50, 50, 5, 50, 50, 50]


def test_gradients_of_few_long_rows_are_left_to_xla() -> None:
    """One multiprocessor reads a row, and there are 132."""
    sizes = [(131, 8192), (132, 8192), (395, 16384), (396, 16384), (64, 4096), (16, 2048), (17, 2048)]
    assert ranks_of("rms_norm_bwd", sizes) == [5, 50, 5, 50, 50, 5, 50]


def test_long_rows_are_held_or_read_twice_by_one_program_on_each_multiprocessor() -> None:
    def heuristic(dim: int, dtype: str) -> tuple[int, int]:
        cfg = kernels.forward.heuristic_cfg(invocation("rms_norm", H200, **call_of("rms_norm", dim, dtype)))
        return cfg.num_warps, cfg.block

    assert [heuristic(dim, "bfloat16") for dim in (16384, 20000, 32768, 32769)] == [
        (16, 0),
        (32, 0),
        (32, 0),
        (32, 16384),
    ]
    assert [heuristic(dim, "float32") for dim in (32768, 65536)] == [(16, 8192), (16, 8192)]
