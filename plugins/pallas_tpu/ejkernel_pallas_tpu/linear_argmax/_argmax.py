"""The column of the largest logit of rows, of logits that arrive tile by tile, in each lane apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from jax import lax

from ejkernel_pallas_tpu.fused_linear_cross_entropy._logits import Piece
from ejkernel_pallas_tpu.grouped_matmul._tiles import LANES
from ejkernel_pallas_tpu.launch import Scratch


@attrs.frozen
class Argmax:
    """The lowest column of the largest logit. NaN is the largest of all, as in ``jax.numpy.argmax``."""

    results: int = 1

    def scratch(self, rows: int) -> Mapping[str, Scratch]:
        return {"top": Scratch((rows, LANES)), "place": Scratch((rows, LANES))}

    def start(self, refs: Any) -> None:
        shape = refs.top.shape
        refs.top[...] = jnp.full(shape, -jnp.inf, jnp.float32)
        refs.place[...] = lax.broadcasted_iota(jnp.int32, shape, 1).astype(jnp.float32)

    def add(self, refs: Any, rows: Any, pieces: Sequence[Piece], is_first: Any) -> None:
        top, place = refs.top[rows, :], refs.place[rows, :]
        for piece in pieces:
            # Not greater or equal: of equal ones, the first remains. Nothing is greater than NaN.
            is_larger = (piece.logits > top) | ((piece.logits != piece.logits) & (top == top))
            top = jnp.where(is_larger, piece.logits, top)
            place = jnp.where(is_larger, piece.columns.astype(jnp.float32), place)
        refs.top[rows, :], refs.place[rows, :] = top, place

    def finish(self, refs: Any, rows: Any) -> Sequence[jax.Array]:
        top, place = refs.top[rows, :], refs.place[rows, :]
        largest = top.max(1, keepdims=True)  # NaN, if there is one
        is_largest = (top == largest) | (top != top)
        return [jnp.where(is_largest, place, jnp.inf).min(1, keepdims=True)]
