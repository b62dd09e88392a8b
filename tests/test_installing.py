"""Errors name the packages to install, from the metadata of the installed packages."""

from __future__ import annotations

import ast
import configparser
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import jax
import numpy as np
import pytest

import ejkernel_core
from ejkernel_core import (
    NoKernel,
    Operation,
    Registry,
    UnknownBackend,
    UnknownOperation,
    Unsupported,
    _discovery,
    hookimpl,
)
from tests.distributions import KERNEL, MakeDistribution
from tests.test_imports import imported_packages

ROOT = Path(__file__).parents[1]
X = np.array([1.0, 2.0], np.float32)

REQUIRES = [
    "jax>=0.10",
    'pytest>=8.4; extra == "test"',
    'ejkernel-core[test]; extra == "dev"',
    "ejkernel-sun>=0.1; extra == 'cpu'",
    'ejkernel-sun; extra == "moon"',
    'ejkernel-full-moon ; sys_platform == "linux" and extra == "moon"',
    'ejkernel-core[cpu,moon]; extra == "all"',
    'Ejkernel_Stars; extra == "all"',
]


@pytest.fixture
def extras(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the requirements in the core's metadata by REQUIRES."""
    monkeypatch.setattr(metadata, "requires", lambda name: REQUIRES if name == "ejkernel-core" else None)


def message(error: type[Exception], registry: Registry, op: str, **options: object) -> str:
    with pytest.raises(error) as error:
        registry.call(op, X, **options)
    return str(error.value)


def test_extras_that_install_plugins_are_read_from_the_metadata(extras: None) -> None:
    assert _discovery.extras() == {
        "cpu": ("ejkernel-sun",),
        "moon": ("ejkernel-sun", "ejkernel-full-moon"),
        "all": ("ejkernel-stars",),
    }


@pytest.mark.parametrize("requires", [None, []])
def test_without_extras_no_error_says_pip_install(
    double: None, monkeypatch: pytest.MonkeyPatch, requires: list[str] | None
) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: requires)
    assert "pip install" not in message(UnknownBackend, Registry(), "double", backend="god")
    assert "pip install" not in message(UnknownOperation, Registry(plugins=""), "double")

    def raise_not_found(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", raise_not_found)
    assert "pip install" not in message(UnknownOperation, Registry(plugins=""), "double")


@pytest.mark.parametrize(("backend", "package"), [("sun", "ejkernel-sun"), ("full_moon", "ejkernel-full-moon")])
def test_the_error_for_a_backend_of_an_extra_names_its_package(
    extras: None, double: None, backend: str, package: str
) -> None:
    text = message(UnknownBackend, Registry(), "double", backend=backend)
    assert text.startswith(
        f"no backend {backend!r} of 'double' is installed; 'pip install {package}' brings that backend. Known: good. "
    )


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_package_for_other_devices_is_not_suggested_for_installation(
    double: None, monkeypatch: pytest.MonkeyPatch, platform: str
) -> None:
    requires = ['ejkernel-sun; extra == "cpu"', 'ejkernel-sun; extra == "cuda"', 'ejkernel-moon; extra == "cuda"']
    monkeypatch.setattr(metadata, "requires", lambda name: requires if name == "ejkernel-core" else None)
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    expected = {
        "cpu": "; ejkernel-moon has that backend for cuda; this is cpu. Known: good. ",
        "gpu": "; 'pip install ejkernel-moon' brings that backend. Known: good. ",
    }
    assert f"is installed{expected[platform]}" in message(UnknownBackend, Registry(), "double", backend="moon")
    text = message(UnknownBackend, Registry(), "double", backend="sun")
    assert "; 'pip install ejkernel-sun' brings that backend. Known: good. " in text


@pytest.mark.parametrize(
    ("backend", "suggestion", "package"),
    [
        ("full_mon", "full_moon", "; did you mean 'full_moon'? 'pip install ejkernel-full-moon' brings that backend. "),
        ("goood", "good", "; did you mean 'good'? Known: good. "),
        ("moon", "none", ". Known: good. "),  # not every package has a backend, so a similar name is not enough
        ("triton", "none", ". Known: good. "),
    ],
)
def test_the_error_for_a_misspelt_backend_suggests_a_similar_one(
    extras: None, double: None, backend: str, suggestion: str, package: str
) -> None:
    text = message(UnknownBackend, Registry(), "double", backend=backend)
    assert text.startswith(f"no backend {backend!r} of 'double' is installed{package}")
    assert text.endswith("'ejkernel list' lists what is installed")


def test_an_installed_package_is_not_suggested_for_installation(
    extras: None, distribution: MakeDistribution, double: None
) -> None:
    distribution("Ejkernel.Sun", {"sun_kernel": KERNEL}, kernels={"other.sun": "sun_kernel"})
    text = message(UnknownBackend, Registry(), "double", backend="sun")
    assert text.startswith("no backend 'sun' of 'double' is installed. Known: good. ")
    excluded = message(UnknownBackend, Registry(plugins="good-dist"), "double", backend="sun")
    assert "'pip install ejkernel-sun' brings that backend" in excluded
    assert excluded.endswith("(this registry has plugins='good-dist')")


def test_a_distribution_of_this_project_need_not_be_installed_to_be_left_out(extras: None, double: None) -> None:
    assert Registry(plugins="-ejkernel_sun").plan("double", X).kernel.name == "double.good"
    with pytest.raises(ValueError, match="got 'ejkernel_sun'; 'pip install ejkernel-sun' installs it$"):
        Registry(plugins="ejkernel_sun")


def test_no_package_is_suggested_for_an_unknown_operation(extras: None, double: None) -> None:
    text = message(UnknownOperation, Registry(plugins="good-dist"), "duoble")
    assert text == (
        "no operation 'duoble' is installed; did you mean 'double'? Known: double. 'ejkernel list' lists "
        "what is installed (this registry has plugins='good-dist')"
    )


STANDARD_PLUGINS = "'pip install \"ejkernel-core[cpu]\"' (or moon, all) brings the standard ones"


def test_without_operations_the_standard_plugins_are_suggested(extras: None) -> None:
    text = message(UnknownOperation, Registry(plugins=""), "double")
    assert text == (
        f"no operation 'double' is installed. Known: none. {STANDARD_PLUGINS}; 'ejkernel list' lists what is "
        "installed (this registry has plugins='')"
    )


@pytest.mark.parametrize("options", [{}, {"backend": "reference"}, {"cfg": 3}])
def test_where_no_kernel_runs_a_standard_operation_the_standard_plugins_are_suggested(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, object]
) -> None:
    requires = ['ejkernel-ops; extra == "cpu"', 'ejkernel-moon; extra == "cpu"']
    monkeypatch.setattr(metadata, "requires", lambda name: requires if name == "ejkernel-core" else None)

    @hookimpl
    def heuristic_cfg(inv: object) -> None:
        raise Unsupported("not today")

    registry = Registry(plugins="ejkernel-ops")
    registry.register(SimpleNamespace(heuristic_cfg=heuristic_cfg, run_backend=heuristic_cfg), "rms_norm.reference")
    text = message(NoKernel, registry, "rms_norm", **options)
    # Those bring no kernel of a backend that refuses, and no other Config.
    assert ("brings the standard ones" in text) is (not options)
    assert "'ejkernel list' lists what is installed" in text


