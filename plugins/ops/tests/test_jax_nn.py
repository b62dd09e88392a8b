"""``ejkernel_ops.jax_nn.dot_product_attention`` has the results and the gradients of ``jax.nn``'s."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_core
from ejkernel_ops.jax_nn import dot_product_attention, placed

TOLERANCE = {"float32": (2e-5, 1e-4), "bfloat16": (2e-2, 2e-2)}


def inputs(length: int, kv_length: int, dtype: str = "float32", batch: int = 2) -> tuple[jax.Array, ...]:
    """Queries of four heads, keys and values of two."""
    keys = jax.random.split(jax.random.key(31 * length + kv_length), 3)
    shapes = (batch, length, 4, 8), (batch, kv_length, 2, 8), (batch, kv_length, 2, 8)
    return tuple(jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))


def floats(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(5), shape)


def booleans(*shape: int) -> jax.Array:
    return jax.random.bernoulli(jax.random.key(6), 0.6, shape)


def lengths(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def results(function: Any, arrays: Any, bias: Any, options: dict[str, Any]) -> Any:
    """What the function returns, and the gradients of a weighted sum of its output."""
    out_shape = arrays[0].shape
    weights = jax.random.normal(jax.random.key(7), out_shape)

    def loss(arrays: Any, bias: Any) -> Any:
        returned = function(*arrays, bias, **options)
        out = returned[0] if isinstance(returned, tuple) else returned
        return (out.astype(jnp.float32) * weights).sum(), returned

    return jax.jit(jax.grad(loss, (0, 1) if bias is not None else (0,), has_aux=True))(arrays, bias)


def with_zeros(query: Any, key: Any, value: Any, bias: Any = None, **options: Any) -> Any:
    """``jax.nn``'s, but 0 in the rows of a call with lengths of keys that see none: there it has the mean of all."""
    returned = jax.nn.dot_product_attention(query, key, value, bias, **options)
    ends = options.get("key_value_seq_lengths")
    if ends is None:
        return returned
    own, place = jnp.arange(query.shape[1])[:, None], jnp.arange(key.shape[1])
    window = options.get("local_window_size", 99)
    left, right = (window, window) if isinstance(window, int) else window
    right = min(right, 0) if options.get("is_causal") else right
    seen = (own - left <= place) & (place <= own + right) & (place < ends[:, None, None])
    seen = (seen[:, None] & options.get("mask", True)).any(-1).mT[..., None]  # (B, T, 1 or N, 1)
    out, *rest = returned if isinstance(returned, tuple) else (returned,)
    out = jnp.where(seen, out, 0)
    return (out, *rest) if rest else out


def assert_same(arrays: Any, bias: Any = None, dtype: str = "float32", **options: Any) -> None:
    actual, expected = (results(f, arrays, bias, options) for f in (dot_product_attention, with_zeros))
    atol, rtol = TOLERANCE[dtype]
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), atol=atol, rtol=rtol)


LENGTHS = ((5, 5), (5, 9), (9, 5), (1, 7), (7, 1), (13, 13))
SIDES = {
    "causal": {"is_causal": True},
    "window": {"local_window_size": (3, 1)},
    "one number": {"local_window_size": 2},
    "causal window": {"is_causal": True, "local_window_size": (1, 4)},
    "own key": {"local_window_size": (0, 0)},
    "no key of its own": {"local_window_size": (2, -1)},
    "later keys": {"local_window_size": (-1, 3)},
    "empty window": {"local_window_size": (1, -2)},
    "nothing": {},
}


