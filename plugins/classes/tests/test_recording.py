"""``record_invocation`` starts recording all calls through this package. ``get_invocations`` returns them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from ejkernel_classes import (
    Executor,
    Invocation,
    Kernel,
    autotune_recorded,
    flash_attention,
    get_invocations,
    record_invocation,
    stop_recording,
    vmap_with_config,
)
from ejkernel_core import Registry, policy_override
from ejkernel_tuning import clear_invocations

Q, K, V = jax.random.normal(jax.random.key(0), (3, 1, 16, 2, 8))
X, Y = jnp.arange(6.0), jnp.arange(4.0)


class Scale(Kernel[Any, jax.Array]):
    def run(self, x: Any, *, cfg: Any, by: Any = 1) -> Any:
        return x * by

    def heuristic_cfg(self, inv: Any) -> Any:
        return 1


class Square(Scale):
    def run(self, x: Any, *, cfg: Any, by: Any = 1) -> Any:
        return x * x

    def custom_vjp(self, primals: Any, cfg: Any, kwargs: Any, cotangents: Any) -> Any:
        return (2 * primals[0] * cotangents[0],)


@pytest.fixture(autouse=True)
def cleared_recording() -> Iterator[None]:
    clear_invocations()
    yield
    stop_recording()
    clear_invocations()


def start_recording(kernel: Any = "flash_attention") -> None:
    """Start recording, with no invocation recorded yet."""
    args = (Q, K, V) if isinstance(kernel, str) else (X,)
    record_invocation(kernel, Invocation(kernel, args))
    clear_invocations()


def recorded_calls() -> list[Any]:
    return [(inv.kernel, [arg.shape for arg in inv.abstract_args], inv.kwargs) for inv in get_invocations()]


def test_calls_are_recorded_only_between_start_and_stop() -> None:
    kernel = Scale()
    kernel(X)
    assert recorded_calls() == []
    start_recording(kernel)
    kernel(X, by=2)
    stop_recording()
    kernel(X, by=3)
    assert recorded_calls() == [(kernel, [(6,)], {"by": 2})]


def test_a_call_is_recorded_once_even_if_it_was_compiled_before() -> None:
    kernel = Scale()
    kernel(X)
    start_recording(kernel)
    for _ in range(3):
        kernel(X)
        kernel(Y)
    assert recorded_calls() == [(kernel, [(6,)], {}), (kernel, [(4,)], {})]
    stop_recording()
    start_recording(kernel)  # a new recording starts empty
    kernel(X)
    assert recorded_calls() == [(kernel, [(6,)], {})]


def test_recording_does_not_compile_calls_again() -> None:
    shapes = []

    class Counting(Scale):
        def run(self, x: Any, *, cfg: Any, by: Any = 1) -> Any:
            shapes.append(x.shape)
            return x

    kernel, executor = Counting(), Executor()
    start_recording(kernel)
    kernel(X), executor(kernel, X)
    shapes.clear()
    for _ in range(3):
        kernel(X)
        executor(kernel, X)
        record_invocation(kernel, kernel.invocation(X))
        with policy_override(autotune=False):
            kernel(X)
    assert shapes == []


@pytest.mark.parametrize(
    "call",
    [
        lambda kernel: kernel(X, by=2),
        lambda kernel: Executor()(kernel, X, by=2),
        lambda kernel: jax.jit(lambda x: kernel(x, by=2))(X),
        lambda kernel: jax.jit(lambda x: kernel(x, by=2)).lower(X),
        lambda kernel: kernel(X, by=2, cfg=5),
    ],
)
def test_every_way_of_calling_is_recorded(call: Any) -> None:
    kernel = Scale()
    start_recording(kernel)
    call(kernel)
    assert recorded_calls() == [(kernel, [(6,)], {"by": 2})]
    (inv,) = get_invocations()
    assert inv.key == kernel.invocation(X, by=2).key
    assert inv.args == inv.abstract_args == (jax.ShapeDtypeStruct((6,), "float32"),)


@pytest.mark.parametrize(
    "call",
    [
        lambda: flash_attention(Q, K, V, causal=True),
        lambda: Executor()("flash_attention", Q, K, V, causal=True),
        lambda: jax.jit(lambda q: flash_attention(q, K, V, causal=True))(Q),
    ],
)
def test_attention_is_recorded_by_the_name_of_its_operation(call: Any) -> None:
    start_recording()
    call()
    ((kernel, shapes, kwargs),) = recorded_calls()
    assert (kernel, shapes) == ("flash_attention", [(1, 16, 2, 8)] * 3)
    assert kwargs == {"causal": True, "softmax_scale": 8**-0.5}
    (inv,) = get_invocations()
    assert inv.key == Invocation("flash_attention", (Q, K, V), {"causal": True}).key


def test_a_mapped_call_is_recorded_with_the_shapes_of_one_element() -> None:
    kernel = Scale()
    start_recording(kernel)
    vmap_with_config(kernel)(jnp.stack([X, X]))
    assert recorded_calls() == [(kernel, [(6,)], {})]
    clear_invocations()
    vmap_with_config("flash_attention", in_axes=(0, None, None))(jnp.stack([Q, Q]), K, V)
    assert [kernel for kernel, _, _ in recorded_calls()] == ["flash_attention"]


def test_backward_passes_are_recorded() -> None:
    kernel = Square()
    start_recording(kernel)
    assert jax.grad(lambda x: kernel(x).sum())(X).tolist() == (2 * X).tolist()
    assert recorded_calls() == [(kernel, [(6,)], {})] * 2
    assert [inv.core.op for inv in get_invocations()] == ["Square", "Square_bwd"]
    clear_invocations()
    jax.grad(lambda q: flash_attention(q, K, V).sum())(Q)
    assert [inv.kernel for inv in get_invocations()] == ["flash_attention", "flash_attention_bwd"]


def test_recording_keeps_no_array() -> None:
    kernel = Square()
    start_recording(kernel)
    jax.grad(lambda x: kernel(x).sum())(X)
    flash_attention(Q, K, V)
    record_invocation(kernel, kernel.invocation(Y))
    assert len(get_invocations()) == 4
    for inv in get_invocations():
        leaves = jax.tree.leaves((inv.args, inv.kwargs, dict(inv.core.arguments)))
        assert [leaf for leaf in leaves if isinstance(leaf, (jax.Array, jax.core.Tracer))] == []


def test_the_example_of_the_documents() -> None:
    """The loop stands for the documents' comment "run your model with various inputs"."""
    kernel = Scale()
    record_invocation(kernel, kernel.invocation(X))
    for x in (X, Y, jnp.ones((2, 2))):
        kernel(x)
    invocations = get_invocations()
    results = autotune_recorded(invocations, budget_s=20.0)
    assert [inv.abstract_args[0].shape for inv in invocations] == [(6,), (4,), (2, 2)]
    assert [tuned.keys[0] for tuned in results.tuned] == [kernel.invocation(x).key for x in (X, Y, jnp.ones((2, 2)))]
    assert (kernel.plan(Y).origin, kernel.plan(jnp.ones(3)).origin) == ("memory", "heuristic")


