"""The tokens of two engines for the same requests: where they differ, the logits of both have to be nearly equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np

from ejkernel_ops import paged_attention_metadata

from ._gather_engine import GATHER
from ._rows import announce
from ._serve_load import Load
from ._served import Served
from .serve_step import LIMITS
from .serving import Decoder, Limits, decoder
from .serving.engine import Batch

#: Of the requests whose tokens differ, how many are computed again.
MOST_COMPARED = 32


def compared(
    ours: Served, others: Served, load: Load, logits: Callable[[Sequence[int]], np.ndarray], dtype: str
) -> tuple[str, list[str]]:
    """A sentence about the requests whose tokens differ, and faults where the logits of both are not nearly equal."""
    pairs = [pair for pair in zip(ours.tokens, others.tokens, strict=True) if all(pair)]
    differences = dict(differing(ours.tokens, others.tokens))
    sentence = f"serve: {len(differences)} of {len(pairs)} requests have other tokens than by {GATHER}"
    if not differences:
        return sentence, []
    announce(f"serve: computing {min(len(differences), MOST_COMPARED)} requests alone")
    farthest, faults = 0.0, []
    for number, place in list(differences.items())[:MOST_COMPARED]:
        chosen = ours.tokens[number][place], others.tokens[number][place]
        values = logits([*load.requests[number].prompt, *ours.tokens[number][:place]])
        below = float((values.max() - values[list(chosen)].min()) / np.abs(values).max())
        farthest = max(farthest, below)
        if not below <= 2 * LIMITS[dtype]:
            faults.append(
                f"request {number}, token {place}: {chosen[0]}, and {chosen[1]} by {GATHER}: the logit of one is "
                f"{below:.1e} of the largest below the best"
            )
    alone = f"of {min(len(differences), MOST_COMPARED)} that were computed alone"
    return f"{sentence}; the farthest logit, {alone}, is {farthest:.1e} of the largest below the best", faults


def differing(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """The number of each request whose tokens differ, as far as both have them, and the place of the first of these."""
    for number, tokens in enumerate(zip(first, second, strict=True)):
        length = min(map(len, tokens))
        place = next((place for place in range(length) if tokens[0][place] != tokens[1][place]), None)
        if place is not None:
            yield number, place


def logits_behind(sizes: Decoder, params: Mapping[str, Any], limits: Limits, tokens: Sequence[int]) -> np.ndarray:
    """Of the token behind these, by a request that nothing runs beside, in float64."""
    size, page_size = limits.most_tokens, limits.page_size
    table = np.arange(-(-limits.most_length // page_size), dtype=np.int32)
    pages, logits = sizes.cache(len(table), page_size), np.zeros((1, 0))
    for first in range(0, len(tokens), size):
        part = np.array(tokens[first : first + size], np.int32)
        positions = first + np.arange(size, dtype=np.int32)
        slots = np.where(np.arange(size) < len(part), positions, -1)
        starts, one = np.array([0, len(part)], np.int32), np.ones(1, np.int32)
        batch = Batch(slots, first + starts[1:], table[None], starts, one, starts[1:] - 1)
        logits, pages = _program(sizes)(params, np.resize(part, size), positions, pages, batch)
    behind: np.ndarray = np.asarray(logits, np.float64)[0]
    return behind


@cache
def _program(sizes: Decoder) -> Any:
    """Of the logits behind the last token of one sequence."""
    model = decoder(sizes)

    def logits(params: Any, tokens: Any, positions: Any, cache: Any, batch: Batch) -> Any:
        lengths, starts, count = batch.kv_lens, batch.query_start_loc, batch.num_seqs
        metadata = paged_attention_metadata(lengths, starts, count, num_tokens=tokens.shape[0])
        return model(params, tokens, positions, cache, batch._replace(metadata=metadata))

    return jax.jit(logits, donate_argnums=3)