def lengths_cases() -> dict[str, Any]:
    return {
        "key lengths": lambda T, S: {"key_value_seq_lengths": lengths(S // 2 + 1, S)},
        "no keys": lambda T, S: {"key_value_seq_lengths": lengths(0, S)},
        "query lengths": lambda T, S: {"query_seq_lengths": lengths(T, T // 2)},
        "both": lambda T, S: {
            "query_seq_lengths": lengths(T, 0),
            "key_value_seq_lengths": lengths(0, S // 2 + 1),
            "is_causal": True,
        },
    }


BIASES = {
    "bias of everything": lambda T, S: ((2, 4, T, S), None),
    "bias without batch": lambda T, S: ((4, T, S), (1, 1, T, S)),
    "bias of keys": lambda T, S: ((2, 1, 1, S), (2, 4, T, 1)),
    "bias of rows": lambda T, S: ((1, 4, T, 1), (T, S)),
    "mask alone": lambda T, S: (None, (2, 1, 1, S)),
}


@pytest.mark.parametrize("name", SIDES)
@pytest.mark.parametrize("sizes", LENGTHS, ids=str)
def test_causality_and_windows_start_at_the_first_token(sizes: Any, name: str) -> None:
    assert_same(inputs(*sizes), return_residual=True, **SIDES[name])


@pytest.mark.parametrize("name", lengths_cases())
@pytest.mark.parametrize("sizes", LENGTHS, ids=str)
def test_lengths(sizes: Any, name: str) -> None:
    """A row without keys is 0, and so is a row after the query's length."""
    assert_same(inputs(*sizes), return_residual=True, **lengths_cases()[name](*sizes))


@pytest.mark.parametrize("side", SIDES)
def test_lengths_and_windows(side: str) -> None:
    """With and without a mask, and rows that see a key of the window, but not before its end."""
    ends = {"key_value_seq_lengths": lengths(3, 6)}
    assert_same(inputs(9, 7), return_residual=True, **ends, **SIDES[side])
    assert_same(inputs(5, 7), mask=booleans(2, 4, 5, 7), return_residual=True, **ends, **SIDES[side])


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32"])
def test_lengths_of_any_integers(dtype: str) -> None:
    """More keys than the dtype can count, and ends far behind the last key or before the first."""
    arrays = inputs(3, 300, batch=3)
    ends = np.array([100, 7, 0], dtype)
    options = {"key_value_seq_lengths": ends, "query_seq_lengths": np.array([3, 1, 2], dtype)}
    wide = {name: array.astype(np.int32) for name, array in options.items()}
    np.testing.assert_allclose(dot_product_attention(*arrays, **options), with_zeros(*arrays, **wide), atol=2e-5)
    beyond = np.array([np.iinfo(dtype).max, 7, max(np.iinfo(dtype).min, -99)], dtype)
    expected = with_zeros(*arrays, key_value_seq_lengths=np.clip(beyond.astype(np.int64), 0, 300).astype(np.int32))
    np.testing.assert_allclose(dot_product_attention(*arrays, key_value_seq_lengths=beyond), expected, atol=2e-5)


def test_lengths_reach_the_kernel_as_those_of_a_cache() -> None:
    """Nothing over all values or of size T x S is computed beside it, so its time can follow the lengths."""
    arrays = inputs(1, 64)
    step = lambda *arrays: dot_product_attention(*arrays[:3], key_value_seq_lengths=arrays[3])
    program = jax.make_jaxpr(step)(*arrays, lengths(9, 20))
    over_keys = [
        equation for equation in equations_of(program.jaxpr) if any(64 in np.shape(x.aval) for x in equation.invars)
    ]
    assert [equation.primitive.name for equation in over_keys] == ["ejkernel_call"]
    assert "bool[" not in str(program).replace("bool[2,1,4]", "")  # which rows are empty


def equations_of(jaxpr: Any) -> Any:
    """Those of nested programs too, but for what a call of a kernel may have in it."""
    for equation in jaxpr.eqns:
        inner = [value for value in equation.params.values() if hasattr(value, "jaxpr")]
        if "ejkernel" in equation.primitive.name or not inner:
            yield equation
        else:
            for one in inner:
                yield from equations_of(one.jaxpr)


def test_keys_behind_their_length_are_never_used() -> None:
    """One query against a cache that is filled to a length; the rest is NaN."""
    query, key, value = inputs(1, 9)
    empty = np.arange(9)[None, :, None, None] >= np.array([4, 7])[:, None, None, None]
    dirty = [jnp.where(empty, jnp.nan, array) for array in (key, value)]
    weights = jax.random.normal(jax.random.key(8), query.shape)

    def gradients(query: Any, key: Any, value: Any, **options: Any) -> Any:
        loss = lambda *arrays: (dot_product_attention(*arrays, **options) * weights).sum()
        return jax.grad(loss, (0, 1, 2))(query, key, value)

    ends = {"key_value_seq_lengths": lengths(4, 7)}
    out = dot_product_attention(query, *dirty, **ends)
    for row, length in enumerate((4, 7)):
        one = slice(row, row + 1)
        expected = jax.nn.dot_product_attention(query[one], key[one, :length], value[one, :length])
        np.testing.assert_allclose(out[one], expected, atol=2e-5)
    for actual, right in zip(gradients(query, *dirty, **ends), gradients(query, key, value, **ends), strict=True):
        np.testing.assert_allclose(actual, right, atol=2e-5)
    np.testing.assert_array_equal(dot_product_attention(query, *dirty, key_value_seq_lengths=lengths(0, 0)), 0.0)


@pytest.mark.parametrize("side", ["nothing", "causal", "window"])
@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("sizes", [(5, 5), (5, 9), (9, 5)], ids=str)
def test_bias_and_mask(sizes: Any, name: str, side: str) -> None:
    bias, mask = BIASES[name](*sizes)
    array = None if bias is None else floats(*bias)
    assert_same(inputs(*sizes), array, mask=booleans(*mask) if mask else None, return_residual=True, **SIDES[side])


def test_bfloat16() -> None:
    mask = booleans(9, 5).at[3].set(False)  # a row that sees nothing
    assert_same(inputs(9, 5, "bfloat16"), None, "bfloat16", mask=mask, is_causal=True, scale=0.4)


def test_float16() -> None:
    """Beside ``jax.nn`` in float32, because it does not take float16 on a CPU."""
    arrays = inputs(9, 5, "float16")
    options = {"mask": booleans(9, 5).at[3].set(False), "is_causal": True, "scale": 0.4}
    wide = tuple(array.astype(jnp.float32) for array in arrays)
    actual = jax.tree.leaves(results(dot_product_attention, arrays, None, options))
    expected = jax.tree.leaves(results(jax.nn.dot_product_attention, wide, None, options))
    for x, y in zip(actual, expected, strict=True):
        assert x.dtype == jnp.float16
        np.testing.assert_allclose(np.asarray(x, np.float32), y, atol=4e-3, rtol=4e-3)


def test_all_at_once() -> None:
    assert_same(
        inputs(9, 7),
        floats(4, 9, 7),
        mask=booleans(2, 1, 9, 7),
        is_causal=True,
        scale=0.3,
        query_seq_lengths=lengths(6, 9),
        key_value_seq_lengths=lengths(7, 3),
        local_window_size=(4, 2),
        return_residual=True,
    )


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"mask": jnp.ones((1, 1, 5, 0), bool)}], ids=str)
def test_without_keys_it_is_0(options: Any) -> None:
    query, keys = jax.random.normal(jax.random.key(0), (2, 5, 4, 8)), jnp.zeros((2, 0, 2, 8))

    def loss(function: Any, query: Any, keys: Any) -> Any:
        return (function(query, keys, keys, **options) + query).sum()

    np.testing.assert_array_equal(dot_product_attention(query, keys, keys, **options), 0.0)
    gradient, of_keys = jax.grad(partial(loss, dot_product_attention), (0, 1))(query, keys)
    np.testing.assert_array_equal(gradient, 1.0)
    assert of_keys.shape == keys.shape


def test_without_a_batch() -> None:
    arrays = tuple(array[0] for array in inputs(5, 7))
    assert_same(arrays, floats(4, 5, 7), mask=booleans(5, 7), is_causal=True, return_residual=True)


def test_a_scale_may_be_traced() -> None:
    query, key, value = inputs(5, 7)
    losses = [
        jax.jit(jax.value_and_grad(lambda scale, f=f: (f(query, key, value, scale=scale) ** 2).sum()))
        for f in (dot_product_attention, jax.nn.dot_product_attention)
    ]
    actual, expected = (loss(jnp.float32(0.7)) for loss in losses)
    np.testing.assert_allclose(actual, expected, rtol=1e-4)
    assert abs(expected[1]) > 1e-2


def test_a_bias_of_integers_is_added() -> None:
    query, key, value = inputs(5, 7)
    bias = jnp.arange(7) % 3
    actual, expected = (f(query, key, value, bias) for f in (dot_product_attention, jax.nn.dot_product_attention))
    np.testing.assert_allclose(actual, expected, atol=2e-5)


def test_vmap_and_scan() -> None:
    query, key, value = (jnp.stack([array, -array, 2 * array]) for array in inputs(5, 7))
    ends = jnp.stack([lengths(7, 0), lengths(2, 3), lengths(0, 7)])

    def mapped(function: Any) -> Any:
        call = lambda q, k, v, n: function(q, k, v, is_causal=True, key_value_seq_lengths=n)
        return jax.vmap(call)(query, key, value, ends)

    def scanned(function: Any) -> Any:
        def step(total: Any, arrays: Any) -> Any:
            q, k, v, n = arrays
            out = function(q + total, k, v, is_causal=True, key_value_seq_lengths=n)
            return out, out

        return jax.lax.scan(step, jnp.zeros_like(query[0]), (query, key, value, ends))[1]

    for transform in (mapped, scanned):
        actual, expected = map(transform, (dot_product_attention, with_zeros))
        np.testing.assert_allclose(actual, expected, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("wrt", [(0,), (1, 2), (0, 3), (2, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("transform", ["jit", "vmap of grad", "grad of vmap", "checkpoint"])
def test_two_calls_of_one_program_that_are_differentiated_in_different_arguments(wrt: Any, transform: str) -> None:
    """The first call has a cotangent for its query alone, or none at all, where the second has others."""
    query, key, value = (jnp.stack([array, -array, 2 * array]) for array in inputs(5, 7))
    arrays = (query, key, value, jnp.stack([floats(4, 5, 7), -floats(4, 5, 7), floats(4, 5, 7) / 2]))
    weights = jax.random.normal(jax.random.key(8), query.shape)

    def gradients(function: Any) -> Any:
        def loss(query: Any, key: Any, value: Any, bias: Any, weight: Any) -> Any:
            first = function(query, jax.lax.stop_gradient(key), value, is_causal=True)
            second = function(first, key, value, bias, local_window_size=(3, 1))
            return (second * weight).sum() + (function(query, key, value, bias) * weight).sum()

        if transform == "grad of vmap":
            return jax.jit(jax.grad(lambda *a: jax.vmap(loss)(*a, weights).sum(), wrt))(*arrays)
        if transform == "vmap of grad":
            return jax.jit(jax.vmap(jax.grad(loss, wrt)))(*arrays, weights)
        one = [array[1] for array in (*arrays, weights)]
        return jax.jit(jax.grad(jax.checkpoint(loss) if transform == "checkpoint" else loss, wrt))(*one)

    pairs = zip(gradients(dot_product_attention), gradients(jax.nn.dot_product_attention), strict=True)
    for actual, expected in pairs:
        np.testing.assert_allclose(actual, expected, atol=1e-4, rtol=1e-4)


def test_sharded_arrays_keep_their_explicit_axes() -> None:
    mesh = jax.make_mesh((2, 2), ("batch", "heads"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    spec = jax.P("batch", None, "heads", None)
    arrays, ends = inputs(6, 6), jnp.array([0, 4])
    expected = with_zeros(*arrays, is_causal=True, query_seq_lengths=ends, key_value_seq_lengths=ends)
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(array, jax.NamedSharding(mesh, spec)) for array in arrays]
        ends = jax.device_put(ends, jax.NamedSharding(mesh, jax.P("batch")))
        out = jax.jit(dot_product_attention, static_argnames="is_causal")(
            *sharded, is_causal=True, query_seq_lengths=ends, key_value_seq_lengths=ends
        )
    assert jax.typeof(out).sharding.spec == spec
    np.testing.assert_allclose(out, expected, atol=2e-5)


def test_float64_is_computed_in_float64() -> None:
    with jax.enable_x64(True):
        arrays = tuple(array.astype(jnp.float64) for array in inputs(5, 7))
        mask = booleans(5, 7).at[2].set(False)
        out = dot_product_attention(*arrays, mask=mask)
        assert out.dtype == jnp.float64
        np.testing.assert_allclose(out, jax.nn.dot_product_attention(*arrays, mask=mask), atol=1e-6)
        np.testing.assert_allclose(out[:, 2, 0], arrays[2][:, :, 0].mean(1), rtol=1e-14)


def test_implementations_are_backends() -> None:
    query, key, value = inputs(5, 5)
    expected = jax.nn.dot_product_attention(query, key, value)
    np.testing.assert_allclose(dot_product_attention(query, key, value, implementation="xla"), expected, atol=2e-5)
    with pytest.raises((ejkernel_core.NoKernel, ejkernel_core.UnknownBackend), match="cudnn|cuDNN"):
        dot_product_attention(query, key, value, implementation="cudnn")  # float32
    with pytest.raises(ValueError, match="implementation: takes None, 'xla' or 'cudnn'; got str 'triton'"):
        dot_product_attention(query, key, value, implementation="triton")  # type: ignore[call-overload]


Q, K, V = (np.ones((2, n, heads, 8), np.float32) for n, heads in ((5, 4), (7, 2), (7, 2)))
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "rank": ({"query": Q[0, 0]}, ValueError, "query: takes (batch, length, heads, head_dim)"),
    "value": ({"value": V[..., :4]}, ValueError, "value: takes the key's shape (2, 7, 2, 8); got (2, 7, 2, 4)"),
    "batch": ({"query": Q[:1]}, ValueError, "key: takes the batch and the head_dim"),
    "heads": ({"query": Q[:, :, :3]}, ValueError, "query: heads must be a multiple of the key's 2; got 3"),
    "dtype": ({"query": Q.astype(np.float16)}, ValueError, "take the query's dtype float16"),
    "mask of numbers": ({"mask": np.ones((5, 7))}, ValueError, "mask: takes booleans; got float32 (numbers to add"),
    "mask shape": (
        {"mask": np.ones((5, 6), bool)},
        ValueError,
        "broadcasts to (B, N, T, S) = (2, 4, 5, 7); got (5, 6)",
    ),
    "bias heads": ({"bias": np.ones((2, 5, 7), np.float32)}, ValueError, "bias: takes a shape that broadcasts"),
    "bias rank": ({"bias": np.ones((1, 1, 1, 1, 1), np.float32)}, ValueError, "bias: takes a shape that broadcasts"),
    "lengths": (
        {"query_seq_lengths": lengths(1)},
        ValueError,
        "query_seq_lengths: takes integers (2,), one for each batch entry; got int32 (1,)",
    ),
    "float lengths": (
        {"key_value_seq_lengths": np.ones(2, np.float32)},
        ValueError,
        "key_value_seq_lengths: takes integers (2,), one for each batch entry; got float32",
    ),
    "window": ({"local_window_size": (1, 2, 3)}, TypeError, "local_window_size: takes an int, a pair"),
    "traced causality": ({"is_causal": np.ones(2, bool)}, TypeError, "is_causal: takes True or False"),
    "scale": ({"scale": np.ones(2, np.float32)}, ValueError, "scale: takes one number; got shape (2,)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    arguments, kind, message = WRONG[name]
    with pytest.raises(kind) as error:
        dot_product_attention(**{"query": Q, "key": K, "value": V, **arguments})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("softmax_scale", "scale"),
        ("sm_scale", "scale"),
        ("causal", "is_causal"),
        ("sliding_window", "local_window_size"),
        ("attn_mask", "mask"),
    ],
)
def test_a_name_of_another_library_is_told_with_the_one_here(name: str, here: str) -> None:
    with pytest.raises(TypeError, match=f"keyword argument '{name}'; '{name}' is called '{here}' here"):
        dot_product_attention(Q, K, V, **{name: 1})  # type: ignore[call-overload]


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(TypeError, match="keyword argument 'temperature'$"):
        dot_product_attention(Q, K, V, temperature=1)  # type: ignore[call-overload]


def test_placed() -> None:
    """The options make every query see the keys of its window, and no others."""
    sides = (None, *range(-4, 9))
    for length, kv_length, left, right in itertools.product(range(7), range(7), sides, sides):
        rows, keys, options = placed(length, kv_length, left, right)
        query, key = np.arange(length)[:, None], np.arange(kv_length)
        expected = np.ones((length, kv_length), bool)
        expected &= True if left is None else key >= query - left
        expected &= True if right is None else key <= query + right
        actual = np.zeros_like(expected)
        before, after = options.get("sliding_window", (99, 99))
        assert before >= 0
        assert after >= 0
        after = 0 if options.get("causal") else after
        own = np.arange(rows)[:, None] + keys - rows
        actual[:rows, :keys] = (own - before <= np.arange(keys)) & (np.arange(keys) <= own + after)
        assert (actual == expected).all(), (length, kv_length, left, right, options)


@pytest.mark.parametrize("sizes", [(64, 64), (64, 100), (100, 64)], ids=str)
def test_no_mask_is_made_for_causality(sizes: Any) -> None:
    """So kernels that take no mask run it, and nothing of size T x S is in memory."""
    text = str(jax.make_jaxpr(lambda *arrays: dot_product_attention(*arrays, is_causal=True))(*inputs(*sizes)))
    assert "ejkernel_call" in text
    assert f"{sizes[0]},{sizes[1]}]" not in text
    assert "bool[" not in text


STRICT_MODES: dict[str, Any] = {
    "jax_numpy_rank_promotion": "raise",
    "jax_numpy_dtype_promotion": "strict",
    "jax_debug_nans": True,
    "jax_debug_infs": True,
    "jax_enable_checks": True,
}


@pytest.mark.parametrize("mode", STRICT_MODES)
def test_the_function_works_in_a_strict_mode(mode: str) -> None:
    query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 6, 4, 8))
    lengths = {"query_seq_lengths": jnp.array([3, 6]), "key_value_seq_lengths": jnp.array([4, 6])}
    if mode == "jax_debug_infs":
        del lengths["query_seq_lengths"]  # a row without keys has the lse -inf, which is a result of the operation

    def loss(query: Any, key: Any, value: Any) -> Any:
        return dot_product_attention(query, key, value, is_causal=True, **lengths).sum()

    expected = jax.grad(loss, argnums=(0, 1, 2))(query, key, value)
    before = getattr(jax.config, mode)
    jax.config.update(mode, STRICT_MODES[mode])
    try:
        gradients = jax.grad(loss, argnums=(0, 1, 2))(query, key, value)
    finally:
        jax.config.update(mode, before)
    for one, other in zip(gradients, expected, strict=True):
        np.testing.assert_array_equal(one, other)