def test_calls_of_other_threads_are_recorded() -> None:
    kernel = Scale()
    start_recording(kernel)
    thread = threading.Thread(target=lambda: kernel(X))
    thread.start()
    thread.join()
    assert recorded_calls() == [(kernel, [(6,)], {})]


def test_recorded_calls_are_tuned() -> None:
    kernel = Square()
    start_recording(kernel)
    jax.grad(lambda x: kernel(x).sum())(X)
    results = autotune_recorded(get_invocations(), budget_s=20.0)
    assert [tuned.best.backend for tuned in results.tuned] == ["run", "backward"]
    assert kernel.plan(X).origin == "memory"


def test_a_registered_kernel_is_tuned_in_its_registry(use_registry: Any) -> None:
    """A kernel object also has a registry for each form of call, which is not used here."""
    registry = Registry(plugins="")
    use_registry(registry)
    kernel = Scale()
    registry.register(kernel)
    start_recording(kernel)
    Executor()("Scale", X, by=4)
    (inv,) = get_invocations()
    assert (inv.kernel, inv.args, inv.kwargs) == (kernel, (jax.ShapeDtypeStruct((6,), "float32"),), {"by": 4})
    assert autotune_recorded([inv], budget_s=20.0).tuned[0].keys[0] == inv.key
    assert registry.plan("Scale", X, by=4).origin == "memory"
