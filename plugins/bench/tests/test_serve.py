"""``ejkernel bench serve``: the lengths that it draws, the engine with a gather, and what is said of both."""

from __future__ import annotations

import functools
from typing import Any

import attrs
import click
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_bench import pictures, serve
from ejkernel_bench._gather_engine import GatherEngine, gather_attention
from ejkernel_bench._paged_calls import PagedCall, Sequences
from ejkernel_bench._serve_load import Load, draw_lengths, draw_load
from ejkernel_bench._serve_tokens import compared, differing, logits_behind
from ejkernel_bench._served import Served, answered, speed_up
from ejkernel_bench.serve_step import MODELS, SMALL
from ejkernel_bench.serving import Engine, Limits, Request, init_params
from ejkernel_ops import ragged_paged_attention

TINY = attrs.evolve(SMALL["dense"], layers=1)
LIMITS = Limits(pages=40, page_size=4, most_length=128, most_sequences=3, most_tokens=16)


# -- requests ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("longest", [10**9, 8192])
def test_lengths_have_the_published_percentiles(longest: int) -> None:
    prompts, answers = draw_lengths(np.random.default_rng(0), 200_000, longest)
    for lengths, median, p90 in ((prompts, 1730, 5696), (answers, 415, 834)):
        assert np.median(lengths) == pytest.approx(median, rel=0.02)
        assert np.percentile(lengths, 90) == pytest.approx(p90, rel=0.02)
        assert lengths.min() >= 1
    assert (prompts + answers).max() == longest or longest > 10**6
    assert np.corrcoef(prompts, answers)[0, 1] == pytest.approx(0, abs=0.03)


def test_512_requests_of_the_default_seed_are_as_long() -> None:
    prompts, answers = draw_load(512, 100, 8192).lengths
    assert (np.median(prompts), np.percentile(prompts, 90)) == pytest.approx((1730, 5696), rel=0.15)
    assert (np.median(answers), np.percentile(answers, 90)) == pytest.approx((415, 834), rel=0.1)


def test_a_seed_draws_the_same_requests() -> None:
    first, again, other = (draw_load(20, 97, 128, seed, shorter=64) for seed in (3, 3, 4))
    assert first.requests == again.requests
    assert first.requests != other.requests
    assert {word for request in first.requests for word in request.prompt} <= {*range(97)}
    assert len({word for request in first.requests for word in request.prompt}) > 90
    assert all(request.temperature == 0 for request in first.requests)


def test_requests_arrive_at_once_or_at_a_rate() -> None:
    assert set(draw_load(20, 97, 128).arrivals) == {0.0}
    arrivals = np.array(draw_load(2000, 97, 128, rate=4.0, shorter=64).arrivals)
    assert np.diff(arrivals).mean() == pytest.approx(1 / 4, rel=0.1)
    assert np.diff(arrivals).std() == pytest.approx(1 / 4, rel=0.1)
    assert (np.diff(arrivals) > 0).all()


# -- the engine with a gather ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sequences", "most"),
    [
        ((Sequences(3, 30, fewest=2),), 1),
        ((Sequences(3, 30, fewest=2),), None),
        ((Sequences(2, 13), Sequences(2, 30, 9)), None),
        ((Sequences(1, 11, 11), Sequences(1, 5), Sequences(1, 30, 4)), None),
    ],
)
def test_a_gather_is_right_beside_padding(sequences: tuple[Sequences, ...], most: int | None) -> None:
    call = PagedCall(sequences, 4, 2, 16, 4, is_interleaved=True, dtype="float32")
    given = call.arguments(0)
    count, tokens, pages = len(given["kv_lens"]), len(given["query"]), given["kv_pages"].shape[0]
    cache = jnp.concatenate([jnp.full_like(given["kv_pages"], 7.0), given["kv_pages"]])
    arrays = (
        jnp.pad(given["query"], ((0, 5), (0, 0), (0, 0)), constant_values=3.0),
        cache,
        jnp.pad(given["kv_lens"], (0, 2)),
        jnp.pad(given["block_tables"], ((0, 2), (0, 3)), constant_values=-1),
        jnp.pad(given["query_start_loc"], (0, 2), mode="edge"),
        jnp.array([count]),
    )
    options = {"metadata": None, "first_page": pages}
    out = jax.jit(functools.partial(gather_attention, max_query_len=most))(*arrays, **options)
    given = {name: given[name] for name in ("query", "kv_pages", "kv_lens", "block_tables", "query_start_loc")}
    expected = ragged_paged_attention(**given, backend="reference")
    np.testing.assert_allclose(out[:tokens], expected, atol=2e-5)


