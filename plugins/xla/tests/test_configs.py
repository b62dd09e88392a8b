"""What the XLA kernels may be configured with: every block size is right, and cuDNN is refused where it is not exact."""

from __future__ import annotations

from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_core
from ejkernel_core import NoKernel, registry
from ejkernel_xla import _cudnn, flash_attention, flash_attention_bwd
from ejkernel_xla._blocks import blocks, nearby

CASES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "sliding_window": (9, 0)},
    "two sides": {"sliding_window": (5, 11)},
    "all": {"causal": True, "logits_soft_cap": 4.0, "bias": True, "softmax_aux": True, "attention_mask": True},
    "segments": {"segments": True, "sliding_window": 20},
    "dropout": {"dropout_prob": 0.3, "dropout_seed": 7, "bias": True},
}


def arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Many small blocks of either side, of which none is a whole number."""
    rng = np.random.default_rng(1)

    def normal(*shape: int) -> Any:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    given = {k: v for k, v in options.items() if k not in ("bias", "softmax_aux", "attention_mask", "segments")}
    given |= {"query": normal(2, 61, 4, 16), "key": normal(2, 75, 2, 16), "value": normal(2, 75, 2, 8)}
    if "bias" in options:
        given["bias"] = normal(1, 4, 61, 75)
    if "softmax_aux" in options:
        given["softmax_aux"] = normal(4, 2)
    if "attention_mask" in options:
        given["attention_mask"] = jnp.asarray(rng.random((2, 1, 61, 75)) < 0.7)
    if "segments" in options:
        ids = np.sort(rng.integers(0, 4, (2, 75)), 1).astype(np.int32)
        given |= {"q_segment_ids": ids[:, :61], "kv_segment_ids": ids}
    return given


@pytest.mark.parametrize(
    "blocks",
    [(32, 24), *(pytest.param(blocks, marks=pytest.mark.long) for blocks in ((16, 16), (8, 32), (61, 75)))],
)
@pytest.mark.parametrize("name", CASES)
def test_every_block_size_gives_the_same(name: str, blocks: tuple[int, int]) -> None:
    given = arguments(CASES[name])
    cfg = flash_attention.Config("blockwise", *blocks)
    cfg_bwd = flash_attention_bwd.Config("blockwise", *blocks)
    wanted = ejkernel_core.call("flash_attention", **given, return_lse=True, backend="reference")
    found = ejkernel_core.call("flash_attention", **given, return_lse=True, cfg=cfg)
    rng = np.random.default_rng(2)
    d_out, d_lse = (jnp.asarray(rng.normal(size=result.shape), jnp.float32) for result in wanted)
    wrt = tuple(n for n in ("query", "key", "value", "bias", "softmax_aux") if n in given)
    saved = {"out": wanted[0], "lse": wanted[1], "d_out": d_out, "d_lse": d_lse, "wrt": wrt}
    wanted += ejkernel_core.call("flash_attention_bwd", **given, **saved, backend="reference")
    found += ejkernel_core.call("flash_attention_bwd", **given, **saved, cfg=cfg_bwd)
    for got, right in zip(found, wanted, strict=True):
        finite = np.isfinite(right)
        np.testing.assert_array_equal(np.isfinite(got), finite)
        error = np.linalg.norm((got - right)[finite]) / np.linalg.norm(np.asarray(right)[finite])
        assert error < 2e-5


def invocation(dtype: Any = jnp.bfloat16, op: str = "flash_attention", **given: Any) -> Any:
    arrays = {name: jax.ShapeDtypeStruct((2, 64, 4, 16), dtype) for name in ("query", "key", "value")}
    return registry.plan(op, **{**arrays, **given}).invocation


INT = jnp.int32
REFUSED = {
    "a bias": {"bias": jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)},
    "an attention mask": {"attention_mask": jax.ShapeDtypeStruct((64, 64), jnp.bool_)},
    "segment ids": {name: jax.ShapeDtypeStruct((2, 64), INT) for name in ("q_segment_ids", "kv_segment_ids")},
    "sink logits": {"softmax_aux": jax.ShapeDtypeStruct((4,), jnp.bfloat16)},
    "a soft cap": {"logits_soft_cap": 3.0},
    "dropout": {"dropout_prob": 0.5, "dropout_seed": jax.ShapeDtypeStruct((), INT)},
    "not float32": {"dtype": jnp.float32},
    "no right side": {"sliding_window": (8, 8)},
    "one head dim": {"value": jax.ShapeDtypeStruct((2, 64, 4, 8), jnp.bfloat16)},
    "multiples of 8": {n: jax.ShapeDtypeStruct((2, 64, 4, 12), jnp.bfloat16) for n in ("query", "key", "value")},
    "aligned differently": {
        "causal": True,
        **{name: jax.ShapeDtypeStruct((2, 99, 4, 16), jnp.bfloat16) for name in ("key", "value")},
    },
    "a positive softmax_scale": {"softmax_scale": -1.0},
    "packed sequences": {
        **{name: jax.ShapeDtypeStruct((64, 4, 16), jnp.bfloat16) for name in ("query", "key", "value")},
        **{name: jax.ShapeDtypeStruct((3,), INT) for name in ("cum_seqlens_q", "cum_seqlens_k")},
    },
}


@pytest.mark.parametrize("reason", REFUSED)
def test_cudnn_refuses_what_it_would_not_do_exactly(reason: str) -> None:
    assert reason in str(_cudnn.refusal(invocation(**REFUSED[reason])))


@pytest.mark.parametrize("given", [{}, {"causal": True}, {"causal": True, "sliding_window": (8, 0)}])
def test_cudnn_lacks_nothing_but_the_gpu_elsewhere(given: dict[str, Any]) -> None:
    if jax.default_backend() != "gpu":
        assert "GPU" in str(_cudnn.refusal(invocation(**given)))


def test_cudnns_backward_takes_no_gradient_of_the_log_sum_exp() -> None:
    bfloat16, lse = jax.ShapeDtypeStruct((2, 64, 4, 16), jnp.bfloat16), jax.ShapeDtypeStruct((2, 4, 64), jnp.float32)
    saved = {"out": bfloat16, "lse": lse, "d_out": bfloat16, "d_lse": lse, "wrt": ("query",)}
    assert "no gradient of the log-sum-exp" in str(_cudnn.refusal(invocation(op="flash_attention_bwd", **saved)))


def test_an_explicit_cudnn_is_refused_with_the_way_out() -> None:
    if jax.default_backend() != "gpu":
        given = arguments({})
        with pytest.raises(NoKernel, match="cuDNN attention needs a GPU, not a cpu; Config.. without"):
            ejkernel_core.call("flash_attention", **given, cfg=flash_attention.Config("cudnn"))


@pytest.mark.parametrize("module", [flash_attention, flash_attention_bwd])
def test_the_space_has_the_heuristic_and_its_neighbours(module: Any) -> None:
    inv = invocation(
        **{name: jax.ShapeDtypeStruct((1, 4096, 8, 64), jnp.float32) for name in ("query", "key", "value")}
    )
    space = list(module.config_space(inv))
    assert module.heuristic_cfg(inv) in space
    assert len(space) == len(set(space)) > 4
    for bad in ({"q_block": 0}, {"kv_block": 2.5}, {"implementation": "fast"}):
        with pytest.raises((ValueError, TypeError)):
            module.Config(**bad)


@pytest.mark.parametrize("module", [flash_attention, flash_attention_bwd])
def test_beside_an_exact_cudnn_few_blocks_are_offered_for_long_calls(module: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(_cudnn, "refusal", lambda arguments: None)

    def space(length: int) -> list[str]:
        arrays = {n: jax.ShapeDtypeStruct((1, length, 8, 64), jnp.bfloat16) for n in ("query", "key", "value")}
        inv = attrs.evolve(invocation(**arrays), platform="gpu")
        assert module.heuristic_cfg(inv) == module.Config("cudnn")
        return [cfg.implementation for cfg in module.config_space(inv)]

    assert space(4096) == ["cudnn", "blockwise"]
    assert space(4095)[:3] == ["cudnn", "blockwise", "blockwise"]


def test_blocks_follow_the_window_and_the_heads() -> None:
    def of(heads: int, **given: Any) -> tuple[int, int]:
        arrays = {name: jax.ShapeDtypeStruct((1, 4096, heads, 64), jnp.float32) for name in ("query", "key", "value")}
        return blocks(invocation(**arrays, **given), "cpu", (512, 256))

    assert of(1) == (512, 256)
    assert of(64) == (128, 256)
    assert of(1, sliding_window=(255, 0), causal=True) == (128, 128)
    short = invocation(**{n: jax.ShapeDtypeStruct((1, 20, 1, 64), jnp.float32) for n in ("query", "key", "value")})
    assert list(nearby(short, "cpu", (512, 256))) == [(512, 256)]
    long = invocation(**{n: jax.ShapeDtypeStruct((1, 8192, 1, 64), jnp.float32) for n in ("query", "key", "value")})
    assert list(nearby(long, "gpu", (1024, 1024))) == [(1024, 1024), (2048, 2048), (512, 512)]
    assert len(set(nearby(long, "cpu", (1024, 1024)))) == 9
