"""The kernels on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_core import Example, call, invocation
from ejkernel_ops.flash_attention.few_queries import few_queries
from ejkernel_testing import KernelProofs, kernel_proofs
from ejkernel_triton import flash_attention_decode_sm90 as decode
from ejkernel_triton import flash_attention_sm90 as flash_attention
from ejkernel_triton.flash_attention_decode._refusals import MOST_QUERIES
from ejkernel_triton.flash_attention_sm90 import backward as flash_attention_bwd
from plugins.triton.tests.hopper_examples import (
    attention_examples,
    few_queries_on_hopper,
    grouped_examples,
    loss_examples,
)

pytestmark = pytest.mark.gpu


PORTABLE = kernel_proofs(
    "ejkernel-triton",
    platform="gpu",
    refuses=frozenset({"float64"}),
    roundings=1.5,
    elsewhere={"gluon_sm90", "gluon_decode_sm90", "triton_decode"},
)
globals().update(PORTABLE)


class TestDecode(KernelProofs):
    kernel = "flash_attention.triton_decode"
    platform = "gpu"
    roundings = 1.5

    def examples(self) -> Sequence[Example]:
        return tuple(few_queries(super().examples(), MOST_QUERIES))


class TestGluonDecode(TestDecode):
    kernel = "flash_attention.gluon_decode_sm90"

    def examples(self) -> Sequence[Example]:
        return tuple(few_queries_on_hopper(KernelProofs.examples(self), ("bfloat16", "float16")))


class TestGluon(KernelProofs):
    kernel = "flash_attention.gluon_sm90"
    platform = "gpu"
    refuses = frozenset(
        {
            "float32",
            "float64",
            "bias",
            "attention_mask",
            "dropout",
            "other value_dim",
            "negative scale",
            "head_dim=2",
        }
    )
    unproved = frozenset(
        {"sharded_derivatives"}
    )  # their examples have heads of two, and the kernel takes multiples of 8
    roundings = 1.5


class TestGluonOnAllItTakes(TestGluon):
    """The examples without the features that the kernel refuses."""

    dtypes = ("bfloat16", "float16")
    unproved = frozenset[str]()

    def examples(self) -> Sequence[Example]:
        return tuple(attention_examples(super().examples(), self.dtypes))


@pytest.fixture(scope="class")
def two_programs() -> Iterator[None]:
    """Two programs for all tiles of a call, instead of one for each tile."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (flash_attention, flash_attention_bwd):
            patch.setattr(module, "multiprocessors", lambda inv: 2)
        jax.clear_caches()
        yield
    jax.clear_caches()


@pytest.mark.usefixtures("two_programs")
class TestGluonWithTwoPrograms(TestGluonOnAllItTakes):
    """The examples are so small that every program has one tile. Here programs have several, and the dtypes are swapped."""

    dtypes = ("float16", "bfloat16")


class TestGroupedMatmulGluon(KernelProofs):
    kernel = "grouped_matmul.gluon_sm90"
    backward = "grouped_matmul_bwd.gluon_sm90"
    #: The cotangent of a product is rounded before it is multiplied, and in a second derivative once more.
    roundings = 3.0
    platform = "gpu"

    def examples(self) -> Sequence[Example]:
        return tuple(grouped_examples(super().examples()))


class TestGroupedMatmulDRhsGluon(TestGroupedMatmulGluon):
    kernel = "grouped_matmul_d_rhs.gluon_sm90"
    backward = None


class TestLossGluon(KernelProofs):
    kernel = "fused_linear_cross_entropy.gluon_sm90"
    backward: str | None = "fused_linear_cross_entropy_bwd.gluon_sm90"
    platform = "gpu"

    def examples(self) -> Sequence[Example]:
        return tuple(loss_examples(super().examples()))


class TestSumOfLossesGluon(TestLossGluon):
    kernel = "fused_linear_cross_entropy_sum.gluon_sm90"
    backward = None
    #: The gradient of the logits is rounded, and in a second derivative once more.
    roundings = 2.0


class TestLogProbsGluon(TestLossGluon):
    """The gradients are those of other kernels."""

    kernel = "linear_log_probs.gluon_sm90"
    backward = None


#: Rows, groups, k, n, and how many launches there are of each direction.
ROWS, GROUPS, K, N, LAUNCHES = 1000, 24, 192, 328, 10_000


