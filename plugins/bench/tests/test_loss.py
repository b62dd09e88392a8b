"""The suite ``loss``: its calls, their work, its bars and memory, and its peers by stand-ins that compute in float64."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import attrs
import click
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_bench import _loss_memory, _loss_peers, _peers, loss, suite
from ejkernel_bench._calls import PASSES, by_core, describe, draw, with_gradients
from ejkernel_bench._figures import Figures
from ejkernel_bench._loss_peers import CHUNKS, LIGER, QUACK, TOKAMAX, XLA
from ejkernel_bench._memory import GIB, planned_bytes, temporary_bytes
from ejkernel_bench._suites import peers_of
from ejkernel_bench._timing import Times
from ejkernel_bench.loss import BOTH, FORWARD, OPERATION, ROWS, SMALL, LossCall
from ejkernel_core import Cost

CALL = SMALL[1]


def in_float64(arrays):
    """The mean loss, its gradients, and the losses and lse of the rows."""
    hidden, weight = (np.asarray(arrays[name], np.float64) for name in ("hidden", "weight"))
    labels, rows = np.asarray(arrays["labels"]), np.arange(len(hidden))
    logits = hidden @ weight
    lse = np.log(np.exp(logits).sum(1))
    losses = lse - logits[rows, labels]
    d_logits = (np.exp(logits - lse[:, None]) - (np.arange(weight.shape[1]) == labels[:, None])) / len(rows)
    return losses.mean(), d_logits @ weight.T, hidden.T @ d_logits, losses, lse


# -- the calls ---------------------------------------------------------------------------------------------------------


def test_small_calls_are_right_and_measured_beside_what_is_here():
    report = loss.run(rounds=1, small=True)
    assert report.faults == ()
    peaks, mean, rows, *_ = report.tables
    assert [row[0] for row in peaks.rows] == [call.name for call in SMALL]
    assert peaks.series == (suite.OURS, XLA, CHUNKS)
    for table, peer in ((mean, CHUNKS), (rows, XLA)):
        cells = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        assert [row[""] for row in cells] == [f"{call.name}, {name}" for call in SMALL for name in PASSES]
        assert all(isinstance(row[name], float) for row in cells for name in (suite.OURS, XLA, peer))
        assert all(row[suite.memory_column(peer)] > 0 for row in cells)
    assert f"not measured: {LIGER}, {QUACK}, {TOKAMAX}" in report.text


def test_parts_and_calls_are_named():
    assert {name: len(calls) for name, calls in loss.named_calls("grid,bars").items()} == {"grid": 18, "bars": 3}
    assert [*loss.named_calls(None)] == ["peaks", "bars"]
    single = {"calls": (LossCall(4096, 2048, 32000),)}
    assert loss.named_calls("none,4096x2048x32000") == {"none": loss.BARS} | single
    with pytest.raises(
        click.UsageError, match="no part or call of loss is named all; there are peaks, bars, grid, none, plans"
    ):
        loss.named_calls("all")


def test_the_work_is_one_product_forward_and_three_with_the_gradients():
    call = LossCall(10, 20, 30)
    forward, both = (loss.work(call.example(), name) for name in PASSES)
    assert (forward.flops, forward.bytes) == (2 * 10 * 20 * 30, 2 * (200 + 600) + 40)
    assert (both.flops, both.bytes) == (3 * forward.flops, 2 * forward.bytes)


def test_heads_of_several_numbers_of_tokens_have_tables_by_tokens():
    calls = [LossCall(40, 8, 130), LossCall(9, 8, 130), LossCall(40, 8, 131), LossCall(5, 8, 130)]
    columns = ("", suite.OURS, suite.COPY, XLA, suite.memory_column(suite.OURS))
    rows = [
        (f"{call.name}, {name}", call.tokens / 2, 9.0, "-", 0.1 * call.tokens) for call in calls[:3] for name in PASSES
    ]
    table = suite.Table("", columns, rows, (suite.OURS, suite.COPY, XLA))
    milliseconds, gib = loss.by_tokens(suite.Report("loss", [table]), calls)
    assert milliseconds.columns == gib.columns == ("tokens", suite.OURS, XLA)
    assert milliseconds.rows == (("9", 4.5, "-"), ("40", 20.0, "-"))
    assert gib.rows == (("9", pytest.approx(0.9), "-"), ("40", pytest.approx(4.0), "-"))
    assert "milliseconds" in milliseconds.title
    assert "8 x 130" in gib.title


def test_the_plan_of_all_logits_grows_and_ours_does_not():
    """Of chunks of 32 MB on a CPU: 40 and 80 MB of logits."""
    table = loss.plans([LossCall(tokens, 4, 20000) for tokens in (500, 1000, 4000)], None)
    assert [row[0] for row in table.rows] == ["500", "1000", "4000"]
    ours, all_logits = ([row[place] for row in table.rows] for place in (1, 2))
    logits = [tokens * 20000 * 4 / 2**20 for tokens in (500, 1000, 4000)]
    assert all(one >= size for one, size in zip(all_logits, logits, strict=True))
    assert ours[2] < 1.1 * ours[1] < 0.5 * logits[2]


@pytest.mark.parametrize(
    ("liger", "xla", "limit", "is_held"),
    [(2.3, 2.2, 1.2, False), (2.3, 2.4, 1.05, True), (2.5, 2.2, 1.2, True), (2.3, None, 1.05, True)],
)
def test_the_bars(liger, xla, limit, is_held):
    seconds = {FORWARD: {suite.OURS: 1.0}, BOTH: {suite.OURS: 2.0, LIGER: liger, XLA: xla}}
    temporaries = {suite.OURS: 1.25 * GIB + 4 * 8 * 130}
    measured = [
        suite.Measurement(
            CALL.example(),
            name,
            Cost(570e12, 0.0),
            Figures({contender: Times([one]) for contender, one in of_pass.items() if one}),
            "",
            temporaries,
        )
        for name, of_pass in seconds.items()
    ]
    product, over_liger, memory = loss.bars(measured, 600e12)
    assert (product.measured, product.is_held) == (pytest.approx(0.95), True)
    assert (over_liger.measured, over_liger.limit) == (pytest.approx(liger / 2), limit)
    assert over_liger.is_held == is_held
    assert (memory.measured, memory.is_held) == (pytest.approx(1.25), False)


# -- peers of JAX ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [suite.OURS, XLA, CHUNKS])
def test_the_mean_and_its_gradients(name):
    example = CALL.example()
    function = by_core(example, None) if name == suite.OURS else _loss_peers.peers()[name](describe(example))
    inputs = draw(example)
    *results, _, _ = in_float64(inputs.arrays)
    others, arrays, (cotangent,) = inputs.parts
    actual = with_gradients(function, inputs.wrt)(others, arrays, (cotangent,))
    expected = (results[0], *(np.asarray(cotangent) * gradient for gradient in results[1:]))
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


def test_the_losses_of_rows_by_xla():
    example = CALL.example(ROWS)
    arrays = draw(example).arrays
    for one, other in zip(_loss_peers.by_xla(describe(example))(**arrays), in_float64(arrays)[3:], strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5)


def test_calls_with_other_arguments_are_not_of_the_peers():
    call = describe(CALL.example())
    for change in ({"z_loss": 1e-4}, {"transpose_weight": True}, {"reduction": "sum"}, {"bias": call["labels"]}):
        assert not any(peer({**call, **change}) for peer in (_loss_peers.by_xla, _loss_peers.by_liger))
    by_row = describe(CALL.example(ROWS))
    assert all(peer(by_row) is None for peer in (_loss_peers.by_chunks, _loss_peers.by_quack, _loss_peers.by_tokamax))


def test_tokamax_itself():
    pytest.importorskip("tokamax")
    pytest.importorskip("absl.flags").FLAGS.mark_as_parsed()
    call = LossCall(1024, 128, 4096, "float32")  # whole chunks: it counts the words of a padded one
    inputs = draw(call.example())
    results = jax.block_until_ready(_loss_peers.by_tokamax(describe(call.example())).prepared(inputs, BOTH)())
    mean, *gradients, _, _ = in_float64(inputs.arrays)
    for one, other in zip(results, (mean, *(float(inputs.cotangents[0]) * one for one in gradients)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


# -- stand-ins ---------------------------------------------------------------------------------------------------------


def module(monkeypatch, name, **functions):
    stand_in = ModuleType(name)
    stand_in.__dict__.update(functions, __spec__=SimpleNamespace(submodule_search_locations=None))
    monkeypatch.setitem(sys.modules, name, stand_in)


class Tensor(np.ndarray):
    """A NumPy array with as much of PyTorch's interface as the peers use."""

    def t(self):
        return self.T

    def long(self):
        return self.astype(np.int64)

    def float(self):
        return self.astype(np.float32)


