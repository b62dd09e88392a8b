"""The resources of the kernels for losses on Hopper: every configuration, compiled by Triton alone.

The figures of the configurations that are checked before the long sweep are in `loss_gluon_resources.json`, with a hash
of what decides them. The tests compile what is not in it with the same hash, and those of the long sweep compile
everything. `python -m plugins.triton.tests.test_loss_gluon_resources` writes the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import jax
import pytest

import ejkernel_core
from ejkernel_core import Invocation
from ejkernel_triton import fused_linear_cross_entropy_sm90 as by_row
from ejkernel_triton import linear_log_probs_sm90 as log_probs
from ejkernel_triton.fused_linear_cross_entropy_sm90 import Config, total
from ejkernel_triton.fused_linear_cross_entropy_sm90._tiling import BANDS, STAGES
from ejkernel_triton.launch import _jax_triton
from plugins.triton.tests.hopper_launches import SHARED_MEMORY, Figures, Launch, Lock, record_launches

if _jax_triton.unavailable_reason():
    pytest.skip(_jax_triton.unavailable_reason(), allow_module_level=True)

LOCK = Lock.read(Path(__file__).with_name("loss_gluon_resources.json"))
#: Of a step, each of which sums 16 numbers.
PRODUCTS = 64 // 16
#: A step of 64 numbers of 128 rows, twice 64, and of words: 64 of them at a time, or all.
ROW_COPIES = 2


@attrs.frozen
class Call:
    """The losses of rows, with ``gradients`` their sum, or with ``entropy`` the log-probabilities and entropies."""

    transposed: bool = False
    bias: bool = False
    logits_soft_cap: float | None = None
    label_smoothing: float = 0.0
    entropy: bool = False
    gradients: bool = False
    #: The last tile of words is full.
    vocab: int = 128_256
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        """What is not as in a plain loss."""
        unusual = attrs.asdict(self, filter=lambda field, value: value != field.default)
        return " ".join(name if value is True else f"{name}={value}" for name, value in unusual.items()) or "plain"

    @property
    def module(self) -> Any:
        return log_probs if self.entropy else total if self.gradients else by_row

    @property
    def op(self) -> str:
        return "linear_log_probs" if self.entropy else "fused_linear_cross_entropy" + "_sum" * self.gradients

    @property
    def rows(self) -> int:
        """With gradients, one chunk."""
        return 2048 if self.gradients else 8192

    @property
    def most_spilled(self) -> int:
        """The most reads from the stack, and writes to it, behind the loop: once for each tile, in 64 to 112 steps.

        Most are there where exponentials are stored and logits summed, and the last tile of words is not full.
        """
        if self.gradients and self.label_smoothing and self.vocab % Config().columns:
            return 220
        has_more = self.label_smoothing or self.logits_soft_cap or self.entropy
        return 30 if has_more or self.vocab % Config().columns else 0

    def copies(self, cfg: Config) -> int:
        """The instructions that fetch a step."""
        return ROW_COPIES + (1 if self.transposed else cfg.columns // 64)

    def invocation(self) -> Invocation:
        """The call on an H200."""
        shapes = ((self.rows, 4096), (self.vocab, 4096) if self.transposed else (4096, self.vocab))
        options = {"logits_soft_cap": self.logits_soft_cap, "transpose_weight": self.transposed}
        if self.bias:
            options["bias"] = jax.ShapeDtypeStruct((self.vocab,), self.dtype)
        if self.label_smoothing:
            options |= {"label_smoothing": self.label_smoothing, "z_loss": 1e-2}
        inv = ejkernel_core.invocation(
            self.op,
            *(jax.ShapeDtypeStruct(shape, self.dtype) for shape in shapes),
            jax.ShapeDtypeStruct((self.rows,), "int32"),
            **options,
            **({"temperature": 0.7} if self.entropy else {}),
        )
        # The gradients of the matrices: that of a bias has no kernel of its own.
        needed = frozenset({"loss", "hidden_gradient", "weight_gradient"}) if self.gradients else None
        card = {"platform": "gpu", "device_kind": "NVIDIA H200", "compute_capability": (9, 0)}
        return attrs.evolve(inv, needed=needed, **card)


EVERYTHING: dict[str, Any] = {"bias": True, "logits_soft_cap": 30.0}
QUICK = [
    Call(),
    Call(transposed=True),
    Call(bias=True),
    Call(gradients=True),
    Call(transposed=True, vocab=50_257, label_smoothing=0.1, **EVERYTHING),
    Call(entropy=True, **EVERYTHING),
]
OTHERS = [
    *(Call(logits_soft_cap=30.0, vocab=vocab, transposed=True) for vocab in (128_256, 50_257)),
    *(Call(label_smoothing=0.1, vocab=vocab, transposed=True) for vocab in (128_256, 50_257)),
    *(Call(entropy=True, vocab=vocab, transposed=True) for vocab in (128_256, 50_257)),
    Call(label_smoothing=0.1, bias=True),
    Call(dtype="float16", **EVERYTHING),
    Call(gradients=True, transposed=True, vocab=50_257, label_smoothing=0.1, bias=True),
    Call(vocab=200),
    Call(transposed=True, vocab=3),
]
CONFIGS = [Config(columns, count, band) for columns, counts in STAGES.items() for count in counts for band in BANDS]


def launched(launches: list[Launch], call: Call, cfg: Config) -> Launch:
    """The launch of a call. The configuration is checked as the core checks it."""
    launches.clear()
    inv = call.invocation()
    call.module.check_cfg(inv, cfg)
    arrays = {name: x for name, x in inv.arguments.items() if isinstance(x, jax.ShapeDtypeStruct)}
    jax.eval_shape(lambda arrays: call.module.run_backend(inv.with_arrays(arrays), cfg), arrays)
    (launch,) = launches
    return attrs.evolve(launch, products=PRODUCTS)


def check(figures: Figures, call: Call, cfg: Config) -> None:
    # Two groups of four, and one that fetches, with room for three more.
    assert figures.num_warps == 12
    assert figures.registers == 168  # on average: 240, 240 and 24
    assert figures.shared_memory <= SHARED_MEMORY
    # XLA makes graphs of several launches, which must not allocate.
    assert not figures.scratch
    assert max(figures.spilled) <= call.most_spilled
    assert figures.words["wgmma.mma_async"] == 2 * PRODUCTS
    assert figures.words["cp.async.bulk.tensor"] == call.copies(cfg)
    assert len(figures.loops) == 2
    for loop in figures.loops:
        # Only the product of this step may still run. Other waits would mean that products wait for each other.
        assert loop.waits == (1,)
        assert (loop.loads, loop.stores) == (0, 0)


@pytest.mark.parametrize("call", QUICK, ids=str)
def test_the_best_configuration_compiles_for_hopper(launches: list[Launch], call: Call) -> None:
    check(LOCK.get(launched(launches, call, Config())), call, Config())


@pytest.mark.long
@pytest.mark.parametrize("cfg", CONFIGS, ids=str)
@pytest.mark.parametrize("call", [QUICK[0], QUICK[3]], ids=str)
def test_every_configuration_compiles_for_hopper(launches: list[Launch], call: Call, cfg: Config) -> None:
    compile_and_compare(launches, call, cfg)


@pytest.mark.long
@pytest.mark.parametrize("call", [*QUICK, *OTHERS], ids=str)
def test_every_feature_and_type_compiles_for_hopper(launches: list[Launch], call: Call) -> None:
    compile_and_compare(launches, call, Config())


def compile_and_compare(launches: list[Launch], call: Call, cfg: Config) -> None:
    launch = launched(launches, call, cfg)
    figures = launch.compile()
    check(figures, call, cfg)
    assert LOCK.figures.get(launch.digest) in (None, figures), f"{LOCK.file.name} differs"


def test_every_configuration_of_the_space_is_compiled(launches: list[Launch]) -> None:
    for call in (*QUICK, *OTHERS):
        assert {*call.module.config_space(call.invocation())} <= {*CONFIGS}


def recorded_launches(launches: list[Launch]) -> Iterator[tuple[str, Launch]]:
    """The launches of the tests before the long sweep."""
    for call in QUICK:
        yield str(call), launched(launches, call, Config())


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as monkeypatch:
        LOCK.write(recorded_launches(record_launches(monkeypatch)))
