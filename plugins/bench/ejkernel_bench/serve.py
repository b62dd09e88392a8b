"""512 requests through the engine of ejkernel_bench.serving, beside the same engine with a gather of pages for jax.nn.

Lengths are drawn from log-normals, with a fixed seed: prompts with a median of 1,730 tokens and a 90th percentile of
5,696, answers with 415 and 834, which are the figures of openchat_sharegpt4 in Sarathi-Serve (OSDI '24). Weights and
tokens are random. Its own options, which --small changes the defaults of:

  --requests N    how many; 512 by default
  --model NAME    llama-8b, qwen3-30b; with --small, dense or experts
  --layers N      fewer than the model has
  --batch N       the most requests at a time; 128 by default
  --pages N       of the cache, of 64 tokens each; by default as many as fit into the memory, beside what a gather needs
  --longest N     the most tokens of a prompt with its answer, by which prompts are cut; 8,192 by default
  --arrivals RATE in a second; by default all arrive at once
  --seed N        of lengths, tokens and arrivals
  --seconds N     end each of both engines after this time, and report what was done

Both engines answer the same requests with one schedule, greedily. Where their tokens differ, the logits of both are
computed again by the request alone: nearly equal ones are not a fault, because sums are rounded differently.
--small has a tiny model and short lengths, which a CPU can run.
"""

from __future__ import annotations

from functools import partial

import attrs
import click
import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_ops import ragged_paged_attention

from ._calls import describe_fault
from ._gather_engine import GATHER, GatherEngine, gather_attention
from ._memory import memory_limit
from ._report import Bar, Report
from ._rows import Rows, announce
from ._serve_load import Load, draw_load
from ._serve_tokens import compared, logits_behind
from ._served import Attention, Served, answered, speed_up
from .serve_step import MODELS, PAGE_SIZE, SMALL, SMALL_PAGE_SIZE
from .serving import Decoder, Engine, Limits, init_params
from .serving.models import count_weights
from .suite import OURS

#: The share of the memory for weights, the cache, and what a layer gathers: keys and values, and as much to copy them.
MEMORY_SHARE, GATHERED = 0.88, 2
MOST_TOKENS, SMALL_MOST_TOKENS = 2048, 32
#: Lengths of --small are so many times shorter.
SHORTER = 64
#: The least speed, relative to the gather.
LEAST = 3.0
PERCENTILES = ("median", "P90", "P99")

OPTIONS = (
    click.Option(["--requests"], type=click.IntRange(min=1)),
    click.Option(["--model"]),
    click.Option(["--layers"], type=click.IntRange(min=1)),
    click.Option(["--batch"], type=click.IntRange(min=1)),
    click.Option(["--pages"], type=click.IntRange(min=1)),
    click.Option(["--longest"], type=click.IntRange(min=2)),
    click.Option(["--arrivals"], type=click.FloatRange(min=0, min_open=True)),
    click.Option(["--seed"], type=click.IntRange(min=0)),
    click.Option(["--seconds"], type=click.FloatRange(min=0, min_open=True)),
)


def run(
    backend: str | None = None,
    small: bool = False,
    requests: int | None = None,
    model: str | None = None,
    layers: int | None = None,
    batch: int | None = None,
    pages: int | None = None,
    longest: int | None = None,
    arrivals: float | None = None,
    seed: int = 0,
    seconds: float | None = None,
) -> Report:
    """Both engines, one after another."""
    if jax.default_backend() == "cpu" and not small:
        return Report("serve", (), text="serve: there is no accelerator here; --small measures on the CPU")
    sizes = _sizes(model, layers, small)
    limits = _limits(sizes, small, batch, pages, longest)
    count, shorter = requests or (24 if small else 512), SHORTER if small else 1
    load = draw_load(count, sizes.vocabulary, limits.most_length, seed, arrivals, shorter)
    report = measured(sizes, limits, load, backend, seconds)
    return attrs.evolve(report, bars=()) if small or arrivals is not None else report


