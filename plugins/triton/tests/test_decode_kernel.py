"""The decode kernel on the CPU, through Triton's interpreter: the operation's examples, in values and gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from ejkernel_core import Example
from ejkernel_ops.flash_attention.few_queries import few_queries
from ejkernel_testing import KernelProofs
from ejkernel_triton import flash_attention_decode
from ejkernel_triton.flash_attention_decode._refusals import MOST_QUERIES
from ejkernel_triton.interpreter import interpreted, interpreted_registry
from ejkernel_triton.launch import _jax_triton

if _jax_triton.unavailable_reason():
    pytest.skip(_jax_triton.unavailable_reason(), allow_module_level=True)


@pytest.fixture(autouse=True, scope="module")
def on_the_cpu() -> Iterator[None]:
    with interpreted():
        yield


class TestDecode(KernelProofs):
    kernel = "flash_attention.triton_decode"
    registry = interpreted_registry({"flash_attention.triton_decode": flash_attention_decode})
    roundings = 1.5

    def examples(self) -> Sequence[Example]:
        return tuple(few_queries(super().examples(), MOST_QUERIES))
