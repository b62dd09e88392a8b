"""Attention by others: each says what it does not do, and is imported only if it is asked."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import attrs
import jax
import jax.numpy as jnp

from ._contenders import Results, compiled
from ._problem import Attention, Problem, through_core

Run = Callable[[], Results]


@attrs.frozen
class Peer:
    """Somebody's attention. ``prepared(problem, arrays, pass)`` is ready to run, or None where it does not do that."""

    name: str
    prepared: Callable[[Problem, tuple[jax.Array, ...], str], Run | None]


def peers() -> list[Peer]:
    """Those that are installed."""
    found = [Peer("cuDNN", _by(_cudnn)), Peer("jax pallas-triton", _by(_pallas)), Peer("ejkernel xla", _by(_xla))]
    if importlib.util.find_spec("torch") is not None:
        found.append(Peer("torch FA2", _torch))
    return found


def _by(make: Callable[[Problem], Attention | None]) -> Callable[[Problem, tuple[jax.Array, ...], str], Run | None]:
    def ready(problem: Problem, arrays: tuple[jax.Array, ...], which: str) -> Run | None:
        attention = make(problem)
        return None if attention is None else compiled(attention, which, arrays, problem.extras())

    return ready


def _plain(problem: Problem) -> bool:
    """Nothing but causality, and perhaps grouped queries."""
    absent = (problem.window, problem.soft_cap, problem.sequences)
    return not (any(given is not None for given in absent) or problem.bias or problem.sinks)


def _cudnn(problem: Problem) -> Attention | None:
    rest = attrs.evolve(problem, window=None, bias=False)
    if not _plain(rest) or (problem.window is not None and not problem.causal):
        return None
    window = {} if problem.window is None else {"local_window_size": (problem.window, 0)}

    def attention(query: Any, key: Any, value: Any, bias: Any = None) -> Any:
        return jax.nn.dot_product_attention(
            query, key, value, bias, is_causal=problem.causal, implementation="cudnn", **window
        )

    return attention


def _pallas(problem: Problem) -> Attention | None:
    if not _plain(problem) or problem.kv_heads not in (None, problem.heads) or problem.head_dim not in (64, 128):
        return None
    from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha

    # Its own default blocks are for small problems; these were the fastest of its choices on an H200.
    sizes = BlockSizes(
        block_q=128, block_k=64, block_q_dkv=64, block_kv_dkv=64, block_q_dq=64, block_kv_dq=64
    )  # fmt: skip

    def attention(query: Any, key: Any, value: Any) -> Any:
        scale = problem.head_dim**-0.5
        return mha(query, key, value, None, sm_scale=scale, causal=problem.causal, block_sizes=sizes)

    return attention


def _xla(problem: Problem) -> Attention | None:
    """Where cuDNN cannot."""
    return None if _cudnn(problem) is not None else through_core(problem, "xla")


def _torch(problem: Problem, arrays: tuple[jax.Array, ...], which: str) -> Run | None:
    if not _plain(problem):
        return None
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def there(array: jax.Array) -> Any:
        return torch.from_dlpack(array).transpose(1, 2).detach().clone().requires_grad_(which != "forward")

    query, key, value, d_out = map(there, arrays)
    grouped = problem.kv_heads not in (None, problem.heads)

    def run() -> Results:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = scaled_dot_product_attention(query, key, value, is_causal=problem.causal, enable_gqa=grouped)
        results = (out,)
        if which != "forward":
            results += torch.autograd.grad(out, (query, key, value), d_out.detach())
        return tuple(_Torch(result) for result in results)

    return run


@attrs.frozen
class _Torch:
    """A tensor that can be waited for as JAX's arrays can, and read as an array of (batch, length, heads, dim)."""

    tensor: Any

    def block_until_ready(self) -> _Torch:
        import torch

        torch.cuda.synchronize()
        return self

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.tensor.detach().transpose(1, 2).float().cpu().numpy().astype(dtype or jnp.float32)
