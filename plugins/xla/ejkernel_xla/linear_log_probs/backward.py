"""``linear_log_probs_bwd`` on any device JAX runs on: the logits of each chunk of rows again."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.fused_linear_cross_entropy import chunks, gradients
from ejkernel_ops.fused_linear_cross_entropy.definition import statistics_of
from ejkernel_ops.linear_log_probs import definition
from ejkernel_xla.fused_linear_cross_entropy.rows import Config, check_cfg, config_space, heuristic_cfg

__all__ = ["PLATFORMS", "VERSION", "Config", "check_cfg", "config_space", "heuristic_cfg", "run_backend"]

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1
#: Where it runs, and how strongly it is preferred there.
PLATFORMS = {"cpu": 10, "gpu": 10, "tpu": 10}


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array | None, ...]:
    """The gradients of the arrays that ``wrt`` names."""
    cotangents = {name: inv[name].reshape(-1) for name in ("d_log_probs", "d_entropy") if inv[name] is not None}
    needs = {name: name in inv["wrt"] and inv.needs(name) for name in ("hidden", "weight", "bias")}
    dtype = inv["hidden"].dtype
    _, of_product = gradients.over_rows(partial(_of_chunk, inv), inv, cfg.rows, cotangents, needs, dtype)
    by_name = of_product._asdict()
    return tuple(gradients.rounded(inv, name, by_name[name]) if needs[name] else None for name in inv["wrt"])


def _of_chunk(
    inv: Invocation, capped_logits: jax.Array, arrays: dict[str, Any]
) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
    labels, logits = chunks.labels_of(arrays), definition.divided(capped_logits, inv)
    cotangents = arrays.get("d_log_probs"), arrays.get("d_entropy")
    gradient = definition.d_logits(logits, statistics_of(logits), labels, *cotangents, inv)
    return gradient, labels.counts, {}
