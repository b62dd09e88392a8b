"""Self attention: the work of an example, and the implementations of others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

import ejkernel_core
from ejkernel_core import Cost, Example

from . import _flash_attention_peers
from ._calls import PASSES, Function, describe
from ._peers import Peer, TorchFunction, is_installed

#: The blocks of JAX's Pallas kernel that were the fastest on an H200; its own defaults are for small problems.
PALLAS_BLOCKS = {
    "block_q": 128,
    "block_k": 64,
    "block_q_dkv": 64,
    "block_kv_dkv": 64,
    "block_q_dq": 64,
    "block_kv_dq": 64,
}


# -- work -------------------------------------------------------------------------------------------------------------


def sizes(example: Example) -> tuple[int, int, int, int, int]:
    """Batch, length, heads, key heads and head dim."""
    arguments = describe(example)
    *batch, length, heads, head_dim = arguments["query"].shape
    return batch[0] if batch else 1, length, heads, arguments["key"].shape[-2], head_dim


def pairs(example: Example) -> int:
    """The number of (query, key) pairs of one head and batch entry that are not masked."""
    arguments = describe(example)
    _, length, *_ = sizes(example)
    left, right = arguments.get("sliding_window") or (length, length)
    right = 0 if arguments["causal"] else right
    total = 0
    for tokens in np.diff(arguments.get("cum_seqlens_q", [0, length])):
        before, after = np.arange(tokens, dtype=np.int64), np.arange(tokens, dtype=np.int64)[::-1]
        total += int(tokens + np.minimum(before, left).sum() + np.minimum(after, right).sum())
    return total


def flops(example: Example, pass_name: str) -> float:
    """The work that has to be done: two products forward, and five more backward. The diagonal counts as half."""
    arguments = describe(example)
    batch, length, heads, _, head_dim = sizes(example)
    has_diagonal = arguments["causal"] and "sliding_window" not in arguments
    count = pairs(example) - (length / 2 if has_diagonal else 0)
    return 4.0 * batch * heads * head_dim * count * (1 if pass_name == PASSES[0] else 3.5)


def bytes_moved(example: Example, pass_name: str) -> int:
    """Bytes in 16 bits, each array once. Forward: query, key and value are read, and the output and the log-sum-exp,
    which is float32, are written. Backward: these and the cotangent are read, and three gradients are written.
    """
    batch, length, heads, kv_heads, head_dim = sizes(example)
    tokens = batch * length
    query, key = 2 * tokens * heads * head_dim, 2 * tokens * kv_heads * head_dim
    lse = 4 * tokens * heads
    forward = 2 * query + 2 * key + lse
    return forward if pass_name == PASSES[0] else forward + 4 * query + 4 * key + lse


def exponentials(example: Example, pass_name: str) -> int:
    """One for each pair, in each pass."""
    batch, _, heads, *_ = sizes(example)
    return (1 if pass_name == PASSES[0] else 2) * batch * heads * pairs(example)


def work(example: Example, pass_name: str) -> Cost:
    """The least work of a pass of 16 bits."""
    return Cost(flops(example, pass_name), bytes_moved(example, pass_name))


# -- peers ------------------------------------------------------------------------------------------------------------


def peers_of_gpus() -> dict[str, Peer | None]:
    """By name; None where one is not installed."""
    torch_peer = by_torch if is_installed("torch") else None
    return {
        "cuDNN": by_cudnn,
        "jax pallas-triton": by_pallas,
        "torch FA2": torch_peer,
        **_flash_attention_peers.peers(),
    }


def _is_plain(arguments: Mapping[str, Any], *others: str) -> bool:
    """Whether the call has no more than causality, grouped queries and these arguments, and as many keys as queries:
    elsewhere, causality may mean something else to others. A sequence of 3 axes, without a batch, is not plain either.
    """
    query, key = arguments["query"].shape, arguments["key"].shape
    names = {name for name, value in arguments.items() if value is not None}
    return names <= {"query", "key", "value", "causal", *others} and len(query) == 4 and query[1] == key[1]


def by_cudnn(arguments: Mapping[str, Any]) -> Function | None:
    """Through ``jax.nn``, which has only causal windows."""
    window, causal = arguments.get("sliding_window"), arguments.get("causal", False)
    if not _is_plain(arguments, "sliding_window", "bias") or (window is not None and not causal):
        return None
    window_size = None if window is None else (window[0], 0)

    def attention(query: Any, key: Any, value: Any, bias: Any = None) -> Any:
        return jax.nn.dot_product_attention(
            query, key, value, bias, is_causal=causal, implementation="cudnn", local_window_size=window_size
        )

    return attention


def by_jax_nn(arguments: Mapping[str, Any]) -> Function | None:
    """By XLA through ``jax.nn``."""
    if not _is_plain(arguments, "bias"):
        return None
    is_causal = arguments.get("causal", False)

    def attention(query: Any, key: Any, value: Any, bias: Any = None) -> Any:
        return jax.nn.dot_product_attention(query, key, value, bias, is_causal=is_causal, implementation="xla")

    return attention


def by_pallas(arguments: Mapping[str, Any]) -> Function | None:
    """JAX's kernel for GPUs, without grouped queries, for head dims of 64 and 128."""
    query, head_dim = arguments["query"], arguments["query"].shape[-1]
    if not _is_plain(arguments) or query.shape != arguments["key"].shape or head_dim not in (64, 128):
        return None
    from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha

    blocks, causal = BlockSizes(**PALLAS_BLOCKS), arguments.get("causal", False)

    def attention(query: Any, key: Any, value: Any) -> Any:
        return mha(query, key, value, None, sm_scale=head_dim**-0.5, causal=causal, block_sizes=blocks)

    return attention


def by_our_xla(arguments: Mapping[str, Any]) -> Function | None:
    """Our kernel in plain JAX, for the calls that cuDNN refuses."""
    if by_cudnn(arguments) is not None:
        return None
    options = {name: value for name, value in arguments.items() if not hasattr(value, "shape")}
    return lambda **arrays: ejkernel_core.call("flash_attention", **arrays, **options, backend="xla")


def by_torch(arguments: Mapping[str, Any]) -> TorchFunction | None:
    """PyTorch's FlashAttention-2."""
    if not _is_plain(arguments):
        return None
    is_grouped = arguments["query"].shape != arguments["key"].shape

    def attention(query: Any, key: Any, value: Any) -> Any:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        heads_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = scaled_dot_product_attention(
                *heads_first, is_causal=arguments.get("causal", False), enable_gqa=is_grouped
            )
        return out.transpose(1, 2)

    return TorchFunction(attention)
