"""The decode kernel on the CPU, through Pallas' interpreters: the operation's examples, in values and gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import pytest
from jax.experimental.pallas import tpu as pltpu

from ejkernel_core import Example
from ejkernel_ops.flash_attention.few_queries import few_queries
from ejkernel_pallas_tpu import flash_attention_decode
from ejkernel_pallas_tpu.flash_attention_decode._refusals import MOST_QUERIES
from ejkernel_pallas_tpu.testing import interpreted_registry
from ejkernel_testing import KernelProofs

KERNELS = {"flash_attention.pallas_tpu_decode": flash_attention_decode}
#: The examples for the interpreter of a whole TPU.
SIMULATED = (
    "gqa-strides-in-the-backward",
    "sinks-once-over-many-blocks",
    "window-over-many-blocks",
    "fully-masked-rows",
    "everything",
)


class TestDecode(KernelProofs):
    """Gradients are those of the reference, from the output and the lse of this kernel."""

    kernel = "flash_attention.pallas_tpu_decode"
    registry = interpreted_registry(KERNELS)
    refuses = frozenset({"float16"})
    roundings = 1.5

    def examples(self) -> Sequence[Example]:
        return tuple(few_queries(super().examples(), MOST_QUERIES))


class TestDecodeOnTwoCores(TestDecode):
    """A v4 has two splits, one for each of its cores. The interpreter is that of a whole TPU."""

    registry = interpreted_registry(KERNELS, device_kind="TPU v4", races=True)

    def examples(self) -> Sequence[Example]:
        values = {"checks": frozenset({"values"}), "variations": (), "wrt": ()}
        chosen = [example for example in super().examples() if example.name in SIMULATED]
        return [attrs.evolve(one, long=one.name != "sinks-once-over-many-blocks", **values) for one in chosen]

    @pytest.fixture(autouse=True)
    def clear_memories(self) -> Iterator[None]:
        """Clears the simulated memories before and after each test."""
        pltpu.reset_tpu_interpret_mode_state()
        yield
        pltpu.reset_tpu_interpret_mode_state()