def small_integers(number: int, *shape: int) -> jax.Array:
    """So small that their products and sums are exact: whatever the order of the sums, the results are the same."""
    with jax.ensure_compile_time_eval():
        return jax.random.randint(jax.random.key(number), shape, -2, 3).astype("bfloat16")


def random_sizes(key: jax.Array, number: jax.Array) -> jax.Array:
    """In turn: of any kind with rows of no group, 1 to 15, half of all rows in one group, and all rows in one."""
    cuts = jax.random.randint(key, (GROUPS,), 0, ROWS + 1)
    anything = jnp.diff(jnp.sort(cuts), prepend=0)
    few = 1 + cuts % 15
    is_one = jnp.arange(GROUPS) == number // 4 % GROUPS
    half = jnp.where(is_one, ROWS // 2, ROWS // 2 // GROUPS)
    return jnp.stack([anything, few, half, jnp.where(is_one, ROWS, 0)])[number % 4].astype(jnp.int32)


Result = Callable[[str, jax.Array, jax.Array], jax.Array]


def forward(backend: str, sizes: jax.Array, key: jax.Array) -> jax.Array:
    offset = jax.random.randint(key, (1,), 0, 4)
    arrays = small_integers(0, ROWS, K), small_integers(1, GROUPS - 3, K, N)
    result: jax.Array = call("grouped_matmul", *arrays, sizes, group_offset=offset, backend=backend)
    return result


def transposed(backend: str, sizes: jax.Array, key: jax.Array) -> jax.Array:
    """As the gradient of ``lhs`` is computed."""
    arrays = small_integers(2, ROWS, N), small_integers(1, GROUPS, K, N)
    result: jax.Array = call("grouped_matmul", *arrays, sizes, transpose_rhs=True, backend=backend)
    return result


def contracted(backend: str, sizes: jax.Array, key: jax.Array) -> jax.Array:
    boundaries = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(sizes)])
    arrays = small_integers(0, ROWS, K), small_integers(2, ROWS, N)
    result: jax.Array = call("grouped_matmul_d_rhs", *arrays, boundaries, backend=backend)
    return result