def test_without_kernels_of_an_operation_of_others_the_standard_plugins_are_not_suggested(extras: None) -> None:
    registry = Registry(plugins="")
    registry.register(Operation(name="bare", signature=lambda x: None, outputs=lambda a: (a["x"],)))
    text = message(NoKernel, registry, "bare")
    assert "no kernel is installed\n'ejkernel list' lists what is installed" in text


def test_without_the_command_the_hint_says_what_brings_it(extras: None, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"ejkernel-core": "1.0"}
    monkeypatch.setattr(_discovery, "version_of", lambda name: versions.get(name, "not installed"))
    assert message(UnknownOperation, Registry(plugins=""), "double").endswith(
        "; 'pip install ejkernel-cli' brings 'ejkernel list', which lists what is installed (this registry has plugins='')"
    )
    versions["ejkernel-cli"] = "1.0"
    assert Registry().hints.listing() == "'ejkernel list' lists what is installed"


# -- the extras of this core -----------------------------------------------------------------------------------------


def extras_of_this_core() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return dict(project["optional-dependencies"])


def plugins() -> dict[str, set[str]]:
    """The distributions of this repository, and the backends of each."""
    backends = {}
    for path in ROOT.glob("plugins/*/pyproject.toml"):
        project = tomllib.loads(path.read_text())["project"]
        kernels = project.get("entry-points", {}).get("ejkernel.kernels", {})
        backends[project["name"]] = {name.rpartition(".")[2] for name in kernels}
    return backends


def test_the_extras_of_this_core_install_its_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        f'{line}; extra == "{extra}"' for extra, requirements in extras_of_this_core().items() for line in requirements
    ]
    monkeypatch.setattr(metadata, "requires", lambda name: lines)
    packages = _discovery.extras()
    assert packages.keys() == {"cpu", "cuda", "tpu", "all"}
    assert {name for names in packages.values() for name in names} == plugins().keys()
    assert {*packages["cpu"]} == {*packages["cuda"]} & {*packages["tpu"]}
    assert "ejkernel-packed" in packages["cpu"]
    assert re.fullmatch(r"ejkernel-core\[(cpu|cuda|tpu)(,(cpu|cuda|tpu)){2}\]", extras_of_this_core()["all"][0])


def test_backends_of_this_repository_are_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        f'{line}; extra == "{extra}"' for extra, requirements in extras_of_this_core().items() for line in requirements
    ]
    monkeypatch.setattr(metadata, "requires", lambda name: lines)
    registry = Registry(plugins="ejkernel-ops")
    for backend, package, hint in (
        ("triton", "ejkernel-triton", "ejkernel-triton has that backend for cuda; this is cpu."),
        ("pallas_tpu", "ejkernel-pallas-tpu", "ejkernel-pallas-tpu has that backend for tpu; this is cpu."),
        ("xla", "ejkernel-xla", "'pip install ejkernel-xla' brings that backend."),
    ):
        assert backend in plugins()[package]
        query = jax.ShapeDtypeStruct((1, 4, 2, 8), "float32")
        with pytest.raises(UnknownBackend, match=f"; {hint} Known: reference. "):
            registry.plan("flash_attention", query, query, query, backend=backend)
    with pytest.raises(
        UnknownBackend,
        match=r"no backend 'trition' of 'flash_attention' is installed; did you mean 'triton'\? ejkernel-triton has",
    ):
        registry.plan("flash_attention", query, query, query, backend="trition")


