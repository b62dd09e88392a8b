"""Rows in which a finite bias hides all keys have the gradients of a float32 softmax of the same logits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_core

NUMBERS = {"-1e4": -1e4, "-1e9": -1e9, "-1e30": -1e30, "lowest": float(np.finfo(np.float32).min), "1e9": 1e9}


def inputs(number: float) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = {
        name: jax.random.normal(key, (2, length, 2, 8))
        for key, name, length in zip(keys, ("query", "key", "value"), (70, 90, 90), strict=True)
    }
    bias = jnp.zeros((2, 2, 70, 90)).at[:, :, 1::3].set(number).at[:, :, 2::3, ::2].set(number)
    return {**arrays, "bias": bias}


def by_softmax(query: Any, key: Any, value: Any, bias: Any) -> Any:
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key, precision="highest") * 8**-0.5 + bias
    out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), value, precision="highest")
    return out, jax.nn.logsumexp(logits, axis=-1)


def loss(attention: Any) -> Any:
    def total(arrays: Any) -> Any:
        out, lse = attention(**arrays)
        # The mean of lse, because a sum as large as the bias would lose the other terms in rounding.
        return (out * jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)).sum() + (0.5 * lse).mean()

    return total


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_gradients_of_rows_without_visible_keys(backend: str, number: str) -> None:
    arrays = inputs(NUMBERS[number])

    def attention(**arrays: Any) -> Any:
        return ejkernel_core.call("flash_attention", **arrays, return_lse=True, backend=backend)

    gradients, expected = (jax.jit(jax.grad(loss(function)))(arrays) for function in (attention, by_softmax))
    # Near -1e4 logits are multiples of 1e-3, and each program rounds them in a different order.
    tolerance = 1e-3 if number == "-1e4" else 1e-5
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=tolerance, atol=tolerance), gradients, expected)


def test_programs_without_a_bias_have_no_branch_for_such_rows() -> None:
    arrays = inputs(0.0)

    def program(arrays: Any) -> str:
        def total(arrays: Any) -> Any:
            return ejkernel_core.call("flash_attention", **arrays, backend="xla").sum()

        return jax.jit(jax.grad(total)).lower(arrays).as_text()

    assert "stablehlo.case" in program(arrays)
    assert "stablehlo.case" not in program({name: arrays[name] for name in ("query", "key", "value")})
