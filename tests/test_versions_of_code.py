"""The version of a kernel that was registered at run time: all that its results depend on, and nothing else."""

from __future__ import annotations

import enum
import functools
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_core import Axes, Operation, Registry, hookimpl, policy_override
from ejkernel_core._code import MOST_BYTES, code_fingerprint


def version(function: Any) -> str:
    return code_fingerprint([function])


def run_in(source: str, name: str = "notebook") -> Any:
    """The function ``run`` of a module of this source."""
    module = sys.modules[name] = types.ModuleType(name)  # where dataclasses look for it
    exec(source, vars(module))
    return module.run  # type: ignore[attr-defined]


@attrs.frozen(eq=False)
class Field:
    array: Any


class Scaled:
    def __init__(self, factor: Any) -> None:
        self.factor = factor

    def run(self, x: Any) -> Any:
        return x * self.factor


class Referring:
    """Its cached property refers to it, as the plugins of a kernel object do."""

    def __init__(self, factor: int) -> None:
        self.factor = factor
        self.itself = self

    @functools.cached_property
    def plugin(self) -> Any:
        return SimpleNamespace(run=self.run, lock=threading.Lock())

    def run(self, x: Any) -> Any:
        return x * self.factor


def closure(value: Any) -> Callable[[Any], Any]:
    return lambda x: x * value


HELPER = "def helper(x): return {}\ndef middle(x): return helper(x)\ndef run(x): return middle(x)"
CONSTANT = "FACTORS = {}\ndef run(x): return x * FACTORS[0]"

