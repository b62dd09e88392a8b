"""Which sequence a packed token is of."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_ops.flash_attention.tokens import _sequence_ids


def test_ids_of_packed_tokens():
    # Empty sequences first, in between and last, and tokens behind the last.
    ids = _sequence_ids(jnp.asarray([0, 0, 3, 3, 3, 4, 9, 9], jnp.int32), 12)
    np.testing.assert_array_equal(ids, [2, 2, 2, 5, 6, 6, 6, 6, 6, 0, 0, 0])


def test_no_loop_finds_them():
    # On a GPU each turn of a loop is a launch or several, and none fits into a graph of launches.
    bounds = jax.ShapeDtypeStruct((65,), jnp.int32)
    text = jax.jit(_sequence_ids, static_argnums=1).lower(bounds, 1000).as_text()
    assert "stablehlo.gather" in text
    assert "while" not in text
