"""Make a package for a kernel, an operation, a store, a policy, benchmarks or a subcommand, with tests that pass.

The files under ``templates`` are a package of each kind, with words that are replaced: ``my-package`` and so on.
"""

from __future__ import annotations

import importlib.resources
import importlib.util
import keyword
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path

import attrs
import click

from ._calls import matching_operations
from ._metadata import (
    BENCHMARKS,
    COMMANDS,
    KERNELS,
    OPERATIONS,
    POLICIES,
    distribution,
    entry_points,
    normalized,
    provider,
    version,
)
from ._output import Failure, print_line

SUFFIX = ".template"
#: The end of a line of a template, or of the name of its folder, that is for packages with a kernel of the backward.
BACKWARD, BACKWARD_LINE = "--backward", "  # --backward"
#: A shape for the next steps, by operation.
SHAPES = {"flash_attention": "1x512x4x64"}
KERNEL, BACKWARD_KERNEL = "my_operation.my_backend", "my_operation_bwd.my_backend"
PROOFS, TESTS = 'python -m pytest -m "not long" my-folder', "python -m pytest my-folder"


@attrs.frozen
class Kind:
    """A kind of package. Its texts have the words of the templates."""

    noun: str
    contents: str
    #: Commands to try once the package is installed.
    steps: tuple[str, ...]
    #: The name of the only entry point, and its group, in which no other may have this name. A kernel is checked by
    #: its operation and backend.
    entry: str = ""
    group: str = ""


KINDS = {
    "kernel": Kind(
        "a kernel",
        "{kernels}",
        ("ejkernel list --here", PROOFS, "ejkernel tune my_operation --shape my-shape"),
    ),
    "operation": Kind(
        "an operation",
        "the operation my_operation, and {kernels}",
        ("ejkernel list --here", PROOFS, "ejkernel tune my_operation --shape my-shape --slope 512"),
    ),
    "store": Kind("a store", "the store my_package", ("ejkernel list", TESTS), "my_package", POLICIES),
    "policy": Kind("a policy", "the policy my_package", ("ejkernel list", TESTS), "my_package", POLICIES),
    "bench": Kind(
        "a suite of benchmarks",
        "the suite of benchmarks my_package",
        ("ejkernel bench", TESTS, "ejkernel bench my_package --small"),
        "my_package",
        BENCHMARKS,
    ),
    "command": Kind(
        "a subcommand",
        "the subcommand my-package",
        ("ejkernel --help", TESTS, "ejkernel my-package rms_norm --shape 128x512"),
        "my-package",
        COMMANDS,
    ),
}


@click.command("new")
@click.argument("name")
@click.option("--kind", type=click.Choice([*KINDS]), default="kernel", show_default=True, help="What the package has.")
@click.option("--operation", shell_complete=matching_operations, help="Of a kernel: the operation that it computes. "
              "Of an operation: its name, by default that of the package.")  # fmt: skip
@click.option("--backend", help="The name of the kernel's backend; by default that of the package.")
@click.option("--backward", is_flag=True, help="Also make a kernel that computes the gradients.")
@click.option("--into", type=click.Path(path_type=Path), default=".", help="The folder in which its folder is made.")
def command(name: str, kind: str, operation: str | None, backend: str | None, backward: bool, into: Path) -> None:
    """Make a package in the folder NAME.

    It builds, installs, is listed, and has tests, which pass: write your own code in the place of the example.

    \b
    ejkernel new my-attention --operation flash_attention --backward
    ejkernel new my-norm --kind operation
    ejkernel new my-report --kind command
    """  # noqa: D301  (click reads the character, after which it keeps the lines)
    module = _module(name)
    _check_options(kind, {"--operation": operation, "--backend": backend, "--backward": backward})
    operation = _operation(kind, operation, module)
    backward_operation = _backward_operation(kind, operation) if backward else f"{operation}_bwd"
    operations = [operation, *([backward_operation] if backward else [])]
    words = {
        "my-package": name,
        "my_package": module,
        "MY_PACKAGE": module.upper(),
        "my_operation_bwd": backward_operation,  # before the word that it begins with
        "my_operation": operation,
        "my_backend": _backend(backend, "rows" if kind == "operation" else module, operations),
        "my-provider": _provider(operation),
    }
    _check_entry(KINDS[kind], words)
    folder = into / name
    files = _files(kind, operation, backward, words)
    _write(folder, files)
    words |= {"my-folder": str(folder), "my-shape": SHAPES.get(operation, "128x512")}
    _print_next_steps(KINDS[kind], folder, files, backward, words)


# -- names -------------------------------------------------------------------------------------------------------------


def _module(name: str) -> str:
    """The name of the package's module. Raises for a name that no distribution or module may have."""
    module = re.sub(r"[-.]+", "_", name).lower()
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", name) or not module.isidentifier():
        raise click.UsageError(
            f"{name!r} is not a name for a package; take letters, digits and '-', as in my-attention"
        )
    if keyword.iskeyword(module):
        raise click.UsageError(f"{name!r} is a word of Python; take another name, as my-{name}")
    if version(normalized(name)) is not None or importlib.util.find_spec(module) is not None:
        raise click.UsageError(f"a package {name!r} is installed already; uninstall it, or take another name")
    return module


def _check_options(kind: str, options: Mapping[str, object]) -> None:
    """Refuse options that are for other kinds."""
    given = [option for option, value in options.items() if value]
    if kind not in ("kernel", "operation") and given:
        verb = "is" if len(given) == 1 else "are"
        raise click.UsageError(f"{' and '.join(given)} {verb} for a kernel or an operation, not for {KINDS[kind].noun}")


