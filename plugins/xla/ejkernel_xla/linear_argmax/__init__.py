"""``linear_argmax`` on any device JAX runs on: the logits of one chunk of rows after another."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.fused_linear_cross_entropy import chunks
from ejkernel_ops.fused_linear_cross_entropy.definition import logits_of
from ejkernel_xla.fused_linear_cross_entropy.rows import Config, check_cfg, config_space, heuristic_cfg

__all__ = ["PLATFORMS", "VERSION", "Config", "check_cfg", "config_space", "heuristic_cfg", "run_backend"]

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1
#: Where it runs, and how strongly it is preferred there.
PLATFORMS = {"cpu": 10, "gpu": 10, "tpu": 10}


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> jax.Array:
    """The column of the largest logit of each row."""

    def step(carry: None, arrays: dict[str, Any]) -> tuple[None, dict[str, Any]]:
        return None, {"token": jnp.argmax(logits_of(arrays["hidden"], inv), -1).astype(jnp.int32)}

    hidden = inv["hidden"]
    _, rows = chunks.over_chunks(step, None, {"hidden": hidden.reshape(-1, hidden.shape[-1])}, cfg.rows)
    token: jax.Array = rows["token"].reshape(hidden.shape[:-1])
    return token
