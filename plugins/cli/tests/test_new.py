"""``ejkernel new``: the packages that it makes install, are listed, pass their tests and can be tuned."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_core

KINDS = {
    "my-attention": ("--operation", "flash_attention", "--backend", "mine"),
    "my-fast-norm": ("--operation", "rms_norm"),
    "my-swish": ("--kind", "operation"),
    "my-store": ("--kind", "store"),
    "my-policy": ("--kind", "policy"),
    "my-suite": ("--kind", "bench"),
    "my-sizes": ("--kind", "command"),
    "my-trained-attention": ("--operation", "flash_attention", "--backward"),
    "my-trained-norm": ("--operation", "rms_norm", "--backward"),
    "my-trained-swish": ("--kind", "operation", "--backward"),
}
#: By package: its kernel of the backward operation, and the module of that.
BACKWARD = {
    "my-trained-attention": ("flash_attention_bwd.my_trained_attention", "my_trained_attention.bwd"),
    "my-trained-norm": ("rms_norm_bwd.my_trained_norm", "my_trained_norm.bwd"),
    "my-trained-swish": ("my_trained_swish_bwd.rows", "my_trained_swish.rows_bwd"),
}
#: By package: the words of the command that lists it, and what is in the list.
LISTED = {"my-suite": (["bench"], "my_suite  "), "my-sizes": (["--help"], "my-sizes  ")}

#: That of code on the site, which shows some of it.
WIDTH = 88


def files(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def new(run, tmp_path, monkeypatch):
    """``new("my-attention", ...)`` makes a package in a folder of its own, which it returns."""
    monkeypatch.chdir(tmp_path)

    def new(name: str, *options: str) -> Path:
        process = run("new", name, *options)
        assert (process.returncode, process.stderr) == (0, "")
        assert f'pip install -e "./{name}[test]"' in process.stdout
        return tmp_path / name

    return new


def install(folder: Path, target: Path) -> None:
    """Put a package where PYTHONPATH has it, with the metadata that pip writes, without pip."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    module = project["name"].replace("-", "_")
    shutil.copytree(folder / module, target / module)
    info = target / f"{module}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    sections = [f"[{g}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items()) for g, points in groups]
    (info / "entry_points.txt").write_text("\n".join(sections))


