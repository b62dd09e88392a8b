"""``jax.vmap`` of attention is attention with a larger batch, or with a longer row if it is packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from ejkernel_core import Axes

Arguments = dict[str, Any]
Folded = tuple[Arguments, Callable[[tuple[Any, ...]], tuple[Any, ...]]] | None

#: The axis of tokens, after the batch, of each argument that has both.
_TOKENS = {
    **dict.fromkeys(("query", "key", "value", "q_segment_ids", "kv_segment_ids", "out", "d_out"), 0),
    "lse": 1,
    "d_lse": 1,
}


def fold(
    axes: Axes, arguments: Mapping[str, Any], mapped: frozenset[str], size: int, sums: frozenset[str] = frozenset()
) -> Folded:
    """Fold the mapped axis into the batch; None if the result would differ from that of a loop."""
    if arguments["dropout_prob"] > 0:  # the dropout mask depends on the index in the batch
        return None
    if arguments["cum_seqlens_q"] is None:
        return axes.fold(arguments, mapped, size, sums)
    # All sequences of a row have the same sinks, and the same bias.
    if "softmax_aux" in mapped or {"bias", "softmax_aux"} & set(arguments.get("wrt", ())) - sums:
        return None
    if arguments["bias"] is not None or arguments["attention_mask"] is not None:
        return None  # folded, they would grow with the square of the number of rows
    return _fold_packed(arguments, mapped, size, sums)


def _fold_packed(arguments: Mapping[str, Any], mapped: frozenset[str], size: int, sums: frozenset[str]) -> Folded:
    """Concatenate the packed sequences of all rows into one row."""
    folded = dict(arguments)
    for name, axis in _TOKENS.items():
        if arguments.get(name) is not None:
            row = (
                arguments[name][:, 0]
                if name in mapped
                else jnp.broadcast_to(arguments[name], (size, *arguments[name].shape[1:]))
            )
            folded[name] = _concatenate(row, axis)
    q_total, k_total = (folded[name].shape[1] // size for name in ("query", "key"))
    for name, total in (("cum_seqlens_q", q_total), ("cum_seqlens_k", k_total)):
        ends = arguments[name] if name in mapped else jnp.broadcast_to(arguments[name], (size, *arguments[name].shape))
        folded[name] = _boundaries(ends, total, is_keys=name == "cum_seqlens_k")

    names = arguments.get("wrt", ("out", "lse"))

    def unfold(results: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(_result(result, name) for result, name in zip(results, names, strict=True))

    def _result(result: Any, name: str) -> Any:
        if name == "softmax_aux":  # all rows have the same sinks, so their gradient is a sum already
            return result
        return _split(result, size).sum(0) if name in sums else _split(result, size)

    return folded, unfold


def _boundaries(cum_seqlens: Any, total: int, is_keys: bool) -> Any:
    """The boundaries of one long row from those of all rows, (rows, n + 1).

    A row may end in padding, which sees nothing and is visible to nothing. So each row has two more sequences: one with
    the padding of the queries and no keys, and one with the padding of the keys and no queries.
    """
    last, end = cum_seqlens[:, -1:], jnp.full_like(cum_seqlens[:, -1:], total)
    ends = jnp.concatenate([cum_seqlens[:, 1:], last if is_keys else end, end], axis=1)
    starts = total * jnp.arange(len(ends), dtype=ends.dtype)[:, None]
    return jnp.concatenate([jnp.zeros(1, ends.dtype), (ends + starts).reshape(-1)])


def _concatenate(rows: Any, axis: int) -> Any:
    """Concatenate rows along their token axis into a batch of one: (rows, length, ...) to (1, rows * length, ...)."""
    aligned = jnp.moveaxis(rows, 0, axis)
    return aligned.reshape(
        1, *aligned.shape[:axis], aligned.shape[axis] * aligned.shape[axis + 1], *aligned.shape[axis + 2 :]
    )


def _split(result: Any, size: int) -> Any:
    """The reverse of `_concatenate`, for a result: (1, rows * length, ...) to (rows, 1, length, ...)."""
    axis = 2 if result.ndim == 3 else 1  # only the lse has rank 3
    parts = result.reshape(*result.shape[:axis], size, result.shape[axis] // size, *result.shape[axis + 1 :])
    return jnp.moveaxis(parts, axis, 0)
