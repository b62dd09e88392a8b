"""Programs that are exported for symbolic sizes of batch and length: their values, and what is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import ejkernel_core
from ejkernel_core import Unsupported
from ejkernel_ops import layer_norm, moe_order, moe_route, rms_norm
from ejkernel_ops.symbolic import refuse_symbolic

OPTIONS: dict[str, Any] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"sliding_window": (2, 10**9)},
    "dropout": {"dropout_prob": 0.3, "dropout_seed": 1},
    "lengths": {"kv_lengths": 4, "causal": True},
    "starts": {"q_start": -2, "kv_lengths": 5, "sliding_window": (3, 1)},
}


def gradients(options: Any, backend: str | None) -> Any:
    def loss(query: Any, key: Any) -> Any:
        ids = jnp.ones(query.shape[:2], jnp.int32)
        arrays = {
            "bias": jnp.zeros((1, 1, 1, key.shape[1])),
            "softmax_aux": jnp.zeros(4),
            "q_segment_ids": ids,
            "kv_segment_ids": ids,
        }
        out, lse = ejkernel_core.call(
            "flash_attention",
            *(query, key[:, :, :2], key[:, :, 2:]),
            **({} if options else arrays),
            **options,
            return_lse=True,
            backend=backend,
        )
        return (out**2).sum() + lse.sum(), out

    return jax.grad(loss, (0, 1), has_aux=True)


@pytest.mark.parametrize("backend", ["reference", None])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("sizes", ["b, 6, 4, 8", "2, t, 4, 8", "b, t, 4, 8"])
def test_values_and_gradients(sizes: str, options: str, backend: str | None) -> None:
    function = gradients(OPTIONS[options], backend)
    shape = jax.ShapeDtypeStruct(export.symbolic_shape(sizes), jnp.float32)
    exported = export.export(jax.jit(function))(shape, shape)
    query, key = np.random.default_rng(0).standard_normal((2, 2, 6, 4, 8)).astype(np.float32)
    actual, expected = exported.call(query, key), function(query, key)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5), actual, expected)


@pytest.mark.parametrize("sizes", ["b, 6, 4, 8", "2, t, 4, 8"])
def test_a_kernel_that_needs_sizes_names_the_symbolic_one(sizes: str) -> None:
    shape = jax.ShapeDtypeStruct(export.symbolic_shape(sizes), jnp.float32)
    message = "query has the symbolic size [bt], but .*: use backend='reference', or export the call for each size"
    with pytest.raises(ejkernel_core.NoKernel, match=message):
        export.export(jax.jit(gradients(OPTIONS["causal"], "xla")))(shape, shape)


@pytest.mark.parametrize("sizes", ["2, 6, h, 8", "2, 6, 4, d"])
def test_symbolic_heads_are_refused(sizes: str) -> None:
    shape = jax.ShapeDtypeStruct(export.symbolic_shape(sizes), jnp.float32)
    with pytest.raises(ValueError, match="query: only batch and length may be symbolic; got heads"):
        export.export(jax.jit(gradients(OPTIONS["causal"], None)))(shape, shape)


@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
def test_normalizations_of_any_number_of_rows(norm: Any) -> None:
    def gradient(x: Any) -> Any:
        return jax.grad(lambda x: (norm(x, backend="reference") ** 3).sum())(x)

    shape = jax.ShapeDtypeStruct(export.symbolic_shape("r, 40"), jnp.float32)
    exported = export.export(jax.jit(gradient))(shape)
    x = np.random.default_rng(0).standard_normal((5, 40)).astype(np.float32)
    np.testing.assert_allclose(exported.call(x), gradient(x), rtol=1e-4, atol=1e-5)


def test_a_symbolic_size_of_any_operation_is_refused() -> None:
    shape = jax.ShapeDtypeStruct(export.symbolic_shape("4 * r, 40"), jnp.float32)
    inv = ejkernel_core.invocation("rms_norm", shape)
    with pytest.raises(Unsupported, match=r"^x has the symbolic size 4\*r, but this kernel takes numbers only: use"):
        refuse_symbolic(inv)
    refuse_symbolic(ejkernel_core.invocation("rms_norm", jax.ShapeDtypeStruct((4, 40), jnp.float32)))


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_the_number_of_tokens_of_a_route_may_be_symbolic(backend: str) -> None:
    def function(logits: jax.Array) -> Any:
        routes = moe_route(logits, 2, backend=backend)
        return routes, moe_order(routes.experts, 8, backend=backend)

    shape = jax.ShapeDtypeStruct(export.symbolic_shape("tokens, 8"), jnp.float32)
    exported = export.export(jax.jit(function))(shape)
    logits = np.random.default_rng(0).standard_normal((30, 8)).astype(np.float32)
    actual, expected = exported.call(logits), function(logits)
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5), jax.tree.leaves(actual), [*jax.tree.leaves(expected)]
    )
