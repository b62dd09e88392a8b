"""That every record can be read, says how it was found, and answers for the call that was measured."""

from __future__ import annotations

import json
from collections import Counter
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import attrs
import pytest

import ejkernel_core
import ejkernel_tuned_h200
from ejkernel_bench._problem import Problem
from ejkernel_bench.records import PROBLEMS, calls_of
from ejkernel_core import Candidate, Choice, Invocation
from ejkernel_core._choice import candidates_for
from ejkernel_cudnn.flash_attention import library
from ejkernel_triton.launch import _jax_triton

FILES = sorted(Path(ejkernel_tuned_h200.__file__).parent.rglob("*.jsonl"))
RECORDS: list[dict[str, Any]] = [json.loads(line) for file in FILES for line in file.read_text().splitlines()]
#: The heuristic's choice stays unless another is so much faster.
USUAL = 1.02


@pytest.fixture(autouse=True)
def all_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are where the records were made, whatever is installed here."""
    monkeypatch.setattr(_jax_triton, "version", lambda: (0, 4, 1))
    monkeypatch.setattr(_jax_triton, "why_no_descriptors", lambda: None)
    monkeypatch.setattr(library, "_library", lambda: (None, None))
    monkeypatch.setattr(library, "_too_wide", lambda *given: None)


def on_h200(problem: Problem) -> list[Invocation]:
    card = {"platform": "gpu", "device_kind": "NVIDIA H200", "compute_capability": (9, 0)}
    return [attrs.evolve(inv, **card) for inv in calls_of(problem)]


def answer(inv: Invocation, **software: str) -> tuple[Choice | None, list[Candidate]]:
    candidates, _ = candidates_for(inv, ejkernel_core.registry.kernels(inv.op)[0], None, None)
    candidates = [attrs.evolve(candidate, software={**candidate.software, **software}) for candidate in candidates]
    return ejkernel_tuned_h200.records.select_config(inv, candidates), candidates


def test_it_is_found_as_a_policy() -> None:
    (found,) = entry_points(group="ejkernel.policies", name="tuned_h200")
    assert found.load() is ejkernel_tuned_h200.records


def test_every_record_says_how_it_was_found() -> None:
    assert [file.stem for file in FILES] == ["flash_attention", "flash_attention_bwd"]
    assert len(RECORDS) >= 150
    for record in RECORDS:
        op, _, backend = record["kernel"].rpartition(".")
        provenance = record["provenance"]
        assert record["problem"]["device"] == ["gpu", "NVIDIA H200"]
        assert provenance["device"].startswith("NVIDIA H200 (cuda ")
        assert {"triton", "xla"} <= {*provenance["backends"]}
        arguments = record["problem"].get("arguments") or record["problem"]["bucket"]
        assert ("gluon_sm90" in provenance["backends"]) == ("bias" not in arguments)
        versions = {"jax", "jaxlib", "triton", "jax-triton", *(f"{op}.{each}" for each in provenance["backends"])}
        assert {*provenance["software"]} == versions
        times = {tried: took for tried, took in provenance["tried"] if isinstance(took, float)}
        mine = [took for tried, took in times.items() if tried.startswith(f"{backend} ")]
        assert provenance["milliseconds"] in mine
        assert 0 < provenance["milliseconds"] <= USUAL * min(times.values())


def test_no_two_records_answer_the_same_call() -> None:
    """As when a problem is measured again, another kernel wins, and the record of the one before stays."""
    calls = Counter(
        json.dumps([record["problem"], record["provenance"]["software"]["triton"]], sort_keys=True)
        for record in RECORDS
    )
    assert [call for call, count in calls.items() if count > 1] == []


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_what_was_measured_is_answered(problem: Problem) -> None:
    for inv in on_h200(problem):
        choice, candidates = answer(inv)
        assert choice is not None
        assert choice.origin.startswith("packaged records")
        (chosen,) = (candidate for candidate in candidates if candidate.backend == choice.backend)
        assert isinstance(choice.cfg, chosen.config_type)


@pytest.mark.parametrize(("version", "backend"), [("3.6.0", "cudnn"), ("3.9.0", "gluon_sm90")])
@pytest.mark.parametrize("length", [4096, 8192, 16384])
def test_wide_heads_go_backward_by_cudnn_unless_tritons_compiler_is_new(
    version: str, backend: str, length: int
) -> None:
    forward, backward = (answer(inv, triton=version)[0] for inv in on_h200(Problem(1, length, 16, 256, "bfloat16")))
    assert forward.backend == "gluon_sm90"
    assert backward.backend == backend


def test_cudnn_is_not_taken_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_library", lambda: "not here")
    _, backward = on_h200(Problem(1, 8192, 16, 256, "bfloat16"))
    choice, _ = answer(backward, triton="3.6.0")
    # What was the fastest with another version of Triton, and cuDNN slower.
    assert (choice.backend, choice.distance) == ("gluon_sm90", 0)
    assert "triton was 3.9.0, is 3.6.0" in choice.note


def test_a_call_of_a_similar_size_is_answered_and_one_on_another_card_is_not() -> None:
    problem = Problem(3, 3800, 16, 128, "bfloat16")
    assert [answer(inv)[0].backend for inv in on_h200(problem)] == ["gluon_sm90", "gluon_sm90"]
    assert [answer(inv)[0].distance for inv in on_h200(problem)] == [0.0, 0.0]
    for inv in on_h200(problem):
        assert answer(attrs.evolve(inv, device_kind="NVIDIA H100 80GB HBM3"))[0] is None
        assert answer(attrs.evolve(inv, platform="cpu", device_kind="cpu", compute_capability=None))[0] is None


def test_where_the_winner_cannot_run_the_record_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_jax_triton, "version", lambda: (0, 3, 1))
    for inv in on_h200(PROBLEMS[0]):
        choice, candidates = answer(inv)
        assert choice is None
        assert "gluon_sm90" not in [candidate.backend for candidate in candidates]
