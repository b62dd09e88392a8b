"""``fused_linear_cross_entropy`` on Hopper, in Gluon: the loss of each row, without logits in memory."""

from __future__ import annotations

import jax

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.fused_linear_cross_entropy import results
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
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array, ...]:
    """The loss and the lse of each row, and the loss without its weight."""
    rows = _launch.losses(inv, cfg)
    return results.of_rows(inv, rows["losses"], rows["lse"])
