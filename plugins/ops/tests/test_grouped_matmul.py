"""``grouped_matmul`` against NumPy in float64, its edges, and what its calls refuse."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_core
from ejkernel_core import NotDifferentiable
from ejkernel_ops import grouped_matmul

RNG = np.random.default_rng(7)
SIZES = np.array([5, 0, 11, 1], np.int32)
LHS, RHS = RNG.standard_normal((20, 6)), RNG.standard_normal((4, 6, 8))
BIAS = RNG.standard_normal((4, 8))
BACKENDS = ("reference", "xla")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def expected(lhs: np.ndarray, rhs: np.ndarray, sizes: Any, bias: Any = None, first: int = 0) -> np.ndarray:
    """The products of the groups from ``first`` on, group by group."""
    out = np.zeros((len(lhs), rhs.shape[2]))
    ends = np.cumsum(sizes)
    for group, matrix in enumerate(rhs, first):
        rows = slice(ends[group] - sizes[group], ends[group])
        out[rows] = lhs[rows] @ matrix + (0 if bias is None else bias[group - first])
    return out


def call(*args: Any, **options: Any) -> Any:
    lhs, rhs, sizes = args
    return grouped_matmul(jnp.asarray(lhs, jnp.float32), jnp.asarray(rhs, jnp.float32), jnp.asarray(sizes), **options)


def close(actual: Any, desired: Any) -> None:
    np.testing.assert_allclose(np.asarray(actual, np.float64), desired, rtol=2e-5, atol=2e-5)


def test_values(backend: str) -> None:
    close(call(LHS, RHS, SIZES, backend=backend), expected(LHS, RHS, SIZES))
    transposed = jnp.asarray(RHS.swapaxes(1, 2), jnp.float32)
    close(call(LHS, transposed, SIZES, transpose_rhs=True, backend=backend), expected(LHS, RHS, SIZES))
    biased = call(LHS, RHS, SIZES, rhs_bias=jnp.asarray(BIAS, jnp.float32), backend=backend)
    close(biased, expected(LHS, RHS, SIZES, BIAS))
    assert not np.asarray(biased)[17:].any()  # of no group, and without a bias


def test_a_part_of_the_groups(backend: str) -> None:
    for first in (0, 1, 2):
        part = RHS[first : first + 2]
        close(
            call(LHS, part, SIZES, group_offset=jnp.array([first]), backend=backend),
            expected(LHS, part, SIZES, first=first),
        )
    # Matrices of groups that there are not, as of a device that has fewer experts than others.
    beyond = call(LHS, RHS[2:], SIZES, group_offset=3, backend=backend)
    close(beyond, expected(LHS, RHS[2:3], SIZES, first=3))
    before = call(LHS, RHS[:2], SIZES, group_offset=-1, backend=backend)
    close(before, expected(LHS, RHS[1:2], SIZES))
    with_scalar = call(LHS, RHS[1:3], SIZES, group_offset=1, backend=backend)
    close(with_scalar, expected(LHS, RHS[1:3], SIZES, first=1))


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def oai(hidden: np.ndarray) -> np.ndarray:
    gate, up = np.minimum(hidden[:, ::2], 7), np.clip(hidden[:, 1::2], -7, 7)
    return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)


ACTIVATIONS = {
    "silu_gated": lambda hidden: silu(hidden[:, :4]) * hidden[:, 4:],
    "gelu_gated": lambda hidden: gelu(hidden[:, :4]) * hidden[:, 4:],
    "swiglu_oai": oai,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(backend: str, activation: Any) -> None:
    lhs = 2 * LHS  # beyond the limits of swiglu_oai
    hidden = expected(lhs, RHS, SIZES, BIAS)
    out = call(lhs, RHS, SIZES, rhs_bias=jnp.asarray(BIAS, jnp.float32), activation=activation, backend=backend)
    assert np.abs(hidden).max() > 7
    close(out, ACTIVATIONS[activation](hidden))


def test_gradients(backend: str) -> None:
    """By value: those of an empty group are exactly 0, and rows of no group have no part in any."""
    weights = RNG.standard_normal((20, 8))
    lhs = np.concatenate([LHS[:17], np.full((3, 6), np.nan)])

    def loss(lhs: Any, rhs: Any, bias: Any) -> Any:
        out = call(lhs, rhs, SIZES, rhs_bias=bias, backend=backend)
        return (out[:17] * weights[:17]).sum()

    arrays = (jnp.asarray(a, jnp.float32) for a in (lhs, RHS, BIAS))
    d_lhs, d_rhs, d_bias = jax.grad(loss, (0, 1, 2))(*arrays)
    ends = np.cumsum(SIZES)
    for group, (end, size) in enumerate(zip(ends, SIZES, strict=True)):
        rows = slice(end - size, end)
        close(d_lhs[rows], weights[rows] @ RHS[group].T)
        close(d_rhs[group], lhs[rows].T @ weights[rows])
        close(d_bias[group], weights[rows].sum(0))
    assert not np.asarray(d_rhs[1]).any()
    assert not np.asarray(d_bias[1]).any()
    assert not np.asarray(d_lhs[17:]).any()


def test_two_calls_are_differentiated_in_different_arguments(backend: str) -> None:
    lhs, rhs = jnp.asarray(LHS, jnp.float32), jnp.asarray(RHS, jnp.float32)
    back = jnp.asarray(RHS.swapaxes(1, 2), jnp.float32)

    def layer(function: Any, lhs: Any, rhs: Any) -> Any:
        hidden = function(lhs, jax.lax.stop_gradient(rhs))
        return jnp.sin(function(jnp.tanh(hidden), back) + function(jax.lax.stop_gradient(lhs), rhs) @ back[0]).sum()

    def dense(lhs: Any, rhs: Any) -> Any:
        groups = np.repeat(np.arange(4), SIZES)
        out = jnp.einsum("mk,mkn->mn", lhs[:17], rhs[groups], precision="highest")
        return jnp.concatenate([out, jnp.zeros((3, out.shape[1]))])

    ours = lambda lhs, rhs: call(lhs, rhs, SIZES, backend=backend)
    for argnums in (0, 1, (0, 1)):
        actual = jax.jit(jax.grad(lambda *a: layer(ours, *a), argnums))(lhs, rhs)
        desired = jax.jit(jax.grad(lambda *a: layer(dense, *a), argnums))(lhs, rhs)
        jax.tree.map(close, actual, desired)


def test_no_rows_no_columns(backend: str) -> None:
    assert call(LHS[:0], RHS, [0, 0, 0, 0], backend=backend).shape == (0, 8)
    assert call(LHS, RHS[:, :, :0], SIZES, backend=backend).shape == (20, 0)
    d_rhs = jax.grad(lambda rhs: call(LHS[:0], rhs, [0, 0, 0, 0], backend=backend).sum())(jnp.asarray(RHS, jnp.float32))
    assert not np.asarray(d_rhs).any()


def test_the_preferred_dtype_is_that_of_the_result(backend: str) -> None:
    lhs, rhs = jnp.asarray(LHS, jnp.bfloat16), jnp.asarray(RHS, jnp.bfloat16)
    out = grouped_matmul(lhs, rhs, SIZES, preferred_element_type=jnp.float32, backend=backend)
    assert out.dtype == jnp.float32
    close(out, expected(np.asarray(lhs, np.float64), np.asarray(rhs, np.float64), SIZES))


def test_in_a_loop_the_sizes_are_those_of_each_step(backend: str) -> None:
    sizes = jnp.asarray([[5, 0, 11, 1], [0, 20, 0, 0], [1, 2, 3, 4]], jnp.int32)
    lhs, rhs = jnp.asarray(LHS, jnp.float32), jnp.asarray(RHS, jnp.float32)
    _, out = jax.lax.scan(lambda _, s: (None, grouped_matmul(lhs, rhs, s, backend=backend)), None, sizes)
    for i, own in enumerate(np.asarray(sizes)):
        close(out[i], expected(LHS, RHS, own))


def test_xla_multiplies_no_row_with_all_matrices() -> None:
    """A dense product over all groups would be 64 times the work."""
    lhs, rhs = jax.ShapeDtypeStruct((512, 64), "float32"), jax.ShapeDtypeStruct((64, 64, 64), "float32")
    program = jax.jit(lambda *a: grouped_matmul(*a, backend="xla"))
    compiled = program.lower(lhs, rhs, jax.ShapeDtypeStruct((64,), "int32")).compile()
    memory: Any = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 4 * (512 * 64 + 64 * 64 * 2)


# -- refusals --------------------------------------------------------------------------------------------------------

ARRAYS = {"lhs": np.ones((20, 6), np.float32), "rhs": np.ones((4, 6, 8), np.float32), "group_sizes": SIZES}


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"lhs": np.ones((2, 20, 6), np.float32)}, ValueError, "lhs: takes (rows, k); got shape (2, 20, 6)"),
        ({"rhs": np.ones((6, 8), np.float32)}, ValueError, "rhs: takes (groups, k, n); got shape (6, 8)"),
        (
            {"rhs": np.ones((8, 6), np.float32), "transpose_rhs": True},
            ValueError,
            "rhs: takes (groups, n, k); got shape (8, 6)",
        ),
        ({"rhs": np.ones((4, 7, 8), np.float32)}, ValueError, "k"),
        ({"rhs": np.ones((4, 6, 8), np.float16)}, TypeError, "rhs: takes the dtype of lhs, float32; got float16"),
        ({"rhs": np.ones((4, 6, 8), np.int8)}, TypeError, "rhs: quantized matrices are not taken yet; got int8"),
        ({"lhs": np.ones((20, 6), np.int32)}, TypeError, "lhs: takes float16, bfloat16, float32, float64; got int32"),
        ({"group_sizes": SIZES.astype(np.float32)}, TypeError, "group_sizes: takes integers; got float32"),
        ({"group_sizes": SIZES.astype(bool)}, TypeError, "group_sizes: takes integers; got bool"),
        ({"group_sizes": SIZES[:3]}, ValueError, "group_sizes: takes one size for each of the 4 groups of rhs; got 3"),
        ({"group_sizes": SIZES[None]}, ValueError, "group_sizes: takes (groups,); got shape (1, 4)"),
        ({"group_offset": np.array([1, 2])}, ValueError, "group_offset: takes one integer, of shape (1,) or ()"),
        ({"group_offset": np.array([[1]])}, ValueError, "of shape (1,) or (); got shape (1, 1)"),
        ({"group_offset": np.array([1.0])}, TypeError, "group_offset: takes integers; got float"),
        ({"rhs": np.ones((5, 6, 8), np.float32), "group_offset": np.array([0])}, ValueError, "at least the 5 of rhs"),
        ({"rhs": np.ones((4, 6, 7), np.float32), "activation": "silu_gated"}, ValueError, "an even n; rhs has n = 7"),
        ({"activation": "silu"}, ValueError, "activation: takes 'silu_gated', 'gelu_gated', 'swiglu_oai', or None"),
        ({"rhs_bias": np.ones((4, 7), np.float32)}, ValueError, "rhs_bias"),
        ({"rhs_bias": np.ones((4, 8), np.int32)}, TypeError, "rhs_bias: takes float16"),
        ({"transpose_rhs": 1}, TypeError, "transpose_rhs: takes True or False; got int 1"),
        (
            {"precision": "exact"},
            ValueError,
            "precision: takes 'highest', 'high', 'default', jax.lax.Precision, or None",
        ),
        ({"preferred_element_type": "int32"}, TypeError, "preferred_element_type: takes float16"),
        ({"preferred_element_type": "fp32"}, TypeError, "preferred_element_type: takes float16"),
        ({"preferred_element_type": 0}, TypeError, "preferred_element_type: takes float16"),
        ({"preferred_element_type": "float64"}, TypeError, "float64 is for float64 arrays"),
        ({"offs": SIZES}, TypeError, "the sizes of the groups are group_sizes: jnp.diff of the ends"),
        ({"rhs_scale": 1.0}, TypeError, "quantized matrices are not taken yet"),
    ],
)
def test_refusals(changes: dict[str, Any], kind: type[Exception], text: str) -> None:
    arguments = ARRAYS | changes
    with pytest.raises(kind, match=re.escape(text)):
        grouped_matmul(**arguments)
    if not {"offs", "rhs_scale"} & changes.keys():
        with pytest.raises(kind, match=re.escape(text)):
            jax.eval_shape(lambda: grouped_matmul(**arguments))


@pytest.mark.parametrize(
    ("sizes", "options", "text"),
    [
        ([5, -1, 2, 3], {}, "group_sizes[1] must be at least 0; got -1"),
        ([5, 10, 6, 0], {}, "group_sizes[2]: lhs has 20 rows; the sizes up to this one sum to 21"),
        ([5, 1, 2, 3], {"group_offset": 4}, "group_offset must be the number of a group, from 0 to 3; got 4"),
        ([5, 1, 2, 3], {"group_offset": -1}, "group_offset must be the number of a group, from 0 to 3; got -1"),
    ],
)
def test_values_that_are_undefined(sizes: list[int], options: dict[str, Any], text: str) -> None:
    arguments = ARRAYS | {"group_sizes": np.array(sizes, np.int32)} | options
    with pytest.raises(ValueError, match=re.escape(text)):
        grouped_matmul(**arguments, validate=True)


def test_sizes_have_no_gradient() -> None:
    with pytest.raises((NotDifferentiable, TypeError)):
        jax.grad(lambda sizes: grouped_matmul(ARRAYS["lhs"], ARRAYS["rhs"], sizes).sum())(jnp.asarray(SIZES))


def test_each_direction_is_an_operation_of_its_own() -> None:
    boundaries = np.concatenate([[0], np.cumsum(SIZES)])
    weights = jnp.asarray(RNG.standard_normal((20, 8)), jnp.float32)
    d_rhs = ejkernel_core.call("grouped_matmul_d_rhs", jnp.asarray(LHS, jnp.float32), weights, boundaries)
    for group in range(4):
        rows = slice(boundaries[group], boundaries[group + 1])
        close(d_rhs[group], LHS[rows].T @ np.asarray(weights, np.float64)[rows])


def test_parallel_experts_sum_up_to_all(backend: str) -> None:
    """Each device has a part of the experts; the sum of their results is that of all."""
    parts = [call(LHS, RHS[i : i + 2], SIZES, group_offset=i, backend=backend) for i in (0, 2)]
    close(np.sum(parts, 0), expected(LHS, RHS, SIZES))