@pytest.fixture
def given(monkeypatch):
    """The keyword arguments of the calls of stand-ins for Liger, quack and tokamax, which return the mean."""
    calls = []

    def of_torch(hidden, weight, labels, **options):
        calls.append(options)
        assert (weight.shape, labels.dtype) == ((CALL.vocab, CALL.hidden_dim), np.int64)
        return np.asarray(in_float64({"hidden": hidden, "weight": weight.T, "labels": labels})[0]).view(Tensor)

    def of_jax(x, labels, weights, **options):
        calls.append(options)
        return jax.nn.logsumexp(x @ weights, 1).mean() - (x @ weights)[jnp.arange(len(x)), labels].mean()

    module(monkeypatch, "torch")
    module(monkeypatch, "liger_kernel")
    module(monkeypatch, "liger_kernel.transformers")
    module(monkeypatch, "liger_kernel.transformers.functional", liger_fused_linear_cross_entropy=of_torch)
    module(monkeypatch, "quack")
    module(monkeypatch, "quack.linear_cross_entropy", chunked_linear_cross_entropy=of_torch)
    module(monkeypatch, "tokamax", linear_softmax_cross_entropy_loss=of_jax)
    return calls


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (LIGER, {}),
        (QUACK, {"reduction": "mean"}),
        (TOKAMAX, {"reduction": "mean", "implementation": "chunked_xla"}),
    ],
)
def test_peers_are_called_as_their_packages_want_it(given, name, options):
    arrays = draw(CALL.example()).arrays
    peer = _loss_peers.peers()[name](describe(CALL.example()))
    assert peer.tolerance > 0
    tensors = arrays if name == TOKAMAX else {key: np.asarray(one).view(Tensor) for key, one in arrays.items()}
    np.testing.assert_allclose(peer.function(**tensors), in_float64(arrays)[0], rtol=1e-5)
    assert given == [options]


