"""The plugin of docs/writing-a-plugin.md is made by the page's command, installed and used; the page has its code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ejkernel_core
from tests.pages import blocks

ARGUMENTS = ejkernel_core.registry.operation("flash_attention").signature.parameters
PAGE = Path(__file__).parents[1] / "docs/writing-a-plugin.md"

CALL = """
import jax, numpy as np
import ejkernel_core

query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 70, 4, 16))
query = query[:, :50]

for options in ({}, {"causal": True}, {"causal": True, "softmax_scale": 0.5, "return_lse": True}):
    assert ejkernel_core.plan("flash_attention", query, key, value, **options).kernel.name == "flash_attention.mine"
    results = ejkernel_core.call("flash_attention", query, key, value, **options)
    expected = ejkernel_core.call("flash_attention", query, key, value, backend="reference", **options)
    for result, expected_result in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(result, expected_result, rtol=1e-5, atol=1e-6)

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
def sources(tmp_path_factory) -> list[Path]:
    """What the commands of the page make: a kernel, and one with a backward."""
    folders = []
    for words in re.findall(r"^ejkernel (new .*)$", PAGE.read_text(), re.MULTILINE):
        folder = tmp_path_factory.mktemp("made")
        subprocess.run([sys.executable, "-m", "ejkernel_cli", *words.split()], cwd=folder, check=True, timeout=60)
        folders.append(folder / "my-attention")
    return folders


@pytest.fixture(scope="module")
def source(sources) -> Path:
    """What the first command of the page makes."""
    return sources[0]


@pytest.fixture(scope="module")
def folder(source, tmp_path_factory) -> Path:
    """A folder for PYTHONPATH in which the plugin is installed, with a higher rank. The environment of this process
    does not change.
    """
    target = tmp_path_factory.mktemp("installed")
    module = source / "my_attention" / "__init__.py"
    module.write_text(module.read_text().replace('"cpu": 1,', '"cpu": 90,'))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-deps", "--target", target, source], check=True)
    (target / "test_my_attention.py").write_text((source / "test_my_attention.py").read_text())
    return target


@pytest.mark.parametrize("name", ["my_attention/__init__.py", "test_my_attention.py"])
def test_the_page_shows_what_the_command_makes(source, name):
    shown = [block.text_of_file for block in blocks(PAGE) if block.file == name]
    code = (source / name).read_text().replace('"cpu": 90,', '"cpu": 1,')
    lines = [line for line in "".join(shown).splitlines() if line]
    assert lines == [line for line in code.splitlines() if line and not line.startswith('"""The proofs')]


def test_the_page_shows_the_entry_points(sources):
    shown = [block.content for block in blocks(PAGE) if block.language == "toml"]
    for content, source in zip(shown, sources, strict=True):
        assert content in (source / "pyproject.toml").read_text()


def test_the_package_with_a_backward_has_the_module_that_the_page_names(sources):
    assert [(source / "my_attention/bwd.py").is_file() for source in sources] == [False, True]


def run_python(folder: Path, *arguments: str, plugins: str | None = None) -> str:
    """The output of an interpreter with the plugin on its path."""
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    environment.pop("EJKERNEL_PLUGINS", None)
    if plugins is not None:
        environment["EJKERNEL_PLUGINS"] = plugins
    process = subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, f"{process.stdout}\n{process.stderr}"
    return process.stdout


def kernel_lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip().startswith("flash_attention.")]


@pytest.mark.long
def test_the_listing_has_the_plugin_with_its_distribution(folder):
    listing = json.loads(run_python(folder, "-m", "ejkernel_cli", "list", "--here", "--json"))
    (row,) = [row for row in listing["kernels"] if row["distribution"] == "my-attention"]
    assert (row["operation"], row["backend"], row["status"]) == ("flash_attention", "mine", "runs")


@pytest.mark.long
def test_calls_choose_the_plugin_and_agree_with_the_reference(folder):
    run_python(folder, "-c", CALL)


@pytest.mark.long
def test_explain_reports_the_plugin_and_its_refusal(folder):
    supported, unsupported, error = run_python(folder, "-c", EXPLAIN).split("---\n")
    assert supported.startswith("flash_attention.mine with Config(block=64), by heuristic")
    assert "flash_attention.mine (my-attention 0.1.0): chosen" in kernel_lines(supported)
    reason = "flash_attention.mine (my-attention 0.1.0): refused, my-attention does not support sliding_window; leave it out, or pass another backend"
    assert reason in kernel_lines(unsupported)
    assert not unsupported.startswith("flash_attention.mine")
    assert reason in kernel_lines(error)


@pytest.mark.long
def test_the_plugin_can_be_excluded(folder):
    assert "my-attention" in run_python(folder, "-m", "ejkernel_cli", "list", "--json")
    selected = run_python(folder, "-m", "ejkernel_cli", "list", plugins="-my-attention")
    assert "my-attention" not in selected.partition("\n")[2]
    supported = run_python(folder, "-c", EXPLAIN.partition('print("---")')[0], plugins="-my-attention")
    assert "flash_attention.mine" not in supported
    assert "flash_attention.reference" in supported


def test_the_kernel_reads_or_refuses_every_argument(source):
    """One that an operation gets later too: a kernel that drops it returns a wrong result."""
    code = (source / "my_attention/__init__.py").read_text()
    # Each has a partner that is refused, or means nothing to a kernel.
    left = {"kv_segment_ids", "cum_seqlens_k", "dropout_prob", "return_lse"}
    assert [name for name in set(ARGUMENTS) - left if f'"{name}"' not in code] == []


@pytest.mark.long
def test_the_plugin_is_not_installed_in_this_environment():
    assert "my-attention" not in run_python(Path(__file__).parent, "-m", "ejkernel_cli", "list")


@pytest.mark.long
def test_the_plugin_passes_its_proofs(folder):
    """Without the crossed cases, which take long and test the proofs rather than the page."""
    selection = ("-m", "not long", "-k", "test_example and not grid", "-W", "ignore::pytest.PytestUnknownMarkWarning")
    output = run_python(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", *selection, "test_my_attention.py")
    assert re.search(r"^\d+ passed", output, re.MULTILINE)
