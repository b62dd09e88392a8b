"""Importing the core loads no plugin, compiler or test runner, and changes neither the process nor the disk."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import ejkernel_core
from ejkernel_core import _discovery

#: Parts of a dotted module name. JAX contains a module pallas, but importing JAX does not load it.
FORBIDDEN = ("triton", "jax_triton", "pallas", "cattrs", "platformdirs", "pytest")
OURS = sorted(
    f"ejkernel_{project.parent.name}" for project in Path(__file__).parents[1].glob("plugins/*/pyproject.toml")
)

EFFECTS = """
import json, os, sys

def state():
    return dict(os.environ), {name: str(value) for name, value in jax.config.values.items()}, sorted(os.listdir("."))

import jax
before = state()
import ejkernel_core
ejkernel_core.call, ejkernel_core.Partitioning  # loads nearly all of it
after = state()
print(json.dumps({"modules": sorted(sys.modules), "before": before, "after": after}))
"""

CALL_WITHOUT_OPERATION = """
import jax.numpy as jnp
import ejkernel_core

x = jnp.ones((1, 4, 1, 8))
try:
    ejkernel_core.call("flash_attention", x, x, x)
except ejkernel_core.UnknownOperation as error:
    print(error)
"""


def run_python(program: str, home: Path, **environment: str) -> str:
    """The output of a program in a new process, with ``home`` as its home and working directory."""
    # An interpreter in a virtual environment finds its packages without a home.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("EJKERNEL_")}
    process = subprocess.run(
        [sys.executable, "-B", "-c", program],
        env={**environ, "HOME": str(home), **environment},
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.fixture(scope="module")
def import_effects(tmp_path_factory) -> dict[str, Any]:
    home = tmp_path_factory.mktemp("home")
    effects = json.loads(run_python(EFFECTS, home))
    return {**effects, "files": sorted(str(path) for path in home.rglob("*"))}


def modules_of(modules: list[str], package: str) -> list[str]:
    """The modules of a package, which may itself be inside another one."""
    return [name for name in modules if f".{package}." in f".{name}."]


def plugin_packages() -> set[str]:
    """The packages of all installed plugins, including those of other repositories."""
    groups = ("ejkernel.operations", "ejkernel.kernels", "ejkernel.policies")
    entry_points = (point for group in groups for point in importlib.metadata.entry_points(group=group))
    return {point.module.partition(".")[0] for point in entry_points}


def test_the_program_imports_the_core(import_effects):
    assert modules_of(import_effects["modules"], "ejkernel_core")
    assert "jax" in import_effects["modules"]


def imported_packages(tree: ast.AST) -> set[str]:
    """The top-level packages that a module imports, also in functions and for type checking."""
    nodes = [*ast.walk(tree)]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    return {name.partition(".")[0] for name in names}


def test_the_core_names_no_plugin_in_an_import():
    files = sorted(Path(ejkernel_core.__file__).parent.rglob("*.py"))
    assert len(files) > 20
    plugins = {f"{path.name}: {name}" for path in files for name in imported_packages(ast.parse(path.read_text()))}
    assert sorted(line for line in plugins if ": ejkernel_" in line and not line.endswith(": ejkernel_core")) == []
    assert imported_packages(ast.parse("def call():\n    from ejkernel_ops.flash_attention import x")) == {
        "ejkernel_ops"
    }


def test_importing_the_core_loads_few_of_its_modules(tmp_path):
    program = "import sys, ejkernel_core\nprint(*(name for name in sys.modules if name.startswith('ejkernel_core.')))"
    modules = run_python(program, tmp_path).split()
    assert "ejkernel_core._scopes" in modules  # later, it would make JAX compile everything again
    assert {"ejkernel_core._call", "ejkernel_core._hooks", "ejkernel_core._policies"} & {*modules} == set()


def test_types_are_known_of_every_public_name():
    """Those names are imported for type checkers, and when they are used."""
    tree = ast.parse(Path(ejkernel_core.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
    names = {alias.name: node.module for node in imports for alias in node.names if alias.name == alias.asname}
    assert sorted(names) == ejkernel_core.__all__
    for name, module in names.items():
        value = getattr(importlib.import_module(f"ejkernel_core.{module}"), name)
        assert getattr(ejkernel_core, name) == value, name
    assert {*ejkernel_core.__all__} <= {*dir(ejkernel_core)}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("flash", ""),
        ("__wrapped__", ""),
        ("rms_norm_bwd", "; it is an operation: ejkernel_core.call('rms_norm_bwd', ...)"),
        (
            "flash_attention",
            "; it is an operation: ejkernel_core.call('flash_attention', ...), or ejkernel_ops.flash_attention(...)",
        ),
    ],
)
def test_a_name_that_the_core_does_not_have_may_be_an_operation(name: str, hint: str):
    with pytest.raises(AttributeError) as caught:
        getattr(ejkernel_core, name)
    assert str(caught.value) == f"module 'ejkernel_core' has no attribute {name!r}{hint}"


def test_an_operation_of_a_module_without_a_package_is_found(monkeypatch):
    """As an entry point such as ``my_kernels:norm.plugin.operation`` declares it."""
    entry = _discovery.PluginEntry(_discovery.OPERATIONS, "RowNorm", "json:norm.plugin.operation")
    monkeypatch.setattr(_discovery, "all_entries", lambda: [entry])
    with pytest.raises(AttributeError, match=r"it is an operation: ejkernel_core.call\('RowNorm', ...\)$"):
        ejkernel_core.RowNorm  # noqa: B018


def test_an_operation_of_a_broken_package_is_not_an_attribute(monkeypatch, tmp_path):
    (tmp_path / "broken_norms.py").write_text("raise OSError('no such device')")
    monkeypatch.syspath_prepend(tmp_path)
    entry = _discovery.PluginEntry(_discovery.OPERATIONS, "RowNorm", "broken_norms:operation")
    monkeypatch.setattr(_discovery, "all_entries", lambda: [entry])
    assert not hasattr(ejkernel_core, "RowNorm")


def test_there_are_installed_plugins():
    assert {"ejkernel_ops", "ejkernel_xla"} <= plugin_packages()


@pytest.mark.parametrize("package", [*FORBIDDEN, *OURS])
def test_importing_the_core_does_not_load(import_effects, package):
    assert modules_of(import_effects["modules"], package) == []


def test_importing_the_core_loads_no_plugin(import_effects):
    assert [name for package in plugin_packages() for name in modules_of(import_effects["modules"], package)] == []


def test_environment_variables_do_not_change(import_effects):
    assert import_effects["after"][0] == import_effects["before"][0]


def test_the_configuration_of_jax_does_not_change(import_effects):
    assert import_effects["before"][1]
    assert import_effects["after"][1] == import_effects["before"][1]


def test_no_file_is_written(import_effects):
    assert import_effects["after"][2] == import_effects["before"][2] == []
    assert import_effects["files"] == []


def test_no_jax_backend_is_initialized(tmp_path):
    """After importing the core, one can still set flags of JAX, or fork."""
    program = "import ejkernel_core\nejkernel_core.call\nfrom jax._src import xla_bridge\nprint(xla_bridge.backends_are_initialized())"
    assert run_python(program, tmp_path).strip() == "False"


def test_a_call_loads_only_the_plugins_of_its_operation(tmp_path):
    program = f"import sys\n{CALL_WITHOUT_OPERATION}\nprint(*sorted(sys.modules))"
    modules = run_python(program, tmp_path).split()
    assert modules_of(modules, "ejkernel_ops.flash_attention.reference")
    assert modules_of(modules, "ejkernel_bench") == []
    assert modules_of(modules, "ejkernel_testing") == []


def test_without_plugins_the_error_says_what_to_install(tmp_path):
    path = os.pathsep.join([str(core_metadata(tmp_path)), os.environ.get("PYTHONPATH", "")])
    output = run_python(CALL_WITHOUT_OPERATION, tmp_path, EJKERNEL_PLUGINS="", PYTHONPATH=path)
    assert "'flash_attention'" in output
    assert 'pip install "ejkernel-core[cpu]"' in output
    assert "EJKERNEL_PLUGINS is ''" in output


def core_metadata(home: Path) -> Path:
    """A folder with this core's metadata of extras, since an older version's metadata may be installed."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    requirements = [(extra, line) for extra, lines in project["optional-dependencies"].items() for line in lines]
    info = home / "metadata" / "ejkernel_core-0.1.0.dist-info"
    info.mkdir(parents=True)
    lines = [f'Requires-Dist: {line}; extra == "{extra}"' for extra, line in requirements]
    (info / "METADATA").write_text(
        "\n".join(["Metadata-Version: 2.1", "Name: ejkernel-core", "Version: 0.1.0", *lines])
    )
    return info.parent


