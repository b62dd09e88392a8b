"""The table: kernels through the same compiler, with the same placement of operands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import jax

import ejkernel_core

from ._compiler import Compiler, in_main_memory
from ._contenders import SHAPES, Contender, Shape, jax_flash, jax_splash, ours, prefetched, registry_of, with_gradients
from ._schedule import Estimate, estimate

DIRECTIONS = ("forward", "forward + backward")


@attrs.frozen
class Row:
    """One contender at one shape in one direction, the best of its variants."""

    generation: str
    shape: str
    direction: str
    contender: str
    variant: str
    microseconds: float
    bundles: int
    spills: int
    vmem: int
    bytes: int
    parts: dict[str, Estimate]


def groups(compiler: Compiler, generation: str) -> Iterator[list[Row]]:
    """The contenders at one shape in one direction, for all of them."""
    for shape in SHAPES:
        for direction in DIRECTIONS:
            tried = (
                [
                    _row(compiler, generation, shape, direction, contender, one)
                    for one in contender.in_direction(direction)
                ]
                for contender in (ours(shape), jax_flash(shape), jax_splash(shape))
            )
            best = [min(filter(None, found), key=lambda row: row.microseconds, default=None) for found in tried]
            yield [row for row in best if row is not None]


def _row(
    compiler: Compiler, generation: str, shape: Shape, direction: str, contender: Contender, variant: str
) -> Row | None:
    mesh = compiler.mesh(generation)
    kind = mesh.devices.flat[0].device_kind
    make = contender.variants[variant]
    wrapped: Callable[..., Any] = with_gradients if direction != "forward" else lambda attention: attention
    given = shape.arrays(contender.repeated)
    try:
        program = compiler.compile(
            wrapped(make(ejkernel_core.registry)),
            *given,
            mesh=mesh,
            options=in_main_memory(generation),
        )
    except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError):
        if contender.name == "ours":
            raise
        return None  # these blocks do not fit, or these heads are not for it
    values = prefetched(wrapped(make(registry_of(kind))), given)
    parts = {kernel: estimate(program.folder, kernel, _of(kernel, values), generation) for kernel in program.kernels}
    return Row(
        generation,
        shape.name,
        direction,
        contender.name,
        variant,
        sum(part.microseconds for part in parts.values()),
        sum(part.bundles for part in parts.values()),
        sum(part.spills for part in parts.values()),
        max(program.vmem(kernel) for kernel in parts),
        sum(part.bytes for part in parts.values()),
        parts,
    )


def _of(kernel: str, values: dict[str, list[list[int]]]) -> list[list[int]]:
    """What a kernel was called with: the compiler has added a number to its name."""
    return next((found for name, found in values.items() if kernel.rpartition(".")[0] == name), [])
