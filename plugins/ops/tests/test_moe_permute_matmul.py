"""``moe_permute_matmul`` against NumPy in float64, beside other calls in one program, and what its calls refuse."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_ops import grouped_matmul, moe_combine, moe_permute, moe_permute_matmul

RNG = np.random.default_rng(11)
TOKENS, K, DIM, N = 9, 2, 6, 8
X, RHS, BIAS = RNG.standard_normal((TOKENS, DIM)), RNG.standard_normal((4, DIM, N)), RNG.standard_normal((4, N))
ORDER = RNG.permutation(TOKENS * K).astype(np.int32)
SIZES = np.array([5, 0, 10, 1], np.int32)  # two rows have no group
BACKENDS = ("reference", "by_parts", "xla")


def expected(x: np.ndarray, rhs: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Row by row."""
    out = np.zeros((TOKENS * K, N))
    ends = np.cumsum(SIZES)
    for row, number in enumerate(ORDER[: ends[-1]]):
        group = int(np.searchsorted(ends, row, side="right"))
        out[row] = x[number // K] @ rhs[group] + bias[group]
    return out


def call(x: Any, rhs: Any, bias: Any, **options: Any) -> jax.Array:
    x, rhs, bias = (jnp.asarray(array, jnp.float32) for array in (x, rhs, bias))
    return moe_permute_matmul(x, jnp.asarray(ORDER), rhs, jnp.asarray(SIZES), K, rhs_bias=bias, **options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_and_gradients(backend: str) -> None:
    np.testing.assert_allclose(call(X, RHS, BIAS, backend=backend), expected(X, RHS, BIAS), rtol=2e-5, atol=2e-5)
    d_out = RNG.standard_normal((TOKENS * K, N))
    loss = lambda *arrays: (call(*arrays, backend=backend) * d_out).sum()
    gradients = jax.grad(loss, (0, 1, 2))(*(jnp.asarray(array, jnp.float32) for array in (X, RHS, BIAS)))
    for number, gradient in enumerate(gradients):
        arrays = [X, RHS, BIAS]
        direction = RNG.standard_normal(arrays[number].shape)
        # The result is linear in each array.
        arrays[number] = arrays[number] + direction
        change = ((expected(*arrays) - expected(X, RHS, BIAS)) * d_out).sum()
        np.testing.assert_allclose((gradient * direction).sum(), change, rtol=1e-4)
    assert not np.asarray(gradients[1][1]).any()  # of the group without rows


def test_calls_in_one_program_have_the_gradients_of_each() -> None:
    """Two calls that are differentiated in different arrays, and the parts beside them."""
    x, rhs = jnp.asarray(X, jnp.float32), jnp.asarray(RHS, jnp.float32)
    order, sizes = jnp.asarray(ORDER), jnp.asarray(SIZES)
    square = lambda out: (out**2).sum()

    def fused(x: Any, rhs: Any) -> Any:
        return moe_permute_matmul(x, order, rhs, sizes, K)

    def parts(x: Any, rhs: Any) -> Any:
        return grouped_matmul(moe_permute(x, order, K), rhs, sizes)

    def program(product: Any) -> Any:
        def gradients(x: Any, rhs: Any) -> Any:
            of_x = jax.grad(lambda x: square(product(x, rhs)))(x)
            of_rhs = jax.grad(lambda rhs: square(product(2 * x, rhs)))(rhs)
            of_both = jax.grad(lambda x, rhs: square(product(x, rhs)) + square(parts(x, rhs)), (0, 1))(x, rhs)
            return of_x, of_rhs, of_both

        return jax.jit(gradients)(x, rhs)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), program(fused), program(parts))


def test_one_expert_for_each_token_is_a_permutation_of_rows() -> None:
    order = jnp.asarray(RNG.permutation(TOKENS).astype(np.int32))
    identity = jnp.broadcast_to(jnp.eye(DIM), (1, DIM, DIM))
    rows = moe_permute_matmul(jnp.asarray(X, jnp.float32), order, identity, jnp.array([TOKENS]), 1)
    np.testing.assert_array_equal(rows, np.float32(X)[order])
    np.testing.assert_array_equal(moe_combine(rows, order, jnp.ones((TOKENS, 1))), np.float32(X))


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"x": jnp.ones((TOKENS, 2, DIM))}, ValueError, "x: takes (tokens, dim); got shape (9, 2, 6)"),
        ({"x": jnp.ones((TOKENS, DIM), int)}, TypeError, "x: takes float16, bfloat16, float32, float64; got int"),
        ({"rhs": jnp.ones((4, DIM, N), jnp.bfloat16)}, TypeError, "rhs: takes the dtype of x, float32; got bfloat16"),
        ({"rhs": jnp.ones((4, DIM + 1, N))}, ValueError, "dim"),
        ({"rhs": jnp.ones((DIM, N))}, ValueError, "rhs: takes (groups, k, n); got shape (6, 8)"),
        ({"token_order": jnp.ones(17, int)}, ValueError, "token_order: takes 2 places for each of the 9 tokens, (18,)"),
        ({"token_order": jnp.ones(18)}, TypeError, "token_order: takes integers, as moe_route returns them"),
        ({"group_sizes": jnp.ones(4)}, TypeError, "group_sizes: takes integers"),
        ({"group_sizes": jnp.ones(5, int)}, ValueError, "one size for each of the 4 groups of rhs; got 5"),
        ({"k": 0}, ValueError, "k: must be at least 1; got 0"),
        ({"k": 2.0}, TypeError, "k: takes an int, known while tracing"),
        ({"rhs": jnp.ones((4, DIM, 5)), "activation": "silu_gated"}, ValueError, "takes gates and values, an even n"),
        ({"activation": "relu"}, ValueError, "activation: takes 'silu_gated'"),
        ({"lhs": jnp.ones((TOKENS, DIM))}, TypeError, "'lhs' is called 'x' here"),
        ({"token_order": jnp.zeros(18, int), "validate": True}, ValueError, "each number below 18 once; 1 is missing"),
        ({"group_sizes": jnp.array([5, -1, 1, 1]), "validate": True}, ValueError, "group_sizes[1] must be at least 0"),
        ({"group_sizes": jnp.array([9, 9, 1, 0]), "validate": True}, ValueError, "token_order has 18 rows; the sizes"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    arguments = {
        "x": jnp.asarray(X, jnp.float32),
        "token_order": jnp.asarray(ORDER),
        "rhs": jnp.asarray(RHS, jnp.float32),
        "group_sizes": jnp.asarray(SIZES),
        "k": K,
    }
    with pytest.raises(error, match=re.escape(text)):
        moe_permute_matmul(**{**arguments, **changes})