def run_python(target: Path, *arguments: str) -> str:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("EJKERNEL_")}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(target), os.environ.get("PYTHONPATH"))))
    variables["EJKERNEL_CACHE_DIR"] = str(target / "cache")
    process = subprocess.run(
        [sys.executable, *arguments],
        env=variables, cwd=target, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert process.returncode == 0, f"{process.stdout}\n{process.stderr}"
    return process.stdout


# -- what is made ------------------------------------------------------------------------------------------------------


def test_a_kernel_has_the_names_that_were_given(new):
    folder = new("my-attention", *KINDS["my-attention"])
    made = files(folder)
    assert [*sorted(made)] == ["README.md", "my_attention/__init__.py", "pyproject.toml", "test_my_attention.py"]
    project = tomllib.loads(made["pyproject.toml"])["project"]
    assert project["entry-points"] == {"ejkernel.kernels": {"flash_attention.mine": "my_attention"}}
    assert project["dependencies"] == ["ejkernel-core", "ejkernel-ops"]
    assert "def _attend(inv, query, first):" in made["my_attention/__init__.py"]


def test_a_kernel_of_another_operation_begins_as_the_reference(new):
    folder = new("my-fast-norm", *KINDS["my-fast-norm"])
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["entry-points"] == {"ejkernel.kernels": {"rms_norm.my_fast_norm": "my_fast_norm"}}


def test_an_operation_has_all_its_entry_points(new):
    project = tomllib.loads((new("my-swish", *KINDS["my-swish"]) / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["ejkernel.operations"] == {
        "my_swish": "my_swish:forward",
        "my_swish_bwd": "my_swish:backward",
    }
    assert [*project["entry-points"]["ejkernel.kernels"]] == [
        "my_swish.reference",
        "my_swish_bwd.reference",
        "my_swish.rows",
    ]


@pytest.mark.parametrize("name", BACKWARD)
def test_a_backward_is_a_module_and_an_entry_point_more(run, new, tmp_path, name):
    made = files(new(name, *KINDS[name]))
    (tmp_path / "plain").mkdir()
    run("new", name, *KINDS[name][:-1], "--into", "plain")
    plain = files(tmp_path / "plain" / name)
    kernel, module = BACKWARD[name]
    assert made.keys() - plain.keys() == {module.replace(".", "/") + ".py"}
    lines = made["pyproject.toml"].splitlines()
    lines.remove(f'"{kernel}" = "{module}"')
    assert lines == plain["pyproject.toml"].splitlines()
    assert [path for path in plain if made[path] != plain[path]] == ["README.md", "pyproject.toml"]


def test_the_backward_operation_is_that_which_the_operation_names(new, monkeypatch):
    operation = SimpleNamespace(backward="gradients_of_rms_norm")
    monkeypatch.setattr(ejkernel_core, "registry", SimpleNamespace(operation=lambda name: operation))
    project = tomllib.loads((new("a-b", "--operation", "rms_norm", "--backward") / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["ejkernel.kernels"]["gradients_of_rms_norm.a_b"] == "a_b.bwd"


@pytest.mark.parametrize(
    ("name", "points"),
    [
        ("my-suite", {"ejkernel.benchmarks": {"my_suite": "my_suite"}}),
        ("my-sizes", {"ejkernel.commands": {"my-sizes": "my_sizes:command"}}),
    ],
)
def test_a_tool_has_one_entry_point(new, name, points):
    project = tomllib.loads((new(name, *KINDS[name]) / "pyproject.toml").read_text())["project"]
    assert project["entry-points"] == points


@pytest.mark.parametrize("name", KINDS)
def test_no_word_of_a_template_is_left_and_the_code_is_in_order(new, name):
    folder = new(name, *KINDS[name])
    text = "\n".join([*files(folder), *files(folder).values()])
    assert (
        re.findall(r"my[-_]package|MY_PACKAGE|my_operation|my_backend|my-provider|# --backward|\.template", text) == []
    )
    for path, content in files(folder).items():
        if path.endswith(".py"):
            compile(content, path, "exec")
        if not path.endswith(".md"):
            assert [line for line in content.splitlines() if len(line) > WIDTH] == []
    ruff = shutil.which("ruff")
    if ruff:
        options = ["--isolated", "--line-length", str(WIDTH)]
        subprocess.run([ruff, "check", *options, "--select", "E,F,I,B", folder], check=True, timeout=60)
        subprocess.run([ruff, "format", "--check", *options, folder], check=True, timeout=60)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["my-attention"], 2, "a kernel needs --operation; there are context_attention"),
        (["my-attention", "--operation", "zzz"], 2, "'zzz' is not installed; there are"),
        (
            ["my-attention", "--operation", "rms_norm_bwd"],
            2,
            "write --operation rms_norm --backward, which makes a kernel of each",
        ),
        (
            ["a-b", "--operation", "rms_norm_quantized", "--backward"],
            2,
            "rms_norm_quantized has no backward operation: JAX",
        ),
        (["a-b", "--kind", "store", "--backward"], 2, "--backward is for a kernel or an operation, not for a store"),
        (
            ["a-b", "--kind", "command", "--backward"],
            2,
            "--backward is for a kernel or an operation, not for a subcommand",
        ),
        (["my attention", "--kind", "store"], 2, "'my attention' is not a name for a package"),
        (["1a", "--kind", "store"], 2, "'1a' is not a name for a package"),
        (["../a", "--kind", "store"], 2, "'../a' is not a name for a package"),
        (["import", "--kind", "store"], 2, "'import' is a word of Python; take another name, as my-import"),
        (["json", "--kind", "store"], 2, "a package 'json' is installed already"),
        (["ejkernel-ops", "--kind", "store"], 2, "a package 'ejkernel-ops' is installed already"),
        (["a-b", "--kind", "operation", "--operation", "rms_norm"], 2, "'rms_norm' is installed already"),
        (["a-b", "--kind", "operation", "--operation", "Rms"], 2, "'Rms' is not a name for an operation"),
        (["a-b", "--operation", "rms_norm", "--backend", "a.b"], 2, "'a.b' is not a name for a backend"),
        (
            ["a-b", "--operation", "rms_norm", "--backend", "xla"],
            2,
            "has a kernel rms_norm.xla; name another --backend",
        ),
        (
            ["a-b", "--kind", "bench", "--backend", "x", "--backward"],
            2,
            "--backend and --backward are for a kernel or an operation, not for a suite of benchmarks",
        ),
        (["rms_norm", "--kind", "bench"], 2, "has a suite of benchmarks 'rms_norm'; take another name"),
        (["list", "--kind", "command"], 2, "has a subcommand 'list'; take another name"),
        (["tuner", "--kind", "policy"], 2, "has a policy 'tuner'; take another name"),
        (["a-b", "--kind", "shop"], 2, "'shop' is not one of"),
        (["a-b", "--kind", "store", "--into", "absent"], 1, "absent/a-b cannot be written: No such file or directory"),
        (["a-b", "--kind", "store", "--into", "/proc"], 1, "/proc/a-b cannot be written: "),
        (["made", "--kind", "store"], 1, "made exists; remove it, or take another name"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_made_is_told_in_one_line(run, tmp_path, monkeypatch, words, code, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "file").write_text("kept")
    process = run("new", *words)
    assert process.returncode == code
    assert message in process.stderr
    assert process.stderr.count("\n") == 1
    assert files(tmp_path) == {"made/file": "kept"}


def test_a_full_disk_leaves_nothing(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_text = Path.write_text

    def full(self: Path, text: str, **options: str) -> int:
        if self.name == "pyproject.toml":
            raise OSError(28, "No space left on device")
        return write_text(self, text, **options)

    monkeypatch.setattr(Path, "write_text", full)
    process = run("new", "my-store", "--kind", "store")
    assert process.stderr == "ejkernel: my-store cannot be written: No space left on device; nothing was made\n"
    assert [*tmp_path.iterdir()] == []


# -- what is made works ------------------------------------------------------------------------------------------------

TUNE = """
import ejkernel_core
from ejkernel_tuning import autotune

operation, backend = "{operation}", "{backend}"
example = next(iter(ejkernel_core.registry.operation(operation).examples()))
result = autotune(operation, **example.abstract(), backend=backend, direction="forward", budget_s=60)
print(result)
plan = ejkernel_core.plan(operation, **example.abstract(), backend=backend)
assert plan.origin != "heuristic", plan
print(plan.kernel.name)
"""


@pytest.fixture
def target(tmp_path):
    (tmp_path / "target").mkdir()
    return tmp_path / "target"


@pytest.fixture
def importable(new, monkeypatch):
    """``importable("my-suite")`` makes a package whose modules can be imported here, and returns its folder."""

    def importable(name: str) -> Path:
        folder = new(name, *KINDS[name])
        monkeypatch.syspath_prepend(folder)
        return folder

    modules = {*sys.modules}
    yield importable
    for module in {*sys.modules} - modules:
        if module.startswith("my_"):
            del sys.modules[module]


def attention(query, key, value):
    """(out, lse) of causal attention with two queries for each key, in which the last query and key are at one place."""
    key, value = jnp.repeat(key, 2, axis=2), jnp.repeat(value, 2, axis=2)
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key, precision="highest") / 2
    length, count = logits.shape[2:]
    logits = jnp.where(jnp.tri(length, count, count - length, dtype=bool), logits, -jnp.inf)
    out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), value, precision="highest")
    return out, jax.nn.logsumexp(logits, axis=-1)


@pytest.mark.parametrize("without", [None, "d_out", "d_lse"])
def test_the_gradients_of_attention_are_those_of_jax(importable, without):
    importable("my-trained-attention")
    backward = importlib.import_module("my_trained_attention.bwd")
    shapes = {"query": (2, 5, 4, 4), "key": (2, 7, 2, 4), "value": (2, 7, 2, 3)}
    keys = jax.random.split(jax.random.key(0), 5)
    arrays = {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=False)}
    (out, lse), pull_back = jax.vjp(attention, *arrays.values())
    cotangents = {"d_out": jax.random.normal(keys[3], out.shape), "d_lse": jax.random.normal(keys[4], lse.shape)}
    zeros = {name: 0 * array if name == without else array for name, array in cotangents.items()}
    expected = dict(zip(shapes, pull_back((zeros["d_out"], zeros["d_lse"])), strict=True))
    given = {name: None if name == without else array for name, array in cotangents.items()}
    options = {"causal": True, "softmax_scale": 0.5, "wrt": ("value", "query", "key")}
    call = {**arrays, "out": out, "lse": lse, **given, **options}
    for block in (2, 5, 8):
        gradients = backward.run_backend(call, backward.Config(block))
        for name, gradient in zip(options["wrt"], gradients, strict=True):
            np.testing.assert_allclose(gradient, expected[name], rtol=1e-5, atol=1e-5, err_msg=f"{name}, {block}")


def test_the_contender_of_a_suite_computes_what_the_operation_does(importable):
    importable("my-suite")
    suite = importlib.import_module("my_suite")
    arguments = suite.example(3, 8).arguments(0)
    ours = ejkernel_core.call("rms_norm", **arguments, backend="reference")
    theirs = suite.by_model(arguments)(arguments["x"], arguments["weight"])
    np.testing.assert_allclose(theirs, ours, rtol=1e-5, atol=1e-6)


#: The tests of these take some seconds.
TOOLS = [pytest.param(name, marks=pytest.mark.long) for name in ("my-suite", "my-sizes")]


@pytest.mark.parametrize("name", ["my-store", "my-policy", *TOOLS])
def test_the_tests_of_a_package_pass_whatever_the_folder_above_has(new, target, name):
    folder = new(name, *KINDS[name])
    install(folder, target)
    (folder.parent / "conftest.py").write_text("1 / 0\n")
    (folder.parent / "pytest.ini").write_text("[pytest]\n")
    output = run_python(target, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder))
    assert re.search(r"^\d passed", output, re.MULTILINE)


GRADIENT = """
import jax, jax.numpy as jnp, {module}
x, slope = jnp.array([[0.3, -2.0, 1.5]]), jnp.array([1.0, 0.5, 2.0])
gradient = jax.grad(lambda x: {module}.{module}(x, slope).sum())(x)
expected = jax.grad(lambda x: (x * jax.nn.sigmoid(slope * x)).sum())(x)
assert jnp.allclose(gradient, expected, atol=1e-6), (gradient, expected)
"""


@pytest.mark.parametrize("name", ["my-swish", "my-trained-swish"])
def test_a_new_operation_is_differentiated_without_a_warning(new, target, name):
    install(new(name, *KINDS[name]), target)
    run_python(target, "-W", "error::RuntimeWarning", "-c", GRADIENT.format(module=name.replace("-", "_")))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "kernel", "selection"),
    [
        # Of attention the examples alone: the other proofs take minutes, and are those of the page on plugins.
        ("my-attention", "flash_attention.mine", "test_example and not grid"),
        ("my-fast-norm", "rms_norm.my_fast_norm", "test_example or test_configurations"),
        ("my-swish", "my_swish.rows", ""),
        ("my-trained-attention", "flash_attention.my_trained_attention", "test_example and not grid"),
        ("my-trained-norm", "rms_norm.my_trained_norm", "test_example or test_configurations"),
        ("my-trained-swish", "my_trained_swish.rows", ""),
    ],
)
def test_a_kernel_is_listed_passes_its_proofs_and_is_tuned(new, target, name, kernel, selection):
    folder = new(name, *KINDS[name])
    install(folder, target)
    operation, _, backend = kernel.rpartition(".")
    listing = json.loads(run_python(target, "-m", "ejkernel_cli", "list", "--here", "--json"))
    rows = {(row["operation"], row["backend"]): row["status"] for row in listing["kernels"]}
    assert rows[operation, backend] == "runs"
    options = ["-q", "-p", "no:cacheprovider", "-m", "not long", "-k", selection]
    output = run_python(target, "-m", "pytest", *options, "--rootdir", str(folder), str(folder))
    assert re.search(r"^\d+ passed", output, re.MULTILINE)
    output = run_python(target, "-c", TUNE.format(operation=operation, backend=backend))
    assert output.splitlines()[-1] == kernel


