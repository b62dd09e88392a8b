"""``grouped_matmul_d_rhs`` on Hopper, in Gluon."""

from __future__ import annotations

from collections.abc import Iterable

import jax

from ejkernel_core import Invocation, Unsupported, hookimpl
from ejkernel_ops.grouped_matmul.axes import D_RHS_AXES
from ejkernel_triton.grouped_matmul_sm90 import _launch, _tiling
from ejkernel_triton.grouped_matmul_sm90._tiling import Config

__all__ = ["COMPILERS", "OPAQUE", "PLATFORMS", "VERSION", "Config"]

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 2
#: Where it runs, and how strongly it is preferred there.
PLATFORMS = {"gpu": 60}
#: XLA sees a custom call, which it cannot partition.
OPAQUE = ("gpu",)
COMPILERS = ("triton", "jax-triton")


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """Many stages, and high bands for large matrices."""
    return _configs(inv)[0]


@hookimpl
def config_space(inv: Invocation) -> Iterable[Config]:
    """All for the width of the matrix."""
    return _configs(inv)


@hookimpl
def check_cfg(inv: Invocation, cfg: Config) -> None:
    """The stages have to fit into shared memory."""
    _configs(inv)
    _tiling.check_config(cfg)


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> jax.Array:
    """The gradient of ``rhs``."""
    return _launch.d_rhs(inv, cfg)


def _configs(inv: Invocation) -> list[Config]:
    (output,) = D_RHS_AXES.outputs(inv)
    groups, *sizes = output.shape
    _tiling.check(inv, groups, tuple(sizes))
    if sizes[0] > _tiling.MOST_ROWS:
        raise Unsupported(f"the Gluon kernels take up to {_tiling.MOST_ROWS} rows of a matrix; there are {sizes[0]}")
    return _tiling.d_rhs_configs(*sizes)
