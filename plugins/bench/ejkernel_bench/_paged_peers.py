"""Attention over pages by others: FA3, FA4, FlashInfer, a private function of JAX, and what is possible without pages.

What a step has to plan once for all of its layers is made before anything is timed, by peers as by ours.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ejkernel_core
from ejkernel_ops.pages import pages_of

from . import _flash_attention_peers as flash_attention
from ._paged_calls import EIGHT_BITS
from ._peers import OnOtherArrays, Peer, TorchFunction, is_installed

FA3, FA4, FLASHINFER, CUDNN = flash_attention.FA3, flash_attention.FA4, "FlashInfer", "jax cuDNN"
#: Of the pages, in each call; and, once, of ours on keys that are contiguous.
GATHER, CONTIGUOUS = "gather", "contiguous"
#: What products of weights that are rounded to 8 bits differ by.
FP8_TOLERANCE = 6e-2
#: A sequence with more new tokens is a prompt.
MOST_DECODED = 16
WORKSPACE = 2**28
CUDNN_MODULE = "jax._src.cudnn.fused_attention_stablehlo"

Call = Mapping[str, Any]
#: What every peer takes.
_PLAIN = {"query", "kv_pages", "key_pages", "value_pages", "kv_lens", "block_tables", "query_start_loc", "metadata"}
_SCALES = ("k_scale", "v_scale")


def peers() -> dict[str, Peer | str]:
    """By name; in place of one that is not there, the reason."""
    on_gpu = {FA3: _fa3, FA4: _fa4, FLASHINFER: _flashinfer, CUDNN: _cudnn}
    has_gpu = jax.default_backend() == "gpu"
    found = {name: find() if has_gpu else "there is no NVIDIA GPU" for name, find in on_gpu.items()}
    return {**found, GATHER: by_gather, CONTIGUOUS: on_contiguous_keys}


def _fa3() -> Peer | str:
    if not is_installed("torch"):
        return "torch is not installed"
    if flash_attention.whole_library() is None:
        return f"{flash_attention.LIBRARY} is neither in vLLM's package nor in a folder of sys.path"
    return by_fa3


def _fa4() -> Peer | str:
    if flash_attention.peers()[FA4] is None:
        return "torch or flash_attn.cute is not installed"
    function = import_module("flash_attn.cute.interface").flash_attn_varlen_func
    return by_fa4 if "page_table" in inspect.signature(function).parameters else "its function takes no page_table"


def _flashinfer() -> Peer | str:
    return by_flashinfer if is_installed("torch") and is_installed("flashinfer") else "flashinfer is not installed"


def _cudnn() -> Peer | str:
    has_function = find_spec(CUDNN_MODULE) is not None and hasattr(import_module(CUDNN_MODULE), "paged_attention")
    return by_cudnn if has_function else f"this version of JAX has no paged_attention in {CUDNN_MODULE}"


def takes(call: Call, *others: str) -> bool:
    """Whether the call is causal, has no more than these arguments, and numbers as the scales of pages of 8 bits."""
    names = {name for name, value in call.items() if value is not None}
    has_scales = all(isinstance(call.get(name), float) and name in others for name in _SCALES)
    return (
        names <= {*_PLAIN, "causal", "max_query_len", *others}
        and bool(call.get("causal", True))
        and (has_scales or pages_of(call)[0].dtype.itemsize > 1)
    )


def takes_on_cards(call: Call, *others: str) -> bool:
    """Whether it is in 16 bits, too."""
    return takes(call, *others) and call["query"].dtype.itemsize == 2


def queries_of_each(call: Call) -> int | None:
    """The new tokens of each sequence where they have as many; those of a call that samples are drawn for do."""
    starts, tokens = call["query_start_loc"], call["query"].shape[0]
    count = starts.shape[0] - 1
    if tokens % count or (isinstance(starts, np.ndarray) and (np.diff(starts) != tokens // count).any()):
        return None
    return int(tokens // count)


def keys_and_values(pages: Mapping[str, Any]) -> tuple[Any, Any]:
    """Those of an array of both are views."""
    if "kv_pages" in pages:
        return pages["kv_pages"][:, :, ::2], pages["kv_pages"][:, :, 1::2]
    return pages["key_pages"], pages["value_pages"]


def _window(call: Call) -> int:
    """The keys to the left; -1 for all."""
    return int((call.get("sliding_window") or (-1, 0))[0])


# -- of PyTorch --------------------------------------------------------------------------------------------------------


def by_fa3(call: Call) -> TorchFunction | None:
    """With its own number of splits. Of pages in float8 its queries are float8, too."""
    is_taken = takes_on_cards(call, "sliding_window", "logits_soft_cap", "softmax_aux", *_SCALES)
    if not is_taken or pages_of(call)[0].dtype == EIGHT_BITS["int8"]:
        return None
    is_narrow = pages_of(call)[0].dtype.itemsize == 1
    cap = call.get("logits_soft_cap") or 0.0
    common = {"causal": True, "window_left": _window(call), "window_right": 0, "num_splits": 0}

    def planned(query: Any, key: Any, kv_lens: Any, query_start_loc: Any) -> dict[str, Any]:
        lengths = {"cu_seqlens_q": query_start_loc, "seqused_k": kv_lens, "max_seqlen_k": int(kv_lens.max())}
        lengths |= {"max_seqlen_q": int((query_start_loc[1:] - query_start_loc[:-1]).max())}
        step: dict[str, Any] = {"q": query, **lengths}
        if is_narrow:
            step |= {"q": query.to(key.dtype), **_descales(call, query, (len(kv_lens), key.shape[2]))}
        (heads, dim), (page_size, kv_heads, dim_v) = query.shape[1:], key.shape[1:]
        sizes = {"batch_size": len(kv_lens), "num_heads": heads, "num_heads_k": kv_heads, "headdim": dim}
        sizes |= {"headdim_v": dim_v, "page_size": page_size, "qkv_dtype": step["q"].dtype, "has_softcap": cap > 0}
        step["scheduler_metadata"] = flash_attention.whole_metadata(**sizes, **lengths, **common)
        return step

    once = _once(planned)

    def attention(query: Any, kv_lens: Any, block_tables: Any, query_start_loc: Any, **others: Any) -> Any:
        key, value = keys_and_values(others)
        step = once(query, key, kv_lens, query_start_loc)
        given = {"k": key, "v": value, "page_table": block_tables, "softmax_scale": query.shape[2] ** -0.5}
        given |= {"softcap": cap, "s_aux": others.get("softmax_aux")}
        return flash_attention.whole_forward(**given, **step, **common)[0]

    return TorchFunction(attention, has_gradients=False, tolerance=FP8_TOLERANCE if is_narrow else None)


def _descales(call: Call, query: Any, shape: tuple[int, int]) -> dict[str, Any]:
    """(sequences, key heads) each."""
    scales = {"q_descale": 1.0, "k_descale": call["k_scale"], "v_descale": call["v_scale"]}
    ones = query.new_ones(shape).float()
    return {name: ones * float(scale) for name, scale in scales.items()}


def by_fa4(call: Call) -> TorchFunction | None:
    """The form for sequences of different lengths."""
    if not takes_on_cards(call, "sliding_window", "logits_soft_cap", "softmax_aux"):
        return None
    window = (_window(call), 0) if call.get("sliding_window") else (None, None)
    options = {"causal": True, "window_size": window, "softcap": call.get("logits_soft_cap") or 0.0}
    longest = _once(lambda kv_lens, starts: (int((starts[1:] - starts[:-1]).max()), int(kv_lens.max())))

    def attention(query: Any, kv_lens: Any, block_tables: Any, query_start_loc: Any, **others: Any) -> Any:
        function = import_module("flash_attn.cute.interface").flash_attn_varlen_func
        key, value = keys_and_values(others)
        queries, keys = longest(kv_lens, query_start_loc)
        given = {"cu_seqlens_q": query_start_loc, "seqused_k": kv_lens, "page_table": block_tables}
        given |= {"max_seqlen_q": queries, "max_seqlen_k": keys, "learnable_sink": others.get("softmax_aux")}
        results = function(query, key, value, **given, **options)
        return results[0] if isinstance(results, tuple) else results

    return TorchFunction(attention, has_gradients=False)


def by_flashinfer(call: Call) -> TorchFunction | None:
    """One query of each sequence, on tensor cores."""
    if not takes_on_cards(call, "sliding_window", "logits_soft_cap") or queries_of_each(call) != 1:
        return None
    cap, window = call.get("logits_soft_cap"), _window(call)

    def planned(query: Any, key: Any, kv_lens: Any, block_tables: Any) -> Any:
        import torch

        lengths, size = kv_lens.tolist(), key.shape[1]
        counts = [-(-length // size) for length in lengths]
        pages = [page for row, count in zip(block_tables.tolist(), counts, strict=True) for page in row[:count]]
        last = [length - (count - 1) * size for length, count in zip(lengths, counts, strict=True)]
        tables = (list(accumulate(counts, initial=0)), pages, last)
        table = [torch.tensor(values, dtype=torch.int32, device=query.device) for values in tables]
        room = torch.empty(WORKSPACE, dtype=torch.uint8, device=query.device)
        wrapper = import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper(room, "NHD", use_tensor_cores=True)
        sizes = (query.shape[1], key.shape[2], query.shape[2], size)
        options = {"window_left": window, "logits_soft_cap": cap}
        wrapper.plan(*table, *sizes, q_data_type=query.dtype, kv_data_type=key.dtype, **options)
        return wrapper

    once = _once(planned)

    def attention(query: Any, kv_lens: Any, block_tables: Any, **others: Any) -> Any:
        key, value = keys_and_values(others)
        return once(query, key, kv_lens, block_tables).run(query, (key, value))

    return TorchFunction(attention, has_gradients=False)


def _once(function: Callable[..., Any]) -> Callable[..., Any]:
    """What the first call returns, for all others: their arrays are the same."""
    made: list[Any] = []

    def first(*given: Any) -> Any:
        if not made:
            made.append(function(*given))
        return made[0]

    return first


# -- of JAX ------------------------------------------------------------------------------------------------------------


def by_cudnn(call: Call) -> Callable[..., Any] | None:
    """One query of each sequence, and exactly the pages of all tables."""
    pages, tables = pages_of(call), call["block_tables"]
    is_whole = len(pages) == 2 and pages[0].shape[0] == tables.shape[0] * tables.shape[1]
    if not takes_on_cards(call) or not is_whole or queries_of_each(call) != 1:
        return None

    def attention(query: Any, key_pages: Any, value_pages: Any, kv_lens: Any, block_tables: Any, **others: Any) -> Any:
        library, table = import_module(CUDNN_MODULE), block_tables[:, None, :, None]
        options = {"scale": query.shape[2] ** -0.5, "mask_type": library.MaskType.PADDING}
        lengths = (jnp.ones_like(kv_lens), kv_lens)
        out = library.paged_attention(query[:, None], key_pages, value_pages, *lengths, table, table, **options)
        return out[:, 0]

    return attention


def by_gather(call: Call) -> Callable[..., Any] | None:
    """The pages of each sequence, and ``jax.nn``: what a program without such a kernel does."""
    count = queries_of_each(call)
    if count is None or not takes(call, "sliding_window", *_SCALES):
        return None
    is_on_card = jax.default_backend() == "gpu" and call["query"].dtype.itemsize == 2
    implementation: Any = "cudnn" if is_on_card else None
    left = (call.get("sliding_window") or (None, 0))[0]

    def attention(query: Any, kv_lens: Any, block_tables: Any, **others: Any) -> Any:
        sequences = block_tables.shape[0]
        key, value = (
            _numbers(pages.at[block_tables].get(mode="clip"), call.get(scale), query.dtype)
            for pages, scale in zip(keys_and_values(others), _SCALES, strict=True)
        )
        key, value = (array.reshape(sequences, -1, *array.shape[3:]) for array in (key, value))
        options: dict[str, Any] = {"key_value_seq_lengths": kv_lens}
        if count > 1 or left is not None:
            options = {"mask": _visible(kv_lens, count, key.shape[1], left)}
        queries = query.reshape(sequences, count, *query.shape[1:])
        out = jax.nn.dot_product_attention(queries, key, value, implementation=implementation, **options)
        return out.reshape(query.shape[0], query.shape[1], -1)

    return attention


def _numbers(array: Any, scale: float | None, dtype: Any) -> Any:
    return array if scale is None else (array.astype(jnp.float32) * scale).astype(dtype)


def _visible(kv_lens: Any, count: int, slots: int, left: int | None) -> Any:
    """(sequences, 1, queries, slots)."""
    position = (kv_lens[:, None] - count + jnp.arange(count))[:, :, None]
    slot = jnp.arange(slots)
    visible = slot <= position
    return (visible if left is None else visible & (slot >= position - left))[:, None]


def on_contiguous_keys(call: Call) -> OnOtherArrays | None:
    """Our attention of packed sequences, for prompts: without pages."""
    starts, kv_lens = call["query_start_loc"], call["kv_lens"]
    is_known = isinstance(starts, np.ndarray) and isinstance(kv_lens, np.ndarray)
    if not takes(call, "sliding_window", "softmax_aux") or not is_known or np.diff(starts).max() <= MOST_DECODED:
        return None
    lengths = [int(length) for length in kv_lens]
    options: dict[str, Any] = {"causal": True, "sliding_window": call.get("sliding_window")}

    def arrays(query: Any, kv_lens: Any, block_tables: Any, query_start_loc: Any, **others: Any) -> dict[str, Any]:
        def packed(pages: Any) -> Any:
            rows = (pages[table].reshape(-1, *pages.shape[2:]) for table in block_tables)
            return jnp.concatenate([own[:length] for own, length in zip(rows, lengths, strict=True)])

        key, value = map(packed, keys_and_values(others))
        ends = jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)
        given = {"query": query, "key": key, "value": value, "cum_seqlens_q": query_start_loc, "cum_seqlens_k": ends}
        return given | ({"softmax_aux": others["softmax_aux"]} if "softmax_aux" in others else {})

    function = lambda **given: ejkernel_core.call("flash_attention", **given, **options)
    return OnOtherArrays(function, arrays=arrays)
