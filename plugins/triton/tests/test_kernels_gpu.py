"""The kernels on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_core import Example, call, invocation
from ejkernel_testing import KernelProofs, kernel_proofs
from ejkernel_triton import flash_attention_sm90 as flash_attention
from ejkernel_triton.flash_attention_sm90 import _schedule
from ejkernel_triton.flash_attention_sm90 import backward as flash_attention_bwd
from plugins.triton.tests.hopper_examples import attention_examples, grouped_examples

pytestmark = pytest.mark.gpu


PORTABLE = kernel_proofs(
    "ejkernel-triton", platform="gpu", refuses=frozenset({"float64"}), roundings=1.5, elsewhere={"gluon_sm90"}
)
globals().update(PORTABLE)


class TestGluon(KernelProofs):
    kernel = "flash_attention.gluon_sm90"
    platform = "gpu"
    refuses = frozenset({"float32", "float64", "bias", "attention_mask", "dropout", "other value_dim"})
    roundings = 1.5


class TestGluonOnAllItTakes(TestGluon):
    """The examples without the features that the kernel refuses."""

    dtypes = ("bfloat16", "float16")

    def examples(self) -> Sequence[Example]:
        return tuple(attention_examples(super().examples(), self.dtypes))


@pytest.fixture(scope="class")
def two_programs() -> Iterator[None]:
    """Two programs for all tiles of a call, instead of one for each tile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_schedule, "programs", lambda device_kind: 2)
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
