"""The operation of docs/writing-an-operation.md is installed from the page's code, and used."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from ejkernel_core import Example, Operation
from tests.pages import blocks

PAGE = Path(__file__).parents[1] / "docs/writing-an-operation.md"
FILES = [(block.file, block.text_of_file) for block in blocks(PAGE) if block.file]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH in which the distribution is installed: what the page's command makes, with the page's
    files in it.
    """
    folder, target = tmp_path_factory.mktemp("made"), tmp_path_factory.mktemp("installed")
    (words,) = re.findall(r"^ejkernel (new .*)$", PAGE.read_text(), re.MULTILINE)
    subprocess.run([sys.executable, "-m", "ejkernel_cli", *words.split()], cwd=folder, check=True, timeout=60)
    source = folder / "my-norm"
    (project,) = [block.content for block in blocks(PAGE) if block.language == "toml"]
    assert project in (source / "pyproject.toml").read_text()
    for name, content in FILES:
        (source / name).write_text(content)
        if "/" not in name:
            (target / name).write_text(content)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-deps", "--target", target, source], check=True)
    return target


def run_python(folder: Path, *arguments: str, warning: str = "") -> str:
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "EJKERNEL_CACHE_DIR": str(folder / "cache")}
    environment.pop("EJKERNEL_PLUGINS", None)
    process = subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, f"{process.stdout}\n{process.stderr}"
    assert warning in process.stderr
    return process.stdout


def test_the_listing_has_the_kernels_of_the_page(folder: Path) -> None:
    listing = json.loads(run_python(folder, "-m", "ejkernel_cli", "list", "--here", "--json"))
    rows = [
        (row["operation"], row["backend"], row["status"])
        for row in listing["kernels"]
        if row["distribution"] == "my-norm"
    ]
    kernels = ("my_rms_norm", "rows"), ("my_rms_norm", "reference"), ("my_rms_norm_bwd", "reference")
    assert rows == [(*kernel, "runs") for kernel in kernels]


def test_the_operation_of_the_page_prints_what_the_page_shows(folder: Path) -> None:
    expected = PAGE.read_text().partition("# use_my_norm.py")[2].partition("```text\n")[2].partition("```")[0]
    warning = (
        "my_rms_norm_bwd runs by its reference, my_rms_norm_bwd.reference (my-norm 0.1.0), which is slow: no other kernel of "
        "it is installed, and its distribution, my-norm 0.1.0, provides none. 'ejkernel list' lists"
    )
    assert run_python(folder, "use_my_norm.py", warning=warning) == expected


def test_the_operation_of_the_page_refuses_integers(folder: Path) -> None:
    source = """
import jax.numpy as jnp
from my_norm import my_rms_norm
try:
    my_rms_norm(jnp.ones((2, 8), "int32"), jnp.ones(8))
except TypeError as error:
    print(error)
"""
    lines = run_python(folder, "-c", source).splitlines()
    assert lines[0] == "my_rms_norm: x: takes floating-point numbers; got int32"


def test_the_backward_kernel_of_the_page_is_right(folder: Path) -> None:
    source = """
import jax
import jax.numpy as jnp
import numpy as np
from ejkernel_core import registry
from my_norm import my_rms_norm, rows_bwd
from my_norm.reference import normalize

registry.register(rows_bwd, "my_rms_norm_bwd.rows")
x, weight, ct = (jax.random.normal(key, shape) for key, shape in zip(
    jax.random.split(jax.random.key(0), 3), ((3, 5, 8), (8,), (3, 5, 8))))
for names in (("x", "weight"), ("weight", "x"), ("weight",)):
    def loss(arrays, function):
        arrays = {"x": x, "weight": weight, **dict(zip(names, arrays))}
        return (function(**arrays) * ct).sum()
    plain = lambda **arrays: normalize({**arrays, "epsilon": 1e-6})[0]
    arrays = tuple({"x": x, "weight": weight}[name] for name in names)
    for got, expected in zip(jax.grad(loss)(arrays, my_rms_norm), jax.grad(loss)(arrays, plain)):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)
print(registry.explain("my_rms_norm", x, weight).backward.plan.kernel.name)
"""
    assert run_python(folder, "-c", source).split() == ["my_rms_norm_bwd.rows"]


@pytest.mark.long
def test_a_module_takes_the_place_of_the_operation_of_its_name(folder: Path) -> None:
    source = """
import jax
import jax.numpy as jnp
import my_norm
import my_norm.backward
from ejkernel_core import PluginError

try:
    jax.grad(lambda x: my_norm.my_rms_norm(x, jnp.ones(8)).sum())(jnp.ones((2, 8)))
except PluginError as error:
    print(error)
"""
    module = folder / "my_norm/backward.py"
    module.touch()
    try:
        assert "(my_norm:backward) is of type module, not an Operation; a module has the name" in run_python(
            folder, "-c", source
        )
    finally:
        module.unlink()


@pytest.mark.long
def test_the_kernels_of_the_page_pass_their_proofs(folder: Path) -> None:
    output = run_python(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not long", "test_my_norm.py",
                   "-W", "ignore::pytest.PytestUnknownMarkWarning", "-k", "not programs")  # fmt: skip
    assert re.search(r"^\d+ passed", output, re.MULTILINE)
    assert "failed" not in output


@pytest.mark.long
def test_the_kernel_of_the_page_is_tuned(folder: Path) -> None:
    assert re.search(r"rows .*Config\(rows=\d+\)", run_python(folder, "tune_my_norm.py"))


@pytest.mark.parametrize("kind", [Operation, Example], ids=lambda kind: kind.__name__)
def test_the_page_lists_every_field(kind: type) -> None:
    section = PAGE.read_text().partition(f"## All fields of an {kind.__name__.lower()}")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == [field.name for field in attrs.fields(kind)]
