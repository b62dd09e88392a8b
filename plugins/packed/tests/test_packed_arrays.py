"""Chunks of arrays, rounded gradients, rows of examples, and the examples in docstrings."""

from __future__ import annotations

import doctest
import functools
import importlib
import pkgutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import ejkernel_packed
from ejkernel_packed import chunk_array, identity_dtype_convert, pack_rows, unchunk_array

SETTINGS = settings(max_examples=40, derandomize=True)
MODULES = [module.name for module in pkgutil.iter_modules(ejkernel_packed.__path__)]


@pytest.mark.parametrize("module", MODULES)
def test_doctests(module):
    assert not doctest.testmod(importlib.import_module(f"ejkernel_packed.{module}")).failed


def test_every_public_function_has_an_example():
    for name in ejkernel_packed.__all__:
        if name != "Rows":
            assert ">>> " in getattr(ejkernel_packed, name).__doc__, name


# -- chunks -------------------------------------------------------------------------------------------------------

SHAPES = [(7,), (0,), (4,), (8, 3), (2, 0, 5), (2, 3, 2, 5)]


@pytest.mark.parametrize(("shape", "axis"), [(s, a) for s in SHAPES for a in range(-len(s), len(s))])
def test_chunks_of_every_axis(shape, axis):
    size, dtype = (4, np.float32) if axis < 0 else (1, np.int32)
    array = np.arange(1, 1 + np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    slices = np.moveaxis(array, axis, 0)
    chunks_of_axis = [
        [slices[i] if i < len(slices) else np.full_like(slices[0], -2) for i in range(c, c + size)]
        for c in range(0, len(slices), size)
    ]
    expected = np.array(chunks_of_axis, dtype).reshape(-(-shape[axis] // size), size, *slices.shape[1:])
    axis_of_chunks = axis % array.ndim
    chunk = functools.partial(chunk_array, chunk_size=size, axis=axis, pad_value=-2)
    for chunks in (chunk(array), jax.jit(chunk)(array)):
        assert chunks.dtype == dtype
        np.testing.assert_array_equal(np.moveaxis(chunks, (axis_of_chunks, axis_of_chunks + 1), (0, 1)), expected)
        np.testing.assert_array_equal(unchunk_array(chunks, shape[axis], axis), array)


def test_chunks_of_int64():
    with jax.enable_x64(True):
        chunks = chunk_array(jnp.array([2**40, 1, 2]), 2)
        assert chunks.dtype == jnp.int64
        assert unchunk_array(chunks, 3).tolist() == [2**40, 1, 2]


def test_chunks_have_gradients():
    gradient = jax.grad(lambda x: (unchunk_array(chunk_array(x, 4) * 2, 5) ** 2).sum())(jnp.arange(5.0))
    assert gradient.tolist() == [0, 8, 16, 24, 32]


INVALID_CALLS = {
    "size 0": (lambda: chunk_array(np.ones(3), 0), ValueError, "chunk_size: takes an integer of at least 1; got 0"),
    "size 1.5": (lambda: chunk_array(np.ones(3), 1.5), TypeError, "chunk_size: takes a static int"),
    "an axis too far": (lambda: chunk_array(np.ones(3), 2, axis=1), ValueError, "axis: takes an integer from -1 to 0"),
    "a scalar": (lambda: chunk_array(np.ones(()), 2), ValueError, "axis: "),
    "no chunks": (lambda: unchunk_array(np.ones(3), 2), ValueError, "arr: takes two axes"),
    "too long": (
        lambda: unchunk_array(np.ones((2, 2)), 5),
        ValueError,
        "original_length: takes an integer of at most 4",
    ),
    "below 0": (
        lambda: unchunk_array(np.ones((2, 2)), -1),
        ValueError,
        "original_length: takes an integer of at least 0",
    ),
    "an axis of the chunks": (
        lambda: unchunk_array(np.ones((2, 2)), 4, axis=1),
        ValueError,
        "axis: takes an integer from -1 to 0",
    ),
    "a dtype that rounds nothing": (
        lambda: identity_dtype_convert(jnp.int32),
        TypeError,
        "dtype: takes a floating dtype",
    ),
    "no dtype of numbers": (lambda: identity_dtype_convert(bool), TypeError, "dtype: takes a floating dtype"),
    "a complex dtype": (lambda: identity_dtype_convert(jnp.complex64), TypeError, "dtype: takes a floating dtype"),
    "complex numbers": (
        lambda: jax.grad(lambda x: abs(identity_dtype_convert(jnp.float16)(x)))(1j),
        TypeError,
        "real numbers",
    ),
    "an example that is too long": (
        lambda: pack_rows([3, 5], 4),
        ValueError,
        "lengths: takes integers from 0 to row_length=4; got 3 to 5",
    ),
    "a length below 0": (lambda: pack_rows([-1], 4), ValueError, "lengths: takes integers from 0"),
    "lengths of rank 2": (lambda: pack_rows([[1]], 4), ValueError, "lengths: takes rank 1"),
    "lengths that are floats": (lambda: pack_rows([1.0], 4), TypeError, "lengths: takes integers"),
    "rows of nothing": (lambda: pack_rows([1], 0), ValueError, "row_length: takes an integer of at least 1"),
    "examples that were not packed": (lambda: pack_rows([1], 2).fill([]), ValueError, "examples: 1 were packed; got 0"),
    "an example of another length": (
        lambda: pack_rows([2], 2).fill([[1]]),
        ValueError,
        "examples: number 0 has 1 tokens, not 2",
    ),
}


@pytest.mark.parametrize("case", INVALID_CALLS)
def test_invalid_arguments_are_refused(case):
    call, error, message = INVALID_CALLS[case]
    with pytest.raises(error, match=message):
        call()


# -- gradients ----------------------------------------------------------------------------------------------------

FLOATS = [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64]


@pytest.mark.parametrize("primal", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_gradient_is_rounded(primal, dtype):
    with jax.enable_x64(True):
        x = jnp.asarray([1.001, 2.002, 3.003], primal)
        weights = jnp.asarray([1 / 3, 1.001, 1e-3], primal)
        loss = lambda x: (identity_dtype_convert(dtype)(x) * weights).sum()
        assert identity_dtype_convert(dtype)(x).tolist() == x.tolist()
        for gradient_function in (jax.grad(loss), jax.jit(jax.grad(loss))):
            gradient = gradient_function(x)
            assert gradient.dtype == primal
            np.testing.assert_array_equal(gradient, np.asarray(weights).astype(dtype).astype(primal))


PAIRS = [
    (jnp.float32, jnp.bfloat16),
    (jnp.float32, jnp.float16),
    (jnp.bfloat16, jnp.float16),
    (jnp.float16, jnp.bfloat16),
]
WEIGHTS = st.lists(st.integers(-(2**16), 2**16).map(lambda n: n / 1024), min_size=3, max_size=3)


def weighted_sum(dtype):
    return lambda x, weights: (identity_dtype_convert(dtype)(x) * weights).sum()


@functools.cache
def jitted_gradient(dtype):
    return jax.jit(jax.grad(weighted_sum(dtype)))


@SETTINGS
@given(WEIGHTS, st.sampled_from(PAIRS))
def test_rounding_is_the_same_as_in_numpy(numbers, pair):
    primal, dtype = pair
    weights = np.array(numbers).astype(primal)
    gradient = jitted_gradient(dtype)(jnp.ones(3, primal), weights)
    assert gradient.dtype == primal
    np.testing.assert_array_equal(gradient, weights.astype(dtype).astype(primal))


def test_a_compiler_cannot_remove_the_cast():
    """XLA may remove the cast where excess precision is allowed. On CPUs it does not."""
    x = jnp.ones(3)
    lowered = jitted_gradient(jnp.dtype(jnp.bfloat16)).lower(x, x).as_text()
    position = lowered.index("xbf16>")
    assert position < lowered.index("optimization_barrier") < lowered.rindex("xbf16>")


def by_scan(gradient):
    """The gradient by a scan over the rows."""

    def total(x, weights):
        def step(carry, row):
            x, weights = row
            return carry + weighted_sum(jnp.bfloat16)(x, weights), None

        return jax.lax.scan(step, jnp.zeros((), x.dtype), (x, weights))[0]

    return jax.grad(total)


TRANSFORMS = {
    "jit": jax.jit,
    "vmap": jax.vmap,
    "jit of vmap": lambda gradient: jax.jit(jax.vmap(gradient)),
    "scan": by_scan,
    "jit of scan": lambda gradient: jax.jit(by_scan(gradient)),
    "checkpoint": lambda gradient: jax.grad(jax.checkpoint(weighted_sum(jnp.bfloat16))),
    "jit of checkpoint": lambda gradient: jax.jit(jax.grad(jax.checkpoint(weighted_sum(jnp.bfloat16)))),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("primal", [jnp.float16, jnp.float32])
def test_a_gradient_is_rounded_under_transformations(name, primal):
    weights = jnp.asarray([[1 / 3, 1.001], [1e-3, 7 / 9], [1.0, 100.3]], primal)
    gradient = TRANSFORMS[name](jax.grad(weighted_sum(jnp.bfloat16)))(jnp.ones((3, 2), primal), weights)
    assert gradient.dtype == primal
    np.testing.assert_array_equal(gradient, np.asarray(weights).astype(jnp.bfloat16).astype(primal))


@pytest.mark.parametrize("primal", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_float64_without_x64_changes_nothing(primal):
    """Without x64, JAX has no float64, which is wider than all its dtypes."""
    weights = jnp.asarray([1 / 3, 1.001], primal)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradient = jax.grad(weighted_sum(jnp.float64))(jnp.ones(2, primal), weights)
    assert gradient.dtype == primal
    np.testing.assert_array_equal(gradient, weights)


def test_the_gradient_of_integers_is_float0():
    gradient = jax.grad(lambda tree: identity_dtype_convert(jnp.float16)(tree)["x"], allow_int=True)
    gradients = gradient({"x": jnp.float32(1), "n": jnp.arange(2)})
    assert gradients["x"] == 1
    assert gradients["n"].dtype == jax.dtypes.float0


def test_rounding_of_a_tree_with_mixed_dtypes():
    """A key in float16 beside a query in float32, and a tree with integers."""
    convert = identity_dtype_convert(jnp.bfloat16)

    def loss(query, key):
        tree = convert({"query": query, "key": key.astype(jnp.float16), "step": jnp.arange(2)})
        return (tree["query"] * tree["key"].astype(jnp.float32) * (1 + tree["step"])).sum()

    query, key = jnp.array([1.001, 2.002]), jnp.array([0.1, 0.2])
    d_query, d_key = jax.jit(jax.grad(loss, argnums=(0, 1)))(query, key)
    steps = np.array([1, 2])
    rounded = lambda x, dtype: np.asarray(jnp.asarray(x, jnp.float32).astype(dtype).astype(jnp.float32))
    np.testing.assert_array_equal(d_query, rounded(rounded(key, jnp.float16) * steps, jnp.bfloat16))
    np.testing.assert_array_equal(d_key, rounded(rounded(np.asarray(query) * steps, jnp.float16), jnp.bfloat16))
    assert d_query.dtype == d_key.dtype == jnp.float32


def test_rounding_under_vmap_and_one_function_per_dtype():
    assert identity_dtype_convert("bfloat16") is identity_dtype_convert(jnp.bfloat16)
    gradient = jax.vmap(jax.grad(lambda x: 1.001 * identity_dtype_convert(jnp.bfloat16)(x)))(jnp.ones(3))
    assert gradient.tolist() == [1, 1, 1]


# -- rows ---------------------------------------------------------------------------------------------------------


def first_fit_decreasing(lengths, row_length):
    rows, positions = [], [(-1, 0)] * len(lengths)
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not lengths[number]:
            continue
        row = next((r for r, tokens in enumerate(rows) if tokens + lengths[number] <= row_length), len(rows))
        rows += [0] if row == len(rows) else []
        positions[number] = (row, rows[row])
        rows[row] += lengths[number]
    return positions, len(rows)


@SETTINGS
@given(st.lists(st.integers(0, 9), max_size=30), st.integers(9, 20))
@example([], 9)
@example([0, 0], 9)
@example([9], 9)
def test_rows(lengths, row_length):
    rows = pack_rows(lengths, row_length)
    positions_of_examples, count = first_fit_decreasing(lengths, row_length)
    assert list(zip(rows.row.tolist(), rows.start.tolist(), strict=True)) == positions_of_examples
    assert rows.segment_ids.shape == rows.positions.shape == (count, row_length)
    ids, positions = np.zeros((2, count, row_length), int)
    for number, (row, start) in sorted(enumerate(positions_of_examples), key=lambda pair: pair[1]):
        if row >= 0:
            end = start + lengths[number]
            ids[row, start:end] = ids[row].max() + 1
            positions[row, start:end] = range(lengths[number])
    np.testing.assert_array_equal(rows.segment_ids, ids)
    np.testing.assert_array_equal(rows.positions, positions)
    assert rows.waste == pytest.approx((rows.segment_ids == 0).mean() if count else 0)
    examples = [np.full((length, 2), i, np.float32) for i, length in enumerate(lengths)]
    filled_rows = rows.fill(examples, pad_value=-1)
    for tokens_of_example, (row, start) in zip(examples, positions_of_examples, strict=True):
        np.testing.assert_array_equal(
            filled_rows[row, start : start + len(tokens_of_example)] if row >= 0 else tokens_of_example,
            tokens_of_example,
        )
    assert (filled_rows == -1).all(-1).sum() == (rows.segment_ids == 0).sum()
