"""Faults that are put in on purpose: each is told by the proofs, with the kernel's name and what is wrong."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import attrs
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel_ops.flash_attention import examples
from ejkernel_pallas_tpu import flash_attention
from ejkernel_pallas_tpu.flash_attention import _backward, _bias, _forward, _fused
from ejkernel_pallas_tpu.flash_attention import backward as flash_attention_bwd
from ejkernel_pallas_tpu.testing import interpreted_registry
from ejkernel_testing import _checks

KERNELS = {"flash_attention.pallas_tpu": flash_attention, "flash_attention_bwd.pallas_tpu": flash_attention_bwd}
CAUSAL = examples.case(
    "causal", lambda d: examples.qkv(d, 1, 260, 390, 1, 1, 16) | {"causal": True, "return_lse": True}
)
BIASED = examples.case(
    "biased",
    lambda d: (
        examples.qkv(d, 2, 9, 200, 1, 1, 16) | {"bias": examples.normal("bias", d, (1, 1, 200)), "return_lse": True}
    ),
)
#: Where each pass is, and what of which case it makes.
PASSES = {
    "forward": (_forward, "forward", attrs.evolve(CAUSAL, wrt=()), "result"),
    "queries": (_backward, "over_keys", attrs.evolve(CAUSAL, wrt=("query",)), "gradient of query"),
    "keys": (_backward, "over_queries", attrs.evolve(CAUSAL, wrt=("key",)), "gradient of key"),
    "fused": (_fused, "fused", attrs.evolve(CAUSAL, wrt=("query", "key", "value")), "gradient of key"),
    "bias": (_bias, "into_bias", attrs.evolve(BIASED, wrt=("bias",)), "gradient of bias"),
}


@pytest.fixture(autouse=True)
def small_blocks_afresh(monkeypatch):
    """Blocks of 128, so that there are several; and nothing is left from one kernel to the next."""
    from ejkernel_pallas_tpu.flash_attention import _tuning

    monkeypatch.setattr(_tuning, "fitting", lambda inv, which: [(128, 128)])
    pltpu.reset_tpu_interpret_mode_state()
    yield
    pltpu.reset_tpu_interpret_mode_state()


def told(which: str, races: bool, order: int = 0) -> str:
    """What the proof says of the kernels as they are now."""
    case = PASSES[which][2]
    registry = interpreted_registry(KERNELS, races=races, order=order)
    try:
        _checks.values(registry, "flash_attention.pallas_tpu", case)
        _checks.gradients(registry, "flash_attention.pallas_tpu", case)
    except Exception as fault:  # the interpreters raise what they like
        return f"{type(fault).__name__}: {fault}"
    return "nothing"


def changed(monkeypatch, which: str, change) -> None:
    """The launch of a pass, changed."""
    module, name, *_ = PASSES[which]
    made = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given: change(made(*given)))


def without(monkeypatch, which: str, part: int, parts: int) -> None:
    """A pass without one of the parts that it does under a condition: they are asked for in order."""
    count = itertools.count()

    def when(condition):
        return (lambda body: None) if next(count) % parts == part else pl.when(condition)

    monkeypatch.setattr(PASSES[which][0], "pl", SimpleNamespace(when=when, ds=pl.ds, multiple_of=pl.multiple_of))


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("races", [False, True])
def test_no_fault_no_word(which, races):
    assert told(which, races) == "nothing"


@pytest.mark.parametrize("which", PASSES)
def test_a_wrong_index_map(monkeypatch, which):
    """Every tile gets the first keys, or the first queries."""

    def change(launch):
        name = "query" if which == "keys" else "key"
        operand = launch.operands[name]
        first = attrs.evolve(operand, place=lambda b, h, i, j: (*operand.place(b, h, i, j)[:1], 0, 0, 0))
        return attrs.evolve(launch, operands={**launch.operands, name: first})

    changed(monkeypatch, which, change)
    found = told(which, races=False)
    assert "flash_attention.pallas_tpu on" in found
    assert f"{PASSES[which][3]}" in found
    assert "is off by" in found


@pytest.mark.parametrize("which", ["forward", "queries", "keys", "fused"])
def test_an_index_map_beyond_the_end(monkeypatch, which):
    def change(launch):
        name = "query" if which == "keys" else "key"
        operand = launch.operands[name]
        beyond = attrs.evolve(operand, place=lambda *at: (*operand.place(*at)[:2], operand.place(*at)[2] + 1, 0))
        return attrs.evolve(launch, operands={**launch.operands, name: beyond})

    changed(monkeypatch, which, change)
    assert "out of bounds" in told(which, races=True).lower().replace("-", " ")


#: The interpreter of a whole TPU is slow; what the quicker one tells, too, it tells in the long sweep.
RACES = [False, pytest.param(True, marks=pytest.mark.long)]
#: What each pass does under a condition: what it begins, and what it writes at the end; and what that is.
PARTS = {"forward": 2, "queries": 2, "keys": 2, "fused": 4, "bias": 3}
BEGINS = [(which, 0, PASSES[which][3]) for which in PARTS if which != "fused"]
WRITES = [(which, parts - 1, PASSES[which][3]) for which, parts in PARTS.items() if which != "fused"]
BEGINS += [("fused", 0, "gradient of key"), ("fused", 1, "gradient of query")]
WRITES += [("fused", 2, "gradient of query"), ("fused", 3, "gradient of key")]


@pytest.mark.parametrize("races", RACES)
@pytest.mark.parametrize(("which", "part", "wrong"), BEGINS)
def test_a_missing_initialisation(monkeypatch, which, part, wrong, races):
    without(monkeypatch, which, part, PARTS[which])
    found = told(which, races)
    assert "flash_attention.pallas_tpu on" in found
    assert wrong in found
    assert "NaN" in found


@pytest.mark.parametrize("which", PASSES)
def test_parallel_on_an_axis_that_is_added_up(monkeypatch, which):
    changed(monkeypatch, which, lambda launch: attrs.evolve(launch, semantics=("parallel",) * len(launch.grid)))
    found = told(which, races=True, order=4)  # an order in which the first step is not done first
    assert "Revisited block" in found or f"flash_attention.pallas_tpu on {PASSES[which][2].name}" in found


@pytest.mark.parametrize("races", RACES)
@pytest.mark.parametrize(("which", "part", "wrong"), WRITES)
def test_an_output_that_is_never_written(monkeypatch, which, part, wrong, races):
    without(monkeypatch, which, part, PARTS[which])
    found = told(which, races)
    assert "flash_attention.pallas_tpu on" in found
    assert wrong in found