def tokens_in_place(backend: str, sizes: jax.Array, key: jax.Array) -> jax.Array:
    """``triton`` reads them in place; the Gluon kernel takes the rows."""
    x, rhs, order = small_integers(0, ROWS // 4, K), small_integers(1, GROUPS, K, N), jax.random.permutation(key, ROWS)
    result: jax.Array = (
        call("moe_permute_matmul", x, order, rhs, sizes, 4, backend=backend)
        if backend == "triton"
        else call("grouped_matmul", x[order // 4], rhs, sizes, backend=backend)
    )
    return result


@pytest.mark.parametrize("result", [forward, transposed, contracted, tokens_in_place])
def test_no_launch_of_many_differs(result: Result) -> None:
    """Each kernel twice has the same bits, and both kernels have the same values."""

    def count(number: jax.Array, counts: jax.Array) -> jax.Array:
        size_key, key = jax.random.split(jax.random.fold_in(jax.random.key(4), number))
        sizes = random_sizes(size_key, number)
        first, again = (result("gluon_sm90", sizes + zero, key) for zero in (0, counts[0] // LAUNCHES))
        portable, portable_again = (result("triton", sizes + zero, key) for zero in (0, counts[0] // LAUNCHES))
        pairs = ((first, again), (portable, portable_again), (first, portable))
        return counts + jnp.array([1, *((a != b).any().astype(int) for a, b in pairs)])

    counts = jax.jit(lambda: jax.lax.fori_loop(0, LAUNCHES, count, jnp.zeros(4, int)))()
    assert counts.tolist() == [LAUNCHES, 0, 0, 0]


@pytest.mark.parametrize("options", [{"causal": True}, {"causal": True, "sliding_window": (70, 0)}, {}], ids=str)
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_every_configuration_has_the_same_results(dim: int, options: dict[str, Any]) -> None:
    query, key, value, d_out = drawn(dim)
    right, pull_back = jax.vjp(
        lambda *qkv: call("flash_attention", *qkv, **options, backend="reference"), *wide(query, key, value)
    )
    inv = invocation("flash_attention", query, key, value, **options)
    for cfg in flash_attention.config_space(inv):
        out = call("flash_attention", query, key, value, **options, backend="gluon_sm90", cfg=cfg)
        close(out, right)
    gradients = dict(zip(("query", "key", "value"), pull_back(*wide(d_out)), strict=True))
    out, lse = call("flash_attention", query, key, value, **options, return_lse=True)
    given = {"query": query, "key": key, "value": value, "out": out, "lse": lse, "d_out": d_out, **options}
    for cfg, wrt in _backward_passes(given):
        found = call("flash_attention_bwd", **given, wrt=wrt, backend="gluon_sm90", cfg=cfg)
        for name, gradient in zip(wrt, found, strict=True):
            close(gradient, gradients[name])


@pytest.mark.parametrize("queries", [1, 4, 16])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_every_configuration_of_decoding_has_the_same_results(dim: int, queries: int) -> None:
    """Programs have several parts each, of which some have no keys."""
    shapes = (40, queries, 32, dim), (40, 1500, 8, dim), (40, 1500, 8, dim)
    keys = jax.random.split(jax.random.key(dim), 3)
    arrays = [jax.random.normal(key, shape, "bfloat16") for key, shape in zip(keys, shapes, strict=True)]
    lengths = jnp.resize(jnp.array([0, 1, 64, 700, 1500], jnp.int32), 40)
    options = {"kv_lengths": lengths, "causal": True, "return_lse": True}
    right, right_lse = call("flash_attention", *wide(*arrays), **options, backend="xla")
    for cfg in decode.config_space(invocation("flash_attention", *arrays, kv_lengths=lengths, causal=True)):
        out, lse = call("flash_attention", *arrays, **options, backend="gluon_decode_sm90", cfg=cfg)
        close(out, right)
        np.testing.assert_allclose(lse, right_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("sinks", [None, 0.0, -150.0, -1e30], ids="sinks {}".format)
@pytest.mark.parametrize("size", [1.0, 8.0], ids="logits {}".format)
@pytest.mark.parametrize(
    ("cap", "dtype"), [(50.0, "bfloat16"), (5.0, "bfloat16"), (50.0, "float16"), (400.0, "bfloat16")]
)
def test_logits_bounded_by_a_soft_cap(cap: float, dtype: str, size: float, sinks: float | None) -> None:
    """Logits of both signs at the cap, and rows that see nothing, or only sinks."""
    keys = jax.random.split(jax.random.key(3), 5)
    shapes = {"query": (2, 200, 2, 64), "key": (2, 330, 2, 64), "value": (2, 330, 2, 64), "d_out": (2, 200, 2, 64)}
    given = {
        name: jax.random.normal(key, shape, dtype) for key, (name, shape) in zip(keys, shapes.items(), strict=False)
    }
    d_out, d_lse = given.pop("d_out"), jax.random.normal(keys[4], (2, 2, 200))
    given["query"] = given["query"] * size
    # Rows of id 0 are between others.
    ids = {"q_segment_ids": jnp.arange(200) % 3, "kv_segment_ids": 1 + jnp.arange(330) % 3}
    options = {**{name: jnp.tile(x.astype(jnp.int32), (2, 1)) for name, x in ids.items()}, "logits_soft_cap": cap}
    if sinks is not None:
        options["softmax_aux"] = jnp.full((2,), sinks, jnp.float32)

    def attention(backend: str, *qkv: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, lse = call("flash_attention", *qkv, **options, return_lse=True, backend=backend)
        return out, lse

    arrays = tuple(given.values())
    right, pull_back = jax.vjp(lambda *qkv: attention("reference", *qkv), *wide(*arrays))
    found, pull_ours = jax.vjp(lambda *qkv: attention("gluon_sm90", *qkv), *arrays)
    close(found[0], right[0])
    np.testing.assert_allclose(found[1], right[1], rtol=4e-3, atol=4e-3)
    unseen = jnp.isneginf(right[1])
    np.testing.assert_array_equal(jnp.isneginf(found[1]), unseen)
    d_lse = jnp.where(unseen, 0, d_lse)
    for ours, gradient in zip(pull_ours((d_out, d_lse)), pull_back((wide(d_out)[0], d_lse)), strict=True):
        close(ours, gradient)


@pytest.mark.usefixtures("two_programs")
@pytest.mark.parametrize("group", [1, 2], ids="group {}".format)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "sliding_window": (70, 0)},
        {"q_segment_ids": None, "kv_segment_ids": None},
        {"causal": True, "cum_seqlens_q": (0, 70, 70, 299, 333), "cum_seqlens_k": (0, 100, 250, 401, 401)},
    ],
    ids=["full", "window", "segments", "packed"],
)
def test_a_soft_cap_with_early_logits(group: int, options: dict[str, Any]) -> None:
    """Several tiles, some of which no query sees: the last step of a tile has no next step."""
    arrays = [x[:, :, : 2 * group] for x in drawn(128)]
    options = {**options, "logits_soft_cap": 20.0}
    if "cum_seqlens_q" in options:
        arrays = [x[0] for x in arrays]
        options |= {name: jnp.array(options[name], jnp.int32) for name in ("cum_seqlens_q", "cum_seqlens_k")}
    elif "q_segment_ids" in options:
        options["q_segment_ids"] = jnp.tile(1 + jnp.arange(333, dtype=jnp.int32) // 200, (2, 1))
        # No query sees the keys from 128 to 300.
        options["kv_segment_ids"] = jnp.tile(jnp.repeat(jnp.array([1, 7, 2]), jnp.array([128, 172, 101])), (2, 1))
    *qkv, d_out = arrays
    _, pull_back = jax.vjp(lambda *a: call("flash_attention", *a, **options, backend="reference"), *wide(*qkv))
    _, pull_ours = jax.vjp(lambda *a: call("flash_attention", *a, **options, backend="gluon_sm90"), *qkv)
    for ours, gradient in zip(pull_ours(d_out), pull_back(*wide(d_out)), strict=True):
        close(ours, gradient)


def _backward_passes(given: dict[str, Any]) -> Iterator[tuple[Any, tuple[str, ...]]]:
    everything = ("query", "key", "value")
    for cfg in flash_attention_bwd.config_space(invocation("flash_attention_bwd", **given, wrt=everything)):
        for wrt in (everything, ("query",), ("value", "key"), ("key", "query")):
            yield cfg, wrt


def drawn(dim: int) -> list[jax.Array]:
    """Query, key, value and a gradient of the output, with grouped heads and lengths that no block divides."""
    shapes = (2, 333, 4, dim), (2, 401, 2, dim), (2, 401, 2, dim), (2, 333, 4, dim)
    keys = jax.random.split(jax.random.key(dim), 4)
    return [jax.random.normal(key, shape, "bfloat16") for key, shape in zip(keys, shapes, strict=True)]


def wide(*arrays: jax.Array) -> list[jax.Array]:
    return [array.astype("float32") for array in arrays]


def close(found: jax.Array, right: jax.Array) -> None:
    np.testing.assert_allclose(*wide(found, right), rtol=0, atol=0.02 * float(abs(right).max()))


# -- parts of arrays ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_norm_of_parts_of_one_array(first: int, dtype: str) -> None:
    """XLA passes them to the launch as they are, and they begin anywhere."""
    parameters = jax.random.normal(jax.random.key(first), (first + 40 * 64 + 64,), dtype)

    def loss(parameters: jax.Array, backend: str) -> jax.Array:
        weight, x = parameters[first : first + 64], parameters[first + 64 :].reshape(40, 64)
        return (call("rms_norm", x, weight, backend=backend).astype(jnp.float32) ** 3).sum()

    ours, plain = (jax.jit(jax.value_and_grad(loss), static_argnums=1)(parameters, name) for name in ("triton", "xla"))
    for own, right in zip(ours, plain, strict=True):
        np.testing.assert_allclose(own.astype(jnp.float32), right.astype(jnp.float32), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("backend", ["triton", "gluon_sm90"])
def test_attention_of_parts_of_one_array(backend: str) -> None:
    size = 2 * 256 * 4 * 64
    parameters = jax.random.normal(jax.random.key(7), (3 * size + 3,), "bfloat16")

    def attention(parameters: jax.Array, backend: str) -> jax.Array:
        parts = (parameters[3 + size * place :][:size].reshape(2, 256, 4, 64) for place in range(3))
        return call("flash_attention", *parts, backend=backend).astype(jnp.float32)

    own, right = (jax.jit(attention, static_argnums=1)(parameters, name) for name in (backend, "xla"))
    np.testing.assert_allclose(own, right, atol=1e-2)
