"""What the XLA kernels may be configured with: every block size is right."""

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
from ejkernel_xla.flash_attention.blocks import blocks, nearby

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
    cfg = flash_attention.Config(*blocks)
    cfg_bwd = backward.Config(*blocks)
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


@pytest.mark.parametrize("module", [flash_attention, backward])
def test_the_space_has_the_heuristic_and_its_neighbours(module: Any) -> None:
    inv = invocation(
        **{name: jax.ShapeDtypeStruct((1, 4096, 8, 64), jnp.float32) for name in ("query", "key", "value")}
    )
    space = list(module.config_space(inv))
    assert module.heuristic_cfg(inv) in space
    assert len(space) == len(set(space)) > 4
    for bad in ({"q_block": 0}, {"kv_block": 2.5}):
        with pytest.raises((ValueError, TypeError)):
            module.Config(**bad)


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
