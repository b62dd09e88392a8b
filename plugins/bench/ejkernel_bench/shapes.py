"""Attention of 1,000 random shapes on a GPU: right results, equal bits in each run, none far slower than others."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

import ejkernel_core
from ejkernel_core import Example, NoKernel, Plan
from ejkernel_ops.flash_attention.sizes import self_attention

from ._attention import flops, sizes
from ._calls import (
    PASSES,
    Inputs,
    Results,
    Run,
    abstract_inputs,
    by_core,
    describe,
    describe_fault,
    draw,
    options_of,
    plans,
    tolerance_of,
    with_gradients,
)
from ._report import Bar, Report, Table
from ._rows import announce
from ._timing import in_bursts

COUNT = 1000
#: The number of runs of each pass of each shape, all compared.
RUNS = 4
ROUNDS = 3
#: The minimum ratio of a shape's speed to that of another length of its family that has as much work, or more.
CLIFF = 0.5
#: The lengths of a family: they differ by little, around a length that blocks divide evenly.
OFFSETS = (-64, -1, 0, 1, 7, 24, 64, 100)
#: How long a contender runs in a round, without waiting in between.
SECONDS = 0.004
#: The number of rows in the table.
SHOWN = 8
WRT = ("query", "key", "value")

#: The name of an example, and a pass of it.
Key = tuple[str, str]


@attrs.frozen(eq=False)
class Family:
    """Examples that differ in their lengths alone."""

    #: The other arguments of ``self_attention``.
    fields: Mapping[str, Any]
    lengths: tuple[int, ...]

    def examples(self) -> list[Example]:
        return [self.example(length) for length in self.lengths]

    def longest(self) -> Example:
        return self.example(max(self.lengths))

    def example(self, length: int, **fields: Any) -> Example:
        return self_attention(**{**self.fields, "length": length, **fields})

    @property
    def token_axis(self) -> int:
        """The axis of tokens in query, key and value."""
        return 1 if self.fields.get("sequences") is None else 0


def run(backend: str | None = None, rounds: int = ROUNDS) -> Report:
    """As many as take some minutes on a GPU."""
    if jax.default_backend() != "gpu":
        return Report("shapes", (), text="shapes: there is no GPU here, and nothing was measured")
    # Most of the time is compiling: many processes do it, and one at a time has the device.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    context = multiprocessing.get_context("spawn")
    workers = max(1, min(28, (os.cpu_count() or 2) - 2))
    with ProcessPoolExecutor(workers, context, _set_lock, (context.Lock(),)) as pool:
        families = random_families(COUNT // len(OFFSETS), np.random.default_rng(0))
        results = pool.map(partial(measure, backend=backend, rounds=rounds), families)
        return report(list(_counted(results, len(families))))


def _counted(results: Iterable[FamilyResult], count: int) -> Iterator[FamilyResult]:
    """The results, each of which is announced."""
    for number, result in enumerate(results, 1):
        faults = f", {len(result.faults)} faults" if result.faults else ""
        announce(f"{number} of {count} families of shapes: {len(result.seconds)} passes{faults}")
        yield result


def _set_lock(lock: AbstractContextManager[Any]) -> None:
    global _device_lock
    _device_lock = lock


_device_lock: AbstractContextManager[Any] = nullcontext()


def random_families(count: int, generator: np.random.Generator) -> list[Family]:
    """Any head dim, grouped heads, features one by one and together."""

    def chance(probability: float) -> bool:
        return bool(generator.random() < probability)

    def family() -> Family:
        length = 128 * round(2 ** generator.uniform(0, 5))
        group = int(generator.choice([1, 1, 2, 3, 8]))
        is_packed = chance(0.2)
        # Enough for every multiprocessor, and no more than some milliseconds of work.
        rows = max(group, min(64, 2**17 // length))
        heads = group * max(1, min(16, rows) // group)
        causal = chance(0.6)
        fields = {
            "batch": 1 if is_packed else max(1, rows // heads),
            "heads": heads,
            "head_dim": int(generator.choice([64, 128, 8 * int(generator.integers(2, 33))])),
            "dtype": str(generator.choice(["bfloat16", "float16"])),
            "causal": causal,
            "window": int(generator.integers(1, length)) if chance(0.3) else None,
            "kv_heads": None if group == 1 else heads // group,
            "soft_cap": 20.0 if chance(0.2) else None,
            "bias": not is_packed and length <= 1024 and chance(0.2),
            "sinks": chance(0.2),
            "sequences": int(generator.integers(1, 20)) if is_packed else None,
        }
        return Family(fields, tuple(length + offset for offset in OFFSETS))

    return [family() for _ in range(count)]


@attrs.frozen(eq=False)
class FamilyResult:
    """The times of a family, and the faults."""

    seconds: Mapping[Key, float]
    flops: Mapping[Key, float]
    faults: tuple[str, ...] = attrs.field(converter=tuple[str, ...])
    #: The names of the examples that the kernel refuses.
    refusals: tuple[str, ...] = attrs.field(default=(), converter=tuple[str, ...])


def measure(family: Family, backend: str | None, rounds: int) -> FamilyResult:
    """Check and time the examples of a family. A fault in one does not stop the others."""
    seconds: dict[Key, float] = {}
    work: dict[Key, float] = {}
    runs_by_name: dict[str, Mapping[str, Run]] = {}
    faults: list[str] = []
    programs, refusals = {}, []
    for example in family.examples():
        try:
            programs[example] = _compile(family, example, backend)
        except NoKernel:
            refusals.append(example.name)
        except Exception as fault:
            faults.append(f"{example.name}: {describe_fault(fault)}")
    if not programs:
        return FamilyResult(seconds, work, faults, refusals)
    reference = _reference(family)
    with _device_lock:
        inputs = draw(family.longest())
        arrays = _arrays(inputs)
        for example, passes in programs.items():
            try:
                others = _others(example, inputs.parts[0])
                runs = {pass_name: partial(run, others, *arrays) for pass_name, run in passes.items()}
                expected = reference(_without_boundaries(inputs.parts[0]), _segment_ids(example, family), *arrays)
                faults += _faults(example, runs, expected, _repeatable(example, backend))
                runs_by_name[example.name] = runs
                work |= {(example.name, pass_name): flops(example, pass_name) for pass_name in PASSES}
                seconds |= _medians(example.name, runs, rounds)
            except Exception as fault:
                faults.append(f"{example.name}: {describe_fault(fault)}")
        # Other processes compile meanwhile, and may have delayed Python: a slow shape is measured again.
        for _ in range(2):
            slow_names = {name for (name, _), ratio, *_ in compare_lengths(seconds, work) if ratio < CLIFF}
            for name in slow_names:
                new_medians = _medians(name, runs_by_name[name], rounds)
                seconds |= {key: min(seconds[key], median) for key, median in new_medians.items()}
    return FamilyResult(seconds, work, faults, refusals)


def _medians(name: str, runs: Mapping[str, Run], rounds: int) -> dict[Key, float]:
    return {(name, pass_name): times.median for pass_name, times in in_bursts(runs, rounds, SECONDS).items()}


def report(results: Sequence[FamilyResult]) -> Report:
    """All faults, and the slowest shapes in comparison with their families."""
    comparisons = [row for result in results for row in compare_lengths(result.seconds, result.flops)]
    comparisons.sort(key=lambda row: row[1])
    rows = [(", ".join(key), ratio, own, best) for key, ratio, own, best in comparisons]
    faults = [fault for result in results for fault in result.faults]
    refusals = sum(len(result.refusals) for result in results)
    title = (
        f"{len(rows)} passes, each run {RUNS} times; {len(faults)} faults; {refusals} calls refused; the slowest, "
        "relative to another length of no less work, milliseconds"
    )
    table = Table(title, ("", "relative speed", "", "other length"), rows[:SHOWN])
    bars = [Bar(f"the slowest of {len(rows)} passes", comparisons[0][1], CLIFF, "times", at_least=True)] if rows else []
    return Report("shapes", [table], bars, faults)


def compare_lengths(
    seconds: Mapping[Key, float], work: Mapping[Key, float]
) -> Iterator[tuple[Key, float, float, float]]:
    """Each pass with the fastest of its family that has as much work, or more: the ratio, and both in milliseconds."""
    for key, own_seconds in seconds.items():
        best = min(
            other for other_key, other in seconds.items() if key[1] == other_key[1] and work[other_key] >= work[key]
        )
        yield key, best / own_seconds, own_seconds * 1e3, best * 1e3


# -- programs ---------------------------------------------------------------------------------------------------------


def _arrays(inputs: Inputs) -> tuple[Any, ...]:
    """Query, key, value and the cotangent of the output."""
    _, arrays, cotangents = inputs.parts
    return (*arrays, *cotangents)


def _compile(family: Family, example: Example, backend: str | None) -> dict[str, Callable[..., Results]]:
    """Both passes. They take and return arrays of the family's greatest length, so that all else compiles once."""
    longest = abstract_inputs(family.longest())
    _, length, *_ = sizes(example)
    _, greatest, *_ = sizes(family.longest())
    axis, function = family.token_axis, by_core(example, backend)

    def shortened(array: jax.Array) -> jax.Array:
        return jax.lax.slice_in_dim(array, 0, length, axis=axis)

    def padded(array: jax.Array) -> jax.Array:
        return jnp.pad(array, [(0, greatest - length if place == axis else 0) for place in range(array.ndim)])

    def forward(others: Mapping[str, jax.Array], *arrays: jax.Array) -> Results:
        query, key, value, _ = map(shortened, arrays)
        return (padded(function(query=query, key=key, value=value, **others)),)

    def forward_and_backward(others: Mapping[str, jax.Array], *arrays: jax.Array) -> Results:
        *qkv, d_out = map(shortened, arrays)
        return tuple(map(padded, with_gradients(function, WRT)(others, qkv, [d_out])))

    others = jax.eval_shape(partial(_others, example), longest.parts[0])
    return {
        pass_name: jax.jit(program).lower(others, *_arrays(longest)).compile()
        for pass_name, program in zip(PASSES, (forward, forward_and_backward), strict=True)
    }


