"""``grouped_matmul`` on NVIDIA GPUs, in Triton."""

from __future__ import annotations

from collections.abc import Iterable

import jax

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.grouped_matmul.axes import AXES
from ejkernel_triton.grouped_matmul import _launch, _tiling
from ejkernel_triton.grouped_matmul._tiling import Config

__all__ = ["COMPILERS", "OPAQUE", "PLATFORMS", "VERSION", "Config"]

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1
#: Where it runs, and how strongly it is preferred there.
PLATFORMS = {"gpu": 20}
#: XLA sees a custom call, which it cannot partition.
OPAQUE = ("gpu",)
COMPILERS = ("triton", "jax-triton")


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """From the rows of an average group."""
    return _configs(inv)[0]


@hookimpl
def config_space(inv: Invocation) -> Iterable[Config]:
    """Tiles that fit into shared memory."""
    return _configs(inv)


@hookimpl
def check_cfg(inv: Invocation, cfg: Config) -> None:
    """The tiles have to fit into shared memory."""
    _tiling.check(inv, inv["rhs"].shape[0])
    _tiling.check_config(inv, cfg)


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> jax.Array:
    """The result."""
    return _launch.forward(inv, cfg)


def _configs(inv: Invocation) -> list[Config]:
    rows, groups = inv["lhs"].shape[0], inv["group_sizes"].shape[0]
    _tiling.check(inv, inv["rhs"].shape[0])
    (output,) = AXES.outputs(inv)
    return _tiling.configs(inv, rows // groups, (rows, output.shape[1], inv["lhs"].shape[1]))