def setuptools_version() -> int:
    try:
        return int(metadata.version("setuptools").partition(".")[0])
    except metadata.PackageNotFoundError:
        return 0


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_a_package_builds_and_installs(new, target, name):
    folder = new(name, *KINDS[name])
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    isolation = [] if setuptools_version() < 77 else ["--no-build-isolation"]  # with it, nothing is fetched
    subprocess.run([*pip, "install", "--no-deps", *isolation, "--target", target, folder], check=True, timeout=300)
    words, line = LISTED.get(name, (["list", "--json"], f'"{name} 0.1.0"'))
    assert line in run_python(target, "-m", "ejkernel_cli", *words)


#: By package: the code of its backward that is broken, and the examples that find it.
FAULTS = {
    "my-trained-attention": ("gradients[name].astype", "2 * gradients[name].astype", "test_example and mqa"),
    "my-trained-norm": (
        "reference.run_backend(inv, None)",
        "[2 * g for g in reference.run_backend(inv, None)]",
        "test_example",
    ),
    "my-trained-swish": ("gradients[name].astype", "2 * gradients[name].astype", "test_example"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", FAULTS)
def test_a_backward_that_is_wrong_is_found(new, target, name):
    folder = new(name, *KINDS[name])
    kernel, module = BACKWARD[name]
    correct, wrong, selection = FAULTS[name]
    file = folder / (module.replace(".", "/") + ".py")
    assert correct in file.read_text()
    file.write_text(file.read_text().replace(correct, wrong))
    install(folder, target)
    options = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not long", "-k", selection]
    with pytest.raises(AssertionError, match=f"gradients by {kernel}"):
        run_python(target, "-m", "pytest", *options, "--rootdir", str(folder), str(folder))
