"""The records that the examples of benchmarks leave: which calls, and the files."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest

from ejkernel_bench import records
from ejkernel_cache import PackagedRecords
from ejkernel_core import Registry, registry
from ejkernel_ops.flash_attention.sizes import self_attention

TINY = self_attention(1, 64, 2, 16)
LONGER = self_attention(1, 300, 2, 16)
QKV = ("query", "key", "value")


@pytest.mark.parametrize(
    ("options", "gradients"),
    [
        ({}, [QKV]),
        ({"sequences": 3}, [QKV]),
        ({"sinks": True}, [QKV, (*QKV, "softmax_aux")]),
        ({"bias": True}, [QKV, (*QKV, "bias")]),
    ],
    ids=["plain", "packed", "sinks", "bias"],
)
def test_the_calls_of_an_example_have_the_gradients_of_all_arrays_too(options, gradients) -> None:
    forward, *backward = records.calls_of(self_attention(1, 64, 2, 16, **options))
    assert forward.op == "flash_attention"
    assert [inv["wrt"] for inv in backward] == gradients


def test_records_are_written_to_the_folder_and_not_measured_again(monkeypatch, tmp_path: Path, ejkernel) -> None:
    monkeypatch.setattr(records, "benchmark_examples", lambda operation: [TINY, LONGER])
    command = ["records", str(tmp_path), "flash_attention", "--seconds", "20", "--part", "1/2"]
    code, printed, _ = ejkernel(*command)
    assert code == 0
    assert f"1 of 1: flash_attention {TINY.name}" in printed
    assert LONGER.name not in printed
    assert "checked against flash_attention_bwd.reference" in printed
    assert len(registry.memory) == 0
    files = sorted(tmp_path.glob("*/*.jsonl"))
    assert [file.name for file in files] == ["flash_attention.jsonl", "flash_attention_bwd.jsonl"]
    lines = [file.read_text().splitlines() for file in files]
    assert list(map(len, lines)) == [2, 2]  # of the call, and of its bucket
    # Of other software, and of another call.
    other_software, other_call = json.loads(lines[0][0]), json.loads(lines[0][0])
    other_software["provenance"]["software"]["jax"] = "0.0.1"
    other_call["problem"]["operation"][1] = 7
    others = [json.dumps(document) for document in (other_software, other_call)]
    files[0].write_text("\n".join([*lines[0], *others]) + "\n")
    code, printed, _ = ejkernel(*command)
    assert code == 0
    assert "checked against" not in printed
    assert set(files[0].read_text().splitlines()) == {*lines[0], *others}
    fresh = Registry(plugins="ejkernel-ops,ejkernel-xla")
    fresh.register(PackagedRecords(tmp_path), "packaged")
    for example in (TINY, LONGER):
        query = jax.ShapeDtypeStruct(example.arguments(0)["query"].shape, example.dtype)
        choice = fresh.plan("flash_attention", query, query, query, causal=True).choice
        is_recorded = choice.origin.startswith("packaged records") and choice.distance == 0
        assert is_recorded == (example is TINY)  # the other one is of the other part


def test_every_operation_with_examples_is_measured(monkeypatch, tmp_path: Path, ejkernel) -> None:
    operations = []
    monkeypatch.setattr(records, "benchmark_examples", lambda operation: operations.append(operation) or [])
    assert ejkernel("records", str(tmp_path))[0] == 0
    assert {"flash_attention", "rms_norm"} <= {*operations}


def test_a_call_that_cannot_be_measured_is_a_failure(monkeypatch, tmp_path: Path, ejkernel) -> None:
    monkeypatch.setattr(records, "benchmark_examples", lambda operation: [TINY])
    assert ejkernel("records", str(tmp_path), "flash_attention", "--seconds", "0.001")[0] == 1


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["records", "FOLDER", "flash_atention"], 2, "flash_atention"),
        (["records", "FOLDER", "--part", "3/2"], 2, "a part is I/N, as 2/3 for the second of three; got '3/2'"),
        (["records", "FOLDER", "--seconds", "0"], 2, "--seconds"),
        (["records", "FILE/folder"], 1, "Not a directory; name a folder that can be written"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, ejkernel, words, code, message) -> None:
    (tmp_path / "file").write_text("")
    places = {"FOLDER": str(tmp_path), "FILE/folder": str(tmp_path / "file/folder")}
    exit_code, _, error = ejkernel(*(places.get(word, word) for word in words))
    assert exit_code == code
    assert message in error
    assert error.count("\n") == 1
