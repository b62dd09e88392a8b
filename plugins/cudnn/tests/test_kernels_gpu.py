"""The kernels on a card: the operation's cases, without what cuDNN refuses."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import pytest

from ejkernel_ops.flash_attention.examples import case
from ejkernel_testing import Case, KernelProofs

pytestmark = pytest.mark.gpu

REFUSED = {
    *("bias", "attention_mask", "q_segment_ids", "kv_segment_ids", "softmax_aux", "logits_soft_cap"),
    *("dropout_prob", "dropout_seed", "return_lse"),
}
#: What depends on where a query stands; cuDNN counts that from the other end where lengths differ.
PLACES = {"causal", "sliding_window"}


class TestFlashAttention(KernelProofs):
    kernel = "flash_attention.cudnn"
    backward = "flash_attention_bwd.cudnn"
    platform = "gpu"
    #: It rounds weights to 16 bits, and its gradients' once more.
    roundings = 2.0

    def cases(self) -> Sequence[Case]:
        return [
            narrowed(wide) for wide in super().cases() if "float32" in wide.features and _remains(wide.arguments(0))
        ]


def _remains(made: Mapping[str, Any]) -> bool:
    query, key, value = (made[name].shape for name in ("query", "key", "value"))
    scale = made.get("softmax_scale")
    return (
        len(query) == 4
        and query[-1] == value[-1]
        and query[-1] % 8 == 0
        and 0 not in (*query, *key)
        and (scale is None or scale > 0)
    )


def narrowed(wide: Case) -> Case:
    dtype = ("bfloat16", "float16")[zlib.crc32(wide.name.encode()) % 2]

    def arguments(draw: int) -> dict[str, object]:
        made = {name: x for name, x in wide.arguments(draw).items() if name not in REFUSED}
        if made["query"].shape[1] != made["key"].shape[1] or not made.get("causal"):
            made = {name: x for name, x in made.items() if name not in PLACES}
        if isinstance(made.get("sliding_window"), tuple):
            made["sliding_window"] = (made["sliding_window"][0], 0)
        return made

    sets = tuple(names for names in wide.wrt_sets if not REFUSED & {*names})
    # Some of what is varied is what cuDNN refuses: the other kernels prove that results depend on every argument.
    checks = wide.checks - {"sensitivity"}
    return attrs.evolve(
        case(wide.name, arguments, checks, dtype=dtype, long=wide.long, batched=wide.batched, wrt_sets=sets),
        variations=(),
    )
