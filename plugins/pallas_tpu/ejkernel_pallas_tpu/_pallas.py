"""Launching a kernel, with what differs between versions of JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel_pallas_tpu._operands import At, Block, Operand, arrays, specs
from ejkernel_pallas_tpu._problem import Problem

#: Older versions have the second name.
CompilerParams: Any = getattr(pltpu, "CompilerParams", None) or getattr(pltpu, "TPUCompilerParams", None)


@attrs.frozen(eq=False)
class Output:
    """What a kernel writes: an array's shape and dtype, and its blocks as an operand has them."""

    shape: tuple[int, ...]
    dtype: Any
    block: Block
    place: Callable[[Any, Any, Any, Any], tuple[Any, ...]]

    def spec(self, at: At) -> pl.BlockSpec:
        return pl.BlockSpec(self.block, lambda *ids: self.place(*at(*ids)))


def output_by_queries(p: Problem, dim: int) -> Output:
    """(batch, heads, length, dim), a block of queries at a time."""
    return Output(
        (p.batch, p.heads, p.q_count * p.q_block, dim),
        jnp.dtype(p.dtype),
        (None, None, p.q_block, dim),
        lambda b, h, i, j: (b, h, i, 0),
    )


@attrs.frozen(eq=False)
class Launch:
    """A kernel on a grid.

    ``kernel`` is called with the table and the seed, which are in scalar memory before the first step, and with all
    else by name. ``semantics`` says of each axis of the grid whether its steps are independent.
    """

    name: str
    kernel: Callable[..., None]
    grid: tuple[int, ...]
    semantics: tuple[str, ...]
    at: At
    operands: Mapping[str, Operand]
    outputs: Mapping[str, Output]
    scratch: Mapping[str, tuple[int, ...]]
    #: Where outputs are in the grid, if not where operands are: what is not fetched may have to be written.
    output_at: At | None = None

    def __call__(self, table: jax.Array, seed: jax.Array, interpret: Any, vmem: int | None) -> list[jax.Array]:
        """``interpret`` is Pallas' own word: False, True, or parameters of its TPU interpreter."""
        names = (*self.operands, *self.outputs, *self.scratch)

        def named(table: Any, seed: Any, *refs: Any) -> None:
            self.kernel(table, seed, SimpleNamespace(**dict(zip(names, refs, strict=True))))

        called = pl.pallas_call(
            named,
            [_shaped(output, next(iter(self.operands.values())).array) for output in self.outputs.values()],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=self.grid,
                in_specs=specs(self.operands, self.at),
                out_specs=[output.spec(self.output_at or self.at) for output in self.outputs.values()],
                scratch_shapes=[pltpu.VMEM(shape, "float32") for shape in self.scratch.values()],
            ),
            compiler_params=CompilerParams(dimension_semantics=self.semantics, vmem_limit_bytes=vmem),
            interpret=interpret,
            name=self.name,
        )
        return list(called(table, seed, *arrays(self.operands)))


def _shaped(output: Output, operand: Any) -> jax.ShapeDtypeStruct:
    """What comes out, varying over the mesh axes that an operand varies over: ``shard_map`` asks for a word of it
    (``aval.mat``: seen on 0.10.2, 0.11.2, 0.12.0.1).
    """
    return jax.ShapeDtypeStruct(output.shape, output.dtype, manual_axis_type=jax.typeof(operand).mat)


def ids(axes: int) -> Sequence[Any]:
    """Where in the grid a step is. Asked for at the top of a kernel: inside a branch an interpreter does not know."""
    return [pl.program_id(axis) for axis in range(axes)]