def test_a_quack_that_cannot_be_imported_is_told(given, monkeypatch):
    module(monkeypatch, "quack.linear_cross_entropy")
    reason = _loss_peers.peers()[QUACK]
    assert reason.startswith("quack.linear_cross_entropy: ")
    assert "chunked_linear_cross_entropy" in reason


# -- what does not fit -------------------------------------------------------------------------------------------------


def test_a_peer_that_does_not_fit_is_told_and_not_measured(monkeypatch):
    """The plan of all logits takes more than that of chunks."""
    call = LossCall(3000, 8, 4000, "float32")
    peers = {XLA: _loss_peers.by_xla, CHUNKS: _loss_peers.by_chunks}
    program = _peers.program_of(_loss_peers.by_xla, call.example(), draw(call.example()), BOTH)
    compiled = program.compile()
    monkeypatch.setattr(suite, "memory_limit", lambda: 0.95 * planned_bytes(compiled))
    monkeypatch.setattr(_loss_peers, "CHUNK", 100)
    options = {"examples": [call.example()], "names": {call.name}, "backends": (), "rounds": 1}
    report = suite.run(OPERATION, peers, **options)
    assert report.faults == ()
    row = dict(zip(report.tables[0].columns, report.tables[0].rows[1], strict=True))
    assert row[XLA] == "-"
    assert isinstance(row[CHUNKS], float)
    assert f"{XLA}, {BOTH}, {call.name}: it does not fit: its plan takes" in report.text
    table, (note,) = _loss_memory.peaks([call.example()], peers, None)
    assert note.startswith(f"{XLA}, {call.name}: it does not fit")
    assert dict(zip(table.columns, table.rows[0], strict=True))[XLA] == temporary_bytes(compiled) / GIB


@attrs.frozen
class Failing(_peers.Prepared):
    """It fails with this message."""

    message: str = attrs.field(kw_only=True)

    def prepared(self, inputs, pass_name):
        raise RuntimeError(self.message)


def test_a_call_that_runs_out_of_memory_is_no_wrong_result():
    options = {"examples": [CALL.example()], "names": {CALL.name}, "backends": (), "rounds": 1}
    messages = ("RESOURCE_EXHAUSTED: Out of memory", "INTERNAL: another fault")
    peers = {name: lambda call, name=name: Failing(None, message=name) for name in messages}
    report = suite.run(OPERATION, peers, **options)
    assert len(report.faults) == len(report.text.splitlines()) == len(PASSES)
    assert all(messages[1] in fault for fault in report.faults)
    assert all(messages[0] in line for line in report.text.splitlines())


def test_peaks_are_measured_in_the_order_of_the_plans(monkeypatch):
    """By a device that counts what is in use: what needs less than one before has no peak of its own."""
    used, order = [100, 100], []
    programs = {"a": (300, 70), "b": (200, 40), "c": (250, 30)}

    def contenders_of(example, peers, backend, notes):
        def run(name):
            order.append(name)
            used[1] = max(used[1], used[0] + programs[name][1])
            return ()

        return [
            _loss_memory.Contender(name, example, lambda *_, name=name: run(name), planned, temporaries)
            for name, (planned, temporaries) in programs.items()
        ]

    monkeypatch.setattr(_loss_memory, "contenders_of", contenders_of)
    monkeypatch.setattr(_loss_memory, "bytes_in_use", lambda: used[0])
    monkeypatch.setattr(_loss_memory, "peak_bytes", lambda: used[1])
    table, notes = _loss_memory.peaks([CALL.example()], {}, None)
    assert notes == []
    assert order == ["b", "c", "a"]
    cells = [70 / GIB, pytest.approx(70 / GIB), 40 / GIB, pytest.approx(40 / GIB), 30 / GIB, "< 3.73e-08"]
    assert list(table.rows[0][1:]) == cells


def test_the_operation_has_these_peers():
    assert {XLA, CHUNKS, LIGER, QUACK, TOKAMAX} == {*peers_of(OPERATION)}


def test_without_an_accelerator_it_says_what_to_do():
    assert "--small measures on the CPU" in loss.run().text