def _others(example: Example, longest: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an example except query, key and value, from those of the longest of its family."""
    others = dict(longest)
    for name in ("cum_seqlens_q", "cum_seqlens_k"):
        if name in others:
            others[name] = jnp.asarray(describe(example)[name])
    if "bias" in others:
        _, length, *_ = sizes(example)
        others["bias"] = others["bias"][:, :, :length, :length]
    return others


def _without_boundaries(others: Mapping[str, Any]) -> dict[str, Any]:
    return {name: array for name, array in others.items() if not name.startswith("cum_seqlens")}


def _reference(family: Family) -> Callable[..., Results]:
    """The XLA kernel in float32, for all lengths of the family: the tokens after a length are in no segment."""
    example = family.longest()
    options, is_packed = options_of(example), family.token_axis == 0

    def attention(**arrays: Any) -> Any:
        return ejkernel_core.call("flash_attention", **arrays, **options, backend="xla")

    def forward_and_backward(others: Mapping[str, jax.Array], ids: jax.Array, *arrays: jax.Array) -> Results:
        segments = dict.fromkeys(("q_segment_ids", "kv_segment_ids"), ids)
        wide_others = {name: array.astype("float32") for name, array in others.items()}
        *qkv, d_out = (array.astype("float32")[None if is_packed else ...] for array in arrays)
        results = with_gradients(attention, WRT)({**wide_others, **segments}, qkv, [d_out])
        return tuple(array[0] for array in results) if is_packed else results

    inputs = abstract_inputs(example)
    batch, length, *_ = sizes(example)
    ids = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    return jax.jit(forward_and_backward).lower(_without_boundaries(inputs.parts[0]), ids, *_arrays(inputs)).compile()


def _segment_ids(example: Example, family: Family) -> jax.Array:
    batch, length, *_ = sizes(example)
    positions = np.arange(max(family.lengths))
    boundaries = describe(example).get("cum_seqlens_q", [0, length])
    ids = np.searchsorted(boundaries, positions, side="right") * (positions < length)
    return jnp.asarray(np.broadcast_to(ids, (batch, len(ids))), jnp.int32)


def _repeatable(example: Example, backend: str | None) -> Sequence[str]:
    """The passes that give the same bits every time: with atomics, sums have no fixed order."""
    return PASSES[:1] if any(map(_is_atomic, plans(example, backend))) else PASSES


def _is_atomic(plan: Plan) -> bool:
    return plan.kernel.name == "flash_attention_bwd.gluon_sm90" or bool(getattr(plan.cfg, "atomics", False))


def _faults(example: Example, runs: Mapping[str, Run], expected: Results, repeatable: Sequence[str]) -> list[str]:
    """Each fault once, in however many runs it is."""
    faults: dict[tuple[str, str], str] = {}
    for pass_name, run in runs.items():
        first, label = run(), f"{example.name}, {pass_name}"
        for results in (first, *(run() for _ in range(RUNS - 1))):
            errors = jax.device_get(_errors(results, expected[: len(results)]))
            for name, error in zip(("out", *(f"d_{name}" for name in WRT)), errors, strict=False):
                if not error <= tolerance_of(example):  # nor NaN
                    faults.setdefault((pass_name, name), f"{label}: {name} is off by {error:.1e}")
            if pass_name in repeatable and not _has_same_bits(first, results):
                faults.setdefault((pass_name, "bits"), f"{label}: other bits in another run")
    return list(faults.values())


@jax.jit
def _errors(results: Results, expected: Results) -> list[jax.Array]:
    """The greatest difference of each result, relative to the largest expected entry."""
    pairs = zip(results, expected, strict=True)
    return [jnp.abs(result.astype("float32") - right).max() / jnp.abs(right).max() for result, right in pairs]


@jax.jit
def _has_same_bits(first: Results, second: Results) -> jax.Array:
    """As bits: 0 and -0 differ."""
    return jnp.array([(a.view("uint16") == b.view("uint16")).all() for a, b in zip(first, second, strict=True)]).all()
