"""``layer_norm_bwd`` on NVIDIA GPUs, in Triton, by the kernels of ``rms_norm``."""

from __future__ import annotations

from collections.abc import Iterable

import jax

from ejkernel_core import Invocation, hookimpl
from ejkernel_triton.rms_norm import _launch, _tiling
from ejkernel_triton.rms_norm._tiling import BackwardConfig as Config
from ejkernel_triton.rms_norm._tiling import backward_rank

__all__ = ["COMPILERS", "OPAQUE", "PLATFORMS", "VERSION", "Config"]

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1
PLATFORMS = {"gpu": backward_rank}
#: XLA sees a custom call, which it cannot partition.
OPAQUE = ("gpu",)
COMPILERS = ("triton", "jax-triton")


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """From the length of a row and the number of rows."""
    _tiling.check(inv)
    return _tiling.backward(inv)


@hookimpl
def config_space(inv: Invocation) -> Iterable[Config]:
    """Tiles that fit into registers, and as many programs as a multiprocessor has room for."""
    return _tiling.unique(heuristic_cfg(inv), _tiling.backward_space(inv))


@hookimpl
def check_cfg(inv: Invocation, cfg: Config) -> None:
    """A tile has to fit into the registers of its warps."""
    _tiling.check_config(inv, cfg)


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array, ...]:
    """The gradients that ``wrt`` names, in its order."""
    return _launch.gradients(inv, cfg, centered=True)
