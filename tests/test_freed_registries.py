"""A registry is freed with its last reference, whatever was called, and so is what was compiled for it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_classes import Kernel, _kernel
from ejkernel_core import Operation, Registry, hookimpl
from ejkernel_core._request import Request

X = jnp.arange(1.0, 5.0)


def registry_of(traces: list[Any]) -> Registry:
    """A registry with an operation, its gradients and a kernel of each, which note every trace."""

    @hookimpl
    def run_backend(inv):
        traces.append(inv.op)
        return inv["x"] ** 2

    @hookimpl
    def run_backward(inv):
        traces.append(inv.op)
        return 2 * inv["x"] * inv["d_out"]

    def prepare(arguments):
        return arguments, lambda results: results[0]

    forward = Operation(
        name="square", signature=lambda x: None, outputs=lambda a: (a["x"],), backward="square_bwd", prepare=prepare
    )
    backward = Operation(
        name="square_bwd",
        signature=lambda *, x, out, d_out, wrt: None,
        arrays=("x", "out", "d_out"),
        outputs=lambda a: (a["x"],),
    )
    registry = Registry(plugins="")
    registry.register(forward)
    registry.register(backward)
    registry.register(SimpleNamespace(run_backend=run_backend), "square.reference")
    registry.register(SimpleNamespace(run_backend=run_backend, PLATFORMS={"cpu": 60}), "square.two")
    registry.register(SimpleNamespace(run_backend=run_backward), "square_bwd.reference")
    return registry


def total(registry: Registry) -> Callable[[Any], Any]:
    return lambda x: registry.call("square", x).sum()


USES: dict[str, Callable[[Registry], Any]] = {
    "call": lambda r: r.call("square", X),
    "explain": lambda r: str(r.explain("square", X)),
    "jit": lambda r: jax.jit(total(r))(X),
    "grad": lambda r: jax.grad(total(r))(X),
    "grad of jit": lambda r: jax.jit(jax.grad(total(r)))(X),
    "jvp": lambda r: jax.jvp(total(r), (X,), (X,)),
    "hessian": lambda r: jax.hessian(total(r))(X),
    "vmap": lambda r: jax.vmap(total(r))(jnp.stack([X, X])),
    "scan": lambda r: jax.lax.scan(lambda c, x: (c, total(r)(x)), 0.0, jnp.stack([X, X])),
    "checkpoint": lambda r: jax.grad(jax.checkpoint(total(r)))(X),
    "reference": lambda r: r.call("square", X, backend="reference"),
}


@pytest.mark.parametrize("use", USES)
def test_a_registry_is_freed_with_its_last_reference(use: str) -> None:
    registry = registry_of([])
    USES[use](registry)
    reference, core = weakref.ref(registry), weakref.ref(registry.core)
    del registry
    gc.collect()
    assert reference() is None
    assert core() is None or use in ("scan", "hessian")  # whose Jaxprs JAX keeps for others, a bounded number


def test_requests_are_freed_with_their_registries() -> None:
    """JAX's caches keep a bounded number of them, and not as many as there are registries."""
    for _ in range(20):
        registry_of([]).call("square", X)
    gc.collect()
    count = sum(isinstance(o, Request) for o in gc.get_objects())
    for _ in range(20):
        registry_of([]).call("square", X)
    gc.collect()
    assert sum(isinstance(o, Request) for o in gc.get_objects()) <= count + 2


def test_a_program_outlives_its_registry() -> None:
    """Traced, but not lowered, and then lowered for the first time where the registry is gone."""
    registry = registry_of([])
    traced = jax.jit(total(registry)).trace(X)
    gradient = jax.jit(jax.grad(total(registry))).trace(X)
    del registry
    gc.collect()
    assert traced.lower().compile()(X) == 30
    np.testing.assert_array_equal(gradient.lower().compile()(X), 2 * X)


