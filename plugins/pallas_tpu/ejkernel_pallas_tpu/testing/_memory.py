"""Every configuration of a kernel through the compiler: does it fit, and is the estimate of its memory high enough?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import attrs
import jax

from ejkernel_core import Unsupported

from ._compiler import Compiler, base_name, in_main_memory, pallas_kernels
from ._kernels import Call, Kernel


@attrs.frozen
class Use:
    """The vector memory of one ``pallas_call``: what the compiler reports, None where it does not fit; the estimate."""

    call: str
    kernel: str
    cfg: str
    bytes: int | None
    estimate: int

    @property
    def is_right(self) -> bool:
        return self.bytes is not None and self.bytes <= self.estimate


def uses(compiler: Compiler, generation: str, kernels: Iterable[Kernel], text: str = "") -> Iterator[Use]:
    """The memory of kernels in every configuration, for the calls with this text in their names."""
    for kernel in kernels:
        # The same code in several programs is compiled once.
        codes: set[tuple[str, str]] = set()
        for call in kernel.calls("vmem"):
            if text in call.name:
                yield from _uses_of_call(compiler, generation, kernel, call, codes)


def _uses_of_call(
    compiler: Compiler, generation: str, kernel: Kernel, call: Call, codes: set[tuple[str, str]]
) -> Iterator[Use]:
    mesh = compiler.mesh(generation)
    inv = kernel.invocation(call, compiler.device_kind(generation))
    config_space = getattr(kernel.module, "config_space", lambda inv: [None])
    try:
        configurations = list(config_space(inv))
    except Unsupported:
        return
    for cfg in configurations:
        lowered = compiler.lower(partial(kernel.run, call, cfg), call.arrays, mesh=mesh)
        new_codes = [code for code in pallas_kernels(lowered.as_text()) if code not in codes]
        if new_codes:
            codes.update(new_codes)
            sizes = _reported_sizes(compiler, lowered, generation)
            estimate = kernel.module.vmem(inv, cfg)
            for name in dict.fromkeys(name for name, _ in new_codes):
                own_estimate = estimate if isinstance(estimate, int) else estimate[name]
                size = None if sizes is None else sizes[name]
                yield Use(call.name, name, _difference(cfg, configurations[0]), size, own_estimate)


def _difference(cfg: Any, first: Any) -> str:
    """The fields in which a configuration differs from the first one of a call; the first in full.

    >>> from ejkernel_pallas_tpu.flash_attention import Config
    >>> _difference(Config(256, 512), Config(512, 512))
    'q_block=256'
    """
    if cfg == first or not attrs.has(type(cfg)):
        return str(cfg)
    values = {field.name: getattr(cfg, field.name) for field in attrs.fields(type(cfg))}
    return ", ".join(f"{name}={value}" for name, value in values.items() if value != getattr(first, name))


def _reported_sizes(compiler: Compiler, lowered: Any, generation: str) -> dict[str, int] | None:
    """The bytes of each kernel of a program, None if it does not fit."""
    try:
        program = compiler.compile(lowered, in_main_memory(generation))
    except jax.errors.JaxRuntimeError as error:
        if "vmem" not in str(error).lower():
            raise
        return None
    sizes = [(base_name(kernel), program.vmem(kernel)) for kernel in program.kernels]
    return {name: max(size for other, size in sizes if other == name) for name, _ in sizes}
