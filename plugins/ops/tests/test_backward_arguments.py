"""Wrong arguments of the backward operation are named, with the value and what the argument takes."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_core import Registry

REGISTRY = Registry(plugins="ejkernel-ops")


def arguments(dtype: Any = jnp.float32) -> dict[str, Any]:
    query = jnp.ones((2, 6, 4, 8), dtype)
    out, lse = REGISTRY.call("flash_attention", query, query, query, return_lse=True)
    residuals = {"out": out, "lse": lse, "d_out": out, "d_lse": lse}
    return {"query": query, "key": query, "value": query, **residuals, "wrt": ("query", "key")}


WRONG = {
    "out": (jnp.bfloat16, ValueError, "out: takes the forward's shape (2, 6, 4, 8); got (6, 4, 8)", lambda x: x[0]),
    "d_out": (jnp.bfloat16, TypeError, "d_out: takes the forward's dtype bfloat16; got float32", jnp.float32),
    "lse": (jnp.bfloat16, TypeError, "lse: takes the forward's dtype float32; got bfloat16", jnp.bfloat16),
    "d_lse": (jnp.float32, TypeError, "d_lse: takes the forward's dtype float32; got int32", jnp.int32),
    "wrt": (jnp.float32, ValueError, "wrt: takes each name once; got query more often", lambda wrt: (*wrt, "query")),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name: str) -> None:
    dtype, error, message, change = WRONG[name]
    call = arguments(dtype)
    with pytest.raises(error, match=re.escape(message)):
        REGISTRY.call("flash_attention_bwd", **call | {name: change(call[name])})


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_the_results_of_the_forward_are_taken(dtype: Any) -> None:
    d_query, d_key = REGISTRY.call("flash_attention_bwd", **arguments(dtype))
    assert d_query.dtype == d_key.dtype == dtype
    # All keys and all values are equal, so out does not depend on them. The gradient is that of lse, whose cotangent is
    # lse.
    expected = np.full((2, 6, 4, 8), float(arguments()["lse"][0, 0, 0]) * 8**-0.5)
    np.testing.assert_allclose(np.asarray(d_query, np.float32), expected, rtol=2e-2)


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_result_that_is_not_returned_has_no_cotangent_in_an_explanation(is_packed: bool, return_lse: bool) -> None:
    """Else the backward that is tuned would be another one than that of the program."""
    array = jax.ShapeDtypeStruct((30, 2, 16) if is_packed else (1, 30, 2, 16), jnp.float32)
    bounds = jax.ShapeDtypeStruct((4,), jnp.int32)
    packed = {"cum_seqlens_q": bounds, "cum_seqlens_k": bounds} if is_packed else {}
    explanation = REGISTRY.explain("flash_attention", array, array, array, return_lse=return_lse, **packed)
    backward = explanation.backward.plan.invocation
    assert backward["d_out"] is not None
    assert (backward["d_lse"] is not None) == return_lse
