"""Normalizations against NumPy in float64, and what their calls refuse."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_core
from ejkernel_core import NotDifferentiable
from ejkernel_ops import layer_norm, rms_norm
from ejkernel_ops.rms_norm import definition

NORMS = {"rms_norm": rms_norm, "layer_norm": layer_norm}
RNG = np.random.default_rng(5)
X, RESIDUAL = RNG.standard_normal((2, 3, 5, 40)) + 1
WEIGHT, BIAS = RNG.standard_normal((2, 40))


@pytest.fixture(params=NORMS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def expected(name: str, rows: np.ndarray, weight: Any = 1, bias: Any = 0, epsilon: float = 1e-6) -> np.ndarray:
    rest = rows - rows.mean(-1, keepdims=True) if name == "layer_norm" else rows
    return rest / np.sqrt((rest**2).mean(-1, keepdims=True) + epsilon) * weight + bias


def call(name: str, *args: Any, **options: Any) -> Any:
    return NORMS[name](*(jnp.asarray(a, jnp.float32) for a in args), **options, backend="reference")


def close(actual: Any, desired: Any) -> None:
    np.testing.assert_allclose(np.asarray(actual, np.float64), desired, rtol=2e-5, atol=2e-5)


def test_values(name: str) -> None:
    close(call(name, X), expected(name, X))
    close(call(name, X, WEIGHT, epsilon=0.3), expected(name, X, WEIGHT, epsilon=0.3))
    out, total = call(name, X, WEIGHT, bias=BIAS, residual=RESIDUAL, weight_offset=1.0)
    close(out, expected(name, X + RESIDUAL, WEIGHT + 1, BIAS))
    close(total, X + RESIDUAL)


@pytest.mark.parametrize("is_jitted", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_sum_is_rounded_as_by_a_conversion(dtype: str, is_jitted: bool) -> None:
    numbers = RNG.standard_normal(20000) * 10.0 ** RNG.integers(-9, 6, 20000)
    limits = [0.0, 1e30, np.inf, 65504, 65519, 65520, 2.0**-14, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25]
    array = jnp.asarray([*numbers, *limits, *(-limit for limit in limits)], jnp.float32)
    rounded = jax.jit(definition.rounded, static_argnums=1) if is_jitted else definition.rounded
    # NumPy's conversions: XLA removes two of its own.
    with np.errstate(over="ignore"):
        expected = np.asarray(array).astype(jnp.dtype(dtype)).astype(array.dtype)
    np.testing.assert_array_equal(rounded(array, jnp.dtype(dtype)), expected)


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_cotangents_of_a_rounded_sum_are_not_rounded(name: str, dtype: str, backend: str) -> None:
    """The sum has the dtype of the residual. The gradient of x has more bits, and so do second derivatives."""
    x, weights = jnp.asarray(X, jnp.float32), jnp.asarray(RNG.standard_normal(X.shape), jnp.float32)
    residual = jnp.asarray(RESIDUAL, dtype)

    def actual(x: Any) -> Any:
        out, _ = NORMS[name](x, residual=residual, backend=backend)
        return (out * weights).sum()

    def desired(x: Any) -> Any:
        rounding = (x + residual.astype(x.dtype)).astype(dtype).astype(x.dtype) - x
        rows = x + jax.lax.stop_gradient(rounding)
        rest = rows - rows.mean(-1, keepdims=True) if name == "layer_norm" else rows
        return (rest / jnp.sqrt((rest**2).mean(-1, keepdims=True) + 1e-6) * weights).sum()

    close(jax.grad(actual)(x), jax.grad(desired)(x))
    close(
        jax.grad(lambda x: jnp.sin(jax.grad(actual)(x)).sum())(x),
        jax.grad(lambda x: jnp.sin(jax.grad(desired)(x)).sum())(x),
    )


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_rows_of_a_narrower_residual_have_the_precision_of_x(name: str, backend: str) -> None:
    with jax.enable_x64(True):
        x, residual = jnp.asarray(X), jnp.asarray(RESIDUAL, jnp.float32)

        def loss(x: Any) -> Any:
            return (NORMS[name](x, residual=residual, backend=backend)[0] * WEIGHT).sum()

        rows = np.asarray(jnp.asarray(X + residual, jnp.float32), np.float64)
        out, total = NORMS[name](x, residual=residual, backend=backend)
        np.testing.assert_array_equal(total, rows)
        np.testing.assert_allclose(out, expected(name, rows), rtol=1e-13, atol=1e-13)
        exact = jax.grad(lambda x: (NORMS[name](x, backend="reference") * WEIGHT).sum())(jnp.asarray(rows))
        np.testing.assert_allclose(jax.grad(loss)(x), exact, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize(("dtype", "count"), [("float16", 1), ("bfloat16", 1), ("float32", 0)])
def test_no_compiler_may_leave_out_the_rounding_of_a_sum(name: str, dtype: str, count: int, backend: str) -> None:
    x = jnp.asarray(X, dtype)
    program = jax.jit(lambda x: NORMS[name](x, residual=x, backend=backend))
    assert program.lower(x).as_text().count("stablehlo.reduce_precision") == count


def test_the_rounded_sum_is_normalized(name: str) -> None:
    x, residual = jnp.asarray(X, jnp.bfloat16), jnp.asarray(-X + 1e-3 * RESIDUAL, jnp.bfloat16)
    out, total = NORMS[name](x, residual=residual, epsilon=1e-12, backend="reference")
    exact = (x.astype(jnp.float32) + residual.astype(jnp.float32)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(total, exact)
    assert out.dtype == jnp.bfloat16
    rounded = expected(name, np.asarray(exact, np.float64), epsilon=1e-12)
    np.testing.assert_allclose(np.asarray(out, np.float64), rounded, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_a_sum_below_the_normal_numbers_is_normalized_as_it_is_returned(name: str, backend: str) -> None:
    def call(x: Any, residual: Any = None) -> Any:
        return NORMS[name](x, residual=residual, epsilon=1e-12, backend=backend)

    x = jnp.asarray([[3.03e-5, 2e-5, 1e-8, 4e-8]], jnp.float32)
    out, total = jax.jit(call)(x, jnp.zeros(x.shape, jnp.float16))
    np.testing.assert_allclose(out, call(total.astype(jnp.float32)), rtol=1e-6)


def test_dtypes_of_the_results(name: str) -> None:
    out, total = NORMS[name](jnp.ones((2, 8), jnp.bfloat16), jnp.ones(8), residual=jnp.ones((2, 8)))
    assert (out.dtype, total.dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize(("quantize", "largest", "block"), [("fp8_row", 448, 40), ("int8_row", 127, 40)])
def test_quantized_values(name: str, quantize: str, largest: int, block: int) -> None:
    values, scales = call(name, X, WEIGHT, quantize=quantize)
    exact = expected(name, X, WEIGHT)
    assert scales.shape == (3, 5, 1)
    close(scales, np.abs(exact).max(-1, keepdims=True) / largest)
    unit = 0.5 / 127 if quantize == "int8_row" else 2**-4
    error = np.abs(np.asarray(values, np.float64) * np.asarray(scales) - exact)
    assert (error <= unit * np.abs(exact).max(-1, keepdims=True) + 1e-6).all()
    assert np.abs(np.asarray(values, np.float64)).max(-1).min() == largest


def test_blocks_of_128_have_a_scale_each(name: str) -> None:
    x = RNG.standard_normal((3, 300)) * np.repeat([1, 100, 0.01], 100)
    values, scales, total = call(name, x, residual=np.zeros_like(x), quantize="fp8_block128")
    assert (values.dtype, values.shape, scales.shape) == (jnp.float8_e4m3fn, (3, 300), (3, 3))
    exact = expected(name, x)
    close(scales, np.stack([np.abs(exact[:, i : i + 128]).max(-1) / 448 for i in (0, 128, 256)], -1))
    blocks = np.repeat(np.asarray(scales), 128, -1)[:, :300]
    np.testing.assert_allclose(np.asarray(values, np.float64) * blocks, exact, rtol=2**-4, atol=2**-9 * blocks.max())
    close(total, x)


def test_rows_of_zeros_have_a_scale_of_one() -> None:
    values, scales = call("rms_norm", np.zeros((2, 8)), quantize="int8_row")
    np.testing.assert_array_equal(values, 0)
    np.testing.assert_array_equal(scales, 1)


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_blocks_of_a_symbolic_size_have_a_scale_each(name: str, backend: str) -> None:
    def scaled(x: Any) -> Any:
        return NORMS[name](x, quantize="fp8_block128", backend=backend)

    x = jnp.asarray(RNG.standard_normal((3, 300)), jnp.float32)
    symbolic = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, d"), jnp.float32)
    exported = jax.export.export(jax.jit(scaled))(symbolic)
    for actual, desired in zip(exported.call(x), scaled(x), strict=True):
        np.testing.assert_array_equal(actual, desired)


def test_a_quantized_result_has_no_gradient(name: str) -> None:
    with pytest.raises(NotDifferentiable, match=f"'{name}_quantized' has no gradient for x"):
        jax.grad(lambda x: call(name, x, quantize="fp8_row")[1].sum())(X)


REFUSED = {
    "quantize: takes one of fp8_row, int8_row, fp8_block128; got 'int4'": {"quantize": "int4"},
    "epsilon: must be at least 0; got -1.0": {"epsilon": -1},
    "epsilon: takes a number, known while tracing; got NoneType None": {"epsilon": None},
    "epsilon: takes a number that float32 holds; got 1e+300": {"epsilon": 1e300},
    "epsilon: takes a number that a float holds; got 1000": {"epsilon": 10**400},
    "weight_offset: takes a finite number; got inf": {"weight_offset": float("inf")},
    "weight_offset: needs a weight, which the call does not have": {"weight_offset": 1.0},
    "weight: dim must be 8, as in x; got 7": {"weight": np.ones(7, np.float32)},
    "residual: leading axes must be (2,), as in x; got (3,)": {"residual": np.ones((3, 8), np.float32)},
    "bias: takes float16, bfloat16, float32, float64; got int32": {"bias": np.ones(8, np.int32)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(name: str, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        NORMS[name](jnp.ones((2, 8)), **REFUSED[message])


def test_a_row_without_entries_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="x: dim must be at least 1; got 0"):
        NORMS[name](jnp.ones((2, 0)))


def test_calls_of_as_many_rows_share_their_configurations(name: str) -> None:
    def keys(*shape: int, **options: Any) -> Any:
        return ejkernel_core.invocation(name, jax.ShapeDtypeStruct(shape, jnp.bfloat16), **options).tuning_keys

    assert keys(4, 1000, 64)[1] == keys(4096, 64)[1] == keys(4000, 64, epsilon=1e-3)[1]
    assert keys(4096, 64)[1] != keys(4096, 128)[1]
    assert keys(64, 64)[1].kind == keys(4, 1000, 64)[1].kind


def test_rows_stay_sharded_and_the_gradient_of_the_weight_is_a_sum(name: str) -> None:
    mesh = jax.make_mesh((2, 2), ("data", "seq"), axis_types=(AxisType.Auto,) * 2)
    x, weight = jnp.asarray(np.tile(X, (2, 2, 1))[:4, :8], jnp.float32), jnp.asarray(WEIGHT, jnp.float32)

    def loss(x: Any, weight: Any) -> Any:
        out, total = NORMS[name](x, weight, residual=x / 2)
        return (out**3).sum() + (total**2).sum()

    gradients = jax.grad(loss, argnums=(0, 1))(x, weight)
    sharded = jax.device_put(x, NamedSharding(mesh, P("data", "seq")))
    program = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(sharded, weight).compile()
    assert "all-gather" not in program.as_text()
    for actual, desired in zip(program(sharded, weight), gradients, strict=True):
        np.testing.assert_allclose(actual, desired, rtol=1e-4, atol=1e-4)
