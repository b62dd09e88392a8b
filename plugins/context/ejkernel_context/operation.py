"""The operations ``context_attention`` and ``context_attention_bwd``, on the shards of one device."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NoReturn

from ejkernel_core import Axes, Operation, Unsupported
from ejkernel_ops.flash_attention.other_names import OTHER_NAMES

from .arguments import prepare
from .examples import examples


def _call(  # type: ignore[no-untyped-def]  # only a signature: the typed function is ejkernel_context.context_attention
    query,
    key,
    value,
    *,
    axis,
    axis_size=None,
    is_inside=None,  # of ``prepare``: whether the call is inside a ``shard_map`` over the axis
    layout="zigzag",
    q_segment_ids=None,
    kv_segment_ids=None,
    softmax_aux=None,
    softmax_scale=None,
    causal=False,
    sliding_window=None,
    logits_soft_cap=None,
    return_lse=False,
): ...


SIGNATURE = inspect.signature(_call)

AXES = Axes(
    {
        "query": "batch q_len heads head_dim",
        "key": "batch kv_len kv_heads head_dim",
        "value": "batch kv_len kv_heads value_dim",
        "q_segment_ids": "batch q_len",
        "kv_segment_ids": "batch kv_len",
        "softmax_aux": "heads sinks",
    },
    {"out": "batch q_len heads value_dim", "lse": "batch heads q_len"},
    independent="batch heads kv_heads",
    whole="q_len kv_len head_dim value_dim sinks",
    vmap="batch",
    counts="batch q_len kv_len heads kv_heads",
    rounded="batch q_len kv_len",
    positive="heads kv_heads head_dim value_dim",
    multiples={"heads": "kv_heads"},
    statistics="lse",
)


def samples(arguments: Mapping[str, Any], key: Any) -> NoReturn:
    """There are none: one process alone cannot run what waits for others."""
    raise Unsupported(
        "context_attention is not measured by itself, because it communicates with other devices; the calls of "
        "flash_attention inside it are measured"
    )


forward = Operation(
    name="context_attention",
    signature=SIGNATURE,
    axes=AXES,
    differentiable=("query", "key", "value", "softmax_aux"),
    prepare=prepare,
    backward="context_attention_bwd",
    samples=samples,
    examples=examples,
    other_names={other: name for other, name in OTHER_NAMES.items() if name in SIGNATURE.parameters},
)
backward = forward.gradients(samples=samples)
