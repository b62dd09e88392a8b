"""The suites of attention at tiny sizes: they have right results, and find wrong ones. No time is judged."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace
from xml.etree import ElementTree

import attrs
import jax
import numpy as np
import pytest

from ejkernel_bench import (
    _attention,
    _roof,
    _timing,
    attention,
    demonstration,
    flash_attention,
    hopper,
    shapes,
    suite,
)
from ejkernel_bench._calls import PASSES, by_core, describe, draw, with_gradients
from ejkernel_bench._figures import Figures
from ejkernel_bench._report import cell_text
from ejkernel_bench._timing import Times
from ejkernel_core import registry
from ejkernel_ops.flash_attention.sizes import COMMON, SCALED, VARIED, WITHOUT_CUDNN, self_attention
from ejkernel_tuning import Timing

TINY = self_attention(1, 64, 2, 16)
TINY_BF16 = self_attention(1, 64, 2, 16, "bfloat16")
CAPPED = {"soft_cap": 0.7}
ALL_OPTIONS = {"kv_heads": 2, "window": 9, "soft_cap": 0.7, "bias": True, "sinks": True, "sequences": 3}
#: One example of each kind that the suites measure.
KINDS = [
    TINY,
    self_attention(2, 40, 2, 16, causal=False),
    self_attention(1, 64, 2, 16, window=9),
    self_attention(1, 40, 2, 16, causal=False, window=9),
    self_attention(2, 40, 4, 16, kv_heads=2),
    self_attention(1, 40, 2, 16, **CAPPED),
    self_attention(1, 40, 2, 16, bias=True),
    self_attention(1, 40, 2, 16, sinks=True),
    self_attention(1, 64, 2, 16, sequences=5),
    self_attention(1, 64, 2, 16, causal=False, sequences=5),
    self_attention(1, 64, 4, 16, **ALL_OPTIONS),
]
WRT = ("query", "key", "value")


def name_of(example):
    return example.name


@pytest.fixture
def wrong_kernels(monkeypatch):
    """The kernels under test are off by one percent. The reference and the XLA kernel on float32 arrays are right."""

    def scaled_by_core(example, backend=None, *registry):
        function = by_core(example, backend, *registry)
        is_right = backend == "reference" or (backend == "xla" and example.dtype == "float32")
        return function if is_right else lambda **arrays: 1.01 * function(**arrays)

    for module in (suite, demonstration, shapes):
        monkeypatch.setattr(module, "by_core", scaled_by_core)


def visible(example):
    """Whether a query sees a key, as a matrix."""
    arguments = describe(example)
    _, length, *_ = _attention.sizes(example)
    distance = np.arange(length)[:, None] - np.arange(length)
    mask = np.ones_like(distance, bool) if not arguments["causal"] else distance >= 0
    if "sliding_window" in arguments:
        mask &= np.abs(distance) <= arguments["sliding_window"][0]
    segments = np.searchsorted(arguments.get("cum_seqlens_q", [0, length]), np.arange(length), side="right")
    return mask & (segments[:, None] == segments)


def dense(example, query, key, value):
    """Attention in NumPy, in float64."""
    arguments = example.arguments(0)
    is_packed = query.ndim == 3
    query, key, value = (np.asarray(x, np.float64)[None if is_packed else ...] for x in (query, key, value))
    key, value = (x.repeat(query.shape[2] // x.shape[2], 2) for x in (key, value))
    scores = np.einsum("bqhd,bkhd->bhqk", query, key) * query.shape[-1] ** -0.5
    if cap := arguments.get("logits_soft_cap"):
        scores = cap * np.tanh(scores / cap)
    if "bias" in arguments:
        scores = scores + np.asarray(arguments["bias"], np.float64)
    weights = np.exp(np.where(visible(example), scores, -np.inf))
    total = weights.sum(-1, keepdims=True)
    if "softmax_aux" in arguments:
        total = total + np.exp(np.asarray(arguments["softmax_aux"], np.float64))[:, None, None]
    out = np.einsum("bhqk,bkhd->bqhd", weights / total, value)
    return out[0] if is_packed else out


# -- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("example", KINDS, ids=name_of)
def test_a_call_computes_attention_and_its_gradients(example):
    inputs = draw(example)
    others, arrays, cotangents = inputs.parts
    function = by_core(example)
    out = function(**inputs.arrays)
    np.testing.assert_allclose(out, dense(example, *arrays), rtol=1e-4, atol=1e-5)
    results = with_gradients(function, WRT)(others, arrays, cotangents)
    np.testing.assert_allclose(results[0], out, rtol=1e-5, atol=1e-6)
    for index, gradient in enumerate(results[1:]):
        step = 1e-3 * np.sign(gradient)
        shifted_arrays = [array + step if index == other_index else array for other_index, array in enumerate(arrays)]
        change = ((dense(example, *shifted_arrays) - dense(example, *arrays)) * cotangents[0]).sum()
        assert change == pytest.approx(float((gradient * step).sum()), rel=2e-2)


def test_inputs_are_the_same_every_time_and_named():
    first, second = draw(TINY), draw(TINY)
    jax.tree.map(np.testing.assert_array_equal, first.parts, second.parts)
    assert first.names("forward") == ("out",)
    assert first.names("forward+backward") == ("out", "d_query", "d_key", "d_value")
    # The cotangent of recorded comparisons.
    key = jax.random.split(jax.random.key(0), 4)[3]
    np.testing.assert_array_equal(first.cotangents[0], jax.random.normal(key, (1, 64, 2, 16)))


def test_a_description_has_boundaries_with_their_values_and_large_arrays_without():
    arguments = describe(KINDS[-1])
    assert isinstance(arguments["query"], jax.ShapeDtypeStruct)
    assert isinstance(arguments["bias"], jax.ShapeDtypeStruct)
    np.testing.assert_array_equal(arguments["cum_seqlens_q"][[0, -1]], [0, 64])
    assert arguments["sliding_window"] == (9, 0)


@pytest.mark.parametrize("example", KINDS, ids=name_of)
def test_pairs_are_counted(example):
    assert _attention.pairs(example) == visible(example).sum()


def test_the_work_of_a_full_call_is_two_products_and_seven():
    example = self_attention(3, 40, 4, 16, causal=False, kv_heads=2)
    assert _attention.flops(example, "forward") == 2 * 2 * 3 * 4 * 16 * 40 * 40
    assert _attention.flops(example, "forward+backward") == 7 * 2 * 3 * 4 * 16 * 40 * 40


def test_the_work_of_a_causal_call_is_half_of_a_full_one():
    causal, full, windowed = (
        _attention.flops(self_attention(1, 40, 2, 16, **options), "forward")
        for options in ({}, {"causal": False}, {"window": 9})
    )
    assert causal == full / 2
    assert windowed == 4 * 2 * 16 * (sum(range(1, 11)) + 30 * 10)


# -- run, attention, window -------------------------------------------------------------------------------------------


def test_run_checks_and_explains():
    report = demonstration.measure(TINY, None, rounds=2)
    assert report.faults == ()
    assert "flash_attention." in report.text
    accuracy, pace = report.tables
    assert [row[0] for row in accuracy.rows] == ["out", "d_query", "d_key", "d_value"]
    assert all(0 <= row[1] <= row[3] for row in accuracy.rows)
    assert [row[0] for row in pace.rows] == list(PASSES)
    for _, ours, theirs, ratio, _ in pace.rows:
        assert ratio == pytest.approx(theirs / ours)


def test_run_reports_wrong_results(wrong_kernels):
    report = demonstration.measure(TINY, None, rounds=1)
    assert {fault.partition(" ")[0] for fault in report.faults} == {"out", "d_query", "d_key", "d_value"}


@pytest.mark.parametrize("causal", [True, False])
def test_attention_agrees_with_its_peer(causal):
    report = attention.compare([self_attention(1, 64, 2, 16, causal=causal)], None, rounds=1)
    assert report.faults == ()
    assert len(report.bars) == len(report.tables[0].rows) == 2
    for bar, row in zip(report.bars, cells_of(report), strict=True):
        assert bar.measured == pytest.approx(row["jax.nn"] / row["ejkernel"])


def test_attention_reports_wrong_results(wrong_kernels):
    faults = attention.compare([TINY], None, rounds=1).faults
    assert any("forward+backward" in fault and "d_key" in fault for fault in faults)


def test_the_peer_is_attention():
    arrays = draw(TINY).arrays
    out = _attention.by_jax_nn(describe(TINY))(**arrays)
    np.testing.assert_allclose(out, dense(TINY, *arrays.values()), rtol=1e-4, atol=1e-5)


# -- flash_attention --------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_flash_attention_checks_and_measures_each_example(monkeypatch, dtype):
    examples = [
        self_attention(2, 40, 4, 16, dtype, kv_heads=2),
        self_attention(1, 64, 4, 16, dtype, **ALL_OPTIONS),
    ]
    report = flash_attention.compare(examples, "xla", rounds=1, others={})
    assert list(report.faults) == []
    (table,) = report.tables
    assert [row[0] for row in table.rows] == [
        f"{example.name}, {pass_name}" for example in examples for pass_name in PASSES
    ]
    for row, example in zip(cells_of(report)[::2], examples, strict=True):
        # Milliseconds, and 1e12 in a second.
        assert row["TFLOP/s"] == pytest.approx(_attention.flops(example, "forward") / row["ejkernel"] / 1e9)


def test_flash_attention_reports_wrong_results(monkeypatch, wrong_kernels):
    faults = flash_attention.compare([TINY], "reference", rounds=1, others={}).faults
    assert list(faults) == []  # the fixture does not change the reference
    faults = flash_attention.compare([TINY], None, rounds=1, others={}).faults
    assert {fault.split(": ")[1].split()[0] for fault in faults} == {"out", "d_query", "d_key", "d_value"}


def cells_of(report):
    """The rows of the table, by column."""
    (table,) = report.tables
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def peer(factor=1.0, takes=lambda arguments: True, fault=None):
    """An attention, times a factor; or one that fails."""

    def attention_of(arguments):
        if not takes(arguments):
            return None
        options = {name: value for name, value in arguments.items() if not hasattr(value, "shape")}

        def attention(**arrays):
            if fault:
                raise fault
            return factor * registry.call("flash_attention", **arrays, **options, backend="reference")

        return attention

    return attention_of


@pytest.mark.long
def test_a_peer_is_checked_timed_and_left_out_where_it_refuses(monkeypatch):
    others = {
        "cuDNN": peer(takes=lambda arguments: "logits_soft_cap" not in arguments),
        "wrong": peer(factor=1.05),
        "broken": peer(fault=RuntimeError("no such card")),
    }
    report = flash_attention.compare([TINY, KINDS[5]], "xla", rounds=1, others=others)
    plain, _, capped, _ = cells_of(report)
    assert plain["cuDNN / ejkernel"] == pytest.approx(plain["cuDNN"] / plain["ejkernel"])
    assert (capped["cuDNN"], capped["cuDNN / ejkernel"]) == ("-", "-")
    # Peers that are wrong or fail are reported, and not timed.
    assert {row[name] for row in cells_of(report) for name in ("wrong", "broken")} == {"-"}
    assert {fault.partition(",")[0] for fault in report.faults} == {"wrong", "broken"}
    assert all("RuntimeError: no such card" in fault for fault in report.faults if fault.startswith("broken"))


def test_a_call_that_fails_is_reported(monkeypatch):
    report = flash_attention.compare([TINY_BF16], "no such kernel", rounds=1, others={})
    assert list(report.tables[0].rows) == []
    assert len(report.faults) == 2
    assert all("no such kernel" in fault for fault in report.faults)


def test_the_examples_show_every_feature():
    assert list(flash_attention.TRITON_RATES) == [example.name for example in COMMON]
    assert {flash_attention.LONG, flash_attention.WINDOWED} <= {example.name for example in (*COMMON, *VARIED)}
    assert {_attention.sizes(example)[-1] for example in VARIED} == {64, 96, 128, 192, 256}
    for word, count in (("sequences", 2), ("window 1023", 1), ("soft cap", 1), ("bias", 1), ("sinks", 1)):
        assert sum(word in example.name for example in VARIED) == count


def test_peers_refuse_what_they_cannot_do():
    takes_cudnn = [_attention.by_cudnn(describe(kind)) is not None for kind in KINDS]
    assert takes_cudnn == [True, True, True, False, True, False, True, *[False] * 4]
    # Head dims of 64 and 128 alone, and no groups.
    assert [kind for kind in KINDS if _attention.by_pallas(describe(kind)) is not None] == []
    assert _attention.by_pallas(describe(self_attention(1, 64, 2, 64))) is not None
    assert _attention.by_pallas(describe(self_attention(1, 64, 2, 64, kv_heads=1))) is None
    # Our own kernel stands in for cuDNN.
    assert [_attention.by_our_xla(describe(kind)) is None for kind in KINDS] == takes_cudnn
    assert [_attention.by_torch(describe(kind)) is not None for kind in KINDS] == [
        kind.name in {KINDS[index].name for index in (0, 1, 4)} for kind in KINDS
    ]


# -- hopper -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_hopper_measures_against_cudnn_and_against_our_own_plain_rate(monkeypatch):
    plain, refused = TINY_BF16, self_attention(1, 64, 2, 16, "bfloat16", sinks=True)
    monkeypatch.setattr(hopper, "COMMON", [plain])
    monkeypatch.setattr(hopper, "PLAIN", {refused.name: plain.name})
    cudnn = peer(takes=lambda arguments: "softmax_aux" not in arguments)
    report = hopper.compare([plain, refused], "xla", 2, {"cuDNN": cudnn})
    assert list(report.faults) == []
    rows = cells_of(report)
    assert [row[""] for row in rows] == [f"{example.name}, {name}" for example in (plain, refused) for name in PASSES]
    for row, pass_name in zip(rows, PASSES * 2, strict=True):
        size = 64 * 2 * ((4 if pass_name == "forward" else 12) * 16 * 2 + (4 if pass_name == "forward" else 8))
        work = _attention.flops(plain, pass_name)
        assert row["TFLOP/s"] == pytest.approx(work / row["ejkernel"] / 1e9)
        kernels = "flash_attention.xla" + (" and flash_attention_bwd.xla" if pass_name != "forward" else "")
        assert not {"xla", "triton", "over the best"} & {*row}  # there is no choice
        assert (row["roof"], row["by"], row["kernels"]) == (pytest.approx(work / size * 4.8), "memory", kernels)
    forward, both, *others = rows
    assert all(row["cuDNN / ejkernel"] == pytest.approx(row["cuDNN"] / row["ejkernel"]) for row in (forward, both))
    assert [(row["cuDNN"], row["cuDNN / ejkernel"]) for row in others] == [("-", "-")] * 2
    bars = {bar.name: bar for bar in report.bars}
    over_cudnn = pytest.approx(forward["cuDNN / ejkernel"])
    assert bars[f"{plain.name}, forward: over cuDNN"].measured == over_cudnn
    assert bars["the 1 common sizes, forward: over cuDNN, geometric mean"].measured == over_cudnn
    of_plain = bars[f"{refused.name}, forward: of the plain rate"]
    assert of_plain.measured == pytest.approx(others[0]["TFLOP/s"] / forward["TFLOP/s"])
    assert len(bars) == 6
    # A call without a time of cuDNN is not judged as one that cuDNN refuses.
    measured = {
        (example.name, "forward"): suite.Measurement(
            example, "forward", None, Figures({"ejkernel": Times([seconds])}), ""
        )
        for example, seconds in ((plain, 1.0), (refused, 2.0))
    }
    bars = {bar.name: bar.measured for bar in hopper.bars(measured)}
    assert bars == {f"{refused.name}, forward: of the plain rate": 0.5}


def test_hopper_compares_the_choice_with_the_best_of_each_pass(monkeypatch):
    monkeypatch.setattr(hopper, "PLAIN", {})
    monkeypatch.setattr(hopper, "KERNELS", ("triton", "reference"))
    report = hopper.compare([TINY], None, 2, {"cuDNN": peer()})
    assert list(report.faults) == []
    rows = cells_of(report)
    # cuDNN stands for the XLA kernel, and no GPU is here.
    assert [(row["xla"], row["triton"]) for row in rows] == [("-", "-")] * 2
    forward, both = ([row[name] for name in ("cuDNN", "reference")] for row in rows)
    best = min(forward)
    assert rows[0]["over the best"] == pytest.approx(rows[0]["ejkernel"] / best)
    best += min(b - a for a, b in zip(forward, both, strict=True))
    assert rows[1]["over the best"] == pytest.approx(rows[1]["ejkernel"] / best)
    bars = {bar.name: (bar.measured, bar.at_least) for bar in report.bars if "best" in bar.name}
    assert bars == {
        f"{TINY.name}, {pass_name}: chosen / best": (row["over the best"], False)
        for row, pass_name in zip(rows, PASSES, strict=True)
    }


def test_hopper_reports_wrong_results(wrong_kernels):
    report = hopper.compare([TINY], None, 1, {"cuDNN": peer(factor=1.01)})
    assert report.tables[0].rows == ()
    assert {fault.partition(",")[0] for fault in report.faults} == {"ejkernel", "cuDNN"}


def test_hopper_measures_calls_with_and_without_cudnn():
    examples = [*COMMON, *SCALED, *WITHOUT_CUDNN]
    names = [example.name for example in examples]
    assert len(names) == len({*names})
    assert {*hopper.PLAIN} == {example.name for example in WITHOUT_CUDNN}
    assert {*hopper.PLAIN.values()} <= {example.name for example in COMMON}
    without = {example.name for example in examples if _attention.by_cudnn(describe(example)) is None}
    assert without == {*hopper.PLAIN}
    sizes = [_attention.sizes(example) for example in (*COMMON, *SCALED)]
    assert {head_dim for *_, head_dim in sizes} == {64, 128, 256}
    assert {length for batch, length, *_ in sizes if batch == 1} >= {512, 1024, 4096, 16384, 131072}
    assert any(heads // kv_heads == 8 for _, _, heads, kv_heads, _ in sizes)


def test_two_clocks_are_not_compared(monkeypatch):
    sources = iter(["device", "clock"])
    monkeypatch.setattr(_timing, "benchmark", lambda run, **counts: Timing([1.0], next(sources)))
    with pytest.raises(_timing.MixedClocks, match="some were timed by the device and some by the host"):
        _timing.on_the_device({"one": None, "other": None}, rounds=1)


def test_the_roof_is_the_greatest_of_the_limits():
    card = _roof.Card(flops=4e12, bytes=1e12, exponentials=1e12)
    example = self_attention(2, 8, 4, 16, "bfloat16", causal=False, kv_heads=2)
    least = _roof.least_seconds(example, "forward", card)
    tokens, pairs = 2 * 8, 2 * 4 * 8 * 8
    assert least["products"] == pytest.approx(pairs * 16 * 4 / 4e12)
    assert least["memory"] == pytest.approx(tokens * (2 * 16 * (4 + 2 + 2 + 4) + 4 * 4) / 1e12)
    assert least["exponentials"] == pytest.approx(pairs / 1e12)
    both = _roof.least_seconds(example, "forward+backward", card)
    assert both["products"] == pytest.approx(3.5 * least["products"])
    assert both["exponentials"] == 2 * least["exponentials"]
    # Forward q, k, v, out; backward these, d_out, and three gradients.
    assert both["memory"] == pytest.approx(tokens * (2 * 16 * (6 * 4 + 6 * 2) + 2 * 4 * 4) / 1e12)


@pytest.mark.parametrize("is_recorded", [False, True])
def test_the_results_of_hopper_are_drawn(monkeypatch, tmp_path, ejkernel, is_recorded):
    monkeypatch.setattr(hopper, "run", lambda: hopper.compare([TINY], "xla", 1, {"cuDNN": peer()}))
    file, picture = tmp_path / "report.json", tmp_path / "hopper.svg"
    code, _, error = ejkernel(
        "bench", "hopper", "--json", str(file), *([] if is_recorded else ["--picture", str(picture)])
    )
    assert (code, error) == (0, "")
    if is_recorded:
        assert ejkernel("bench", "--from", str(file), "--picture", str(picture))[0] == 0
    (report,) = json.loads(file.read_text())
    texts = [element.text for element in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count(TINY.name) == len(PASSES)
    (table,) = report["tables"]
    for row in (dict(zip(table["columns"], row, strict=True)) for row in table["rows"]):
        ours, rate, cudnn = row["ejkernel"], row["TFLOP/s"], row["cuDNN"]
        assert f" ejkernel {cell_text(1000 * rate)}" in texts
        assert f" cuDNN {cell_text(1000 * rate * ours / cudnn)}" in texts


# -- shapes -----------------------------------------------------------------------------------------------------------


def family(lengths, batch=1, heads=2, dtype="bfloat16", **fields):
    return shapes.Family({"batch": batch, "heads": heads, "head_dim": 16, "dtype": dtype, **fields}, lengths)


GROUPED = family((39, 40, 47), 2, 4, kv_heads=2, window=9, bias=True)
FULL = family((40, 41), causal=False, window=9, soft_cap=0.7)
PACKED = family((33, 40), dtype="float16", sinks=True, sequences=3)


def names_of(one_family):
    return [example.name for example in one_family.examples()]


@pytest.mark.long
@pytest.mark.parametrize(
    "one_family",
    [GROUPED, pytest.param(FULL, marks=pytest.mark.long), pytest.param(PACKED, marks=pytest.mark.long)],
    ids=["grouped", "full", "packed"],
)
def test_shapes_are_checked_and_measured(monkeypatch, one_family):
    monkeypatch.setattr(shapes, "SECONDS", 1e-4)
    result = shapes.measure(one_family, "xla", rounds=1)
    assert list(result.faults) == []
    assert list(result.seconds) == [(name, pass_name) for name in names_of(one_family) for pass_name in PASSES]


@pytest.mark.long
def test_a_wrong_shape_is_reported(monkeypatch, wrong_kernels):
    monkeypatch.setattr(shapes, "SECONDS", 1e-4)
    monkeypatch.setattr(shapes, "tolerance_of", lambda example: 6e-3)
    monkeypatch.setattr(shapes, "_has_same_bits", lambda first, second: False)
    result = shapes.measure(GROUPED, "xla", rounds=1)
    names = {fault.split(": ")[1].split()[0] for fault in result.faults}
    assert names == {"out", "d_query", "d_key", "d_value", "other"}


def test_a_shape_that_fails_is_reported_and_the_others_are_measured(monkeypatch):
    def raise_error(example, backend=None):
        return by_core(example, "no such kernel" if _attention.sizes(example)[1] == 40 else backend)

    monkeypatch.setattr(shapes, "SECONDS", 1e-4)
    monkeypatch.setattr(shapes, "by_core", raise_error)
    result = shapes.measure(GROUPED, "xla", rounds=1)
    (fault,) = result.faults
    short, middle, long = names_of(GROUPED)
    assert fault.startswith(middle)
    assert "no such kernel" in fault
    assert {name for name, _ in result.seconds} == {short, long}


def test_a_refusal_is_no_fault():
    result = shapes.measure(GROUPED, "pallas_tpu", rounds=1)  # no TPU is here
    assert (result.seconds, result.faults, result.refusals) == ({}, (), (*names_of(GROUPED),))
    key = (TINY.name, "forward")
    report = shapes.report([result, shapes.FamilyResult({key: 1.0}, {key: 1.0}, [])])
    assert "; 3 calls refused;" in report.tables[0].title


def test_every_run_is_compared(monkeypatch):
    expected = (np.ones((1, 4)),)
    runs = {"forward": iter([expected, expected, (np.full((1, 4), 1.1),), expected]).__next__}
    monkeypatch.setattr(shapes, "_has_same_bits", lambda first, second: bool((first[0] == second[0]).all()))
    label = f"{TINY_BF16.name}, forward"
    faults = shapes._faults(TINY_BF16, runs, expected, ["forward"])
    assert faults == [f"{label}: out is off by 1.0e-01", f"{label}: other bits in another run"]


@pytest.mark.long
def test_a_slow_shape_is_timed_again(monkeypatch):
    calls = []

    def in_bursts(runs, rounds, seconds):
        calls.append(None)
        slow = 9.0 if len(calls) == 2 else 1.0  # the second shape, the first time
        return {name: Times([slow]) for name in runs}

    monkeypatch.setattr(shapes, "in_bursts", in_bursts)
    result = shapes.measure(GROUPED, "xla", rounds=1)
    assert set(result.seconds.values()) == {1.0}
    assert len(calls) == 4


def test_a_slow_shape_is_shown():
    examples = GROUPED.examples()
    short, middle, long = names_of(GROUPED)
    seconds = {(short, "forward"): 0.9, (middle, "forward"): 3.0, (long, "forward"): 1.2}
    seconds |= {(short, "forward+backward"): 1.0, (middle, "forward+backward"): 2.0, (long, "forward+backward"): 4.0}
    flops = {
        (example.name, pass_name): _attention.flops(example, pass_name) for example in examples for pass_name in PASSES
    }
    report = shapes.report([shapes.FamilyResult(seconds, flops, []), shapes.FamilyResult({}, {}, ["one fault"])])
    assert report.tables[0].rows[0] == (f"{middle}, forward", pytest.approx(0.4), 3000.0, 1200.0)
    assert [row[1] for row in report.tables[0].rows[1:]] == [1.0] * 5
    (bar,) = report.bars
    assert (bar.measured, bar.is_held, report.faults) == (pytest.approx(0.4), False, ("one fault",))


def test_random_shapes_are_of_every_kind():
    families = shapes.random_families(300, np.random.default_rng(1))
    fields = [family.fields for family in families]
    assert all(f["heads"] % (f["kv_heads"] or f["heads"]) == 0 and f["head_dim"] % 8 == 0 for f in fields)
    assert all(min(family.lengths) > max(0, family.fields["sequences"] or 0) for family in families)
    assert {f["head_dim"] for f in fields} > {16, 64, 128, 256}
    for name in ("causal", "window", "kv_heads", "soft_cap", "bias", "sinks", "sequences"):
        assert {bool(f[name]) for f in fields} == {True, False}, name
    assert shapes.COUNT // len(shapes.OFFSETS) * len(shapes.OFFSETS) == 1000


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "cfg"),
    [
        ("flash_attention_bwd.gluon_sm90", SimpleNamespace()),
        ("flash_attention_bwd.triton", SimpleNamespace(atomics=True)),
    ],
)
def test_bits_are_compared_where_they_are_promised(monkeypatch, name, cfg):
    without_atomics = "flash_attention_bwd.triton", SimpleNamespace(atomics=False)

    def plans(example, backend):
        kernel, own_cfg = (name, cfg) if describe(example)["causal"] else without_atomics
        return [SimpleNamespace(kernel=SimpleNamespace(name=kernel), cfg=own_cfg)]

    monkeypatch.setattr(shapes, "plans", plans)
    monkeypatch.setattr(shapes, "_has_same_bits", lambda first, second: False)
    monkeypatch.setattr(shapes, "SECONDS", 1e-4)
    with_atomics, without = (
        shapes.measure(attrs.evolve(family, lengths=(40,)), "xla", rounds=1).faults for family in (GROUPED, FULL)
    )
    assert [fault.partition(": ")[0].split(", ")[-1] for fault in with_atomics] == ["forward"]
    assert len(without) == len(PASSES)


@pytest.mark.parametrize(
    "suite",
    [partial(flash_attention.run, with_peers=True), shapes.run, hopper.run],
    ids=["flash_attention", "shapes", "hopper"],
)
def test_suites_for_gpus_measure_nothing_elsewhere(suite):
    if jax.default_backend() == "gpu":
        pytest.skip("there is one")
    report = suite()
    assert report.text.endswith("there is no GPU here, and nothing was measured")
    assert (report.tables, report.bars, report.faults) == ((), (), ())
