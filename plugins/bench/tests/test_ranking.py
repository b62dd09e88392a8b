"""How often the winner of tuning differs between load and bursts."""

from __future__ import annotations

from types import SimpleNamespace

import attrs
import jax
import pytest

from ejkernel_bench import ranking
from ejkernel_ops.flash_attention.sizes import self_attention
from ejkernel_ops.grouped_matmul.examples import layer_call
from ejkernel_ops.grouped_matmul.sizes import Layer
from ejkernel_tuning import Entry, Tuned


@attrs.frozen
class Config:
    block: int


def tuned(loaded, bursts=None):
    """Times by block; the fastest is the best."""

    def entries(times):
        return tuple(
            Entry("triton", Config(block), ms) for block, ms in sorted(times.items(), key=lambda item: item[1])
        )

    has_result = ("a record",) if loaded else ()
    return Tuned((), "a call", entries(loaded), has_result, 1.5, burst_ranking=entries(bursts or {}))


NAMES = ("first", "same", "third", "short", "empty", "refused")


@pytest.fixture
def outcomes(monkeypatch):
    results = []

    def tune_each(calls, budget_s, remember, retune, backend, has_burst_ranking):
        assert (budget_s, remember, retune, backend, has_burst_ranking) == (5.0, False, True, "triton", True)
        assert [*calls] == [0, 1, 2, 3, 4, 5]
        for result in results:
            yield SimpleNamespace(tuned=result, reason="refused" if result is None else "")

    monkeypatch.setattr(ranking, "tune_each", tune_each)
    return results


def test_the_report_counts_the_calls_whose_winner_differs(outcomes):
    outcomes += [
        tuned({64: 1.0, 128: 1.05}, {128: 0.8, 64: 0.9}),
        tuned({64: 1.0, 128: 1.05}, {64: 0.8, 128: 0.9}),
        tuned({64: 2.0, 128: 2.04}, {128: 1.5, 64: 1.6}),
        tuned({64: 0.05}),
        tuned({}),
        None,
    ]
    report = ranking.compare(dict(zip(NAMES, range(6), strict=True)), "triton", 5.0)
    expected = "the winner differs in 2 of 3 calls; under load, that of bursts takes up to 1.05 times as long"
    assert report.text == f"ranking: {expected}; too short for load: short"
    (table,) = report.tables
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [row[""] for row in rows] == ["first", "same", "third"]
    assert [row["under load"] for row in rows] == ["triton Config(block=64)"] * 3
    assert [row["in bursts"] for row in rows] == ["triton Config(block=128)", "the same", "triton Config(block=128)"]
    assert [row["costs"] for row in rows] == [pytest.approx(1.05), "-", pytest.approx(1.02)]
    assert [row["ms under load"] for row in rows] == [1.05, "-", 2.04]
    assert [row["ms in a burst"] for row in rows] == [0.8, 0.8, 1.5]
    assert [row["measured"] for row in rows] == [2, 2, 2]
    assert [fault.rpartition(": ")[2] for fault in report.faults] == ["nothing could be measured", "refused"]
    assert [fault.partition(":")[0] for fault in report.faults] == ["empty", "refused"]


def test_both_passes_are_ranked():
    examples = [self_attention(1, 24, 2, 16, "bfloat16"), layer_call(Layer("tiny", 26, 8, 6, 4))]
    calls = ranking.invocations(examples)
    operations = ["flash_attention", "flash_attention_bwd", "grouped_matmul", "grouped_matmul_bwd"]
    assert [call.op for call in calls.values()] == operations
    assert [*calls][1] == f"flash_attention_bwd, {examples[0].name}"


def test_the_measured_calls_are_a_dozen():
    assert len(ranking.invocations(ranking.EXAMPLES)) == 12


def test_without_a_gpu_nothing_is_measured():
    if jax.default_backend() == "gpu":
        pytest.skip("there is one")
    assert ranking.run().text == "ranking: there is no GPU here, and nothing was measured"
