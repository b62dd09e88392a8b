"""Attention on the CPU with the backward in two passes, and in the interpreter that simulates a whole TPU."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import attrs
import pytest
from jax.experimental.pallas import tpu as pltpu

from ejkernel_core import Example, hookimpl
from ejkernel_pallas_tpu import flash_attention
from ejkernel_pallas_tpu.flash_attention import backward as flash_attention_bwd
from ejkernel_pallas_tpu.testing import interpreted_registry
from ejkernel_testing import KernelProofs

KERNELS = {"flash_attention.pallas_tpu": flash_attention, "flash_attention_bwd.pallas_tpu": flash_attention_bwd}
VALUES = {"checks": frozenset({"values"}), "variations": ()}
#: The examples for the interpreter of a whole TPU. Together they run all passes and all kinds of operands.
SIMULATED = (
    "gqa-strides-in-the-backward",
    "bias-of-each-query-head",
    "bias-gradient-of-its-own-shape",
    "sinks-once-over-many-blocks",
    "dropout-in-the-backward",
    "causal-more-queries-than-keys",
    "window-over-many-blocks",
    "fully-masked-rows",
    "packed-padding-tokens",
    "everything",
)
#: Those of them that are not left to the long sweep.
SIMULATED_QUICKLY = ("dropout-in-the-backward", "packed-padding-tokens")


class FlashAttentionProofs(KernelProofs):
    kernel = "flash_attention.pallas_tpu"
    backward = "flash_attention_bwd.pallas_tpu"
    refuses = frozenset({"float64", "float16"})
    roundings = 1.5
    grid = 1 / 12


@hookimpl
def two_pass_cfg(inv):
    return attrs.evolve(flash_attention_bwd.heuristic_cfg(inv), fused=None)


KERNELS_WITH_TWO_PASSES = KERNELS | {
    "flash_attention_bwd.pallas_tpu": SimpleNamespace(**(vars(flash_attention_bwd) | {"heuristic_cfg": two_pass_cfg}))
}


class TestInTwoPasses(FlashAttentionProofs):
    """The backward as it is where vector memory does not hold the sums for all keys."""

    registry = interpreted_registry(KERNELS_WITH_TWO_PASSES)

    def examples(self) -> Sequence[Example]:
        examples = [
            example for example in super().examples() if example.name.startswith("grid") or example.name in SIMULATED
        ]
        return [
            attrs.evolve(example, long=example.long or example.name not in SIMULATED_QUICKLY, **VALUES)
            for example in examples
        ]


class TestFlashAttentionSimulated(FlashAttentionProofs):
    registry = interpreted_registry(KERNELS, races=True)

    def examples(self) -> Sequence[Example]:
        examples = [example for example in super().examples() if example.name in SIMULATED]
        return [attrs.evolve(example, long=example.name not in SIMULATED_QUICKLY, **VALUES) for example in examples]

    @pytest.fixture(autouse=True)
    def clear_memories(self):
        """Clears the simulated memories before and after each test."""
        pltpu.reset_tpu_interpret_mode_state()
        yield
        pltpu.reset_tpu_interpret_mode_state()


class TestInTwoPassesSimulated(TestFlashAttentionSimulated):
    registry = interpreted_registry(KERNELS_WITH_TWO_PASSES, races=True)

    def examples(self) -> Sequence[Example]:
        examples = (
            example for example in super().examples() if example.name in ("everything", "window-over-many-blocks")
        )
        return [attrs.evolve(example, long=True) for example in examples]
