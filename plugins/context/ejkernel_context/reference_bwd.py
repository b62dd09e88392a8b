"""The gradients of the reference, by JAX."""

from __future__ import annotations

import jax

from ejkernel_core import Invocation, hookimpl

from .operation import forward
from .reference import PLATFORMS, VERSION, dense_attention

__all__ = ["PLATFORMS", "VERSION"]


@hookimpl
def run_backend(inv: Invocation, cfg: None) -> tuple[jax.Array, ...]:
    """The gradients that ``wrt`` names. Without ``out`` and ``lse``, derivatives of any order are right."""
    gradients: tuple[jax.Array, ...] = forward.gradients_by_jax(dense_attention, inv)
    return gradients
