"""``jax.vmap`` of attention is attention on a larger batch; of packed calls, on a longer row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from ejkernel_core import Axes

Arguments = dict[str, Any]
Folded = tuple[Arguments, Callable[[tuple[Any, ...]], tuple[Any, ...]]] | None

#: Arguments with the batch as their first axis, and where their tokens are behind it.
_TOKENS = {
    **dict.fromkeys(("query", "key", "value", "q_segment_ids", "kv_segment_ids", "out", "d_out"), 0),
    "lse": 1,
    "d_lse": 1,
}


def fold(axes: Axes, arguments: Mapping[str, Any], mapped: frozenset[str], size: int) -> Folded:
    """Fold the mapped axis into the batch; None where the result would not be that of a loop."""
    if arguments["dropout_prob"] > 0:  # the dropout mask depends on the place in the batch
        return None
    if arguments["cum_seqlens_q"] is None:
        return axes.fold(arguments, mapped, size)
    if "softmax_aux" in mapped or {"bias", "softmax_aux"} & set(arguments.get("wrt", ())):  # one for the whole row
        return None
    if arguments["bias"] is not None or arguments["attention_mask"] is not None:
        return None  # they would grow with the square of the rows
    return _fold_packed(arguments, mapped, size)


def _fold_packed(arguments: Mapping[str, Any], mapped: frozenset[str], size: int) -> Folded:
    """Rows of packed sequences, one behind the other."""
    folded = dict(arguments)
    for name, axis in _TOKENS.items():
        if arguments.get(name) is not None:
            row = (
                arguments[name][:, 0]
                if name in mapped
                else jnp.broadcast_to(arguments[name], (size, *arguments[name].shape[1:]))
            )
            folded[name] = _joined(row, axis)
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
