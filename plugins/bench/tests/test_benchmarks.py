"""Each benchmark at a tiny size: its results are right, it finds wrong ones, and it can be shown. No time is judged."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from ejkernel_bench import __main__ as command
from ejkernel_bench import _problem, attention, memory, overhead, packed, run, tuning, window
from ejkernel_bench._problem import Problem, through_core, with_gradients

TINY = Problem(1, 64, 2, 16)


@pytest.fixture
def wrong(monkeypatch):
    """The kernels under test are one part in a hundred off; the reference is not."""

    def off(problem, backend=None):
        right = through_core(problem, backend)
        return right if backend == "reference" else lambda *arrays: 1.01 * right(*arrays)

    for module in (attention, overhead, run, window):
        monkeypatch.setattr(module, "through_core", off)


def dense(problem, query, key, value):
    """Attention in NumPy, in float64."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    scores = np.einsum("bqhd,bkhd->bhqk", query, key) * problem.head_dim**-0.5
    distance = np.arange(problem.length)[:, None] - np.arange(problem.length)
    seen = np.ones_like(distance, bool) if not problem.causal else distance >= 0
    if problem.window is not None:
        seen &= distance <= problem.window
    weights = np.exp(np.where(seen, scores, -np.inf))
    return np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), value)


# -- the problems -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "problem", [TINY, Problem(2, 40, 2, 16, causal=False), Problem(1, 64, 2, 16, window=9)], ids=str
)
def test_a_problem_is_what_it_says(problem):
    query, key, value, d_out = problem.arrays()
    out = through_core(problem)(query, key, value)
    np.testing.assert_allclose(out, dense(problem, query, key, value), rtol=1e-4, atol=1e-5)
    both = with_gradients(through_core(problem))(query, key, value, d_out)
    np.testing.assert_allclose(both[0], out, rtol=1e-5, atol=1e-6)
    for place, gradient in enumerate(both[1:]):
        step = 1e-3 * np.sign(gradient)
        moved = [array + step * (place == other) for other, array in enumerate((query, key, value))]
        change = ((dense(problem, *moved) - dense(problem, query, key, value)) * d_out).sum()
        assert change == pytest.approx(float((gradient * step).sum()), rel=2e-2)


def test_what_is_chosen_is_named():
    assert _problem.chosen(TINY, "reference") == "flash_attention.reference and flash_attention_bwd.reference"


# -- each benchmark -----------------------------------------------------------------------------------------------


def test_run_checks_and_explains():
    report = run.solve(TINY, None, rounds=2)
    assert report.faults == ()
    assert "flash_attention." in report.text
    assert "d_value" in str(report)
    assert "forward+backward" in str(report)


def test_run_finds_what_is_wrong(wrong):
    report = run.solve(TINY, None, rounds=1)
    assert {fault.partition(" ")[0] for fault in report.faults} == {"out", "d_query", "d_key", "d_value"}


def test_tuning_is_measured_against_the_heuristic_and_in_a_second_process(monkeypatch):
    monkeypatch.setattr(tuning, "PROBLEM", TINY)
    monkeypatch.setattr(tuning, "BUDGET_S", 20.0)
    report = tuning.run(None, rounds=2)
    assert report.faults == ()
    assert [bar.unit for bar in report.bars] == ["times", "s", "s"]
    assert [row[1] for row in report.tables[1].rows] == ["disk"]
    assert report.text.startswith("flash_attention(query=float32[1,64,2,16]")
    assert len(tuning.ejkernel_core.registry.memory) == 0


def test_the_call_is_measured_against_the_same_kernel():
    table, bar, faults = overhead.call_overhead(None, calls=5)
    assert faults == []
    assert [row[0] for row in table.rows] == ["ejkernel_core.call", "bare jax.jit"]
    assert bar.unit == "us"


def test_the_bare_function_is_attention():
    arrays = overhead.TINY.arrays()[:3]
    out = overhead.bare_function(arrays)(*arrays)
    np.testing.assert_allclose(out, dense(overhead.TINY, *arrays), rtol=1e-4, atol=1e-5)


def test_a_difference_between_call_and_bare_function_is_found(wrong):
    _, _, faults = overhead.call_overhead(None, calls=1)
    assert faults


def test_a_remembered_configuration_is_measured_and_used():
    table, bar, faults = overhead.memory_overhead(None, calls=5)
    assert faults == []
    assert [row[0] for row in table.rows] == ["by the heuristic", "remembered"]
    assert (bar.unit, bar.limit) == ("us", 3.0)


def test_a_remembered_configuration_that_is_not_used_is_found(monkeypatch):
    monkeypatch.setattr(overhead.Registry, "remember", lambda *arguments: None)
    _, _, faults = overhead.memory_overhead(None, calls=1)
    assert faults == ["what is in memory was not used, but heuristic"]


