"""The ids of packed tokens against ``jnp.repeat``, and the segment ids of a mask, all under jit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_packed import mask_to_segment_ids, prepare_position_ids, prepare_sequence_ids

from ._report import Bar, Report, Table
from ._timing import COLUMNS, interleaved

TOKENS, SEQUENCES = 1 << 20, 4096
MASK = 4096
ROUNDS = 20
#: As fast, but for what two measurements of one program differ by.
BAR = 1.05
MASK_BAR_S = 1.0


def run(backend: str | None = None, rounds: int = ROUNDS) -> Report:
    """No kernel takes part: ``backend`` changes nothing."""
    ids, bars, wrong = token_ids(TOKENS, SEQUENCES, rounds)
    mask, bar, wrong_mask = mask_ids(MASK, rounds)
    return Report("packed", [ids, mask], [*bars, bar], wrong + wrong_mask)


def token_ids(tokens: int, sequences: int, rounds: int) -> tuple[Table, list[Bar], list[str]]:
    """Positions and sequences of so many tokens, each both ways."""
    inner = np.random.default_rng(0).integers(0, tokens + 1, sequences - 1)
    bounds = jnp.asarray(np.concatenate([[0], np.sort(inner), [tokens]]), jnp.int32)
    rows, bars, wrong = [], [], []
    for name, ours, repeated in (
        ("prepare_position_ids", prepare_position_ids, _positions),
        ("prepare_sequence_ids", prepare_sequence_ids, _sequences),
    ):
        runs = {name: _ready(ours, bounds, tokens), f"{name}, jnp.repeat": _ready(repeated, bounds, tokens)}
        given, right = (np.asarray(run()) for run in runs.values())
        wrong += [] if np.array_equal(given, right) else [f"{name} differs from jnp.repeat"]
        own, peer = (times := interleaved(runs, rounds)).values()
        rows += [(who, *taken.scaled(1e-3)) for who, taken in times.items()]
        bars.append(Bar(f"{name} / jnp.repeat", own.median / peer.median, BAR, "times"))
    title = f"{tokens} tokens in {sequences} sequences: milliseconds, {rounds} rounds in turn"
    return Table(title, ("", *COLUMNS), rows), bars, wrong


def mask_ids(length: int, rounds: int) -> tuple[Table, Bar, list[str]]:
    """The slowest of three kinds of mask counts: few rows that differ, each more than the last, all by chance."""
    place = np.arange(length)
    number = place // 8
    masks = {
        "segments": number[:, None] == number,
        "causal": place[:, None] >= place,
        "random": np.random.default_rng(0).random((length, length)) < 0.5,
    }
    ids = {"segments": number + 1, "causal": place + 1, "random": place + 1}
    convert = jax.jit(lambda mask: mask_to_segment_ids(mask))
    runs = {name: functools.partial(convert, jnp.asarray(mask)) for name, mask in masks.items()}
    wrong = [f"the query ids of the {name} mask" for name in masks if not np.array_equal(runs[name]()[0], ids[name])]
    times = interleaved(runs, rounds)
    bar = Bar(f"mask_to_segment_ids, {length} x {length}", max(t.median for t in times.values()), MASK_BAR_S, "s")
    title = f"mask_to_segment_ids, {length} x {length}: milliseconds, {rounds} rounds in turn"
    return Table(title, ("", *COLUMNS), [(name, *taken.scaled(1e-3)) for name, taken in times.items()]), bar, wrong


def _ready(ids: Callable[..., jax.Array], bounds: jax.Array, tokens: int) -> Callable[[], Any]:
    compiled = jax.jit(lambda bounds: ids(bounds, total_length=tokens))
    return lambda: compiled(bounds)


def _sequences(bounds: jax.Array, *, total_length: int) -> jax.Array:
    numbers = jnp.arange(bounds.size - 1, dtype=bounds.dtype)
    return jnp.repeat(numbers, jnp.diff(bounds), total_repeat_length=total_length)


def _positions(bounds: jax.Array, *, total_length: int) -> jax.Array:
    begins = jnp.repeat(bounds[:-1], jnp.diff(bounds), total_repeat_length=total_length)
    return jnp.arange(total_length, dtype=bounds.dtype) - begins
