"""Sampling by others: JAX as its users write it, FlashInfer and vLLM.

A peer gets the logits; the softmax counts where it needs one. Numbers of rows are made before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

import attrs
import jax
import jax.numpy as jnp

from ._calls import Inputs, Run
from ._peers import Peer, TorchFunction, is_installed

SORT, CATEGORICAL, FLASHINFER, VLLM = "sort", "categorical", "FlashInfer", "vLLM"
VLLM_MODULE = "vllm.v1.sample.ops.topk_topp_sampler"

Call = Mapping[str, Any]


def peers() -> dict[str, Peer | str]:
    """By name; in place of one that is not there, the reason."""
    of_torch = {FLASHINFER: _found(by_flashinfer, "flashinfer"), VLLM: _found(by_vllm, "vllm")}
    return {SORT: by_sort, CATEGORICAL: by_categorical, **of_torch}


def _found(peer: Peer, module: str) -> Peer | str:
    if jax.default_backend() != "gpu":
        return "there is no NVIDIA GPU"
    missing = [name for name in ("torch", module) if not is_installed(name)]
    return f"{missing[0]} is not installed" if missing else peer


def filters_of(call: Call) -> dict[str, Any] | None:
    """Those that a call has, each one number; None where it has others, or anything else."""
    given = {name: value for name, value in call.items() if name not in ("logits", "key") and value is not None}
    given = {name: value for name, value in given.items() if value is not False}
    is_known = all(name in ("top_k", "top_p", "min_p") and isinstance(given[name], int | float) for name in given)
    return given if is_known else None


# -- of JAX ------------------------------------------------------------------------------------------------------------


def by_sort(call: Call) -> Callable[..., Any] | None:
    """The best logits in order, and a draw from those that are kept: all words are sorted only if ``top_k`` is not
    given. Of equal logits only as many are kept as are needed.
    """
    filters = filters_of(call)
    if filters is None or "min_p" in filters or not filters:
        return None
    count, share = filters.get("top_k") or call["logits"].shape[1], filters.get("top_p", 1.0)

    def sample(logits: Any, key: Any) -> Any:
        best, words = jax.lax.top_k(logits, count)
        if share < 1:
            weights = jax.nn.softmax(best, axis=-1)
            best = jnp.where(jnp.cumsum(weights, -1) - weights < share, best, -jnp.inf)
        place = jax.random.categorical(key, best, axis=-1)
        return jnp.take_along_axis(words, place[:, None], -1)[:, 0]

    return sample


def by_categorical(call: Call) -> Callable[..., Any] | None:
    """Without a filter, or with a mask for ``min_p``."""
    filters = filters_of(call)
    if filters is None or {*filters} - {"min_p"}:
        return None
    share = filters.get("min_p", 0.0)

    def sample(logits: Any, key: Any) -> Any:
        if share > 0:
            least = logits.max(-1, keepdims=True) + jnp.log(share)
            logits = jnp.where(logits >= least, logits, -jnp.inf)
        return jax.random.categorical(key, logits, axis=-1)

    return sample


# -- of PyTorch --------------------------------------------------------------------------------------------------------


@attrs.frozen
class OfLogits(TorchFunction):
    """Of the logits alone: PyTorch has its own random numbers."""

    def prepared(self, inputs: Inputs, pass_name: str) -> Run:
        own = attrs.evolve(inputs, arrays={"logits": inputs.arrays["logits"]})
        return TorchFunction.prepared(self, own, pass_name)


def by_flashinfer(call: Call) -> TorchFunction | None:
    """``top_k`` first and then ``top_p`` of what is kept, as here."""
    filters = filters_of(call)
    if filters is None or call["logits"].dtype != jnp.float32 or {"min_p"} < {*filters}:
        return None

    def sample(logits: Any) -> Any:
        library = import_module("flashinfer.sampling")
        if not filters:
            return library.sampling_from_logits(logits)
        if {*filters} == {"top_k", "top_p"}:
            numbers = filters["top_k"], filters["top_p"]
            return library.top_k_top_p_sampling_from_logits(logits, *numbers, filter_apply_order="top_k_first")
        ((name, number),) = filters.items()
        softmax = getattr(library, "softmax", None)
        probabilities = logits.softmax(-1) if softmax is None else softmax(logits)
        return getattr(library, f"{name}_sampling_from_probs")(probabilities, number)

    return OfLogits(sample, has_gradients=False)


def by_vllm(call: Call) -> TorchFunction | None:
    """Its filters, by Triton or PyTorch, and its draw. They write to the logits, so a copy of these counts, too."""
    filters = filters_of(call)
    if filters is None or "min_p" in filters:
        return None

    @cache
    def numbers(rows: int, device: Any) -> list[Any]:
        import torch

        types = {"top_k": torch.int32, "top_p": torch.float32}
        return [
            torch.full((rows,), filters[name], dtype=dtype, device=device) if name in filters else None
            for name, dtype in types.items()
        ]

    def sample(logits: Any) -> Any:
        library = import_module(VLLM_MODULE)
        if filters:
            logits = library.apply_top_k_top_p(logits.clone(), *numbers(logits.shape[0], logits.device))
        return library.random_sample(logits.softmax(-1), {})

    return OfLogits(sample, has_gradients=False)
