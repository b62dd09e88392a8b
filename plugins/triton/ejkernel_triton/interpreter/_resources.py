"""The resources that the compiler gives to kernels on a card: shared memory, registers, and spilled registers.

The calls are the examples of the operation whose ``uses`` have "resources"; a backward kernel is compiled for the
gradients of them. Each is compiled in every configuration of ``config_space``. Beside its hooks, a module of a kernel
may have:

``shared_memory(inv, cfg)``
    at most how many bytes of shared memory a program takes, by the name of the Triton function that is launched. The
    configuration space relies on it, and it is compared with what the compiler reports.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import attrs
import jax

import ejkernel_core
from ejkernel_core import Example, Invocation, Unsupported
from ejkernel_triton.launch._cards import capability_by_name
from ejkernel_triton.launch._jax_triton import Launch
from ejkernel_triton.launch._launch import launch_p

from ._compiled import compiled_launch

CARDS = ("NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA L40S", "NVIDIA GB200")
#: The distributions that decide what a kernel is compiled to.
COMPILERS = ("triton", "jax-triton")
_PACKAGE = __name__.partition(".")[0]


@attrs.frozen
class Resources:
    """What a program of a launched kernel takes of a card: bytes of shared memory, registers and spilled bytes of each
    thread.
    """

    shared_memory: int
    registers: int
    spilled: int


@attrs.define(eq=False, slots=False)
class Program:
    """A launch of a kernel that is to be compiled."""

    launch: Launch
    #: The shapes and dtypes of its arrays.
    arrays: tuple[Any, ...]

    @property
    def name(self) -> str:
        """The name of the Triton function."""
        return str(self.launch.kernel).partition(":")[2]

    @functools.cached_property
    def digest(self) -> str:
        """A hash of all that decides the compiled code: sources, arguments, constants, card and versions."""
        versions = tuple(metadata.version(name) for name in COMPILERS)
        shapes = tuple((array.shape, str(array.dtype)) for array in self.arrays)
        code = sources(self.launch.kernel.partition(":")[0])
        parts = (versions, code, attrs.astuple(attrs.evolve(self.launch, kernel=self.name)), shapes)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def compile(self) -> Resources:
        """What the compiler reports."""
        kernel = compiled_launch(self.launch, self.arrays)
        return Resources(kernel.shared_memory, kernel.registers, kernel.spilled)


def _equations(jaxpr: Any) -> Iterator[Any]:
    """Those of a program, and of loops and other programs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for parameter in equation.params.values():
            if hasattr(parameter, "eqns"):
                yield from _equations(parameter)


@attrs.frozen(eq=False)
class Case:
    """A kernel on a card, for an example, in one configuration."""

    card: str
    #: ``<operation>.<backend>``.
    kernel: str
    module: Any = attrs.field(repr=False)
    example: str
    invocation: Invocation = attrs.field(repr=False)
    cfg: Any
    is_heuristic: bool

    def __str__(self) -> str:
        return f"{self.card}, {self.kernel}, {self.example}, {self.configuration}"

    @property
    def configuration(self) -> str:
        """The configuration, by its values."""
        return _values(self.cfg)

    def programs(self) -> list[Program]:
        """Its launches."""
        inv = self.invocation
        arrays = {name: value for name, value in inv.arguments.items() if isinstance(value, jax.ShapeDtypeStruct)}
        traced = jax.make_jaxpr(lambda arrays: self.module.run_backend(inv.with_arrays(arrays), self.cfg))(arrays)
        return [
            Program(equation.params["launch"], tuple(variable.aval for variable in equation.invars))
            for equation in _equations(traced)
            if equation.primitive is launch_p
        ]

    def estimates(self) -> Mapping[str, int]:
        """The most bytes of shared memory that each kernel may take, where the kernel's module has an estimate."""
        estimate = getattr(self.module, "shared_memory", None)
        return {} if estimate is None else estimate(self.invocation, self.cfg)


def programs(checked: Iterable[Case]) -> Iterator[tuple[Case, Program]]:
    """The launches of these cases, each once: configurations that differ in one pass have the others in common."""
    digests = set[str]()
    for case in checked:
        for program in case.programs():
            if program.digest not in digests:
                digests.add(program.digest)
                yield case, program


def _values(cfg: Any) -> str:
    """
    >>> from ejkernel_triton.flash_attention import Config
    >>> _values(Config(128, 64, 8, 3))
    '128, 64, 8, 3'
    """
    values = attrs.astuple(cfg, recurse=False)
    return ", ".join(f"({_values(value)})" if attrs.has(type(value)) else str(value) for value in values)


