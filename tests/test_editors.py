"""What an editor knows: types of a user's code, checked by mypy and pyright against installed wheels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DISTRIBUTIONS = (".", "plugins/ops", "plugins/context")

#: A line with ``# type: ignore`` must be an error, and every other line must be none.
USER_CODE = """
from typing import Any, assert_type

import jax
import jax.numpy as jnp

import ejkernel_core
from ejkernel_core import Explanation, Invocation, Plan, Unsupported, hookimpl
from ejkernel_context import context_attention
from ejkernel_ops import flash_attention, layer_norm, rms_norm
from ejkernel_ops.flax import dot_product_attention as attention_fn
from ejkernel_ops.jax_nn import dot_product_attention

x = jnp.ones((1, 4, 2, 8))

assert_type(flash_attention(x, x, x, causal=True), jax.Array)
assert_type(flash_attention(x, x, x, return_lse=True), tuple[jax.Array, jax.Array])
flash_attention(x, x, x, return_lse=True).shape  # type: ignore
flash_attention(x, x, x, scale=0.1)  # type: ignore
flash_attention(x, x)  # type: ignore


def with_flag(flag: bool) -> None:
    assert_type(flash_attention(x, x, x, return_lse=flag), jax.Array | tuple[jax.Array, jax.Array])


assert_type(rms_norm(x), jax.Array)
assert_type(rms_norm(x, residual=x), tuple[jax.Array, jax.Array])
assert_type(rms_norm(x, quantize="int8_row"), tuple[jax.Array, jax.Array])
assert_type(layer_norm(x), jax.Array)
assert_type(layer_norm(x, residual=x, quantize="fp8_row"), tuple[jax.Array, jax.Array, jax.Array])
layer_norm(x, quantize="int4")  # type: ignore

assert_type(dot_product_attention(x, x, x), jax.Array)
assert_type(dot_product_attention(x, x, x, return_residual=True), tuple[jax.Array, jax.Array])
assert_type(attention_fn(x, x, x), jax.Array)

assert_type(context_attention(x, x, x, axis="seq"), jax.Array)
assert_type(context_attention(x, x, x, axis="seq", return_lse=True), tuple[jax.Array, jax.Array])
context_attention(x, x, x, axis="seq", casual=True)  # type: ignore

# The results of an operation that is called by name are unknown; what describes the call is known.
assert_type(ejkernel_core.call("flash_attention", x, x, x), Any)
assert_type(ejkernel_core.plan("flash_attention", x, x, x), Plan)
assert_type(ejkernel_core.explain("flash_attention", x, x, x), Explanation)
assert_type(ejkernel_core.invocation("flash_attention", x, x, x), Invocation)

with ejkernel_core.policy_override(autotune=True, budget_s=5, wait=False), ejkernel_core.overlay_cache({"key": 1}):
    pass
with ejkernel_core.policy_override(mode="error_on_miss", other_versions=True):
    pass
ejkernel_core.policy_override(budjet_s=5)  # type: ignore
ejkernel_core.policy_override(mode="always")  # type: ignore
ejkernel_core.policy_override(autotune=True, mode="off")  # type: ignore
ejkernel_core.overlay_cache(3)  # type: ignore
with ejkernel_core.overlay_cache(ejkernel_core.ConfigCache()):
    pass


@hookimpl
def heuristic_cfg(inv: Invocation) -> int:
    assert_type(inv.platform, str)
    assert_type(inv["query"], Any)
    inv.platfrom  # type: ignore
    if inv["query"].shape[-1] > 256:
        raise Unsupported("heads are too wide")
    return 128


def test(inv: Invocation) -> None:
    assert_type(heuristic_cfg(inv), int)
    heuristic_cfg("inv")  # type: ignore
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the wheels, and with the packages of this one, but not with those in this repository."""
    folder = tmp_path_factory.mktemp("editors")
    for name in DISTRIBUTIONS:  # copied, because building leaves files in the tree
        copy(ROOT / name, folder / "sources" / name)
    wheels = [str(folder / "sources" / name) for name in DISTRIBUTIONS]
    run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder / "wheels"), *wheels], folder)
    venv.create(folder / "venv", symlinks=True)
    interpreter = folder / "venv" / "bin" / "python"
    site = Path(run([str(interpreter), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip())
    # A .pth file in the folder of another interpreter is not read, so its editable installs are not there.
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    built = [str(wheel) for wheel in (folder / "wheels").iterdir()]
    target = ["--no-deps", "--no-compile", "--target", str(site)]
    run([sys.executable, "-m", "pip", "install", "-q", *target, *built], folder)
    return interpreter


def copy(source: Path, target: Path) -> None:
    """What a distribution is built from."""
    target.mkdir(parents=True, exist_ok=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (source / name).exists():
            shutil.copy(source / name, target)
    for package in source.glob("ejkernel_*"):
        if (package / "__init__.py").exists():
            shutil.copytree(package, target / package.name, ignore=shutil.ignore_patterns("__pycache__"))


def run(command: list[str], folder: Path) -> str:
    """The output of a command that succeeds, in a folder outside of the repository."""
    hidden = ("PYTHONPATH", "MYPYPATH")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.fixture
def user_folder(tmp_path: Path) -> Path:
    (tmp_path / "users_code.py").write_text(USER_CODE)
    return tmp_path


@pytest.mark.long
def test_mypy_knows_the_types_of_an_installed_wheel(python: Path, user_folder: Path) -> None:
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python)]
    assert "Success" in run([*command, "--cache-dir", str(user_folder / "cache"), "users_code.py"], user_folder)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("pyright") is None, reason="pyright, which needs Node.js, is not on the path")
def test_pyright_knows_the_types_of_an_installed_wheel(python: Path, user_folder: Path) -> None:
    (user_folder / "pyrightconfig.json").write_text('{"reportUnnecessaryTypeIgnoreComment": "error"}')
    assert "0 errors" in run(["pyright", "--pythonpath", str(python), "-p", "."], user_folder)
