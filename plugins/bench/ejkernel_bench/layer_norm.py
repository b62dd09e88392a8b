"""layer_norm on a GPU: against XLA, torch, Liger and the copy rate; its gradients, 8 bits, between products."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from . import rms_norm, suite


def run(
    backend: str | None = None, rounds: int = suite.ROUNDS, small: bool = False, quick: bool = False
) -> suite.Report:
    """Over rows and dims, of which a quick run has fewer; on a CPU a few small calls."""
    return rms_norm.measure("layer_norm", by_torch, by_liger, backend, rounds, small, quick)


def peers() -> dict[str, suite.Peer | None]:
    """The peers of a call at any shape."""
    return rms_norm.peers_of("layer_norm", by_torch, by_liger)


def by_torch(x: Any, weight: Any) -> Any:
    """PyTorch's own, eager."""
    from torch.nn.functional import layer_norm

    return layer_norm(x, weight.shape, weight, None, 1e-6)


def by_liger(x: Any, weight: Any) -> Any:
    """Liger's Triton kernel through PyTorch."""
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    # It always has a bias.
    return LigerLayerNormFunction.apply(x, weight, _zeros(weight.numel(), weight.dtype, weight.device), 1e-6)


@lru_cache(maxsize=1)
def _zeros(dim: int, dtype: Any, device: Any) -> Any:
    import torch

    return torch.zeros(dim, dtype=dtype, device=device)
