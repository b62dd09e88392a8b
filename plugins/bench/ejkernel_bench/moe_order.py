"""moe_order on a GPU: against a stable sort and a count, by XLA and by torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from ejkernel_ops.moe_order.examples import examples

from . import suite

SMALL = "33x2-8"
MINIMA = (suite.Minimum("forward", "XLA", 1.0),)


def run(backend: str | None = None, rounds: int = suite.ROUNDS, small: bool = False) -> suite.Report:
    """The measured calls of the operation, or with ``small`` one that a CPU can run."""
    if small:
        return suite.run("moe_order", peers(), examples=examples(), names={SMALL}, backend=backend, rounds=rounds)
    return suite.run("moe_order", peers(), MINIMA, backend=backend, rounds=rounds)


def peers() -> dict[str, suite.Peer | None]:
    """The peers of a call at any shape."""
    return {"XLA": by_xla, "torch": by_torch if suite.is_installed("torch") else None}


def by_xla(arguments: Mapping[str, Any]) -> Callable[..., Any]:
    """A stable sort, and a sum for each expert."""
    count = arguments["num_experts"]

    def order(experts: Any) -> Any:
        flat = experts.reshape(-1)
        return jnp.bincount(flat, length=count).astype(jnp.int32), jnp.argsort(flat).astype(jnp.int32)

    return order


def by_torch(arguments: Mapping[str, Any]) -> suite.TorchFunction:
    """The same in PyTorch, eager."""
    count = arguments["num_experts"]

    def order(experts: Any) -> Any:
        import torch

        flat = experts.reshape(-1)
        sizes = torch.bincount(flat, minlength=count).to(torch.int32)
        return sizes, torch.sort(flat, stable=True).indices.to(torch.int32)

    return suite.TorchFunction(order)
