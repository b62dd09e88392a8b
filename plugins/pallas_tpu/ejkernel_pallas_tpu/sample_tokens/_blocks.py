"""How logits are divided: into blocks of rows in vector memory, and these into columns in registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import jax
import jax.numpy as jnp

from ejkernel_pallas_tpu.launch import Operand, Output, Scratch

SUBLANES, LANES = 8, 128
#: Words that a step has at a time: as many as 16 of the 64 registers hold, because the noise of a word takes some.
IN_REGISTERS = 16 * SUBLANES * LANES


@attrs.frozen
class Blocks:
    """Rows of ``vocabulary`` words in blocks of ``block`` rows, which a kernel works on in steps of ``width`` words."""

    rows: int
    vocabulary: int
    block: int

    @classmethod
    def of(cls, rows: int, vocabulary: int, block: int) -> Blocks:
        """At most ``block`` rows a block.

        >>> blocks = Blocks.of(100, 3000, 16)
        >>> blocks.count, blocks.width, blocks.padded
        (7, 1024, 3072)
        """
        return cls(rows, vocabulary, min(block, rows))

    @property
    def count(self) -> int:
        return -(-self.rows // self.block)

    @property
    def sublanes(self) -> int:
        """The rows of whole registers that a block takes."""
        return -(-self.block // SUBLANES) * SUBLANES

    @property
    def width(self) -> int:
        """A power of two of whole registers."""
        return max(LANES, IN_REGISTERS // (1 << (self.sublanes - 1).bit_length()))

    @property
    def padded(self) -> int:
        """The words of a row in scratch memory, where each step is whole."""
        return -(-self.vocabulary // self.width) * self.width

    @property
    def steps(self) -> int:
        return self.padded // self.width

    # -- inside a kernel -----------------------------------------------------------------------------------------

    def over_words(self, step: Callable[[Any, Any], Any], carry: Any = None, steps: Any = None) -> Any:
        """Fold ``step(columns, carry)`` over the words of scratch memory, or over the first steps of them."""
        return self._fold(step, carry, self.steps if steps is None else steps)

    def over_logits(self, step: Callable[[Any, Any], Any], carry: Any = None) -> Any:
        """The same over the logits, of which the last step may have fewer."""
        from jax.experimental import pallas as pl

        whole, rest = divmod(self.vocabulary, self.width)
        carry = self._fold(step, carry, whole)
        return step(pl.ds(whole * self.width, rest), carry) if rest else carry

    def _fold(self, step: Callable[[Any, Any], Any], carry: Any, count: Any) -> Any:
        from jax.experimental import pallas as pl

        if isinstance(count, int) and count < 2:
            return step(pl.ds(0, self.width), carry) if count else carry

        def columns(i: Any, carry: Any) -> Any:
            return step(pl.ds(pl.multiple_of(i * self.width, LANES), self.width), carry)

        return jax.lax.fori_loop(0, count, columns, carry)

    def full(self, value: float, dtype: Any = jnp.float32) -> jax.Array:
        """A number for each row and lane."""
        return jnp.full((self.block, LANES), value, dtype)

    # -- operands, outputs and scratch ---------------------------------------------------------------------------

    def logits(self, array: jax.Array) -> Operand:
        return Operand(array, (self.block, self.vocabulary), lambda i: (i, 0))

    def of_rows(self, array: jax.Array) -> Operand:
        """A number for each row, the same in all lanes."""
        return Operand(jnp.broadcast_to(array[:, None], (self.rows, LANES)), (self.block, LANES), lambda i: (i, 0))

    def output_of_rows(self, dtype: Any) -> Output:
        return Output((self.rows, LANES), dtype, (self.block, LANES), lambda i: (i, 0))

    def words(self, dtype: Any) -> Scratch:
        return Scratch((self.block, self.padded), dtype)

    @property
    def numbers(self) -> Scratch:
        return Scratch((self.block, LANES))


# -- numbers by lanes ------------------------------------------------------------------------------------------------


def across(numbers: jax.Array, width: int) -> jax.Array:
    """Numbers of rows and lanes, (rows, 128), for so many columns."""
    return jnp.concatenate([numbers] * (width // LANES), 1)


def by_lanes(pair: Callable[..., Any], *values: jax.Array) -> tuple[jax.Array, ...]:
    """(rows, 128) each: columns put together by ``pair``, which has the earlier ones first. No lane waits for another,
    and no sum for more than one before it.
    """
    while values[0].shape[1] > LANES:
        half = values[0].shape[1] // 2
        values = pair([x[:, :half] for x in values], [x[:, half:] for x in values])
    return tuple(values)


def add_by_lanes(sums: jax.Array, values: jax.Array) -> jax.Array:
    (folded,) = by_lanes(lambda a, b: [a[0] + b[0]], values)
    return sums + folded


def max_by_lanes(largest: jax.Array, values: jax.Array) -> jax.Array:
    (folded,) = by_lanes(lambda a, b: [jnp.maximum(a[0], b[0])], values)
    return jnp.maximum(largest, folded)


def sum_of_rows(sums: jax.Array) -> jax.Array:
    return jnp.broadcast_to(sums.sum(1, keepdims=True), sums.shape)


def max_of_rows(largest: jax.Array) -> jax.Array:
    return jnp.broadcast_to(largest.max(1, keepdims=True), largest.shape)
