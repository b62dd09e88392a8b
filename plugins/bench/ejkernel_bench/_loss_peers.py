"""The mean loss of a head by others: XLA from all logits and in chunks, Liger, quack and tokamax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import jax.numpy as jnp

from ._losses import mean_in_chunks, row_losses
from ._peers import JaxFunction, Peer, TorchFunction, is_installed, optional

XLA, CHUNKS, LIGER, QUACK, TOKAMAX = "XLA", "XLA in chunks", "Liger", "quack", "tokamax"
#: The most rows of a chunk.
CHUNK = 2048
#: Of those that add up in the dtype of the arrays, or round logits to it.
SUMS_IN_16_BITS = 5e-2

Call = Mapping[str, Any]


def peers() -> dict[str, Peer | str | None]:
    """By name; None where it is not installed, and a reason where it cannot be called."""
    return {
        XLA: by_xla,
        CHUNKS: by_chunks,
        LIGER: optional(by_liger, "torch", "liger_kernel"),
        QUACK: _quack(),
        TOKAMAX: optional(by_tokamax, "tokamax"),
    }


def _quack() -> Peer | str | None:
    if not (is_installed("torch") and is_installed("quack")):
        return None
    try:
        import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy  # noqa: B018
    except Exception as fault:  # it compiles while it is imported
        return f"quack.linear_cross_entropy: {type(fault).__name__}: {fault}"
    return by_quack


def takes(call: Call, *reductions: str | None) -> bool:
    """Whether the call has nothing but the three matrices, and one of these reductions; None is that of each row."""
    given = {name for name, value in call.items() if value is not None and value is not False}
    is_plain = given <= {"hidden", "weight", "labels", "reduction", "return_lse"}
    return is_plain and call["hidden"].ndim == 2 and call.get("reduction") in reductions


# -- of JAX ------------------------------------------------------------------------------------------------------------


def by_xla(call: Call) -> Callable[..., Any] | None:
    """All logits, in float32; their gradient in the dtype of the arrays."""
    if not takes(call, "mean", None):
        return None

    def loss(hidden: Any, weight: Any, labels: Any) -> Any:
        losses, lse = row_losses(hidden, weight, labels)
        if "reduction" in call:
            return losses.mean()
        return (losses, lse) if call.get("return_lse") else losses

    return loss


def by_chunks(call: Call) -> Callable[..., Any] | None:
    """Chunks of rows with ``jax.checkpoint``."""
    if not takes(call, "mean"):
        return None
    rows = call["hidden"].shape[0]
    chunk = next(size for size in range(min(CHUNK, rows), 0, -1) if rows % size == 0)
    return lambda hidden, weight, labels: mean_in_chunks(hidden, weight, labels, chunk)


def by_tokamax(call: Call) -> JaxFunction | None:
    """Its chunks: its other implementation for GPUs is all logits by XLA.

    Words that pad the last chunk of the vocabulary count in its lse, with logits of 0: 3e-4 of the loss for 128,256.
    """
    if not takes(call, "mean"):
        return None

    def loss(hidden: Any, weight: Any, labels: Any) -> Any:
        function = import_module("tokamax").linear_softmax_cross_entropy_loss
        options = {"reduction": "mean", "implementation": "chunked_xla"}
        return function(hidden, labels, weight, **options).astype(jnp.float32)

    return JaxFunction(loss, tolerance=SUMS_IN_16_BITS)


# -- of PyTorch: their weights are (vocab, hidden_dim), of which ours is a view ----------------------------------------


def by_liger(call: Call) -> TorchFunction | None:
    """With its defaults."""
    if not takes(call, "mean"):
        return None

    def loss(hidden: Any, weight: Any, labels: Any) -> Any:
        function = import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
        return function(hidden, weight.t(), labels.long()).float()

    return TorchFunction(loss, tolerance=SUMS_IN_16_BITS)


def by_quack(call: Call) -> TorchFunction | None:
    """Chunks of its own."""
    if not takes(call, "mean"):
        return None

    def loss(hidden: Any, weight: Any, labels: Any) -> Any:
        function = import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy
        return function(hidden, weight.t(), labels.long(), reduction="mean").float()

    return TorchFunction(loss, tolerance=SUMS_IN_16_BITS)
