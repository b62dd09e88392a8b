"""``linear_log_probs`` on any device JAX runs on: the logits of one chunk of rows after another."""

from __future__ import annotations

from typing import Any

import jax

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.fused_linear_cross_entropy import chunks
from ejkernel_ops.fused_linear_cross_entropy.definition import logits_of, statistics_of
from ejkernel_ops.linear_log_probs import definition
from ejkernel_xla.fused_linear_cross_entropy.rows import Config, check_cfg, config_space, heuristic_cfg

__all__ = ["PLATFORMS", "VERSION", "Config", "check_cfg", "config_space", "heuristic_cfg", "run_backend"]

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1
#: Where it runs, and how strongly it is preferred there.
PLATFORMS = {"cpu": 10, "gpu": 10, "tpu": 10}


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array, ...]:
    """The log-probability of each label, and the entropy of each row."""

    def step(carry: None, arrays: dict[str, Any]) -> tuple[None, dict[str, Any]]:
        labels = chunks.labels_of(arrays)
        logits = definition.divided(logits_of(arrays["hidden"], inv), inv)
        statistics = statistics_of(logits)
        rows = {"log_probs": definition.log_probs(logits, statistics, labels)}
        if inv.needs("entropy"):
            rows["entropy"] = definition.entropies(logits, statistics, labels)
        return None, rows

    _, rows = chunks.over_chunks(step, None, chunks.rows_of(inv), cfg.rows)
    return tuple(
        rows[name].reshape(inv["labels"].shape) if name in rows else None  # type: ignore[misc]
        for name in ("log_probs", "entropy")
    )
