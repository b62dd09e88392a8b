"""The operations: one folder each, with a typed front door, checks, a reference and examples.

The parts of a definition that kernels have to repeat are functions in the operation's folder. ``jax_nn`` and ``flax``
have attention with the names and meanings of those libraries.
"""

from __future__ import annotations

from . import flax, jax_nn
from .flash_attention import flash_attention
from .fused_linear_cross_entropy import fused_linear_cross_entropy
from .grouped_matmul import grouped_matmul
from .layer_norm import layer_norm
from .linear_argmax import linear_argmax
from .linear_log_probs import linear_log_probs
from .moe_combine import moe_combine
from .moe_order import moe_order
from .moe_permute import moe_permute
from .moe_permute_matmul import moe_permute_matmul
from .moe_route import moe_route
from .ragged_paged_attention import paged_attention_metadata, ragged_paged_attention
from .rms_norm import rms_norm
from .sample_tokens import sample_tokens
from .update_kv_pages import update_kv_pages

__all__ = [
    "flash_attention",
    "flax",
    "fused_linear_cross_entropy",
    "grouped_matmul",
    "jax_nn",
    "layer_norm",
    "linear_argmax",
    "linear_log_probs",
    "moe_combine",
    "moe_order",
    "moe_permute",
    "moe_permute_matmul",
    "moe_route",
    "paged_attention_metadata",
    "ragged_paged_attention",
    "rms_norm",
    "sample_tokens",
    "update_kv_pages",
]
