"""Checks of the values of boundaries and ids, with ``validate=True``."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_core
from ejkernel_ops import flash_attention

RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal((length, 2, 8), np.float32) for length in (6, 9, 9))
ROWS = Q[None], K[None], V[None]
attend = partial(flash_attention, Q, K, V, return_lse=True)

WRONG_BOUNDARIES = {
    "a start behind tokens": ([1, 2, 6], None, "cum_seqlens_q[0] must be 0, where the first sequence begins; got 1"),
    "a start below 0": ([-1, 2, 6], None, "cum_seqlens_q[0] must be 0, where the first sequence begins; got -1"),
    "an end that decreases": ([0, 4, 3], None, "cum_seqlens_q[2] must be at least 4, the boundary before it; got 3"),
    "one that falls below 0": (None, [0, -2, 9], "cum_seqlens_k[1] must be at least 0, the boundary before it; got -2"),
    "lengths in place of boundaries": (
        None,
        [0, 9, 2],
        "cum_seqlens_k[2] must be at least 9, the boundary before it; got 2",
    ),
    "more than the queries": (
        [0, 2, 7],
        None,
        "cum_seqlens_q[2] must be at most 6, the number of tokens of query; got 7",
    ),
    "more than the keys": (
        None,
        [0, 10, 11],
        "cum_seqlens_k[1] must be at most 9, the number of tokens of key; got 10",
    ),
    "boundaries of keys for queries": (
        [0, 4, 9],
        None,
        "cum_seqlens_q[2] must be at most 6, the number of tokens of query; got 9",
    ),
    "one that is right modulo 2 ** 32": (
        [0, 2**32 + 2, 2**32 + 6],
        None,
        f"cum_seqlens_q[1] must be at most 6, the number of tokens of query; got {2**32 + 2}",
    ),
    "both: the first is reported": ([1, 2, 6], [1, 2, 3], "cum_seqlens_q[0] must be 0"),
}


def boundaries(of_q: Any, of_k: Any, dtype: Any = np.int64) -> dict[str, Any]:
    return {
        "cum_seqlens_q": np.array([0, 2, 6] if of_q is None else of_q, dtype),
        "cum_seqlens_k": np.array([0, 4, 9] if of_k is None else of_k, dtype),
    }


@pytest.mark.parametrize("name", WRONG_BOUNDARIES)
def test_messages_name_the_index_of_a_wrong_boundary(name: str) -> None:
    *bounds, message = WRONG_BOUNDARIES[name]
    with pytest.raises(ValueError, match="^flash_attention: " + re.escape(message)):
        attend(**boundaries(*bounds), validate=True)
    attend(**boundaries(*bounds))  # without it, values are not checked


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int32, np.uint32, np.int64])
@pytest.mark.parametrize(
    ("of_q", "of_k"),
    [
        ([0, 2, 6], [0, 4, 9]),
        ([0, 2, 3], [0, 4, 4]),  # padding behind the last
        ([0, 0, 6], [0, 9, 9]),  # empty sequences
        ([0, 0, 0], [0, 0, 0]),
    ],
)
def test_right_boundaries_give_the_same(of_q: Any, of_k: Any, dtype: Any) -> None:
    arguments = boundaries(of_q, of_k, dtype)
    for result, plain in zip(attend(**arguments, validate=True), attend(**arguments), strict=True):
        np.testing.assert_array_equal(result, plain)


def test_boundaries_of_unsigned_numbers_may_decrease_too() -> None:
    with pytest.raises(
        ValueError, match=re.escape("cum_seqlens_q[2] must be at least 4, the boundary before it; got 3")
    ):
        attend(**boundaries([0, 4, 3], None, np.uint8), validate=True)


def test_boundaries_on_a_device_are_checked() -> None:
    arguments = {name: jnp.asarray(value) for name, value in boundaries([0, 4, 3], None).items()}
    with pytest.raises(ValueError, match=re.escape("cum_seqlens_q[2] must be at least 4")):
        attend(**arguments, validate=True)


def ids(last: int, dtype: Any) -> dict[str, Any]:
    return {
        "q_segment_ids": np.array([[1, 1, 2, 2, 0, 0]], dtype),
        "kv_segment_ids": np.array([[1, 1, 1, 2, 2, 2, 0, 0, last]], dtype),
    }


@pytest.mark.parametrize(
    ("last", "dtype"), [(2**31, np.uint32), (2**31, np.int64), (-(2**31) - 1, np.int64), (2**64 - 1, np.uint64)]
)
def test_ids_that_int32_does_not_hold_are_refused(last: int, dtype: Any) -> None:
    with pytest.raises(ValueError) as fault:
        flash_attention(*ROWS, **ids(last, dtype), validate=True)
    assert str(fault.value) == (
        f"flash_attention: kv_segment_ids[0, 8] must be from -2**31 to 2**31 - 1, as in int32; got {last}"
    )
    flash_attention(*ROWS, **ids(last, dtype))


def test_the_index_in_a_packed_call_is_that_of_the_caller() -> None:
    wrong = {name: value[0] for name, value in ids(2**31, np.uint32).items()}
    with pytest.raises(ValueError, match=re.escape("kv_segment_ids[8] must be from")):
        attend(**boundaries(None, None), **wrong, validate=True)


@pytest.mark.parametrize(
    ("last", "dtype"),
    [(2**31 - 1, np.uint32), (2**31 - 1, np.int64), (-(2**31), np.int64), (-1, np.int8), (255, np.uint8)],
)
def test_ids_in_any_order_and_below_0_are_valid(last: int, dtype: Any) -> None:
    arguments = ids(last, dtype)
    np.testing.assert_array_equal(
        flash_attention(*ROWS, **arguments, validate=True), flash_attention(*ROWS, **arguments)
    )


def test_other_arrays_are_not_checked() -> None:
    arrays = {
        "bias": np.array([np.nan, np.inf, -np.inf] * 3, np.float32),
        "attention_mask": np.zeros((6, 9), np.bool_),
        "softmax_aux": np.array([-np.inf, np.nan], np.float32),
        "dropout_prob": 0.5,
        "dropout_seed": -1,
    }
    np.testing.assert_array_equal(flash_attention(*ROWS, **arrays, validate=True), flash_attention(*ROWS, **arrays))


@pytest.mark.parametrize(
    "transform",
    [lambda f: jax.jit(f)(Q), lambda f: jax.grad(lambda q: f(q).sum())(Q), lambda f: jax.vmap(f)(Q[None])],
    ids=["jit", "grad", "vmap"],
)
def test_traced_arrays_are_refused(transform: Any) -> None:
    arguments = boundaries(None, None)
    with pytest.raises(
        TypeError, match="flash_attention: validate=True looks at values, and query has none while it is"
    ):
        transform(lambda q: flash_attention(q, K, V, **arguments, validate=True))
    transform(lambda q: flash_attention(q, K, V, **arguments))


def test_validate_none_is_refused() -> None:
    with pytest.raises(TypeError, match="flash_attention: validate takes True or False; got NoneType"):
        attend(validate=None)


def test_the_backward_operation_checks_the_same() -> None:
    bounds = boundaries(None, None)
    out, lse = attend(**bounds)
    call = partial(
        ejkernel_core.call, "flash_attention_bwd", query=Q, key=K, value=V, out=out, lse=lse, wrt=("query", "key")
    )
    result = call(**bounds, d_out=jnp.ones_like(out), validate=True)
    for gradient, plain in zip(result, call(**bounds, d_out=jnp.ones_like(out)), strict=True):
        np.testing.assert_array_equal(gradient, plain)
    with pytest.raises(
        ValueError, match=re.escape("flash_attention_bwd: cum_seqlens_q[2] must be at most 6, the number")
    ):
        call(**boundaries([0, 2, 7], None), d_out=jnp.ones_like(out), validate=True)
