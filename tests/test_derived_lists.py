"""Nothing is listed by hand that a new distribution, a new page or a new kernel would have to be added to."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLUGINS = sorted(project.parent.name for project in ROOT.glob("plugins/*/pyproject.toml"))
TEXTS = (".md", ".py", ".toml", "Makefile", "run", "check-wheels")
#: The extras that bring a distribution, and what it depends on, with the reason.
BY_HAND = {"pyproject.toml", "docs/design.md"}


def texts() -> Iterator[tuple[str, str]]:
    """What people write: each file without its tables that are made from the code."""
    folders = (ROOT, *(ROOT / name for name in (".ci", "docs", "ejkernel_core", "tests", "plugins")))
    for folder in folders:
        for file in folder.glob("*") if folder == ROOT else folder.rglob("*"):
            if file.is_file() and file.name.endswith(TEXTS) and "build" not in file.relative_to(ROOT).parts:
                text = re.sub(r"<!-- \w+: made by .*?<!-- end of \w+ -->", "", file.read_text(), flags=re.DOTALL)
                yield file.relative_to(ROOT).as_posix(), text


def names_all_plugins(text: str) -> bool:
    return all(re.search(rf"\bejkernel[-_]{p.replace('_', '[-_]')}\b|\bplugins/{p}\b|`{p}`", text) for p in PLUGINS)


def test_a_new_distribution_changes_two_files() -> None:
    assert {name for name, text in texts() if names_all_plugins(text)} <= BY_HAND


def test_a_list_of_all_distributions_is_found() -> None:
    assert names_all_plugins(" ".join(f"ejkernel-{name.replace('_', '-')}" for name in PLUGINS))
    assert not names_all_plugins(" ".join(f"`{name}`" for name in PLUGINS[1:]))


def test_make_installs_every_distribution() -> None:
    dry_run = subprocess.run(["make", "-n", "wheels"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert sorted(re.findall(r" \./plugins/(\w+)", dry_run)) == PLUGINS


def test_mypy_checks_every_module() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["files"]
    checked = {file for pattern in patterns for file in ROOT.glob(pattern)}
    packages = [ROOT / "ejkernel_core", *(ROOT / f"plugins/{name}/ejkernel_{name}" for name in PLUGINS)]
    packages.append(ROOT / "benchmarks")
    assert checked == {file for package in packages for file in package.rglob("*.py")}


def test_only_device_code_has_types_that_are_not_checked() -> None:
    """It says so itself. What imports Triton when it is imported is device code, or the interpreter of it."""
    unchecked = [
        file for file in ROOT.glob("plugins/*/ejkernel_*/**/*.py") if "# mypy: ignore-errors\n" in file.read_text()
    ]
    assert unchecked
    assert [file for file in unchecked if not imports_triton(file.read_text())] == []
    mypy = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert not [name for override in mypy["overrides"] for name in override["module"] if name.startswith("ejkernel")]


def imports_triton(text: str) -> bool:
    nodes = ast.parse(text).body
    modules = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return any(module.partition(".")[0] == "triton" for module in modules)
