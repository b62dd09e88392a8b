"""``record_invocation`` turns recording on, for every call through this package; ``get_invocations`` tells the calls."""

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
def nothing_is_recorded() -> Iterator[None]:
    clear_invocations()
    yield
    stop_recording()
    clear_invocations()


def started(kernel: Any = "flash_attention") -> None:
    """Recording is on, and nothing is recorded yet."""
    args = (Q, K, V) if isinstance(kernel, str) else (X,)
    record_invocation(kernel, Invocation(kernel, args))
    clear_invocations()


def heard() -> list[Any]:
    return [(one.kernel, [arg.shape for arg in one.abstract_args], one.kwargs) for one in get_invocations()]


def test_nothing_is_heard_before_it_is_on_and_after_it_is_off() -> None:
    kernel = Scale()
    kernel(X)
    assert heard() == []
    started(kernel)
    kernel(X, by=2)
    stop_recording()
    kernel(X, by=3)
    assert heard() == [(kernel, [(6,)], {"by": 2})]


def test_a_call_is_heard_once_and_one_that_was_compiled_before_too() -> None:
    kernel = Scale()
    kernel(X)
    started(kernel)
    for _ in range(3):
        kernel(X)
        kernel(Y)
    assert heard() == [(kernel, [(6,)], {}), (kernel, [(4,)], {})]
    stop_recording()
    started(kernel)  # again: it begins anew
    kernel(X)
    assert heard() == [(kernel, [(6,)], {})]


def test_calls_are_not_compiled_again_while_it_is_on() -> None:
    traced = []

    class Counting(Scale):
        def run(self, x: Any, *, cfg: Any, by: Any = 1) -> Any:
            traced.append(x.shape)
            return x

    kernel, executor = Counting(), Executor()
    started(kernel)
    kernel(X), executor(kernel, X)
    traced.clear()
    for _ in range(3):
        kernel(X)
        executor(kernel, X)
        record_invocation(kernel, kernel.invocation(X))
        with policy_override(autotune=False):
            kernel(X)
    assert traced == []


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
def test_however_it_is_called(call: Any) -> None:
    kernel = Scale()
    started(kernel)
    call(kernel)
    assert heard() == [(kernel, [(6,)], {"by": 2})]
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
def test_attention_is_heard_by_the_name_of_its_operation(call: Any) -> None:
    started()
    call()
    ((kernel, shapes, kwargs),) = heard()
    assert (kernel, shapes) == ("flash_attention", [(1, 16, 2, 8)] * 3)
    assert kwargs == {"causal": True, "softmax_scale": 8**-0.5}
    (inv,) = get_invocations()
    assert inv.key == Invocation("flash_attention", (Q, K, V), {"causal": True}).key


def test_what_is_mapped_is_told_as_one_element() -> None:
    kernel = Scale()
    started(kernel)
    vmap_with_config(kernel)(jnp.stack([X, X]))
    assert heard() == [(kernel, [(6,)], {})]
    clear_invocations()
    vmap_with_config("flash_attention", in_axes=(0, None, None))(jnp.stack([Q, Q]), K, V)
    assert [kernel for kernel, _, _ in heard()] == ["flash_attention"]


def test_backward_passes_are_heard() -> None:
    kernel = Square()
    started(kernel)
    assert jax.grad(lambda x: kernel(x).sum())(X).tolist() == (2 * X).tolist()
    assert heard() == [(kernel, [(6,)], {})] * 2
    assert [one.core.op for one in get_invocations()] == ["Square", "Square_bwd"]
    clear_invocations()
    jax.grad(lambda q: flash_attention(q, K, V).sum())(Q)
    assert [one.kernel for one in get_invocations()] == ["flash_attention", "flash_attention_bwd"]


def test_no_array_is_kept() -> None:
    kernel = Square()
    started(kernel)
    jax.grad(lambda x: kernel(x).sum())(X)
    flash_attention(Q, K, V)
    record_invocation(kernel, kernel.invocation(Y))
    assert len(get_invocations()) == 4
    for one in get_invocations():
        kept = jax.tree.leaves((one.args, one.kwargs, dict(one.core.arguments)))
        assert [leaf for leaf in kept if isinstance(leaf, (jax.Array, jax.core.Tracer))] == []


def test_as_the_documents_show_it() -> None:
    """What stands there as a comment, "run your model with various inputs", is the loop."""
    kernel = Scale()
    record_invocation(kernel, kernel.invocation(X))
    for x in (X, Y, jnp.ones((2, 2))):
        kernel(x)
    invocations = get_invocations()
    results = autotune_recorded(invocations, budget_s=20.0)
    assert [inv.abstract_args[0].shape for inv in invocations] == [(6,), (4,), (2, 2)]
    assert [one.keys[0] for one in results.tuned] == [kernel.invocation(x).key for x in (X, Y, jnp.ones((2, 2)))]
    assert (kernel.plan(Y).origin, kernel.plan(jnp.ones(3)).origin) == ("memory", "heuristic")


def test_other_threads_are_heard() -> None:
    kernel = Scale()
    started(kernel)
    thread = threading.Thread(target=lambda: kernel(X))
    thread.start()
    thread.join()
    assert heard() == [(kernel, [(6,)], {})]


def test_what_was_heard_is_tuned() -> None:
    kernel = Square()
    started(kernel)
    jax.grad(lambda x: kernel(x).sum())(X)
    results = autotune_recorded(get_invocations(), budget_s=20.0)
    assert [one.best.backend for one in results.tuned] == ["run", "backward"]
    assert kernel.plan(X).origin == "memory"


def test_a_registered_kernel_is_tuned_where_it_is_registered(use_registry: Any) -> None:
    """Though a kernel object has a registry of its own for each way of calling it."""
    registry = Registry(plugins="")
    use_registry(registry)
    kernel = Scale()
    registry.register(kernel)
    started(kernel)
    Executor()("Scale", X, by=4)
    (inv,) = get_invocations()
    assert (inv.kernel, inv.args, inv.kwargs) == (kernel, (jax.ShapeDtypeStruct((6,), "float32"),), {"by": 4})
    assert autotune_recorded([inv], budget_s=20.0).tuned[0].keys[0] == inv.key
    assert registry.plan("Scale", X, by=4).origin == "memory"
