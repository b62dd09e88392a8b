"""Which tests a budget has room for, and what is recorded of their costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.selection import Case, choose, draw, record, recorded, rounded, seconds

SEEDS = [str(number) for number in range(400)]


def cases(
    count: int, price: float, prefix: str = "case", *, is_always: bool = False, is_new: bool = False
) -> list[Case]:
    return [Case(f"{prefix}{number}", price, is_always, is_new) for number in range(count)]


# -- what is chosen --------------------------------------------------------------------------------------------------


def test_a_budget_is_filled_and_not_exceeded() -> None:
    choice = choose([*cases(50, 0.5), *cases(50, 2.0, "dear")], 20.0, "seed")
    assert 19.5 <= choice.seconds <= 20.0
    assert choice.seconds == sum(0.5 if name.startswith("case") else 2.0 for name in choice.names)


def test_the_chance_of_a_case_is_the_inverse_of_its_price() -> None:
    """100 cases of 0.1 s, 30 of 1 s and 20 of 4 s, and a price of 0.6 s for each: 28 s."""
    every = [*cases(100, 0.1, "cheap"), *cases(30, 1.0, "usual"), *cases(20, 4.0, "dear")]
    choices = [choose(every, 40.0, seed) for seed in SEEDS]
    counts = {
        prefix: sum(name.startswith(prefix) for choice in choices for name in choice.names) / len(SEEDS)
        for prefix in ("cheap", "usual", "dear")
    }
    assert counts["cheap"] == 100
    # 10 s are left of 40 for the dear ones if the usual ones take 18 s, and the other way around: 0.6 s each.
    assert counts["usual"] == pytest.approx(18, abs=1.5)
    assert counts["dear"] == pytest.approx(3, abs=0.6)
    chances = [choice.certain for choice in choices]
    assert sum(chances) / len(chances) == pytest.approx(0.6, abs=0.06)


def test_every_case_is_drawn_by_some_seed() -> None:
    every = [*cases(40, 0.1), *cases(10, 5.0, "dear")]
    drawn = [choose(every, 12.0, seed).names for seed in SEEDS]
    assert frozenset().union(*drawn) == {case.name for case in every}


def test_cases_marked_always_run_whatever_they_cost() -> None:
    choice = choose([*cases(9, 2.0, "always", is_always=True), *cases(9, 0.1)], 5.0, "seed")
    assert choice.names == {f"always{number}" for number in range(9)}
    assert choice.seconds == 18


def test_new_cases_take_half_of_the_budget_and_leave_the_rest_to_the_others() -> None:
    new, old = cases(100, 1.0, "new", is_new=True), cases(100, 1.0, "old")
    for seed in SEEDS[:20]:
        names = choose([*old, *new], 20.0, seed).names
        assert sum(name.startswith("new") for name in names) >= 10
        assert sum(name.startswith("old") for name in names) >= 1
    names = choose([*old, *new[:3]], 20.0, "seed").names
    assert {"new0", "new1", "new2"} <= names
    assert len(names) == 20


def test_another_seed_draws_other_cases_and_the_same_seed_the_same() -> None:
    every = cases(100, 1.0)
    assert choose(every, 20.0, "a") == choose(every[::-1], 20.0, "a")
    assert choose(every, 20.0, "a").names != choose(every, 20.0, "b").names
    assert 0 <= draw("seed", "test") < 1


# -- what is recorded ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cost", "before", "expected"),
    [
        (0.0, None, 0.001),
        (0.0033, None, 0.005),
        (0.013, None, 0.01),
        (0.016, None, 0.02),
        (0.33, None, 0.5),
        (7.2, None, 10.0),
        (7000.0, None, 500.0),
        # A price stays until the cost has doubled or halved.
        (0.9, 0.5, 0.5),
        (1.1, 0.5, 1.0),
        (0.26, 0.5, 0.5),
        (0.21, 0.5, 0.2),
        (0.0, 0.002, 0.002),
    ],
)
def test_prices(cost: float, before: float | None, expected: float) -> None:
    assert rounded(cost, before) == expected


def test_a_record_replaces_the_tests_of_the_files_that_have_run(tmp_path: Path) -> None:
    record(tmp_path, {"test_a.py::test_one": ("12", {"x": 0.01, "y": 3.0}), "test_b.py::test_two": ("34", {"": 0.2})})
    record(tmp_path, {"test_a.py::test_one": ("56", {"y": 0.9}), "test_a.py::test_new": ("78", {"": 20.0})})
    assert {name: (costs.source, dict(costs.prices)) for name, costs in recorded(tmp_path).items()} == {
        "test_a.py::test_new": ("78", {"": 20.0}),
        "test_a.py::test_one": ("56", {"y": 1.0}),
        "test_b.py::test_two": ("34", {"": 0.2}),
    }
    assert recorded(tmp_path)["test_a.py::test_one"].price("other") == 1.0


@pytest.mark.parametrize("content", ["", "[]", '{"a": "b"}', '{"a": {"source": "1"}}'])
def test_a_damaged_file_of_costs_ends_the_run(tmp_path: Path, content: str) -> None:
    (tmp_path / "costs.json").write_text(content)
    with pytest.raises(pytest.UsageError, match="costs.json is damaged, so remove it, and make test-long"):
        recorded(tmp_path)


@pytest.mark.parametrize("text", ["nan", "-5", "0", "inf", "many"])
def test_a_budget_is_a_number_of_seconds(text: str) -> None:
    assert seconds("2.5") == 2.5
    with pytest.raises(ValueError, match=text):
        seconds(text)


# -- in pytest -------------------------------------------------------------------------------------------------------

TESTS = """
import time
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range(30))
def test_many(number):
    assert not Path("broken").exists()
    end = time.process_time() + 0.1
    while time.process_time() < end: pass

