"""``grouped_matmul`` on Hopper, in Gluon."""

from __future__ import annotations

from collections.abc import Iterable

import jax

from ejkernel_core import Invocation, Unsupported, hookimpl
from ejkernel_ops.grouped_matmul.axes import AXES
from ejkernel_triton.grouped_matmul_sm90 import _launch, _tiling
from ejkernel_triton.grouped_matmul_sm90._tiling import Config

__all__ = ["COMPILERS", "OPAQUE", "PLATFORMS", "VERSION", "Config"]

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 2
#: With so few rows in an average group, tiles of 128 rows are almost empty, and the portable kernel is faster.
FEW_ROWS = 16


def rank(inv: Invocation) -> int:
    """Before the portable kernel, unless groups have few rows."""
    return 60 if inv["lhs"].shape[0] > FEW_ROWS * inv["group_sizes"].shape[0] else 15


#: Where it runs, and how strongly it is preferred there.
PLATFORMS = {"gpu": rank}
#: XLA sees a custom call, which it cannot partition.
OPAQUE = ("gpu",)
COMPILERS = ("triton", "jax-triton")


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """Few stages: in most calls, what programs share in the L2 decides."""
    return _configs(inv)[0]


@hookimpl
def config_space(inv: Invocation) -> Iterable[Config]:
    """All for the width of the matrix."""
    return _configs(inv)


@hookimpl
def check_cfg(inv: Invocation, cfg: Config) -> None:
    """The stages have to fit into shared memory, and a tile has gates and values."""
    _configs(inv)
    _tiling.check_config(cfg)
    if cfg.columns < 256 and _has_halves(inv):
        raise Unsupported(f"tiles of {cfg.columns} columns are not for {inv['activation']}: take 256")


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> jax.Array:
    """The result."""
    return _launch.forward(inv, cfg)


def _configs(inv: Invocation) -> list[Config]:
    (output,) = AXES.outputs(inv)
    rhs = inv["rhs"]
    _tiling.check(inv, rhs.shape[0], (*rhs.shape[1:], output.shape[1]))
    # The gates and the values of a tile are fetched apart.
    columns = 256 if _has_halves(inv) else rhs.shape[1 if inv["transpose_rhs"] else 2]
    return _tiling.configs(columns)


def _has_halves(inv: Invocation) -> bool:
    return _tiling.GATES.get(inv["activation"]) == "halves"
