"""How the rows of a normalization are divided: into blocks in vector memory, and these into groups in registers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import jax
import jax.numpy as jnp

from ejkernel_pallas_tpu.launch import Operand, Output, Scratch

SUBLANES, LANES = 8, 128
#: Entries of a group that a step has at a time: as many as all 64 registers hold, in float32.
IN_REGISTERS = 64 * SUBLANES * LANES
#: A group has at least so many times the rows of a register: their sums over lanes wait for each other otherwise.
DEPTH = 4


@attrs.frozen
class Blocks:
    """Rows of ``dim`` entries in blocks of ``block`` rows, which a kernel works on in groups of ``group`` rows."""

    rows: int
    dim: int
    block: int
    group: int
    #: The entries of a row that are in registers at a time.
    chunk: int

    @classmethod
    def of(cls, rows: int, dim: int, block: int, multiple: int) -> Blocks:
        """At most ``block`` rows a block; groups are multiples of ``multiple`` rows where there are as many.

        >>> Blocks.of(1000, 4096, 256, 16)
        Blocks(rows=1000, dim=4096, block=256, group=16, chunk=2048)
        >>> Blocks.of(5, 64, 256, 16)
        Blocks(rows=5, dim=64, block=5, group=5, chunk=6528)
        """
        block = min(block, rows if rows < multiple else power_of_two(rows))
        group = min(block, max(DEPTH * multiple, power_of_two(IN_REGISTERS // lanes(dim))))
        return cls(rows, dim, block, group, IN_REGISTERS // group // LANES * LANES)

    @property
    def count(self) -> int:
        return -(-self.rows // self.block)

    @property
    def depth(self) -> int:
        """The rows of a sum over rows: as many as a register has, which are added up outside of the kernel."""
        return SUBLANES if self.group % SUBLANES == 0 else self.group

    # -- inside a kernel -----------------------------------------------------------------------------------------

    def for_each_group(self, work: Callable[[Any], None]) -> None:
        """Call ``work`` with the rows of each group of a block."""
        from jax.experimental import pallas as pl

        count = self.block // self.group
        if count == 1:
            work(pl.ds(0, self.group))
            return

        def step(i: Any, _: None) -> None:
            work(pl.ds(pl.multiple_of(i * self.group, self.group), self.group))

        jax.lax.fori_loop(0, count, step, None)

    def over_chunks(self, step: Callable[[Any, Any], Any], carry: Any = None) -> Any:
        """Fold ``step(columns, carry)`` over the chunks of a row."""
        from jax.experimental import pallas as pl

        whole, rest = divmod(self.dim, self.chunk)
        if whole == 1:
            carry = step(pl.ds(0, self.chunk), carry)
        elif whole:

            def chunk(j: Any, carry: Any) -> Any:
                return step(pl.ds(pl.multiple_of(j * self.chunk, LANES), self.chunk), carry)

            carry = jax.lax.fori_loop(0, whole, chunk, carry)
        return step(pl.ds(whole * self.chunk, rest), carry) if rest else carry

    def lane_zeros(self) -> jax.Array:
        """What ``add_lanes`` and ``max_lanes`` start from."""
        return jnp.zeros((self.group, LANES), jnp.float32)

    # -- operands and outputs ------------------------------------------------------------------------------------

    def by_rows(self, array: jax.Array) -> Operand:
        """An array of rows, whatever its leading axes are."""
        width = array.shape[-1]
        return Operand(array.reshape(self.rows, width), (self.block, width), lambda i: (i, 0))

    def output_by_rows(self, dtype: Any, width: int | None = None) -> Output:
        width = self.dim if width is None else width
        return Output((self.rows, width), dtype, (self.block, width), lambda i: (i, 0))

    def of_all_rows(self, array: jax.Array, offset: float = 0.0) -> Operand:
        """An array (dim,) that all rows share, in float32: a kernel would convert it anew for each group of rows."""
        wide = array.astype(jnp.float32) + offset
        return Operand(wide.reshape(1, self.dim), (1, self.dim), lambda i: (0, 0))

    def weight(self, a: Mapping[str, Any]) -> dict[str, Operand]:
        """The weight with its offset, if the call has one."""
        return {} if a["weight"] is None else {"weight": self.of_all_rows(a["weight"], a["weight_offset"])}

    def by_statistics(self, array: jax.Array) -> Operand:
        """One number for each row, side by side in the lanes: alone in a row it would take 512 bytes."""
        padded = jnp.pad(array.reshape(self.rows), (0, self.count * self.block - self.rows))
        return Operand(padded.reshape(self.count, 1, self.block), (None, 1, self.block), lambda i: (i, 0, 0))

    def output_of_statistics(self) -> Output:
        return Output((self.count, 1, self.block), jnp.float32, (None, 1, self.block), lambda i: (i, 0, 0))

    def statistics(self, output: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """The numbers that ``output_of_statistics`` has, in the shape that they have in the call."""
        return output.reshape(-1)[: self.rows].reshape(shape)

    @property
    def column(self) -> Scratch:
        """Scratch memory for one number for each row of a block, the same in all lanes."""
        return Scratch((self.block, LANES))


def lanes(dim: int) -> int:
    """A dim rounded up to whole registers."""
    return -(-dim // LANES) * LANES


def power_of_two(number: int) -> int:
    """The largest power of two up to a number.

    >>> power_of_two(1), power_of_two(100), power_of_two(128)
    (1, 64, 128)
    """
    return 1 << max(number, 1).bit_length() - 1


def rows_of(array: Any) -> int:
    return math.prod(array.shape[:-1])


# -- sums over rows, and numbers of rows ---------------------------------------------------------------------------


def add_lanes(sums: jax.Array, values: jax.Array) -> jax.Array:
    """Add values (rows, n) to sums (rows, 128), by lanes: no lane waits for another before the row ends."""
    return _fold_lanes(sums, values, jnp.add, jnp.sum, 0.0)


def max_lanes(greatest: jax.Array, values: jax.Array) -> jax.Array:
    """The maximum by lanes of values (rows, n) and of ``greatest`` (rows, 128), both at least 0."""
    return _fold_lanes(greatest, values, jnp.maximum, jnp.max, 0.0)


def _fold_lanes(
    carry: jax.Array, values: jax.Array, pair: Callable[..., Any], reduce: Callable[..., Any], identity: float
) -> jax.Array:
    whole = values.shape[1] // LANES * LANES
    for start in range(0, whole, LANES):
        carry = pair(carry, values[:, start : start + LANES])
    if whole < values.shape[1]:
        rest = reduce(values[:, whole:], axis=1, keepdims=True)
        first = jax.lax.broadcasted_iota(jnp.int32, carry.shape, 1) == 0
        carry = pair(carry, jnp.where(first, rest, identity))
    return carry


def into_lanes(blocks: Blocks, row: Any, column: Any) -> None:
    """Write a column, one number for each row of a block in all of its lanes, into a row."""
    for rows in _squares(blocks):
        row[:, rows] = jnp.where(_diagonal(rows.size), column[rows], 0.0).sum(0, keepdims=True)[:, : rows.size]


def from_lanes(blocks: Blocks, row: Any, column: Any) -> None:
    """Write a row, one number for each row of a block, into all lanes of a column."""
    for rows in _squares(blocks):
        diagonal = _diagonal(rows.size)[:, : rows.size]
        numbers = jnp.where(diagonal, row[:, rows], 0.0).sum(1, keepdims=True)
        column[rows] = jnp.broadcast_to(numbers, (rows.size, LANES))


def _squares(blocks: Blocks) -> list[Any]:
    from jax.experimental import pallas as pl

    return [pl.ds(start, min(LANES, blocks.block)) for start in range(0, blocks.block, LANES)]


def _diagonal(rows: int) -> jax.Array:
    """Where a matrix (rows, 128) has its diagonal."""
    row, lane = (jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), axis) for axis in (0, 1))
    return row == lane