@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.always), 1, 2, 3])
def test_marked(number): assert number != 2

class TestGroup:
    def test_method(self): ...

@pytest.mark.long
def test_long(): raise AssertionError
"""


@pytest.fixture
def root(tmp_path: Path, pytestconfig: pytest.Config) -> Path:
    """A repository with one package, and this selection."""
    for folder in ("tests", "plugins/one/tests"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "tests" / "__init__.py").touch()
    (tmp_path / "tests" / "selection.py").write_text((pytestconfig.rootpath / "tests" / "selection.py").read_text())
    (tmp_path / "conftest.py").write_text('pytest_plugins = ("tests.selection",)\n')
    (tmp_path / "pyproject.toml").write_text(
        "[tool.pytest.ini_options]\naddopts = ['--import-mode=importlib']\nmarkers = ['long']\npythonpath = ['.']\n"
    )
    (tmp_path / "plugins/one/tests/test_one.py").write_text(TESTS)
    return tmp_path


def run(root: Path, *words: str) -> tuple[set[str], str]:
    """The tests that have run, and the output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-v", "-m", "not long", "-p", "no:cacheprovider", *words]
    process = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in process.stdout.splitlines() if "::" in line and (" PASSED" in line or " FAILED" in line)]
    words_of = (line.replace("PASSED", "").replace("FAILED", "").split() for line in lines)
    return {next(word for word in words if "::" in word).rpartition("py::")[2] for words in words_of}, process.stdout


def test_costs_are_recorded_and_a_budget_is_filled_by_them(root: Path) -> None:
    every, output = run(root, "--record-costs", "-n", "2")
    assert len(every) == 35, output
    entries = json.loads((root / "plugins/one/tests/costs.json").read_text())
    assert set(entries) == {"test_one.py::test_many", "test_one.py::test_marked", "test_one.py::TestGroup::test_method"}
    assert set(entries["test_one.py::test_many"]["cases"]) == {"0.1"}
    drawn, output = run(root, "--budget", "1.05", "-n", "2")
    assert sum(name.startswith("test_many") for name in drawn) in (9, 10), output
    assert {"test_marked[0]", "test_marked[2]", "TestGroup::test_method"} <= drawn
    line = next(line for line in output.splitlines() if "the same again" in line)
    seed = line.rpartition("=")[2]
    assert line.startswith(f"{len(drawn)} of 35 cases, 1 of 3 s; those of up to 0.0")
    # The same seed draws the same, whatever the sources are; without it, other sources draw others.
    (root / "tests" / "more.py").write_text("a = 1\n")
    assert run(root, "--budget", "1.05", f"--seed={seed}")[0] == drawn
    assert run(root, "--budget", "1.05")[0] != drawn
    # An edited test comes first, and the summary says what has no room.
    file = root / "plugins/one/tests/test_one.py"
    file.write_text(file.read_text().replace("+ 0.1", "+ 0.1 + 0"))
    drawn, output = run(root, "--budget", "0.41", f"--seed={seed}")
    assert sum(name.startswith("test_many") for name in drawn) >= 2
    assert "cases that are new or edited are not here" in output


def test_a_failed_case_says_how_often_it_is_drawn(root: Path) -> None:
    run(root, "--record-costs")
    (root / "broken").touch()
    output = run(root, "--budget", "1.05")[1]
    assert "has this case: mark it always" in output


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "two workers"])
def test_no_case_begins_after_the_time_is_over(root: Path, workers: tuple[str, ...]) -> None:
    drawn, output = run(root, "--until=1000", *workers)
    assert not drawn
    assert "the time was over: 35 cases did not begin" in output
    drawn, output = run(root, "--until=1e12", *workers)
    assert len(drawn) == 35, output
    assert "did not begin" not in output
