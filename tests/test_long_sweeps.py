"""Which long sweeps run: those that depend on a change. A wrong record is found by the sample of one tenth."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tests.selection import draw

#: A repository of a core, an operation, a kernel for CPUs, one for GPUs, and packages that the latter depends on.
FILES = {
    "pyproject.toml": (
        "[tool.pytest.ini_options]\naddopts = ['--import-mode=importlib']\nmarkers = ['long', 'gpu']\npythonpath = ['.']\n"
    ),
    "ejkernel_core/__init__.py": "",
    "tests/test_core.py": "def test_quick(): ...",
    "plugins/ops/pyproject.toml": '[project.entry-points."ejkernel.operations"]\n"square" = "ejkernel_ops:square"',
    "plugins/ops/ejkernel_ops/__init__.py": "import ejkernel_core",
    "plugins/ops/tests/test_ops.py": "import ejkernel_ops",
    "plugins/plain/pyproject.toml": '[project.entry-points."ejkernel.kernels"]\n"square.plain" = "ejkernel_plain"',
    "plugins/plain/ejkernel_plain/__init__.py": 'PLATFORMS = {"gpu": 1, "cpu": 1}\n',
    "plugins/card/pyproject.toml": '[project.entry-points."ejkernel.kernels"]\n"square.card" = "ejkernel_card"',
    "plugins/card/ejkernel_card/__init__.py": 'from ejkernel_loops import loop\nPLATFORMS = {"gpu": 2}\n',
    "plugins/card/tests/test_card.py": """
import pytest

