"""The gradients of dense attention, by JAX."""

from __future__ import annotations

import attrs
import jax
import jax.numpy as jnp

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.flash_attention.dense import dense_attention

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1
PLATFORMS = {"cpu": 0, "gpu": 0, "tpu": 0}


@attrs.frozen
class Config:
    """Empty, because there is only one way to run this kernel."""


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    return Config()


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array, ...]:
    """``out`` and ``lse`` are not used: they are functions of the other inputs, so that total derivatives of any order
    are right without terms for them.
    """

    def forward(primals: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return dense_attention({**inv, **primals})

    (out, lse), pull_back = jax.vjp(forward, {name: inv[name] for name in inv["wrt"]})
    d_out = jnp.zeros_like(out) if inv["d_out"] is None else inv["d_out"]
    d_lse = jnp.zeros_like(lse) if inv["d_lse"] is None else inv["d_lse"]
    (gradients,) = pull_back((d_out.astype(out.dtype), d_lse.astype(lse.dtype)))
    return tuple(gradients[name] for name in inv["wrt"])
