"""Ids of packed tokens against jnp.repeat, 1 M tokens; segment ids of a 4096 x 4096 mask; all under jit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_packed import mask_to_segment_ids, prepare_position_ids, prepare_sequence_ids

from ._report import Bar, Report, Table
from ._rows import Rows, announced_table
from ._timing import COLUMNS, interleaved

TOKENS, SEQUENCES = 1 << 20, 4096
MASK = 4096
ROUNDS = 20
#: As fast, but for the difference between two measurements of one program.
LIMIT = 1.05
MASK_LIMIT_S = 1.0


def run(backend: str | None = None, rounds: int = ROUNDS) -> Report:
    """There is no kernel in it: ``backend`` changes nothing."""
    ids, bars, faults = token_ids(TOKENS, SEQUENCES, rounds)
    mask, bar, mask_faults = mask_ids(MASK, rounds)
    return Report("packed", [ids, mask], [*bars, bar], faults + mask_faults)


def token_ids(tokens: int, sequences: int, rounds: int) -> tuple[Table, list[Bar], list[str]]:
    """Positions and sequences of so many tokens, by our functions and by ``jnp.repeat``."""
    inner = np.random.default_rng(0).integers(0, tokens + 1, sequences - 1)
    bounds = jnp.asarray(np.concatenate([[0], np.sort(inner), [tokens]]), jnp.int32)
    title = f"{tokens} tokens in {sequences} sequences: milliseconds, {rounds} rounds in turn"
    rows = Rows(title, ("", *COLUMNS), series=("median",))
    bars: list[Bar] = []
    faults: list[str] = []
    for name, ours, repeated in (
        ("prepare_position_ids", prepare_position_ids, _positions),
        ("prepare_sequence_ids", prepare_sequence_ids, _sequences),
    ):
        runs = {name: _jitted(ours, bounds, tokens), f"{name}, jnp.repeat": _jitted(repeated, bounds, tokens)}
        result, expected = (np.asarray(run()) for run in runs.values())
        faults += [] if np.array_equal(result, expected) else [f"{name} differs from jnp.repeat"]
        our_times, peer_times = (times := interleaved(runs, rounds)).values()
        for contender, contender_times in times.items():
            rows.add(contender, *contender_times.scaled(1e-3))
        bars.append(Bar(f"{name} / jnp.repeat", our_times.median / peer_times.median, LIMIT, "times"))
    return rows.table(), bars, faults


def mask_ids(length: int, rounds: int) -> tuple[Table, Bar, list[str]]:
    """The limit is for the slowest of three masks: with equal rows, with rows that grow, and random."""
    positions = np.arange(length)
    segments = positions // 8
    masks = {
        "segments": segments[:, None] == segments,
        "causal": positions[:, None] >= positions,
        "random": np.random.default_rng(0).random((length, length)) < 0.5,
    }
    ids = {"segments": segments + 1, "causal": positions + 1, "random": positions + 1}
    convert = jax.jit(lambda mask: mask_to_segment_ids(mask))
    runs = {name: functools.partial(convert, jnp.asarray(mask)) for name, mask in masks.items()}
    faults = [f"the query ids of the {name} mask" for name in masks if not np.array_equal(runs[name]()[0], ids[name])]
    times = interleaved(runs, rounds)
    bar = Bar(
        f"mask_to_segment_ids, {length} x {length}",
        max(contender_times.median for contender_times in times.values()),
        MASK_LIMIT_S,
        "s",
    )
    title = f"mask_to_segment_ids, {length} x {length}: milliseconds, {rounds} rounds in turn"
    return (
        announced_table(
            title, ("", *COLUMNS), [(name, *contender_times.scaled(1e-3)) for name, contender_times in times.items()]
        ),
        bar,
        faults,
    )


def _jitted(ids: Callable[..., jax.Array], bounds: jax.Array, tokens: int) -> Callable[[], Any]:
    compiled = jax.jit(lambda bounds: ids(bounds, total_length=tokens))
    return lambda: compiled(bounds)


def _sequences(bounds: jax.Array, *, total_length: int) -> jax.Array:
    numbers = jnp.arange(bounds.size - 1, dtype=bounds.dtype)
    return jnp.repeat(numbers, jnp.diff(bounds), total_repeat_length=total_length)


def _positions(bounds: jax.Array, *, total_length: int) -> jax.Array:
    starts = jnp.repeat(bounds[:-1], jnp.diff(bounds), total_repeat_length=total_length)
    return jnp.arange(total_length, dtype=bounds.dtype) - starts
