"""``fused_linear_cross_entropy_bwd`` on Hopper, in Gluon: the exponentials of the logits again, and the gradients.

Those in float16, those of logits with a cap, and all beside that of a bias are those of plain JAX.
"""

from __future__ import annotations

from functools import partial

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
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array | None, ...]:
    """The gradients of the arrays that ``wrt`` names."""
    return results.of_gradients(inv, partial(_launch.with_gradients, inv, cfg))
