"""``grouped_matmul`` on Hopper, in Gluon."""

from __future__ import annotations

from collections.abc import Iterable

import jax

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.grouped_matmul.axes import AXES
from ejkernel_triton.grouped_matmul_sm90 import _launch, _tiling
from ejkernel_triton.grouped_matmul_sm90._tiling import Config

__all__ = ["COMPILERS", "OPAQUE", "PLATFORMS", "VERSION", "Config"]

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1
#: Where it runs, and how strongly it is preferred there: after all others, until it is proved on a card.
PLATFORMS = {"gpu": 5}
#: XLA sees a custom call, which it cannot partition.
OPAQUE = ("gpu",)
COMPILERS = ("triton", "jax-triton")


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """Tiles as wide as the matrix, or of 256 columns."""
    return _configs(inv)[0]


@hookimpl
def config_space(inv: Invocation) -> Iterable[Config]:
    """All that fit."""
    return _configs(inv)


@hookimpl
def check_cfg(inv: Invocation, cfg: Config) -> None:
    """The stages have to fit into shared memory."""
    _configs(inv)
    _tiling.check_config(cfg)


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> jax.Array:
    """The result."""
    return _launch.forward(inv, cfg)


def _configs(inv: Invocation) -> list[Config]:
    (output,) = AXES.outputs(inv)
    rhs = inv["rhs"]
    _tiling.check(inv, rhs.shape[0], (*rhs.shape[1:], output.shape[1]))
    return _tiling.configs(rhs.shape[1 if inv["transpose_rhs"] else 2])
