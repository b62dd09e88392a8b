"""A kernel on a grid, and the arrays that it reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import attrs
import jax
import jax.numpy as jnp

if TYPE_CHECKING:  # importing Pallas would have JAX 0.11 and later compile all functions of the program again
    from jax.experimental import pallas as pl

#: The shape of a block. An axis with None has size 1, and the kernel does not see it.
Block = tuple[int | None, ...]
#: From the coordinates of a tile to the index of a block in an array.
IndexMap = Callable[..., tuple[Any, ...]]
#: From (grid indices..., scalars...) to the coordinates of a tile.
TileMap = Callable[..., tuple[Any, ...]]


@attrs.frozen(eq=False)
class Operand:
    """An array that a kernel reads, the shape of its blocks, and which of them a tile reads."""

    array: Any
    block: Block
    index_map: IndexMap

    def spec(self, tile_map: TileMap) -> pl.BlockSpec:
        from jax.experimental import pallas as pl

        return pl.BlockSpec(self.block, lambda *indices: self.index_map(*tile_map(*indices)))


@attrs.frozen(eq=False)
class Output:
    """An array that a kernel writes: its shape and dtype, the shape of its blocks, and which of them a tile writes."""

    shape: tuple[int, ...]
    dtype: Any
    block: Block
    index_map: IndexMap

    def spec(self, tile_map: TileMap) -> pl.BlockSpec:
        from jax.experimental import pallas as pl

        return pl.BlockSpec(self.block, lambda *indices: self.index_map(*tile_map(*indices)))


@attrs.frozen(eq=False)
class Launch:
    """A kernel on a grid.

    ``kernel(*scalars, refs)`` gets the scalars, which are in scalar memory before the first step, and the references to
    blocks and scratch by name. ``semantics`` has "parallel" for an axis of the grid whose steps are independent, and
    "arbitrary" for another one.
    """

    name: str
    kernel: Callable[..., None]
    #: The steps along each axis: a number, or an array of one that is known when the kernel starts.
    grid: tuple[Any, ...]
    semantics: tuple[str, ...]
    tile_map: TileMap
    operands: Mapping[str, Operand]
    outputs: Mapping[str, Output]
    scratch: Mapping[str, tuple[int, ...]]
    #: The tile that is written, where it is another one than is read: a block that is not read may be written.
    output_tile_map: TileMap | None = None

    def __call__(self, scalars: Sequence[jax.Array], interpret: Any, vmem: int | None) -> list[jax.Array]:
        """The outputs. ``interpret`` is that of ``pallas_call``, ``vmem`` the bytes of vector memory it may use."""
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import tpu as pltpu

        # Older versions of JAX have the second name.
        compiler_params: Any = getattr(pltpu, "CompilerParams", None) or getattr(pltpu, "TPUCompilerParams", None)
        names = (*self.operands, *self.outputs, *self.scratch)
        count = len(scalars)

        def kernel(*refs: Any) -> None:
            self.kernel(*refs[:count], SimpleNamespace(**dict(zip(names, refs[count:], strict=True))))

        operands, outputs = list(self.operands.values()), list(self.outputs.values())
        run = pl.pallas_call(
            kernel,
            [jax.ShapeDtypeStruct(output.shape, output.dtype) for output in outputs],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=count,
                grid=self.grid,
                in_specs=[operand.spec(self.tile_map) for operand in operands],
                out_specs=[output.spec(self.output_tile_map or self.tile_map) for output in outputs],
                scratch_shapes=[pltpu.VMEM(shape, jnp.dtype("float32")) for shape in self.scratch.values()],
            ),
            compiler_params=compiler_params(dimension_semantics=self.semantics, vmem_limit_bytes=vmem),
            interpret=interpret,
            name=self.name,
        )
        return list(run(*scalars, *(operand.array for operand in operands)))


def grid_indices(axes: int) -> Sequence[Any]:
    """The grid indices of a step. Call it at the top of a kernel: an interpreter has them outside of branches only."""
    from jax.experimental import pallas as pl

    return [pl.program_id(axis) for axis in range(axes)]
