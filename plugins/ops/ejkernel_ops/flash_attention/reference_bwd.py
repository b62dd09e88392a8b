"""The gradients of dense attention, by JAX."""

from __future__ import annotations

import attrs
import jax
import jax.numpy as jnp

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.flash_attention.dense import dense_attention

#: Of the kernel and of its Config: what was measured with another one is measured again.
VERSION = 1
PLATFORMS = {"cpu": 0, "gpu": 0, "tpu": 0}


@attrs.frozen
class Config:
    """Nothing to choose."""


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    return Config()


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array, ...]:
    """Computed from the inputs alone: the forward's results are functions of them, so the total derivative of this,
    of any order, is the right one without a term for ``out`` and ``lse``.
    """

    def forward(moving: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return dense_attention({**inv, **moving})

    (out, lse), pull_back = jax.vjp(forward, {name: inv[name] for name in inv["wrt"]})
    d_out = jnp.zeros_like(out) if inv["d_out"] is None else inv["d_out"]
    d_lse = jnp.zeros_like(lse) if inv["d_lse"] is None else inv["d_lse"]
    (gradients,) = pull_back((d_out.astype(out.dtype), d_lse.astype(lse.dtype)))
    return tuple(gradients[name] for name in inv["wrt"])
