"""Configurations of the XLA kernels: results are right with all block sizes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_core
from ejkernel_core import registry
from ejkernel_xla import flash_attention
from ejkernel_xla.flash_attention import backward
from ejkernel_xla.flash_attention.blocks import block_sizes, neighbours

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
    """A call whose lengths are several small blocks, and not multiples of them."""
    rng = np.random.default_rng(1)

    def normal(*shape: int) -> Any:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    call = {k: v for k, v in options.items() if k not in ("bias", "softmax_aux", "attention_mask", "segments")}
    call |= {"query": normal(2, 61, 4, 16), "key": normal(2, 75, 2, 16), "value": normal(2, 75, 2, 8)}
    if "bias" in options:
        call["bias"] = normal(1, 4, 61, 75)
    if "softmax_aux" in options:
        call["softmax_aux"] = normal(4, 2)
    if "attention_mask" in options:
        call["attention_mask"] = jnp.asarray(rng.random((2, 1, 61, 75)) < 0.7)
    if "segments" in options:
        ids = np.sort(rng.integers(0, 4, (2, 75)), 1).astype(np.int32)
        call |= {"q_segment_ids": ids[:, :61], "kv_segment_ids": ids}
    return call


@pytest.mark.long
@pytest.mark.parametrize(
    "blocks",
    [(32, 24), *(pytest.param(blocks, marks=pytest.mark.long) for blocks in ((16, 16), (8, 32), (61, 75)))],
)
@pytest.mark.parametrize("name", CASES)
def test_every_block_size_gives_the_same_results(name: str, blocks: tuple[int, int]) -> None:
    call = arguments(CASES[name])
    cfg = flash_attention.Config(*blocks)
    cfg_bwd = backward.Config(*blocks)
    expected = ejkernel_core.call("flash_attention", **call, return_lse=True, backend="reference")
    results = ejkernel_core.call("flash_attention", **call, return_lse=True, cfg=cfg)
    rng = np.random.default_rng(2)
    d_out, d_lse = (jnp.asarray(rng.normal(size=result.shape), jnp.float32) for result in expected)
    wrt = tuple(n for n in ("query", "key", "value", "bias", "softmax_aux") if n in call)
    residuals = {"out": expected[0], "lse": expected[1], "d_out": d_out, "d_lse": d_lse, "wrt": wrt}
    expected += ejkernel_core.call("flash_attention_bwd", **call, **residuals, backend="reference")
    results += ejkernel_core.call("flash_attention_bwd", **call, **residuals, cfg=cfg_bwd)
    for result, expected_result in zip(results, expected, strict=True):
        is_finite = np.isfinite(expected_result)
        np.testing.assert_array_equal(np.isfinite(result), is_finite)
        error = np.linalg.norm((result - expected_result)[is_finite]) / np.linalg.norm(
            np.asarray(expected_result)[is_finite]
        )
        assert error < 2e-5


def invocation(dtype: Any = jnp.bfloat16, op: str = "flash_attention", **arguments: Any) -> Any:
    arrays = {name: jax.ShapeDtypeStruct((2, 64, 4, 16), dtype) for name in ("query", "key", "value")}
    return registry.plan(op, **{**arrays, **arguments}).invocation


@pytest.mark.parametrize("module", [flash_attention, backward])
def test_the_space_has_the_heuristic_and_its_neighbours(module: Any) -> None:
    inv = invocation(
        **{name: jax.ShapeDtypeStruct((1, 4096, 8, 64), jnp.float32) for name in ("query", "key", "value")}
    )
    space = list(module.config_space(inv))
    assert module.heuristic_cfg(inv) in space
    assert len(space) == len(set(space)) > 4
    for invalid in ({"q_block": 0}, {"kv_block": 2.5}):
        with pytest.raises((ValueError, TypeError)):
            module.Config(**invalid)


def test_blocks_follow_the_window_and_the_heads() -> None:
    def sizes(heads: int, **options: Any) -> tuple[int, int]:
        arrays = {name: jax.ShapeDtypeStruct((1, 4096, heads, 64), jnp.float32) for name in ("query", "key", "value")}
        return block_sizes(invocation(**arrays, **options), "cpu", (512, 256))

    assert sizes(1) == (512, 256)
    assert sizes(64) == (128, 256)
    assert sizes(1, sliding_window=(255, 0), causal=True) == (128, 128)
    short = invocation(**{n: jax.ShapeDtypeStruct((1, 20, 1, 64), jnp.float32) for n in ("query", "key", "value")})
    assert list(neighbours(short, "cpu", (512, 256))) == [(512, 256)]
    long = invocation(**{n: jax.ShapeDtypeStruct((1, 8192, 1, 64), jnp.float32) for n in ("query", "key", "value")})
    assert list(neighbours(long, "gpu", (1024, 1024))) == [(1024, 1024), (2048, 2048), (512, 512)]
    assert len(set(neighbours(long, "cpu", (1024, 1024)))) == 9