# -- the distributions of this repository ----------------------------------------------------------------------------

PROJECTS = {
    path.parent: tomllib.loads(path.read_text())["project"]
    for path in (ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml")))
}


def test_all_distributions_have_one_version() -> None:
    assert len(PROJECTS) > 10
    assert {project["name"]: project["version"] for project in PROJECTS.values()} == dict.fromkeys(
        (project["name"] for project in PROJECTS.values()), PROJECTS[ROOT]["version"]
    )


def test_the_core_has_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", {"ejkernel-core": "7.8"}.__getitem__)
    assert ejkernel_core.__version__ == "7.8"


@pytest.mark.parametrize("folder", PROJECTS, ids=lambda folder: folder.name)
def test_a_distribution_requires_the_packages_that_it_imports(folder: Path) -> None:
    project = PROJECTS[folder]
    package = project["name"].replace("-", "_")
    extras = [line for name, lines in project.get("optional-dependencies", {}).items() for line in lines]
    declared = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in (*project["dependencies"], *extras)}
    # ejkernel-cli alone imports a module command, and brings itself.
    files = [file for file in (folder / package).rglob("*.py") if file.name != "command.py"]
    assert files
    imported = {name for file in files for name in imported_packages(ast.parse(file.read_text()))}
    packages_here = {project["name"].replace("-", "_") for project in PROJECTS.values()}
    assert sorted((imported & packages_here) - declared - {package}) == []


@pytest.mark.parametrize("folder", PROJECTS, ids=lambda folder: folder.name)
def test_each_wheel_is_built_without_what_an_earlier_build_has_left(folder: Path) -> None:
    settings = configparser.ConfigParser()
    settings.read(folder / "setup.cfg")
    assert dict(settings["aliases"]) == {"bdist_wheel": "clean --all bdist_wheel"}


def files_of_wheel(folder: Path) -> set[str]:
    """What a wheel of this folder has, but for metadata; built as pip builds it, with the setuptools that is here."""
    code = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
    result = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    assert "Warning" not in result.stderr  # pip shows them, once for each package
    names = ZipFile(folder / result.stdout.splitlines()[-1]).namelist()
    return {name for name in names if ".dist-info/" not in name}


@pytest.mark.long
@pytest.mark.parametrize("folder", PROJECTS, ids=lambda folder: folder.name)
def test_a_module_that_is_gone_is_in_no_later_wheel(folder: Path, tmp_path: Path) -> None:
    package = PROJECTS[folder]["name"].replace("-", "_")
    copy = tmp_path / "clone"
    shutil.copytree(folder / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.cfg", "README.md", *PROJECTS[folder].get("license-files", ())):
        shutil.copy(folder / name, copy / name)
    files = {file.relative_to(copy).as_posix() for file in (copy / package).rglob("*") if file.is_file()}
    gone = copy / package / "gone.py"
    gone.write_text("")
    assert files_of_wheel(copy) == files | {f"{package}/gone.py"}
    gone.unlink()
    assert files_of_wheel(copy) == files


def commands_of_install(*settings: str, **environment: str) -> str:
    """What ``make install`` would do, with no other variables in the environment."""
    command, variables = ["make", "-n", "install", *settings], {"PATH": os.environ["PATH"], **environment}
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_make_install_installs_into_the_active_environment(variable: str) -> None:
    folders = sorted(f"./plugins/{folder.name}" for folder in PROJECTS if folder != ROOT)
    for settings, pip in (((), '"/an/env/bin/python" -m pip'), (("PIP=uv pip",), "uv pip")):
        text = commands_of_install(*settings, **{variable: "/an/env"})
        (line,) = (line for line in text.splitlines() if line.startswith(pip))
        assert line.startswith(f"{pip} install -q . ./plugins/")
        assert sorted(line.split()[-len(folders) :]) == folders
        assert "into /an/env; " in text


@pytest.mark.parametrize("active", [{}, {"VIRTUAL_ENV": str(ROOT / ".venv-of-a-test")}])
def test_make_install_without_another_environment_makes_its_own(active: dict[str, str]) -> None:
    text = commands_of_install("VENV=.venv-of-a-test", **active)
    assert "python3 -m venv .venv-of-a-test\n" in text
    plugins = " ".join(sorted(f"-e plugins/{folder.name}" for folder in PROJECTS if folder != ROOT))
    assert f".venv-of-a-test/bin/python .ci/install.py --no-build-isolation -e '.[dev]' {plugins}" in text
    assert text.endswith('are installed in .venv-of-a-test: . .venv-of-a-test/bin/activate"\n')
