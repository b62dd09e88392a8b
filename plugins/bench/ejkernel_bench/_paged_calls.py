"""Calls of attention over pages that are measured: what their names say, their arrays, and their work."""

from __future__ import annotations

from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_core import Cost, Example
from ejkernel_ops import paged_attention_metadata
from ejkernel_ops.pages import pages_of

from ._calls import describe

OP = "ragged_paged_attention"
#: The dtype of pages by the word in the name of a call; their scales.
EIGHT_BITS = {"fp8": "float8_e4m3fn", "int8": "int8"}
SCALES: dict[str, dict[str, Any]] = {
    "fp8": {"k_scale": 0.5, "v_scale": 0.25},
    "int8": {"k_scale": 0.02, "v_scale": 0.03},
}


@attrs.frozen
class Sequences:
    """Some sequences of a batch, alike."""

    count: int
    #: The keys of each, with those of its new tokens.
    keys: int
    #: The new tokens of each.
    queries: int = 1
    #: If given, lengths are anywhere from this one to ``keys``.
    fewest: int | None = None

    def __str__(self) -> str:
        keys = str(self.keys) if self.fewest is None else f"{self.fewest}..{self.keys}"
        return f"{self.count}x{keys}" + (f"-q{self.queries}" if self.queries > 1 else "")


@attrs.frozen
class PagedCall:
    """A call of which pages are in any order, and each is of one sequence."""

    sequences: tuple[Sequences, ...]
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    page_size: int = 64
    #: Of pages, if they have 8 bits: "fp8" or "int8".
    narrow: str | None = None
    #: Keys and values in one array, and not in two.
    is_interleaved: bool = False
    #: How many keys a query sees, its own among them.
    window: int | None = None
    has_sinks: bool = False
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """One word of a command line, such as ``64x8192-h32/8-d128-p64``."""
        dtype = None if self.dtype == "bfloat16" else self.dtype
        words = [f"h{self.heads}/{self.kv_heads}", f"d{self.dim}", f"p{self.page_size}", dtype, self.narrow]
        words += ["interleaved" if self.is_interleaved else None, f"w{self.window}" if self.window else None]
        words += ["sinks" if self.has_sinks else None]
        return "-".join(["+".join(map(str, self.sequences)), *filter(None, words)])

    @property
    def cached_tokens(self) -> int:
        """The most tokens that are cached."""
        return sum(group.count * group.keys for group in self.sequences)

    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """The queries and the keys of each sequence."""
        rng = np.random.default_rng(0)
        queries = [np.full(group.count, group.queries, np.int32) for group in self.sequences]
        keys = [
            rng.integers(group.keys if group.fewest is None else group.fewest, group.keys, group.count, np.int32, True)
            for group in self.sequences
        ]
        return np.concatenate(queries), np.concatenate(keys)

    def example(self) -> Example:
        return Example(self.name, OP, self.arguments, self.dtype)

    def arguments(self, draw: int) -> dict[str, Any]:
        """Lengths, starts and tables are NumPy's, so that peers know their values before anything runs."""
        queries, keys = self.lengths()
        starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
        tokens, tables = int(starts[-1]), self._tables(keys, draw)
        numbers = jax.random.split(jax.random.key(draw), 4)
        query = jax.random.normal(numbers[0], (tokens, self.heads, self.dim), self.dtype)
        if self.narrow == "fp8":  # so that a peer which rounds queries has the same ones
            query = query.astype(EIGHT_BITS["fp8"]).astype(self.dtype)
        given: dict[str, Any] = {"query": query, **self._pages(numbers, int((-(-keys // self.page_size)).sum()))}
        given |= {"kv_lens": keys, "block_tables": tables, "query_start_loc": starts}
        given["metadata"] = paged_attention_metadata(keys, starts, num_tokens=tokens)
        if self.has_sinks:
            given["softmax_aux"] = jax.random.normal(numbers[3], (self.heads,), self.dtype)
        options = {"max_query_len": int(queries.max()), **SCALES.get(self.narrow or "", {})}
        return given | options | ({"sliding_window": (self.window - 1, 0)} if self.window else {})

    def _tables(self, keys: np.ndarray, draw: int) -> np.ndarray:
        """All pages of the pool, each once. Entries behind the last page of a sequence are 0, which no peer minds."""
        counts = -(-keys // self.page_size)
        tables = np.zeros((len(keys), counts.max()), np.int32)
        tables[np.arange(counts.max()) < counts[:, None]] = np.random.default_rng(draw).permutation(counts.sum())
        return tables

    def _pages(self, numbers: jax.Array, pages: int) -> dict[str, jax.Array]:
        shape = (pages, self.page_size, self.kv_heads, self.dim)
        if self.is_interleaved:
            return {"kv_pages": self._drawn(numbers[1], (*shape[:2], 2 * self.kv_heads, self.dim))}
        return {"key_pages": self._drawn(numbers[1], shape), "value_pages": self._drawn(numbers[2], shape)}

    def _drawn(self, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        if self.narrow == "int8":
            return jax.random.randint(key, shape, -127, 128, jnp.int8)
        return jax.random.normal(key, shape, self.dtype).astype(EIGHT_BITS.get(self.narrow or "", self.dtype))


def uniform(count: int, keys: int, queries: int = 1, fewest: int | None = None, **fields: Any) -> PagedCall:
    """Sequences of one kind."""
    return PagedCall((Sequences(count, keys, queries, fewest),), **fields)


def work(example: Example, pass_name: str) -> Cost:
    """The products of queries and the keys that they see, and the bytes of these keys and of queries and results."""
    call = describe(example)
    query, (pages, *_) = call["query"], pages_of(call)
    queries, keys = np.diff(call["query_start_loc"]), call["kv_lens"]
    left, _ = call.get("sliding_window") or (int(keys.max()), 0)
    positions = np.concatenate([np.arange(n - q, n) for q, n in zip(queries, keys, strict=True)])
    pairs, read = np.minimum(positions + 1, left + 1).sum(), np.minimum(keys, left + queries).sum()
    entries = 2 * pages.shape[3] * pages.shape[2] // (2 if "kv_pages" in call else 1)  # of a key and its value
    size = read * entries * pages.dtype.itemsize + 2 * query.size * query.dtype.itemsize
    return Cost(4.0 * query.shape[1] * query.shape[2] * float(pairs), float(size))
