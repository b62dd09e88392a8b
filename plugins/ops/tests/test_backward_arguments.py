"""What a call of the backward operation gives wrongly is named, with what was given and what is taken."""

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_core import Registry

CALLS = Registry(plugins="ejkernel-ops")


def arguments(dtype: Any = jnp.float32) -> dict[str, Any]:
    query = jnp.ones((2, 6, 4, 8), dtype)
    out, lse = CALLS.call("flash_attention", query, query, query, return_lse=True)
    saved = {"out": out, "lse": lse, "d_out": out, "d_lse": lse}
    return {"query": query, "key": query, "value": query, **saved, "wrt": ("query", "key")}


WRONG = {
    "out": (jnp.bfloat16, ValueError, "out: takes the forward's shape (2, 6, 4, 8); got (6, 4, 8)", lambda x: x[0]),
    "d_out": (jnp.bfloat16, TypeError, "d_out: takes the forward's dtype bfloat16; got float32", jnp.float32),
    "lse": (jnp.bfloat16, TypeError, "lse: takes the forward's dtype float32; got bfloat16", jnp.bfloat16),
    "d_lse": (jnp.float32, TypeError, "d_lse: takes the forward's dtype float32; got int32", jnp.int32),
    "wrt": (jnp.float32, ValueError, "wrt: takes each name once; got query more often", lambda wrt: (*wrt, "query")),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str) -> None:
    dtype, error, message, change = WRONG[name]
    given = arguments(dtype)
    with pytest.raises(error, match=re.escape(message)):
        CALLS.call("flash_attention_bwd", **given | {name: change(given[name])})


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_what_the_forward_returned_is_taken(dtype: Any) -> None:
    d_query, d_key = CALLS.call("flash_attention_bwd", **arguments(dtype))
    assert d_query.dtype == d_key.dtype == dtype
    # Keys are alike: moving the queries moves no weight, and of the keys it moves each log-sum-exp as much.
    wanted = np.full((2, 6, 4, 8), float(arguments()["lse"][0, 0, 0]) * 8**-0.5)
    np.testing.assert_allclose(np.asarray(d_query, np.float32), wanted, rtol=2e-2)
