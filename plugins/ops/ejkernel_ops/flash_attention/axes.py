"""The signature of attention, and the axes of its arrays in the canonical form, in which a packed call is a batch of
one.
"""

from __future__ import annotations

import inspect

from ejkernel_core import Axes


def _call(  # type: ignore[no-untyped-def]  # only a signature: the typed function is ejkernel_ops.flash_attention
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
    q_start=None,
    kv_lengths=None,
    kv_positions=None,
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

AXES = Axes(
    {
        "query": "batch q_len heads head_dim",
        "key": "batch kv_len kv_heads head_dim",
        "value": "batch kv_len kv_heads value_dim",
        "bias": "#batch #heads #q_len #kv_len",
        "attention_mask": "#batch #heads #q_len #kv_len",
        "q_segment_ids": "batch q_len",
        "kv_segment_ids": "batch kv_len",
        "cum_seqlens_q": "sequences+1",
        "cum_seqlens_k": "sequences+1",
        "q_start": "batch",
        "kv_lengths": "batch",
        "kv_positions": "batch kv_len",
        "softmax_aux": "heads sinks",
        "dropout_seed": "",
    },
    {"out": "batch q_len heads value_dim", "lse": "batch heads q_len"},
    independent="batch heads kv_heads",
    whole="q_len kv_len head_dim value_dim sequences sinks",
    vmap="batch",
    counts="batch q_len kv_len sequences heads kv_heads",
    rounded="batch q_len kv_len sequences",
    positive="heads kv_heads head_dim value_dim sequences",
    multiples={"heads": "kv_heads"},
    statistics="lse",
)
BACKWARD = AXES.backward()