def test_what_is_on_disk_is_measured_and_found():
    table, bar, faults = overhead.disk_lookup(entries=30, lookups=10)
    assert faults == []
    assert "among 30 entries, milliseconds, 10 keys" in table.title
    assert (bar.unit, bar.limit) == ("ms", 1.0)


def test_what_is_not_found_on_disk_is_told(monkeypatch):
    monkeypatch.setattr(overhead, "_fill", lambda cache, keys, record: cache.put(keys[0], record))
    assert overhead.disk_lookup(entries=30, lookups=10)[2] == ["9 of 10 configurations on disk are not found"]


def test_imports_are_measured_and_nothing_is_loaded_too_early():
    table, bar = overhead.import_overhead(imports=1)
    assert len(table.rows) == 3
    assert bar.unit == "ms"
    assert overhead.loaded_too_early() == []
    assert {"ejkernel_ops", "ejkernel_xla"} <= overhead.plugin_packages()


def test_what_is_loaded_too_early_is_found(monkeypatch):
    monkeypatch.setattr(overhead, "FORBIDDEN", ("pluggy",))
    assert "pluggy" in overhead.loaded_too_early()


@pytest.mark.parametrize("causal", [True, False])
def test_attention_agrees_with_its_peer(causal):
    problem = Problem(1, 64, 2, 16, causal=causal)
    table, bars, faults = attention.compare(problem, None, rounds=1)
    assert faults == []
    assert len(table.rows) == 4
    assert len(bars) == 2


def test_attention_finds_what_is_wrong(wrong):
    _, _, faults = attention.compare(TINY, None, rounds=1)
    assert any("forward+backward" in fault and "d_key" in fault for fault in faults)


def test_the_peer_is_attention():
    arrays = TINY.arrays()[:3]
    np.testing.assert_allclose(attention.by_jax_nn(TINY)(*arrays), dense(TINY, *arrays), rtol=1e-4, atol=1e-5)


def test_a_window_is_checked_at_its_end(monkeypatch):
    monkeypatch.setattr(window, "CHECKED", 16)
    table, bars, faults = window.compare(TINY, 8, None, rounds=1)
    assert faults == []
    assert len(table.rows) == 4
    assert all(bar.at_least for bar in bars)


def test_a_window_that_is_wrong_is_found(wrong):
    _, _, faults = window.compare(TINY, 8, None, rounds=1)
    assert any("window 8" in fault for fault in faults)


def test_memory_is_counted_in_a_process_of_its_own():
    table, bars = memory.measure(TINY, "reference", rounds=1)
    dense_scores = TINY.batch * TINY.heads * TINY.length**2 * 4
    assert table.rows[0][1] * memory.GIB >= dense_scores
    assert len(bars) == len(table.rows) == (2 if jax.default_backend() == "cpu" else 1)


def test_ids_are_measured_against_repeat():
    table, bars, faults = packed.token_ids(tokens=64, sequences=9, rounds=1)
    assert faults == []
    assert len(table.rows) == 4
    assert [bar.unit for bar in bars] == ["times", "times"]


def test_segment_ids_of_a_mask_are_measured():
    table, bar, faults = packed.mask_ids(length=32, rounds=1)
    assert faults == []
    assert [row[0] for row in table.rows] == ["segments", "causal", "random"]
    assert (bar.unit, bar.limit) == ("s", 1.0)


def test_wrong_ids_are_found(monkeypatch):
    monkeypatch.setattr(packed, "prepare_sequence_ids", packed.prepare_position_ids)
    monkeypatch.setattr(packed, "mask_to_segment_ids", lambda mask: (mask[0], mask[1]))
    assert packed.token_ids(tokens=64, sequences=9, rounds=1)[2] == ["prepare_sequence_ids differs from jnp.repeat"]
    assert len(packed.mask_ids(length=32, rounds=1)[2]) == 3


# -- the command --------------------------------------------------------------------------------------------------


def test_without_a_name_it_lists(capsys):
    assert command.main([]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == ["run", "overhead", "flash_attention", "attention", "memory", "tuning", "window", "packed"]


def test_an_unknown_name_is_an_error(capsys):
    with pytest.raises(SystemExit):
        command.main(["atention"])
    assert "no benchmark is called atention" in capsys.readouterr().err


def test_it_runs_prints_and_writes(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(run, "SIZES", dict.fromkeys(("cpu", "gpu", "tpu"), TINY))
    file = tmp_path / "found.json"
    assert command.main(["run", "--rounds", "1", "--backend", "reference", "--json", str(file)]) == 0
    assert "backend='reference' was asked for" in capsys.readouterr().out
    (found,) = json.loads(file.read_text())
    assert found["benchmark"] == "run"
    assert [row[0] for row in found["tables"][0]["rows"]] == ["out", "d_query", "d_key", "d_value"]


def test_a_wrong_result_is_the_exit_code(monkeypatch, wrong):
    monkeypatch.setattr(run, "SIZES", dict.fromkeys(("cpu", "gpu", "tpu"), TINY))
    assert command.main(["run", "--rounds", "1"]) == 1
