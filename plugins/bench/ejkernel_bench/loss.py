"""The loss of a language model from its hidden states, on a GPU, beside XLA with all logits, Liger, quack and tokamax.

Calls are tokens x hidden_dim x vocab in bfloat16. Parts and calls are named with commas:

  --part bars               the calls of the bars
  --part grid               4096, 8192 and 32768 tokens, hidden dims 2048 and 4096, three vocabularies
  --part none               losses and lse of each row, which the program reduces itself
  --part peaks              the peak memory of the calls of the bars by the device, each after those that need less
  --part plans              temporaries by the compiler for 2,048 to 32,768 tokens; nothing runs, also on a CPU
  --part 8192x4096x128256   a call

Without a part, it measures peaks and bars. Calls that differ in their tokens alone are also tables of time and memory
by tokens, which a picture draws as lines. Forward alone keeps no gradient. Losses and gradients are compared with
those in float32, ours in chunks of rows and the others with ours. Temporaries are GiB beyond arrays and results, by the
compiler. Of our kernels only the chosen one is measured, and those that --kernels names. --small has tiny sizes, which
a CPU can run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import click
import jax

from ejkernel_core import Cost, Example

from . import suite
from ._calls import PASSES, abstract_inputs, by_core, describe, jitted
from ._loss_memory import peaks
from ._loss_peers import LIGER, XLA, by_xla, peers
from ._memory import GIB, temporary_bytes
from ._report import ABSENT, joined
from .moe_step import dense_rate
from .pictures import TOKENS

__all__ = ["OPERATION", "peers", "run"]

#: Whose calls at given shapes have these peers.
OPERATION = "fused_linear_cross_entropy_sum"
ROWS = "fused_linear_cross_entropy"

FORWARD, BOTH = PASSES


@attrs.frozen
class LossCall:
    """A head and its tokens."""

    tokens: int
    hidden_dim: int
    vocab: int
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        return f"{self.tokens}x{self.hidden_dim}x{self.vocab}"

    def example(self, op: str = OPERATION) -> Example:
        """The mean, or the losses and the lse of each row."""
        options: dict[str, Any] = {"reduction": "mean"} if op == OPERATION else {"return_lse": True}
        arguments = partial(self.arguments, options)
        return Example(self.name, op, arguments, self.dtype, ("hidden", "weight"), checks=frozenset())

    def arguments(self, options: Mapping[str, Any], draw: int) -> dict[str, Any]:
        keys = jax.random.split(jax.random.key(draw), 3)
        weight = jax.random.normal(keys[1], (self.hidden_dim, self.vocab), self.dtype)
        return {
            "hidden": jax.random.normal(keys[0], (self.tokens, self.hidden_dim), self.dtype),
            "weight": (weight / self.hidden_dim**0.5).astype(self.dtype),
            "labels": jax.random.randint(keys[2], (self.tokens,), 0, self.vocab),
            **options,
        }


BARS = (
    LossCall(8192, 4096, 128256),
    LossCall(32768, 2048, 151936),
    LossCall(16384, 7168, 129280),
)
GRID = tuple(
    LossCall(tokens, hidden_dim, vocab)
    for vocab in (32000, 128256, 151936)
    for hidden_dim in (2048, 4096)
    for tokens in (4096, 8192, 32768)
)
SMALL = (LossCall(24, 16, 97, "float32"), LossCall(50, 8, 130, "float32"))
#: Compiled, and not run.
PLANS = tuple(LossCall(tokens, 2048, 128256) for tokens in (2048, 4096, 8192, 16384, 32768))
PARTS: dict[str, tuple[LossCall, ...]] = {"peaks": BARS, "bars": BARS, "grid": GRID, "none": BARS, "plans": PLANS}
DEFAULT = ("peaks", "bars")

#: Relative to XLA; relative to Liger, where Liger is slower than XLA and elsewhere; of a product's rate; in GiB.
OF_XLA, OF_XLA_BY_ROW, OF_LIGER, OF_SLOW_LIGER, OF_PRODUCT, MOST_GIB = 1.0, 1 / 1.3, 1.05, 1.2, 0.95, 1.0
#: Rows of the product whose rate is that of the card.
DENSE = 8192


def run(
    backend: str | None = None,
    rounds: int = suite.ROUNDS,
    small: bool = False,
    part: str | None = None,
    kernels: str | None = None,
) -> suite.Report:
    """Parts and calls by name, or with ``small`` all kinds of tables for two calls that a CPU can run."""
    if jax.default_backend() == "cpu" and not small and part != "plans":
        return suite.Report("loss", (), text="loss: there is no accelerator here; --small measures on the CPU")
    chosen = {"peaks": SMALL, "bars": SMALL, "none": SMALL} if small else named_calls(part)
    reports = []
    for name, calls in chosen.items():
        if name == "plans":
            reports.append(suite.Report(name, [plans(calls, backend)]))
            continue
        if name == "peaks":
            table, notes = peaks([call.example() for call in calls], peers(), backend)
            reports.append(suite.Report("peaks", [table], text="\n".join(notes)))
            continue
        op = ROWS if name == "none" else OPERATION
        options: dict[str, Any] = {"backend": backend, "backends": suite.backends_of(op, kernels), "rounds": rounds}
        options |= {"names": {call.name for call in calls}, "reference": "xla", "work": work, "has_memory": True}
        least = OF_XLA if op == OPERATION else OF_XLA_BY_ROW
        minima = () if small else (suite.Minimum(BOTH, XLA, least),)
        if op == OPERATION and not small:
            options["bars"] = lambda measurements: bars(measurements, dense_rate(DENSE, "bfloat16"))
        report = suite.run(op, peers(), minima, examples=[call.example(op) for call in calls], **options)
        tables = [*report.tables, *by_tokens(report, calls)]
        reports.append(attrs.evolve(report, benchmark=name, tables=tables))
    return joined("loss", reports)


def named_calls(part: str | None) -> dict[str, tuple[LossCall, ...]]:
    """By part; single calls, which are named with commas, are a part of their own."""
    every = {call.name: call for calls in PARTS.values() for call in calls}
    words = DEFAULT if part is None else tuple(part.split(","))
    for word in words:
        if word not in PARTS and word not in every:
            raise click.UsageError(f"no part or call of loss is named {word}; there are {', '.join(PARTS)}")
    chosen = {word: PARTS[word] for word in words if word in PARTS}
    single = tuple(every[word] for word in words if word not in PARTS)
    return chosen | ({"calls": single} if single else {})


def work(example: Example, pass_name: str) -> Cost:
    """One product forward, three with the gradients; each array, and each gradient, once."""
    tokens, hidden_dim, vocab = map(int, example.name.split("x"))
    moved = (tokens + vocab) * hidden_dim * (2.0 if example.dtype == "bfloat16" else 4.0) + 4.0 * tokens
    count, times = (1, 1) if pass_name == FORWARD else (3, 2)
    return Cost(count * 2.0 * tokens * hidden_dim * vocab, times * moved)


def plans(calls: Sequence[LossCall], backend: str | None) -> suite.Table:
    """MiB of temporaries by tokens, ours and of XLA with all logits; in float32 on a CPU, which widens bfloat16."""
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    title = f"MiB of temporaries, by the compiler: {BOTH}, {calls[0].hidden_dim} x {calls[0].vocab} {dtype}"
    rows = suite.Rows(title, (TOKENS, suite.OURS, XLA), series=(suite.OURS, XLA))
    for call in calls:
        example = attrs.evolve(call, dtype=dtype).example()
        peer = by_xla(describe(example))
        assert peer is not None  # it takes every plain call
        passes = (jitted(function, BOTH, abstract_inputs(example)) for function in (by_core(example, backend), peer))
        rows.add(str(call.tokens), *(temporary_bytes(one.compile()) / 2**20 for one in passes))
    return rows.table()


def by_tokens(report: suite.Report, calls: Sequence[LossCall]) -> Iterator[suite.Table]:
    """Milliseconds, and GiB of temporaries, of the calls of a head that are measured for several numbers of tokens."""
    table = report.tables[0]
    cells = {str(row[0]): dict(zip(table.columns, row, strict=True)) for row in table.rows}
    heads: dict[tuple[int, int], list[LossCall]] = {}
    for call in sorted(calls, key=lambda call: call.tokens):
        if f"{call.name}, {BOTH}" in cells:
            heads.setdefault((call.hidden_dim, call.vocab), []).append(call)
    names = [name for name in table.series if name != suite.COPY]
    for (hidden_dim, vocab), of_head in heads.items():
        if len(of_head) == 1:
            continue
        for title, column in (("milliseconds", str), ("GiB of temporaries, by the compiler", suite.memory_column)):
            rows = [
                (str(call.tokens), *(cells[f"{call.name}, {BOTH}"].get(column(name), ABSENT) for name in names))
                for call in of_head
            ]
            yield suite.Table(f"{title}: {BOTH}, {hidden_dim} x {vocab}", (TOKENS, *names), rows, names)


def bars(measurements: Iterable[suite.Measurement], rate: float) -> Iterator[suite.Bar]:
    """Of the mean: Liger, the rate of a product forward, and temporaries beside the float32 sum of a gradient."""
    for one in measurements:
        label, seconds = f"{one.example.name}, {one.pass_name}", one.seconds
        if one.pass_name == FORWARD:
            title = f"{label}: of the product rate, {rate / 1e12:.3g} TFLOP/s"
            yield suite.Bar(title, one.work.flops / seconds[suite.OURS] / rate, OF_PRODUCT, "times", at_least=True)
            continue
        if liger := seconds.get(LIGER):
            limit = OF_SLOW_LIGER if liger > seconds.get(XLA, liger) else OF_LIGER
            yield suite.Bar(f"{label}: over {LIGER}", liger / seconds[suite.OURS], limit, "times", at_least=True)
        _, hidden_dim, vocab = map(int, one.example.name.split("x"))
        beside = (one.temporaries[suite.OURS] - 4.0 * hidden_dim * vocab) / GIB
        yield suite.Bar(f"{label}: temporaries besides the sum", beside, MOST_GIB, "GiB")
