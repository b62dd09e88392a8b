"""The suite ``paged``: its calls, their arrays and work, its bars, and what it reports of peers."""

from __future__ import annotations

import click
import jax
import numpy as np
import pytest

import ejkernel_core
from ejkernel_bench import paged, suite
from ejkernel_bench._calls import describe
from ejkernel_bench._figures import Figures
from ejkernel_bench._paged_calls import EIGHT_BITS, OP, PagedCall, Sequences, uniform, work
from ejkernel_bench._paged_peers import CONTIGUOUS, FA3, GATHER, by_gather
from ejkernel_bench._timing import Times
from ejkernel_ops.pages import pages_of

CALLS = {call.name: call for calls in paged.PARTS.values() for call in calls}


def test_small_calls_are_right_and_measured_beside_what_is_here():
    report = paged.run(rounds=1, small=True)
    assert report.faults == ()
    table = report.tables[0]
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [row[""] for row in rows] == [f"{call.name}, forward" for call in paged.SMALL]
    assert [name for name in (GATHER, CONTIGUOUS) for row in rows if isinstance(row[name], float)] == [
        GATHER,
        CONTIGUOUS,
    ]
    assert not {*ejkernel_core.registry.backends(OP)} & {*table.columns}
    assert f"{FA3} is not measured: there is no NVIDIA GPU" in report.text


def test_a_wrong_peer_is_reported_and_not_timed(monkeypatch):
    def wrong(call):
        function = by_gather(call)
        return function and (lambda **arrays: 1.01 * function(**arrays))

    monkeypatch.setattr(paged, "peers", lambda: {GATHER: wrong, "FA3": "no library"})
    report = paged.run(rounds=1, small=True, kernels="reference")
    assert [fault.partition(": out is off by")[0] for fault in report.faults] == [
        f"gather, forward, {paged.SMALL[0].name}"
    ]
    row = dict(zip(report.tables[0].columns, report.tables[0].rows[0], strict=True))
    assert row[GATHER] == "-"
    assert isinstance(row["reference"], float)
    assert report.text == f"{OP}: FA3 is not measured: no library"


# -- the calls ---------------------------------------------------------------------------------------------------------


