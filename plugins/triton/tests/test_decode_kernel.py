"""The decode kernels on the CPU, through the interpreter: the operation's examples, in values and gradients."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import pytest

from ejkernel_core import Example
from ejkernel_ops.flash_attention.few_queries import few_queries
from ejkernel_testing import KernelProofs
from ejkernel_triton import flash_attention_decode, flash_attention_decode_sm90
from ejkernel_triton.flash_attention_decode._refusals import MOST_QUERIES
from ejkernel_triton.flash_attention_decode_sm90 import _launch
from ejkernel_triton.gluon import requirements
from ejkernel_triton.interpreter import interpreted, interpreted_registry
from ejkernel_triton.launch import _jax_triton
from plugins.triton.tests.hopper_examples import few_queries_on_hopper

if _jax_triton.unavailable_reason():
    pytest.skip(_jax_triton.unavailable_reason(), allow_module_level=True)


@pytest.fixture(autouse=True, scope="module")
def on_the_cpu() -> Iterator[None]:
    """Few programs compute all parts of a call. The interpreter needs no version of jax-triton that takes Gluon."""
    with pytest.MonkeyPatch.context() as patch, interpreted():
        patch.setattr(requirements, "_unavailable_reason", lambda: None)
        patch.setattr(_launch, "multiprocessors", lambda inv: 3)
        yield


class TestDecode(KernelProofs):
    kernel = "flash_attention.triton_decode"
    registry = interpreted_registry({"flash_attention.triton_decode": flash_attention_decode})
    roundings = 1.5

    def examples(self) -> Sequence[Example]:
        return tuple(few_queries(super().examples(), MOST_QUERIES))


class TestGluonDecode(KernelProofs):
    """A part of the examples: all of them are for a card."""

    kernel = "flash_attention.gluon_decode_sm90"
    registry = interpreted_registry({"flash_attention.gluon_decode_sm90": flash_attention_decode_sm90})
    roundings = 1.5

    def examples(self) -> Sequence[Example]:
        examples = few_queries_on_hopper(super().examples(), ("bfloat16", "float16"))
        return tuple(one for one in examples if zlib.crc32(one.name.encode()) % 4 == 0)
