"""The long sweeps, run where something has changed that they depend on.

A sweep is all tests of one package. When it passes, a hash of all that it depends on is written into
tests/long-sweeps.json: of the package and its tests, of our packages that it uses, and of the versions of Python, JAX
and the others. Where the hash is still the same, the tests have nothing new to show. What each test costs is written
beside the tests, for the budget of `make test`.

    long_sweeps.py                   runs the sweeps that are not recorded, and records those that pass
    long_sweeps.py --all             runs all of them, and records anew
    long_sweeps.py plugins/xla/tests the same of these packages
    long_sweeps.py --tenth COMMIT    records nothing; and of each recorded sweep runs a tenth of the tests, drawn by the
                                     commit's hash, so that a file that is wrong is found. Of the others it runs all,
                                     or as large a share as costs at most so many --minutes; when these are over, no
                                     test begins
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORDS = Path("tests") / "long-sweeps.json"
#: Not ours; what a test does may depend on their versions.
DISTRIBUTIONS = ("jax", "jaxlib", "numpy", "triton", "jax-triton", "attrs", "cattrs", "pluggy", "pytest", "hypothesis")
#: What every sweep depends on: how tests are run.
COMMON = ("conftest.py", "pyproject.toml", ".ci/long_sweeps.py")
#: Made by running something.
LEFTOVERS = ("__pycache__", "build", ".pytest_cache", ".hypothesis", RECORDS.name, "costs.json")
#: XLA's own kernels are compiled as users do. The others run in interpreters here, where optimising shows nothing more.
OPTIMIZED = frozenset({"plugins/xla"})
PROCESSES = 2
WORKERS = ("-n", str(PROCESSES))
#: The cost of a sweep of which none is recorded.
UNKNOWN_MINUTES = 30.0
NO_TESTS = 5


@dataclass(frozen=True)
class Package:
    """One of ours."""

    root: Path
    #: "plugins/xla"; that of the core is "".
    folder: str

    @cached_property
    def name(self) -> str:
        """As it is imported."""
        return f"ejkernel_{Path(self.folder).name or 'core'}"

    @property
    def tests(self) -> str:
        return f"{self.folder}/tests".lstrip("/")

    @cached_property
    def sources(self) -> tuple[Path, ...]:
        """What its distribution has: a record or an entry point counts as code does."""
        base = self.root / self.folder
        return (base / "pyproject.toml", *_files(base / self.name))

    @cached_property
    def own(self) -> tuple[Path, ...]:
        """What its sweep depends on at least. The core's tests are those of the documentation, too."""
        base = self.root / self.folder
        return (*self.sources, *_files(base / "tests"), *(() if self.folder else _files(base / "docs")))

    @cached_property
    def text(self) -> str:
        """Its code, but for subcommands, which the tests of other packages do not run."""
        return _text(file for file in self.sources if file.stem != "command" and file.parent.name != "commands")

    @cached_property
    def backends(self) -> frozenset[str]:
        """The kernels that it has, by the last part of their entry points."""
        return frozenset(re.findall(r'^"\w+\.(\w+)" = ', self.sources[0].read_text(), re.MULTILINE))

    @cached_property
    def is_always_used(self) -> bool:
        """Whether calls get to it that do not name it: by a policy, an operation, or a kernel for the processor."""
        declared = self.sources[0].read_text()
        by_name = "ejkernel.policies" in declared or "ejkernel.operations" in declared
        return by_name or bool(re.search(r'^PLATFORMS = .*"cpu"', self.text, re.MULTILINE))


def _files(folder: Path) -> Iterator[Path]:
    for file in sorted(folder.rglob("*")):
        if file.is_file() and not any(part in LEFTOVERS for part in file.relative_to(folder).parts):
            yield file


def _text(files: Iterable[Path]) -> str:
    return "\n".join(file.read_text() for file in files if file.suffix == ".py")


def packages(root: Path) -> list[Package]:
    plugins = sorted(project.parent for project in root.glob("plugins/*/pyproject.toml"))
    return [Package(root, ""), *(Package(root, plugin.relative_to(root).as_posix()) for plugin in plugins)]


def dependencies(package: Package, every: Collection[Package]) -> list[Package]:
    """The packages that its sweep may run code of, itself left out.

    Those whose names are in its files or its tests', imports or not; those whose names are in their files, and so on;
    those of backends that it names; and those that calls use unnamed.
    """
    text = _text(package.own)
    quoted = set(re.findall(r"""["'](?:\w+\.)?(\w+)["']""", text))
    used = {one for one in every if one.is_always_used or one.backends & quoted}
    pending = [text, *(one.text for one in used)]
    while pending:
        names = set(re.findall(r"\bejkernel_\w+", pending.pop()))
        more = {one for one in every if one.name in names} - used
        used |= more
        pending += [one.text for one in more]
    return sorted(used - {package}, key=lambda one: one.folder)


def versions() -> dict[str, str]:
    """Of all that is not ours."""
    return {"python": platform.python_version(), **{name: _version(name) for name in DISTRIBUTIONS}}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def content(package: Package, every: Collection[Package], versions: Mapping[str, str]) -> str:
    """The hash of all that a sweep depends on."""
    root = package.root
    files = {*package.own, *(file for one in dependencies(package, every) for file in one.sources)}
    files |= {root / name for name in COMMON}
    state = hashlib.sha256(json.dumps(versions, sort_keys=True).encode())
    for file in sorted(files):
        state.update(f"\n{file.relative_to(root).as_posix()} {hashlib.sha256(file.read_bytes()).hexdigest()}".encode())
    return state.hexdigest()


