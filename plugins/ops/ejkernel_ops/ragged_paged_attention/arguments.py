"""The arguments of attention over pages: checked, in the form that kernels see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from ejkernel_ops.arrays import DTYPES, check_integers
from ejkernel_ops.attention_options import flag, soft_cap, softmax_scale, window
from ejkernel_ops.flash_attention.positions import MAX_POSITION
from ejkernel_ops.options import integer
from ejkernel_ops.pages import EIGHT_BITS, check_pages, int32, one_integer, pages_of, scale_of_heads

from .tiles import metadata_length

Arguments = dict[str, Any]
Restore = Callable[[tuple[Any, ...]], Any]

FP8 = EIGHT_BITS[0]
#: Blocks of keys of all kernels divide it.
SPLIT_UNIT = 128
_REQUIRED = ("kv_lens", "block_tables", "query_start_loc")


def prepare(arguments: Arguments) -> tuple[Arguments, Restore]:
    """Check the arguments. Kernels get integers as int32, one number with an axis, and sinks as (heads, sinks)."""
    _check_presence(arguments)
    _check_query(arguments)
    check_pages(arguments)
    _check_dtypes(arguments)
    _check_tables(arguments)
    tokens, dtype = arguments["query"].shape[0], pages_of(arguments)[0].dtype
    canonical = {
        **arguments,
        **{name: int32(arguments[name]) for name in _REQUIRED},
        **{name: one_integer(name, arguments[name]) for name in ("num_seqs", "first_page")},
        **{name: scale_of_heads(name, arguments[name], dtype) for name in ("k_scale", "v_scale")},
        "q_scale": scale_of_heads("q_scale", arguments["q_scale"], arguments["query"].dtype, "queries"),
        "metadata": _metadata(arguments),
        "softmax_aux": _sinks(arguments["softmax_aux"]),
        **_options(arguments),
        "max_query_len": _max_query_len(arguments["max_query_len"], tokens),
        "split_size": _split_size(arguments["split_size"]),
    }
    return canonical, _restore(canonical["return_lse"])


def _restore(return_lse: bool) -> Restore:
    return lambda results: results if return_lse else results[0]


def _check_presence(a: Mapping[str, Any]) -> None:
    for name in _REQUIRED:
        if a[name] is None:
            raise TypeError(f"{name}: is missing")
    pair = [name for name in ("key_pages", "value_pages") if a[name] is not None]
    if (a["kv_pages"] is None) == (len(pair) == 0) or len(pair) == 1:
        given = [name for name in ("kv_pages", *pair) if a[name] is not None]
        raise ValueError(f"kv_pages: takes it alone, or key_pages and value_pages without it; got {given}")


def _check_query(a: Mapping[str, Any]) -> None:
    query = a["query"]
    if query.dtype not in (*DTYPES, FP8):
        raise TypeError(f"query: takes {', '.join(map(str, (*DTYPES, FP8)))}; got {query.dtype}")
    if query.ndim != 3:
        raise ValueError(f"query: takes (tokens, heads, head_dim), of all sequences; got shape {query.shape}")


def _check_dtypes(a: Mapping[str, Any]) -> None:
    """Pages are of the query's dtype, or of 8 bits."""
    query, pages = a["query"].dtype, pages_of(a)[0].dtype
    if pages != query and (query == FP8 or pages not in EIGHT_BITS):
        others = "" if query == FP8 else f", or {' or '.join(map(str, EIGHT_BITS))}"
        raise TypeError(f"kv_pages: takes the query's dtype, {query}{others}; got {pages}")
    sinks = a["softmax_aux"]
    if sinks is not None and sinks.dtype not in DTYPES:
        raise TypeError(f"softmax_aux: takes floats; got {sinks.dtype}")


def _check_tables(a: Mapping[str, Any]) -> None:
    shapes = {"kv_lens": "(sequences,)", "block_tables": "(sequences, pages)", "query_start_loc": "(sequences + 1,)"}
    for name, words in shapes.items():
        check_integers(name, a[name])
        if a[name].ndim != (2 if name == "block_tables" else 1):
            raise ValueError(f"{name}: takes {words}; got shape {a[name].shape}")


def _metadata(a: Mapping[str, Any]) -> Any:
    metadata = a["metadata"]
    if metadata is None:
        return None
    length = metadata_length(a["query"].shape[0], a["kv_lens"].shape[0])
    if metadata.dtype != jnp.int32 or metadata.shape != (length,):
        raise ValueError(
            f"metadata: takes what paged_attention_metadata returns for {a['query'].shape[0]} tokens and "
            f"{a['kv_lens'].shape[0]} sequences, int32 ({length},); got {metadata.dtype} of shape {metadata.shape}"
        )
    return metadata


def _sinks(sinks: Any) -> Any:
    return sinks[:, None] if sinks is not None and sinks.ndim == 1 else sinks


def _options(a: Mapping[str, Any]) -> Arguments:
    dtype = jnp.bfloat16 if a["query"].dtype == FP8 else a["query"].dtype
    scale = softmax_scale(a["softmax_scale"], dtype)
    sides = window(a["sliding_window"])
    return {
        "causal": flag("causal", a["causal"]),
        "return_lse": flag("return_lse", a["return_lse"]),
        "softmax_scale": float(a["query"].shape[2] ** -0.5) if scale is None else scale,
        "logits_soft_cap": soft_cap(a["logits_soft_cap"], dtype),
        # No two positions are farther apart.
        "sliding_window": None if sides is None else tuple(min(side, 2 * MAX_POSITION) for side in sides),
    }


def _max_query_len(value: Any, tokens: Any) -> int | None:
    """Rounded up to a power of two, so that few programs are tuned and compiled; None where it says nothing."""
    if value is None:
        return None
    most = integer("max_query_len", value, 2**31 - 1, "the largest int32")
    rounded = 1 << (most - 1).bit_length()
    return rounded if rounded < tokens else None


def _split_size(value: Any) -> int | None:
    if value is None:
        return None
    size = integer("split_size", value, MAX_POSITION, "the most keys of a sequence")
    if size % SPLIT_UNIT:
        raise ValueError(f"split_size: takes a multiple of {SPLIT_UNIT}; got {size}")
    return size
