"""What a flash attention call takes: checked here once, and brought into the one form that kernels see."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Arguments = dict[str, Any]

DTYPES = tuple(jnp.dtype(name) for name in ("float16", "bfloat16", "float32", "float64"))


def prepare(arguments: Arguments) -> tuple[Arguments, Callable[[tuple[Any, ...]], Any]]:
    """Check a call and make it canonical; and how to give the caller his layout back.

    Canonical is: query, key and value (batch, length, heads, head_dim), a packed call being a batch of one; bias and
    mask of rank 4; segment ids (batch, length) int32; sinks (heads, n); a window as (left, right) or None; floats where
    floats belong; the scale given.
    """
    packed = _check_layout(arguments)
    canonical = {**arguments, **_options(arguments)}
    if packed:
        for name in ("query", "key", "value", "q_segment_ids", "kv_segment_ids"):
            if canonical[name] is not None:
                canonical[name] = canonical[name][None]
        for name in ("cum_seqlens_q", "cum_seqlens_k"):  # narrower integers could not count the tokens
            canonical[name] = canonical[name].astype(jnp.int32)
    canonical["sliding_window"] = _reaching(canonical)
    for name in ("bias", "attention_mask"):
        canonical[name] = _broadcastable(name, canonical)
    canonical["q_segment_ids"], canonical["kv_segment_ids"] = _segments(canonical)
    canonical["softmax_aux"] = _sinks(canonical)
    canonical["dropout_seed"] = _seed(canonical)
    if canonical["softmax_scale"] is None:
        canonical["softmax_scale"] = canonical["query"].shape[-1] ** -0.5
    return canonical, _restore(packed, canonical["return_lse"])


def _restore(packed: bool, return_lse: bool) -> Callable[[tuple[Any, ...]], Any]:
    def restore(results: tuple[Any, ...]) -> Any:
        out, lse = (result[0] for result in results) if packed else results
        return (out, lse) if return_lse else out

    return restore


def _check_layout(a: Arguments) -> bool:
    """True for a packed call. Everything that query, key and value can have wrong with each other."""
    packed = _check_cum_seqlens(a)
    rank, layout = (3, "(total, heads, head_dim)") if packed else (4, "(batch, length, heads, head_dim)")
    for name in ("query", "key", "value"):
        shape = a[name].shape
        if len(shape) != rank:
            why = " when cum_seqlens are given" if packed else ""
            raise ValueError(f"{name}: takes {layout}{why}; got shape {shape}")
        if a[name].dtype not in DTYPES:
            raise TypeError(f"{name}: takes float16, bfloat16, float32 or float64; got {a[name].dtype}")
    query, key, value = a["query"], a["key"], a["value"]
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(f"key, value: take the query's dtype {query.dtype}; got {key.dtype} and {value.dtype}")
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(f"value: takes the key's batch, length and heads {key.shape[:-1]}; got {value.shape[:-1]}")
    if not packed and query.shape[0] != key.shape[0]:
        raise ValueError(f"key: takes the query's batch {query.shape[0]}; got {key.shape[0]}")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"key: takes the query's head_dim {query.shape[-1]}; got {key.shape[-1]}")
    if 0 in (query.shape[-1], value.shape[-1], key.shape[-2]):
        raise ValueError(f"key, value: heads and head_dim are at least 1; got {key.shape} and {value.shape}")
    if query.shape[-2] == 0 or query.shape[-2] % key.shape[-2]:
        raise ValueError(f"query: takes a multiple of the {key.shape[-2]} key heads; got {query.shape[-2]} heads")
    return packed


def _check_cum_seqlens(a: Arguments) -> bool:
    q, k = a["cum_seqlens_q"], a["cum_seqlens_k"]
    if (q is None) != (k is None):
        missing = "cum_seqlens_q" if q is None else "cum_seqlens_k"
        raise ValueError(f"{missing}: cum_seqlens_q and cum_seqlens_k are given together or not at all")
    if q is None:
        return False
    for name in ("cum_seqlens_q", "cum_seqlens_k"):
        _check_integers(name, a[name])
        if len(a[name].shape) != 1 or a[name].shape[0] < 2:
            raise ValueError(f"{name}: takes the sequences' count plus one ints, from 0; got shape {a[name].shape}")
    if q.shape != k.shape:
        raise ValueError(f"cum_seqlens_k: takes as many as cum_seqlens_q, {q.shape[0]}; got {k.shape[0]}")
    return True


def _options(a: Arguments) -> Arguments:
    for name in ("causal", "return_lse"):
        if not isinstance(a[name], (bool, np.bool_)):
            raise TypeError(f"{name}: takes True or False; got {_shown(a[name])}")
    return {
        "causal": bool(a["causal"]),
        "return_lse": bool(a["return_lse"]),
        "softmax_scale": _number("softmax_scale", a["softmax_scale"]),
        "logits_soft_cap": _soft_cap(a["logits_soft_cap"]),
        "sliding_window": _window(a["sliding_window"]),
        "dropout_prob": _probability(a["dropout_prob"]),
    }


def _number(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: takes a number, known while tracing; got {_shown(value)}")
    if not np.isfinite(value):
        raise ValueError(f"{name}: takes a finite number; got {value}")
    return float(value)


def _soft_cap(value: Any) -> float | None:
    cap = _number("logits_soft_cap", value)
    if cap is not None and cap <= 0:
        raise ValueError(f"logits_soft_cap: takes a number above 0, or None; got {value}")
    return cap


def _probability(value: Any) -> float:
    probability = _number("dropout_prob", value)
    if probability is None or not 0 <= probability < 1:
        raise ValueError(f"dropout_prob: takes a probability in [0, 1); got {value}")
    return probability


def _window(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    sides = (value, value) if not isinstance(value, tuple) else value
    if len(sides) != 2 or any(isinstance(s, (bool, np.bool_)) or not isinstance(s, numbers.Integral) for s in sides):
        raise TypeError(f"sliding_window: takes an int, a pair (left, right) of ints, or None; got {_shown(value)}")
    left, right = (int(side) for side in sides)
    if left < 0 or right < 0:
        raise ValueError(f"sliding_window: takes sizes of at least 0; got {value}")
    return left, right


def _reaching(a: Arguments) -> tuple[int, int] | None:
    """The window, no wider than all there is."""
    if a["sliding_window"] is None:
        return None
    left, right = a["sliding_window"]
    farthest = a["query"].shape[1] + a["key"].shape[1]
    return min(left, farthest), min(right, farthest)


def _broadcastable(name: str, a: Arguments) -> Any:
    """Bias or mask with a rank of 4, every dimension its own or 1."""
    value = a[name]
    if value is None:
        return None
    floats = name == "bias"
    if floats and value.dtype not in DTYPES:
        raise TypeError(f"bias: takes floats; got {value.dtype} (a boolean mask is attention_mask)")
    if not floats and value.dtype != jnp.bool_:
        raise TypeError(f"attention_mask: takes booleans; got {value.dtype} (numbers to add are bias)")
    (batch, q_length, heads, _), k_length = a["query"].shape, a["key"].shape[1]
    full = (batch, heads, q_length, k_length)
    shape = (1,) * (4 - len(value.shape)) + tuple(value.shape)
    if len(shape) != 4 or any(size not in (1, whole) for size, whole in zip(shape, full, strict=True)):
        raise ValueError(
            f"{name}: takes what broadcasts to (batch, heads, query length, key length) = {full}; got {value.shape}"
        )
    return value.reshape(shape)


def _segments(a: Arguments) -> tuple[Any, Any]:
    q, kv = a["q_segment_ids"], a["kv_segment_ids"]
    if (q is None) != (kv is None):
        missing = "q_segment_ids" if q is None else "kv_segment_ids"
        raise ValueError(f"{missing}: q_segment_ids and kv_segment_ids are given together or not at all")
    if q is None:
        return None, None
    for name, sequence in (("q_segment_ids", "query"), ("kv_segment_ids", "key")):
        _check_integers(name, a[name])
        if a[name].shape != a[sequence].shape[:2]:
            raise ValueError(
                f"{name}: takes one id a token of {sequence}, shape {a[sequence].shape[:2]}; got {a[name].shape}"
            )
    return q.astype(jnp.int32), kv.astype(jnp.int32)


def _sinks(a: Arguments) -> Any:
    sinks, heads = a["softmax_aux"], a["query"].shape[2]
    if sinks is None:
        return None
    if sinks.dtype not in DTYPES:
        raise TypeError(f"softmax_aux: takes floats; got {sinks.dtype}")
    if len(sinks.shape) not in (1, 2) or sinks.shape[0] != heads:
        raise ValueError(f"softmax_aux: takes sink logits (heads,) or (heads, n) with {heads} heads; got {sinks.shape}")
    return sinks.reshape(heads, -1)


def _seed(a: Arguments) -> Any:
    seed = a["dropout_seed"]
    if a["dropout_prob"] == 0.0:
        return None
    if seed is None:
        raise ValueError("dropout_seed: dropout_prob above 0 takes a seed, an int or a traced integer; got None")
    if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        raise TypeError("dropout_seed: takes an integer; got a random key (jax.random.bits(key) makes one of it)")
    _check_integers("dropout_seed", seed)
    if seed.shape != ():
        raise ValueError(f"dropout_seed: takes one integer; got shape {seed.shape}")
    return seed.astype(jnp.uint32)


def _check_integers(name: str, value: Any) -> None:
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"{name}: takes integers; got {value.dtype}")


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"
