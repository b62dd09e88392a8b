"""The interpreter of Triton kernels: right numbers, and an error for each mistake of a kernel."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

import ejkernel_core as core  # noqa: E402
from ejkernel_triton.interpreter import interpreted, interpreted_registry  # noqa: E402
from ejkernel_triton.launch import _jax_triton  # noqa: E402

if _jax_triton.unavailable_reason():
    pytest.skip(_jax_triton.unavailable_reason(), allow_module_level=True)

NEW = _jax_triton.version() >= (0, 4)
TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
NEGATIVE = tl.constexpr(-7)
PLAIN: tl.constexpr = 0.5


@pytest.fixture(autouse=True)
def on_the_cpu():
    with interpreted():
        yield


def launch(kernel, arrays, outputs, *, scalars=(), grid=(1,), **constants):
    outputs = [outputs] if isinstance(outputs, jax.ShapeDtypeStruct) else outputs
    found = _jax_triton.call(
        kernel,
        arrays,
        outputs,
        scalars=scalars,
        grid=grid,
        constants=constants,
        num_warps=4,
        num_stages=2,
        compute_capability=(9, 0),
        name=kernel.fn.__name__ if hasattr(kernel, "fn") else "kernel",
    )
    # JAX may run the kernel asynchronously: its errors are to be raised here.
    jax.block_until_ready(found)
    return found[0] if len(found) == 1 else found


def shape(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def normal(*sizes, dtype="float32", key=0):
    return jax.random.normal(jax.random.key(key), sizes).astype(dtype)


def fails(*words):
    """The error of JAX contains the message of the error that the callback raises."""
    return pytest.raises(Exception, match="(?s)" + ".*".join(words))


def exact(array):
    return np.asarray(array).astype(np.float64)


# -- kernels -----------------------------------------------------------------------------------------------------


@triton.jit
def add(x, y, n, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n), mask=at < n)


def added(x, y, block=64):
    return launch(
        add, [x, y], shape(*x.shape, dtype=x.dtype), scalars=(x.size,), grid=(-(-x.size // block),), BLOCK=block
    )


@triton.jit
def multiply(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr, KIND: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * N + n[None, :])
    z = tl.dot(x, y, input_precision=PRECISION, out_dtype=KIND)
    tl.store(out + m[:, None] * N + n[None, :], z)


def product(a, b, precision="ieee", result="float32"):
    (m, k), n = a.shape, b.shape[1]
    kind = getattr(tl, result)
    return launch(multiply, [a, b], shape(m, n, dtype=result), M=m, N=n, K=k, PRECISION=precision, KIND=kind)


@triton.jit
def copy(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


def cast(x, dtype):
    return launch(copy, [x], shape(x.size, dtype=dtype), BLOCK=x.size)


# -- numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "int8", "uint32"])
def test_adds(dtype):
    x, y = (jnp.arange(200) * 3).astype(dtype), normal(200).astype(dtype)
    np.testing.assert_array_equal(exact(added(x, y)), exact(x + y))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounds_to_nearest_even(dtype):
    x = np.asarray(normal(1024), np.float32) * 100
    ties = np.asarray([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11], np.float32)
    x[:4] = ties
    np.testing.assert_array_equal(exact(cast(jnp.asarray(x), dtype)), exact(jnp.asarray(x).astype(dtype)))


def test_float8_becomes_the_largest_not_nan():
    x = jnp.asarray([1.0, 500.0, -1e6, 0.07] * 4)
    actual = exact(cast(x, "float8_e4m3fn"))
    np.testing.assert_array_equal(actual[:4], [1.0, 448.0, -448.0, exact(x.astype("float8_e4m3fn"))[3]])
    np.testing.assert_array_equal(exact(cast(x.astype("float8_e5m2"), "float32")), exact(x.astype("float8_e5m2")))


@triton.jit
def cut_off(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at).to(tl.bfloat16, fp_downcast_rounding="rtz"))


def test_rounds_towards_zero_with_rtz():
    x = normal(64) * 10
    bits = np.asarray(x).view(np.uint32) & 0xFFFF0000
    np.testing.assert_array_equal(
        exact(launch(cut_off, [x], shape(64, dtype="bfloat16"), BLOCK=64)), bits.view(np.float32)
    )


def test_floats_become_whole_numbers_as_on_the_gpu():
    x = jnp.asarray([1.9, -1.9, 1e20, -1e20, math.nan, math.inf, 0.0, 3.0])
    top, bottom = 2**31 - 1, -(2**31)
    np.testing.assert_array_equal(cast(x, "int32"), [1, -1, top, bottom, 0, top, 0, 3])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e4m3fn"])
def test_dot_accumulates_in_float32(dtype):
    a, b = normal(16, 512, dtype=dtype), normal(512, 16, dtype=dtype, key=1)
    expected = exact(a) @ exact(b)
    assert np.abs(exact(product(a, b)) - expected).max() < 1e-4


def test_dot_of_float64_and_int8():
    with jax.enable_x64(True):
        a, b = normal(16, 64).astype("float64") / 3, normal(64, 16, key=1).astype("float64") / 3
        assert np.abs(exact(product(a, b, result="float64")) - exact(a) @ exact(b)).max() < 1e-13
    c = jnp.asarray(np.random.default_rng(0).integers(-128, 128, (32, 32)), "int8")
    np.testing.assert_array_equal(product(c, c, result="int32"), np.asarray(c, np.int32) @ np.asarray(c, np.int32))


def test_dot_into_float16_rounds_its_sums():
    a = jnp.full((16, 16), 1.0009765625, "float16")
    np.testing.assert_array_equal(
        exact(product(a, a, result="float16")), exact((exact(a) @ exact(a)).astype(np.float16))
    )


def test_tf32_rounds_its_inputs():
    a, b = normal(16, 32), normal(32, 16, key=1)
    expected = exact(a) @ exact(b)
    off = {p: np.abs(exact(product(a, b, p)) - expected).max() for p in ("tf32", "tf32x3", "ieee")}
    assert off["tf32"] > 1e-4
    assert max(off["tf32x3"], off["ieee"]) < 1e-5
    # To nearest even at ten bits: exact where the inputs have no more.
    small = jnp.round(a * 64) / 64
    np.testing.assert_array_equal(product(small, jnp.eye(32)[:, :16], "tf32"), small[:, :16])


def test_dot_of_matrices_too_small_for_tensor_cores_is_refused():
    with fails("multiply", "Input shapes should have"):
        product(normal(16, 4), normal(4, 16))


@triton.jit
def functions(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    v = tl.load(x + at)
    tl.store(out + at, tl.exp2(v))
    tl.store(out + BLOCK + at, tl.log2(v))
    tl.store(out + 2 * BLOCK + at, tl.sqrt(v))
    tl.store(out + 3 * BLOCK + at, tl.maximum(v, 1.0))
    tl.store(out + 4 * BLOCK + at, tl.where(v > 1, v, -v))
    tl.store(out + 5 * BLOCK + at, tl.math.rsqrt(v) + tl.exp(v) - tl.log(v))
    tl.store(out + 6 * BLOCK + at, tl.abs(-v) + tl.fma(v, v, v) + tl.minimum(v, PLAIN))


def test_functions():
    x = jnp.abs(normal(32)) + 0.1
    actual = exact(launch(functions, [x], shape(7, 32), BLOCK=32))
    v = exact(x)
    expected = [np.exp2(v), np.log2(v), np.sqrt(v), np.maximum(v, 1), np.where(v > 1, v, -v)]
    expected += [1 / np.sqrt(v) + np.exp(v) - np.log(v), v + (v * v + v) + np.minimum(v, 0.5)]
    np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=2e-6)


@triton.jit
def unsigned(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    v = tl.load(x + at)
    v = v ^ (v >> 16)
    v = v * 0x7FEB352D
    v ^= v >> 15
    v = v * 0x846CA68B + 0x9E3779B9
    tl.store(out + at, v)
    tl.store(out + BLOCK + at, v // 7)
    tl.store(out + 2 * BLOCK + at, v % 1000)
    tl.store(out + 3 * BLOCK + at, (v > 0x80000000).to(tl.uint32))
    tl.store(out + 4 * BLOCK + at, tl.maximum(v, 0x80000000))
    tl.store(out + 5 * BLOCK + at, tl.umulhi(v, v))
    tl.store(out + 6 * BLOCK + at, v.to(tl.float32).to(tl.uint32))


def test_unsigned_numbers_wrap_and_have_no_sign():
    x = jnp.asarray(np.random.default_rng(0).integers(0, 2**32, 64), "uint32")
    v = np.asarray(x).astype(np.uint64)
    v = v ^ (v >> 16)
    v = v * 0x7FEB352D % 2**32
    v ^= v >> 15
    v = (v * 0x846CA68B + 0x9E3779B9) % 2**32
    rows = [v, v // 7, v % 1000, v > 2**31, np.maximum(v, 2**31), v * v >> 32, v.astype(np.float32)]
    expected = np.stack([np.asarray(row).astype(np.uint64) for row in rows])
    np.testing.assert_array_equal(
        launch(unsigned, [x], shape(7, 64, dtype="uint32"), BLOCK=64), expected.astype(np.uint32)
    )


@triton.jit
def whole(x, y, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(out + at, a // b)
    tl.store(out + BLOCK + at, a % b)
    tl.store(out + 2 * BLOCK + at, a >> 3)
    tl.store(out + 3 * BLOCK + at, (a < b).to(tl.int32) + (not (a == b)).to(tl.int32))  # noqa: SIM201
    tl.store(out + 4 * BLOCK + at, a.to(tl.float32, bitcast=True).to(tl.int32, bitcast=True) ^ ~b)
    tl.store(out + 5 * BLOCK + at, NEGATIVE * a - a * NEGATIVE + (2**31 - 1) + 1)


def test_integer_division_rounds_towards_zero():
    x, y = jnp.asarray([7, -7, 7, -7, 6, -6, 5, 0], "int32"), jnp.asarray([2, 2, -2, -2, 3, -3, 9, 5], "int32")
    a, b = np.asarray(x), np.asarray(y)
    expected = [np.trunc(a / b), np.fmod(a, b), a >> 3, (a < b) * 1 + (a != b), a ^ ~b, np.full(8, -(2**31))]
    np.testing.assert_array_equal(
        launch(whole, [x, y], shape(6, 8, dtype="int32"), BLOCK=8), np.stack(expected).astype(int)
    )


@triton.jit
def reductions(x, out, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    v = tl.load(x + m[:, None] * N + n[None, :])
    tl.store(out + m, tl.max(v, 1))
    tl.store(out + M + m, tl.min(v, axis=1))
    tl.store(out + 2 * M + m, tl.sum(v, 1))
    tl.store(out + 3 * M + m, tl.argmax(v, 1).to(v.dtype))
    tl.store(out + 4 * M + m, tl.sum(tl.max(v, 0)) + m * 0.0)
    tl.store(out + 5 * M + m, v.sum(1, keep_dims=True).reshape(M))
    tl.store(out + 6 * M + m, tl.reduce(v, 1, _product))
    tl.store(out + 7 * M + m, tl.max(tl.cumsum(v, 1), 1))
    tl.store(out + 8 * M + m, tl.max(tl.associative_scan(v, 1, _product, reverse=True), 1))


@triton.jit
def _product(a, b):
    return a * b


def test_reductions_and_scans():
    x = normal(8, 16)
    v = exact(x)
    back = np.cumprod(v[:, ::-1], 1)
    expected = [v.max(1), v.min(1), v.sum(1), v.argmax(1), np.full(8, v.max(0).sum()), v.sum(1), v.prod(1)]
    expected += [np.cumsum(v, 1).max(1), back.max(1)]
    np.testing.assert_allclose(launch(reductions, [x], shape(9, 8), M=8, N=16), expected, rtol=2e-5, atol=1e-6)


@triton.jit
def greatest(x, out, N: tl.constexpr):
    tl.store(out, tl.max(tl.load(x + tl.arange(0, N)), 0))


def test_maximum_ignores_nan_and_compares_unsigned_numbers():
    assert launch(greatest, [jnp.asarray([1.0, math.nan, 3.0, 2.0])], shape(1), N=4)[0] == 3
    numbers = jnp.asarray([1, 2**32 - 1, 3, 2], "uint32")
    assert exact(launch(greatest, [numbers], shape(1, dtype="uint32"), N=4))[0] == 2**32 - 1


# -- the language ------------------------------------------------------------------------------------------------


@triton.jit
def shapes(x, out, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    v = tl.load(x + m[:, None] * N + n[None, :])
    w = tl.trans(v) + v.T + tl.permute(v, (1, 0)) + tl.zeros([N, M], tl.float32) + tl.full((N, M), 1.0, tl.float32)
    w = tl.expand_dims(w.reshape(M * N), 0) + tl.broadcast_to(tl.load(x), [1, M * N])
    w = tl.reshape(w, (N, M))
    left, right = tl.split(tl.join(w, -w))
    tl.static_assert(left.shape[0] == N, "rows")
    tl.store(out + n[:, None] * M + m[None, :], left - right)


def test_shapes():
    x = normal(8, 16)
    v = exact(x)
    np.testing.assert_allclose(
        launch(shapes, [x], shape(16, 8), M=8, N=16), 2 * (3 * v.T + 1 + v[0, 0]), rtol=1e-5, atol=1e-5
    )


@triton.jit
def loops(count, out, KIND: tl.constexpr, STEPS: tl.constexpr):
    total = 0
    if KIND == "range":
        for i in range(1, count):
            total += i
    elif KIND == "tl.range":
        for i in tl.range(0, count, 2, num_stages=3, loop_unroll_factor=2):
            total += i
    elif KIND == "warp":
        for i in tl.range(count, warp_specialize=True):
            total += i
    elif KIND == "static":
        for i in tl.static_range(STEPS):
            total += i * STEPS
    elif KIND == "while":
        i = count
        while i > 0:
            total += i
            i -= 3
    else:
        total = count if count > 100 else -count
        if not (count < 5 and count > 1) or STEPS > 3:
            total -= 1
    tl.store(out, total)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("range", 45), ("tl.range", 20), ("warp", 45), ("static", 24), ("while", 22), ("branch", -11)],
)
def test_loops_and_branches(kind, expected):
    assert launch(loops, [], shape(1, dtype="int32"), scalars=(10,), KIND=kind, STEPS=4)[0] == expected


@triton.jit
def nested(x, n, out, BLOCK: tl.constexpr, SQUARE: tl.constexpr = True, NOTHING: tl.constexpr = None):
    at = tl.arange(0, BLOCK)
    at = tl.max_contiguous(tl.multiple_of(at, BLOCK), BLOCK)
    tl.assume(n > 0)
    tl.debug_barrier()
    a, b = _pair(tl.load(x + at, mask=at < n, other=0.0), SQUARE, EXTRA=tl.cdiv(BLOCK, 3))
    HALF: tl.constexpr = BLOCK // 2
    tl.device_assert(n > 0, "n")
    if NOTHING is None:
        b += HALF
    if 0 < n < 100:
        b += 1
    tl.store(out + at, a + b)


@triton.jit
def _pair(v, SQUARE: tl.constexpr, EXTRA):
    first = v
    if SQUARE:
        first = v * v
    return first, EXTRA


def test_nested_functions_and_constants():
    x = normal(16)
    actual = launch(nested, [x], shape(16), scalars=(16,), BLOCK=16)
    np.testing.assert_allclose(actual, exact(x) ** 2 + 6 + 8 + 1, rtol=1e-6)
    actual = launch(nested, [x], shape(16), scalars=(16,), BLOCK=16, SQUARE=False, NOTHING=1)
    np.testing.assert_allclose(actual, exact(x) + 6 + 1, rtol=1e-6)


def test_kernels_with_free_variables():
    factor = tl.constexpr(3.0)

    @triton.jit
    def scaled(x, out, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(out + at, factor * tl.load(x + at))

    np.testing.assert_array_equal(launch(scaled, [jnp.ones(8)], shape(8), BLOCK=8), 3)


@triton.jit
def numbered(out):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    place = (x * tl.num_programs(1) + y) * tl.num_programs(2) + z
    tl.store(out + place, x * 100 + y * 10 + z)


def test_program_ids():
    actual = launch(numbered, [], shape(2, 3, 4, dtype="int32"), grid=(2, 3, 4))
    np.testing.assert_array_equal(
        actual, np.add.outer(np.add.outer(np.arange(2) * 100, np.arange(3) * 10), np.arange(4))
    )


@triton.jit
def types(x, n, out):
    # A number that is assigned is a tensor of float32, and promotes; a bare one does not.
    half = 0.5
    bare = tl.load(x) * 0.5
    tl.static_assert(bare.dtype == tl.bfloat16)
    tl.static_assert((tl.load(x) * half).dtype == tl.float32)
    for i in range(n):
        tl.static_assert((i + tl.full((), 1, tl.int64)).dtype == tl.int64)
        tl.static_assert(i.dtype == tl.int32)
    tl.store(out, bare)


def test_types_are_those_of_the_compiler():
    assert launch(types, [jnp.ones(1, "bfloat16")], shape(1, dtype="bfloat16"), scalars=(2,))[0] == 0.5


@triton.jit
def sum_up(x, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out + at % 4, tl.load(x + at))


@triton.jit
def described(x, out, rows, columns, M: tl.constexpr, N: tl.constexpr):
    source = tl.make_tensor_descriptor(x, shape=[rows, columns], strides=[columns, 1], block_shape=[M, N])
    target = tl.make_tensor_descriptor(out, shape=[rows, columns], strides=[columns, 1], block_shape=[M, N])
    at = tl.program_id(0) * M
    target.store([at, 0], source.load([at, 0]) * 2)


@triton.jit
def blocked(x, out, rows, columns, M: tl.constexpr, N: tl.constexpr):
    at = tl.program_id(0) * M
    source = tl.make_block_ptr(x, (rows, columns), (columns, 1), (at, 0), (M, N), (1, 0))
    target = tl.make_block_ptr(out, (rows, columns), (columns, 1), (at, 0), (M, N), (1, 0))
    for _ in range(2):
        v = tl.load(source, boundary_check=(0, 1), padding_option="zero")
        tl.store(target, v * 2, boundary_check=(0, 1))
        source = tl.advance(source, (0, N))
        target = tl.advance(target, (0, N))


@triton.jit
def described_last(rows, columns, x, out, M: tl.constexpr, N: tl.constexpr):
    described(x, out, rows, columns, M, N)


# The outputs come after the numbers, and one more function passes the pointers on.
@triton.jit
def descriptors(x, rows, columns, out, M: tl.constexpr, N: tl.constexpr):
    described_last(rows, columns, x, out, M, N)


@triton.jit
def block_pointers(x, rows, columns, out, M: tl.constexpr, N: tl.constexpr):
    blocked(x, out, rows, columns, M, N)


def test_tensor_descriptors():
    x = normal(10, 12)
    actual = launch(descriptors, [x], shape(10, 12), scalars=x.shape, grid=(3,), M=4, N=16)
    np.testing.assert_array_equal(actual, 2 * x)


def test_tensor_descriptors_that_the_hardware_does_not_support_are_refused():
    x = normal(10, 11)
    with fails("descriptors", "multiples of 16 bytes"):
        launch(descriptors, [x], shape(10, 11), scalars=x.shape, grid=(3,), M=4, N=16)


@pytest.mark.skipif(TRITON >= (3, 9), reason="Triton 3.9 has no block pointers")
def test_block_pointers():
    x = normal(10, 12)
    np.testing.assert_array_equal(
        launch(block_pointers, [x], shape(10, 12), scalars=x.shape, grid=(3,), M=4, N=8), 2 * x
    )


# -- memory ------------------------------------------------------------------------------------------------------


@triton.jit
def careless(x, n, out, READ: tl.constexpr, WRITE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at + READ, mask=at < n, other=0)
    tl.store(out + at + WRITE, v, mask=at < n)


def careful(x, read=0, write=0, n=None, dtype="float32"):
    n = x.size if n is None else n
    return launch(
        careless, [x], shape(100, dtype=dtype), scalars=(n,), grid=(4,), READ=read, WRITE=write, BLOCK=32
    )  # fmt: skip


def test_loads_past_the_end():
    with fails("kernel 'careless'", r"program \(3, 0, 0\)", "loads element 100 of 'x', which has 100 elements"):
        careful(normal(100), read=1)
    with fails("loads element -5 of 'x'"):
        careful(normal(100), read=-5)


def test_stores_past_the_end():
    with fails("kernel 'careless'", r"program \(3, 0, 0\)", "stores element 100 of 'out', which has 100 elements"):
        careful(normal(100), write=2)
    with fails("stores element -1 of 'out'"):
        careful(normal(100), write=-1)


def test_the_line_is_named():
    with fails("test_interpreter.py:", r"v = tl.load\(x \+ at \+ READ"):
        careful(normal(100), read=1)


def test_masked_elements_are_not_accessed():
    np.testing.assert_array_equal(careful(normal(100), n=100)[:100], normal(100))


def test_elements_that_are_not_written_are_poison():
    assert np.isnan(careful(normal(100), n=90)[90:]).all()
    assert (np.asarray(careful(jnp.arange(100), n=90, dtype="int32"))[90:] == np.int32(-0x5A5A5A5B)).all()


@triton.jit
def undefined(x, n, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n))


def test_a_masked_lane_without_other_is_undefined():
    actual = np.asarray(launch(undefined, [jnp.ones(8)], shape(8), scalars=(5,), BLOCK=8))
    np.testing.assert_array_equal(actual[:5], 1)
    assert np.isnan(actual[5:]).all()


@triton.jit
def scribble(x, out):
    tl.store(x, 1.0)
    tl.store(out, 1.0)


def test_inputs_are_read_only():
    with fails("scribble", "stores into 'x', which is an input"):
        launch(scribble, [jnp.ones(4)], shape(1))


@triton.jit
def stray(x, out):
    tl.store(out, tl.load((x.to(tl.int64) * 0 + 64).to(tl.pointer_type(tl.float32))))


@triton.jit
def odd(x, out):
    bytes = x.to(tl.pointer_type(tl.int8)) + 2
    tl.store(out, tl.load(bytes.to(tl.pointer_type(tl.float32))))


def test_invalid_addresses():
    with fails("stray", "comes from no pointer argument"):
        launch(stray, [jnp.ones(4)], shape(1))
    with fails("odd", "at byte 2, which is not aligned"):
        launch(odd, [jnp.arange(4)], shape(1))


@triton.jit
def choose(x, y, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(tl.where(at % 2 == 0, x + at, y + at)))


def test_pointers_into_several_buffers():
    actual = launch(choose, [jnp.zeros(8), jnp.ones(8)], shape(8), BLOCK=8)
    np.testing.assert_array_equal(actual, [0, 1] * 4)
    with fails("loads element 5 of 'y', which has 4 elements"):
        launch(choose, [jnp.zeros(8), jnp.ones(4)], shape(8), BLOCK=8)


@triton.jit
def quarrel(x, out, KIND: tl.constexpr):
    p = tl.program_id(0)
    if KIND == "different":
        tl.store(out, p)
    elif KIND == "same":
        tl.store(out, 7)
    elif KIND == "lanes":
        tl.store(out + tl.arange(0, 4) * 0, tl.arange(0, 4))
    elif KIND == "uses":
        if p == 0:
            tl.store(out, 7)
        else:
            tl.store(out + p, tl.load(out))


def test_races():
    run = partial(launch, quarrel, [jnp.ones(1)], shape(4, dtype="int32"))
    with fails("quarrel", "stores another value into element 0 of 'out', which program", "has stored: a race"):
        run(grid=(4,), KIND="different")
    assert run(grid=(4,), KIND="same")[0] == 7
    with fails("quarrel", "stores two values at once into element 0 of 'out'"):
        run(KIND="lanes")
    for order, words in ("forward", "loads element 0"), ("reverse", "stores another value into element 0"):
        with interpreted(order=order), fails("quarrel", words, "a race"):
            run(grid=(4,), KIND="uses")


def test_races_can_be_allowed_and_orders_chosen():
    run = partial(launch, quarrel, [jnp.ones(1)], shape(1, dtype="int32"), grid=(4,), KIND="different")
    found = {}
    for order in "forward", "reverse", "shuffled":
        with interpreted(order=order, races=False):
            found[order] = int(run()[0])
    assert found["forward"] == 3
    assert found["reverse"] == 0
    with interpreted(order="shuffled", races=False):
        assert int(run()[0]) == found["shuffled"]
    seeds = set()
    for seed in range(8):
        with interpreted(seed=seed, races=False):
            seeds.add(int(run()[0]))
    assert len(seeds) > 1
    with pytest.raises(ValueError, match="order: takes"), interpreted(order="random"):  # type: ignore[arg-type]
        pass


@triton.jit
def doubtful(x, out, KIND: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    v = tl.load(x + at)
    if KIND == "assume":
        tl.assume(tl.sum(v, 0) > 1000)
    elif KIND == "device":
        tl.device_assert(v < 1, "too large")
    elif KIND == "static":
        tl.static_assert(BLOCK == 3, "three")
    elif KIND == "assert":
        assert BLOCK == 3, "three"
    elif KIND == "multiple":
        tl.multiple_of(tl.program_id(0) + 3, 4)
    elif KIND == "if":
        if v > 0:
            v += 1
    elif KIND == "shape":
        v = v + tl.arange(0, 2 * BLOCK)
    elif KIND == "name":
        v = v + nowhere  # noqa: F821
    elif KIND == "constant":
        _pair(v, v, 1)
    elif KIND == "length":
        v = tl.arange(0, 3)
    tl.store(out + at, v)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("assume", "has a false assumption"),
        ("device", "has a false assertion: too large"),
        ("static", "has a false assertion: three"),
        ("assert", "has a false assertion: three"),
        ("multiple", "says that 3 is a multiple of 4"),
        ("if", "takes a whole tensor .* for a condition"),
        ("shape", "does not go with"),
        ("name", "NameError: name 'nowhere'"),
        ("constant", "gives a tensor to 'SQUARE'"),
        ("length", "ValueError: arange's range must be a power of 2"),
    ],
)
def test_faults_reach_the_caller(kind, words):
    with fails("KernelError: kernel 'doubtful', program", words, "test_interpreter.py:"):
        launch(doubtful, [normal(8)], shape(8), KIND=kind, BLOCK=8)


@triton.jit
def leaves(x, out):
    for i in range(3):
        if i == 1:
            break
    tl.store(out, 1.0)


@triton.jit
def skips(x, out):
    for i in range(3):
        if i == 1:
            continue
    tl.store(out, 1.0)


def test_syntax_that_triton_does_not_compile_is_refused():
    with fails("kernel 'leaves'", "leaves a loop early, which Triton does not compile"):
        launch(leaves, [jnp.ones(1)], shape(1))
    with fails("kernel 'skips'", "skips the rest of a loop"):
        launch(skips, [jnp.ones(1)], shape(1))


# -- jax-triton's own interface ----------------------------------------------------------------------------------


def call(*arrays, kernel, out, **options):
    """``jax_triton.triton_call`` as its versions take it."""
    found = _jax_triton.load().triton_call(
        *arrays, kernel=kernel, **{"out_type" if NEW else "out_shape": out}, **options
    )
    jax.block_until_ready(found)
    return found[0] if isinstance(found, (list, tuple)) and len(found) == 1 else found


@triton.jit
def scale(x, n, factor, flag, out, BLOCK: tl.constexpr = 16):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, mask=at < n, other=0.0)
    if flag:
        v = v * factor
    tl.store(out + at, v, mask=at < n)


def test_scalars_and_a_callable_grid():
    x = normal(40)
    grid = lambda meta: (triton.cdiv(40, meta["BLOCK"]),)
    factor = 2.5 if NEW else np.float32(2.5)
    actual = call(x, 40, factor, True, kernel=scale, out=shape(40), grid=grid, BLOCK=16)
    np.testing.assert_allclose(actual, 2.5 * x, rtol=1e-6)
    np.testing.assert_array_equal(call(x, 40, factor, False, kernel=scale, out=shape(40), grid=grid, BLOCK=16), x)
    assert exact(call(x, 1, factor, True, kernel=scale, out=shape(40), grid=3, BLOCK=16))[0] == np.float32(2.5) * x[0]


@triton.jit
def counted(x, n, out):
    for _ in tl.static_range(n):
        tl.store(out, tl.load(x))


def test_a_number_that_is_one_is_a_constant():
    assert launch(counted, [jnp.ones(1)], shape(1), scalars=(1,))[0] == 1
    with fails("counted", "gives a tensor to 'tl.static_range', which is a tl.constexpr"):
        launch(counted, [jnp.ones(1)], shape(1), scalars=(2,))


@pytest.mark.skipif(not NEW, reason="jax-triton 0.3 has no keyword operands")
def test_keyword_operands_and_defaults_of_constants():
    x = normal(40)
    actual = call(x, 40, flag=True, factor=2.0, kernel=scale, out=shape(40), grid=3)
    np.testing.assert_array_equal(actual, 2 * x)


@triton.jit
def in_place_04(x, y, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(y + at) + tl.load(x + at))


@triton.jit
def in_place_03(x, y, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(y + at) + tl.load(x + at))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_output_aliases_an_input():
    x, y = normal(32), normal(32, key=1)
    kernel = in_place_04 if NEW else in_place_03
    aliased = jax.jit(
        lambda x, y: call(x, y, kernel=kernel, out=shape(32), grid=2, BLOCK=16, input_output_aliases={1: 0})
    )
    before = np.array(y)
    np.testing.assert_allclose(aliased(x, y), exact(x) + exact(y), rtol=1e-5)
    np.testing.assert_array_equal(y, before)


@pytest.mark.skipif(not NEW, reason="jax-triton 0.3 has a parameter for every output")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_output_that_aliases_an_input_is_the_last_one():
    """On a device, a parameter for a result would get the output before its own."""
    with pytest.raises(NotImplementedError, match="unless the outputs that alias inputs are its last ones"):
        call(normal(32), kernel=in_place_04, out=(shape(32), shape(32)), grid=1, BLOCK=32, input_output_aliases={0: 0})


@pytest.mark.skipif(not NEW, reason="jax-triton 0.3 takes no references")
def test_references():
    ref = jax.new_ref(normal(32))
    call(jnp.ones(32), ref, kernel=in_place_04, out=(), grid=2, BLOCK=16)
    np.testing.assert_allclose(ref[...], exact(normal(32)) + 1, rtol=1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_zeroed_outputs_and_atomics():
    x = normal(64)
    for zeroed in (0,), lambda meta: (0,):
        actual = call(x, kernel=sum_up, out=shape(4), grid=4, BLOCK=16, zeroed_outputs=zeroed)
        np.testing.assert_allclose(actual, exact(x).reshape(-1, 4).sum(0), rtol=1e-4, atol=1e-5)
    assert np.isnan(call(x, kernel=sum_up, out=shape(4), grid=4, BLOCK=16)).all()


@triton.heuristics({"BLOCK": lambda given: 8 if given["n"] < 20 else 32})
@triton.jit
def heuristic(x, n, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n, other=BLOCK), mask=at < 40)


@triton.autotune([triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})], key=["n"])
@triton.jit
def tuned(x, n, out, BLOCK: tl.constexpr):
    tl.store(out, tl.load(x) * BLOCK)


def test_heuristics_and_autotuners():
    assert exact(call(normal(40), 30, kernel=heuristic, out=shape(40), grid=1))[31] == 32
    assert exact(call(normal(40), 5, kernel=heuristic, out=shape(40), grid=1))[6] == 8
    run = partial(call, jnp.ones(1), 3, kernel=tuned, out=shape(1), grid=1)
    assert run()[0] == 16
    assert run(BLOCK=32)[0] == 32


@triton.jit
def by_descriptor(source, out, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    tl.store(out + m[:, None] * N + n[None, :], source.load([0, 0]))


@pytest.mark.skipif(not NEW, reason="jax-triton 0.3 has no descriptors made on the host")
def test_descriptors_made_on_the_host():
    x = normal(6, 8)
    descriptor = _jax_triton.load().TensorDescriptor.from_array(x, (8, 8))
    actual = call(descriptor, kernel=by_descriptor, out=shape(8, 8), grid=1, M=8, N=8)
    np.testing.assert_array_equal(actual, np.pad(x, ((0, 2), (0, 0))))


# -- JAX ---------------------------------------------------------------------------------------------------------


@jax.custom_vjp
def summed(x, y):
    return added(x, y)


summed.defvjp(lambda x, y: (added(x, y), None), lambda _, g: (added(g, g), added(g, -g)))


def test_jit_and_gradients():
    x, y = normal(100), normal(100, key=1)
    np.testing.assert_array_equal(jax.jit(summed)(x, y), x + y)
    gradients = jax.jit(jax.grad(lambda x, y: (summed(x, y) ** 2).sum(), (0, 1)))(x, y)
    np.testing.assert_allclose(gradients[0], 4 * (x + y), rtol=1e-6)
    np.testing.assert_allclose(gradients[1], 0)
    again = jax.grad(jax.checkpoint(lambda x: summed(summed(x, y), y).sum()))(x)
    np.testing.assert_array_equal(again, 4)


def test_loops_of_jax():
    x = normal(3, 100)
    np.testing.assert_array_equal(jax.lax.map(lambda row: added(row, row), x), 2 * x)
    mapped = jax.vmap(jax.custom_batching.sequential_vmap(lambda row: added(row, row)))
    np.testing.assert_array_equal(jax.jit(mapped)(x), 2 * x)
    last, _ = jax.jit(lambda x: jax.lax.scan(lambda c, _: (added(c, x), None), x, length=4))(x[0])
    np.testing.assert_allclose(last, 5 * x[0], rtol=1e-6)


def test_shard_map():
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip("one device")
    mesh = jax.make_mesh((2,), ("d",), devices=devices[:2], axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    sharded = jax.jit(jax.shard_map(added, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False))
    x = normal(128)
    np.testing.assert_array_equal(sharded(x, x), 2 * x)


def test_arrays_on_another_device():
    x = jax.device_put(normal(64), jax.devices()[-1])
    np.testing.assert_array_equal(jax.jit(added)(x, x), 2 * x)


def test_threads():
    x, found = normal(256), []

    def work():
        run = jax.jit(lambda x: added(x, x, block=32))
        for _ in range(5):
            found.append(np.array_equal(run(x), 2 * x))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 20


def test_empty_arrays_and_large_ones():
    assert added(jnp.zeros(0), jnp.zeros(0)).shape == (0,)
    x = normal(1 << 20)
    np.testing.assert_array_equal(jax.jit(lambda x: added(x, x, block=1 << 16))(x), 2 * x)


# -- as if there were a GPU --------------------------------------------------------------------------------------


def _doubling(seen):
    """A kernel module for GPUs: what it takes depends on the card."""

    @core.hookimpl
    def heuristic_cfg(inv):
        seen.append((inv.platform, inv.device_kind, inv.compute_capability))
        if inv.compute_capability is None or inv.compute_capability < (8, 0):
            raise core.Unsupported("too old")
        return 32

    @core.hookimpl
    def run_backend(cfg, inv):
        seen.append((inv.platform, cfg))
        return added(inv["x"], inv["x"], block=cfg)

    return SimpleNamespace(heuristic_cfg=heuristic_cfg, run_backend=run_backend, PLATFORMS={"gpu": 50})


@core.hookimpl
def heuristic_cfg(inv):
    return None


@core.hookimpl
def run_backend(inv, cfg):
    return inv["x"] + inv["x"]


def _registry(seen, **card):
    registry = interpreted_registry({"double.triton": _doubling(seen)}, plugins="", **card)
    registry.register(core.Operation(name="double", signature=lambda x: None, outputs=lambda given: (given["x"],)))
    registry.register(SimpleNamespace(heuristic_cfg=heuristic_cfg, run_backend=run_backend), "double.reference")
    return registry


def test_a_registry_runs_kernels_for_a_gpu():
    seen, x = [], normal(100)
    registry = _registry(seen)
    assert registry.plan("double", x).choice.backend == "triton"
    np.testing.assert_array_equal(jax.jit(partial(registry.call, "double"))(x), 2 * x)
    assert set(seen) == {("gpu", "NVIDIA H200", (9, 0)), ("gpu", 32)}
    np.testing.assert_array_equal(jax.grad(lambda x: registry.call("double", x).sum())(x), 2)


def test_another_card():
    seen = []
    registry = _registry(seen, device_kind="Tesla V100", compute_capability=(7, 0))
    assert "too old" in str(registry.explain("double", normal(4), backend="triton"))
    assert registry.plan("double", normal(4)).choice.backend == "reference"
    assert set(seen) == {("gpu", "Tesla V100", (7, 0))}


# -- what is left alone ------------------------------------------------------------------------------------------


def _compiled():
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {"x": "*fp32", "y": "*fp32", "n": "i32", "out": "*fp32", "BLOCK": "constexpr"}
    source = ASTSource(add, signature=signature, constexprs={"BLOCK": 64})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttir"]


def test_the_same_process_compiles_for_a_gpu():
    names = dict(vars(tl))
    members = dict(vars(tl.tensor))
    own = set(globals())
    before = _compiled()
    added(normal(64), normal(64))
    with fails("loads element"):
        careful(normal(100), read=1)
    assert _compiled() == before
    assert dict(vars(tl)) == names
    assert dict(vars(tl.tensor)) == members
    assert set(globals()) == own
    assert "TRITON_INTERPRET" not in os.environ
    lowered = jax.jit(added).trace(shape(64), shape(64)).lower(lowering_platforms=("cuda",))
    assert "triton_kernel_call" in lowered.as_text()


def test_nothing_has_changed_after_the_block():
    code = """
