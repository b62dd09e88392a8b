"""``ejkernel bench OPERATION --shape``: the calls that words describe, drawn, measured and drawn as a picture."""

from __future__ import annotations

import doctest
import json

import jax
import numpy as np
import pytest

from ejkernel_bench import _attention, _calls_of_words
from ejkernel_bench._calls import PASSES, describe
from ejkernel_bench._calls_of_words import examples_of
from ejkernel_bench._suites import peers_of
from ejkernel_cli import Failure
from ejkernel_core import registry

ATTENTION = ("--causal", "--dtype", "float32")


def test_doctests():
    results = doctest.testmod(_calls_of_words)
    assert results.attempted
    assert not results.failed


def test_each_shape_is_a_call_with_all_other_words():
    words = ["--shape", "1x20x2x16", *ATTENTION, "--key", "1x24x1x16", "--value", "1x24x1x16", "--shape=2x20x2x16"]
    with pytest.raises(Failure, match="batch"):  # the keys have another batch than the second shape
        examples_of("flash_attention", words)
    (example,) = examples_of("flash_attention", words[:-1])
    assert example.name == "1x20x2x16 float32, key 1x24x1x16, value 1x24x1x16, causal"
    assert (example.op, example.dtype, example.wrt) == ("flash_attention", "float32", ("query", "key", "value"))
    arguments = example.arguments(0)
    assert {name: array.shape for name, array in arguments.items() if name != "causal"} == {
        "query": (1, 20, 2, 16),
        "key": (1, 24, 1, 16),
        "value": (1, 24, 1, 16),
    }
    assert arguments["causal"] is True
    assert not np.allclose(arguments["key"], arguments["value"])
    assert 0.5 < np.std(arguments["query"]) < 2


@pytest.mark.long
def test_boundaries_are_drawn_in_order():
    words = ["--shape", "20x2x16", *ATTENTION, "--cum-seqlens-q", "4", "--cum-seqlens-k", "4"]
    (example,) = examples_of("flash_attention", words)
    boundaries = np.asarray(example.arguments(0)["cum_seqlens_q"])
    assert (boundaries[0], boundaries[-1]) == (0, 20)
    assert (np.diff(boundaries) >= 0).all()
    assert "cum_seqlens_q" not in example.wrt
    registry.call("flash_attention", **example.arguments(0), validate=True)


def test_a_backward_operation_is_measured_forward_alone():
    (example,) = examples_of(
        "rms_norm_bwd", ["--shape", "8x32", "--dtype", "float32", "--wrt", "x,weight", "--weight", "32"]
    )
    assert example.wrt == ()


def test_what_the_operation_refuses_is_told_in_its_words():
    with pytest.raises(Failure) as failure:
        examples_of("flash_attention", ["--shape", "1x8x6x16", "--key", "1x8x4x16"])
    assert failure.value.message == (
        "flash_attention: query: heads must be a multiple of kv_heads, which is 4 in key; got 6"
    )


def test_peers_are_those_of_the_suite_of_the_operation():
    assert "jax.nn" in peers_of("flash_attention")
    assert {"XLA", "torch", "Liger"} == {*peers_of("rms_norm")} == {*peers_of("layer_norm")}
    assert {"FA3", "gather"} < {*peers_of("ragged_paged_attention")}
    assert peers_of("context_attention") == peers_of("nothing") == {}


@pytest.mark.parametrize(
    ("words", "is_taken"),
    [
        ([], True),
        pytest.param(["--causal"], True, marks=pytest.mark.long),
        (["--causal", "--key", "1x24x2x16", "--value", "1x24x2x16"], False),  # aligned in another way
        (["--sliding-window", "4,0"], False),
        (["--logits-soft-cap", "0.5"], False),
    ],
)
def test_jax_nn_takes_what_it_computes_alike(words, is_taken):
    (example,) = examples_of("flash_attention", ["--shape", "1x20x2x16", "--dtype", "float32", *words])
    peer = _attention.by_jax_nn(describe(example))
    assert (peer is not None) == is_taken
    if peer is not None:
        arguments = example.arguments(0)
        arrays = {name: array for name, array in arguments.items() if isinstance(array, jax.Array)}
        expected = registry.call("flash_attention", **arguments, backend="reference")
        np.testing.assert_allclose(peer(**arrays), expected, atol=1e-5)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_peers_of_norms_take_what_they_compute_alike(name):
    peer = peers_of(name)["XLA"]
    for words in ([], ["--weight", "32"], ["--residual", "8x32", "--weight", "32"]):
        (example,) = examples_of(name, ["--shape", "8x32", "--dtype", "float32", *words])
        arguments = example.arguments(0)
        expected = registry.call(name, **arguments, backend="reference")
        results = peer(describe(example))(**arguments)
        assert all(
            np.allclose(result, right, atol=1e-5)
            for result, right in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True)
        )
    for words in (["--bias", "32"], ["--weight", "32", "--weight-offset", "1.0"]):
        (example,) = examples_of(name, ["--shape", "8x32", "--dtype", "float32", *words])
        assert peer(describe(example)) is None


