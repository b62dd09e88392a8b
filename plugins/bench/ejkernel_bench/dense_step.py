"""A training step of layers like Llama-3.1-8B's: on our operations, and on jax.nn with cuDNN and the loss in chunks.

4 x 4096 tokens, bfloat16, with Adam's moments in float32, as many layers as fit, at most 32. A layer has attention of
32 query and 8 key heads of 128, and a dense layer of 14,336; the head has 128,256 words. Each layer is computed again
in the backward, but for attention. The model is that of moe-step, written once in plain JAX; each arm gives it the
functions of a library. Ours are rms_norm, flash_attention and fused_linear_cross_entropy. The other has plain JAX for
the norms, and a loss in chunks of rows whose logits are computed again.

The loss and all gradients of two layers are compared with ours. The share of the product rate is that of the whole
step, and only useful operations count: 6 for each parameter of the layers and of the head and each token, and 3.5 times
those of causal attention forward; nothing for what is computed again, and nothing for Adam. The product rate is
measured in the run. Memory is what the compiler plans, and the peak of a step by the device. A profile has the time of
each part.

On a GPU, set XLA_PYTHON_CLIENT_MEM_FRACTION=0.93. --quick has at most four layers. --small has tiny sizes, which a CPU
can run.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import attrs
import jax

from ejkernel_ops import flash_attention, rms_norm

from ._memory import memory_limit
from ._moe_model import EPSILON, DenseArm, Size
from ._report import Bar, Report, Table
from ._rows import Rows
from .moe_step import (
    DENSE,
    MEMORY_COLUMNS,
    QUICK_LAYERS,
    ROUNDS,
    SMALL_DENSE,
    Figures,
    Measured,
    Run,
    attention_of_jax,
    count,
    layers_that_fit,
    loss_of_head,
    plain_norm,
    title_of,
)
from .suite import OURS

JAX = "jax.nn"
#: Those of Llama-3.1-8B.
MOST_LAYERS = 32
#: The least share of the product rate.
SHARE_MINIMUM = 0.60
#: How far gradients of the same parameters may be apart, relative to their norm.
GRADIENT_LIMITS = {"bfloat16": 5e-2, "float32": 1e-3}


@attrs.frozen
class DenseSize(Size):
    """A model without experts, and its batch. The defaults are Llama-3.1-8B's, but for the number of layers."""

    dim: int = 4096
    kv_heads: int = 8
    experts: int = 1
    chosen: int = 1
    inner: int = 14336
    vocabulary: int = 128256
    base: float = 5e5

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters of a layer."""
        shapes = super().layer_shapes()
        return {
            **{name: shapes[name] for name in ("norm_1", "qkv", "out", "norm_2")},
            "up": (self.dim, 2 * self.inner),
            "down": (self.inner, self.dim),
        }

    def step_flops(self) -> float:
        """The useful work of a step.

        >>> size = DenseSize(32)
        >>> parameters = 32 * 218_112_000 + 4096 * 128256
        >>> attention = 2 * 4 * 32 * 4096**2 * 128  # two products, of which half are not masked
        >>> size.step_flops() == 6 * parameters * 4 * 4096 + 3.5 * 32 * attention
        True
        """
        parameters = self.layers * count(self.layer_shapes()) + self.dim * self.vocabulary
        attention = 2.0 * self.batch * self.heads * self.length**2 * self.head_dim
        return 6.0 * parameters * self.tokens + 3.5 * self.layers * attention


SMALL = DenseSize(
    2, 2, 24, dim=64, heads=4, kv_heads=2, head_dim=16, inner=48, vocabulary=97, chunk=16, dtype="float32"
)


def by_ejkernel(backend: str | None = None) -> DenseArm:
    """Our operations. A backend is that of attention."""
    attention = partial(flash_attention, causal=True, backend=backend)
    return DenseArm(partial(rms_norm, epsilon=EPSILON), attention, loss=loss_of_head)


def by_jax() -> DenseArm:
    """``jax.nn``, with cuDNN on a GPU, and plain JAX for what it does not have."""
    return DenseArm(plain_norm, attention_of_jax)


def run(backend: str | None = None, rounds: int = ROUNDS, small: bool = False, quick: bool = False) -> Report:
    """Both arms, compared, timed and profiled. A quick run has at most a few layers."""
    if jax.default_backend() == "cpu" and not small:
        return Report("dense-step", (), text="dense-step: there is no accelerator here; --small measures on the CPU")
    arms = DenseRun("dense-step", rounds, SMALL_DENSE if small else DENSE, gradient_limits=GRADIENT_LIMITS)
    arms.add(OURS, partial(by_ejkernel, backend))
    arms.add(JAX, by_jax)
    report = arms.measure(SMALL if small else full_size(quick))
    return attrs.evolve(report, bars=()) if small else report


def full_size(quick: bool) -> DenseSize:
    """As many layers as should fit; fewer if the plan of a step then takes too much."""
    limit = memory_limit()
    layers = QUICK_LAYERS if limit is None else min(layers_that_fit(DenseSize(1), limit), MOST_LAYERS)
    return DenseSize(min(layers, QUICK_LAYERS) if quick else layers)


class DenseRun(Run):
    """The whole step counts, with its head."""

    def figures(self, measured: Measured) -> Figures:
        return StepFigures(measured, {})


class StepFigures(Figures):
    """Those of whole steps."""

    def share(self, name: str) -> float:
        """Of the product rate, by the useful operations of the step."""
        assert isinstance(self.size, DenseSize)
        return self.size.step_flops() / self.times[name].median / self.measured.rate

    def times_table(self) -> Table:
        """Steps, which a picture draws."""
        columns = ["", *(column for name in self.times for column in (name, "range"))]
        rows = Rows(f"milliseconds, medians of rounds in turn: {title_of(self.size)}", columns, series=[*self.times])
        rows.add("a step", *(cell for one in self.times.values() for cell in one.scaled(1e-3)[:2]))
        return rows.table()

    def table(self) -> Table:
        """Useful work and memory."""
        rate = self.measured.rate / 1e12
        columns = ("", f"over {OURS}", "TFLOP/s", "of the product rate", *MEMORY_COLUMNS)
        rows = Rows(f"{title_of(self.size)}; a dense product has {rate:.3g} TFLOP/s", columns)
        for name, one in self.times.items():
            share = self.share(name)
            ratio = one.median / self.times[OURS].median
            rows.add(name, ratio, share * rate, share, *self.measured.gib(name))
        return rows.table()

    def bars(self, is_full: bool) -> Iterator[Bar]:
        """The share of the product rate, and no slower than the other."""
        yield Bar("a step: of the product rate", self.share(OURS), SHARE_MINIMUM, "times", at_least=True)
        if JAX in self.times:
            ratio = self.times[JAX].median / self.times[OURS].median
            yield Bar(f"a step: over {JAX}", ratio, 1.0, "times", at_least=True)