@pytest.mark.long
@pytest.mark.parametrize("number", range(60))
def test_right(number): ...
""",
    "plugins/loops/pyproject.toml": "",
    "plugins/loops/ejkernel_loops/__init__.py": "from ejkernel_words import word",
    "plugins/words/pyproject.toml": "",
    "plugins/words/ejkernel_words/__init__.py": "word = 1",
    "plugins/words/ejkernel_words/words.json": "[]",
    "plugins/words/tests/test_words.py": "backend = 'card'",
}
VERSIONS = {"python": "3.11.7", "jax": "0.10.2"}


@pytest.fixture(scope="module")
def sweeps(pytestconfig: pytest.Config) -> ModuleType:
    spec = importlib.util.spec_from_file_location("long_sweeps", pytestconfig.rootpath / ".ci" / "long_sweeps.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["long_sweeps"] = module  # dataclasses look the module up here
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def root(tmp_path: Path, pytestconfig: pytest.Config) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "conftest.py").write_text('pytest_plugins = ("tests.selection",)\n')
    shutil.copy(pytestconfig.rootpath / "tests/selection.py", tmp_path / "tests/selection.py")
    (tmp_path / ".ci").mkdir()
    shutil.copy(pytestconfig.rootpath / ".ci/long_sweeps.py", tmp_path / ".ci/long_sweeps.py")
    return tmp_path


def hashes(sweeps: ModuleType, root: Path, versions: dict[str, str] = VERSIONS) -> dict[str, str]:
    packages = sweeps.packages(root)
    return {
        package.tests: sweeps.content(package, packages, versions)
        for package in packages
        if (root / package.tests).is_dir()
    }


CARD, CORE, OPS, WORDS = "plugins/card/tests", "tests", "plugins/ops/tests", "plugins/words/tests"
ALL = {CARD, CORE, OPS, WORDS}


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        # The files of the package and of its direct and indirect imports: code and data.
        ("plugins/card/ejkernel_card/__init__.py", {CARD, WORDS}),  # the tests of words name its backend
        ("plugins/card/tests/test_card.py", {CARD}),
        ("plugins/card/pyproject.toml", {CARD, WORDS}),
        ("plugins/loops/ejkernel_loops/__init__.py", {CARD, WORDS}),
        ("plugins/words/ejkernel_words/__init__.py", {CARD, WORDS}),
        ("plugins/words/ejkernel_words/words.json", {CARD, WORDS}),
        ("plugins/words/tests/test_words.py", {WORDS}),
        # Packages that a call may use although no import names them.
        ("ejkernel_core/__init__.py", ALL),
        ("plugins/ops/ejkernel_ops/__init__.py", ALL),
        ("plugins/plain/ejkernel_plain/__init__.py", ALL),
        # Files that determine how tests run.
        ("conftest.py", ALL),
        ("pyproject.toml", ALL),
        (".ci/long_sweeps.py", ALL),
    ],
)
def test_a_changed_file_changes_the_hashes_of_sweeps_that_depend_on_it(
    sweeps: ModuleType, root: Path, file: str, expected: set[str]
) -> None:
    before = hashes(sweeps, root)
    with (root / file).open("a") as stream:
        stream.write("\n")
    after = hashes(sweeps, root)
    assert {name for name in before if after[name] != before[name]} == expected


def test_another_version_changes_all_hashes(sweeps: ModuleType, root: Path) -> None:
    before, after = hashes(sweeps, root), hashes(sweeps, root, {**VERSIONS, "jax": "0.10.3"})
    assert {name for name in before if after[name] != before[name]} == ALL
    assert {"python", "jax", "jaxlib", "numpy", "triton"} <= set(sweeps.versions())


def test_files_left_by_a_run_change_no_hash(sweeps: ModuleType, root: Path) -> None:
    before = hashes(sweeps, root)
    for name in (
        "ejkernel_core/__pycache__/a.pyc",
        "tests/long-sweeps.json",
        "plugins/card/tests/costs.json",
        "plugins/card/tests/.hypothesis/b",
    ):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("{}")
    assert hashes(sweeps, root) == before


def test_dependencies_of_the_sweeps_of_this_repository(sweeps: ModuleType, pytestconfig: pytest.Config) -> None:
    packages = sweeps.packages(pytestconfig.rootpath)
    dependencies = {
        package.folder: {dependency.name for dependency in sweeps.dependencies(package, packages)}
        for package in packages
    }
    assert {"ejkernel_core", "ejkernel_ops", "ejkernel_testing", "ejkernel_tuning"} <= dependencies["plugins/xla"]
    assert not {"ejkernel_triton", "ejkernel_pallas_tpu", "ejkernel_bench"} & dependencies["plugins/xla"]
    assert all("ejkernel_core" in names for folder, names in dependencies.items() if folder)


# -- running sweeps --------------------------------------------------------------------------------------------------


Sweep = Callable[..., tuple[int, str]]


@pytest.fixture
def sweep(sweeps: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Sweep:
    """``sweep("--all")`` runs the sweeps in one process, and returns the exit status and the output."""
    monkeypatch.setattr(sweeps, "WORKERS", ())
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(*arguments: str) -> tuple[int, str]:
        return sweeps.main([*arguments], root), capfd.readouterr().out

    return run


def break_test(root: Path, number: int) -> None:
    file = root / "plugins/card/tests/test_card.py"
    file.write_text(file.read_text().replace("...", f"assert number != {number}"))


def test_a_sweep_that_passed_is_recorded_and_not_run_again(sweeps: ModuleType, root: Path, sweep: Sweep) -> None:
    status, output = sweep()
    assert status == 0, output
    assert "60 passed" in output
    records = json.loads((root / "tests/long-sweeps.json").read_text())
    versions = sweeps.versions()
    assert records == {sweeps.environment(versions): hashes(sweeps, root, versions)}
    status, output = sweep()
    assert status == 0
    assert "nothing to run" in output
    assert "passed" not in output
    (root / "plugins/words/ejkernel_words/words.json").write_text("[1]")
    assert "60 passed" in sweep()[1]
    assert "60 passed" in sweep("--all")[1]
    (root / "tests/long-sweeps.json").unlink()
    output = sweep(CARD)[1]
    assert "60 passed" in output
    assert set(next(iter(sweeps.recorded(root).values()))) == {CARD}


@pytest.mark.long
def test_a_sweep_that_failed_is_not_recorded(root: Path, sweep: Sweep) -> None:
    break_test(root, 3)
    assert sweep()[0] == 1
    (records,) = json.loads((root / "tests/long-sweeps.json").read_text()).values()
    assert set(records) == ALL - {CARD}
    # Nor is one of which a file cannot be collected.
    (root / "tests/long-sweeps.json").unlink()
    (root / "plugins/card/tests/test_card.py").write_text("wrong")
    assert sweep()[0] == 1
    (records,) = json.loads((root / "tests/long-sweeps.json").read_text()).values()
    assert set(records) == ALL - {CARD}


@pytest.mark.long
def test_a_wrong_record_is_found_by_the_tenth(sweeps: ModuleType, root: Path, sweep: Sweep) -> None:
    """For a wrong record, the tenth of some commits has the test that fails. Workers run it, as in ``.ci/run``."""
    tests = [f"{CARD}/test_card.py::test_right[{number}]" for number in range(60)]
    samples = {seed: [test for test in tests if draw(seed, test) < 0.1] for seed in map(str, range(99))}
    assert max(map(len, samples.values())) < 20
    assert set().union(*samples.values()) == set(tests)
    failing_seed = next(seed for seed, sample in samples.items() if tests[7] in sample)
    passing_seed = next(seed for seed, sample in samples.items() if sample and tests[7] not in sample)
    break_test(root, 7)
    versions = sweeps.versions()
    sweeps.record(root, sweeps.environment(versions), hashes(sweeps, root, versions))
    before = (root / "tests/long-sweeps.json").read_text()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, ".ci/long_sweeps.py", "--tenth", failing_seed]
    process = subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True, check=False)
    assert process.returncode == 1, process.stdout + process.stderr
    assert f"1 failed, {len(samples[failing_seed]) - 1} passed" in process.stdout
    status, output = sweep("--tenth", passing_seed)
    assert status == 0, output
    assert f"{len(samples[passing_seed])} passed" in output
    assert (root / "tests/long-sweeps.json").read_text() == before


@pytest.mark.long
def test_an_unrecorded_sweep_runs_whole_and_the_others_by_a_tenth(sweeps: ModuleType, root: Path, sweep: Sweep) -> None:
    versions = sweeps.versions()
    sweeps.record(root, sweeps.environment(versions), hashes(sweeps, root, versions))
    (root / "plugins/words/tests/test_words.py").write_text((root / "plugins/card/tests/test_card.py").read_text())
    status, output = sweep("--tenth", "commit")
    assert status == 0, output
    assert "plugins/words/tests to run" in output
    whole, tenth = map(int, re.findall(r"(\d+) passed", output))
    assert whole == 60
    assert 0 < tenth < 20


@pytest.mark.long
def test_of_unrecorded_sweeps_runs_what_the_minutes_allow(sweeps: ModuleType, root: Path, sweep: Sweep) -> None:
    """By what the cases of before cost: 60 of 30 seconds, in two processes, are 15 minutes."""
    cases = {"30": [str(number) for number in range(60)]}
    (root / CARD / "costs.json").write_text(json.dumps({"test_card.py::test_right": {"source": "", "cases": cases}}))
    card = next(package for package in sweeps.packages(root) if package.tests == CARD)
    assert sweeps.minutes(root, [card]) == 15
    versions = sweeps.versions()
    sweeps.record(root, sweeps.environment(versions), {**hashes(sweeps, root, versions), CARD: "another"})
    status, output = sweep("--tenth", "commit", "--minutes", "3")
    assert status == 0, output
    assert "not recorded: 15 minutes; 3 are allowed, so 20% of it runs" in output
    tests = [f"{CARD}/test_card.py::test_right[{number}]" for number in range(60)]
    drawn = sum(draw("commit", test) < 0.2 for test in tests)
    assert 0 < drawn < 30
    assert f"{drawn} passed" in output
    assert "60 passed" in sweep("--tenth", "commit", "--minutes", "15")[1]


def test_each_environment_has_its_own_records(sweeps: ModuleType, root: Path) -> None:
    later_versions = {"python": "3.12.1", "jax": "0.12.0"}
    for versions in (VERSIONS, later_versions, {**later_versions, "jax": "0.12.1"}):
        sweeps.record(root, sweeps.environment(versions), hashes(sweeps, root, versions))
    records = sweeps.recorded(root)
    assert [name.split(", ")[:2] for name in records] == [["Python 3.11", "JAX 0.10"], ["Python 3.12", "JAX 0.12"]]
    assert list(records.values()) == [hashes(sweeps, root), hashes(sweeps, root, {**later_versions, "jax": "0.12.1"})]


@pytest.mark.long
@pytest.mark.parametrize("is_recorded", [False, True])
def test_no_test_begins_when_the_minutes_are_over(
    sweeps: ModuleType, root: Path, sweep: Sweep, monkeypatch: pytest.MonkeyPatch, *, is_recorded: bool
) -> None:
    if is_recorded:
        versions = sweeps.versions()
        sweeps.record(root, sweeps.environment(versions), hashes(sweeps, root, versions))
    monkeypatch.setattr(sweeps, "time", SimpleNamespace(time=lambda: 0.0))
    status, output = sweep("--tenth", "commit", "--minutes", "1000")
    assert status == 0, output
    assert "passed" not in output
    assert "the time was over" in output
