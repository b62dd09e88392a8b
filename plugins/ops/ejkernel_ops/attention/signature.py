"""How ``flash_attention`` is called."""

from __future__ import annotations

import inspect


def _call(  # type: ignore[no-untyped-def]  # a signature and nothing else: the typed one is ejkernel_ops.flash_attention
    query,
    key,
    value,
    bias=None,
    *,
    attention_mask=None,
    q_segment_ids=None,
    kv_segment_ids=None,
    cum_seqlens_q=None,
    cum_seqlens_k=None,
    softmax_aux=None,
    softmax_scale=None,
    causal=False,
    sliding_window=None,
    logits_soft_cap=None,
    dropout_prob=0.0,
    dropout_seed=None,
    return_lse=False,
): ...


SIGNATURE = inspect.signature(_call)
