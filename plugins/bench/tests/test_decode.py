"""The suite ``decode``: its calls, and what it passes to FA3."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from ejkernel_bench import decode, suite
from ejkernel_bench._calls import by_core, describe, draw
from ejkernel_bench._figures import Figures
from ejkernel_bench._timing import Times
from ejkernel_core import registry
from ejkernel_ops import flash_attention


def test_a_small_call_is_right_and_measured():
    report = decode.run(rounds=1, small=True)
    assert report.faults == ()
    assert report.tables[0].rows[0][0] == f"{decode.SMALL}, forward"


@pytest.mark.parametrize(("kernels", "columns"), [(None, []), ("xla,reference", ["xla", "reference"])])
def test_other_kernels_are_measured_by_name(kernels, columns):
    table = decode.run(rounds=1, small=True, kernels=kernels).tables[0]
    assert [name for name in table.columns if name in registry.backends("flash_attention")] == columns
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert all(isinstance(row[name], float) for name in columns)


def test_the_calls_of_bars_come_first():
    names = [example.name for example in decode.examples()]
    assert len(names) == len({*names}) == 39
    assert [name.partition(" H")[0] for name in names[:5]] == [
        f"B{batch} S{slots}" for batch, slots, *_ in decode.CACHES
    ]
    assert all("kv_lengths" in name for name in names[25:27])
    assert not any("kv_lengths" in name for name in names[:25])


def test_cudnn_takes_one_query_alone():
    calls = {example.name: decode.by_cudnn(describe(example)) for example in decode.examples()}
    assert len(calls) == 39
    taken = [name for name, function in calls.items() if function is not None]
    assert all("1 queries" in name for name in taken)
    assert len(taken) == len(decode.CACHES) + len(decode.SHORT_CACHES) + 1


def test_fa3_gets_the_lengths(monkeypatch):
    def fake(query, keys, values, *, cache_seqlens, causal, num_splits):
        assert num_splits == 0
        return flash_attention(query, keys, values, kv_lengths=cache_seqlens, causal=causal)

    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", SimpleNamespace(flash_attn_with_kvcache=fake))
    example = decode.example((2, 96, 4, 2), 4, 16, "float32", kv_lengths=9)
    arrays = draw(example).arrays
    np.testing.assert_allclose(decode.plain_fa3(**arrays), by_core(example)(**arrays), atol=1e-5)
    assert (arrays["kv_lengths"] == 9).all()


def test_the_best_peer_is_compared_in_geometric_mean():
    rows = {1: {"ejkernel": 1.0, "cuDNN": 2.0, "FA3": 4.0}, 2: {"ejkernel": 2.0, "FA3": 9.0}, 4: {"ejkernel": 5.0}}
    calls = [(decode.example(decode.CACHES[0], queries), seconds) for queries, seconds in rows.items()]
    (bar,) = decode.bars(measured(example, seconds) for example, seconds in calls)
    assert bar.measured == pytest.approx(3.0)


def test_time_follows_the_keys_that_are_there():
    full, tenth = (decode.example(decode.CACHES[0], 4, **options) for options in ({}, decode.VARIED[0]))
    lengths, *_ = decode.bars([measured(full, {"ejkernel": 2.0}), measured(tenth, {"ejkernel": 0.4})])
    assert (lengths.name, lengths.measured, lengths.is_held) == (
        "4 queries, filled to a tenth, of the time of a full cache",
        pytest.approx(0.2),
        False,
    )


def measured(example, seconds):
    figures = Figures({name: Times([one]) for name, one in seconds.items()})
    return suite.Measurement(example, "forward", None, figures, "")