def measured(sizes: Decoder, limits: Limits, load: Load, backend: str | None, seconds: float | None) -> Report:
    """The figures of both engines, and their ratio."""
    params = jax.jit(partial(init_params, sizes))(jax.random.key(0))
    engines: dict[str, tuple[type[Engine], Attention]] = {
        OURS: (Engine, partial(ragged_paged_attention, backend=backend)),
        GATHER: (GatherEngine, gather_attention),
    }
    speeds, waits = _tables(sizes, limits, len(load.requests))
    done: dict[str, Served] = {}
    lines, bars, faults = [_description(load)], list[Bar](), list[str]()
    for name, (engine, attention) in engines.items():
        announce(f"serve: compiling {name}")
        try:
            done[name] = answered(engine, attention, sizes, params, limits, load, seconds)
        except Exception as fault:  # the other one is measured all the same
            faults.append(f"{name}: {describe_fault(fault)}")
            continue
        _add(speeds, waits, name, done[name])
        faults += [f"{name}: {error}" for error in done[name].errors]
    if len(done) == len(engines):
        ours, others = done[OURS], done[GATHER]
        if (ratio := speed_up(ours, others)) is not None:
            lines.append(f"serve: {GATHER} takes {ratio:.3g} times as long for as many new tokens")
            bars.append(Bar(f"as many new tokens, over {GATHER}", ratio, LEAST, "times", at_least=True))
        line, new_faults = compared(ours, others, load, partial(logits_behind, sizes, params, limits), sizes.dtype)
        lines, faults = [*lines, line], [*faults, *new_faults]
    return Report("serve", [speeds.table(), waits.table()], bars, faults, "\n".join(lines))


def _sizes(model: str | None, layers: int | None, small: bool) -> Decoder:
    models = SMALL if small else MODELS
    name = model or next(iter(models))
    if name not in models:
        raise click.UsageError(f"--model: there is no {name}; there are {', '.join(models)}")
    sizes = models[name]
    if layers is not None and layers > sizes.layers:
        raise click.UsageError(f"--layers: {name} has {sizes.layers}")
    return attrs.evolve(sizes, layers=layers or sizes.layers)


def _limits(sizes: Decoder, small: bool, batch: int | None, pages: int | None, longest: int | None) -> Limits:
    most, length = batch or (6 if small else 128), longest or (128 if small else 8192)
    limits = Limits(
        pages=1,  # until it is known how many fit
        page_size=SMALL_PAGE_SIZE if small else PAGE_SIZE,
        most_length=length,
        most_sequences=most,
        most_tokens=max(most, SMALL_MOST_TOKENS if small else MOST_TOKENS),
    )
    return attrs.evolve(limits, pages=pages or pages_that_fit(sizes, limits, memory_limit()))


def pages_that_fit(sizes: Decoder, limits: Limits, memory: float | None) -> int:
    """As many as there is memory for, and at most those of a batch of the longest requests."""
    table = -(-limits.most_length // limits.page_size)
    most = limits.most_sequences * table
    if memory is None:
        return max(table, most // 4)
    item = jnp.dtype(sizes.dtype).itemsize
    weights = float(count_weights(sizes)) * item
    of_layer = 2.0 * limits.page_size * sizes.kv_heads * sizes.head_dim * item
    room = MEMORY_SHARE * memory - weights - GATHERED * most * of_layer
    fitting = int(room / (sizes.layers * of_layer))
    if fitting < table:
        raise click.UsageError("the weights and a request of the greatest length do not fit; --layers has fewer layers")
    return min(fitting, most)


def _tables(sizes: Decoder, limits: Limits, count: int) -> tuple[Rows, Rows]:
    """The rows of speeds, and those of times."""
    what = (
        f"requests: {count}, at most {limits.most_sequences} at a time; pages: {limits.pages}; layers: {sizes.layers}"
    )
    shown = ("new tokens / s", "tokens / s")
    columns = ("", *shown, "seconds", "ended", "preemptions", "programs", "compiled in, s")
    return Rows(what, columns, shown), Rows("milliseconds to the tokens of requests", ("", *PERCENTILES), PERCENTILES)


def _add(speeds: Rows, waits: Rows, name: str, served: Served) -> None:
    ended = f"{served.ended} of {len(served.prompts)}"
    counted = served.preemptions, served.programs, served.compile_seconds
    speeds.add(name, served.speed, served.whole_speed, served.seconds, ended, *counted)
    for title, values in (("to the first token", served.to_first), ("between tokens", served.between)):
        if len(values):
            waits.add(f"{name}, {title}", *(1e3 * float(np.percentile(values, share)) for share in (50, 90, 99)))


def _description(load: Load) -> str:
    """The lengths that were drawn."""
    parts = (
        f"{name} {lengths.min()} to {lengths.max()} tokens, median {np.median(lengths):.0f}, "
        f"90th percentile {np.percentile(lengths, 90):.0f}"
        for name, lengths in zip(("prompts", "answers"), load.lengths, strict=True)
    )
    return f"serve: {'; '.join(parts)}"