def test_names_say_what_a_call_is():
    assert paged.PLAIN.name == "64x8192-h32/8-d128-p64"
    assert paged.MIXED.name == "64x8192+1x8192-q2048-h32/8-d128-p64"
    assert uniform(48, 70, 4, fewest=9, narrow="fp8").name == "48x9..70-q4-h32/8-d128-p64-fp8"
    call = PagedCall((Sequences(2, 5),), 64, 8, 64, 1, is_interleaved=True, window=128, has_sinks=True, dtype="float16")
    assert call.name == "2x5-h64/8-d64-p1-float16-interleaved-w128-sinks"
    assert not any(" " in name or "," in name for name in CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_arrays_are_what_the_name_says(name):
    call, given = CALLS[name], describe(CALLS[name].example())
    groups = [group for group in call.sequences for _ in range(group.count)]
    queries, keys = np.diff(given["query_start_loc"]), given["kv_lens"]
    assert given["query_start_loc"][0] == 0
    assert given["query"].shape == (queries.sum(), call.heads, call.dim)
    assert given["max_query_len"] == queries.max()
    assert [*queries] == [group.queries for group in groups]
    for length, group in zip(keys, groups, strict=True):
        assert (group.keys if group.fewest is None else group.fewest) <= length <= group.keys
    assert keys.sum() <= call.cached_tokens <= 2_100_000
    counts, tables = -(-keys // call.page_size), given["block_tables"]
    used = np.concatenate([row[:count] for row, count in zip(tables, counts, strict=True)])
    assert [*np.sort(used)] == [*range(len(used))]  # each page once
    assert len(used) == 1 or not (used == np.arange(len(used))).all()
    for pages in pages_of(given):
        heads = call.kv_heads * (2 if call.is_interleaved else 1)
        assert pages.shape == (len(used), call.page_size, heads, call.dim)
        assert str(pages.dtype) == EIGHT_BITS.get(call.narrow, "bfloat16")
    assert given.get("sliding_window") == ((call.window - 1, 0) if call.window else None)
    assert ("softmax_aux" in given) == call.has_sinks
    assert ("k_scale" in given) == (call.narrow is not None)


def test_parts_have_the_calls_of_their_models():
    models = {"llama-8b": (32, 8, 128), "llama-70b": (64, 8, 128), "qwen3-30b": (32, 4, 128), "gpt-oss": (64, 8, 64)}
    for name, sizes in models.items():
        assert {(call.heads, call.kv_heads, call.dim) for call in paged.PARTS[name]} == {sizes}
        counts = {group.count for call in paged.PARTS[name] for group in call.sequences}
        lengths = {group.keys for call in paged.PARTS[name] for group in call.sequences}
        assert (min(counts), max(counts), min(lengths), max(lengths)) == (1, 512, 1024, 131072)
    windows = [call.window for call in paged.PARTS["gpt-oss"] if call.has_sinks]
    assert windows.count(128) == windows.count(None) == len(windows) / 2


@pytest.mark.parametrize(
    "fields",
    [{}, {"narrow": "fp8"}, {"narrow": "int8"}, {"is_interleaved": True}, {"window": 7, "has_sinks": True}],
    ids=str,
)
def test_small_ones_of_each_kind_are_valid_and_right(fields):
    call = PagedCall((Sequences(2, 30, fewest=5), Sequences(1, 21, 4)), 4, 2, 16, 4, dtype="float32", **fields)
    first, second = call.arguments(0), call.arguments(1)
    expected = ejkernel_core.call(OP, **first, backend="reference", validate=True)
    result = ejkernel_core.call(OP, **first, backend="xla")
    np.testing.assert_allclose(result, expected, atol=2e-5)
    for name in ("query", "block_tables", *(name for name in first if name.endswith("pages"))):
        assert (np.asarray(first[name]) != np.asarray(second[name])).any()
    if not call.is_interleaved:
        assert (np.asarray(first["key_pages"]) != np.asarray(first["value_pages"])).any()


def test_queries_beside_pages_in_float8_are_numbers_that_float8_has():
    query = uniform(2, 9, dim=16, narrow="fp8").arguments(0)["query"]
    assert (query == query.astype("float8_e4m3fn").astype(query.dtype)).all()
    assert len(np.unique(np.asarray(query, np.float32))) > 50


def test_work_is_that_of_the_keys_that_are_seen():
    call = PagedCall((Sequences(2, 30), Sequences(1, 21, 4)), 4, 2, 16, 4, dtype="float32")
    cost = work(call.example(), "forward")
    assert cost.flops == 4 * 4 * 16 * (30 + 30 + 18 + 19 + 20 + 21)
    assert cost.bytes == 4 * 2 * 2 * 16 * (30 + 30 + 21) + 2 * 4 * 6 * 4 * 16
    windowed = PagedCall((Sequences(1, 21, 4), Sequences(1, 3)), 4, 2, 16, 4, window=5, narrow="int8")
    cost = work(windowed.example(), "forward")
    assert cost.flops == 4 * 4 * 16 * (4 * 5 + 3)
    assert cost.bytes == 2 * 2 * 16 * (8 + 3) + 2 * 2 * 5 * 4 * 16
    together = PagedCall(call.sequences, 4, 2, 16, 4, dtype="float32", is_interleaved=True)
    assert work(together.example(), "forward").bytes == work(call.example(), "forward").bytes


# -- what is measured --------------------------------------------------------------------------------------------------


def test_calls_are_named_alone_and_by_part():
    every = paged.named_calls(None)
    assert [*every][: len(paged.TABLE)] == [call.name for call in paged.TABLE]
    assert {*every} == {call.name for part in paged.DEFAULT for call in paged.PARTS[part]}
    name = "256x2048-h64/8-d128-p64"
    assert [*paged.named_calls(f"{name},mixed,{name}")] == [name, *(call.name for call in paged.PARTS["mixed"])]
    for word, hint in (("tabel", "did you mean table"), ("64x8192", "did you mean 64x8192-h32/8-d128-p64"), ("", "")):
        with pytest.raises(click.UsageError, match=f"no part or call of paged is named {word}; {hint}"):
            paged.named_calls(word)


def test_the_command_measures_calls_by_name(ejkernel, monkeypatch):
    asked = []

    def run(operation, peers, minima, **options):
        asked.append([example.name for example in options["examples"]])
        return suite.Report(operation, ())

    monkeypatch.setattr(suite, "run", run)
    assert ejkernel("bench", "paged", "--part", "1x1024-h32/8-d128-p64,prompts")[0] == 0
    assert asked == [[paged.SHORTEST.name, *(call.name for call in paged.PROMPTS)]]
    code, _, error = ejkernel("bench", "paged", "--kernels", "cuda")
    assert (code, "has no cuda" in error) == (2, True)


def test_bars_compare_calls_of_the_same_report():
    times = dict.fromkeys(paged.TABLE, (0.5, 0.6))
    times |= {paged.OF_16: (0.51, 0.5), paged.MIXED: (0.6,), paged.CHUNK: (0.25,)}
    times |= {paged.SHORTEST: (0.004, 0.001), paged.FP8[0]: (0.4, 0.2)}
    figures = {
        call: Figures({name: Times([1e-3 * one]) for name, one in zip((suite.OURS, FA3), row, strict=False)})
        for call, row in times.items()
    }
    measured = [suite.Measurement(call.example(), "forward", None, one, "") for call, one in figures.items()]
    bars = {bar.name: bar for bar in paged.bars(measured)}
    assert bars[paged.SHORTEST.name].measured == pytest.approx(4.0)
    plain = paged.PLAIN.name
    ratios = {name: bar.measured for name, bar in bars.items() if "of the time of" in name}
    assert ratios == {
        f"{paged.OF_16.name}: of the time of {plain}": pytest.approx(1.02),
        f"{paged.MIXED.name}: of the time of {plain} and {paged.CHUNK.name}": pytest.approx(0.8),
        f"{paged.FP8[0].name}: of the time of {plain}": pytest.approx(0.8),
    }
    mean = bars[f"over {FA3}, geometric mean of 8 of 15"]
    assert mean.measured == pytest.approx((1.2**7 * 0.25) ** (1 / 8))
    assert not mean.is_held


def test_limits_are_of_the_calls_they_are_about():
    applied = {
        (minimum.over, minimum.ratio): [name for name in CALLS if minimum.applies(CALLS[name].example())]
        for minimum in paged.MINIMA
    }
    assert len(applied[FA3, 0.95]) == 15
    assert applied[FA3, 1.0] == applied[CONTIGUOUS, 0.95] == [call.name for call in paged.PROMPTS]
    assert all(name.endswith("-fp8") for name in applied[FA3, 1.2])
    assert len(applied[GATHER, 2.5]) == len(CALLS)


def test_without_a_gpu_only_small_calls_are_measured():
    assert jax.default_backend() == "cpu"
    assert paged.run().text == f"{OP}: there is no accelerator here; --small measures on the CPU"
