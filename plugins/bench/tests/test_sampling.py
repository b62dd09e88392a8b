"""The suite ``sampling``: its calls, which tokens it takes for right, and its peers, by stand-ins of their packages."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import attrs
import click
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_bench import _sampling_peers, sampling, suite
from ejkernel_bench._calls import PASSES, describe, draw
from ejkernel_bench._sampling_calls import FILTERS, OP, Rows, SamplingCall, check, least_kept
from ejkernel_bench._sampling_peers import CATEGORICAL, FLASHINFER, SORT, VLLM, VLLM_MODULE
from ejkernel_ops import sample_tokens
from ejkernel_ops.sample_tokens.arguments import key_words
from ejkernel_ops.sample_tokens.noise import gumbel

ROWS, WORDS = 40, 61


def example_of(filters):
    return SamplingCall(ROWS, WORDS, filters).example()


def rows_of(table):
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


# -- a run -------------------------------------------------------------------------------------------------------------


def test_small_calls_are_right_and_measured_beside_what_is_here():
    report = sampling.run(rounds=1, small=True)
    assert (report.benchmark, report.faults, report.bars) == ("sampling", (), ())
    rows = rows_of(report.tables[0])
    assert [row[""] for row in rows] == [f"20x331-{filters}, forward" for filters in FILTERS]
    measured = {name: [isinstance(row[name], float) for row in rows] for name in (suite.OURS, SORT, CATEGORICAL)}
    assert measured == {
        suite.OURS: [True] * 5,
        SORT: [False, True, True, True, False],
        CATEGORICAL: [True, False, False, False, True],
    }
    for name in (FLASHINFER, VLLM):
        assert f"{OP}: {name} is not measured: there is no NVIDIA GPU" in report.text


def test_wrong_tokens_are_reported_and_not_timed(monkeypatch):
    def best(call):
        return lambda logits, key: logits.argmax(-1)

    def unfiltered(call):
        return lambda logits, key: jax.random.categorical(key, logits / 9)

    monkeypatch.setattr(sampling, "peers", lambda: {"best": best, "unfiltered": unfiltered, "absent": "it is away"})
    monkeypatch.setattr(sampling, "SMALL", (SamplingCall(64, 331, "k50-p0.9"),))
    report = sampling.run(rounds=1, small=True)
    (row,) = rows_of(report.tables[0])
    assert (row["best"], row["unfiltered"]) == ("-", "-")
    assert isinstance(row[suite.OURS], float)
    messages = [fault.partition(", forward, 64x331-k50-p0.9: ")[::2] for fault in report.faults]
    assert [name for name, _ in messages] == ["best", "unfiltered", "unfiltered"][: len(messages)]
    assert messages[0][1].startswith("its tokens are not drawn by their probabilities: their mean place is 0.")
    assert "of 64 tokens are not among those that the filters keep" in messages[1][1]
    assert report.text == f"{OP}: absent is not measured: it is away"


def test_any_suite_may_check_its_results_itself():
    asked = []

    def refuse(example, inputs, contender, results, expected):
        asked.append((example.name, contender, len(results), len(expected)))
        return ["no"]

    report = suite.run("rms_norm", examples=[norm()], names={"rows"}, backends=(), check=refuse, rounds=1)
    assert asked == [("rows", suite.OURS, 1, 1)]
    assert report.faults == (f"{suite.OURS}, forward, rows: no",)
    assert report.tables[0].rows == ()


def norm():
    from ejkernel_core import Example

    x = lambda draw: jax.random.normal(jax.random.key(draw), (4, 8))
    return Example("rows", "rms_norm", lambda draw: {"x": x(draw), "weight": jnp.ones(8)}, "float32")


# -- the calls ---------------------------------------------------------------------------------------------------------


def test_names_say_what_a_call_is():
    arguments = SamplingCall(3, 40, "k50-p0.9").arguments(0)
    assert arguments["logits"].shape == (3, 40)
    assert (arguments["top_k"], arguments["top_p"]) == (50, 0.9)
    assert {name: {**SamplingCall(3, 40, name).arguments(0)}.keys() - {"logits", "key"} for name in FILTERS} == {
        "none": set(),
        "k50": {"top_k"},
        "p0.9": {"top_p"},
        "k50-p0.9": {"top_k", "top_p"},
        "m0.05": {"min_p"},
    }
    assert (arguments["logits"] != SamplingCall(3, 40, "none").arguments(1)["logits"]).all()


def test_calls_are_named_alone_and_by_part():
    every = sampling.named_calls(None)
    assert len(every) == 5 * 7
    sizes = {(call.rows, call.vocabulary) for call in every.values()}
    assert sizes == {*((rows, 128256) for rows in (1, 8, 16, 64, 256)), (64, 151936), (256, 151936)}
    assert [*sampling.named_calls("1x128256-none,table,1x128256-none")] == [
        "1x128256-none",
        *(f"64x128256-{filters}" for filters in FILTERS),
    ]
    for word, hint in (("tabel", "did you mean table"), ("8x128256", "did you mean 8x128256-none")):
        with pytest.raises(click.UsageError, match=f"no part or call of sampling is named {word}; {hint}"):
            sampling.named_calls(word)


def test_limits_are_of_both_filters_at_64_rows():
    applied = {
        (minimum.over, minimum.ratio): [
            name for name, call in sampling.named_calls(None).items() if minimum.applies(call.example())
        ]
        for minimum in sampling.MINIMA
    }
    assert [*applied] == [(SORT, 5.0), (FLASHINFER, 2.0), (VLLM, 2.0)]
    assert all(names == ["64x128256-k50-p0.9"] for names in applied.values())


# -- the check ---------------------------------------------------------------------------------------------------------


def kept_one_by_one(row, top_k=0, top_p=1.0, min_p=0.0):
    """By the words of the definition."""
    order = sorted(row, reverse=True)
    kept = [logit for logit in order if not top_k or logit >= order[min(top_k, len(order)) - 1]]
    total, so_far, least = sum(map(np.exp, kept)), 0.0, -np.inf
    for logit in kept:
        least, so_far = logit, so_far + np.exp(logit) / total
        if so_far >= top_p:
            break
    return [logit >= least and np.exp(logit - order[0]) >= min_p for logit in row]


@pytest.mark.parametrize(
    "filters",
    [
        *FILTERS.values(),
        {"top_k": 3},
        {"top_k": 1},
        {"top_k": 7, "top_p": 0.6},
        {"top_p": 0.3},
        {"top_p": 0.8, "min_p": 0.2},
        {"top_k": 9, "top_p": 0.95, "min_p": 0.02},
    ],
    ids=str,
)
@pytest.mark.parametrize("has_ties", [False, True])
def test_the_least_that_is_kept_is_by_the_definition(filters, has_ties):
    logits = 2 * np.random.default_rng(len(str(filters))).standard_normal((30, 23))
    logits = np.round(logits, 1) if has_ties else logits
    kept = logits >= least_kept(logits, **filters)
    np.testing.assert_array_equal(kept, [kept_one_by_one(row, **filters) for row in logits])


def test_what_rounding_may_change_is_allowed():
    logits = np.log([[0.5, 0.3, 0.2]])
    counts = {p: int((logits >= least_kept(logits, top_p=p)).sum()) for p in (0.49, 0.49995, 0.5, 0.51, 0.79)}
    assert counts == {0.49: 1, 0.49995: 2, 0.5: 2, 0.51: 2, 0.79: 2}
    near = np.array([[1.0, 1.0 - 5e-6, 1.0 - 5e-5]])
    assert (near >= least_kept(near, top_k=1)).tolist() == [[True, True, False]]


def test_places_are_from_0_to_1():
    logits = np.log([[0.1, 0.4, 0.2, 0.3], [0.25, 0.25, 0.25, 0.25]])
    rows = Rows(logits, least_kept(logits, top_p=0.85))
    assert rows._places(logits[:, 1:2]) == pytest.approx([2 / 9, 0.5])
    assert rows._places(logits[:, 2:3]) == pytest.approx([8 / 9, 0.5])


def test_tokens_by_their_probabilities_are_right_and_others_are_not():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((ROWS, WORDS))
    rows = Rows(logits, least_kept(logits))
    drawn = (logits + rng.gumbel(size=logits.shape)).argmax(1)
    assert [*rows.faults(drawn)] == []
    (best,), (worst,) = rows.faults(logits.argmax(1)), rows.faults(logits.argmin(1))
    assert best.startswith("its tokens are not drawn by their probabilities: their mean place is 0.0")
    assert worst.startswith("its tokens are not drawn by their probabilities: their mean place is 1.00")
    few = Rows(logits[:5], least_kept(logits[:5]))
    assert [*few.faults(logits[:5].argmax(1))] == []
    kept = Rows(logits, least_kept(logits, top_k=10))
    outside = int((logits[np.arange(ROWS), drawn] < np.sort(logits, 1)[:, -10]).sum())
    assert outside > 5
    assert next(kept.faults(drawn)) == f"{outside} of 40 tokens are not among those that the filters keep"


@pytest.mark.parametrize(("gap", "count"), [(0.0, 0), (2e-5, 0), (-2e-5, 0), (1e-2, 1)])
def test_ours_are_the_tokens_of_the_reference_but_for_near_ties(gap, count):
    example = example_of("none")
    inputs = draw(example)
    logits, key = np.array(inputs.arrays["logits"]), inputs.arrays["key"]
    noise = np.asarray(gumbel(key_words(key, ROWS), WORDS, jnp.float32))
    expected = (logits + noise).argmax(1)
    tokens = expected.copy()
    tokens[3] = (expected[3] + 1) % WORDS
    logits[3, tokens[3]] = (logits + noise)[3, expected[3]] - noise[3, tokens[3]] - gap
    changed = attrs.evolve(inputs, arrays={**inputs.arrays, "logits": jnp.asarray(logits)})
    for contender in (suite.OURS, "xla"):
        faults = [*check(example, changed, contender, (tokens,), (expected,))]
        assert faults == ["1 of 40 tokens are not the reference's"] * count
    assert [*check(example, changed, "FlashInfer", (tokens,), (expected,))] == []


@pytest.mark.parametrize("tokens", [np.arange(3), np.full(ROWS, WORDS), np.full(ROWS, -1)])
def test_tokens_that_are_no_words_are_wrong(tokens):
    example = example_of("none")
    (fault,) = check(example, draw(example), "peer", (tokens,), (tokens,))
    assert fault == "its tokens are not one word for each row"


@pytest.mark.parametrize("filters", FILTERS)
def test_the_tokens_of_the_operation_pass(filters):
    example = example_of(filters)
    inputs = draw(example)
    tokens = sample_tokens(**example.arguments(0))
    assert [*check(example, inputs, suite.OURS, (tokens,), (tokens,))] == []


# -- peers of JAX ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.7}, {"top_k": 4, "top_p": 0.8}, {"min_p": 0.3}])
def test_peers_of_jax_draw_by_the_definition(filters):
    count, row = 40_000, np.log(np.array([0.3, 0.05, 0.25, 0.08, 0.2, 0.12]) * 7).astype(np.float32)
    logits = jnp.broadcast_to(jnp.asarray(row), (count, 6))
    call = {"logits": jax.ShapeDtypeStruct(logits.shape, jnp.float32), "key": jax.random.key(0), **filters}
    peers = [_sampling_peers.by_sort(call), _sampling_peers.by_categorical(call)]
    (sample,) = filter(None, peers)
    assert (peers[0] is None) == (filters.keys() <= {"min_p"})
    tokens = np.asarray(sample(logits, jax.random.key(1)))
    kept = np.array(kept_one_by_one(row.astype(np.float64), **filters)) * np.exp(row)
    expected = kept / kept.sum()
    frequencies = np.bincount(tokens, minlength=6) / count
    assert (frequencies[expected == 0] == 0).all()
    np.testing.assert_allclose(frequencies, expected, atol=4 * 0.5 / count**0.5)


def test_peers_take_one_number_for_all_rows():
    call = describe(example_of("k50"))
    for name in ("temperature", "return_logprobs"):
        assert all(peer({**call, name: 0.5}) is None for peer in every_peer())
    assert all(peer({**call, "top_k": jax.ShapeDtypeStruct((ROWS,), jnp.int32)}) is None for peer in every_peer())
    both = {**call, "min_p": 0.1}
    assert all(peer(both) is None for peer in every_peer())
    assert _sampling_peers.by_sort({**call, "return_logprobs": False, "top_p": None}) is not None


def every_peer():
    return (_sampling_peers.by_sort, _sampling_peers.by_categorical, _sampling_peers.by_flashinfer,
            _sampling_peers.by_vllm)  # fmt: skip


# -- peers of PyTorch --------------------------------------------------------------------------------------------------


class Tensor(np.ndarray):
    """A NumPy array with as much of PyTorch's interface as the peers use."""

    device = "card"
    is_cuda = False

    def softmax(self, axis):
        weights = np.exp(self - self.max(axis, keepdims=True))
        return weights / weights.sum(axis, keepdims=True)

    def clone(self):
        return self.copy()

    def detach(self):
        return self