import sys
import jax, jax.numpy as jnp
sys.path.insert(0, {tests!r})
import test_interpreter as t
from ejkernel_triton.interpreter import interpreted
x = jnp.ones(64)
for _ in range(2):
    try:
        jax.jit(lambda x: t.added(x, x))(x)
    except NotImplementedError as refusal:
        print("refused")
    with interpreted(), interpreted(order="reverse"):
        print(jax.jit(lambda x: t.added(x, x))(x)[0])
assert "torch" not in sys.modules
"""
    code = code.format(tests=os.path.dirname(__file__))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["refused", "2.0"] * 2, done.stderr


@triton.jit
def attend(q, k, v, n, out, SCALE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    queries, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, DIM)
    base = tl.program_id(1).to(tl.int64) * n * DIM
    query = tl.load(q + base + queries[:, None] * DIM + d[None, :], mask=(queries < n)[:, None], other=0.0)
    top, total = tl.full([BLOCK], -1e30, tl.float32), tl.zeros([BLOCK], tl.float32)
    sums = tl.zeros([BLOCK, DIM], tl.float32)
    for j in tl.range(0, tl.cdiv(n, BLOCK), num_stages=2):
        keys = j * BLOCK + tl.arange(0, BLOCK)
        place, real = base + keys[:, None] * DIM + d[None, :], (keys < n)[:, None]
        logits = tl.dot(query, tl.load(k + place, mask=real, other=0.0).T, input_precision="ieee") * SCALE
        logits = tl.where((keys < n)[None, :], logits, -float("inf"))
        new = tl.maximum(top, tl.max(logits, 1))
        weights = tl.exp2(logits - new[:, None])
        shrink = tl.exp2(top - new)
        total = total * shrink + tl.sum(weights, 1)
        value = tl.load(v + place, mask=real, other=0.0)
        sums = tl.dot(weights.to(value.dtype), value, sums * shrink[:, None], input_precision="ieee")
        top = new
    result = (sums / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + base + queries[:, None] * DIM + d[None, :], result, mask=(queries < n)[:, None])


@pytest.mark.parametrize(("dtype", "length"), [("float32", 256), ("bfloat16", 200), ("float16", 130)])
def test_attention(dtype, length):
    q, k, v = (normal(2, length, 64, dtype=dtype, key=key) for key in range(3))
    run = jax.jit(
        lambda *arrays: launch(
            attend,
            arrays,
            shape(2, length, 64, dtype=dtype),
            scalars=(length,),
            grid=(-(-length // 64), 2),
            SCALE=64**-0.5 * math.log2(math.e),
            DIM=64,
            BLOCK=64,
        )
    )
    actual = exact(run(q, k, v))
    logits = exact(q) @ exact(k).swapaxes(1, 2) / 8
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    expected = weights @ exact(v) / weights.sum(-1, keepdims=True)
    rounding = {"float32": 1e-6, "bfloat16": 3e-3, "float16": 4e-4}[dtype]
    assert np.linalg.norm(actual - expected) < rounding * np.linalg.norm(expected)
