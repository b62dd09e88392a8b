"""What JAX does with a call: derivatives, vmap, shard_map, other platforms. On an operation of a few lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ejkernel_core import NoKernel, NotDifferentiable, Operation, Registry, Unsupported, gradient_signature, hookimpl

RNG = np.random.default_rng(7)
X = jnp.asarray(RNG.normal(size=(4, 3)), jnp.float32)
W = jnp.asarray(RNG.normal(size=3), jnp.float32)
COUNTS = jnp.asarray([1, 2, 3, 4], jnp.int32)


def scaled(x: Any, weight: Any, counts: Any = None, *, power: int = 1) -> Any:
    """The operation: sin(x) * weight ** power, rows times counts; and the sum of each row."""
    out = jnp.sin(x) * weight**power
    if counts is not None:
        out = out * counts[:, None]
    return out, out.sum(-1)


def outputs(a: Mapping[str, Any]) -> tuple[Any, ...]:
    x = a["x"]
    return jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[:1], x.dtype)


def fold(a: Mapping[str, Any], mapped: frozenset[str], size: int) -> Any:
    if "weight" in mapped:
        return None
    rows = a["x"].shape[-2]

    def merged(name: str, rank: int) -> Any:
        value = a[name]
        whole = value if value is None or name in mapped else jnp.broadcast_to(value, (size, *value.shape))
        return None if whole is None else whole.reshape(-1, *whole.shape[whole.ndim - rank + 1 :])

    folded = {**a, "x": merged("x", 2), "counts": merged("counts", 1)}
    return folded, lambda results: tuple(r.reshape(size, rows, *r.shape[1:]) for r in results)


def kernel(compute: Callable[[Mapping[str, Any]], Any], platforms: dict[str, int] | None = None) -> type:
    class Kernel:
        PLATFORMS = platforms or {"cpu": 20, "gpu": 20}
        asked: list[Any] = []

        @staticmethod
        @hookimpl
        def heuristic_cfg(inv: Any) -> int:
            Kernel.asked.append(inv)
            return 0

        @staticmethod
        @hookimpl
        def run_backend(inv: Any, cfg: int) -> Any:
            return compute(inv)

    return Kernel


def compute(a: Mapping[str, Any]) -> Any:
    return scaled(a["x"], a["weight"], a["counts"], power=a["power"])


def gradients(a: Mapping[str, Any]) -> tuple[Any, ...]:
    cotangents = [jnp.zeros_like(a[n]) if a["d_" + n] is None else a["d_" + n] for n in ("out", "total")]
    _, pull_back = jax.vjp(lambda m: compute({**a, **m}), {name: a[name] for name in a["wrt"]})
    (found,) = pull_back(tuple(cotangents))
    return tuple(found[name] for name in a["wrt"])


def make(*, reference: bool = True, backward: bool = False, folds: bool = False, **kernels: Any) -> Registry:
    registry = Registry(plugins="")
    operation = Operation(
        name="scaled",
        signature=scaled,
        differentiable=("x", "weight"),
        results=("out", "total"),
        outputs=outputs,
        backward="scaled_bwd" if backward else None,
        fold=fold if folds else None,
    )
    registry.register(operation)
    if reference:
        registry.register(kernel(compute, {"cpu": 0, "gpu": 0}), "scaled.reference")
    if backward:
        registry.register(
            Operation(
                name="scaled_bwd",
                signature=gradient_signature(operation.signature, operation.results),
                arrays=("x", "weight", "counts", "out", "total", "d_out", "d_total"),
                outputs=lambda a: tuple(jax.ShapeDtypeStruct(a[n].shape, a[n].dtype) for n in a["wrt"]),
            )
        )
        registry.register(kernel(gradients, {"cpu": 0, "gpu": 0}), "scaled_bwd.reference")
    for name, plugin in kernels.items():
        registry.register(plugin, name.replace("__", "."))
    return registry


def close(found: Any, wanted: Any) -> None:
    jax.tree.map(lambda f, w: np.testing.assert_allclose(f, w, rtol=2e-5, atol=2e-6), found, wanted)


def loss(function: Callable[..., Any]) -> Callable[..., Any]:
    def total(x: Any, weight: Any, counts: Any) -> Any:
        out, rows = function(x, weight, counts, power=3)
        return (out**2).sum() + (rows * jnp.arange(rows.size)).sum()

    return total


@pytest.mark.parametrize("backward", [False, True])
def test_derivatives_of_every_order(backward: bool) -> None:
    registry = make(backward=backward, scaled__fast=kernel(compute, {"cpu": 50}))
    assert registry.plan("scaled", X, W, COUNTS).kernel.backend == "fast"

    def call(*args: Any, **kwargs: Any) -> Any:
        return registry.call("scaled", *args, **kwargs)

    for transform in (
        lambda f: jax.grad(f, argnums=(0, 1)),
        lambda f: jax.grad(lambda *a: sum((g**2).sum() for g in jax.grad(f, argnums=(0, 1))(*a)), argnums=(0, 1)),
        lambda f: jax.jacrev(jax.jacrev(jax.grad(f, argnums=1), argnums=1), argnums=0),
    ):
        close(transform(loss(call))(X, W, COUNTS), transform(loss(scaled))(X, W, COUNTS))
        close(jax.jit(transform(loss(call)))(X, W, COUNTS), transform(loss(scaled))(X, W, COUNTS))


def test_the_backward_gets_what_is_wanted_and_nothing_else() -> None:
    fast = kernel(gradients, {"cpu": 50})
    registry = make(backward=True, scaled_bwd__fast=fast)
    jax.grad(lambda w: registry.call("scaled", X, w, COUNTS)[1].sum())(W)
    (inv,) = fast.asked
    assert inv["wrt"] == ("weight",)
    assert inv["d_out"] is None
    assert inv["d_total"].shape == (4,)
    assert inv["out"].shape == (4, 3)


def test_a_backend_asked_for_is_asked_in_the_backward_too() -> None:
    registry = make(
        backward=True,
        scaled__one=kernel(compute, {"cpu": 9}),
        scaled__two=kernel(compute, {"cpu": 50}),
        scaled_bwd__one=kernel(gradients, {"cpu": 9}),
        scaled_bwd__two=kernel(gradients, {"cpu": 50}),
    )
    explanation = registry.explain("scaled", X, W, COUNTS, backend="one")
    assert explanation.backward is not None
    assert explanation.backward.plan is not None
    assert explanation.backward.plan.kernel.name == "scaled_bwd.one"
    forward_only = make(backward=True, scaled__one=kernel(compute))
    close(
        jax.grad(lambda x: forward_only.call("scaled", x, W, backend="one")[1].sum())(X),
        jax.grad(lambda x: scaled(x, W)[1].sum())(X),
    )


def test_a_gradient_is_right_or_refused() -> None:
    registry = make()

    def through_counts(counts: Any) -> Any:
        return registry.call("scaled", X, W, counts)[1].sum()

    with pytest.raises(NotDifferentiable, match="'scaled' has no gradient for counts"):
        jax.grad(through_counts)(jnp.asarray([1.0, 2.0, 3.0, 4.0]))
    bare = make(reference=False, scaled__fast=kernel(compute))
    with pytest.raises(NotDifferentiable, match="neither a backward operation nor a reference"):
        jax.grad(lambda x: bare.call("scaled", x, W)[1].sum())(X)


def test_a_backward_that_refuses_is_told_with_its_reason() -> None:
    class Refuses:
        @staticmethod
        @hookimpl
        def heuristic_cfg(inv: Any) -> None:
            raise Unsupported("weights are too heavy")

        @staticmethod
        @hookimpl
        def run_backend(inv: Any, cfg: Any) -> None: ...

    registry = make(backward=True)
    registry.register(Refuses, "scaled_bwd.reference")
    with pytest.raises(NoKernel, match=r"scaled_bwd.reference .*: refused, weights are too heavy"):
        jax.grad(lambda x: registry.call("scaled", x, W)[1].sum())(X)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("backend", ["reference", None])
def test_forward_mode_goes_through_the_reference(backend: str | None, backward: bool) -> None:
    registry = make(backward=backward, scaled__fast=kernel(compute, {"cpu": 50}))

    def call(x: Any, w: Any) -> Any:
        out, total = registry.call("scaled", x, w, COUNTS, power=2, backend=backend)
        return (out**2).sum(), total

    def plain(x: Any, w: Any) -> Any:
        out, total = scaled(x, w, COUNTS, power=2)
        return (out**2).sum(), total

    for derivative in (
        lambda f: jax.jvp(f, (X, W), (X * 2, W + 1)),
        lambda f: jax.jvp(lambda x: f(x, W), (X,), (X,)),
        lambda f: jax.jacfwd(f, (0, 1))(X, W),
        lambda f: jax.hessian(f, (0, 1))(X, W),
        lambda f: jax.jacrev(jax.jacfwd(f, (0, 1)), 1)(X, W),
        lambda f: jax.linear_transpose(jax.linearize(f, X, W)[1], X, W)(plain(X, W)),
        lambda f: jax.vmap(lambda x: jax.jvp(f, (x, W), (X, W)))(jnp.stack([X, X + 1])),
    ):
        close(derivative(call), derivative(plain))
        close(jax.jit(derivative, static_argnums=0)(call), derivative(plain))


def test_forward_mode_without_a_reference_is_refused() -> None:
    bare = make(reference=False, backward=True, scaled__fast=kernel(compute))

    def call(x: Any) -> Any:
        return bare.call("scaled", x, W)[0].sum()

    close(jax.grad(call)(X), jnp.cos(X) * W)
    for forward_mode in (lambda: jax.jvp(call, (X,), (X,)), lambda: jax.jit(jax.jacfwd(call))(X)):
        with pytest.raises(NotDifferentiable, match="goes through the reference kernel, and it has none"):
            forward_mode()


@pytest.mark.parametrize("folds", [False, True])
@pytest.mark.parametrize(
    "axes",
    [(0, None, None), (1, None, None), (-1, None, None), (0, None, 0), (0, None, -1), (None, None, 0), (0, 0, 0)],
)
def test_vmap_equals_a_loop(folds: bool, axes: tuple[int | None, ...]) -> None:
    fast = kernel(compute, {"cpu": 50})
    registry = make(folds=folds, scaled__fast=fast)
    size = 5
    whole = [
        value if axis is None else jnp.moveaxis(jnp.stack([value * (i + 1) for i in range(size)]), 0, axis)
        for value, axis in zip((X, W, COUNTS), axes, strict=True)
    ]

    def call(*args: Any) -> Any:
        return registry.call("scaled", *args, power=2)

    def parts(i: int) -> list[Any]:
        return [v if axis is None else jnp.take(v, i, axis) for v, axis in zip(whole, axes, strict=True)]

    wanted = jax.tree.map(lambda *rows: jnp.stack(rows), *(scaled(*parts(i), power=2) for i in range(size)))
    close(jax.vmap(call, axes)(*whole), wanted)
    close(jax.jit(jax.vmap(call, axes))(*whole), wanted)
    folded = folds and axes[1] is None
    assert {inv["x"].shape for inv in fast.asked} == {(20, 3) if folded else (4, 3)}

    def gradient(f: Any) -> Any:
        return jax.vmap(jax.grad(lambda x, w, c: f(x, w, c)[0].sum() ** 2, argnums=(0, 1)), axes)

    close(gradient(call)(*whole), gradient(lambda *a: scaled(*a, power=2))(*whole))
    out_axis = jax.vmap(lambda *a: call(*a)[1], axes, out_axes=1)(*whole)
    close(out_axis, wanted[1].T)


def test_vmap_of_vmap_folds_twice() -> None:
    fast = kernel(compute, {"cpu": 50})
    registry = make(folds=True, scaled__fast=fast)
    many = jnp.stack([jnp.stack([X * i + j for i in range(2)]) for j in range(3)])
    found = jax.vmap(jax.vmap(lambda x: registry.call("scaled", x, W)[0]))(many)
    close(found, jnp.sin(many) * W)
    assert [inv["x"].shape for inv in fast.asked] == [(24, 3)]


def test_one_choice_for_a_vmapped_call() -> None:
    fast = kernel(compute, {"cpu": 50})
    registry = make(folds=True, scaled__fast=fast)
    jax.vmap(lambda x: registry.call("scaled", x, W)[0])(jnp.stack([X, X]))
    assert len(fast.asked) == 1


@pytest.mark.parametrize("check", [True, False])
def test_shard_map_sees_local_shapes_and_sums_the_gradient_of_what_is_replicated(check: bool) -> None:
    def looped(a: Mapping[str, Any]) -> Any:  # a carry that starts as zeros: no kernel has to know that it is sharded
        out, _ = compute(a)
        total = jax.lax.fori_loop(0, out.shape[1], lambda i, t: t + out[:, i], jnp.zeros(out.shape[0]))
        return out, total

    fast = kernel(looped, {"cpu": 50})
    registry = make(backward=True, scaled__fast=fast)
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Auto,))

    def call(x: Any, w: Any, c: Any, power: int) -> Any:
        local = jax.shard_map(
            lambda x, w, c: registry.call("scaled", x, w, c, power=power),
            mesh=mesh,
            in_specs=(P("rows"), P(), P("rows")),
            out_specs=P("rows"),
            check_vma=check,
        )
        return local(x, w, c)

    close(call(X, W, COUNTS, 2), scaled(X, W, COUNTS, power=2))
    assert {inv["x"].shape for inv in fast.asked} == {(1, 3)}
    close(jax.grad(loss(call), argnums=(0, 1))(X, W, COUNTS), jax.grad(loss(scaled), argnums=(0, 1))(X, W, COUNTS))


def test_checkpoint_scan_and_disabled_jit() -> None:
    registry = make(backward=True)

    def call(x: Any) -> Any:
        return registry.call("scaled", x, W)[0]

    def layers(f: Any) -> Any:
        return lambda x: jax.lax.scan(lambda c, _: (jax.checkpoint(f)(c), None), x, length=3)[0].sum()

    close(jax.grad(layers(call))(X), jax.grad(layers(lambda x: scaled(x, W)[0]))(X))
    with jax.disable_jit():
        close(call(X), scaled(X, W)[0])


def test_the_platform_is_the_one_that_is_compiled_for() -> None:
    def gives(number: float) -> Any:
        return lambda a: (jnp.full_like(a["x"], number), jnp.full_like(a["x"][:, 0], number))

    cpu, gpu = kernel(gives(1.5), {"cpu": 50}), kernel(gives(2.5), {"gpu": 50})
    registry = make(scaled__cpu=cpu, scaled__gpu=gpu)
    traced = jax.jit(lambda x: registry.call("scaled", x, W)[0]).trace(X)
    assert not cpu.asked  # nothing is chosen while tracing
    assert not gpu.asked
    assert "1.5" in traced.lower(lowering_platforms=("cpu",)).as_text()
    for_cuda = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "2.5" in for_cuda
    assert "1.5" not in for_cuda
    assert {inv.platform for inv in gpu.asked} == {"gpu"}
    assert {inv.device_kind for inv in gpu.asked} == {None}
    both = traced.lower(lowering_platforms=("cpu", "cuda")).as_text()
    assert "1.5" in both
    assert "2.5" in both


def test_a_kernel_is_traced_under_the_settings_of_its_call() -> None:
    """JAX may lower elsewhere what it has traced."""

    def product(a: Mapping[str, Any]) -> Any:
        out = (a["x"] @ jnp.diag(a["weight"])).astype(a["x"].dtype)
        return out, jnp.zeros(len(out), out.dtype)

    registry = make(scaled__fast=kernel(product, {"cpu": 50}))
    call = jax.jit(lambda x, w: registry.call("scaled", x, w)[0])
    with jax.enable_x64(True):
        x, w = np.asarray(X, np.float64) / 3, np.asarray(W, np.float64)
        traced = call.trace(x, w)
    compiled = traced.lower().compile()
    with jax.enable_x64(True):
        np.testing.assert_allclose(compiled(x, w), x * w, rtol=1e-14)
    with jax.default_matmul_precision("highest"):
        traced = call.trace(X, W)
    assert "HIGHEST" in traced.lower().as_text()
    traced = call.trace(X, W)
    with jax.default_matmul_precision("highest"):
        assert "HIGHEST" not in traced.lower().as_text()


def test_a_kernel_may_call_back_to_the_host() -> None:
    def on_host(a: Mapping[str, Any]) -> Any:
        wanted = outputs(a)
        return jax.pure_callback(lambda x, w: tuple(map(np.asarray, scaled(x, w))), wanted, a["x"], a["weight"])

    registry = make(scaled__host=kernel(on_host, {"cpu": 50}))

    def call(x: Any) -> Any:
        return registry.call("scaled", x, W)[0]

    close(call(X), scaled(X, W)[0])
    close(jax.jit(lambda x: call(x) + 1)(X), scaled(X, W)[0] + 1)
    close(jax.grad(lambda x: call(x).sum())(X), jnp.cos(X) * W)


def test_a_call_keeps_its_name_in_the_compiled_code() -> None:
    text = jax.jit(lambda x: make().call("scaled", x, W)[0]).lower(X).as_text(debug_info=True)
    assert "jit(scaled)" in text


def test_outputs_come_from_the_reference_where_the_operation_does_not_say() -> None:
    registry = Registry(plugins="")
    registry.register(Operation(name="scaled", signature=scaled, results=("out", "total")))
    registry.register(kernel(compute), "scaled.reference")
    registry.register(kernel(compute, {"cpu": 90}), "scaled.fast")
    close(registry.call("scaled", X, W), scaled(X, W))
