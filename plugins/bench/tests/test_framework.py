"""The suites of the framework at tiny sizes: they have right results, and find wrong ones. No time is judged."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from ejkernel_bench import memory, overhead, packed, tuning
from ejkernel_core import registry
from ejkernel_ops.flash_attention.sizes import self_attention


@pytest.mark.long
def test_tuning_is_measured_against_the_heuristic_and_in_a_second_process(monkeypatch):
    monkeypatch.setattr(tuning, "EXAMPLE", self_attention(1, 64, 2, 16))
    monkeypatch.setattr(tuning, "BUDGET_S", 20.0)
    report = tuning.run(None, rounds=2)
    assert report.faults == ()
    assert [bar.unit for bar in report.bars] == ["times", "s", "s"]
    assert [row[1] for row in report.tables[1].rows] == ["disk"]
    assert report.text.startswith("flash_attention(query=float32[1,64,2,16]")
    assert len(registry.memory) == 0


def test_the_call_is_measured_against_the_same_kernel():
    table, bar, faults = overhead.call_overhead(None, calls=5)
    assert faults == []
    assert [row[0] for row in table.rows] == ["ejkernel_core.call", "bare jax.jit"]
    assert bar.unit == "us"


def test_the_bare_function_is_attention():
    arrays = overhead.tiny_arrays()
    expected = jax.nn.dot_product_attention(*arrays, is_causal=True)
    np.testing.assert_allclose(overhead.bare_function(arrays)(*arrays), expected, rtol=1e-4, atol=1e-5)


def test_a_difference_between_the_call_and_the_bare_function_is_reported(monkeypatch):
    call = overhead.eager_call(None)
    monkeypatch.setattr(overhead, "eager_call", lambda backend: lambda *arrays: 1.01 * call(*arrays))
    _, _, faults = overhead.call_overhead(None, calls=1)
    assert faults == ["the call and the bare function give different results"]


def test_a_record_in_memory_is_measured_and_used():
    table, bar, faults = overhead.memory_overhead(None, calls=5)
    assert faults == []
    assert [row[0] for row in table.rows] == ["by the heuristic", "remembered"]
    assert (bar.unit, bar.limit) == ("us", 3.0)


def test_a_record_in_memory_that_is_not_used_is_reported(monkeypatch):
    monkeypatch.setattr(overhead.Registry, "remember", lambda *arguments: None)
    _, _, faults = overhead.memory_overhead(None, calls=1)
    assert faults == ["the record in memory was not used, but heuristic"]


def test_records_on_disk_are_found_and_measured():
    table, bar, faults = overhead.disk_lookup(entries=30, lookups=10)
    assert faults == []
    assert "among 30 entries, milliseconds, 10 keys" in table.title
    assert (bar.unit, bar.limit) == ("ms", 1.0)


def test_records_that_are_not_found_on_disk_are_reported(monkeypatch):
    monkeypatch.setattr(overhead, "_fill", lambda cache, keys, record: cache.put(keys[0], record))
    assert overhead.disk_lookup(entries=30, lookups=10)[2] == ["9 of 10 configurations on disk are not found"]


@pytest.mark.long
def test_imports_are_measured_and_load_nothing_too_early():
    table, bar = overhead.import_overhead(imports=1)
    assert len(table.rows) == 3
    assert bar.unit == "ms"
    assert overhead.modules_loaded_too_early() == []
    assert {"ejkernel_ops", "ejkernel_xla"} <= overhead.plugin_packages()


def test_a_module_that_is_loaded_too_early_is_reported(monkeypatch):
    monkeypatch.setattr(overhead, "FORBIDDEN", ("pluggy",))
    assert "pluggy" in overhead.modules_loaded_too_early()


@pytest.mark.long
def test_memory_is_counted_in_a_new_process():
    batch, length, heads, _ = size = (1, 64, 2, 16)
    table, bars = memory.measure(size, "reference", rounds=1)
    dense_scores = batch * heads * length**2 * 4
    assert table.rows[0][1] * memory.GIB >= dense_scores
    assert len(bars) == len(table.rows) == (2 if jax.default_backend() == "cpu" else 1)


@pytest.mark.long
def test_the_memory_of_the_dense_peer_grows_with_the_square():
    (_, ours, theirs), (_, longer_ours, longer_theirs) = memory.by_length([512, 1024], None).rows
    batch, _, heads, _ = memory.SIZE
    assert theirs * memory.MIB >= batch * heads * 512**2 * 4  # the scores
    assert longer_theirs / theirs == pytest.approx(4, rel=0.1)
    assert longer_ours / ours < 2.5


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


def test_wrong_ids_are_reported(monkeypatch):
    monkeypatch.setattr(packed, "prepare_sequence_ids", packed.prepare_position_ids)
    monkeypatch.setattr(packed, "mask_to_segment_ids", lambda mask: (mask[0], mask[1]))
    assert packed.token_ids(tokens=64, sequences=9, rounds=1)[2] == ["prepare_sequence_ids differs from jnp.repeat"]
    assert len(packed.mask_ids(length=32, rounds=1)[2]) == 3