@pytest.mark.parametrize(
    ("length", "widths"), [(8192, [16, 32, 64, 128]), (6000, [16, 32, 64, 94]), (640, [10]), (1024, [16])]
)
def test_tables_are_cut_to_powers_of_two(length: int, widths: list[int]) -> None:
    engine = GatherEngine.__new__(GatherEngine)
    engine.limits, engine.table = Limits(1, 64, length, most_sequences=2), -(-length // 64)
    assert engine.widths == widths
    for longest in (1, 64 * widths[0], length // 2, length):
        lengths = np.array([1, longest])
        tables = np.zeros((2, engine.table))
        with pytest.MonkeyPatch.context() as patch:
            batch = serve_batch(lengths, tables)
            patch.setattr(Engine, "_arrays", lambda *given, batch=batch: ("tokens", "positions", batch, "seeds", 1))
            cut = engine._arrays([], 2)[2].block_tables.shape[1]
        assert cut == min(width for width in widths if 64 * width >= longest)


def serve_batch(lengths: np.ndarray, tables: np.ndarray) -> Any:
    from ejkernel_bench.serving.engine import Batch

    return Batch(lengths, lengths, tables, lengths, lengths, lengths)


# -- a run -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report() -> Any:
    return serve.run(small=True, requests=14, layers=1, batch=4)


def test_both_engines_answer_all_requests_alike(report: Any) -> None:
    assert report.faults == ()
    assert report.bars == ()
    ratio, tokens = report.text.splitlines()[1:]
    assert tokens == "serve: 0 of 14 requests have other tokens than by gather"
    speeds = [dict(zip(report.tables[0].columns, row, strict=True)) for row in report.tables[0].rows]
    seconds = {row[""]: row["seconds"] for row in speeds}
    assert (
        ratio
        == f"serve: gather takes {seconds['gather'] / seconds['ejkernel']:.3g} times as long for as many new tokens"
    )
    assert [(row[""], row["ended"], row["programs"]) for row in speeds] == [
        ("ejkernel", "14 of 14", 3),
        ("gather", "14 of 14", 5),
    ]
    prompts, answers = draw_load(14, 97, 128, shorter=64).lengths
    assert [row["preemptions"] for row in speeds] == [speeds[0]["preemptions"]] * 2
    for row in speeds:
        assert row["new tokens / s"] * row["seconds"] == pytest.approx(answers.sum())
        assert row["tokens / s"] * row["seconds"] == pytest.approx((answers + prompts).sum())
        assert row["compiled in, s"] > 0


def test_times_of_both_are_in_a_table_and_drawn(report: Any) -> None:
    rows = report.tables[1].rows
    assert [row[0] for row in rows] == [
        f"{name}, {what}" for name in ("ejkernel", "gather") for what in ("to the first token", "between tokens")
    ]
    assert all(0 < row[1] <= row[2] <= row[3] for row in rows)
    speeds, waits = pictures.panels_of(report.data())
    assert speeds.cases == ["ejkernel", "gather"]
    assert [*waits.lengths] == ["median", "P90", "P99"]


def test_lengths_are_told(report: Any) -> None:
    prompts, answers = draw_load(14, 97, 128, shorter=64).lengths
    assert f"prompts {prompts.min()} to {prompts.max()} tokens, median {np.median(prompts):.0f}" in report.text
    assert f"answers {answers.min()} to {answers.max()} tokens, median {np.median(answers):.0f}" in report.text


def test_an_engine_that_fails_or_is_cut_off_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arrays: Any, **options: Any) -> Any:
        raise NotImplementedError("no such kernel")

    monkeypatch.setattr(serve, "gather_attention", fails)
    report = serve.run(small=True, requests=14, layers=1, batch=4, seconds=1e-9)
    assert report.faults == ("gather: NotImplementedError: no such kernel",)
    (row,) = report.tables[0].rows
    assert dict(zip(report.tables[0].columns, row, strict=True))["ended"] == "0 of 14"
    assert "other tokens" not in report.text


def test_a_cpu_measures_nothing_unless_it_is_asked_to() -> None:
    assert serve.run().text == "serve: there is no accelerator here; --small measures on the CPU"


# -- what was done -----------------------------------------------------------------------------------------------------


def test_speeds_and_times_are_those_of_the_tokens() -> None:
    times = [[2.0, 2.5, 3.5], [3.0, 3.25], []]
    served = Served([10, 20, 40], [0.5, 1.0, 1.5], [[1, 2, 3], [4, 5], []], times, seconds=4.0)
    assert (served.speed, served.whole_speed) == (5 / 4, 35 / 4)
    assert served.to_first.tolist() == [1.5, 2.0]
    assert served.between.tolist() == [0.5, 1.0, 0.25]
    nothing = Served([10], [0.0], [[]], [[]], seconds=1.0)
    assert (nothing.speed, nothing.whole_speed, len(nothing.to_first), len(nothing.between)) == (0, 0, 0, 0)


def test_speeds_are_compared_for_as_many_tokens() -> None:
    ours, others = (
        Served([1, 1], [0.0, 0.0], [], times) for times in ([[1.0, 3.0, 6.0], [2.0, 4.0]], [[4.0, 9.0], [6.0]])
    )
    assert speed_up(ours, others) == 9.0 / 3.0
    assert speed_up(others, ours) == 3.0 / 9.0
    assert speed_up(ours, Served([1], [0.0], [], [[], []])) is None


def test_tokens_differ_from_the_first_place_on() -> None:
    first, second = [[1, 2, 3], [4, 5], [6], []], [[1, 9, 8], [4, 5, 7], [], [2]]
    assert [*differing(first, second)] == [(0, 1)]


@pytest.mark.parametrize(("logit", "count"), [(9.4, 0), (9.9999, 0), (8.5, 1), (-20.0, 1)])
def test_tokens_whose_logits_are_far_apart_are_a_fault(logit: float, count: int) -> None:
    load = Load(tuple(Request((number, 5), 2) for number in range(3)), (0.0,) * 3)
    ours, others = (Served([2] * 3, load.arrivals, tokens, []) for tokens in ([[3, 1], [4], [0, 0]], [[3, 2], [4], []]))
    asked = []

    def logits(tokens: Any) -> np.ndarray:
        asked.append(tokens)
        return np.array([0.5, 10.0, logit, -4.0])

    sentence, faults = compared(ours, others, load, logits, "bfloat16")
    assert asked == [[0, 5, 3]]
    assert sentence.startswith("serve: 1 of 2 requests have other tokens than by gather; the farthest logit, of 1 that")
    below = (10 - logit) / max(10, abs(logit))
    assert f"is {below:.1e} of the largest below the best" in sentence
    assert len(faults) == count
    assert all(fault.startswith("request 0, token 1: 1, and 2 by gather: the logit of one is ") for fault in faults)


def test_logits_of_a_request_alone_are_those_of_the_engine() -> None:
    """A prompt of three chunks; and with a wrong attention, tokens whose logits are far from the best."""
    params = init_params(TINY, jax.random.key(0))
    load = draw_load(4, TINY.vocabulary, LIMITS.most_length, seed=2, rate=200.0, shorter=64)
    ours = answered(Engine, ragged_paged_attention, TINY, params, LIMITS, load)
    assert ours.ended == 4
    assert all(first > arrival for (first, *_), arrival in zip(ours.times, load.arrivals, strict=True))
    alone = functools.partial(logits_behind, TINY, params, LIMITS)
    number = int(np.argmax(ours.prompts))
    assert ours.prompts[number] > 2 * LIMITS.most_tokens
    for place, token in enumerate(ours.tokens[number]):
        assert alone([*load.requests[number].prompt, *ours.tokens[number][:place]]).argmax() == token

    def wrong(query: Any, *arrays: Any, **options: Any) -> Any:
        return -gather_attention(query, *arrays, **options)

    others = answered(GatherEngine, wrong, TINY, params, LIMITS, load)
    sentence, faults = compared(ours, others, load, alone, "float32")
    assert sentence.startswith("serve: 4 of 4 requests have other tokens")
    assert len(faults) == 4


# -- options -----------------------------------------------------------------------------------------------------------


def test_pages_that_fit_beside_weights_and_a_gather() -> None:
    llama = MODELS["llama-8b"]
    limits = Limits(1, 64, 8192, most_sequences=128, most_tokens=2048)
    assert serve.pages_that_fit(llama, limits, None) == 128 * 128 // 4
    weights, of_page = 16.06e9, 32 * 2 * 64 * 8 * 128 * 2
    gathered = 2 * 128 * 8192 * 2 * 8 * 128 * 2
    for memory in (60e9, 105e9):
        room = 0.88 * memory - weights - gathered
        assert serve.pages_that_fit(llama, limits, memory) == pytest.approx(room / of_page, rel=0.01)
    assert serve.pages_that_fit(llama, limits, 1e12) == 128 * 128
    with pytest.raises(click.UsageError, match="do not fit; --layers has fewer"):
        serve.pages_that_fit(llama, limits, 28e9)


def test_options_of_the_command_reach_the_suite(ejkernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    original = serve.run

    @functools.wraps(original)
    def run(**options: Any) -> Any:
        asked.append(options)
        return original()

    monkeypatch.setattr(serve, "run", run)
    words = "--requests 7 --arrivals 2.5 --small --layers 1 --batch 9 --pages 50 --seed 3 --seconds 4 --longest 77"
    assert ejkernel("bench", "serve", *words.split(), "--model", "dense", "--backend", "xla")[0] == 0
    assert asked == [
        {
            "requests": 7, "arrivals": 2.5, "small": True, "layers": 1, "batch": 9, "pages": 50, "seed": 3,
            "seconds": 4.0, "longest": 77, "model": "dense", "backend": "xla",
        }
    ]  # fmt: skip
    assert ejkernel("bench", "serve")[0] == 0
    assert asked[1:] == [{}]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--requests x", "Invalid value for '--requests'"),
        ("--requestz 3", "No such option '--requestz'"),
        ("--seconds 0", "Invalid value for '--seconds'"),
        ("--small --model llama-8b", "--model: there is no llama-8b; there are dense, experts"),
        ("--small --layers 9", "--layers: dense has 2"),
        ("overhead --requests 3", "unexpected extra argument (overhead)"),
    ],
)
def test_wrong_options_are_one_line(ejkernel: Any, words: str, message: str) -> None:
    code, _, error = ejkernel("bench", "serve", *words.split())
    assert code == 2
    assert message in error
    assert error.count("\n") == 1
