"""The environment variables are listed, and one with a typo is told."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import pytest

from ejkernel_core import Registry, environment

ROOT = Path(__file__).parents[1]


def names_in_sources() -> set[str]:
    """The names of environment variables in strings of the packages, and in what runs their tests."""
    packages = [ROOT / "ejkernel_core", *(path for path in ROOT.glob("plugins/*/ejkernel_*") if path.is_dir())]
    files = [file for package in packages for file in package.rglob("*.py") if file.stem != "environment"]
    texts = [file.read_text() for file in (*files, ROOT / "conftest.py")]
    return {name for text in texts for name in re.findall(r"[\"'](EJKERNEL_[A-Z_]*[A-Z])[\"']", text)}


def test_every_variable_that_is_read_is_listed_and_no_other() -> None:
    assert {variable.name for variable in environment.VARIABLES} == names_in_sources()


@pytest.mark.parametrize(
    ("name", "similar"),
    [
        ("EJKERNEL_AUTOTNUE", "EJKERNEL_AUTOTUNE"),
        ("EJKERNEL_CACHEDIR", "EJKERNEL_CACHE_DIR"),
        ("EJKERNEL_PLUGIN", "EJKERNEL_PLUGINS"),
        ("EJKERNEL_ZZZ", None),
    ],
)
def test_a_variable_that_nothing_reads_has_the_most_similar_name(name: str, similar: str | None) -> None:
    assert environment.unread_variables({name: "1", "EJKERNEL_PLUGINS": "", "PATH": ""}) == {name: similar}


def test_explanations_tell_of_a_typo(monkeypatch: pytest.MonkeyPatch) -> None:
    registry, x = Registry(plugins="ejkernel-ops"), jax.ShapeDtypeStruct((3, 8), "float32")
    assert registry.explain("rms_norm", x).remarks == ()
    monkeypatch.setenv("EJKERNEL_AUTOTNUE", "on_miss")
    explanation = registry.explain("rms_norm", x)
    remark = "EJKERNEL_AUTOTNUE is set, and nothing reads it; did you mean EJKERNEL_AUTOTUNE?"
    assert str(explanation).endswith(f"\n  {remark}")
    assert explanation.backward is not None
    assert explanation.backward.remarks == ()
    assert remark in explanation._repr_html_()


def test_the_page_has_all_variables() -> None:
    page = (ROOT / "docs/environment-variables.md").read_text().partition("## EJKERNEL_PLUGINS")[0]
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert rows == [
        f"| `{v.name}` | {v.distribution} | {v.values} | {v.default} | {v.meaning} |" for v in environment.VARIABLES
    ]
