"""``layer_norm`` on NVIDIA GPUs, in Triton, by the kernels of ``rms_norm``."""

from __future__ import annotations

from collections.abc import Iterable

import jax

from ejkernel_core import Invocation, hookimpl
from ejkernel_triton.rms_norm import _launch, _tiling
from ejkernel_triton.rms_norm._tiling import Config, rank

__all__ = ["COMPILERS", "OPAQUE", "PLATFORMS", "VERSION", "Config"]

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1
#: Where it runs, and how strongly it is preferred there.
PLATFORMS = {"gpu": rank}
#: XLA sees a custom call, which it cannot partition.
OPAQUE = ("gpu",)
COMPILERS = ("triton", "jax-triton")


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """From the length of a row and the number of rows."""
    _tiling.check(inv)
    return _tiling.forward(inv)


@hookimpl
def config_space(inv: Invocation) -> Iterable[Config]:
    """Tiles that fit into registers."""
    return _tiling.unique(heuristic_cfg(inv), _tiling.forward_space(inv))


@hookimpl
def check_cfg(inv: Invocation, cfg: Config) -> None:
    """A tile has to fit into the registers of its warps."""
    _tiling.check_config(inv, cfg)


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array | None, ...]:
    """The result, the sum and, if they are needed, the statistics of the rows."""
    return _launch.forward(inv, cfg, centered=True)
