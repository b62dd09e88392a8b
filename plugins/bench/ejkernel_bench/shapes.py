"""Attention of many shapes drawn at random: right, twice the same bits, and none far slower than its neighbours."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

import ejkernel_core
from ejkernel_core import NoKernel

from ._contenders import PASSES
from ._errors import TOLERANCE
from ._problem import GRADIENTS, Problem, plans, through_core, with_gradients
from ._report import Bar, Report, Table
from ._timing import in_bursts

COUNT = 1000
#: How often each pass of each runs, and is compared.
RUNS = 4
ROUNDS = 3
#: The least part of a neighbour's pace, of one that does no less, that a shape may have.
CLIFF = 0.5
#: Neighbours: lengths that differ by little, on both sides of what blocks come out even for.
BESIDE = (-64, -1, 0, 1, 7, 24, 64, 100)
#: The seconds that a contender runs for in a round, without waiting in between.
SECONDS = 0.004
SHOWN = 8

Results = tuple[jax.Array, ...]


@attrs.frozen
class Family:
    """Problems that differ in nothing but their lengths."""

    problem: Problem
    lengths: tuple[int, ...]

    def __iter__(self) -> Iterator[Problem]:
        return (attrs.evolve(self.problem, length=length) for length in self.lengths)

    @property
    def longest(self) -> Problem:
        return attrs.evolve(self.problem, length=max(self.lengths))


def run(backend: str | None = None, rounds: int = ROUNDS) -> Report:
    """As many as take some minutes on a GPU."""
    if jax.default_backend() != "gpu":
        return Report("shapes", (), text="shapes: there is no GPU here, and nothing was measured")
    # What takes long is compiling: many processes do it, and one at a time has the device.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    spawned = multiprocessing.get_context("spawn")
    workers = max(1, min(28, (os.cpu_count() or 2) - 2))
    with ProcessPoolExecutor(workers, spawned, _take_turns, (spawned.Lock(),)) as pool:
        families = drawn(COUNT // len(BESIDE), np.random.default_rng(0))
        return report(list(pool.map(partial(measured, backend=backend, rounds=rounds), families)))


def _take_turns(lock: AbstractContextManager[Any]) -> None:
    global _turn
    _turn = lock


_turn: AbstractContextManager[Any] = nullcontext()


def drawn(count: int, generator: np.random.Generator) -> list[Family]:
    """So many families: any head dim, grouped heads, features one by one and together."""

    def chance(probability: float) -> bool:
        return bool(generator.random() < probability)

    def one() -> Family:
        length = 128 * round(2 ** generator.uniform(0, 5))
        group = int(generator.choice([1, 1, 2, 3, 8]))
        packed = chance(0.2)
        # Enough for every multiprocessor, and no more than some milliseconds of work.
        rows = max(group, min(64, 2**17 // length))
        heads = group * max(1, min(16, rows) // group)
        causal = chance(0.6)
        problem = Problem(
            batch=1 if packed else max(1, rows // heads),
            length=length,
            heads=heads,
            head_dim=int(generator.choice([64, 128, 8 * generator.integers(2, 33)])),
            dtype=str(generator.choice(["bfloat16", "float16"])),
            causal=causal,
            window=int(generator.integers(1, length)) if chance(0.3) else None,
            kv_heads=None if group == 1 else heads // group,
            soft_cap=20.0 if chance(0.2) else None,
            bias=not packed and length <= 1024 and chance(0.2),
            sinks=chance(0.2),
            sequences=int(generator.integers(1, 20)) if packed else None,
        )
        return Family(problem, tuple(length + more for more in BESIDE))

    return [one() for _ in range(count)]


@attrs.frozen
class Found:
    """What came of one family: the seconds that each pass of each problem takes, and what was wrong."""

    seconds: Mapping[tuple[Problem, str], float]
    faults: tuple[str, ...] = attrs.field(converter=tuple)
    #: What the kernel does not do.
    refused: tuple[Problem, ...] = attrs.field(default=(), converter=tuple)


def measured(family: Family, backend: str | None, rounds: int) -> Found:
    """Check and time it; whatever is wrong with one problem, the others are measured."""
    seconds: dict[tuple[Problem, str], float] = {}
    timed: dict[Problem, Mapping[str, Callable[[], Results]]] = {}
    faults: list[str] = []

    def told(problem: Problem, fault: Exception) -> None:
        faults.append(f"{problem}: {type(fault).__name__}: {str(fault)[:200]}")

    ready, refused = {}, []
    for problem in family:
        try:
            ready[problem] = _prepared(family, problem, backend)
        except NoKernel:
            refused.append(problem)
        except Exception as fault:
            told(problem, fault)
    if not ready:
        return Found(seconds, faults, refused)
    reference = _reference(family)
    with _turn:
        arrays, extras = family.longest.arrays(), family.longest.extras()
        for problem, passes in ready.items():
            try:
                runs = {name: partial(run, _extras(problem, extras), *arrays) for name, run in passes.items()}
                right = reference(_unpacked(extras), _ids(problem, family), *arrays)
                faults += _faults(problem, runs, right, _repeatable(problem, backend))
                timed[problem] = runs
                seconds |= _medians(problem, runs, rounds)
            except Exception as fault:
                told(problem, fault)
        # Others compile meanwhile, and may have held up Python: what looks like a cliff is looked at again.
        for _ in range(2):
            slow = {problem for (problem, _), pace, *_ in beside_each_other(seconds) if pace < CLIFF}
            for problem in slow:
                again = _medians(problem, timed[problem], rounds)
                seconds |= {what: min(seconds[what], taken) for what, taken in again.items()}
    return Found(seconds, faults, refused)


def _medians(
    problem: Problem, runs: Mapping[str, Callable[[], Results]], rounds: int
) -> dict[tuple[Problem, str], float]:
    return {(problem, name): times.median for name, times in in_bursts(runs, rounds, SECONDS).items()}


def report(found: Sequence[Found]) -> Report:
    """Every fault, and what is slowest beside its neighbours."""
    beside = (row for each in found for row in beside_each_other(each.seconds))
    rows = sorted(((f"{problem}, {name}", *row) for (problem, name), *row in beside), key=lambda row: row[1])
    faults = [fault for each in found for fault in each.faults]
    refused = sum(len(each.refused) for each in found)
    title = (
        f"{len(rows)} passes, each run {RUNS} times; {len(faults)} faults; {refused} problems refused; "
        "the slowest beside a neighbour that does no less, milliseconds"
    )
    table = Table(title, ("", "of its pace", "", "neighbour"), rows[:SHOWN])
    bars = [Bar(f"the slowest of {len(rows)} passes", rows[0][1], CLIFF, "times", at_least=True)] if rows else []
    return Report("shapes", [table], bars, faults)


def _prepared(family: Family, problem: Problem, backend: str | None) -> dict[str, Callable[..., Results]]:
    """Both passes of one problem, compiled. They take and give arrays of the family's greatest length, so that all else
    is compiled once a family.
    """
    attention, most = through_core(problem, backend), family.longest.length

    def forward(extras: Mapping[str, jax.Array], *arrays: jax.Array) -> Results:
        query, key, value, _ = (array[:, : problem.length] for array in arrays)
        return (_padded(attention(query, key, value, **extras), most),)

    def both(extras: Mapping[str, jax.Array], *arrays: jax.Array) -> Results:
        cut = (array[:, : problem.length] for array in arrays)
        return tuple(_padded(x, most) for x in with_gradients(partial(attention, **extras))(*cut))

    shapes = jax.eval_shape(family.longest.arrays)
    extras = jax.eval_shape(lambda: _extras(problem, family.longest.extras()))
    return {
        name: jax.jit(function).lower(extras, *shapes).compile()
        for name, function in zip(PASSES, (forward, both), strict=True)
    }


def _padded(x: jax.Array, length: int) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, 0)))


def _extras(problem: Problem, longest: Mapping[str, Any]) -> dict[str, Any]:
    """What the problem takes beside its arrays, of what the longest of its family takes."""
    given = {**longest, **({} if problem.sequences is None else problem.extras())}
    if problem.bias:
        given["bias"] = given["bias"][:, :, : problem.length, : problem.length]
    return given


def _unpacked(extras: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in extras.items() if not name.startswith("cum_seqlens")}


def _reference(family: Family) -> Callable[..., Results]:
    """The XLA kernel in float32, for every length of the family: what is beyond a length is of no segment."""
    wide = attrs.evolve(family.longest, dtype="float32", sequences=None)

    def both(extras: Mapping[str, jax.Array], ids: jax.Array, *arrays: jax.Array) -> Results:
        given = {name: x.astype("float32") for name, x in extras.items()}
        segments = dict.fromkeys(("q_segment_ids", "kv_segment_ids"), ids)

        def attention(*qkv: jax.Array) -> Any:
            return ejkernel_core.call("flash_attention", *qkv, backend="xla", **wide.options, **given, **segments)

        return with_gradients(attention)(*(array.astype("float32") for array in arrays))

    ids = jax.ShapeDtypeStruct((wide.batch, wide.length), jnp.int32)
    extras = _unpacked(jax.eval_shape(family.longest.extras))
    return jax.jit(both).lower(extras, ids, *jax.eval_shape(family.longest.arrays)).compile()


def _ids(problem: Problem, family: Family) -> jax.Array:
    place = np.arange(family.longest.length)
    ids = np.searchsorted(problem.bounds, place, side="right") * (place < problem.length)
    return jnp.asarray(np.broadcast_to(ids, (problem.batch, len(ids))), jnp.int32)


def _repeatable(problem: Problem, backend: str | None) -> Sequence[str]:
    """The passes that give the same bits every time: with atomics, sums come in any order."""
    return PASSES[:1] if any(getattr(plan.cfg, "atomics", False) for plan in plans(problem, backend)) else PASSES


def _faults(
    problem: Problem, runs: Mapping[str, Callable[[], Results]], right: Results, repeatable: Sequence[str]
) -> list[str]:
    """Each once, however often it was seen."""
    faults = {}
    for name, run in runs.items():
        first = run()
        for found in (first, *(run() for _ in range(RUNS - 1))):
            errors = jax.device_get(_errors(found, right[: len(found)]))
            for what, error in zip(("out", *GRADIENTS), errors, strict=False):
                if not error <= TOLERANCE[problem.dtype]:  # nor NaN
                    faults.setdefault((name, what), f"{problem}, {name}: {what} is off by {error:.1e}")
            if name in repeatable and not _same_bits(first, found):
                faults.setdefault((name, "bits"), f"{problem}, {name}: other bits another time")
    return list(faults.values())


@jax.jit
def _errors(found: Results, right: Results) -> list[jax.Array]:
    """The greatest difference from what is right, by the largest entry."""
    return [jnp.abs(a.astype("float32") - b).max() / jnp.abs(b).max() for a, b in zip(found, right, strict=True)]


@jax.jit
def _same_bits(first: Results, second: Results) -> jax.Array:
    """As bits: 0 and -0 are not the same."""
    return jnp.array([(a.view("uint16") == b.view("uint16")).all() for a, b in zip(first, second, strict=True)]).all()


def beside_each_other(
    seconds: Mapping[tuple[Problem, str], float],
) -> Iterator[tuple[tuple[Problem, str], float, float, float]]:
    """Each pass with the fastest of its neighbours that have as much to do, or more."""
    for (problem, name), own in seconds.items():
        least = problem.flops(name)
        best = min(taken for (other, which), taken in seconds.items() if which == name and other.flops(name) >= least)
        yield (problem, name), best / own, own * 1e3, best * 1e3
