"""What is said about what is not installed: only what is known, from the metadata of what is."""

from __future__ import annotations

import ast
import re
import tomllib
from importlib import metadata
from pathlib import Path

import jax
import numpy as np
import pytest

import ejkernel_core
from ejkernel_core import NoKernel, Operation, Registry, UnknownBackend, UnknownOperation, _discovery
from ejkernel_core.__main__ import listing
from tests.conftest import KERNEL, MakeDistribution
from tests.test_imports import imported_by

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
    """The core as if its metadata were REQUIRES."""
    monkeypatch.setattr(metadata, "requires", lambda name: REQUIRES if name == "ejkernel-core" else None)


def message(error: type[Exception], registry: Registry, op: str, **options: object) -> str:
    with pytest.raises(error) as caught:
        registry.call(op, X, **options)
    return str(caught.value)


def test_the_extras_that_bring_plugins_are_read_off_the_metadata(extras: None) -> None:
    assert _discovery.extras() == {
        "cpu": ("ejkernel-sun",),
        "moon": ("ejkernel-sun", "ejkernel-full-moon"),
        "all": ("ejkernel-stars",),
    }


@pytest.mark.parametrize("requires", [None, []])
def test_without_extras_nothing_is_said_of_them(
    double: None, monkeypatch: pytest.MonkeyPatch, requires: list[str] | None
) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: requires)
    assert "pip install" not in message(UnknownBackend, Registry(), "double", backend="god")
    assert "pip install" not in message(UnknownOperation, Registry(plugins=""), "double")

    def nothing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", nothing)
    assert "pip install" not in message(UnknownOperation, Registry(plugins=""), "double")


@pytest.mark.parametrize(("backend", "brings"), [("sun", "ejkernel-sun"), ("full_moon", "ejkernel-full-moon")])
def test_a_backend_that_could_be_installed(extras: None, double: None, backend: str, brings: str) -> None:
    told = message(UnknownBackend, Registry(), "double", backend=backend)
    assert told.startswith(
        f"no backend {backend!r} of 'double' is installed; 'pip install {brings}' brings that backend. Known: good. "
    )


@pytest.mark.parametrize(
    ("backend", "near", "brings"),
    [
        ("full_mon", "full_moon", "; did you mean 'full_moon'? 'pip install ejkernel-full-moon' brings that backend. "),
        ("goood", "good", "; did you mean 'good'? Known: good. "),
        ("triton", "none", ". Known: good. "),
    ],
)
def test_a_backend_like_one_that_is_or_could_be_installed(
    extras: None, double: None, backend: str, near: str, brings: str
) -> None:
    told = message(UnknownBackend, Registry(), "double", backend=backend)
    assert told.startswith(f"no backend {backend!r} of 'double' is installed{brings}")
    assert told.endswith("'python -m ejkernel_core' lists what is installed")


def test_who_is_installed_is_not_to_be_installed(extras: None, distribution: MakeDistribution, double: None) -> None:
    distribution("Ejkernel.Sun", {"sun_kernel": KERNEL}, kernels={"other.sun": "sun_kernel"})
    told = message(UnknownBackend, Registry(), "double", backend="sun")
    assert told.startswith("no backend 'sun' of 'double' is installed. Known: good. ")
    left_out = message(UnknownBackend, Registry(plugins="good-dist"), "double", backend="sun")
    assert "'pip install ejkernel-sun' brings that backend" in left_out
    assert left_out.endswith("(this registry has plugins='good-dist')")


def test_an_operation_of_nobody_is_not_said_to_be_anywhere(extras: None, double: None) -> None:
    told = message(UnknownOperation, Registry(plugins="good-dist"), "duoble")
    assert told == (
        "no operation 'duoble' is installed; did you mean 'double'? Known: double. 'python -m ejkernel_core' lists "
        "what is installed (this registry has plugins='good-dist')"
    )


STANDARD = "'pip install \"ejkernel-core[cpu]\"' (or moon, all) brings the standard ones"


