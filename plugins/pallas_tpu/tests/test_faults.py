"""Deliberate faults: the proofs report each, with the kernel's name and the result that is wrong."""

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
CAUSAL = examples.example(
    "causal", lambda d: examples.qkv(d, 1, 260, 390, 1, 1, 16) | {"causal": True, "return_lse": True}
)
BIASED = examples.example(
    "biased",
    lambda d: (
        examples.qkv(d, 2, 9, 200, 1, 1, 16) | {"bias": examples.normal("bias", d, (1, 1, 200)), "return_lse": True}
    ),
)
#: For each pass: its module and launch, an example that runs it, and the result that is wrong if the pass is.
PASSES = {
    "forward": (_forward, "forward", attrs.evolve(CAUSAL, wrt=()), "result"),
    "queries": (_backward, "query_pass", attrs.evolve(CAUSAL, wrt=("query",)), "gradient of query"),
    "keys": (_backward, "key_pass", attrs.evolve(CAUSAL, wrt=("key",)), "gradient of key"),
    "fused": (_fused, "fused_pass", attrs.evolve(CAUSAL, wrt=("query", "key", "value")), "gradient of key"),
    "bias": (_bias, "bias_pass", attrs.evolve(BIASED, wrt=("bias",)), "gradient of bias"),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks, of 128, and an interpreter without the state of another test."""
    from ejkernel_pallas_tpu.flash_attention import _tuning

    monkeypatch.setattr(_tuning, "block_shapes", lambda inv, pass_name: [(128, 128)])
    pltpu.reset_tpu_interpret_mode_state()
    yield
    pltpu.reset_tpu_interpret_mode_state()


def failure(pass_name: str, races: bool, order: int = 0) -> str:
    """How the proofs fail; "nothing" if they do not."""
    example = PASSES[pass_name][2]
    registry = interpreted_registry(KERNELS, races=races, order=order)
    try:
        _checks.values(registry, "flash_attention.pallas_tpu", example)
        _checks.gradients(registry, "flash_attention.pallas_tpu", example)
    except Exception as error:  # the interpreters raise errors of many types
        return f"{type(error).__name__}: {error}"
    return "nothing"


def change_launch(monkeypatch, pass_name: str, change) -> None:
    """Replace the launch of a pass by ``change(launch)``."""
    module, name, *_ = PASSES[pass_name]
    launch = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *arguments: change(launch(*arguments)))


def remove_part(monkeypatch, pass_name: str, part: int, parts: int) -> None:
    """Remove one of the conditional parts of a pass, by its number in the program."""
    count = itertools.count()

    def when(condition):
        return (lambda body: None) if next(count) % parts == part else pl.when(condition)

    monkeypatch.setattr(PASSES[pass_name][0], "pl", SimpleNamespace(when=when, ds=pl.ds, multiple_of=pl.multiple_of))


@pytest.mark.parametrize("pass_name", PASSES)
@pytest.mark.parametrize("races", [False, True])
def test_without_a_fault_nothing_is_reported(pass_name, races):
    assert failure(pass_name, races) == "nothing"


@pytest.mark.parametrize("pass_name", PASSES)
def test_a_wrong_index_map(monkeypatch, pass_name):
    """Every tile reads the first keys, or the first queries."""

    def change(launch):
        name = "query" if pass_name == "keys" else "key"
        operand = launch.operands[name]
        first = attrs.evolve(operand, index_map=lambda b, h, i, j: (*operand.index_map(b, h, i, j)[:1], 0, 0, 0))
        return attrs.evolve(launch, operands={**launch.operands, name: first})

    change_launch(monkeypatch, pass_name, change)
    report = failure(pass_name, races=False)
    assert "flash_attention.pallas_tpu on" in report
    assert f"{PASSES[pass_name][3]}" in report
    assert "is off by" in report


@pytest.mark.parametrize("pass_name", ["forward", "queries", "keys", "fused"])
def test_an_index_map_beyond_the_end(monkeypatch, pass_name):
    def change(launch):
        name = "query" if pass_name == "keys" else "key"
        operand = launch.operands[name]

        def index_map(*tile):
            batch, head, block, _ = operand.index_map(*tile)
            return batch, head, block + 1, 0

        beyond = attrs.evolve(operand, index_map=index_map)
        return attrs.evolve(launch, operands={**launch.operands, name: beyond})

    change_launch(monkeypatch, pass_name, change)
    assert "out of bounds" in failure(pass_name, races=True).lower().replace("-", " ")


#: The interpreter of a whole TPU is slow: faults that the faster one also finds are left to the long sweep.
RACES = [False, pytest.param(True, marks=pytest.mark.long)]
#: How many conditional parts each pass has: first those that initialize sums, at the end those that write results.
PARTS = {"forward": 2, "queries": 2, "keys": 2, "fused": 4, "bias": 3}
INITIALIZATIONS = [(pass_name, 0, PASSES[pass_name][3]) for pass_name in PARTS if pass_name != "fused"]
WRITES = [(pass_name, parts - 1, PASSES[pass_name][3]) for pass_name, parts in PARTS.items() if pass_name != "fused"]
INITIALIZATIONS += [("fused", 0, "gradient of key"), ("fused", 1, "gradient of query")]
WRITES += [("fused", 2, "gradient of query"), ("fused", 3, "gradient of key")]


@pytest.mark.parametrize("races", RACES)
@pytest.mark.parametrize(("pass_name", "part", "result"), INITIALIZATIONS)
def test_a_missing_initialisation(monkeypatch, pass_name, part, result, races):
    remove_part(monkeypatch, pass_name, part, PARTS[pass_name])
    report = failure(pass_name, races)
    assert "flash_attention.pallas_tpu on" in report
    assert result in report
    assert "NaN" in report


@pytest.mark.parametrize("pass_name", PASSES)
def test_a_parallel_axis_that_is_summed_over(monkeypatch, pass_name):
    change_launch(
        monkeypatch, pass_name, lambda launch: attrs.evolve(launch, semantics=("parallel",) * len(launch.grid))
    )
    report = failure(pass_name, races=True, order=4)  # in this order, the first step does not run first
    assert "Revisited block" in report or f"flash_attention.pallas_tpu on {PASSES[pass_name][2].name}" in report


@pytest.mark.parametrize("races", RACES)
@pytest.mark.parametrize(("pass_name", "part", "result"), WRITES)
def test_an_output_that_is_not_written(monkeypatch, pass_name, part, result, races):
    remove_part(monkeypatch, pass_name, part, PARTS[pass_name])
    report = failure(pass_name, races)
    assert "flash_attention.pallas_tpu on" in report
    assert result in report
