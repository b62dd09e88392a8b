"""``generate_attention_inputs``: shapes, dtypes and the distribution of the numbers."""

from __future__ import annotations

from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel_ops import flash_attention
from ejkernel_ops.testing import generate_attention_inputs


def test_the_inputs_of_the_documentation():
    inputs = generate_attention_inputs()
    assert list(inputs) == ["query", "key", "value"]
    for array in inputs.values():
        assert (array.shape, array.dtype) == ((2, 128, 8, 64), jnp.float32)
        assert abs(float(array.mean())) < 1e-3
        assert abs(float(array.std()) - 0.02) < 2e-4
    for one, other in combinations(inputs.values(), 2):
        assert abs(np.corrcoef(np.ravel(one), np.ravel(other))[0, 1]) < 0.02


@settings(max_examples=6, derandomize=True)
@given(st.sampled_from([(1, 4, 2, 8), (0, 4, 1, 8), (2, 0, 4, 16)]), st.sampled_from([(None, None), (1, 5)]))
def test_shapes(sizes, kv_sizes):
    batch, length, heads, dim = sizes
    kv_heads, kv_length = kv_sizes
    inputs = generate_attention_inputs(*sizes, num_kv_heads=kv_heads, kv_len=kv_length)
    assert inputs["query"].shape == (batch, length, heads, dim)
    shape = (batch, length if kv_length is None else kv_length, kv_heads or heads, dim)
    assert inputs["key"].shape == inputs["value"].shape == shape


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, "float32", jnp.float64, jnp.float8_e4m3fn])
def test_every_dtype_has_the_same_numbers_rounded(dtype):
    exact = generate_attention_inputs(1, 8, 1, 8)
    with jax.enable_x64(dtype == jnp.float64):
        inputs = generate_attention_inputs(1, 8, 1, 8, dtype=dtype)
        for name, array in inputs.items():
            assert array.dtype == dtype
            if dtype != jnp.float64:
                np.testing.assert_array_equal(array, exact[name].astype(dtype))


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_keys(make_key):
    first, same, other = (generate_attention_inputs(1, 4, 1, 8, key=make_key(seed)) for seed in (1, 1, 2))
    for name in first:
        np.testing.assert_array_equal(first[name], same[name])
        assert (first[name] != other[name]).any()


def test_attention_takes_the_inputs():
    out = flash_attention(**generate_attention_inputs(1, 4, 4, 8, num_kv_heads=2, kv_len=6), backend="reference")
    assert out.shape == (1, 4, 4, 8)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_heads": 4, "num_kv_heads": 3}, ValueError, "num_kv_heads: must divide num_heads=4; got 3"),
        ({"num_heads": 0}, ValueError, "num_heads: must be at least 1"),
        ({"head_dim": 0}, ValueError, "head_dim: must be at least 1"),
        ({"seq_len": -1}, ValueError, "seq_len: must be at least 0"),
        ({"batch_size": 1.5}, TypeError, "batch_size: takes a whole number"),
        ({"kv_len": True}, TypeError, "kv_len: takes a whole number"),
        ({"dtype": jnp.int32}, TypeError, "dtype: takes a floating dtype"),
        ({"dtype": None}, TypeError, "dtype: takes a floating dtype"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        generate_attention_inputs(**arguments)
