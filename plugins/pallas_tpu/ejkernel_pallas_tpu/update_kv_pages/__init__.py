"""``update_kv_pages`` and ``update_kv_page_pair`` on TPUs, in Pallas: one kernel, of one array of pages or of two."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from ejkernel_core import Example, Invocation, hookimpl
from ejkernel_ops.pages import pages_of
from ejkernel_pallas_tpu.launch._generations import MIB
from ejkernel_pallas_tpu.update_kv_pages import _tuning
from ejkernel_pallas_tpu.update_kv_pages._tuning import Config

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1
#: Behind plain JAX, until it has been measured on a TPU: see docs/pallas-tpu.md.
PLATFORMS = {"tpu": 5}
#: XLA sees a custom call, which it cannot partition.
OPAQUE = ("tpu",)
COMPILERS = ("jaxlib",)


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """The fewest tokens at a time that keep main memory busy."""
    return next(iter(config_space(inv)))


@hookimpl
def config_space(inv: Invocation) -> Iterable[Config]:
    """Few and many tokens at a time."""
    _tuning.check(inv)
    return _tuning.configs(inv)


@hookimpl
def check_cfg(inv: Invocation, cfg: Config) -> None:
    """Raise for what the kernel does not support; the interpreter runs on any device."""
    _tuning.check_config(inv, cfg)


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array, ...]:
    """The pages, updated."""
    return compute(inv, cfg, cfg.interpret)


def compute(inv: Invocation, cfg: Config, interpret: Any) -> tuple[jax.Array, ...]:
    """The same; ``interpret`` is that of ``pl.pallas_call``."""
    from ejkernel_ops.update_kv_pages.definition import interleaved, places, stored_tokens
    from ejkernel_pallas_tpu.update_kv_pages._copy import copy_rows

    pages = pages_of(inv)
    if inv["key"].shape[0] == 0 or pages[0].shape[0] == 0:
        return tuple(pages)
    key, value = stored_tokens(inv, pages[0].dtype)
    rows = [interleaved(key, value)] if len(pages) == 1 else [key, value]
    # A row has two axes of its own, so that merging those of pages and slots moves nothing.
    by_slot = [array.reshape(-1, *array.shape[2:]) for array in pages]
    launch = copy_rows(rows, by_slot, _tuning.cores(inv), cfg.in_flight)
    updated = launch((places(inv, pages[0]),), interpret, vmem=None)
    return tuple(new.reshape(old.shape) for new, old in zip(updated, pages, strict=True))


def vmem(inv: Invocation, cfg: Config) -> int:
    """At most how many bytes of vector memory the kernel takes. It has none itself; the compiler may need some."""
    return MIB


def examples() -> Iterable[Example]:
    """Calls of both operations, which the compiler for TPUs compiles."""
    from ejkernel_pallas_tpu.update_kv_pages._examples import examples

    return examples()
