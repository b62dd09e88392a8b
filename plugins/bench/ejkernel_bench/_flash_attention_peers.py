"""FlashAttention 3 and 4 through PyTorch: forward by FA3, both passes by FA4.

FA3 is in two packages. ``fa3-fwd`` has the plain call. vLLM's wheel has the whole, with windows, soft caps, sinks,
packed sequences and pages, in the library of its module ``vllm_flash_attn``. The library alone in a folder of
``sys.path`` is enough.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from ._peers import Peer, TorchFunction, is_installed

FA3, FA4 = "FA3", "FA4"
#: The library of the whole FA3, and the packages that may have it.
LIBRARY = "_vllm_fa3_C.abi3.so"
PACKAGES = ("vllm_flash_attn", "vllm.vllm_flash_attn")
#: The arguments of its function ``fwd``, in order, with what a plain call passes.
WHOLE_ARGUMENTS: dict[str, Any] = {
    **dict.fromkeys(("q", "k", "v", "k_new", "v_new", "q_v", "out")),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "seqused_k")),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_k", "page_table", "kv_batch_idx", "leftpad_k")),
    **dict.fromkeys(("rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale")),
    "softmax_scale": None,
    "causal": False,
    "window_left": -1,
    "window_right": -1,
    "softcap": 0.0,
    "rotary_interleaved": True,
    "scheduler_metadata": None,
    # 0 has it choose how many parts the keys are split into.
    "num_splits": 0,
    "pack_gqa": None,
    "sm_margin": 0,
    "s_aux": None,
    "cp_world_size": 1,
    "cp_rank": 0,
    "cp_tot_seqused_k": None,
}
#: Those of its function ``get_scheduler_metadata``, which plans the work of calls with the same lengths.
METADATA_ARGUMENTS: dict[str, Any] = {
    **dict.fromkeys(("batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads", "num_heads_k", "headdim", "headdim_v")),
    **dict.fromkeys(("qkv_dtype", "seqused_k", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q")),
    **dict.fromkeys(("leftpad_k", "page_size")),
    "max_seqlen_k_new": 0,
    "causal": False,
    "window_left": -1,
    "window_right": -1,
    "has_softcap": False,
    "num_splits": 0,
    "pack_gqa": None,
    "sm_margin": 0,
}


def peers() -> dict[str, Peer | None]:
    """By name; None where one is not installed."""
    has_fa3 = is_installed("torch") and (is_installed("fa3_fwd_interface") or whole_library() is not None)
    has_fa4 = is_installed("torch") and _has_module("flash_attn.cute.interface")
    return {FA3: by_fa3 if has_fa3 else None, FA4: by_fa4 if has_fa4 else None}


def by_fa3(arguments: Mapping[str, Any]) -> TorchFunction | None:
    """Forward alone."""
    if _is_like(arguments, "causal") and is_installed("fa3_fwd_interface"):
        return TorchFunction(_plain(arguments), has_gradients=False)
    is_like = _is_like(arguments, "causal", "sliding_window", "logits_soft_cap", "softmax_aux")
    has_many_sinks = len(getattr(arguments.get("softmax_aux"), "shape", ())) > 1
    if not is_like or has_many_sinks or whole_library() is None:
        return None
    return TorchFunction(_whole(arguments), has_gradients=False)


def by_fa4(arguments: Mapping[str, Any]) -> TorchFunction | None:
    """Both passes."""
    if not _is_like(arguments, "causal", "sliding_window"):
        return None
    window = arguments.get("sliding_window") or (None, None)
    is_causal = bool(arguments.get("causal", False))

    def attention(query: Any, key: Any, value: Any) -> Any:
        flash_attn_func = import_module("flash_attn.cute.interface").flash_attn_func
        results = flash_attn_func(query, key, value, causal=is_causal, window_size=window)
        return results[0] if isinstance(results, tuple) else results

    return TorchFunction(attention)


def _is_like(arguments: Mapping[str, Any], *others: str) -> bool:
    """Whether the call has a batch of sequences of equal length, in 16 bits, and no more than these arguments."""
    query, key = arguments["query"], arguments["key"]
    names = {name for name, value in arguments.items() if value is not None and value is not False}
    is_self_attention = len(query.shape) == 4 and query.shape[1] == key.shape[1]
    return names <= {"query", "key", "value", *others} and is_self_attention and query.dtype.itemsize == 2


def _plain(arguments: Mapping[str, Any]) -> Any:
    is_causal = bool(arguments.get("causal", False))

    def attention(query: Any, key: Any, value: Any) -> Any:
        results = import_module("fa3_fwd_interface").flash_attn_func(query, key, value, causal=is_causal)
        return results[0] if isinstance(results, tuple) else results

    return attention


def _whole(arguments: Mapping[str, Any]) -> Any:
    is_causal = bool(arguments.get("causal", False))
    left, right = arguments.get("sliding_window") or (-1, -1)

    def attention(query: Any, key: Any, value: Any, softmax_aux: Any = None) -> Any:
        return whole_forward(
            q=query,
            k=key,
            v=value,
            softmax_scale=query.shape[-1] ** -0.5,
            causal=is_causal,
            window_left=left,
            window_right=0 if is_causal else right,
            softcap=arguments.get("logits_soft_cap") or 0.0,
            num_splits=1,
            s_aux=None if softmax_aux is None else softmax_aux.to(query.dtype),
        )[0]

    return attention


# -- the whole FA3 -----------------------------------------------------------------------------------------------------


def whole_forward(**given: Any) -> Any:
    """The output, the log-sum-exp and two buffers. Keys and values may be pages: (pages, tokens of a page, heads, head
    dim) with ``page_table``, ``seqused_k``, ``cu_seqlens_q`` and both greatest lengths.
    """
    return _loaded().fwd(*_in_order(WHOLE_ARGUMENTS, given))


def whole_metadata(**given: Any) -> Any:
    """The ``scheduler_metadata`` of calls of these sizes and lengths."""
    return _loaded().get_scheduler_metadata(*_in_order(METADATA_ARGUMENTS, given))


def _in_order(arguments: Mapping[str, Any], given: Mapping[str, Any]) -> Iterable[Any]:
    if unknown := given.keys() - arguments.keys():
        raise TypeError(f"FA3 has no arguments {', '.join(sorted(unknown))}")
    return {**arguments, **given}.values()


@cache
def _loaded() -> Any:
    import torch

    torch.ops.load_library(str(whole_library()))
    return torch.ops._vllm_fa3_C


def whole_library() -> Path | None:
    """Where the library is, if it is installed. Nothing is imported."""
    folders = [folder for package in PACKAGES for folder in _folders(package)]
    files = (Path(folder or ".") / LIBRARY for folder in [*folders, *sys.path])
    return next((file for file in files if file.is_file()), None)


def _folders(package: str) -> list[str]:
    """The folders of a package. Its parents are not imported, because vLLM's takes long and needs much."""
    parent, _, name = package.rpartition(".")
    if parent:
        return [str(Path(folder) / name) for folder in _folders(parent)]
    spec = importlib.util.find_spec(package)
    return list(spec.submodule_search_locations or ()) if spec else []


def _has_module(name: str) -> bool:
    """Whether a module is in a package, which is not imported."""
    package, _, module = name.rpartition(".")
    return any((Path(folder) / f"{module}.py").is_file() for folder in _folders(package))
