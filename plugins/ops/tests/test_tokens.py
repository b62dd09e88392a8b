"""The sequence ids of packed tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_ops.flash_attention.tokens import _sequence_ids


def test_ids_of_packed_tokens():
    # Empty sequences at the start, in between and at the end, and tokens behind the last sequence.
    ids = _sequence_ids(jnp.asarray([0, 0, 3, 3, 3, 4, 9, 9], jnp.int32), 12)
    np.testing.assert_array_equal(ids, [2, 2, 2, 5, 6, 6, 6, 6, 6, 0, 0, 0])


def test_ids_are_computed_without_a_loop():
    # On a GPU, each iteration of a loop launches kernels, and a CUDA graph cannot contain the loop.
    bounds = jax.ShapeDtypeStruct((65,), jnp.int32)
    text = jax.jit(_sequence_ids, static_argnums=1).lower(bounds, 1000).as_text()
    assert "stablehlo.gather" in text
    assert "while" not in text
