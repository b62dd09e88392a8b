"""The lock of device code: the digest of each kernel's device sources, beside its VERSION.

    device_code.py --check      names the kernels whose device code changed, though their VERSION did not
    device_code.py --confirm    writes the digests: results and speed stand, or VERSION was raised

Records of a kernel are used for as long as its VERSION stays. So whoever changes device code decides whether what was
measured with the old code still holds. Device code is what a kernel launches by name, or imports inside a function,
with all that this imports of its package; comments and docstrings, and where the files are, do not count.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import io
import json
import re
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

from ejkernel_triton.interpreter import _resources

FILE = Path(__file__).resolve().parents[1] / "tests/device-code.json"
PACKAGES = ("ejkernel_triton", "ejkernel_pallas_tpu")
#: Folders of a package that launch, prove and compile kernels, and have none; and what a module has for these.
TOOLS, FOR_TOOLS = ("launch", "interpreter", "testing"), ("_examples", "_peers")
DOCUMENTED = (ast.Module, ast.FunctionDef, ast.ClassDef)
#: A kernel's digest and version.
Lock = dict[str, tuple[str, int]]


def current() -> Lock:
    """The kernels that have device code, by name."""
    kernels = {}
    for point in sorted(entry_points(group="ejkernel.kernels"), key=lambda point: point.name):
        if point.module.partition(".")[0] in PACKAGES and (modules := device_modules(point.module)):
            content = "\n".join(sorted(map(code, device_sources(modules))))
            kernels[point.name] = hashlib.sha256(content.encode()).hexdigest()[:16], point.load().VERSION
    return kernels


def device_modules(kernel: str) -> set[str]:
    """The modules of device code that a kernel's module uses, directly or by other modules of its package."""
    reached, pending, device = set[str](), {kernel}, set[str]()
    while pending:
        module = pending.pop()
        reached.add(module)
        device |= {name for name in used_when_run(module) if name.rpartition(".")[2] not in FOR_TOOLS}
        pending |= {*imports(tree(module).body, module)} - reached
    return device


def device_sources(modules: Iterable[str]) -> set[str]:
    """The modules, and those of their package that they import, without what is the host's."""
    reached = {name for module in modules for name in _resources._imports(module)}
    return {name for name in reached if name.split(".")[1] not in TOOLS}


@cache
def code(module: str) -> str:
    """The text of a module without comments, docstrings and empty lines, and without where it imports from in its
    package. It is the same in every version of Python.
    """
    path, package = _resources._file(module), module.partition(".")[0]
    assert path is not None, module
    text = path.read_text()
    lines, nodes = text.splitlines(), [*ast.walk(ast.parse(text))]
    own = [node for node in nodes if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(package)]
    docstrings = [
        node.body[0] for node in nodes if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None
    ]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] = lines[token.start[0] - 1][: token.start[1]]
    for node in (*own, *docstrings):
        lines[node.lineno - 1 : node.end_lineno] = [""] * ((node.end_lineno or 0) - node.lineno + 1)
    names = sorted(ast.unparse(alias) for node in own for alias in node.names)
    return "\n".join([*names, *(line.rstrip() for line in lines if line.strip())])


@cache
def tree(module: str) -> ast.Module:
    path = _resources._file(module)
    assert path is not None, module
    return ast.parse(path.read_text())


def used_when_run(module: str) -> Iterator[str]:
    """What its functions import, and the modules whose functions it launches by name: "_forward:attend" of its folder,
    or by the full name. A name may be put together of several texts, so a part of it counts.
    """
    package = module.partition(".")[0]
    folder = module if is_package(module) else module.rpartition(".")[0]
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.FunctionDef):
            yield from imports(node.body, module)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.partition(":")[0].removeprefix(f"{folder}.")
            is_name = re.fullmatch(r"\w+", name) and node.value != name
            full = f"{folder}.{name}" if is_name else node.value
            if re.fullmatch(rf"{package}(\.\w+)+", full) and _resources._file(full) and not is_package(full):
                yield full


def imports(statements: Iterable[ast.stmt], module: str) -> Iterator[str]:
    """The modules of its package that some statements of a module import."""
    for node in statements:
        if isinstance(node, ast.ImportFrom) and not node.level and is_code_of(node.module or "", module):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if _resources._file(name) else str(node.module)


def is_package(module: str) -> bool:
    path = _resources._file(module)
    return path is not None and path.name == "__init__.py"


def is_code_of(name: str, module: str) -> bool:
    """Whether a module is of the same package, and not of its tools."""
    package, _, rest = name.partition(".")
    return package == module.partition(".")[0] and rest.partition(".")[0] not in TOOLS


def recorded() -> Lock:
    return {kernel: tuple(entry) for kernel, entry in json.loads(FILE.read_text()).items()} if FILE.exists() else {}


def undecided(recorded: Lock, current: Lock) -> list[str]:
    """The kernels whose device code changed, though their VERSION did not."""
    return [
        kernel
        for kernel, (digest, version) in current.items()
        if kernel in recorded and digest != recorded[kernel][0] and version == recorded[kernel][1]
    ]


def fault(recorded: Lock, current: Lock) -> str:
    """What is to be done before the lock holds again; "" where it does."""
    if kernels := undecided(recorded, current):
        return (
            f"the device code of {', '.join(kernels)} changed. If results or speed may differ, raise VERSION by one "
            "in the modules of these kernels, so that their calls are measured again. Then, or if results and speed "
            "stand, confirm: .venv/bin/python .ci/device_code.py --confirm"
        )
    return "" if recorded == current else "tests/device-code.json is old: .venv/bin/python .ci/device_code.py --confirm"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="fail where device code changed and nobody decided")
    action.add_argument("--confirm", action="store_true", help="write the digests")
    if parser.parse_args().confirm:
        rows = (f"  {json.dumps(kernel)}: {json.dumps(entry)}" for kernel, entry in current().items())
        FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    elif text := fault(recorded(), current()):
        raise SystemExit(text)


if __name__ == "__main__":
    main()
