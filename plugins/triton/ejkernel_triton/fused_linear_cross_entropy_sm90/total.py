"""``fused_linear_cross_entropy_sum`` on Hopper: without gradients as the loss of each row, in Gluon.

With gradients it is plain JAX, whose logits are in memory: each is read again for its gradient. Which of these a call
is, is not known while its kernel is chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.fused_linear_cross_entropy import chunks, gradients, results
from ejkernel_ops.fused_linear_cross_entropy.definition import Gradients
from ejkernel_triton.fused_linear_cross_entropy_sm90 import _launch
from ejkernel_triton.fused_linear_cross_entropy_sm90._tiling import Config, check_cfg, heuristic_cfg

__all__ = ["COMPILERS", "OPAQUE", "PLATFORMS", "VERSION", "Config", "check_cfg", "heuristic_cfg"]

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1
#: Where it runs, and how strongly it is preferred there: after all others, because no card has run it yet.
PLATFORMS = {"gpu": 4}
#: XLA sees a custom call, which it cannot partition.
OPAQUE = ("gpu",)
COMPILERS = ("triton", "jax-triton")


@hookimpl
def config_space(inv: Invocation) -> Iterable[Config]:
    """The heuristic's alone: a measurement is with the gradients, which have no tiles."""
    return [heuristic_cfg(inv)]


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array | None, ...]:
    """The sum, the lse and the loss of each row, and the gradients that are needed."""

    def rows_and_gradients(
        cotangents: Mapping[str, Any], needs: Mapping[str, bool], dtype: Any
    ) -> tuple[dict[str, Any], Gradients]:
        if any(needs.values()):
            return gradients.with_gradients(inv, chunks.rows_of_memory(inv), cotangents, needs, dtype)
        return _launch.losses(inv, cfg), Gradients()

    return results.of_sum(inv, rows_and_gradients)
