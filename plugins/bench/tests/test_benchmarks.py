"""Each benchmark at a tiny size: its results are right, it finds wrong ones, and it can be shown. No time is judged."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace
from xml.etree import ElementTree

import attrs
import jax
import numpy as np
import pytest

from ejkernel_bench import __main__ as command
from ejkernel_bench import (
    _peers,
    _problem,
    _roof,
    _timing,
    attention,
    choice,
    flash_attention,
    hopper,
    memory,
    overhead,
    packed,
    plot,
    run,
    shapes,
    tuning,
    window,
)
from ejkernel_bench._peers import Peer
from ejkernel_bench._problem import Problem, through_core, with_gradients
from ejkernel_bench._timing import Times
from ejkernel_core import policy_override, registry
from ejkernel_tuning import Timing

TINY = Problem(1, 64, 2, 16)
#: One of each kind that `flash_attention` measures.
KINDS = [
    TINY,
    Problem(2, 40, 2, 16, causal=False),
    Problem(1, 64, 2, 16, window=9),
    Problem(1, 40, 2, 16, causal=False, window=9),
    Problem(2, 40, 4, 16, kv_heads=2),
    Problem(1, 40, 2, 16, soft_cap=0.7),
    Problem(1, 40, 2, 16, bias=True),
    Problem(1, 40, 2, 16, sinks=True),
    Problem(1, 64, 2, 16, sequences=5),
    Problem(1, 64, 2, 16, causal=False, sequences=5),
    Problem(1, 64, 4, 16, kv_heads=2, window=9, soft_cap=0.7, bias=True, sinks=True, sequences=3),
]


@pytest.fixture
def wrong(monkeypatch):
    """The kernels under test are one part in a hundred off; the reference is not."""

    def off(problem, backend=None):
        right = through_core(problem, backend)
        exact = backend == "reference" or (backend == "xla" and problem.dtype == "float32")
        return right if exact else lambda *arrays, **extras: 1.01 * right(*arrays, **extras)

    for module in (attention, flash_attention, hopper, overhead, run, shapes, window):
        monkeypatch.setattr(module, "through_core", off)


def seen_by(problem):
    """Which keys each query sees."""
    distance = np.arange(problem.length)[:, None] - np.arange(problem.length)
    seen = np.ones_like(distance, bool) if not problem.causal else distance >= 0
    if problem.window is not None:
        seen &= np.abs(distance) <= problem.window
    sequence = np.searchsorted(problem.bounds, np.arange(problem.length), side="right")
    return seen & (sequence[:, None] == sequence)


def dense(problem, query, key, value):
    """Attention in NumPy, in float64."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    extras = {name: np.asarray(x, np.float64) for name, x in problem.extras().items()}
    key, value = (x.repeat(problem.heads // x.shape[2], 2) for x in (key, value))
    scores = np.einsum("bqhd,bkhd->bhqk", query, key) * problem.head_dim**-0.5
    if problem.soft_cap is not None:
        scores = problem.soft_cap * np.tanh(scores / problem.soft_cap)
    if problem.bias:
        scores = scores + extras["bias"]
    weights = np.exp(np.where(seen_by(problem), scores, -np.inf))
    total = weights.sum(-1, keepdims=True)
    if problem.sinks:
        total = total + np.exp(extras["softmax_aux"])[:, None, None]
    return np.einsum("bhqk,bkhd->bqhd", weights / total, value)


# -- the problems -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", KINDS, ids=str)
def test_a_problem_is_what_it_says(problem):
    query, key, value, d_out = problem.arrays()
    attention = partial(through_core(problem), **problem.extras())
    out = attention(query, key, value)
    np.testing.assert_allclose(out, dense(problem, query, key, value), rtol=1e-4, atol=1e-5)
    both = with_gradients(attention)(query, key, value, d_out)
    np.testing.assert_allclose(both[0], out, rtol=1e-5, atol=1e-6)
    for place, gradient in enumerate(both[1:]):
        step = 1e-3 * np.sign(gradient)
        moved = [array + step if place == other else array for other, array in enumerate((query, key, value))]
        change = ((dense(problem, *moved) - dense(problem, query, key, value)) * d_out).sum()
        assert change == pytest.approx(float((gradient * step).sum()), rel=2e-2)


@pytest.mark.parametrize("problem", KINDS, ids=str)
def test_pairs_are_counted(problem):
    assert problem.pairs() == seen_by(problem).sum()


def test_the_work_of_a_full_call_is_two_products_and_seven():
    problem = Problem(3, 40, 4, 16, causal=False, kv_heads=2)
    assert problem.flops("forward") == 2 * 2 * 3 * 4 * 16 * 40 * 40
    assert problem.flops("forward+backward") == 7 * 2 * 3 * 4 * 16 * 40 * 40


def test_the_work_of_a_causal_call_is_half_of_a_full_one():
    causal, full = Problem(1, 40, 2, 16), Problem(1, 40, 2, 16, causal=False)
    assert causal.flops("forward") == full.flops("forward") / 2
    windowed = Problem(1, 40, 2, 16, window=9)
    assert windowed.flops("forward") == 4 * 2 * 16 * (sum(range(1, 11)) + 30 * 10)


def test_sequences_are_as_many_as_were_asked_for_and_fill_the_length():
    bounds = Problem(1, 64, 2, 16, sequences=64).bounds
    np.testing.assert_array_equal(bounds, np.arange(65))
    bounds = Problem(1, 64, 2, 16, sequences=5).bounds
    assert (bounds[0], bounds[-1], len(bounds), bounds.dtype) == (0, 64, 6, np.int32)
    assert (np.diff(bounds) > 0).all()
    np.testing.assert_array_equal(TINY.bounds, [0, 64])


def test_a_problem_is_named_by_all_it_has():
    assert str(KINDS[-1]) == "B1 S64 H4/2 D16 float32 causal, window 9, soft cap 0.7, bias, sinks, 3 sequences"


def test_the_numbers_are_the_same_in_every_dtype():
    rounded, exact = (Problem(1, 8, 2, 16, dtype, bias=True).extras()["bias"] for dtype in ("bfloat16", "float32"))
    np.testing.assert_array_equal(np.asarray(rounded, np.float32), exact)


@pytest.mark.parametrize("problem", [TINY, KINDS[4], KINDS[-1]], ids=str)
def test_what_is_chosen_is_named(problem):
    assert _problem.chosen(problem, "reference") == "flash_attention.reference and flash_attention_bwd.reference"


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
    assert len(registry.memory) == 0


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


# -- flash_attention: everybody who can do the case ---------------------------------------------------------------


def test_flash_attention_is_measured_on_a_gpu_alone():
    if jax.default_backend() == "gpu":
        pytest.skip("there is one")
    report = flash_attention.run(against=True)
    assert report.text.endswith("there is no GPU here, and nothing was measured")
    assert (report.tables, report.bars, report.faults) == ((), (), ())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_flash_attention_checks_and_measures_each_case(monkeypatch, dtype):
    monkeypatch.setattr(flash_attention, "SECONDS", 1e-4)
    problems = [attrs.evolve(kind, dtype=dtype) for kind in (KINDS[4], KINDS[-1])]
    report = flash_attention.compare(problems, "xla", rounds=1, others=())
    assert list(report.faults) == []
    (table,) = report.tables
    assert [row[0] for row in table.rows] == [f"{p}, {which}" for p in problems for which in flash_attention.PASSES]
    for row, problem in zip(table.rows[::2], problems, strict=True):
        assert row[3] == pytest.approx(problem.flops("forward") / row[1] / 1e9)  # milliseconds, 1e12 a second


def test_flash_attention_finds_what_is_wrong(monkeypatch, wrong):
    monkeypatch.setattr(flash_attention, "SECONDS", 1e-4)
    faults = flash_attention.compare([TINY], "reference", rounds=1, others=()).faults
    assert list(faults) == []  # the fixture leaves the reference alone
    faults = flash_attention.compare([TINY], None, rounds=1, others=()).faults
    assert {fault.split(": ")[1].split()[0] for fault in faults} == {"out", "d_query", "d_key", "d_value"}


def _peer(name, factor=1.0, does=lambda problem: True, fault=None):
    def ready(problem, arrays, which):
        if not does(problem):
            return None
        run = _peers.compiled(through_core(problem, "reference"), which, arrays, problem.extras())

        def answer():
            if fault:
                raise fault
            return tuple(factor * result for result in run())

        return answer

    return Peer(name, ready)


def test_a_peer_is_checked_timed_and_left_out_where_it_cannot(monkeypatch):
    monkeypatch.setattr(flash_attention, "SECONDS", 1e-4)
    others = [
        _peer("cuDNN", does=lambda problem: problem.soft_cap is None),
        _peer("wrong", factor=1.05),
        _peer("broken", fault=RuntimeError("no such card")),
    ]
    report = flash_attention.compare([TINY, KINDS[5]], "xla", rounds=1, others=others)
    (table,) = report.tables
    assert table.columns == ("", "ejkernel xla", "range", "TFLOP/s", "cuDNN", "wrong", "broken", "cuDNN / ours")
    plain, capped = table.rows[0], table.rows[2]
    assert plain[7] == pytest.approx(plain[4] / plain[1])
    assert (capped[4], capped[7]) == ("-", "-")
    # Who is wrong, or fails, is told of, and not timed.
    assert {row[place] for row in table.rows for place in (5, 6)} == {"-"}
    assert {fault.partition(",")[0] for fault in report.faults} == {"wrong", "broken"}
    assert all("RuntimeError: no such card" in fault for fault in report.faults if fault.startswith("broken"))


def test_what_we_cannot_do_is_told_as_wrong(monkeypatch):
    def fails(problem, backend=None):
        return through_core(problem, "xla" if problem.dtype == "float32" else "no such kernel")

    monkeypatch.setattr(flash_attention, "through_core", fails)
    report = flash_attention.compare([attrs.evolve(TINY, dtype="bfloat16")], None, rounds=1, others=())
    assert list(report.tables[0].rows) == []
    assert len(report.faults) == 2
    assert all("no such kernel" in fault for fault in report.faults)


def test_the_cases_are_those_that_are_to_be_shown():
    assert len(flash_attention.ANCHORS) == 7
    more = flash_attention.MORE
    assert {p.head_dim for p in more} == {64, 96, 128, 192, 256}
    assert {p.sequences for p in more} == {None, 8, 64}
    assert [p.window for p in more if p.window] == [1023]
    assert [sum(bool(getattr(p, name)) for p in more) for name in ("soft_cap", "bias", "sinks")] == [1, 1, 1]


def test_peers_say_what_they_do_not_do():
    plain, cudnn, pallas = TINY, _peers._cudnn, _peers._pallas
    assert cudnn(plain) is not None
    assert cudnn(KINDS[2]) is not None
    assert cudnn(KINDS[6]) is not None
    assert [str(kind) for kind in (KINDS[3], KINDS[5], *KINDS[7:]) if cudnn(kind) is not None] == []
    assert [kind for kind in KINDS if pallas(kind) is not None] == []  # head dims of 64 and 128 alone
    # The blockwise kernel stands where cuDNN does not.
    assert [(_peers._xla(kind) is None) for kind in KINDS] == [cudnn(kind) is not None for kind in KINDS]


# -- hopper -------------------------------------------------------------------------------------------------------


def test_hopper_is_measured_against_cudnn_and_against_our_own_plain_rate(monkeypatch):
    problem = attrs.evolve(TINY, dtype="bfloat16")
    alone = attrs.evolve(problem, sinks=True)
    monkeypatch.setattr(hopper, "ANCHORS", {problem: (1.0, 1.0)})
    monkeypatch.setattr(hopper, "ALONE", {alone: problem})
    report = hopper.compare([problem, alone], "xla", 2, _peer("cuDNN", does=lambda problem: not problem.sinks))
    assert list(report.faults) == []
    (table,) = report.tables
    assert [row[0] for row in table.rows] == [f"{p}, {which}" for p in (problem, alone) for which in hopper.PASSES]
    for row, which in zip(table.rows, hopper.PASSES * 2, strict=True):
        moved = 64 * 2 * ((4 if which == "forward" else 12) * 16 * 2 + (4 if which == "forward" else 8))
        roof = problem.flops(which) / moved * 4.8
        assert row[3] == pytest.approx(problem.flops(which) / row[1] / 1e9)
        kernels = "flash_attention.xla" + (" and flash_attention_bwd.xla" if which != "forward" else "")
        assert row[6:10] == ("-",) * 4  # nothing was chosen
        assert row[10:] == (pytest.approx(roof), "memory", kernels)
    plain, both, *others = table.rows
    assert [row[5] for row in (plain, both)] == [pytest.approx(row[4] / row[1]) for row in (plain, both)]
    assert [row[4:6] for row in others] == [("-", "-")] * 2
    bars = {bar.what: bar for bar in report.bars}
    assert bars[f"{problem}, forward: over cuDNN"].measured == plain[5]
    assert bars["the 1 anchors, forward: over cuDNN, geometric mean"].measured == pytest.approx(plain[5])
    assert bars[f"{alone}, forward: of the plain rate"].measured == pytest.approx(others[0][3] / plain[3])
    assert len(bars) == 6
    # A case that cuDNN should have done, and did not, is not judged as one that it refuses.
    left = hopper._bars({(problem, "forward"): {"ejkernel": 1.0}, (alone, "forward"): {"ejkernel": 2.0}})
    assert {bar.what: bar.measured for bar in left} == {f"{alone}, forward: of the plain rate": 0.5}


def test_hopper_compares_what_is_chosen_with_the_best_of_each_pass(monkeypatch):
    monkeypatch.setattr(hopper, "ALONE", {})
    monkeypatch.setattr(hopper, "KERNELS", ("xla", "triton", "reference"))
    report = hopper.compare([TINY], None, 2, _peer("cuDNN"))
    assert list(report.faults) == []
    rows = [dict(zip(report.tables[0].columns, row, strict=True)) for row in report.tables[0].rows]
    # cuDNN stands for the XLA kernel, and no GPU is here.
    assert [(row["xla"], row["triton"]) for row in rows] == [("-", "-")] * 2
    forward, both = ([row[who] for who in ("cuDNN", "reference")] for row in rows)
    best = min(forward)
    assert rows[0]["over the best"] == pytest.approx(rows[0]["ejkernel"] / best)
    best += min(b - a for a, b in zip(forward, both, strict=True))
    assert rows[1]["over the best"] == pytest.approx(rows[1]["ejkernel"] / best)
    bars = {bar.what: (bar.measured, bar.at_least) for bar in report.bars if "best" in bar.what}
    assert bars == {
        f"{TINY}, {which}: chosen / best": (row["over the best"], False)
        for row, which in zip(rows, hopper.PASSES, strict=True)
    }


def test_hopper_goes_on_where_one_problem_fails(monkeypatch):
    monkeypatch.setattr(hopper, "exact", lambda problem, arrays: _exact_but_for(40, problem, arrays))
    report = hopper.compare([attrs.evolve(TINY, length=40), TINY], "xla", 1, _peer("cuDNN"))
    assert [row[0] for row in report.tables[0].rows] == [f"{TINY}, {which}" for which in hopper.PASSES]
    (fault,) = report.faults
    assert fault.endswith("MemoryError: no room")


def _exact_but_for(length, problem, arrays):
    if problem.length == length:
        raise MemoryError("no room")
    return flash_attention.exact(problem, arrays)


def test_two_clocks_are_not_compared(monkeypatch):
    sources = iter(["device", "clock"])
    monkeypatch.setattr(_timing, "benchmark", lambda run, **counts: Timing([1.0], next(sources)))
    with pytest.raises(RuntimeError, match="some were timed by the device and some by the host"):
        _timing.on_the_device({"one": None, "other": None}, rounds=1)


def test_the_roof_is_what_takes_longest():
    card = _roof.Card(flops=4e12, bytes=1e12, exponentials=1e12)
    problem = Problem(2, 8, 4, 16, "bfloat16", causal=False, kv_heads=2)
    least = _roof.least_seconds(problem, "forward", card)
    tokens, pairs = 2 * 8, 2 * 4 * 8 * 8
    assert least["products"] == pytest.approx(pairs * 16 * 4 / 4e12)
    assert least["memory"] == pytest.approx(tokens * (2 * 16 * (4 + 2 + 2 + 4) + 4 * 4) / 1e12)
    assert least["exponentials"] == pytest.approx(pairs / 1e12)
    both = _roof.least_seconds(problem, "forward+backward", card)
    assert both["products"] == pytest.approx(3.5 * least["products"])
    assert both["exponentials"] == 2 * least["exponentials"]
    # Forward q, k, v, out; backward these, d_out, and three gradients.
    assert both["memory"] == pytest.approx(tokens * (2 * 16 * (6 * 4 + 6 * 2) + 2 * 4 * 4) / 1e12)


SVG = "{http://www.w3.org/2000/svg}"


def test_what_hopper_finds_is_drawn(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(hopper, "run", lambda: hopper.compare([TINY], "xla", 1, _peer("cuDNN")))
    file = tmp_path / "found.json"
    assert command.main(["hopper", "--json", str(file)]) == 0
    assert plot.main([str(file), str(tmp_path / "drawn")]) == 0
    (report,) = json.loads(file.read_text())
    for which, row in zip(hopper.PASSES, report["tables"][0]["rows"], strict=True):
        picture = ElementTree.fromstring((tmp_path / "drawn" / f"hopper-{which.replace('+', '-')}.svg").read_text())
        texts = [one.text for one in picture.iter(f"{SVG}text")]
        assert str(TINY) in texts
        assert f"{row[3]:.0f}" in texts
        ours, theirs, roof = [one.attrib for one in picture.iter(f"{SVG}rect")][3:]
        assert float(ours["width"]) == pytest.approx(plot.WIDE * row[3] / row[10], abs=0.1)
        assert float(theirs["width"]) == pytest.approx(plot.WIDE * row[3] * row[1] / row[4] / row[10], abs=0.1)
        assert float(roof["x"]) == plot.LEFT + plot.WIDE
    file.write_text("[]")
    assert plot.main([str(file), str(tmp_path)]) == 1
    assert "nothing of `hopper` is there" in capsys.readouterr().out


def test_hopper_finds_what_is_wrong(wrong):
    report = hopper.compare([TINY], None, 1, _peer("cuDNN", factor=1.01))
    assert report.tables[0].rows == ()
    assert {fault.partition(",")[0] for fault in report.faults} == {"ejkernel", "cuDNN"}


def test_hopper_measures_what_is_to_be_shown():
    problems = [*hopper.ANCHORS, *hopper.MORE]
    every = [*problems, *hopper.ALONE]
    assert len(every) == len({*every})
    assert {*hopper.ALONE.values()} <= {*hopper.ANCHORS}
    assert [_peers._cudnn(problem) is None for problem in every] == [problem in hopper.ALONE for problem in every]
    assert {p.head_dim for p in problems} == {64, 128, 256}
    assert {p.length for p in problems if p.batch == 1} >= {512, 1024, 4096, 16384, 131072}
    assert any(p.kv_heads and p.heads // p.kv_heads == 8 for p in problems)
    assert {(p.soft_cap, p.sinks, p.sequences, p.window) for p in hopper.ALONE} == {
        (30.0, False, None, None),
        (None, True, None, None),
        (None, False, 8, None),
        (None, True, None, 4095),
        (30.0, False, None, 4095),
    }


# -- shapes and choice --------------------------------------------------------------------------------------------


FAMILIES = [
    shapes.Family(Problem(2, 40, 4, 16, "bfloat16", kv_heads=2, window=9, bias=True), (39, 40, 47)),
    shapes.Family(Problem(1, 40, 2, 16, "bfloat16", causal=False, window=9, soft_cap=0.7), (40, 41)),
    shapes.Family(Problem(1, 40, 2, 16, "float16", sinks=True, sequences=3), (33, 40)),
]


@pytest.mark.parametrize(
    "family",
    [FAMILIES[0], *(pytest.param(family, marks=pytest.mark.long) for family in FAMILIES[1:])],
    ids=lambda family: str(family.problem),
)
def test_shapes_are_checked_and_measured(monkeypatch, family):
    monkeypatch.setattr(shapes, "SECONDS", 1e-4)
    found = shapes.measured(family, "xla", rounds=1)
    assert list(found.faults) == []
    assert list(found.seconds) == [(problem, which) for problem in family for which in shapes.PASSES]


def test_a_wrong_shape_is_found(monkeypatch, wrong):
    monkeypatch.setattr(shapes, "SECONDS", 1e-4)
    monkeypatch.setattr(shapes, "TOLERANCE", {"bfloat16": 6e-3})
    monkeypatch.setattr(shapes, "_same_bits", lambda first, second: False)
    found = shapes.measured(FAMILIES[0], "xla", rounds=1)
    assert {fault.split(": ")[1].split()[0] for fault in found.faults} == {
        "out",
        "d_query",
        "d_key",
        "d_value",
        "other",
    }


def test_a_shape_that_fails_is_told_and_the_others_are_measured(monkeypatch):
    def fails(problem, backend=None):
        return through_core(problem, "no such kernel" if problem.length == 40 else backend)

    monkeypatch.setattr(shapes, "SECONDS", 1e-4)
    monkeypatch.setattr(shapes, "through_core", fails)
    found = shapes.measured(FAMILIES[0], "xla", rounds=1)
    (fault,) = found.faults
    assert fault.startswith(str(list(FAMILIES[0])[1]))
    assert "no such kernel" in fault
    assert {problem.length for problem, _ in found.seconds} == {39, 47}


def test_what_a_kernel_refuses_is_no_fault():
    found = shapes.measured(FAMILIES[0], "pallas_tpu", rounds=1)  # which wants a TPU
    assert (found.seconds, found.faults, found.refused) == ({}, (), (*FAMILIES[0],))
    report = shapes.report([found, shapes.Found({(TINY, "forward"): 1.0}, [])])
    assert "; 3 problems refused;" in report.tables[0].title


def test_every_run_is_compared(monkeypatch):
    right = (np.ones((1, 4)),)
    runs = {"forward": iter([right, right, (np.full((1, 4), 1.1),), right]).__next__}
    monkeypatch.setattr(shapes, "_same_bits", lambda first, found: bool((first[0] == found[0]).all()))
    problem = attrs.evolve(TINY, dtype="bfloat16")
    wrong = shapes._faults(problem, runs, right, ["forward"])
    assert wrong == [f"{problem}, forward: out is off by 1.0e-01", f"{problem}, forward: other bits another time"]


def test_what_looks_like_a_cliff_is_timed_again(monkeypatch):
    measured = []

    def in_bursts(runs, rounds, seconds):
        measured.append(None)
        slow = 9.0 if len(measured) == 2 else 1.0  # the second problem, for the first time
        return {name: Times([slow]) for name in runs}

    monkeypatch.setattr(shapes, "in_bursts", in_bursts)
    found = shapes.measured(FAMILIES[0], "xla", rounds=1)
    assert set(found.seconds.values()) == {1.0}
    assert len(measured) == 4


def test_a_cliff_is_seen():
    short, middle, long = FAMILIES[0]
    seconds = {(short, "forward"): 0.9, (middle, "forward"): 3.0, (long, "forward"): 1.2}
    seconds |= {(short, "forward+backward"): 1.0, (middle, "forward+backward"): 2.0, (long, "forward+backward"): 4.0}
    report = shapes.report([shapes.Found(seconds, []), shapes.Found({}, ["one fault"])])
    assert report.tables[0].rows[0] == (f"{middle}, forward", pytest.approx(0.4), 3000.0, 1200.0)
    assert [row[1] for row in report.tables[0].rows[1:]] == [1.0] * 5
    (bar,) = report.bars
    assert (bar.measured, bar.held, report.faults) == (pytest.approx(0.4), False, ("one fault",))


def test_shapes_are_drawn_of_every_kind():
    families = shapes.drawn(300, np.random.default_rng(1))
    problems = [family.problem for family in families]
    assert all(p.heads % (p.kv_heads or p.heads) == 0 and p.head_dim % 8 == 0 for p in problems)
    assert all(min(f.lengths) > max(0, f.problem.sequences or 0) for f in families)
    assert {p.head_dim for p in problems} > {16, 64, 128, 256}
    for name in ("causal", "window", "kv_heads", "soft_cap", "bias", "sinks", "sequences"):
        assert {bool(getattr(p, name)) for p in problems} == {True, False}, name
    assert shapes.COUNT // len(shapes.BESIDE) * len(shapes.BESIDE) == 1000


@pytest.mark.long
def test_a_choice_is_measured_against_what_it_is_made_from(monkeypatch):
    monkeypatch.setattr(choice, "SECONDS", 1e-4)
    monkeypatch.setattr(choice, "BUDGET_S", 10.0)
    elsewhere = "triton" if jax.default_backend() == "cpu" else "pallas_tpu"
    report = choice.compare([TINY, KINDS[8]], ("xla", "reference", elsewhere), rounds=1)
    (table,) = report.tables
    assert table.columns == ("", "chosen", "xla", "reference", elsewhere, "chosen / best", "chosen")
    for row, bar in zip(table.rows, report.bars, strict=True):
        assert row[4] == "-"  # it takes no part, because it refuses
        assert row[5] == bar.measured == pytest.approx(row[1] / min(row[2:4]))
        assert row[6].startswith(("flash_attention.xla Config(", "flash_attention.reference Config("))
        if row[0].endswith(", forward"):
            assert row[1] in row[2:4]  # the same program is not measured twice
    assert len(registry.memory) == 0


@pytest.mark.long
def test_a_program_is_told_by_the_calls_that_it_makes():
    biased = KINDS[6]  # the bias is given, and has no gradient here
    with policy_override(autotune=True, budget_s=10.0):
        found = choice._tuned(biased, None, biased.arrays(), biased.extras())
    ops = [[part.split(".")[0] for part in told.split(" and ")] for told, _ in found.values()]
    assert ops == [["flash_attention"], ["flash_attention", "flash_attention_bwd"]]


def test_bits_are_compared_where_they_are_promised(monkeypatch):
    def plans(problem, backend):
        return [SimpleNamespace(cfg=SimpleNamespace(atomics=problem.causal))]

    monkeypatch.setattr(shapes, "plans", plans)
    monkeypatch.setattr(shapes, "_same_bits", lambda first, second: False)
    monkeypatch.setattr(shapes, "SECONDS", 1e-4)
    adding, other = (attrs.evolve(family, lengths=(40,)) for family in FAMILIES[:2])
    found = {family: shapes.measured(family, "xla", rounds=1).faults for family in (adding, other)}
    assert [fault.partition(": ")[0].split(", ")[-1] for fault in found[adding]] == ["forward"]
    assert len(found[other]) == len(shapes.PASSES)


@pytest.mark.parametrize("benchmark", [shapes, choice, hopper])
def test_shapes_and_choice_are_for_a_gpu(benchmark):
    if jax.default_backend() == "gpu":
        pytest.skip("there is one")
    assert benchmark.run().text.endswith("there is no GPU here, and nothing was measured")


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
    assert listed == list(command.BENCHMARKS)


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
