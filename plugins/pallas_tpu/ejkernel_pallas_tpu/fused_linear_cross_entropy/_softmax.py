"""The statistics of a softmax of logits that arrive tile by tile, in each lane apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import attrs
import jax
import jax.numpy as jnp

from ejkernel_pallas_tpu.fused_linear_cross_entropy._logits import Piece
from ejkernel_pallas_tpu.grouped_matmul._tiles import LANES
from ejkernel_pallas_tpu.launch import Scratch
from ejkernel_pallas_tpu.online_softmax.statistics import LOWEST


@attrs.frozen
class Softmax:
    """Of each row the largest logit, the sum of the exponentials relative to it, and the logit of its label; then what
    the options add. Logits are in units of e: in those of log2 large ones would be rounded before their differences.
    """

    #: The mean of the logits, relative to the largest one and negated.
    has_mean: bool = False
    #: The sum of exponentials times logits, both relative to the largest one.
    has_products: bool = False
    vocab: int = 1

    @property
    def results(self) -> int:
        return 3 + self.has_mean + self.has_products

    def scratch(self, rows: int) -> Mapping[str, Scratch]:
        names = ["top", "total", "own", *["origin", "below"] * self.has_mean, *["products"] * self.has_products]
        return {name: Scratch((rows, LANES)) for name in names}

    def start(self, refs: Any) -> None:
        shape = refs.top.shape
        refs.top[...] = jnp.full(shape, LOWEST, jnp.float32)
        for name in ("total", "own", *["below"] * self.has_mean, *["products"] * self.has_products):
            getattr(refs, name)[...] = jnp.zeros(shape, jnp.float32)

    def add(self, refs: Any, rows: Any, pieces: Sequence[Piece], is_first: Any) -> None:
        old_top, label = refs.top[rows, :], refs.label_column[rows, :]
        # A finite one: the difference of infinities would be NaN.
        top = jnp.minimum(reduce(jnp.maximum, [piece.logits for piece in pieces], old_top), -LOWEST)
        step = jnp.maximum(old_top - top, LOWEST)
        factor = jnp.exp(step)
        own, old_total = refs.own[rows, :], refs.total[rows, :]
        total = old_total * factor
        products = factor * (refs.products[rows, :] + old_total * step) if self.has_products else None
        for piece in pieces:
            difference = piece.logits - top
            weights = jnp.exp(difference)
            total += weights
            own += jnp.where(piece.columns == label, piece.logits, 0.0)
            if products is not None:  # a word that cannot be adds nothing
                products += weights * jnp.where(piece.logits == -jnp.inf, 0.0, difference)
        refs.top[rows, :], refs.total[rows, :], refs.own[rows, :] = top, total, own
        if products is not None:
            refs.products[rows, :] = products
        if self.has_mean:
            self._add_to_mean(refs, rows, pieces, top, is_first)

    def _add_to_mean(self, refs: Any, rows: Any, pieces: Sequence[Piece], top: jax.Array, is_first: Any) -> None:
        """Logits are added up relative to one of the row: the sum of large ones has too few digits."""
        row_top = jnp.maximum(top.max(1, keepdims=True), LOWEST)
        origin = jnp.where(is_first, jnp.broadcast_to(row_top, top.shape), refs.origin[rows, :])
        below = refs.below[rows, :]
        for piece in pieces:
            part = origin - piece.logits
            below += part if piece.is_column is None else jnp.where(piece.is_column, part, 0.0)
        refs.origin[rows, :], refs.below[rows, :] = origin, below

    def finish(self, refs: Any, rows: Any) -> Sequence[jax.Array]:
        lane_top, lane_total = refs.top[rows, :], refs.total[rows, :]
        top = lane_top.max(1, keepdims=True)
        step = jnp.maximum(lane_top - top, LOWEST)
        factor = jnp.exp(step)
        results = [top, (lane_total * factor).sum(1, keepdims=True), refs.own[rows, :].sum(1, keepdims=True)]
        if self.has_mean:
            below = refs.below[rows, :].sum(1, keepdims=True) * (1 / self.vocab)
            results.append(top - refs.origin[rows, :][:, :1] + below)
        if self.has_products:
            results.append((factor * (refs.products[rows, :] + lane_total * step)).sum(1, keepdims=True))
        return results
