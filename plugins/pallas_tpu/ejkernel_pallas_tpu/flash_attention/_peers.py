"""JAX's own attention for TPUs, which the estimated times of these kernels are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from ejkernel_core import Example
from ejkernel_pallas_tpu.testing import Peer

FUSED = "fused"
Function = Callable[[Mapping[str, Any]], Any]


def peers(example: Example) -> Iterator[Peer]:
    """The peers of a causal call, with or without a window."""
    arguments = example.abstract()
    length, heads = arguments["query"].shape[1:3]
    window = arguments.get("sliding_window")
    # Where there are many blocks, small ones are slower.
    blocks = (512, 1024) if length <= 4096 else (1024,)
    yield Peer("flash", {str(block): _flash(block) for block in blocks})
    variants = {
        f"{block}{f', {FUSED}' * is_fused}": _splash(length, heads, window, block, is_fused)
        for block in blocks
        for is_fused in (False, True)
    }
    only_with_gradients = frozenset(name for name in variants if FUSED in name)
    yield Peer("splash", variants, 1 / 1.05, 1 / 1.10, only_with_gradients)


def _heads_first(arrays: Mapping[str, Any]) -> list[Any]:
    return [jnp.swapaxes(arrays[name], 1, 2) for name in ("query", "key", "value")]


def _flash(block: int) -> Function:
    from jax.experimental.pallas.ops.tpu import flash_attention as jax_flash

    fields = [name for name in jax_flash.BlockSizes.__dataclass_fields__ if name != "block_b"]
    sizes = jax_flash.BlockSizes(block_b=1, **dict.fromkeys(fields, block))

    def attend(arrays: Mapping[str, Any]) -> Any:
        query, key, value = _heads_first(arrays)
        group = query.shape[1] // key.shape[1]  # it has no grouped queries
        key, value = (jnp.repeat(x, group, axis=1) for x in (key, value))
        out = jax_flash.flash_attention(query, key, value, causal=True, sm_scale=0.1, block_sizes=sizes)
        return jnp.swapaxes(out, 1, 2)

    return attend


def _splash(length: int, heads: int, window: Any, block: int, is_fused: bool) -> Function:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    fields = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    own: dict[str, Any] = dict.fromkeys(fields[:4] if is_fused else fields, block)
    sizes = kernels.BlockSizes(use_fused_bwd_kernel=is_fused, **own)
    square = (length, length)
    mask = masks.CausalMask(square) if window is None else masks.LocalMask(square, window, 0)
    splash = kernels.make_splash_mha(
        masks.MultiHeadMask([mask] * heads), block_sizes=sizes, head_shards=1, q_seq_shards=1
    )

    def attend(arrays: Mapping[str, Any]) -> Any:
        query, key, value = _heads_first(arrays)
        return jnp.swapaxes(splash(query[0], key[0], value[0])[None], 1, 2)

    return attend
