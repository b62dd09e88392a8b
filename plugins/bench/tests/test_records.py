"""The records that a benchmark's calls leave."""

from __future__ import annotations

from pathlib import Path

import attrs
import jax
import pytest

from ejkernel_bench import flash_attention, hopper, records
from ejkernel_bench._problem import Problem
from ejkernel_cache import PackagedRecords
from ejkernel_core import Registry, registry

TINY = Problem(1, 64, 2, 16)


def test_every_problem_that_is_measured_is_there_once() -> None:
    every = {*flash_attention.ANCHORS, *flash_attention.MORE, *hopper.MORE, *hopper.ALONE}
    assert len(records.PROBLEMS) == len(every)
    assert {*records.PROBLEMS} == every


@pytest.mark.parametrize(
    ("more", "gradients"),
    [
        ({}, [("query", "key", "value")]),
        ({"sequences": 3}, [("query", "key", "value")]),
        ({"sinks": True}, [("query", "key", "value"), ("query", "key", "value", "softmax_aux")]),
        ({"bias": True}, [("query", "key", "value"), ("query", "key", "value", "bias")]),
    ],
)
def test_a_problem_is_called_for_the_gradients_of_all_and_without_those_of_extras(more, gradients) -> None:
    forward, *backward = records.calls_of(attrs.evolve(TINY, **more))
    assert forward.op == "flash_attention"
    assert [inv["wrt"] for inv in backward] == gradients


def test_what_was_measured_is_kept_in_the_folder_and_not_measured_again(monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr(records, "PROBLEMS", (TINY, attrs.evolve(TINY, length=300)))
    command = [str(tmp_path), "--seconds", "20", "--part", "1/2"]
    assert records.main(command) == 0
    told = capsys.readouterr().out
    assert told.count(str(TINY)) == 2  # forward and backward
    assert "checked against flash_attention_bwd.reference" in told
    assert len(registry.memory) == 0
    assert records.main(command) == 0
    assert capsys.readouterr().out == ""
    fresh = Registry(plugins="ejkernel-ops,ejkernel-xla")
    fresh.register(PackagedRecords(tmp_path), "kept")
    for problem in records.PROBLEMS:
        query = jax.ShapeDtypeStruct(problem.shape, problem.dtype)
        plan = fresh.plan("flash_attention", query, query, query, **problem.options)
        assert plan.origin.startswith("packaged records")
        assert (plan.choice.distance == 0) == (problem == TINY)  # the other is of the other part


def test_what_could_not_be_measured_is_told(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(records, "PROBLEMS", (TINY,))
    assert records.main([str(tmp_path), "--seconds", "0.001"]) == 1
