"""The plugin of docs/writing-a-plugin.md, taken from the page, built, installed beside everything else and used."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs/writing-a-plugin.md"

CALL = """
import jax, numpy as np
import ejkernel_core

query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 70, 4, 16))
query = query[:, :50]

for given in ({}, {"causal": True}, {"causal": True, "softmax_scale": 0.5, "return_lse": True}):
    assert ejkernel_core.plan("flash_attention", query, key, value, **given).kernel.name == "flash_attention.mine"
    ours = ejkernel_core.call("flash_attention", query, key, value, **given)
    right = ejkernel_core.call("flash_attention", query, key, value, backend="reference", **given)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)

loss = lambda query, backend: ejkernel_core.call("flash_attention", query, key, value, backend=backend).sum()
np.testing.assert_allclose(jax.grad(loss)(query, None), jax.grad(loss)(query, "reference"), rtol=1e-4, atol=1e-5)
"""

EXPLAIN = """
import jax
import ejkernel_core

shapes = [jax.ShapeDtypeStruct((1, 64, 4, 16), "float32")] * 3
print(ejkernel_core.explain("flash_attention", *shapes, causal=True))
print("---")
print(ejkernel_core.explain("flash_attention", *shapes, sliding_window=8))
print("---")
try:
    ejkernel_core.plan("flash_attention", *shapes, sliding_window=8, backend="mine")
except ejkernel_core.NoKernel as error:
    print(error)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder for PYTHONPATH in which the plugin is installed. Nothing changes in the environment of this process."""
    source, target = tmp_path_factory.mktemp("my-attention"), tmp_path_factory.mktemp("installed")
    for language, name in (
        ("toml", "pyproject.toml"),
        ("python", "my_attention.py"),
        ("python", "test_my_attention.py"),
    ):
        (source / name).write_text(file_in_page(language, name))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-deps", "--target", target, source], check=True)
    (target / "test_my_attention.py").write_text((source / "test_my_attention.py").read_text())
    return target


def file_in_page(language: str, name: str) -> str:
    """The block of the page that starts with the file's name as a comment."""
    found = re.findall(rf"^```{language}\n# {re.escape(name)}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(found) == 1, f"{PAGE.name} has {len(found)} blocks that are {name}"
    return found[0]


def python(folder: Path, *arguments: str, plugins: str | None = None) -> str:
    """What an interpreter prints that has the plugin on its path."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    environment.pop("EJKERNEL_PLUGINS", None)
    if plugins is not None:
        environment["EJKERNEL_PLUGINS"] = plugins
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def kernel_lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip().startswith("flash_attention.")]


def test_the_listing_has_it_with_its_distribution(folder):
    listing = python(folder, "-m", "ejkernel_core")
    assert re.search(r"flash_attention\.mine +my-attention 1\.0$", listing, re.MULTILINE)
    following = listing.partition("flash_attention.mine")[2].splitlines()[1]
    assert "broken" not in following


def test_a_call_takes_it_and_the_values_are_the_reference_s(folder):
    python(folder, "-c", CALL)


def test_explain_names_it_and_its_refusal(folder):
    taken, refused, alone = python(folder, "-c", EXPLAIN).split("---\n")
    assert taken.startswith("flash_attention.mine with Config(block=64), by heuristic")
    assert "flash_attention.mine (my-attention 1.0): chosen" in kernel_lines(taken)
    reason = "flash_attention.mine (my-attention 1.0): refused, my-attention does not support sliding_window"
    assert reason in kernel_lines(refused)
    assert not refused.startswith("flash_attention.mine")
    assert reason in kernel_lines(alone)


def test_it_can_be_left_out(folder):
    assert "my-attention" not in python(folder, "-m", "ejkernel_core", plugins="-my-attention").partition("\n")[2]
    taken = python(folder, "-c", EXPLAIN.partition('print("---")')[0], plugins="-my-attention")
    assert "flash_attention.mine" not in taken
    assert "flash_attention.reference" in taken


def test_it_is_not_left_behind():
    assert "my-attention" not in python(Path(__file__).parent, "-m", "ejkernel_core")


def test_it_passes_its_proof(folder):
    """The page's test file, without the crossed cases: those take long, and prove the kit rather than the page."""
    short = ("-m", "not long", "-k", "test_case and not grid", "-W", "ignore::pytest.PytestUnknownMarkWarning")
    proof = python(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", *short, "test_my_attention.py")
    assert re.search(r"^\d+ passed, \d+ skipped", proof, re.MULTILINE)