def module(monkeypatch, name, **functions):
    stand_in = ModuleType(name)
    stand_in.__dict__.update(functions, __spec__=SimpleNamespace(submodule_search_locations=None))
    monkeypatch.setitem(sys.modules, name, stand_in)


def torch(monkeypatch):
    numbers = {"int32": np.int32, "float32": np.float32}
    full = lambda shape, value, dtype, device: np.full(shape, value, dtype)
    module(monkeypatch, "torch", from_dlpack=lambda array: np.array(array).view(Tensor), full=full, **numbers)


@pytest.mark.parametrize("has_softmax", [False, True])
@pytest.mark.parametrize("filters", FILTERS)
def test_flashinfer_gets_logits_or_probabilities(monkeypatch, filters, has_softmax):
    calls = []

    def from_probabilities(name):
        def function(probabilities, number):
            assert probabilities.sum(1) == pytest.approx(1, abs=1e-5)
            calls.append((name, number))
            return probabilities.argmax(1)

        return function

    def both(logits, top_k, top_p, filter_apply_order):
        calls.append(("both", top_k, top_p, filter_apply_order))
        return logits.argmax(1)

    def sampling_from_logits(logits):
        calls.append(("none",))
        return logits.argmax(1)

    functions = {f"{name}_sampling_from_probs": from_probabilities(name) for name in ("top_k", "top_p", "min_p")}
    functions |= {"softmax": lambda logits: logits.softmax(1)} if has_softmax else {}
    functions |= {"top_k_top_p_sampling_from_logits": both, "sampling_from_logits": sampling_from_logits}
    module(monkeypatch, "flashinfer.sampling", **functions)
    torch(monkeypatch)
    example = example_of(filters)
    peer = _sampling_peers.by_flashinfer(describe(example))
    (result,) = peer.prepared(draw(example), PASSES[0])()
    np.testing.assert_array_equal(result.tensor, example.arguments(0)["logits"].argmax(1))
    assert calls == [
        {
            "none": ("none",),
            "k50": ("top_k", 50),
            "p0.9": ("top_p", 0.9),
            "k50-p0.9": ("both", 50, 0.9, "top_k_first"),
            "m0.05": ("min_p", 0.05),
        }[filters]
    ]
    wide = {**describe(example), "logits": jax.ShapeDtypeStruct((ROWS, WORDS), jnp.bfloat16)}
    assert _sampling_peers.by_flashinfer(wide) is None


