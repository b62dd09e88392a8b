"""Calls of ``sample_tokens`` that are measured, and which tokens a call may draw, in float64 from the same logits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_core import Example
from ejkernel_core import registry as default_registry
from ejkernel_ops.sample_tokens.arguments import key_words
from ejkernel_ops.sample_tokens.noise import gumbel

from ._calls import Inputs, Results, options_of
from .suite import OURS

OP = "sample_tokens"
#: By the words in the name of a call.
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "k50": {"top_k": 50},
    "p0.9": {"top_p": 0.9},
    "k50-p0.9": {"top_k": 50, "top_p": 0.9},
    "m0.05": {"min_p": 0.05},
}
#: So far the probability up to a token, relative to all, and two logits, may be off by rounding.
SHARE_ERROR, LOGIT_ERROR = 1e-4, 1e-5
#: So far the sum of a logit and its noise may be off, where another token than the reference's is drawn.
SUM_ERROR = 1e-4
#: How many rows of a call are sorted for the check, and from how many on places are looked at.
CHECKED_ROWS, FEWEST_ROWS = 64, 16
#: The most standard deviations of the mean place.
DEVIATIONS = 5.0


@attrs.frozen
class SamplingCall:
    """Logits as of a model, and the filters of all rows."""

    rows: int
    vocabulary: int
    filters: str

    @property
    def name(self) -> str:
        """One word of a command line, such as ``64x128256-k50-p0.9``."""
        return f"{self.rows}x{self.vocabulary}-{self.filters}"

    def example(self) -> Example:
        return Example(self.name, OP, self.arguments, "float32")

    def arguments(self, draw: int) -> dict[str, Any]:
        numbers = jax.random.split(jax.random.key(draw), 2)
        logits = 4 * jax.random.normal(numbers[0], (self.rows, self.vocabulary), jnp.float32)
        return {"logits": logits, "key": numbers[1], **FILTERS[self.filters]}


def check(example: Example, inputs: Inputs, contender: str, results: Results, expected: Results) -> Iterable[str]:
    """What is wrong with the tokens of a contender. Ours have to be the reference's."""
    tokens, logits = np.asarray(results[0]).astype(np.int64).reshape(-1), inputs.arrays["logits"]
    if tokens.shape != (logits.shape[0],) or not ((tokens >= 0) & (tokens < logits.shape[1])).all():
        yield "its tokens are not one word for each row"
        return
    rows = _rows_of(example, inputs)
    yield from rows.faults(tokens[: len(rows.logits)])
    if contender == OURS or contender in default_registry.backends(OP):
        yield from _other_tokens(inputs, tokens, np.asarray(expected[0]))


@attrs.frozen(eq=False)
class Rows:
    """The first rows of the logits, and the least of each that may be drawn."""

    logits: np.ndarray
    least: np.ndarray

    def faults(self, tokens: np.ndarray) -> Iterator[str]:
        """Tokens that no filter keeps, or that are the best or the worst too often."""
        own = np.take_along_axis(self.logits, tokens[:, None], 1)
        if outside := int((own < self.least).sum()):
            yield f"{outside} of {len(tokens)} tokens are not among those that the filters keep"
        place = self._places(own) - 0.5
        most = DEVIATIONS * (12 * len(tokens)) ** -0.5
        if len(tokens) >= FEWEST_ROWS and not abs(place.mean()) <= most:
            yield (
                f"its tokens are not drawn by their probabilities: their mean place is {place.mean() + 0.5:.2f}, "
                f"and not from {0.5 - most:.2f} to {0.5 + most:.2f}"
            )

    def _places(self, own: np.ndarray) -> np.ndarray:
        """The probability of all better tokens, and half of the token's own: from 0 to 1, with a mean of 0.5."""
        weights = np.exp(self.logits - self.logits.max(1, keepdims=True)) * (self.logits >= self.least)
        better, equal = weights * (self.logits > own), weights * (self.logits == own)
        places: np.ndarray = (better.sum(1) + equal.sum(1) / 2) / weights.sum(1)
        return places


@lru_cache(maxsize=1)
def _rows_of(example: Example, inputs: Inputs) -> Rows:
    """Sorted once for all contenders."""
    logits = np.asarray(inputs.arrays["logits"][:CHECKED_ROWS], np.float64)
    return Rows(logits, least_kept(logits, **options_of(example)))


def least_kept(logits: np.ndarray, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray:
    """(rows, 1): the least logit of each row that all filters keep, but for rounding.

    >>> logits = np.log([[0.1, 0.4, 0.2, 0.3]])
    >>> for filters in ({}, {"top_k": 2}, {"top_p": 0.6}, {"top_k": 3, "top_p": 0.5}, {"min_p": 0.4}):
    ...     (logits >= least_kept(logits, **filters)).astype(int).tolist()
    [[1, 1, 1, 1]]
    [[0, 1, 0, 1]]
    [[0, 1, 0, 1]]
    [[0, 1, 0, 1]]
    [[0, 1, 1, 1]]
    """
    ordered = -np.sort(-logits, 1)
    weights = np.exp(ordered - ordered[:, :1])
    if 0 < top_k < logits.shape[1]:
        weights = np.where(ordered >= ordered[:, top_k - 1 : top_k], weights, 0)
    before = np.cumsum(weights, 1) - weights
    share = np.inf if top_p >= 1 else top_p + SHARE_ERROR
    is_kept = (weights > 0) & (before < share * weights.sum(1, keepdims=True)) & (weights >= min_p)
    least = np.take_along_axis(ordered, is_kept.sum(1, keepdims=True) - 1, 1)
    return least - LOGIT_ERROR


def _other_tokens(inputs: Inputs, tokens: np.ndarray, expected: np.ndarray) -> Iterator[str]:
    """Rows whose token is not the reference's. Two whose logits with their noise are nearly equal may change places."""
    (rows,) = np.nonzero(tokens != expected)
    if not len(rows):
        return
    logits = inputs.arrays["logits"]
    noise = gumbel(key_words(inputs.arrays["key"], logits.shape[0])[rows], logits.shape[1], jnp.float32)
    sums = np.asarray(logits[rows], np.float64) + np.asarray(noise, np.float64)
    own, right = (np.take_along_axis(sums, some[rows][:, None], 1)[:, 0] for some in (tokens, expected))
    if wrong := int((np.abs(own - right) > SUM_ERROR).sum()):
        yield f"{wrong} of {len(tokens)} tokens are not the reference's"
