"""sample_tokens on a GPU, with each filter, beside a sort and categorical of JAX, FlashInfer and vLLM; part by part.

Each part is a run of its own; several are named with commas, and so are single calls, by the names in the table:

  --part table     64 rows of 128,256 words: no filter, top-k 50, top-p 0.9, both, min-p 0.05
  --part batches   1, 8, 16 and 256 rows of them
  --part qwen      64 and 256 rows of 151,936 words
  --part 64x128256-k50-p0.9,1x128256-none

All of them are measured without a part. Logits are float32. Every contender draws among the tokens that the filters
keep, which is checked in float64 from the same logits, but for rounding; ours are the tokens of the reference. Where a
peer starts from probabilities, the softmax counts. --small has tiny sizes, which a CPU can run.
"""

from __future__ import annotations

import attrs

from . import suite
from ._sampling_calls import FILTERS, OP, SamplingCall, check
from ._sampling_peers import FLASHINFER, SORT, VLLM, peers

__all__ = ["peers", "run"]

LLAMA, QWEN = 128256, 151936


def _calls(vocabulary: int, *rows: int) -> tuple[SamplingCall, ...]:
    return tuple(SamplingCall(count, vocabulary, filters) for count in rows for filters in FILTERS)


PARTS = {"table": _calls(LLAMA, 64), "batches": _calls(LLAMA, 1, 8, 16, 256), "qwen": _calls(QWEN, 64, 256)}
SMALL = _calls(331, 20)
#: With both filters, whose speed relative to peers is a limit.
COMPARED = SamplingCall(64, LLAMA, "k50-p0.9").name
MINIMA = tuple(
    suite.Minimum("forward", peer, ratio, applies=lambda example: example.name == COMPARED)
    for peer, ratio in ((SORT, 5.0), (FLASHINFER, 2.0), (VLLM, 2.0))
)


def run(
    backend: str | None = None,
    rounds: int = suite.ROUNDS,
    small: bool = False,
    part: str | None = None,
    kernels: str | None = None,
) -> suite.Report:
    """Parts and calls by name, or with ``small`` those that a CPU can run."""
    calls = {call.name: call for call in SMALL} if small else named_calls(part)
    report = suite.run(
        OP,
        peers(),
        () if small else MINIMA,
        examples=[call.example() for call in calls.values()],
        names={*calls} if small else None,
        backend=backend,
        backends=suite.backends_of(OP, kernels),
        check=check,
        rounds=rounds,
    )
    return attrs.evolve(report, benchmark="sampling")


def named_calls(part: str | None) -> dict[str, SamplingCall]:
    """By name: those of parts, and single ones, which are named with commas."""
    return suite.named_calls("sampling", PARTS, PARTS if part is None else part.split(","))
