"""The kernels on a GPU, with the operation's examples without the arguments that cuDNN refuses."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import pytest

from ejkernel_core import Example, NoKernel
from ejkernel_ops.flash_attention.examples import example
from ejkernel_testing import KernelProofs, kernel_proofs

pytestmark = pytest.mark.gpu

REFUSED_ARGUMENTS = {
    *("bias", "attention_mask", "q_segment_ids", "kv_segment_ids", "softmax_aux", "logits_soft_cap"),
    *("dropout_prob", "dropout_seed", "return_lse"),
}
#: Arguments that depend on positions. If the lengths differ, cuDNN aligns the first query with the first key, and the
#: operation the last query with the last key.
POSITIONAL_ARGUMENTS = {"causal", "sliding_window"}
#: Without their soft cap, which is refused, these have logits that 16 bits cannot tell apart.
HUGE_WITHOUT_CAP = {"soft-cap-of-huge-logits", "soft-cap-of-overflowing-logits"}


def examples(self: KernelProofs) -> Sequence[Example]:
    """The float32 examples that cuDNN supports, in 16 bits."""
    originals = [example for example in KernelProofs.examples(self) if "float32" in example.features]
    return [supported_example(example) for example in originals if is_supported(example)]


def test_programs(self: KernelProofs, example: Example, transform: str, pairs: str) -> None:
    """All but second derivatives, which have a cotangent of the lse."""
    if transform == "second_derivative":
        with pytest.raises(NoKernel, match="takes no gradient of the log-sum-exp"):
            KernelProofs.test_programs(self, example, transform, pairs)
    else:
        KernelProofs.test_programs(self, example, transform, pairs)


def test_transforms(self: KernelProofs, example: Example, transform: str, request: pytest.FixtureRequest) -> None:
    """The same."""
    if transform == "jacrev_of_jacrev":
        with pytest.raises(NoKernel, match="takes no gradient of the log-sum-exp"):
            KernelProofs.test_transforms(self, example, transform, request)
    else:
        KernelProofs.test_transforms(self, example, transform, request)


# cuDNN rounds the weights to 16 bits, and in the backward once more.
FIELDS: dict[str, Any] = {
    "platform": "gpu",
    "roundings": 2.0,
    "examples": examples,
    "test_programs": test_programs,
    "test_transforms": test_transforms,
}
globals().update(kernel_proofs("ejkernel-cudnn", **FIELDS))
del test_programs, test_transforms  # methods of these classes, and not tests of their own


def is_supported(original: Example) -> bool:
    arguments: Mapping[str, Any] = original.abstract()
    query, key, value = (arguments[name].shape for name in ("query", "key", "value"))
    scale = arguments.get("softmax_scale")
    return (
        len(query) == 4
        and query[-1] == value[-1]
        and query[-1] % 8 == 0
        and 0 not in (*query, *key)
        and not query[1] == key[1] == 1
        and original.name not in HUGE_WITHOUT_CAP
        and "positions" not in original.features
        and (scale is None or scale > 0)
    )


def supported_example(original: Example) -> Example:
    dtype = ("bfloat16", "float16")[zlib.crc32(original.name.encode()) % 2]

    def arguments(draw: int) -> dict[str, object]:
        call = {name: x for name, x in original.arguments(draw).items() if name not in REFUSED_ARGUMENTS}
        if call["query"].shape[1] != call["key"].shape[1] or not call.get("causal"):
            call = {name: x for name, x in call.items() if name not in POSITIONAL_ARGUMENTS}
        if isinstance(call.get("sliding_window"), tuple):
            call["sliding_window"] = (call["sliding_window"][0], 0)
        return call

    wrt_sets = tuple(names for names in original.wrt_sets if not REFUSED_ARGUMENTS & {*names})
    # cuDNN refuses some of the variations. The other kernels prove that results depend on every argument.
    checks = original.checks - {"sensitivity", "sharded_derivatives"}
    return attrs.evolve(
        example(
            original.name,
            arguments,
            checks,
            dtype=dtype,
            long=original.long,
            batched=original.batched,
            wrt_sets=wrt_sets,
        ),
        variations=(),
    )
