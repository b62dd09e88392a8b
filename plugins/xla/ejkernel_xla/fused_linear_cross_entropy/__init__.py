"""``fused_linear_cross_entropy`` on any device JAX runs on: the logits of one chunk of rows after another."""

from __future__ import annotations

from typing import Any

import jax

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.fused_linear_cross_entropy import chunks, definition, results

from .rows import Config, check_cfg, config_space, heuristic_cfg

__all__ = ["PLATFORMS", "VERSION", "Config", "check_cfg", "config_space", "heuristic_cfg", "run_backend"]

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1
#: Where it runs, and how strongly it is preferred there.
PLATFORMS = {"cpu": 10, "gpu": 10, "tpu": 10}


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array, ...]:
    """The loss and the lse of each row, and the loss without its weight."""

    def step(carry: None, arrays: dict[str, Any]) -> tuple[None, dict[str, Any]]:
        logits = definition.logits_of(arrays["hidden"], inv)
        statistics = definition.statistics_of(logits)
        losses = definition.row_losses(logits, statistics, chunks.labels_of(arrays), inv)
        return None, {"losses": losses, "lse": statistics.lse}

    _, rows = chunks.over_chunks(step, None, chunks.rows_of(inv), cfg.rows)
    return results.of_rows(inv, rows["losses"], rows["lse"])
