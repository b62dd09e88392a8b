"""The kernels for Hopper on the CPU, through the interpreter: every example, in values and gradients.

Which group of warps goes on, when a copy ends, and when a product reads its operands, is drawn.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_core import Example
from ejkernel_ops.grouped_matmul.activations import ACTIVATIONS
from ejkernel_testing import KernelProofs
from ejkernel_triton import flash_attention_sm90 as flash_attention
from ejkernel_triton import fused_linear_cross_entropy_sm90 as loss
from ejkernel_triton import grouped_matmul as portable
from ejkernel_triton import grouped_matmul_sm90 as grouped_matmul
from ejkernel_triton import linear_log_probs_sm90 as linear_log_probs
from ejkernel_triton.flash_attention_sm90 import backward as flash_attention_bwd
from ejkernel_triton.fused_linear_cross_entropy_sm90 import _launch as loss_launch
from ejkernel_triton.fused_linear_cross_entropy_sm90 import backward as loss_bwd
from ejkernel_triton.fused_linear_cross_entropy_sm90 import total
from ejkernel_triton.gluon import requirements
from ejkernel_triton.grouped_matmul_sm90 import _launch
from ejkernel_triton.grouped_matmul_sm90 import backward as grouped_matmul_bwd
from ejkernel_triton.grouped_matmul_sm90 import d_rhs as grouped_matmul_d_rhs
from ejkernel_triton.interpreter import interpreted, interpreted_registry
from ejkernel_triton.launch import _jax_triton
from plugins.triton.tests.hopper_examples import attention_examples, grouped_examples, loss_examples

if _jax_triton.unavailable_reason():
    pytest.skip(_jax_triton.unavailable_reason(), allow_module_level=True)


@pytest.fixture(autouse=True, scope="module")
def on_the_cpu() -> Iterator[None]:
    """Few programs compute all tiles of a call. The interpreter needs no version of jax-triton that takes Gluon."""
    with pytest.MonkeyPatch.context() as patch, interpreted():
        patch.setattr(requirements, "_unavailable_reason", lambda: None)
        patch.setattr(_launch, "multiprocessors", lambda inv: 3)
        patch.setattr(loss_launch, "multiprocessors", lambda inv: 3)
        for module in (flash_attention, flash_attention_bwd):
            patch.setattr(module, "multiprocessors", lambda inv: 2)
        yield


class TestGroupedMatmul(KernelProofs):
    kernel = "grouped_matmul.gluon_sm90"
    backward = "grouped_matmul_bwd.gluon_sm90"
    #: The cotangent of a product is rounded before it is multiplied, and in a second derivative once more.
    roundings = 3.0
    registry = interpreted_registry(
        {
            "grouped_matmul.gluon_sm90": grouped_matmul,
            "grouped_matmul_bwd.gluon_sm90": grouped_matmul_bwd,
            "grouped_matmul_d_rhs.gluon_sm90": grouped_matmul_d_rhs,
        }
    )
    refuses = frozenset({"float32", "float64"})
    quick = 0.04

    def examples(self) -> Sequence[Example]:
        return tuple(grouped_examples(super().examples()))


class TestGroupedMatmulDRhs(TestGroupedMatmul):
    kernel = "grouped_matmul_d_rhs.gluon_sm90"
    backward = None


class TestFlashAttention(KernelProofs):
    """A part of the examples, the values alone: all of them are proved on a card."""

    kernel = "flash_attention.gluon_sm90"
    backward = "flash_attention_bwd.gluon_sm90"
    registry = interpreted_registry(
        {"flash_attention.gluon_sm90": flash_attention, "flash_attention_bwd.gluon_sm90": flash_attention_bwd}
    )
    roundings = 1.5
    quick = 0.02

    def examples(self) -> Sequence[Example]:
        examples = attention_examples(super().examples(), ("bfloat16", "float16"))
        return tuple(one for one in examples if _is_in(4, one) and _has_narrow_heads(one))


def _is_in(share: int, one: Example) -> bool:
    """Whether an example is the one in so many, by its name."""
    return zlib.crc32(one.name.encode()) % share == 0


class TestLoss(KernelProofs):
    """A part of the examples: all of them are for a card."""

    kernel = "fused_linear_cross_entropy.gluon_sm90"
    backward: str | None = "fused_linear_cross_entropy_bwd.gluon_sm90"
    registry = interpreted_registry({kernel: loss, backward: loss_bwd})
    refuses = frozenset({"float32", "float64"})

    #: Of the examples one in so many, and these.
    share, chosen = 6, ("everything", "one-at-a-time", "plain-blocks-and-a-tail", "plain-sharded", "plain-tiny")

    def examples(self) -> Sequence[Example]:
        examples = loss_examples(super().examples())
        return tuple(one for one in examples if one.name in self.chosen or _is_in(self.share, one))


class TestSumOfLosses(TestLoss):
    chosen = ("everything", "one-at-a-time", "plain-sharded", "plain-tiny")
    kernel = "fused_linear_cross_entropy_sum.gluon_sm90"
    backward = None
    #: The gradient of the logits is rounded, and in a second derivative once more.
    roundings = 2.0
    registry = interpreted_registry({"fused_linear_cross_entropy_sum.gluon_sm90": total})


class TestLogProbs(TestLoss):
    """The gradients are those of plain JAX."""

    kernel = "linear_log_probs.gluon_sm90"
    backward = None
    registry = interpreted_registry({"linear_log_probs.gluon_sm90": linear_log_probs})


def _has_narrow_heads(one: Example) -> bool:
    """Beyond a head dim of 128 the values depend on the order of bytes in shared memory."""
    return bool(one.abstract()["query"].shape[-1] <= 128)


@pytest.mark.parametrize("kernel", ["grouped_matmul.gluon_sm90", "grouped_matmul.triton"])
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_an_activation_of_nan_is_nan(kernel: str, activation: str) -> None:
    lhs, rhs = jnp.ones((9, 16), "bfloat16").at[3].set(jnp.nan), jnp.ones((2, 16, 32), "bfloat16")
    modules = {"grouped_matmul.gluon_sm90": grouped_matmul, "grouped_matmul.triton": portable}
    registry = interpreted_registry({kernel: modules[kernel]})
    out = registry.call("grouped_matmul", lhs, rhs, jnp.array([5, 4]), activation=activation, backend=kernel[15:])
    np.testing.assert_array_equal(np.isnan(out), np.arange(9)[:, None] == np.full(16, 3))