ATTRS = """
import attrs
import dataclasses

@attrs.frozen
class Config:
    name: str
    block: int = attrs.field(default={0}, validator=attrs.validators.in_((1, 2)))
    sizes: list = attrs.field(factory=list)

    def double(self):
        return self.block {1}

@dataclasses.dataclass(frozen=True)
class Other:
    name: str
    depth: int = {2}
    sizes: list = dataclasses.field(default_factory=list)

def run(x):
    return x * Config().double() * Other().depth
"""
#: Two functions each that compute something else.
DIFFERENT: dict[str, tuple[Any, Any]] = {
    "code": (lambda x: x + 1, lambda x: x * 1),
    "a constant": (lambda x: x + 1, lambda x: x + 2),
    "a number in the closure": (closure(2.0), closure(5.0)),
    "an int in place of a float": (closure(2), closure(2.0)),
    "a function in the closure": (closure(lambda: 1), closure(lambda: 2)),
    "a partial in the closure": (closure(functools.partial(jnp.add, 1)), closure(functools.partial(jnp.add, 2))),
    "a jitted function": (closure(jax.jit(lambda x: x + 1)), closure(jax.jit(lambda x: x + 2))),
    "an array": (closure(np.arange(3)), closure(np.arange(1, 4))),
    "an array of JAX": (closure(jnp.arange(3)), closure(jnp.arange(1, 4))),
    "a field": (closure(Field(np.arange(3))), closure(Field(np.arange(1, 4)))),
    "a list": (closure([1, [2]]), closure([1, [3]])),
    "an attribute": (Scaled(2).run, Scaled(3).run),
    "an object's attribute": (closure(Scaled(2)), closure(Scaled(3))),
    "a namespace": (closure(SimpleNamespace(a=1)), closure(SimpleNamespace(a=2))),
    "a default": (lambda x, y=1: x * y, lambda x, y=2: x * y),
    "a keyword's default": (lambda x, *, y=1: x * y, lambda x, *, y=2: x * y),
    "what it calls calls": (run_in(HELPER.format("x + 1")), run_in(HELPER.format("x * 1"))),
    "a global": (run_in(CONSTANT.format("[1, 2]")), run_in(CONSTANT.format("[3, 2]"))),
    "another function of a library": (closure(jnp.add), closure(jnp.multiply)),
    "a field's default": (run_in(ATTRS.format(1, "* 2", 3)), run_in(ATTRS.format(2, "* 2", 3))),
    "a method of a class": (run_in(ATTRS.format(1, "* 2", 3)), run_in(ATTRS.format(1, "+ 2", 3))),
    "a default of a dataclass": (run_in(ATTRS.format(1, "* 2", 3)), run_in(ATTRS.format(1, "* 2", 4))),
    "locks": (closure(threading.Lock()), closure(threading.Lock())),
    "large arrays": (closure(np.zeros(MOST_BYTES // 8 + 1)), closure(np.zeros(MOST_BYTES // 8 + 1))),
}
#: A function that makes two equal ones.
EQUAL: dict[str, Callable[[], Any]] = {
    "a lambda": lambda: lambda x: x + 1,
    "a closure": lambda: closure((2.0, [3], {"a": np.arange(3)})),
    "a function in the closure": lambda: closure(lambda x: x + 1),
    "jit": lambda: closure(jax.jit(jnp.sin)),
    "a method": lambda: Scaled(2).run,
    "an object": lambda: closure(Scaled(jnp.arange(3))),
    "a helper": lambda: run_in(HELPER.format("x + 1")),
    "a global that is not read": lambda: run_in(f"import random\nOTHER = random.random()\n{HELPER.format('x + 1')}"),
    "a function of a library": lambda: closure(jnp.add),
    "a class of attrs and a dataclass": lambda: run_in(ATTRS.format(1, "* 2", 3)),
    "a lock of the module": lambda: run_in("import threading\nLOCK = threading.Lock()\ndef run(x): return LOCK, x"),
    "methods of builtin types": lambda: closure((object.__setattr__, str.join, len)),
    "a small array": lambda: closure(np.zeros(MOST_BYTES // 8)),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_computes_something_else_has_another_version(name: str) -> None:
    first, second = DIFFERENT[name]
    assert version(first) != version(second)


@pytest.mark.parametrize("name", EQUAL)
def test_what_is_equal_has_the_same_version(name: str) -> None:
    assert version(EQUAL[name]()) == version(EQUAL[name]())


def test_functions_that_call_one_another_have_a_version() -> None:
    source = "def run(x): return other(x - 1)\ndef other(x): return x if x < {} else run(x)"
    assert version(run_in(source.format(0))) == version(run_in(source.format(0))) != version(run_in(source.format(1)))
    holder: list[Any] = []
    loop = closure(holder)
    holder.append(loop)
    assert len(version(loop)) == 16


def test_an_object_that_refers_to_itself_has_a_version() -> None:
    first, second, other = Referring(2), Referring(2), Referring(3)
    assert first.plugin.run(1) == 2
    assert version(first.run) == version(second.run) != version(other.run)


class Pair:
    """Two of them refer to each other."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def run(self, x: Any) -> Any:
        return x * self.other.factor


def pair(factor: int) -> Pair:
    first, second = Pair(1), Pair(factor)
    first.other, second.other = second, first
    first.of_other, second.of_other = second.run, first.run
    return first


def test_objects_that_refer_to_each_other_have_versions() -> None:
    first, second = pair(2), pair(3)
    assert version(first.run) == version(pair(2).run) != version(second.run)
    assert version(first.other.run) != version(second.other.run)


def test_a_local_enum_counts_by_its_member() -> None:
    class Local(enum.IntEnum):
        ONE = 1
        TWO = 2

    assert version(closure(Local.ONE)) == version(closure(Local.ONE)) != version(closure(Local.TWO))


def test_a_value_that_cannot_be_read_is_another_one_each_time() -> None:
    class Raising(dict[str, int]):
        def items(self) -> Any:
            raise OSError("not today")

    assert version(closure(Raising())) != version(closure(Raising()))


def test_the_version_is_the_same_in_another_process() -> None:
    code = (
        "from tests.test_versions_of_code import *\n"
        "print([version(EQUAL[name]()) for name in EQUAL] + [version(DIFFERENT['an attribute'][0])])"
    )
    outputs = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout for _ in "12"
    }
    assert len(outputs) == 1


# -- records of kernels that are registered again ----------------------------------------------------------------------

X = jnp.linspace(0.1, 1.0, 256).reshape(4, 64)


def slow(x: Any) -> Any:
    return jax.lax.fori_loop(0, 200, lambda i, y: jnp.sin(y) + 0 * i, x)


def make_registry(compute: Callable[[Any], Any]) -> Registry:
    """``scaled``, whose kernel is a closure."""
    registry = Registry()

    @hookimpl
    def run_reference(inv: Any, cfg: Any) -> Any:
        return slow(slow(inv["x"])) * 0 + slow(inv["x"]) * 2

    @hookimpl
    def run_backend(inv: Any, cfg: Any) -> Any:
        return compute(inv["x"])

    axes = Axes({"x": "... n"}, {"out": "... n"}, independent="...", whole="n")
    registry.register(Operation(name="scaled", signature=lambda x: None, axes=axes))
    registry.register(reference_of(run_reference), "scaled.reference")
    registry.register(SimpleNamespace(run_backend=run_backend), "scaled.mine")
    return registry


def reference_of(run_reference: Any) -> Any:
    return SimpleNamespace(run_backend=run_reference, PLATFORMS={"cpu": 0})


@pytest.mark.parametrize("wrong", [jnp.zeros_like, lambda x: slow(x) * 5.0], ids=["zeros", "another factor"])
def test_a_kernel_that_has_changed_is_measured_again(
    wrong: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records are shared by registries, and on disk."""
    from ejkernel_cache import default_cache

    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    default_cache.cache_clear()
    chosen = []
    for compute in (lambda x: slow(x) * 2.0, lambda x: slow(x) * 2.0, wrong):
        registry = make_registry(compute)
        with policy_override(autotune=True, budget_s=20):
            np.testing.assert_allclose(registry.call("scaled", X), slow(X) * 2, rtol=1e-5)
        plan = registry.plan("scaled", X)
        chosen.append((plan.kernel.backend, plan.choice.measured or plan.origin))
    default_cache.cache_clear()
    assert [backend for backend, _ in chosen] == ["mine", "mine", "reference"]