def _operations() -> list[str]:
    return sorted({point.name for point in entry_points(OPERATIONS)})


def _operation(kind: str, operation: str | None, module: str) -> str:
    """The name of the operation. A kernel has one that is installed, and an operation is a new one."""
    known = _operations()
    if kind == "kernel":
        forward = (operation or "").removesuffix("_bwd")
        if operation in known and operation != forward and forward in known:
            raise click.UsageError(
                f"{operation} is the backward of {forward}: write --operation {forward} --backward, which makes a"
                " kernel of each"
            )
        if operation not in known:
            problem = f"{operation!r} is not installed" if operation else "a kernel needs --operation"
            raise click.UsageError(f"{problem}; there are {', '.join(known) or 'none'}")
        return operation
    name = operation or module
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise click.UsageError(f"{name!r} is not a name for an operation; take letters, digits and '_', as in my_norm")
    if kind == "operation" and name in known:
        raise click.UsageError(f"an operation {name!r} is installed already; take another name")
    return name


def _backward_operation(kind: str, operation: str) -> str:
    """The name of the operation's backward operation. Raises for an installed operation without one."""
    if kind == "operation":
        return f"{operation}_bwd"
    from ejkernel_core import registry

    name = registry.operation(operation).backward
    if name is None:
        raise click.UsageError(
            f"{operation} has no backward operation: JAX differentiates its reference; leave out --backward"
        )
    return name


def _backend(backend: str | None, default: str, operations: Sequence[str]) -> str:
    name = backend or default
    kernels = [f"{operation}.{name}" for operation in operations]
    for point in entry_points(KERNELS):
        if point.name in kernels:
            raise click.UsageError(f"{provider(point)} has a kernel {point.name}; name another --backend")
    if not re.fullmatch(r"[A-Za-z]\w*", name) or name == "reference":
        raise click.UsageError(f"{name!r} is not a name for a backend; take letters, digits and '_', as in my_gpu")
    return name


def _check_entry(kind: Kind, words: Mapping[str, str]) -> None:
    """Refuse the name of an entry point of another distribution: neither of the two would be used."""
    for point in entry_points(kind.group):
        if point.name == _replaced(kind.entry, words):
            raise click.UsageError(f"{provider(point)} has {kind.noun} {point.name!r}; take another name")


def _provider(operation: str) -> str:
    """The distribution of an installed operation."""
    return next((distribution(point) for point in entry_points(OPERATIONS) if point.name == operation), "ejkernel-core")


# -- files -------------------------------------------------------------------------------------------------------------


def _files(kind: str, operation: str, backward: bool, words: Mapping[str, str]) -> dict[str, str]:
    """The path of each file of the package, and its content."""
    templates = importlib.resources.files("ejkernel_cli").joinpath("templates")
    names = [kind, f"{kind}-{operation}"]
    names += [f"{name}{BACKWARD}" for name in names if backward]
    folders = [folder for folder in map(templates.joinpath, names) if folder.is_dir()]
    files = {path: text for folder in folders for path, text in _templates(folder)}  # a later one replaces
    return {_replaced(path, words): _replaced(_chosen(text, backward), words) for path, text in sorted(files.items())}


def _chosen(text: str, backward: bool) -> str:
    """The text of a template, with its lines for a backward or without them."""
    lines = text.splitlines(keepends=True)
    return "".join(line.replace(BACKWARD_LINE, "") for line in lines if backward or BACKWARD_LINE not in line)


def _templates(folder: Traversable, path: str = "") -> Iterator[tuple[str, str]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _templates(entry, f"{path}{entry.name}/")
        elif entry.name.endswith(SUFFIX):
            yield path + entry.name.removesuffix(SUFFIX), entry.read_text(encoding="utf-8")


def _replaced(text: str, words: Mapping[str, str]) -> str:
    pattern = "|".join(map(re.escape, words))
    return re.sub(pattern, lambda match: words[match[0]], text)


def _write(folder: Path, files: Mapping[str, str]) -> None:
    """Write all files, or none: they are written elsewhere first, and moved."""
    if folder.exists() or folder.is_symlink():
        raise Failure(f"{folder} exists; remove it, or take another name")
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
            unfinished = Path(temporary, folder.name)
            for path, text in files.items():
                file = unfinished / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
            shutil.move(unfinished, folder)
    except OSError as fault:
        raise Failure(f"{folder} cannot be written: {fault.strerror or fault}; nothing was made") from fault


# -- what to do next ---------------------------------------------------------------------------------------------------


def _print_next_steps(kind: Kind, folder: Path, files: Iterable[str], backward: bool, words: Mapping[str, str]) -> None:
    kernels = f"the kernels {KERNEL} and {BACKWARD_KERNEL}" if backward else f"the kernel {KERNEL}"
    contents = kind.contents.format(kernels=kernels)
    print_line(f"{folder} has {_replaced(contents, words)}:\n")
    for path in files:
        print_line(f"  {folder / path}")
    print_line("\nNext:\n")
    print_line(f'  pip install -e "{_path(folder)}[test]"')
    for step in kind.steps:
        print_line(f"  {_replaced(step, words)}")


def _path(folder: Path) -> str:
    """The folder as pip takes it: a bare name would be one of an index."""
    return str(folder) if folder.is_absolute() or folder.parts[:1] == ("..",) else f"./{folder}"
