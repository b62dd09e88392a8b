"""The kernels on the CPU, through Pallas' interpreters: the cases of the operation, in values and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import attrs
import pytest
from jax.experimental.pallas import tpu as pltpu

from ejkernel_core import hookimpl
from ejkernel_pallas_tpu import flash_attention
from ejkernel_pallas_tpu.flash_attention import backward as flash_attention_bwd
from ejkernel_pallas_tpu.testing import interpreted_registry
from ejkernel_testing import Case, KernelProofs

KERNELS = {"flash_attention.pallas_tpu": flash_attention, "flash_attention_bwd.pallas_tpu": flash_attention_bwd}
VALUES = {"checks": frozenset({"values"}), "variations": ()}
#: What goes through the interpreter of a whole TPU: between them, every pass and every kind of operand.
WATCHED = (
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
#: The others are for the long sweep.
AT_ONCE = ("dropout-in-the-backward", "packed-padding-tokens", "everything")


class TestFlashAttention(KernelProofs):
    kernel = "flash_attention.pallas_tpu"
    backward = "flash_attention_bwd.pallas_tpu"
    registry = interpreted_registry(KERNELS)
    refuses = frozenset({"float64", "float16"})
    roundings = 1.5

    def cases(self) -> Sequence[Case]:
        """Most of the grid, and what takes long, are for the long sweep."""
        grid = (case for case in super().cases() if case.name.startswith("grid"))
        late = {case.name for place, case in enumerate(grid) if place % 48 > 3}
        slow = late | {"sums-over-8192-squared"}
        return [attrs.evolve(case, long=case.long or case.name in slow) for case in super().cases()]


@hookimpl
def in_two_passes(inv):
    return attrs.evolve(flash_attention_bwd.heuristic_cfg(inv), fused=None)


PARTED = KERNELS | {
    "flash_attention_bwd.pallas_tpu": SimpleNamespace(**(vars(flash_attention_bwd) | {"heuristic_cfg": in_two_passes}))
}


class TestInTwoPasses(TestFlashAttention):
    """The backward as it is where vector memory does not hold the sums for all keys."""

    registry = interpreted_registry(PARTED)

    def cases(self) -> Sequence[Case]:
        cases = [case for case in super().cases() if case.name.startswith("grid") or case.name in WATCHED]
        return [attrs.evolve(case, long=case.long or case.name not in AT_ONCE, **VALUES) for case in cases]


class TestFlashAttentionWatched(TestFlashAttention):
    registry = interpreted_registry(KERNELS, races=True)

    def cases(self) -> Sequence[Case]:
        cases = [case for case in super().cases() if case.name in WATCHED]
        return [attrs.evolve(case, long=case.name not in AT_ONCE, **VALUES) for case in cases]

    @pytest.fixture(autouse=True)
    def afresh(self):
        """What one kernel left in the simulated memories is not the next one's."""
        pltpu.reset_tpu_interpret_mode_state()
        yield
        pltpu.reset_tpu_interpret_mode_state()


class TestInTwoPassesWatched(TestFlashAttentionWatched):
    registry = interpreted_registry(PARTED, races=True)

    def cases(self) -> Sequence[Case]:
        cases = (case for case in super().cases() if case.name in ("everything", "window-over-many-blocks"))
        return [attrs.evolve(case, long=case.name != "everything") for case in cases]
