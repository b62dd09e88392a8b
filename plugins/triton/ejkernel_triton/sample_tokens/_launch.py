"""Launches of the kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp

from ejkernel_core import Invocation
from ejkernel_ops.sample_tokens.definition import least_by_min_p
from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.launch._cards import capability

Results = tuple[jax.Array, ...]
#: The words of a chunk, and the most chunks of a row of the vocabularies that models have. Larger ones have longer
#: chunks.
CHUNK, MOST_CHUNKS = 16, 8192
#: The words that a program searches or draws from for each of its warps, at most, and those of a pass over all.
MOST_OF_A_WARP, WORDS_OF_A_WARP = 1024, 512
#: The larger tile of the search has so many times the words of the first.
LARGER = 8
#: An output that a call does not have.
ABSENT = jax.ShapeDtypeStruct((1,), jnp.float32)


def tokens(inv: Invocation, block: int, tile: int, num_warps: int) -> tuple[jax.Array, jax.Array | None]:
    """The tokens and, if they are needed, their log-probabilities."""
    rows = inv["logits"].shape[0]
    has_logprobs = inv.needs("logprobs")
    if not rows:
        return jnp.zeros(0, jnp.int32), jnp.zeros(0, jnp.float32) if has_logprobs else None
    launches = Launches(inv, block, tile, num_warps, has_logprobs)
    surveyed = launches.survey()
    best, log, *lists = launches.choose(*surveyed)
    # What is not searched has no results of a search; any array will do in their place.
    found = launches.search(best, *lists) if launches.is_searched else (best, best, best)
    sums, drawn = launches.draw(best, found[0])
    token, logprobs = launches.finish(best, log, sums, drawn, found)
    return token, logprobs if has_logprobs else None


def padded(size: int) -> int:
    """The next power of two."""
    return 1 << max(size - 1, 0).bit_length()


def blocks(words: int, block: int) -> int:
    """How many blocks there are."""
    return math.ceil(words / block)


def chunk_size(words: int) -> int:
    """The words of a chunk."""
    return max(CHUNK, padded(words) // MOST_CHUNKS)


def chunks(words: int) -> int:
    """How many chunks a row has."""
    return blocks(words, chunk_size(words))


@attrs.frozen
class Launches:
    """The launches of one call."""

    inv: Invocation
    block: int
    tile: int
    num_warps: int
    has_logprobs: bool

    @property
    def rows(self) -> int:
        return int(self.inv["logits"].shape[0])

    @property
    def words(self) -> int:
        return int(self.inv["logits"].shape[1])

    @property
    def is_searched(self) -> bool:
        return self.has("top_k") or self.has("top_p")

    def has(self, name: str) -> bool:
        return self.inv[name] is not None

    def survey(self) -> Results:
        """The best logit of each chunk, and the sums of its weights with the temperature and without."""
        of_chunks = jax.ShapeDtypeStruct((self.rows, chunks(self.words)), jnp.float32)
        return self._launch(
            "survey",
            [self.inv["logits"], self._numbers("temperature")],
            (of_chunks, of_chunks if self.has("top_p") else ABSENT, of_chunks if self.has_logprobs else ABSENT),
            self.rows * blocks(self.words, self.block),
            self.block // WORDS_OF_A_WARP,
            {**self._chunks(), "BLOCK": self.block, "WEIGHTS": self.has("top_p"), "SUMS": self.has_logprobs},
        )

    def choose(self, best: jax.Array, weights: jax.Array, sums: jax.Array) -> Results:
        """The best logit of each row, the logarithm of its sum, and its chunks that are searched."""
        floats, integers = (jax.ShapeDtypeStruct((self.rows,), dtype) for dtype in (jnp.float32, jnp.int32))
        listed = jax.ShapeDtypeStruct((self.rows, chunks(self.words)), jnp.int32)
        of_search = (integers, integers, floats, listed) if self.is_searched else (ABSENT,) * 4
        return self._launch(
            "choose",
            [best, weights, sums, *map(self._numbers, ("temperature", "top_k", "top_p"))],
            (floats, floats if self.has_logprobs else ABSENT, *of_search),
            self.rows,
            self.num_warps,
            {
                **self._chunks(),
                "WIDTH": max(CHUNK, padded(chunks(self.words))),
                "TOP_K": self.has("top_k"),
                "TOP_P": self.has("top_p"),
                "SUMS": self.has_logprobs,
            },
        )

    def search(self, best: jax.Array, *lists: jax.Array) -> Results:
        """The depth of the last word that a row keeps; or its draw: the sum and the word."""
        floats, integers = (jax.ShapeDtypeStruct((self.rows,), dtype) for dtype in (jnp.float32, jnp.int32))
        numbers = map(self._numbers, ("temperature", "top_k", "top_p"))
        return self._launch(
            "search",
            [self.inv["logits"], self.inv["key"], *numbers, self._least(), best, *lists],
            (integers, floats, integers),
            self.rows,
            self.num_warps,
            {
                **self._chunks(),
                "TILE": self.tile,
                "LARGE_TILE": min(LARGER * self.tile, MOST_OF_A_WARP * self.num_warps),
                "TOP_K": self.has("top_k"),
                "TOP_P": self.has("top_p"),
                "MIN_P": self.has("min_p"),
            },
        )

    def draw(self, best: jax.Array, bounds: jax.Array) -> Results:
        """The sum and the word of each block, for rows without a draw."""
        of_blocks = [
            jax.ShapeDtypeStruct((self.rows, blocks(self.words, self.block)), dtype)
            for dtype in (jnp.float32, jnp.int32)
        ]
        return self._launch(
            "draw",
            [self.inv["logits"], self.inv["key"], self._numbers("temperature"), self._least(), best, bounds],
            of_blocks,
            self.rows * blocks(self.words, self.block),
            self.block // WORDS_OF_A_WARP,
            {
                "VOCABULARY": self.words,
                "BLOCK": self.block,
                "TEMPERATURE": self.has("temperature"),
                "MIN_P": self.has("min_p"),
                "SEARCHED": self.is_searched,
            },
        )

    def finish(self, best: jax.Array, log: jax.Array, sums: jax.Array, words: jax.Array, found: Results) -> Results:
        """The tokens and their log-probabilities."""
        floats, integers = (jax.ShapeDtypeStruct((self.rows,), dtype) for dtype in (jnp.float32, jnp.int32))
        return self._launch(
            "finish",
            [self.inv["logits"], best, log, sums, words, found[0], found[2]],
            (integers, floats if self.has_logprobs else ABSENT),
            self.rows,
            1,
            {
                "VOCABULARY": self.words,
                "BLOCK": self.block,
                "WIDTH": padded(blocks(self.words, self.block)),
                "SEARCHED": self.is_searched,
                "SUMS": self.has_logprobs,
            },
        )

    def _chunks(self) -> dict[str, Any]:
        return {
            "VOCABULARY": self.words,
            "CHUNKS": chunks(self.words),
            "CHUNK": chunk_size(self.words),
            "TEMPERATURE": self.has("temperature"),
        }

    def _numbers(self, name: str) -> jax.Array:
        """The numbers of the rows; any array where there are none, which is not read."""
        numbers: jax.Array = self.inv[name if self.has(name) else "key"]
        return numbers.astype(jnp.float32) if jnp.issubdtype(numbers.dtype, jnp.floating) else numbers

    def _least(self) -> jax.Array:
        """The least tempered logit that ``min_p`` keeps."""
        if not self.has("min_p"):
            return self._numbers("min_p")
        least: jax.Array = least_by_min_p(self.inv, jnp.float32)[:, 0]
        return least

    def _launch(
        self,
        kernel: str,
        arrays: Sequence[jax.Array],
        results: Sequence[jax.ShapeDtypeStruct],
        programs: int,
        num_warps: int,
        constants: Mapping[str, Any],
    ) -> Results:
        return _jax_triton.call(
            f"ejkernel_triton.sample_tokens._kernels:{kernel}",
            arrays,
            tuple(results),
            grid=(programs,),
            constants=constants,
            num_warps=num_warps,
            num_stages=1,
            compute_capability=capability(self.inv),
            name=f"sample_tokens_{kernel}",
        )