@pytest.mark.parametrize("filters", [name for name in FILTERS if name != "m0.05"])
def test_vllm_gets_a_copy_and_numbers_of_rows(monkeypatch, filters):
    calls = []

    def apply_top_k_top_p(logits, k, p):
        calls.append([None if x is None else (x.dtype, x.shape, float(x[0])) for x in (k, p)])
        assert (logits[:, 0] > -1e3).all()  # nothing has been written to them before
        logits[:, 0] = -1e9
        return logits

    def random_sample(probabilities, generators):
        assert probabilities.sum(1) == pytest.approx(1, abs=1e-5)
        assert generators == {}
        return probabilities.argmax(1)

    module(monkeypatch, VLLM_MODULE, apply_top_k_top_p=apply_top_k_top_p, random_sample=random_sample)
    torch(monkeypatch)
    example = example_of(filters)
    inputs = draw(example)
    run = _sampling_peers.by_vllm(describe(example)).prepared(inputs, PASSES[0])
    logits = np.array(inputs.arrays["logits"])
    if filters != "none":
        logits[:, 0] = -1e9
    for _ in range(2):
        np.testing.assert_array_equal(run()[0].tensor, logits.argmax(1))
    k = (np.dtype("int32"), (ROWS,), 50.0) if "k50" in filters else None
    p = (np.dtype("float32"), (ROWS,), pytest.approx(0.9)) if "p0.9" in filters else None
    assert calls == ([] if filters == "none" else [[k, p]] * 2)
    assert _sampling_peers.by_vllm(describe(example_of("m0.05"))) is None


def test_each_peer_that_is_missing_has_its_reason(monkeypatch):
    reasons = {name: peer for name, peer in sampling.peers().items() if isinstance(peer, str)}
    assert reasons == dict.fromkeys((FLASHINFER, VLLM), "there is no NVIDIA GPU")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for installed, flashinfer, vllm in (
        ((), "torch is not installed", "torch is not installed"),
        (("torch",), "flashinfer is not installed", "vllm is not installed"),
        (("torch", "vllm"), "flashinfer is not installed", _sampling_peers.by_vllm),
        (("torch", "flashinfer"), _sampling_peers.by_flashinfer, "vllm is not installed"),
    ):
        monkeypatch.setattr(_sampling_peers, "is_installed", lambda name, installed=installed: name in installed)
        found = sampling.peers()
        assert (found[FLASHINFER], found[VLLM]) == (flashinfer, vllm)


def test_without_a_gpu_only_small_calls_are_measured():
    assert sampling.run().text == f"{OP}: there is no accelerator here; --small measures on the CPU"