def test_without_kernels_no_package_is_advised_that_has_none_of_them(tmp_path):
    """The operation is installed, by a distribution without a kernel for it."""
    folder = tmp_path / "site"
    info = folder / "only_meaning-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: only-meaning\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ejkernel.operations]\nnothing_computes_it = only_meaning:operation\n")
    (folder / "only_meaning.py").write_text(
        "import ejkernel_core\n"
        "def nothing_computes_it(x): ...\n"
        "operation = ejkernel_core.Operation(\n"
        "    name='nothing_computes_it', signature=nothing_computes_it, outputs=lambda a: (a['x'],))\n"
    )
    program = (
        "import jax.numpy as jnp, ejkernel_core\n"
        "try:\n"
        "    ejkernel_core.call('nothing_computes_it', jnp.ones(3))\n"
        "except ejkernel_core.NoKernel as error:\n"
        "    print(error)\n"
    )
    path = os.pathsep.join([str(folder), str(core_metadata(tmp_path)), os.environ.get("PYTHONPATH", "")])
    output = run_python(program, tmp_path, PYTHONPATH=path, EJKERNEL_PLUGINS="only-meaning")
    assert "no kernel is installed" in output
    assert "pip install" not in output


#: Packages that import a name when it is used, with the name itself as type checkers see it.
LAZY = ("ejkernel_cache", "ejkernel_tuning")


