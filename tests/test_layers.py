"""The layers of the core: a module imports only modules of layers below its own.

Imports for type checking and imports inside functions count.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ejkernel_core
from ejkernel_core import extend

PACKAGE = Path(ejkernel_core.__file__).parent
#: From the top down, as in docs/design.md. Modules of one line do not import one another.
LAYERS = """
    __init__ extend
    _default
    _call
    _explain
    _form
    _gradients
    _lowering
    _divided
    _vmap
    _request
    _fallback _labels
    _plugins
    _choice
    _tuning _processes
    _loading _policies _plain _hints
    _recall
    _hooks
    _scopes _cache _plan _measurement
    _kernel
    _invocation
    _json
    _records
    _validation
    _donation
    _operation _discovery
    _axes _example _sharding
    _partitioning _declaration
    _layout _code
    _keys _devices _samples
    _content
    _display
    _errors
    _jax_versions environment
"""
DEPTH = {module: depth for depth, line in enumerate(LAYERS.split("\n")) for module in line.split()}
MODULES = {path.stem: path for path in PACKAGE.glob("*.py")}


def imports(tree: ast.AST) -> Iterator[str]:
    """The modules of the core that are imported anywhere in the tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[2] or "__init__" for alias in node.names if _is_core(alias.name))
        elif isinstance(node, ast.ImportFrom) and (node.level or _is_core(node.module)):
            source = (node.module or "").removeprefix("ejkernel_core").strip(".")
            yield from ([source.partition(".")[0]] if source else (_submodule(alias.name) for alias in node.names))


def _is_core(name: str | None) -> bool:
    return (name or "").partition(".")[0] == "ejkernel_core"


def _submodule(name: str) -> str:
    return name if name in MODULES else "__init__"


def upward_imports(tree: ast.AST, module: str) -> list[str]:
    """The modules that a module imports although they are not below it."""
    names = {*imports(tree)}
    return sorted(name for name in names if name not in DEPTH or DEPTH[name] <= DEPTH[module])


def test_every_module_has_a_layer() -> None:
    assert sorted(MODULES) == sorted(DEPTH)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_go_down(module: str) -> None:
    assert upward_imports(ast.parse(MODULES[module].read_text()), module) == []


@pytest.mark.parametrize(
    "code",
    [
        "from ._call import call",
        "from . import _call",
        "import ejkernel_core",
        "from ejkernel_core import Registry",
        "import ejkernel_core._call",
        "def f():\n    from ._plugins import Plugins",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ._lowering import Request",
        "from ._plan import Plan",  # of its own layer
    ],
)
def test_an_upward_import_is_found(code: str) -> None:
    assert upward_imports(ast.parse(code), "_measurement")


def test_a_downward_import_is_allowed() -> None:
    assert not upward_imports(ast.parse("from ._keys import content\nimport jax"), "_plan")


# -- plugins -----------------------------------------------------------------------------------------------------------

PLUGINS = sorted(
    path
    for path in (PACKAGE.parent / "plugins").glob("*/ejkernel_*/**/*.py")
    if "build" not in path.relative_to(PACKAGE.parent).parts
)


def private_names(source: str) -> list[str]:
    """What a plugin has of the core's private modules and names: in imports, and in texts that name a module."""
    return re.findall(r"(?:from|import) ejkernel_core import [^#\n]*\b_\w+|ejkernel_core\._[a-z]\w*", source)


def test_plugins_use_public_names_of_the_core() -> None:
    assert len(PLUGINS) > 500
    assert {str(path): names for path in PLUGINS if (names := private_names(path.read_text()))} == {}


@pytest.mark.parametrize(
    "code",
    [
        "from ejkernel_core._records import Record",
        "from ejkernel_core import Record, _records",
        "import ejkernel_core._records",
        "def f():\n    from ejkernel_core._records import SCHEMA",
        'MODULES = {"ejkernel_core._records": ("SCHEMA",)}',
        "ejkernel_core._records.SCHEMA",
    ],
)
def test_a_private_name_is_found(code: str) -> None:
    assert private_names(code)


def test_names_of_the_third_circle_are_those_of_their_modules() -> None:
    names = {name: getattr(extend, name) for name in extend.__all__}
    assert not {*names} & {*ejkernel_core.__all__}
    assert names["SCHEMA"] is extend.SCHEMA
    with pytest.raises(AttributeError, match="'ejkernel_core.extend' has no attribute 'Record'"):
        _ = extend.Record
