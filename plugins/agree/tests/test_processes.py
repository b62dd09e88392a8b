"""Three processes of one program, with two devices each: they choose alike, fail together, and never wait without end.

Each scenario is a function of ``program.py``.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


processes = load("processes")


def results(scenario: str, wait_s: float = 60.0) -> list[Any]:
    """What each process returns from the scenario."""
    return [process["result"] for process in processes.run(scenario, wait_s=wait_s)]


def errors(outcomes: list[Any]) -> list[str]:
    return [outcome["error"] for outcome in outcomes]


def spread(outcomes: list[Any]) -> float:
    """The seconds between the first and the last of these outcomes."""
    times = [outcome["at"] for outcome in outcomes]
    return max(times) - min(times)


def test_processes_that_would_choose_differently_run_the_same() -> None:
    """Three shapes, jitted: each process would have taken another factor, and the sum over all is right."""
    each = results("differ")
    assert [[outcome["value"] for outcome in one["results"]] for one in each] == [[1.0] * 3] * 3
    assert {one["origin"] for one in each} == {"policy of factor 1"}
    assert {one["note"] for one in each} == {"process 0 has chosen for processes 0, 1 and 2"}


@pytest.mark.long
def test_a_program_of_some_processes_is_settled_among_them() -> None:
    each = results("subset")
    assert [one["alone"]["value"] for one in each] == [1.0, 2.0, 3.0]
    assert [one["pair"] and one["pair"]["value"] for one in each] == [None, 2.0, 2.0]
    assert [one["all"]["value"] for one in each] == [1.0, 1.0, 1.0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("scenario", "absent", "factors"), [("first_never_comes", 0, {2, 3}), ("last_never_comes", 2, {1})]
)
def test_a_process_that_never_comes_costs_one_wait(scenario: str, absent: int, factors: set[int]) -> None:
    each = [outcomes for rank, outcomes in enumerate(results(scenario, wait_s=2.0)) if rank != absent]
    for number in (0, 1):
        (factor,) = {outcomes[number]["value"] for outcomes in each}
        assert factor in factors
    # A process that comes a little later waits a little less.
    assert 2 <= max(first["seconds"] for first, _ in each) < 10
    assert max(second["seconds"] for _, second in each) < 2


@pytest.mark.long
def test_a_failure_of_the_first_is_one_of_all() -> None:
    for first, second in results("first_raises"):
        assert (first["error"], second["error"]) == ("NoConfig", "NoConfig")
        assert "no configuration is remembered for scale(x=float32[24])" in first["text"]
        assert second["text"].startswith("process 0: ")


@pytest.mark.long
@pytest.mark.parametrize(
    ("scenario", "error", "words"),
    [
        ("last_has_no_kernel", "NoKernel", ["no kernel can do", "its driver is too old"]),
        (
            "one_refuses",
            "Disagreement",
            ["process 0 has chosen scale.two", "process 1 cannot run: scale.two", "no driver"],
        ),
        ("versions", "Disagreement", ["process 0 has chosen", "with scale.one 3. Process 2 has scale.one 4: install"]),
    ],
)
def test_a_process_that_cannot_obey_is_a_failure_of_all(scenario: str, error: str, words: list[str]) -> None:
    outcomes = results(scenario)
    assert errors(outcomes) == [error] * 3
    assert [word for word in words for outcome in outcomes if word not in outcome["text"]] == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("scenario", "wait_s"), [("first_is_late", 60), ("last_is_late", 60), ("later_than_the_wait", 2)]
)
def test_a_late_process_runs_what_the_others_run(scenario: str, wait_s: float) -> None:
    (factor,) = {outcome["value"] for outcome in results(scenario, wait_s)}
    assert factor in ({2, 3} if scenario == "later_than_the_wait" else {1})


@pytest.mark.long
def test_a_program_that_would_hang_does_not() -> None:
    """By itself, process 0 would run a collective more than the others, and all would wait for each other."""
    assert [outcome["value"] for outcome in results("collective")] == [5.0] * 3


@pytest.mark.long
@pytest.mark.parametrize(
    ("scenario", "words"),
    [("scopes", "budget_s of policy_override (7"), ("renewed_by_some", "renew() (1 there, 0 here)")],
)
def test_processes_in_other_circumstances_raise_after_the_wait(scenario: str, words: str) -> None:
    outcomes = results(scenario, wait_s=3.0)
    assert errors(outcomes) == ["Disagreement"] * 3
    assert any(words in outcome["text"] for outcome in outcomes)


@pytest.mark.long
def test_renewed_choices_are_new() -> None:
    assert results("renewed") == [[1.0, 1.0, 10.0]] * 3


@pytest.mark.long
def test_threads_of_all_processes_choose_alike() -> None:
    each = results("threads")
    assert [one["value"] for one in each] == [1.0] * 3
    assert {choice.get("value") for one in each for choice in one["choices"]} == {1}


@pytest.mark.long
def test_one_process_measures_and_the_others_wait_and_store_nothing() -> None:
    each = results("tuned")
    assert [one["measured"] for one in each] == [2, 0, 0]
    assert [one["stored"] > 0 for one in each] == [True, False, False]
    assert [one["local"] for one in each] == ["memory", "heuristic", "heuristic"]
    assert {one[name]["value"] for one in each for name in ("first", "eager", "other")} == {1.0}


@pytest.mark.long
def test_without_the_plugin_nothing_is_measured_and_only_what_is_the_same_everywhere_counts() -> None:
    for rank, one in enumerate(results("without_the_plugin")):
        assert one["factors"] == [100.0, 100.0, 100.0, 7.0]
        assert (one["alone"], one["measured"]) == (rank + 1, 0)
        (text,) = one["warnings"]
        assert "processes 0, 1 and 2 have to choose alike" in text
        assert "'pip install ejkernel-agree', for all of them" in text


@pytest.mark.long
def test_the_processes_are_known_however_the_mesh_is_given() -> None:
    each = results("meshes")
    assert [sorted(set(factors.values())) for factors in each] == [[1.0]] * 3, each


@pytest.mark.long
def test_attention_and_a_norm_with_their_gradients_are_right() -> None:
    each = results("attention")
    assert max(one["error"] for one in each) < 1e-4
    (plan,) = {one["plan"] for one in each}
    assert "q_block=16" in plan
