"""Which long sweeps run: a change makes those run that depend on it, and a record that is wrong is found."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

#: A repository of a core, an operation, a kernel for the processor, one for another card and a third party to that.
FILES = {
    "pyproject.toml": "[tool.pytest.ini_options]\naddopts = ['--import-mode=importlib']\nmarkers = ['long', 'gpu']\n",
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
    sys.modules["long_sweeps"] = module  # where its dataclass looks for it
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def root(tmp_path: Path, pytestconfig: pytest.Config) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    # Of the options of pytest alone: what else there is imports the real packages.
    _, start, options = (pytestconfig.rootpath / "conftest.py").read_text().partition("def pytest_addoption")
    (tmp_path / "conftest.py").write_text(f"import hashlib\n\nimport pytest\n\n\n{start}{options}")
    (tmp_path / ".ci").mkdir()
    shutil.copy(pytestconfig.rootpath / ".ci/long_sweeps.py", tmp_path / ".ci/long_sweeps.py")
    return tmp_path


def hashes(sweeps: ModuleType, root: Path, versions: dict[str, str] = VERSIONS) -> dict[str, str]:
    every = sweeps.packages(root)
    return {one.tests: sweeps.content(one, every, versions) for one in every if (root / one.tests).is_dir()}


CARD, CORE, OPS, WORDS = "plugins/card/tests", "tests", "plugins/ops/tests", "plugins/words/tests"
ALL = {CARD, CORE, OPS, WORDS}


@pytest.mark.parametrize(
    ("file", "run"),
    [
        # Its own files, and those of what it imports, also through others; data as well as code.
        ("plugins/card/ejkernel_card/__init__.py", {CARD, WORDS}),  # which names its backend
        ("plugins/card/tests/test_card.py", {CARD}),
        ("plugins/card/pyproject.toml", {CARD, WORDS}),
        ("plugins/loops/ejkernel_loops/__init__.py", {CARD, WORDS}),
        ("plugins/words/ejkernel_words/__init__.py", {CARD, WORDS}),
        ("plugins/words/ejkernel_words/words.json", {CARD, WORDS}),
        ("plugins/words/tests/test_words.py", {WORDS}),
        # What a call gets to that nobody names.
        ("ejkernel_core/__init__.py", ALL),
        ("plugins/ops/ejkernel_ops/__init__.py", ALL),
        ("plugins/plain/ejkernel_plain/__init__.py", ALL),
        # How tests are run.
        ("conftest.py", ALL),
        ("pyproject.toml", ALL),
        (".ci/long_sweeps.py", ALL),
    ],
)
def test_one_more_byte_makes_every_sweep_run_that_depends_on_it(
    sweeps: ModuleType, root: Path, file: str, run: set[str]
) -> None:
    before = hashes(sweeps, root)
    with (root / file).open("a") as opened:
        opened.write("\n")
    after = hashes(sweeps, root)
    assert {name for name in before if after[name] != before[name]} == run


def test_another_version_makes_every_sweep_run(sweeps: ModuleType, root: Path) -> None:
    before, after = hashes(sweeps, root), hashes(sweeps, root, {**VERSIONS, "jax": "0.10.3"})
    assert {name for name in before if after[name] != before[name]} == ALL
    assert {"python", "jax", "jaxlib", "numpy", "triton"} <= set(sweeps.versions())


def test_what_is_left_by_a_run_is_no_change(sweeps: ModuleType, root: Path) -> None:
    before = hashes(sweeps, root)
    for name in ("ejkernel_core/__pycache__/a.pyc", "tests/long-sweeps.json", "plugins/card/tests/.hypothesis/b"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("{}")
    assert hashes(sweeps, root) == before


def test_real_sweeps_depend_on_what_they_use(sweeps: ModuleType, pytestconfig: pytest.Config) -> None:
    every = sweeps.packages(pytestconfig.rootpath)
    used = {one.folder: {other.name for other in sweeps.dependencies(one, every)} for one in every}
    assert {"ejkernel_core", "ejkernel_ops", "ejkernel_testing", "ejkernel_tuning"} <= used["plugins/xla"]
    assert not {"ejkernel_triton", "ejkernel_pallas_tpu", "ejkernel_bench"} & used["plugins/xla"]
    assert all("ejkernel_core" in names for folder, names in used.items() if folder)


# -- the run ---------------------------------------------------------------------------------------------------------


Sweep = Callable[..., tuple[int, str]]


@pytest.fixture
def sweep(sweeps: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Sweep:
    """``sweep("--all")`` runs it there, by one process that starts fast: how it ended, and what it printed."""
    monkeypatch.setattr(sweeps, "WORKERS", ())
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(*arguments: str) -> tuple[int, str]:
        return sweeps.main([*arguments], root), capfd.readouterr().out

    return run


def break_one(root: Path, number: int) -> None:
    file = root / "plugins/card/tests/test_card.py"
    file.write_text(file.read_text().replace("...", f"assert number != {number}"))


def record_as_it_is(sweeps: ModuleType, root: Path) -> None:
    """As if all had passed."""
    versions = sweeps.versions()
    sweeps.record(root, sweeps.environment(versions), hashes(sweeps, root, versions))


def test_what_passed_is_recorded_and_not_run_again(sweeps: ModuleType, root: Path, sweep: Sweep) -> None:
    status, printed = sweep()
    assert status == 0, printed
    assert "60 passed" in printed
    records = json.loads((root / "tests/long-sweeps.json").read_text())
    versions = sweeps.versions()
    assert records == {sweeps.environment(versions): hashes(sweeps, root, versions)}
    status, printed = sweep()
    assert status == 0
    assert "nothing to run" in printed
    assert "passed" not in printed
    (root / "plugins/words/ejkernel_words/words.json").write_text("[1]")
    assert "60 passed" in sweep()[1]
    assert "60 passed" in sweep("--all")[1]


def test_what_failed_is_not_recorded_and_the_others_are(root: Path, sweep: Sweep) -> None:
    break_one(root, 3)
    assert sweep()[0] == 1
    (records,) = json.loads((root / "tests/long-sweeps.json").read_text()).values()
    assert set(records) == ALL - {CARD}
    # Nothing is recorded where what failed cannot be told from the rest.
    (root / "tests/long-sweeps.json").unlink()
    (root / "plugins/card/tests/test_card.py").write_text("wrong")
    assert sweep()[0] == 1
    (records,) = json.loads((root / "tests/long-sweeps.json").read_text()).values()
    assert not records


def test_a_wrong_file_is_found_by_the_tenth(
    sweeps: ModuleType, root: Path, sweep: Sweep, pytestconfig: pytest.Config
) -> None:
    """A record of a sweep that would fail: some commit's tenth has the test that does. By workers, as in earnest."""
    conftest = pytestconfig.pluginmanager.get_plugin(str(pytestconfig.rootpath / "conftest.py"))
    tests = [f"{CARD}/test_card.py::test_right[{number}]" for number in range(60)]
    drawn = {seed: [one for one in tests if conftest.is_drawn(one, 0.1, seed, [CARD])] for seed in map(str, range(99))}
    assert max(map(len, drawn.values())) < 20
    assert set().union(*drawn.values()) == set(tests)
    finds = next(seed for seed, one in drawn.items() if tests[7] in one)
    passes = next(seed for seed, one in drawn.items() if one and tests[7] not in one)
    break_one(root, 7)
    versions = sweeps.versions()
    sweeps.record(root, sweeps.environment(versions), hashes(sweeps, root, versions))
    before = (root / "tests/long-sweeps.json").read_text()
    settings = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, ".ci/long_sweeps.py", "--tenth", finds]
    done = subprocess.run(command, cwd=root, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"1 failed, {len(drawn[finds]) - 1} passed" in done.stdout
    status, printed = sweep("--tenth", passes)
    assert status == 0, printed
    assert f"{len(drawn[passes])} passed" in printed
    assert (root / "tests/long-sweeps.json").read_text() == before


def test_what_is_not_recorded_is_run_whole_beside_a_tenth_of_the_rest(
    sweeps: ModuleType, root: Path, sweep: Sweep
) -> None:
    versions = sweeps.versions()
    sweeps.record(root, sweeps.environment(versions), hashes(sweeps, root, versions))
    (root / "plugins/words/tests/test_words.py").write_text((root / "plugins/card/tests/test_card.py").read_text())
    status, printed = sweep("--tenth", "commit")
    assert status == 0, printed
    assert "plugins/words/tests to run" in printed
    count = int(printed.split(" passed")[0].split()[-1])
    assert 60 < count < 80


def test_every_environment_has_its_line(sweeps: ModuleType, root: Path) -> None:
    later = {"python": "3.12.1", "jax": "0.12.0"}
    for versions in (VERSIONS, later, {**later, "jax": "0.12.1"}):
        sweeps.record(root, sweeps.environment(versions), hashes(sweeps, root, versions))
    records = sweeps.recorded(root)
    assert [name.split(", ")[:2] for name in records] == [["Python 3.11", "JAX 0.10"], ["Python 3.12", "JAX 0.12"]]
    assert list(records.values()) == [hashes(sweeps, root), hashes(sweeps, root, {**later, "jax": "0.12.1"})]