def test_where_no_operation_is_installed_the_standard_ones_are_named(extras: None) -> None:
    told = message(UnknownOperation, Registry(plugins=""), "double")
    assert told == (
        f"no operation 'double' is installed. Known: none. {STANDARD}; 'python -m ejkernel_core' lists what is "
        "installed (this registry has plugins='')"
    )


def test_where_no_kernel_is_installed_the_standard_ones_are_named(extras: None) -> None:
    registry = Registry(plugins="")
    registry.register(Operation(name="bare", signature=lambda x: None, outputs=lambda a: (a["x"],)))
    told = message(NoKernel, registry, "bare")
    assert f"no kernel is installed\n{STANDARD}; " in told


def test_the_listing_of_nothing_says_how_to_get_something(extras: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ejkernel_core.__main__.registry", Registry(plugins=""))
    lines = listing().splitlines()
    assert lines[:3] == ["EJKERNEL_PLUGINS=''", "operations", f"  none; {STANDARD}"]


# -- the core's own extras -------------------------------------------------------------------------------------------


def own_extras() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return dict(project["optional-dependencies"])


def plugins() -> dict[str, set[str]]:
    """The distributions of this repository, and the backends of each."""
    found = {}
    for path in ROOT.glob("plugins/*/pyproject.toml"):
        project = tomllib.loads(path.read_text())["project"]
        kernels = project.get("entry-points", {}).get("ejkernel.kernels", {})
        found[project["name"]] = {name.rpartition(".")[2] for name in kernels}
    return found


def test_the_extras_of_this_core_bring_its_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f'{line}; extra == "{extra}"' for extra, needs in own_extras().items() for line in needs]
    monkeypatch.setattr(metadata, "requires", lambda name: lines)
    named = _discovery.extras()
    assert named.keys() == {"cpu", "cuda", "tpu", "all"}
    assert {name for names in named.values() for name in names} == plugins().keys()
    assert {*named["cpu"]} == {*named["cuda"]} & {*named["tpu"]}
    assert re.fullmatch(r"ejkernel-core\[(cpu|cuda|tpu)(,(cpu|cuda|tpu)){2}\]", own_extras()["all"][0])


def test_a_backend_of_this_repository_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f'{line}; extra == "{extra}"' for extra, needs in own_extras().items() for line in needs]
    monkeypatch.setattr(metadata, "requires", lambda name: lines)
    registry = Registry(plugins="ejkernel-ops")
    for backend, brings in {
        "triton": "ejkernel-triton",
        "pallas_tpu": "ejkernel-pallas-tpu",
        "xla": "ejkernel-xla",
    }.items():
        assert backend in plugins()[brings]
        query = jax.ShapeDtypeStruct((1, 4, 2, 8), "float32")
        with pytest.raises(UnknownBackend, match=f"; 'pip install {brings}' brings that backend. Known: reference. "):
            registry.plan("flash_attention", query, query, query, backend=backend)
    with pytest.raises(
        UnknownBackend,
        match=r"no backend 'trition' of 'flash_attention' is installed; did you mean 'triton'\? 'pip install ejkernel-tri",
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


def test_the_core_tells_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", {"ejkernel-core": "7.8"}.__getitem__)
    assert ejkernel_core.__version__ == "7.8"


@pytest.mark.parametrize("folder", PROJECTS, ids=lambda folder: folder.name)
def test_a_distribution_names_those_that_it_imports(folder: Path) -> None:
    project = PROJECTS[folder]
    package = project["name"].replace("-", "_")
    extras = [line for name, lines in project.get("optional-dependencies", {}).items() for line in lines]
    named = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in (*project["dependencies"], *extras)}
    files = [*(folder / package).rglob("*.py")]
    assert files
    imported = {name for file in files for name in imported_by(ast.parse(file.read_text()))}
    ours = {one["name"].replace("-", "_") for one in PROJECTS.values()}
    assert sorted((imported & ours) - named - {package}) == []


def test_make_installs_all_of_them() -> None:
    (line,) = re.findall(r"^PLUGINS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {*line.split()} == {folder.name for folder in PROJECTS} - {ROOT.name}