def names_for_type_checkers(package: Any) -> dict[str, str]:
    """The names that a package imports under ``if TYPE_CHECKING:``, with their modules."""
    tree = ast.parse(Path(package.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    modules = {node: ".".join(filter(None, [package.__name__ if node.level else "", node.module])) for node in imports}
    return {alias.name: modules[node] for node in imports for alias in node.names}


@pytest.mark.parametrize("name", LAZY)
def test_a_name_that_is_imported_when_it_is_used_is_the_one_that_type_checkers_see(name):
    package = importlib.import_module(name)
    names = names_for_type_checkers(package)
    assert sorted(names) == sorted(package.__all__)
    assert names == package._MODULES
    for public_name, module in names.items():
        assert getattr(package, public_name) is getattr(importlib.import_module(module), public_name)
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'no_such_name'"):
        package.no_such_name  # noqa: B018
    assert {*package.__all__} <= {*dir(package)}


@pytest.mark.parametrize("name", LAZY)
def test_importing_the_package_of_a_command_does_not_import_jax(name, tmp_path):
    program = (
        f"import sys, {name}\nprint([module for module in ('jax', 'ejkernel_core', 'attrs') if module in sys.modules])"
    )
    assert run_python(program, tmp_path).strip() == "[]"


def imported_at_once(module: str, modules: set[str]) -> None:
    """Add all modules that importing one of ours imports, by the imports outside of functions, to ``modules``."""
    spec = importlib.util.find_spec(module)
    if module in modules or spec is None or spec.origin is None:
        return
    modules.add(module)
    if not module.startswith("ejkernel_"):
        return
    for node in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = "." * node.level + (node.module or "")
            parent = importlib.util.resolve_name(package, spec.parent) if node.level else package
            names = [parent, *(f"{parent}.{alias.name}" for alias in node.names)]
        else:
            names = []
        for name in names:
            if name.startswith(("ejkernel_", "jax.experimental.pallas")) and is_module(name):
                imported_at_once(name, modules)


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the name of something in a module
        return False


def test_no_kernel_imports_pallas_when_it_is_loaded() -> None:
    """JAX 0.11 and later have the options of Pallas in the keys of all functions: those that were compiled before Pallas
    is imported are compiled again. So is the first step of a program, in which the kernels are loaded.
    """
    modules: set[str] = set()
    for entry in importlib.metadata.entry_points(group="ejkernel.kernels"):
        imported_at_once(entry.value, modules)
    assert "ejkernel_pallas_tpu.launch._launch" in modules
    assert [name for name in modules if name.startswith("jax.experimental.pallas")] == []


COMPILED_ONCE = """
import jax
import jax.numpy as jnp
import ejkernel_core

traces = []
run = jax.jit(lambda x: traces.append(0) or ejkernel_core.call("rms_norm", x))
x = run(jnp.ones((3, 8)))
ejkernel_core.registry.inspect()
run(x)
print(len(traces))
"""


@pytest.mark.long
def test_loading_all_kernels_compiles_nothing_again(tmp_path: Path) -> None:
    assert run_python(COMPILED_ONCE, tmp_path).strip() == "1"
