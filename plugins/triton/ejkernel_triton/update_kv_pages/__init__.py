"""``update_kv_pages`` on NVIDIA GPUs, in Triton: one launch, which writes into the pages that it gets."""

from __future__ import annotations

from collections.abc import Iterable

import jax

from ejkernel_core import Invocation, hookimpl
from ejkernel_triton.update_kv_pages import _launch
from ejkernel_triton.update_kv_pages._launch import Config

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
    """From the number of tokens and the entries of one."""
    return _launch.heuristic(inv)


@hookimpl
def config_space(inv: Invocation) -> Iterable[Config]:
    """More and fewer tokens and threads."""
    return _launch.space(inv)


@hookimpl
def check_cfg(inv: Invocation, cfg: Config) -> None:
    """Any number of tokens and threads is right."""
    _launch.check(inv)


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> jax.Array:
    (pages,) = _launch.updated(inv, cfg, "update")
    return pages
