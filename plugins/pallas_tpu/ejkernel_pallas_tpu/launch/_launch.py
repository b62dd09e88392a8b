"""A kernel on a grid, and the arrays that it reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp

from ._arrays import (
    UNCOPIED,
    Operand,
    Output,
    Scratch,
    Semaphores,
    TileMap,
    block_bytes,
    block_spec,
    check,
    least_bytes,
)
from ._generations import MIB, SMEM


@attrs.frozen(eq=False)
class Launch:
    """A kernel on a grid.

    ``kernel(*scalars, refs)`` gets the scalars, which are in scalar memory before the first step, and the references to
    blocks, whole arrays, scratch and semaphores by name. ``semantics`` has "parallel" for an axis of the grid whose
    steps are independent, and "arbitrary" for another one.
    """

    name: str
    kernel: Callable[..., None]
    #: The steps along each axis: a number, or an array of one that is known when the kernel starts.
    grid: tuple[Any, ...]
    semantics: tuple[str, ...]
    tile_map: TileMap
    operands: Mapping[str, Operand]
    outputs: Mapping[str, Output]
    scratch: Mapping[str, Scratch | Semaphores] = attrs.field(factory=dict)
    #: The tile that is written, where it is another one than is read: a block that is not read may be written.
    output_tile_map: TileMap | None = None
    #: From an output to the operand that it is, updated, as in ``Operation.aliases``. Whole arrays in main memory have
    #: one reference, under both names. Of blocks, the operand's is what was there, and the output's what will be.
    aliases: Mapping[str, str] = attrs.field(factory=dict)
    #: Whether XLA has to run it although nothing uses its results.
    has_side_effects: bool = False

    def __attrs_post_init__(self) -> None:
        names = (*self.operands, *self.outputs, *self.scratch)
        twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
        if twice:
            raise ValueError(f"{self.name}: {', '.join(twice)}: each operand, output and scratch has its own name")
        for name, array in self._arrays.items():
            check(f"{self.name}: {name}", array)
        self._check_aliases()

    def __call__(self, scalars: Sequence[jax.Array], interpret: Any, vmem: int | None) -> list[jax.Array]:
        """The outputs. ``interpret`` is that of ``pallas_call``, ``vmem`` the bytes of vector memory it may use."""
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import tpu as pltpu

        # Older versions of JAX have the second name.
        compiler_params: Any = getattr(pltpu, "CompilerParams", None) or getattr(pltpu, "TPUCompilerParams", None)
        if vmem is not None:
            self._check_fit(scalars, vmem)
        names = (*self.operands, *self.outputs, *self.scratch)
        count = len(scalars)
        in_place = {old: new for new, old in self.aliases.items() if self.outputs[new].memory in UNCOPIED}

        def kernel(*refs: Any) -> None:
            by_name = dict(zip(names, refs[count:], strict=True))
            # An interpreter has copies of the operands, which the kernel does not change.
            by_name |= {old: by_name[new] for old, new in in_place.items()}
            self.kernel(*refs[:count], SimpleNamespace(**by_name))

        operands, outputs = list(self.operands.values()), list(self.outputs.values())
        places = {name: place for place, name in enumerate(self.operands, count)}
        run = pl.pallas_call(
            kernel,
            [jax.ShapeDtypeStruct(output.shape, output.dtype) for output in outputs],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=count,
                grid=self.grid,
                in_specs=[block_spec(operand, self.tile_map) for operand in operands],
                out_specs=[block_spec(output, self.output_tile_map or self.tile_map) for output in outputs],
                scratch_shapes=[scratch.spec() for scratch in self.scratch.values()],
            ),
            input_output_aliases={
                places[self.aliases[name]]: place for place, name in enumerate(self.outputs) if name in self.aliases
            },
            compiler_params=compiler_params(
                dimension_semantics=self.semantics, vmem_limit_bytes=vmem, has_side_effects=self.has_side_effects
            ),
            interpret=interpret,
            name=self.name,
        )
        return list(run(*scalars, *(operand.array for operand in operands)))

    @property
    def _arrays(self) -> dict[str, Operand | Output]:
        return {**self.operands, **self.outputs}

    def _check_aliases(self) -> None:
        for output, operand in self.aliases.items():
            prefix = f"{self.name}: aliases: {output}: {operand}"
            if output not in self.outputs or operand not in self.operands:
                raise ValueError(f"{prefix}: takes an output, and the operand that it updates")
            new, old = self.outputs[output], self.operands[operand]
            described = [f"{jnp.dtype(array.dtype)}{list(array.shape)} in {array.memory!r}" for array in (new, old)]
            if described[0] != described[1]:
                raise ValueError(f"{prefix}: {output} is {described[0]}, and {operand} {described[1]}")
        updated = list(self.aliases.values())
        if len({*updated}) < len(updated):
            raise ValueError(f"{self.name}: aliases: an operand becomes one output; got {dict(self.aliases)}")

    def _check_fit(self, scalars: Sequence[jax.Array], vmem: int) -> None:
        """Raise where blocks and scratch alone take more memory than there is."""
        blocks = [(array.memory, name, block_bytes(array)) for name, array in self._arrays.items()]
        scratch = [
            (part.memory, name, least_bytes(part.shape, part.dtype))
            for name, part in self.scratch.items()
            if isinstance(part, Scratch)
        ]
        prefetched = [("smem", f"scalars {place}", array.nbytes) for place, array in enumerate(scalars)]
        for memory, limit in (("vmem", vmem), ("smem", SMEM)):
            sizes = {name: size for where, name, size in (*blocks, *scratch, *prefetched) if where == memory}
            total = sum(sizes.values())
            if total > limit:
                largest = max(sizes, key=lambda name: sizes[name])
                raise ValueError(
                    f"{self.name}: blocks and scratch take {total / MIB:.1f} MiB of {memory!r}, which has "
                    f"{limit / MIB:.1f}; the largest is {largest}, with {sizes[largest] / MIB:.1f}"
                )


def grid_indices(axes: int) -> Sequence[Any]:
    """The grid indices of a step. Call it at the top of a kernel: an interpreter has them outside of branches only."""
    from jax.experimental import pallas as pl

    return [pl.program_id(axis) for axis in range(axes)]