def test_an_operation_is_measured_at_given_shapes(ejkernel, tmp_path):
    file = tmp_path / "report.json"
    words = ["--shape", "1x20x2x16", "--shape", "1x24x2x16", *ATTENTION]
    code, output, error = ejkernel(
        "bench", "flash_attention", *words, "--peers", "--backend", "xla", "--rounds", "1", "--json", str(file)
    )
    assert (code, error) == (0, "")
    (report,) = json.loads(file.read_text())
    assert report["faults"] == []
    (table,) = report["tables"]
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    names = [f"1x{length}x2x16 float32, causal, {name}" for length in (20, 24) for name in PASSES]
    assert [row[""] for row in rows] == names
    for row in rows:
        assert isinstance(row["jax.nn"], float)
        assert f"  {row['']}: ejkernel " in output  # the line that was printed when it was measured


def test_kernels_are_measured_by_name(ejkernel):
    words = ["--shape", "1x20x2x16", *ATTENTION, "--rounds", "1"]
    code, output, _ = ejkernel("bench", "flash_attention", *words, "--kernels", "reference")
    assert code == 0
    header = next(line for line in output.splitlines() if "of copy rate" in line).split()
    assert header[-4:] == ["range", "reference", "range", "kernels"]
    assert "xla" not in header


def test_a_call_on_pages_is_measured_beside_the_peers_of_its_suite(ejkernel, tmp_path):
    words = ["--shape", "3x4x16", "--sequences", "3", "--cached", "40", "--page-size", "8", "--kv-heads", "2"]
    file = tmp_path / "report.json"
    options = ["--dtype", "float32", "--kernels", "xla", "--peers", "--rounds", "1", "--json", str(file)]
    code, output, _ = ejkernel("bench", "ragged_paged_attention", *words, *options)
    assert code == 0
    assert "FA3 is not measured: there is no NVIDIA GPU" in output
    (table,) = json.loads(file.read_text())[0]["tables"]
    row = dict(zip(table["columns"], table["rows"][0], strict=True))
    assert all(isinstance(row[name], float) for name in ("ejkernel", "xla", "gather"))


def test_a_wrong_peer_is_a_fault(ejkernel, monkeypatch):
    from ejkernel_bench import flash_attention

    by_jax_nn = _attention.by_jax_nn
    scaled = lambda arguments: lambda **arrays: 1.01 * by_jax_nn(arguments)(**arrays)
    monkeypatch.setattr(flash_attention, "peers", lambda: {"jax.nn": scaled})
    words = ["--shape", "1x20x2x16", *ATTENTION, "--peers", "--backend", "xla", "--rounds", "1"]
    code, output, _ = ejkernel("bench", "flash_attention", *words)
    assert code == 1
    assert "WRONG: jax.nn, forward, 1x20x2x16 float32, causal: out" in output


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["flash_atention", "--shape", "1x20x2x16"], 2, "flash_attention"),
        (["flash_attention", "--shape", "1x20x2"], 1, "query"),
        (["flash_attention", "--shape", "1x20x2x16", "--casual"], 2, "did you mean --causal?"),
        (["flash_attention", "--shape"], 2, "--shape takes a value"),
        (["rms_norm", "--shape", "8x8", "--backend", "zz"], 2, "no backend 'zz' of 'rms_norm' is installed"),
        (
            ["flash_attention", "--shape", "1x20x2x16", "--kernels", "xla,zz"],
            2,
            "--kernels: flash_attention has no zz; it",
        ),
        (["rms_norm", "--kernels", "xla"], 2, "rms_norm chooses its kernels itself; --kernels is for decode"),
        (["flash_attention", "--causal", "--shape="], 2, "--shape takes a value"),
        (["flash_attention", "--shape", "1x20x2x16", "--small"], 2, "--small is for suites"),
        (["flash_attention", "--shape", "1x20x2x16", "--backend", "tritn"], 2, "did you mean 'triton'?"),
    ],
)
def test_bad_words_are_one_line(ejkernel, words, code, message):
    exit_code, output, error = ejkernel("bench", *words)
    assert exit_code == code
    assert message in error + output
    assert error.count("\n") <= 1