def test_a_kernel_calls_operations_where_the_registry_is_gone() -> None:
    @hookimpl
    def run_backend(inv):
        return inv.call("square", inv["x"]) + 1

    def traced() -> Any:
        registry = registry_of([])
        registry.register(Operation(name="more", signature=lambda x: None, outputs=lambda a: (a["x"],)))
        registry.register(SimpleNamespace(run_backend=run_backend), "more.two")
        references.append(weakref.ref(registry))
        return jax.jit(lambda x: registry.call("more", x)).trace(X)

    references: list[Any] = []
    program = traced()
    gc.collect()
    np.testing.assert_array_equal(program.lower().compile()(X), X**2 + 1)
    assert references[0]() is None


# -- kernels as classes ----------------------------------------------------------------------------------------------


TRACES: list[Any] = []


class Scaled(Kernel[None, Any]):
    def __init__(self, factor: Any = 2) -> None:
        super().__init__()
        self.factor = factor

    def run(self, x, *, cfg):
        TRACES.append(self.factor)
        factor = self.factor[0] if isinstance(self.factor, list) else self.factor
        return x * factor

    def heuristic_cfg(self, inv):
        return None


@pytest.fixture
def scaled() -> Any:
    """A class of its own for each test, with nothing compiled."""
    TRACES.clear()
    return type("Scaled", (Scaled,), {})


def test_equal_objects_of_a_class_are_compiled_once(scaled: Any) -> None:
    for _ in range(5):
        np.testing.assert_array_equal(scaled()(X), 2 * X)
    count = len(TRACES)
    assert 0 < count <= 3
    for _ in range(20):
        np.testing.assert_array_equal(scaled(2)(X), 2 * X)
    assert len(TRACES) == count


@pytest.mark.parametrize("other", [3, 2.5, True, 2.0, np.float32(2)])
def test_objects_with_other_attributes_are_not(other: Any, scaled: Any) -> None:
    np.testing.assert_array_equal(scaled(2)(X), 2 * X)
    TRACES.clear()
    np.testing.assert_array_equal(scaled(other)(X), X * other)
    assert {type(factor) for factor in TRACES} == {type(other)}


def test_objects_with_what_can_be_changed_are_compiled_by_themselves(scaled: Any) -> None:
    factor = [2]
    np.testing.assert_array_equal(scaled(factor)(X), 2 * X)
    factor[0] = 3
    np.testing.assert_array_equal(scaled(factor)(X), 3 * X)
    reference = weakref.ref(kernel := scaled(factor))
    kernel(X)
    del kernel
    gc.collect()
    assert reference() is None


def test_a_replaced_method_counts_for_new_objects(scaled: Any) -> None:
    np.testing.assert_array_equal(scaled()(X), 2 * X)
    scaled.run = lambda self, x, *, cfg: x + 1
    np.testing.assert_array_equal(scaled()(X), X + 1)


def test_attributes_in_slots_are_not_mistaken_for_equal(scaled: Any) -> None:
    class Slotted(scaled):  # type: ignore[misc]
        __slots__ = ("addend",)

        def __init__(self, addend: int) -> None:
            super().__init__()
            self.addend = addend

        def run(self, x, *, cfg):
            return x + self.addend

    np.testing.assert_array_equal(Slotted(1)(X), X + 1)
    np.testing.assert_array_equal(Slotted(2)(X), X + 2)


def test_classes_are_freed_with_what_was_compiled_for_their_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_kernel, "MAX_OBJECTS", 2)
    references = []
    for _ in range(6):
        kind = type("Scaled", (Scaled,), {})
        references.append(weakref.ref(kind))
        np.testing.assert_array_equal(kind()(X), 2 * X)
    del kind
    gc.collect()
    assert [reference() is None for reference in references] == [True] * 4 + [False] * 2


def test_an_object_that_is_made_in_a_jitted_function_is_lowered_later(scaled: Any) -> None:
    traced = jax.jit(lambda x: scaled([4])(x)).trace(X)
    gc.collect()
    np.testing.assert_array_equal(traced.lower().compile()(X), 4 * X)
