"""``fused_linear_cross_entropy_sum`` on Hopper, in Gluon: the losses of rows, and gradients from their exponentials.

Gradients in float16, those of logits with a cap, and all beside that of a bias are those of plain JAX.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.fused_linear_cross_entropy import results
from ejkernel_ops.fused_linear_cross_entropy.definition import Gradients
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
    """The sum, the lse and the loss of each row, and the gradients that are needed."""

    def rows_and_gradients(
        cotangents: Mapping[str, Any], needs: Mapping[str, bool], dtype: Any
    ) -> tuple[dict[str, Any], Gradients]:
        if not any(needs.values()):
            return _launch.losses(inv, cfg), Gradients()
        return _launch.with_gradients(inv, cfg, cotangents, needs, dtype)

    return results.of_sum(inv, rows_and_gradients)
