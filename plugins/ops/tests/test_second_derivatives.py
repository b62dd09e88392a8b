"""Second derivatives of the reference, against central differences of gradients and against a plain softmax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import ejkernel_core
from ejkernel_ops.flash_attention.examples import normal

SHAPES = {
    "query": (1, 4, 2, 2),
    "key": (1, 3, 2, 2),
    "value": (1, 3, 2, 2),
    "bias": (1, 2, 4, 3),
    "softmax_aux": (2, 2),
}
#: The first of four queries sees no key if the call is causal. Another one sees none by the mask or by -inf.
HOLES = np.where(np.array([[0, 0, 1], [1, 1, 1], [1, 0, 0], [0, 0, 0]]), -np.inf, 0.0)
MASK = np.array([[1, 1, 0], [0, 0, 0], [1, 0, 1], [1, 1, 1]], bool)
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rows-that-see-nothing": {"causal": True},
    "sinks-alone": {"causal": True, "sinks": True},
    "bias": {"bias": 0.0},
    "minus-infinity": {"bias": HOLES},
    "mask-and-sinks": {"attention_mask": MASK, "sinks": True},
    "soft-cap": {"logits_soft_cap": 0.8},
    "dropout": {"dropout_prob": 0.4, "dropout_seed": 3},
    "all": {"bias": HOLES, "sinks": True, "logits_soft_cap": 0.8, "attention_mask": MASK, "sliding_window": (1, 1)},
}


@pytest.fixture(autouse=True)
def in_float64() -> Any:
    with jax.enable_x64(True):
        yield


def arrays() -> dict[str, Any]:
    return {name: normal(name, 0, shape) for name, shape in SHAPES.items()}


def weighted(out: Any, lse: Any) -> Any:
    return (out**3).sum() + jnp.where(lse > -1e20, lse**2, 0).sum()


def loss(primals: Any, bias: Any = None, sinks: bool = False, **options: Any) -> Any:
    arguments = {name: primals[name] for name in ("query", "key", "value")}
    arguments |= {} if bias is None else {"bias": primals["bias"] + bias}
    arguments |= {"softmax_aux": primals["softmax_aux"]} if sinks else {}
    out, lse = ejkernel_core.call("flash_attention", **arguments, **options, return_lse=True, backend="reference")
    return weighted(out, jnp.where(lse == -jnp.inf, 0, lse))


@pytest.mark.parametrize("name", CALLS)
def test_second_derivatives_are_those_of_the_gradients(name: str) -> None:
    point, unravel = ravel_pytree(arrays())
    gradient = jax.jit(lambda x: ravel_pytree(jax.grad(lambda m: loss(m, **CALLS[name]))(unravel(x)))[0])
    step = 1e-5 * np.eye(point.size)
    expected = np.stack([(gradient(point + s) - gradient(point - s)) / 2e-5 for s in step])
    np.testing.assert_allclose(jax.jacrev(gradient)(point), expected, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(jax.jacfwd(gradient)(point), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.long
@pytest.mark.parametrize("number", [-1e9, -1e30, float(np.finfo(np.float64).min)])
def test_second_derivatives_of_rows_that_a_finite_bias_hides(number: float) -> None:
    hidden = np.where(np.array([[1, 1, 1], [0, 0, 0], [1, 0, 1], [1, 1, 1]]), number, 0.0)

    def plain_softmax(primals: Any) -> Any:
        logits = jnp.einsum("bqhd,bkhd->bhqk", primals["query"], primals["key"]) / np.sqrt(2) + primals["bias"] + hidden
        out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), primals["value"])
        return weighted(out, jnp.where(hidden.min(-1) < 0, 0, jax.nn.logsumexp(logits, axis=-1)))

    def reference(primals: Any) -> Any:
        names = ("query", "key", "value")
        arguments = {name: primals[name] for name in names} | {"bias": primals["bias"] + hidden}
        out, lse = ejkernel_core.call("flash_attention", **arguments, return_lse=True, backend="reference")
        return weighted(out, jnp.where(hidden.min(-1) < 0, 0, lse))

    arguments = arrays()
    del arguments["softmax_aux"]
    result, expected = (jax.jacrev(jax.grad(function))(arguments) for function in (reference, plain_softmax))
    tolerance = 1e-6 if number == -1e9 else 1e-9  # logits near -1e9 are rounded in another order by each program
    jax.tree.map(lambda r, e: np.testing.assert_allclose(r, e, rtol=tolerance, atol=tolerance), result, expected)
