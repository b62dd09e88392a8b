"""Programs exported for any batch or length: by value, or refused in words."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import ejkernel_core

OPTIONS: dict[str, Any] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"sliding_window": (2, 10**9)},
    "dropout": {"dropout_prob": 0.3, "dropout_seed": 1},
}


def gradients(options: Any, backend: str | None) -> Any:
    def loss(query: Any, key: Any) -> Any:
        ids = jnp.ones(query.shape[:2], jnp.int32)
        beside = {"bias": jnp.zeros((1, 1, 1, key.shape[1])), "softmax_aux": jnp.zeros(4), "q_segment_ids": ids}
        out, lse = ejkernel_core.call(
            "flash_attention",
            *(query, key[:, :, :2], key[:, :, 2:]),
            **(beside if not options else {}) | ({"kv_segment_ids": ids} if not options else {}),
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
    like = jax.ShapeDtypeStruct(export.symbolic_shape(sizes), jnp.float32)
    exported = export.export(jax.jit(function))(like, like)
    query, key = np.random.default_rng(0).standard_normal((2, 2, 6, 4, 8)).astype(np.float32)
    got, wanted = exported.call(query, key), function(query, key)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5), got, wanted)


@pytest.mark.parametrize("sizes", ["b, 6, 4, 8", "2, t, 4, 8"])
def test_a_kernel_that_cuts_blocks_says_what_is_symbolic(sizes: str) -> None:
    like = jax.ShapeDtypeStruct(export.symbolic_shape(sizes), jnp.float32)
    told = "query has the symbolic [bt]: backend='reference' takes it, or export the call for each size"
    with pytest.raises(ejkernel_core.NoKernel, match=told):
        export.export(jax.jit(gradients(OPTIONS["causal"], "xla")))(like, like)


@pytest.mark.parametrize("sizes", ["2, 6, h, 8", "2, 6, 4, d"])
def test_heads_are_known(sizes: str) -> None:
    like = jax.ShapeDtypeStruct(export.symbolic_shape(sizes), jnp.float32)
    with pytest.raises(ValueError, match="query: takes symbolic sizes for batch and length alone; got heads"):
        export.export(jax.jit(gradients(OPTIONS["causal"], None)))(like, like)
