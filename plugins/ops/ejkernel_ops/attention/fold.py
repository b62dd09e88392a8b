"""``jax.vmap`` of attention is attention on a larger batch: how the mapped axis goes in and comes out again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

Arguments = dict[str, Any]
Folded = tuple[Arguments, Callable[[tuple[Any, ...]], tuple[Any, ...]]] | None

#: Arguments with the batch as their first axis.
_BATCHED = ("query", "key", "value", "q_segment_ids", "kv_segment_ids", "out", "lse", "d_out", "d_lse")
#: Arguments whose first axis is the batch, or 1 for all of it.
_BROADCAST = ("bias", "attention_mask")
#: Where the tokens are, once the batch is taken away.
_TOKEN_AXIS = {"lse": 1, "d_lse": 1}


def fold(arguments: Mapping[str, Any], mapped: frozenset[str], size: int) -> Folded:
    """Fold the mapped axis into the batch; None where the result would not be that of a loop."""
    if arguments["dropout_prob"] > 0:  # the dropout mask depends on the place in the batch
        return None
    if mapped & {"softmax_aux"} or {"bias", "softmax_aux"} & set(arguments.get("wrt", ())):
        # One set of sinks serves a whole call; and the gradient of what the batch shares is summed over the batch.
        return None
    if arguments["cum_seqlens_q"] is not None:
        return _fold_packed(arguments, mapped, size)
    batch = arguments["query"].shape[0] if "query" not in mapped else arguments["query"].shape[1]
    folded = dict(arguments)
    for name in _BATCHED:
        if arguments.get(name) is not None:
            folded[name] = _merged(arguments[name], name in mapped, size)
    for name in _BROADCAST:
        value = arguments[name]
        if value is not None and (name in mapped or value.shape[0] > 1):
            folded[name] = _merged(_spread(value, name in mapped, batch), name in mapped, size)
    return folded, lambda results: tuple(r.reshape(size, batch, *r.shape[1:]) for r in results)


def _merged(value: Any, mapped: bool, size: int) -> Any:
    """(size, batch, ...) or (batch, ...) to (size * batch, ...)."""
    whole = value if mapped else jnp.broadcast_to(value, (size, *value.shape))
    return whole.reshape(size * whole.shape[1], *whole.shape[2:])


def _spread(value: Any, mapped: bool, batch: int) -> Any:
    """A first axis of 1 that stands for the whole batch, written out: beside others it has to be."""
    axis = 1 if mapped else 0
    return jnp.repeat(value, batch, axis) if value.shape[axis] == 1 and batch > 1 else value


def _fold_packed(arguments: Mapping[str, Any], mapped: frozenset[str], size: int) -> Folded:
    """Rows of packed sequences, one behind the other."""
    if any(arguments[name] is not None for name in _BROADCAST):  # they would grow with the square of the rows
        return None
    folded = dict(arguments)
    for name in _BATCHED:
        if arguments.get(name) is not None:
            row = (
                arguments[name][:, 0]
                if name in mapped
                else jnp.broadcast_to(arguments[name], (size, *arguments[name].shape[1:]))
            )
            folded[name] = _joined(row, _TOKEN_AXIS.get(name, 0))
    q_total, k_total = (folded[name].shape[1] // size for name in ("query", "key"))
    for name, total in (("cum_seqlens_q", q_total), ("cum_seqlens_k", k_total)):
        ends = arguments[name] if name in mapped else jnp.broadcast_to(arguments[name], (size, *arguments[name].shape))
        folded[name] = _row_after_row(ends, total, keys=name == "cum_seqlens_k")

    def unfold(results: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(_parted(result, size) for result in results)

    return folded, unfold


def _row_after_row(cum_seqlens: Any, total: int, keys: bool) -> Any:
    """The (rows, n + 1) boundaries of the rows as those of one long row.

    A row may end in padding. So that it stays seen by nobody and sees nobody, each row gets two sequences more: one
    with the padding of the queries and no keys, then one with the padding of the keys and no queries.
    """
    last, end = cum_seqlens[:, -1:], jnp.full_like(cum_seqlens[:, -1:], total)
    ends = jnp.concatenate([cum_seqlens[:, 1:], last if keys else end, end], axis=1)
    starts = total * jnp.arange(len(ends), dtype=ends.dtype)[:, None]
    return jnp.concatenate([jnp.zeros(1, ends.dtype), (ends + starts).reshape(-1)])


def _joined(rows: Any, axis: int) -> Any:
    """Rows of a batch of one, joined along their token axis: (rows, length, ...) to (1, rows * length, ...)."""
    aligned = jnp.moveaxis(rows, 0, axis)
    return aligned.reshape(
        1, *aligned.shape[:axis], aligned.shape[axis] * aligned.shape[axis + 1], *aligned.shape[axis + 2 :]
    )


def _parted(joined: Any, size: int) -> Any:
    """The reverse, for a result: (1, rows * length, ...) to (rows, 1, length, ...)."""
    axis = 2 if joined.ndim == 3 else 1  # the log-sum-exp alone has rank 3
    parts = joined.reshape(*joined.shape[:axis], size, joined.shape[axis] // size, *joined.shape[axis + 1 :])
    return jnp.moveaxis(parts, axis, 0)
