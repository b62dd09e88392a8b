"""Attention over pages on a GPU, beside FA3, FA4, FlashInfer, cuDNN and a gather; part by part, or call by call.

Each part is a run of its own; several are named with commas, and so are single calls, by the names in the table:

  --part table        the decoding calls of the bars, page size 64
  --part others       seven calls more, of other sizes and of lengths that differ
  --part pages        64 x 8192 with pages of 1, 16, 64 and 256 tokens, and with keys and values in one array
  --part narrow       pages of 8 bits with queries in bfloat16
  --part prompts      chunks of prompts over what is cached
  --part mixed        decoding and a chunk in one call, and each alone
  --part speculative  several queries each
  --part llama-8b, llama-70b, qwen3-30b, gpt-oss
                      layers of these models, 1 to 512 sequences of 1,024 to 131,072 tokens
  --part 64x8192-h32/8-d128-p64,1x1024-h32/8-d128-p64
                      sequences x keys, heads / key heads, head dim, page size; -q4 is 4 new tokens each, -w128 a window

Without a part, it measures the first seven. Of our kernels only the chosen one is measured, and those that --kernels
names. What a step plans once is made before. --small has tiny sizes, which a CPU can run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import geometric_mean
from typing import Any

import attrs

from . import suite
from ._paged_calls import OP, PagedCall, Sequences, uniform, work
from ._paged_peers import CONTIGUOUS, CUDNN, FA3, GATHER, peers

__all__ = ["OPERATION", "peers", "run"]

#: Whose calls at given shapes have these peers.
OPERATION = OP

PLAIN = uniform(64, 8192)
SHORTEST = uniform(1, 1024)
TABLE = (
    PLAIN,
    uniform(8, 32768),
    uniform(256, 2048, heads=64),
    uniform(16, 4096),
    uniform(1, 32768),
    uniform(1, 16384),
    SHORTEST,
    uniform(64, 4096, heads=64, dim=64),
)
OTHERS = (
    uniform(3, 50000),
    uniform(24, 6000, kv_heads=4),
    uniform(100, 1500, heads=40),
    uniform(7, 20011, heads=28, kv_heads=4),
    uniform(128, 1000, heads=64),
    uniform(48, 8192, fewest=1),
    uniform(12, 9000, heads=16, kv_heads=2, dim=256),
)
OF_1, OF_16 = (attrs.evolve(PLAIN, page_size=size) for size in (1, 16))
PAGES = (PLAIN, OF_16, OF_1, attrs.evolve(PLAIN, page_size=256), attrs.evolve(PLAIN, is_interleaved=True))
FP8 = tuple(attrs.evolve(call, narrow="fp8") for call in TABLE)
PROMPTS = (uniform(4, 8192, 2048), uniform(1, 30000, 1000))
CHUNK = uniform(1, 8192, 2048)
MIXED = PagedCall((*PLAIN.sequences, *CHUNK.sequences))
SPECULATIVE = (uniform(64, 8192, 4), uniform(16, 4096, 4), uniform(1, 16384, 4), uniform(64, 8192, 16))

BATCHES, LENGTHS = (1, 8, 64, 512), (1024, 4096, 32768, 131072)
MOST_CACHED = 2**21


def of_model(**fields: Any) -> Iterator[PagedCall]:
    """All batches and lengths that have no more cached tokens."""
    every = (uniform(batch, length, **fields) for batch in BATCHES for length in LENGTHS)
    return (call for call in every if call.cached_tokens <= MOST_CACHED)


PARTS: dict[str, tuple[PagedCall, ...]] = {
    "table": TABLE,
    "others": OTHERS,
    "pages": PAGES,
    "narrow": (PLAIN, *FP8, attrs.evolve(PLAIN, narrow="int8")),
    "prompts": PROMPTS,
    "mixed": (PLAIN, CHUNK, MIXED),
    "speculative": SPECULATIVE,
    "llama-8b": tuple(of_model()),
    "llama-70b": tuple(of_model(heads=64)),
    "qwen3-30b": tuple(of_model(kv_heads=4)),
    "gpt-oss": (
        *of_model(heads=64, dim=64, has_sinks=True),
        *of_model(heads=64, dim=64, has_sinks=True, window=128),
    ),
}
DEFAULT = ("table", "others", "pages", "narrow", "prompts", "mixed", "speculative")
SMALL = tuple(
    PagedCall(sequences, 4, 2, 16, 8, dtype="float32")
    for sequences in ((Sequences(3, 37),), (Sequences(3, 37), Sequences(1, 50, 20)))
)

#: Limits: microseconds of the shortest call; of the time of pages of 64 tokens, that of smaller ones; of the time of
#: its parts, that of a mixed call; of the time with pages in bfloat16, that of pages in float8.
SHORTEST_US, OF_16_LIMIT, OF_1_LIMIT, MIXED_LIMIT, FP8_LIMIT = 8.0, 1.03, 2.0, 0.9, 1.0


def _is_in(calls: Iterable[PagedCall]) -> Any:
    names = {call.name for call in calls}
    return lambda example: example.name in names


MINIMA = (
    suite.Minimum("forward", FA3, 0.95, applies=_is_in((*TABLE, *OTHERS))),
    suite.Minimum("forward", FA3, 1.0, applies=_is_in(PROMPTS)),
    suite.Minimum("forward", FA3, 1.2, applies=_is_in(FP8)),
    suite.Minimum("forward", CONTIGUOUS, 0.95, applies=_is_in(PROMPTS)),
    suite.Minimum("forward", GATHER, 2.5),
    suite.Minimum("forward", CUDNN, 1.0),
)


def run(
    backend: str | None = None,
    rounds: int = suite.ROUNDS,
    small: bool = False,
    part: str | None = None,
    kernels: str | None = None,
) -> suite.Report:
    """Parts and calls by name, or with ``small`` two that a CPU can run."""
    calls = {call.name: call for call in SMALL} if small else named_calls(part)
    options: dict[str, Any] = {"backend": backend, "rounds": rounds, "reference": "xla", "work": work}
    options |= {"backends": suite.backends_of(OP, kernels), "names": {*calls} if small else None}
    examples, minima = [call.example() for call in calls.values()], () if small else MINIMA
    report = suite.run(OP, peers(), minima, examples=examples, bars=bars, **options)
    return attrs.evolve(report, benchmark="paged")


def named_calls(part: str | None) -> dict[str, PagedCall]:
    """By name: those of parts, and single ones, which are named with commas."""
    return suite.named_calls("paged", PARTS, DEFAULT if part is None else part.split(","))


def bars(measurements: Iterable[suite.Measurement]) -> Iterator[suite.Bar]:
    """Of those calls that were measured."""
    seconds = {one.example.name: one.seconds for one in measurements}
    ours = {name: of_call[suite.OURS] for name, of_call in seconds.items()}
    if SHORTEST.name in ours:
        yield suite.Bar(SHORTEST.name, 1e6 * ours[SHORTEST.name], SHORTEST_US, "us")
    compared = (seconds.get(call.name, {}) for call in (*TABLE, *OTHERS))
    if ratios := [of_call[FA3] / of_call[suite.OURS] for of_call in compared if FA3 in of_call]:
        title = f"over {FA3}, geometric mean of {len(ratios)} of {len(TABLE) + len(OTHERS)}"
        yield suite.Bar(title, geometric_mean(ratios), 1.0, "times", at_least=True)
    for call, others, limit in _compared():
        parts = [ours.get(other.name) for other in others]
        if call.name in ours and all(parts):
            title = f"{call.name}: of the time of {' and '.join(other.name for other in others)}"
            yield suite.Bar(title, ours[call.name] / sum(filter(None, parts)), limit, "")


def _compared() -> Iterator[tuple[PagedCall, tuple[PagedCall, ...], float]]:
    """Calls, and those that they take a part of the time of."""
    yield OF_16, (PLAIN,), OF_16_LIMIT
    yield OF_1, (PLAIN,), OF_1_LIMIT
    yield MIXED, (PLAIN, CHUNK), MIXED_LIMIT
    yield from ((narrow, (call,), FP8_LIMIT) for narrow, call in zip(FP8, TABLE, strict=True))
