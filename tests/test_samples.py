"""The marker ``sample``: a few cases of a test stay quick, and the long sweep has the others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

NUMBERS = list(range(40))

@pytest.mark.sample(3)
@pytest.mark.parametrize("number", NUMBERS)
def test_many(number): ...

@pytest.mark.sample(3)
@pytest.mark.parametrize("number", NUMBERS)
def test_others(number): ...

@pytest.mark.sample(3)
@pytest.mark.parametrize("number", [0, 1])
def test_few(number): ...

@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "number", [*(pytest.param(n, marks=pytest.mark.long) for n in range(20)), pytest.param(20, marks=pytest.mark.gpu), 21]
)
def test_marked(number): ...

@pytest.mark.parametrize("number", ["own", *(pytest.param(n, marks=pytest.mark.sample(2)) for n in range(20))])
def test_some(number): ...

@pytest.mark.parametrize("number", NUMBERS)
def test_whole(number): ...
"""


def selected(root: Path, expression: str) -> dict[str, set[str]]:
    """The cases that pytest selects by their markers, by test."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", expression]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    process = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    cases: dict[str, set[str]] = {}
    for line in process.stdout.splitlines():
        if "::" in line:
            test, _, case = line.partition("::")[2].partition("[")
            cases.setdefault(test, set()).add(case.rstrip("]"))
    return cases


def test_a_sample_is_quick_and_all_other_cases_are_long(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    # Only the options of pytest, because the rest of the file imports the real packages.
    _, start, options = (pytestconfig.rootpath / "conftest.py").read_text().partition("def pytest_addoption")
    (tmp_path / "conftest.py").write_text(f"import hashlib\n\nimport pytest\n\n\n{start}{options}")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    long\n    gpu\n    sample(count)\n")
    file = tmp_path / "test_numbers.py"
    file.write_text(TESTS)
    quick, long = selected(tmp_path, "not long and not gpu"), selected(tmp_path, "long")
    numbers = set(map(str, range(40)))
    assert {test: len(cases) for test, cases in quick.items()} == {
        "test_many": 3,
        "test_others": 3,
        "test_few": 2,
        "test_marked": 1,
        "test_some": 3,
        "test_whole": 40,
    }
    assert quick["test_marked"] == {"21"}
    assert "own" in quick["test_some"]
    assert quick["test_many"] != quick["test_others"]
    assert long == {
        "test_many": numbers - quick["test_many"],
        "test_others": numbers - quick["test_others"],
        "test_marked": set(map(str, range(20))),
        "test_some": set(map(str, range(20))) - quick["test_some"],
    }
    # The names decide, in any order.
    file.write_text(TESTS.replace("list(range(40))", "list(range(40))[::-1]"))
    assert selected(tmp_path, "not long and not gpu") == quick
