"""The arguments of a flash attention call: checked once, and brought into the canonical form that kernels see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_ops.arrays import DTYPES, check_integers
from ejkernel_ops.attention_options import flag, soft_cap, softmax_scale, window
from ejkernel_ops.options import brief, number
from ejkernel_ops.symbolic import is_symbolic

from .axes import AXES
from .positions import MAX_POSITION, has_positions, prepare_positions

Arguments = dict[str, Any]


def prepare(arguments: Arguments) -> tuple[Arguments, Callable[[tuple[Any, ...]], Any]]:
    """The canonical arguments of a call, after checks, and a function that returns results in the layout of the caller.

    The canonical form is what ``AXES`` describes: a packed call is a batch of one, segment ids and boundaries are
    int32, a window is (left, right) or None, numbers are floats, and there is a scale. ``q_start`` is there wherever a
    call has a position or a length, with one integer for each batch entry, like ``kv_lengths``.
    """
    is_packed = _is_packed(arguments)
    _check_dtypes(arguments)
    canonical = {**arguments, **_options(arguments)}
    canonical["dropout_seed"] = _seed(arguments, canonical["dropout_prob"])
    if is_packed:
        _check_packed_ranks(arguments)
        for name in ("query", "key", "value", "q_segment_ids", "kv_segment_ids"):
            if canonical[name] is not None:
                canonical[name] = canonical[name][None]
    for name in ("cum_seqlens_q", "cum_seqlens_k", "q_segment_ids", "kv_segment_ids"):
        if canonical[name] is not None:  # narrower integers may be too small for the number of tokens
            canonical[name] = canonical[name].astype(jnp.int32)
    if canonical["softmax_aux"] is not None and canonical["softmax_aux"].ndim == 1:
        canonical["softmax_aux"] = canonical["softmax_aux"][:, None]
    _check_symbolic(canonical)
    canonical |= prepare_positions(canonical)
    canonical = AXES.canonical(canonical)
    canonical["sliding_window"] = _bounded_window(canonical)
    if canonical["softmax_scale"] is None:
        canonical["softmax_scale"] = canonical["query"].shape[-1] ** -0.5
    return canonical, _restore(is_packed, canonical["return_lse"])


def _restore(is_packed: bool, return_lse: bool) -> Callable[[tuple[Any, ...]], Any]:
    def restore(results: tuple[Any, ...]) -> Any:
        # A result that the caller does not get is not read either: the backward would have a cotangent for it.
        wanted = results if return_lse else results[:1]
        out, *lse = (result[0] for result in wanted) if is_packed else wanted
        return (out, *lse) if return_lse else out

    return restore


def _is_packed(a: Arguments) -> bool:
    _check_together(a, "cum_seqlens_q", "cum_seqlens_k")
    return a["cum_seqlens_q"] is not None


def _check_together(a: Arguments, *names: str) -> None:
    missing = [name for name in names if a[name] is None]
    if missing and len(missing) < len(names):
        raise ValueError(f"{missing[0]}: {' and '.join(names)} must be passed together")


def _check_packed_ranks(a: Arguments) -> None:
    for name in ("query", "key", "value"):
        if a[name].ndim != 3:
            shape = "(total, heads, head_dim) with cum_seqlens"
            raise ValueError(f"{name}: takes {shape}; got shape {a[name].shape}")


def _check_dtypes(a: Arguments) -> None:
    query, key, value = a["query"], a["key"], a["value"]
    for name in ("query", "key", "value"):
        if a[name].dtype not in DTYPES:
            raise TypeError(f"{name}: takes float16, bfloat16, float32 or float64; got {a[name].dtype}")
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(f"key, value: take the query's dtype {query.dtype}; got {key.dtype} and {value.dtype}")
    _check_together(a, "q_segment_ids", "kv_segment_ids")
    for name in ("cum_seqlens_q", "cum_seqlens_k", "q_segment_ids", "kv_segment_ids"):
        if a[name] is not None:
            check_integers(name, a[name])
    for name, hint in (("bias", " (a boolean mask is attention_mask)"), ("softmax_aux", "")):
        if a[name] is not None and a[name].dtype not in DTYPES:
            raise TypeError(f"{name}: takes floats; got {a[name].dtype}{hint}")
    mask = a["attention_mask"]
    if mask is not None and mask.dtype != jnp.bool_:
        raise TypeError(f"attention_mask: takes booleans; got {mask.dtype} (numbers to add are bias)")


def _check_symbolic(a: Arguments) -> None:
    for name in ("query", "key", "value"):
        sizes = a[name].shape[-2:]
        if any(map(is_symbolic, sizes)):
            heads = " of ".join(map(str, sizes))
            raise ValueError(f"{name}: only batch and length may be symbolic; got heads {heads}")


def _options(a: Arguments) -> Arguments:
    return {
        "causal": flag("causal", a["causal"]),
        "return_lse": flag("return_lse", a["return_lse"]),
        "softmax_scale": softmax_scale(a["softmax_scale"], a["query"].dtype),
        "logits_soft_cap": soft_cap(a["logits_soft_cap"], a["query"].dtype),
        "sliding_window": window(a["sliding_window"]),
        "dropout_prob": _probability(a["dropout_prob"]),
    }


def _probability(value: Any) -> float:
    probability = number("dropout_prob", value)
    if not 0 <= probability < 1:
        raise ValueError(f"dropout_prob: takes a probability in [0, 1); got {brief(value)}")
    return probability


def _bounded_window(a: Arguments) -> tuple[int, int] | None:
    """The window, with no side longer than all tokens together, or than positions may be apart."""
    if a["sliding_window"] is None:
        return None
    left, right = a["sliding_window"]
    widest = a["query"].shape[1] + a["key"].shape[1]
    if has_positions(a):
        widest = 2 * MAX_POSITION
    elif is_symbolic(widest):
        widest = int(np.iinfo(np.int32).max)
    return min(left, widest), min(right, widest)


def _seed(a: Arguments, probability: float) -> Any:
    seed = a["dropout_seed"]
    if probability == 0.0:
        return None
    if seed is None:
        raise ValueError("dropout_seed: dropout_prob above 0 takes a seed, an int or a traced integer; got None")
    if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        raise TypeError("dropout_seed: takes an integer; got a random key (jax.random.bits(key) makes one of it)")
    check_integers("dropout_seed", seed)
    return seed.astype(jnp.uint32)