def cases(cards: Iterable[str] = CARDS, kernels: Iterable[str] | None = None, text: str = "") -> Iterator[Case]:
    """Every configuration of these kernels, or of all of this package, for the examples with this text in their names.

    A kernel has no cases on a card for which it refuses the call.
    """
    cards = tuple(cards)
    for point in installed_kernels():
        if kernels is None or point.name in kernels:
            module = point.load()
            for name, inv in _invocations(point.name.rpartition(".")[0]):
                if text in name:
                    for card in cards:
                        yield from _cases_of_call(card, point.name, module, name, inv)


def installed_kernels() -> list[EntryPoint]:
    """The kernels of this package that launch something, in the order of their names. One without configurations is
    made of other operations, whose kernels are compiled.
    """
    points = (point for point in entry_points(group="ejkernel.kernels") if point.value.startswith(f"{_PACKAGE}."))
    return sorted((point for point in points if hasattr(point.load(), "config_space")), key=lambda point: point.name)


def _cases_of_call(card: str, kernel: str, module: Any, example: str, inv: Invocation) -> Iterator[Case]:
    on_card = attrs.evolve(inv, platform="gpu", device_kind=card, compute_capability=capability_by_name(card))
    try:
        configurations = list(module.config_space(on_card))
    except Unsupported:
        return
    for number, cfg in enumerate(configurations):
        yield Case(card, kernel, module, example, on_card, cfg, number == 0)


@functools.cache
def _invocations(op: str) -> tuple[tuple[str, Invocation], ...]:
    """The calls of an operation with the use "resources", by the names of their examples: its own, and the gradients of
    those of another operation.
    """
    registry = ejkernel_core.registry
    calls = [(example.name, registry.invocation(op, **example.abstract())) for example in _examples(op)]
    for forward in registry.names("ejkernel.operations"):
        if registry.operation(forward).backward == op:
            calls += [(example.name, _gradient(forward, example)) for example in _examples(forward)]
    return tuple(calls)


def _examples(op: str) -> list[Example]:
    operation = ejkernel_core.registry.operation(op)
    return [example for example in (operation.examples or tuple)() if "resources" in example.uses]


def _gradient(forward: str, example: Example) -> Invocation:
    """The call of the backward operation for the arrays that an example names."""
    explanation = ejkernel_core.registry.explain(forward, **example.abstract())
    assert explanation.backward is not None
    assert explanation.backward.plan is not None
    inv = explanation.backward.plan.invocation
    return attrs.evolve(inv, arguments={**inv.arguments, "wrt": example.wrt})


# -- sources ---------------------------------------------------------------------------------------------------------


@functools.cache
def sources(module: str) -> str:
    """A hash of the code of a module of device code and of the modules of its package that it imports, without comments
    and docstrings. It does not depend on where these modules are, so that files can be moved.
    """
    return hashlib.sha256("\n".join(sorted(map(_code_in_any_place, _imports(module)))).encode()).hexdigest()


def _code_in_any_place(module: str) -> str:
    """The code of a module, with the names that it imports from its package, but not with where they are."""
    imports = re.compile(rf"^from {module.partition('.')[0]}[\w.]* (import .*)\n", re.MULTILINE)
    return "\n".join([*sorted(imports.findall(_code(module))), imports.sub("", _code(module))])


def _imports(module: str) -> set[str]:
    """The module, and the modules of its package that it imports, directly or not."""
    modules, pending = set[str](), {module}
    package = module.partition(".")[0]
    while pending:
        name = pending.pop()
        modules.add(name)
        names = re.findall(rf"^from ({package}[\w.]*) import ([\w, ]+)", _code(name), re.MULTILINE)
        for parent, imported in names:
            children = {f"{parent}.{child.partition(' as ')[0].strip()}" for child in imported.split(",")}
            submodules = {child for child in children if _file(child) is not None}
            pending |= ({parent} if children - submodules else submodules) - modules
    return modules


@functools.cache
def _code(module: str) -> str:
    path = _file(module)
    assert path is not None, module
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def _file(module: str) -> Path | None:
    """The file of a module, which is not imported."""
    package, _, rest = module.partition(".")
    specification = importlib.util.find_spec(package)
    assert specification is not None
    for folder in specification.submodule_search_locations or ():
        base = Path(folder, *rest.split("."))
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.exists():
                return path
    return None
