"""Launching a kernel, with what differs between versions of JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import attrs
import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

#: The shape of a block; None where it has one of an axis, and the kernel does not see the axis.
Block = tuple[int | None, ...]
#: The coordinates of a tile to the place of a block in an array.
Place = Callable[..., tuple[Any, ...]]
#: (indices of the grid..., scalars...) to the coordinates of a tile.
At = Callable[..., tuple[Any, ...]]

#: Older versions have the second name.
CompilerParams: Any = getattr(pltpu, "CompilerParams", None) or getattr(pltpu, "TPUCompilerParams", None)


@attrs.frozen(eq=False)
class Operand:
    """An array that a kernel reads, the shape of its blocks, and which block a tile has."""

    array: Any
    block: Block
    place: Place

    def spec(self, at: At) -> pl.BlockSpec:
        return pl.BlockSpec(self.block, lambda *ids: self.place(*at(*ids)))


@attrs.frozen(eq=False)
class Output:
    """An array that a kernel writes: its shape and dtype, the shape of its blocks, and which block a tile has."""

    shape: tuple[int, ...]
    dtype: Any
    block: Block
    place: Place

    def spec(self, at: At) -> pl.BlockSpec:
        return pl.BlockSpec(self.block, lambda *ids: self.place(*at(*ids)))


@attrs.frozen(eq=False)
class Launch:
    """A kernel on a grid.

    ``kernel(*scalars, refs)`` gets the scalars, which are in scalar memory before the first step, and everything else
    by name. ``semantics`` says of each axis of the grid whether its steps are independent.
    """

    name: str
    kernel: Callable[..., None]
    grid: tuple[int, ...]
    semantics: tuple[str, ...]
    at: At
    operands: Mapping[str, Operand]
    outputs: Mapping[str, Output]
    scratch: Mapping[str, tuple[int, ...]]
    #: The tile that is written, where it is not the one that is read: what is not fetched may have to be written.
    output_at: At | None = None

    def __call__(self, scalars: Sequence[jax.Array], interpret: Any, vmem: int | None) -> list[jax.Array]:
        """``interpret`` is Pallas' own word: False, True, or parameters of its TPU interpreter."""
        names = (*self.operands, *self.outputs, *self.scratch)
        count = len(scalars)

        def kernel(*refs: Any) -> None:
            self.kernel(*refs[:count], SimpleNamespace(**dict(zip(names, refs[count:], strict=True))))

        operands, outputs = list(self.operands.values()), list(self.outputs.values())
        run = pl.pallas_call(
            kernel,
            [_result(output, operands[0].array) for output in outputs],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=count,
                grid=self.grid,
                in_specs=[operand.spec(self.at) for operand in operands],
                out_specs=[output.spec(self.output_at or self.at) for output in outputs],
                scratch_shapes=[pltpu.VMEM(shape, "float32") for shape in self.scratch.values()],
            ),
            compiler_params=CompilerParams(dimension_semantics=self.semantics, vmem_limit_bytes=vmem),
            interpret=interpret,
            name=self.name,
        )
        return list(run(*scalars, *(operand.array for operand in operands)))


def _result(output: Output, operand: Any) -> jax.ShapeDtypeStruct:
    """The type of an output, varying over the mesh axes that an operand varies over: inside ``shard_map`` it has to be
    told (``aval.mat``: seen on 0.10.2, 0.11.2, 0.12.0.1).
    """
    return jax.ShapeDtypeStruct(output.shape, output.dtype, manual_axis_type=jax.typeof(operand).mat)


def ids(axes: int) -> Sequence[Any]:
    """Where in the grid a step is. Read at the top of a kernel: inside a branch an interpreter does not know it."""
    return [pl.program_id(axis) for axis in range(axes)]
