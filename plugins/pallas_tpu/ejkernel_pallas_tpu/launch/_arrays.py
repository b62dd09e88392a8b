"""The arrays that a kernel reads and writes, the memory that it works in, and in which memory each of them is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

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
#: "vmem" and "smem" are the vector and the scalar memory of a core, into which blocks are copied. An array in "hbm" is
#: in main memory, and one in "any" wherever XLA has put it: they stay there, and a kernel copies parts of them itself.
Memory = Literal["vmem", "smem", "any", "hbm"]
UNCOPIED = ("any", "hbm")
MEMORIES_OF_SCRATCH = ("vmem", "smem")
MEMORIES = (*MEMORIES_OF_SCRATCH, *UNCOPIED)
LANES = 128


def _check_memory(array: Any, _: Any, value: Any) -> None:
    memories = MEMORIES_OF_SCRATCH if isinstance(array, Scratch) else MEMORIES
    if value not in memories:
        raise ValueError(f"memory: {type(array).__name__} takes {', '.join(map(repr, memories))}; got {value!r}")


@attrs.frozen(eq=False)
class Operand:
    """An array that a kernel reads: its blocks, and which of them a tile reads. Without both it is whole."""

    array: Any
    block: Block | None = None
    index_map: IndexMap | None = None
    memory: Memory = attrs.field(default="vmem", validator=_check_memory)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    @property
    def dtype(self) -> Any:
        return self.array.dtype


@attrs.frozen(eq=False)
class Output:
    """An array that a kernel writes: its shape and dtype, the shape of its blocks, and which of them a tile writes.
    Without both it is whole.
    """

    shape: tuple[int, ...]
    dtype: Any
    block: Block | None = None
    index_map: IndexMap | None = None
    memory: Memory = attrs.field(default="vmem", validator=_check_memory)


def check(name: str, array: Operand | Output) -> None:
    """Raise for what does not go together; ``name`` is that of the array."""
    if (array.block is None) != (array.index_map is None):
        raise ValueError(f"{name}: an array in blocks has block and index_map; one that is whole has neither")
    if array.block is not None and array.memory in UNCOPIED:
        raise ValueError(f"{name}: an array in {array.memory!r} has no blocks: the kernel copies parts of it itself")


def block_spec(array: Operand | Output, tile_map: TileMap) -> pl.BlockSpec:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    # Vector memory is Pallas' default.
    memory = {"vmem": None, "smem": pltpu.SMEM, "any": pl.ANY, "hbm": pltpu.HBM}[array.memory]
    index_map = array.index_map
    if index_map is None:
        return pl.BlockSpec(memory_space=memory)
    return pl.BlockSpec(array.block, lambda *indices: index_map(*tile_map(*indices)), memory_space=memory)


def block_bytes(array: Operand | Output) -> int:
    """At least how many bytes a block takes, or the array if it is whole."""
    block = array.shape if array.block is None else tuple(size or 1 for size in array.block)
    return least_bytes(block, array.dtype)


@attrs.frozen
class Scratch:
    """Memory that a kernel works in. It keeps its content from one step of the grid to the next."""

    shape: tuple[int, ...]
    dtype: Any = "float32"
    memory: Literal["vmem", "smem"] = attrs.field(default="vmem", validator=_check_memory)

    def spec(self) -> Any:
        from jax.experimental.pallas import tpu as pltpu

        memory: Any = {"vmem": pltpu.VMEM, "smem": pltpu.SMEM}[self.memory]
        return memory(self.shape, jnp.dtype(self.dtype))


@attrs.frozen
class Semaphores:
    """Semaphores that copies signal and that a kernel waits for: an array of this shape, by default of one."""

    shape: tuple[int, ...] = ()

    def spec(self) -> Any:
        from jax.experimental.pallas import tpu as pltpu

        return pltpu.SemaphoreType.DMA(self.shape)


def least_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    """At least how many bytes an array takes in vector memory, where its last axis is a multiple of 128 lanes.

    >>> least_bytes((16, 100), "float32"), least_bytes((16, 100), "int8")
    (8192, 2048)
    """
    *rows, columns = shape or (1,)
    return math.prod(rows) * -(-columns // LANES) * LANES * int(jax.dtypes.itemsize_bits(jnp.dtype(dtype))) // 8
