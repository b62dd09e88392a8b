"""What the site is made of: tables from the code, the reference, and the changelog."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from ejkernel_core import Unsupported, registry

ROOT = Path(__file__).parents[1]
REFERENCE = sorted((ROOT / "docs/reference").glob("ejkernel_*.md"))


def ci_module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f".ci/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return ci_module("doc_tables")


# -- the tables that are made from the code ------------------------------------------------------------------------


#: Pages of operations with many examples, which all kernels are asked about.
LONG = {"flash_attention", "rms_norm", "layer_norm", "grouped_matmul"}
REGIONS = [
    pytest.param(page, name, marks=pytest.mark.long if Path(page).stem in LONG else ())
    for page, name in ci_module("doc_tables").regions()
]


def test_every_operation_has_a_table(tables: ModuleType) -> None:
    """But for gradients, which are on the page of their forward."""
    on_pages = {op for page in (ROOT / "docs/operations").glob("*.md") for op in tables.operations_on(page)}
    gradients = {op for op in tables.operations() if "wrt" in registry.operation(op).signature.parameters}
    assert on_pages == {*tables.operations()} - gradients - {"grouped_matmul_d_rhs"}


@pytest.mark.parametrize(("page", "name"), REGIONS)
def test_the_tables_are_up_to_date(tables: ModuleType, page: str, name: str) -> None:
    assert tables.is_written(page, name), "run `make doc-tables`"


def test_a_region_that_was_edited_is_found(tables: ModuleType) -> None:
    text = "before\n<!-- a: made by .ci/doc_tables.py -->\nedited\n<!-- end of a -->\nafter\n"
    written = tables.with_region(text, "a", "made\n")
    assert written == "before\n<!-- a: made by .ci/doc_tables.py -->\n\nmade\n\n<!-- end of a -->\nafter\n"
    assert tables.with_region(written, "a", "made\n") == written
    with pytest.raises(SystemExit, match="no comments"):
        tables.with_region("before", "a", "made\n")


def column(tables: ModuleType, *answers: tuple[str, str | None, str | None]) -> object:
    return tables.Column([tables.Answer(frozenset(words.split()), *reasons) for words, *reasons in answers])


def test_a_refusal_counts_for_the_word_that_alone_is_refused(tables: ModuleType) -> None:
    made = column(
        tables,
        ("float32 bias", "no float32", None),  # says nothing about the bias
        ("bfloat16 bias", "no bias", None),
        ("bfloat16 causal", None, None),
        ("bfloat16 lse", None, "no gradient of lse"),
        ("bfloat16 sinks bias", "no bias", None),  # says nothing about sinks
    )
    assert [made.verdict(word) for word in ("bfloat16", "bias", "causal", "lse", "sinks")] == [
        "yes", "no", "yes", "forward only", "",
    ]  # fmt: skip
    assert list(made.reasons({"`bias`": ["bias"], "`lse`": ["lse"]})) == [
        ("`bias`", "no bias"),
        ("`lse`, gradients", "no gradient of lse"),
    ]
    with pytest.raises(SystemExit, match="no example shows"):
        made.cell(["sinks"])


def test_a_refusal_of_words_that_are_taken_alone_is_shown(tables: ModuleType) -> None:
    made = column(
        tables, ("a", None, None), ("b", None, None), ("a b", "not 3 and 4", None), ("b a", "not 5 and 6", None)
    )
    assert list(made.reasons({"a": ["a"], "b": ["b"]})) == [("some calls", "not 3 and 4")]


def test_sizes_that_are_taken_are_listed(tables: ModuleType) -> None:
    made = column(tables, ("d=8", None, None), ("d=2", "too small", None), ("d=16", None, None))
    assert made.cell(["d=2", "d=8", "d=16"]) == "8, 16"
    assert made.cell(["d=8", "d=16"]) == "all"


def test_the_words_of_examples_are_listed_by_their_kind(tables: ModuleType) -> None:
    words = {"head_dim=16", "head_dim=8", "value_dim=4", "grouped", "causal", "bias", "float64", "float16"}
    assert tables.kinds_of_words("flash_attention", words) == (
        "`float16`, `float64`",
        "`bias`, `causal`",
        "`grouped`, `head_dim=N` with N of 8, 16, `value_dim=N` with N of 4",
    )


def test_a_kernel_is_asked_on_its_own_device(tables: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    inv = tables.registry.invocation("rms_norm", x=tables.jax.ShapeDtypeStruct((4, 8), "float32"))
    seen = []

    def heuristic_cfg(own: object) -> None:
        seen.append((own.platform, own.device_kind, own.compute_capability))
        raise Unsupported("no")

    kernel = tables.SimpleNamespace(
        rank_on={"gpu": 0, "cpu": None, "tpu": None}.get, heuristic_cfg=heuristic_cfg, name="rms_norm.mine"
    )
    monkeypatch.setattr(
        tables, "registry", tables.SimpleNamespace(kernel=lambda *_: kernel, backends=lambda _: ("mine",))
    )
    assert tables.refusal("rms_norm", "mine", inv) == "no"
    assert seen == [("gpu", "NVIDIA H200", (9, 0))]
    assert tables.refusal("rms_norm", "other", inv) == tables.NO_KERNEL


# -- the reference -------------------------------------------------------------------------------------------------


def names_on(page: Path) -> set[str]:
    """The names that a page of the reference documents."""
    text = page.read_text()
    modules = [importlib.import_module(name) for name in re.findall(r"automodule:: (\S+)", text)]
    return {*re.findall(r"auto(?:function|class|exception|data):: \w+\.(\w+)", text)}.union(
        *(module.__all__ for module in modules)
    )


@pytest.mark.parametrize("page", REFERENCE, ids=lambda page: page.stem)
def test_the_reference_has_every_public_name(page: Path) -> None:
    names = names_on(page)
    assert {*importlib.import_module(page.stem).__all__} - names == set()


def test_a_page_of_the_reference_is_there_for_every_package() -> None:
    assert {page.stem for page in REFERENCE} == {
        f"ejkernel_{name}"
        for name in ["agree", "cache", "classes", "context", "core", "ops", "packed", "testing", "tuning"]
    }


# -- the site ------------------------------------------------------------------------------------------------------


def test_the_check_of_the_site_finds_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(
        '<h1 id="top">1</h1><p id="top">2</p><a href="gone.html">a</a><a href="#nowhere">b</a><img src="../x.png">'
        '<a href="#top">fine</a><a href="https://example.org/gone">not ours</a>'
    )
    (tmp_path / "searchindex.js").write_text('Search.setIndex({"terms": {"heuristic_cfg": 1}, "titleterms": {}})')
    check = subprocess.run(
        [sys.executable, ROOT / ".ci/check_site.py", tmp_path], capture_output=True, text=True, timeout=60, check=False
    )
    assert check.returncode == 1
    assert check.stderr.splitlines() == [
        "index.html: the id 'top' is there 2 times",
        "index.html: gone.html has no target",
        "index.html: #nowhere has no such anchor",
        "index.html: ../x.png leaves the site",
        "the search does not find 'sliding_window'",
        "the search does not find 'ejkernel_triton_smem_limit'",
    ]


# -- releases ------------------------------------------------------------------------------------------------------


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_fragments_have_a_kind() -> None:
    kinds = {kind["directory"] for kind in PROJECT["tool"]["towncrier"]["type"]}
    page = (ROOT / "docs/releasing.md").read_text()
    assert all(f"| `{kind}` |" in page for kind in kinds)
    fragments = [file.name for file in (ROOT / "changes").iterdir() if file.name != ".gitkeep"]
    assert [name for name in fragments if not re.fullmatch(rf"\+?[\w-]+\.({'|'.join(kinds)})(\.\d+)?\.md", name)] == []


def test_the_changelog_has_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert f"\n## {PROJECT['project']['version']}, " in text
    assert PROJECT["tool"]["towncrier"]["start_string"] in text


def test_the_version_of_all_distributions_is_set(tmp_path: Path) -> None:
    for project in [ROOT / "pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml")]:
        copy = tmp_path / project.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(project, copy)
    (tmp_path / ".ci").mkdir()
    program = shutil.copy(ROOT / ".ci/set_version.py", tmp_path / ".ci")

    def set_version(version: str) -> int:
        return subprocess.run(
            [sys.executable, program, version], capture_output=True, timeout=60, check=False
        ).returncode

    assert set_version("two") == 2
    assert set_version("7.8.9rc1") == 0
    projects = [tomllib.loads(file.read_text()) for file in tmp_path.rglob("pyproject.toml")]
    assert len(projects) > 10
    assert {project["project"]["version"] for project in projects} == {"7.8.9rc1"}
    assert all(project["build-system"]["requires"] == ["setuptools>=77"] for project in projects)