# -- the file --------------------------------------------------------------------------------------------------------


def environment(versions: Mapping[str, str]) -> str:
    """The name of what the sweeps have passed in, one of several: a later patch of the same takes its place."""
    python, jax = (".".join(versions[name].split(".")[:2]) for name in ("python", "jax"))
    return f"Python {python}, JAX {jax}, {sys.platform} {platform.machine()}"


def recorded(root: Path) -> dict[str, dict[str, str]]:
    """By environment and by tests, the hash with which they have passed."""
    file = root / RECORDS
    records: dict[str, dict[str, str]] = json.loads(file.read_text()) if file.exists() else {}
    return records


def record(root: Path, name: str, passed: Mapping[str, str]) -> None:
    """Write the hashes of an environment; the others' stay."""
    records = recorded(root)
    records[name] = dict(sorted({**records.get(name, {}), **passed}.items()))
    (root / RECORDS).write_text(json.dumps(records, indent=2, sort_keys=True) + "\n")


# -- the run ---------------------------------------------------------------------------------------------------------


def minutes(root: Path, sweeps: Iterable[Package]) -> float:
    """What these sweeps cost together, as the files beside their tests have it."""
    return sum(_minutes(root / one.tests / "costs.json") for one in sweeps)


def _minutes(file: Path) -> float:
    if not file.exists():
        return UNKNOWN_MINUTES
    tests = json.loads(file.read_text()).values()
    return sum(float(price) * len(cases) for test in tests for price, cases in test["cases"].items()) / 60 / PROCESSES


def run_in_part(root: Path, changed: Collection[Package], same: Collection[Package], seed: str, most: float) -> bool:
    """A tenth of the recorded sweeps, and as much of the others as costs so many minutes, which are also the most that
    all of them take. Whether they passed.
    """
    cost = minutes(root, changed)
    share = min(1.0, most / cost) if cost else 1.0
    if share < 1:
        print(f"not recorded: {cost:.0f} minutes; {most:g} are allowed, so {share:.0%} of it runs", flush=True)
    passed, until = True, time.time() + 60 * most
    for sweeps, part in ((changed, share), (same, 0.1)):
        passed = run(root, sweeps, [f"--share={part:.3f}", f"--seed={seed}", f"--until={until:.0f}"]) and passed
    return passed


def run(root: Path, sweeps: Collection[Package], options: Sequence[str] = ()) -> bool:
    """Run all tests of these packages, or as many as the options of pytest say. Whether they passed."""
    passed = True
    for is_optimized in (True, False):  # those of the shorter list first: what is cut off is a part of the longer one
        tests = sorted(one.tests for one in sweeps if (one.folder in OPTIMIZED) is is_optimized)
        passed = (not tests or pytest(root, tests, options, is_optimized)) and passed
    return passed


def pytest(root: Path, tests: Sequence[str], options: Sequence[str], is_optimized: bool) -> bool:
    # Programs that an earlier run has compiled would make costs too low.
    cold = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    settings = {**os.environ, **cold, "EJKERNEL_TESTS": "" if is_optimized else "quick"}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", *WORKERS, *options, *tests]
    return subprocess.run(command, cwd=root, env=settings, check=False).returncode in (0, NO_TESTS)


def main(arguments: list[str], root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description="the long sweeps, where something has changed")
    parser.add_argument("--all", action="store_true", help="run those that are recorded, too")
    parser.add_argument("--tenth", metavar="COMMIT", help="of those that are recorded, run a tenth; record nothing")
    parser.add_argument("--minutes", type=float, default=math.inf, help="with --tenth, the most that it takes")
    parser.add_argument("folders", nargs="*", help="tests of packages, such as plugins/xla/tests; by default all")
    chosen = parser.parse_args(arguments)
    every, installed = packages(root), versions()
    name = environment(installed)
    # A folder that is not there is, to pytest with workers, one without tests.
    sweeps = [one for one in every if (root / one.tests).is_dir() and one.tests in (chosen.folders or (one.tests,))]
    hashes = {one.tests: content(one, every, installed) for one in sweeps}
    known = recorded(root).get(name, {})
    changed = [one for one in sweeps if chosen.all or known.get(one.tests) != hashes[one.tests]]
    same = [one for one in sweeps if one not in changed]
    print(f"{name}: {', '.join(one.tests for one in changed) or 'nothing'} to run; recorded: {len(same)}", flush=True)
    if chosen.tenth:
        return 0 if run_in_part(root, changed, same, chosen.tenth, chosen.minutes) else 1
    all_passed = True
    for one in changed:  # each recorded at once, so that a run that is interrupted loses one
        passed = run(root, [one], ["--record-costs"])
        if passed and hashes[one.tests] == _now(root, one.tests, installed):  # else it was not tested as it is now
            record(root, name, {one.tests: hashes[one.tests]})
        all_passed = all_passed and passed
    return 0 if all_passed else 1


def _now(root: Path, tests: str, versions: Mapping[str, str]) -> str:
    every = packages(root)
    return content(next(one for one in every if one.tests == tests), every, versions)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
