"""``linear_log_probs`` on Hopper, in Gluon: the launch of the loss, without logits in memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.fused_linear_cross_entropy import chunks
from ejkernel_ops.fused_linear_cross_entropy.definition import labels_of
from ejkernel_triton.fused_linear_cross_entropy_sm90 import _launch
from ejkernel_triton.fused_linear_cross_entropy_sm90._tiling import Config, check_cfg, config_space, heuristic_cfg

__all__ = ["COMPILERS", "OPAQUE", "PLATFORMS", "VERSION", "Config", "check_cfg", "config_space", "heuristic_cfg"]

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1
#: Where it runs, and how strongly it is preferred there.
PLATFORMS = {"gpu": 20}
#: XLA sees a custom call, which it cannot partition.
OPAQUE = ("gpu",)
COMPILERS = ("triton", "jax-triton")


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array | None, ...]:
    """The log-probability of each label, and the entropy of each row if it is needed."""
    shape, counts = inv["labels"].shape, labels_of(inv).counts
    rows = _launch.of_rows(inv, cfg, chunks.rows_of(inv), has_entropy=inv.needs("entropy"))
    log_sum = rows.softmax.log_sum
    log_probs = jnp.where(counts, (rows.own - rows.softmax.top) - log_sum, 0).reshape(shape)
    if rows.mean_product is None:
        return log_probs, None
    return log_probs, jnp.where(counts, log_sum - rows.mean_product, 0).reshape(shape)
