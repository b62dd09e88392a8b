"""Calls under JAX's transformations: derivatives, vmap, shard_map and lowering for other platforms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
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


def fold(a: Mapping[str, Any], mapped: frozenset[str], size: int, sums: frozenset[str]) -> Any:
    if "weight" in mapped:
        return None
    rows = a["x"].shape[-2]

    def merge_batch(name: str, rank: int) -> Any:
        value = a[name]
        batched = value if value is None or name in mapped else jnp.broadcast_to(value, (size, *value.shape))
        return None if batched is None else batched.reshape(-1, *batched.shape[batched.ndim - rank + 1 :])

    arguments = {**a, "x": merge_batch("x", 2), "counts": merge_batch("counts", 1)}
    return arguments, lambda results: tuple(r.reshape(size, rows, *r.shape[1:]) for r in results)


def kernel(compute: Callable[[Mapping[str, Any]], Any], platforms: dict[str, int] | None = None) -> type:
    class Kernel:
        PLATFORMS = platforms or {"cpu": 20, "gpu": 20}
        invocations: list[Any] = []

        @staticmethod
        @hookimpl
        def heuristic_cfg(inv: Any) -> int:
            Kernel.invocations.append(inv)
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
    _, vjp = jax.vjp(lambda m: compute({**a, **m}), {name: a[name] for name in a["wrt"]})
    (results,) = vjp(tuple(cotangents))
    return tuple(results[name] for name in a["wrt"])


def make_registry(*, reference: bool = True, backward: bool = False, folds: bool = False, **kernels: Any) -> Registry:
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


def assert_close(actual: Any, expected: Any) -> None:
    jax.tree.map(lambda f, w: np.testing.assert_allclose(f, w, rtol=2e-5, atol=2e-6), actual, expected)


def loss(function: Callable[..., Any]) -> Callable[..., Any]:
    def total(x: Any, weight: Any, counts: Any) -> Any:
        out, rows = function(x, weight, counts, power=3)
        return (out**2).sum() + (rows * jnp.arange(rows.size)).sum()

    return total


@pytest.mark.parametrize("backward", [False, True])
def test_derivatives_of_every_order(backward: bool) -> None:
    registry = make_registry(backward=backward, scaled__fast=kernel(compute, {"cpu": 50}))
    assert registry.plan("scaled", X, W, COUNTS).kernel.backend == "fast"

    def call(*args: Any, **kwargs: Any) -> Any:
        return registry.call("scaled", *args, **kwargs)

    for transform in (
        lambda f: jax.grad(f, argnums=(0, 1)),
        lambda f: jax.grad(lambda *a: sum((g**2).sum() for g in jax.grad(f, argnums=(0, 1))(*a)), argnums=(0, 1)),
        lambda f: jax.jacrev(jax.jacrev(jax.grad(f, argnums=1), argnums=1), argnums=0),
    ):
        expected = jax.jit(transform(loss(scaled)))(X, W, COUNTS)
        assert_close(transform(loss(call))(X, W, COUNTS), expected)
        assert_close(jax.jit(transform(loss(call)))(X, W, COUNTS), expected)


def test_the_backward_computes_only_the_requested_gradients() -> None:
    fast = kernel(gradients, {"cpu": 50})
    registry = make_registry(backward=True, scaled_bwd__fast=fast)
    jax.grad(lambda w: registry.call("scaled", X, w, COUNTS)[1].sum())(W)
    (inv,) = fast.invocations
    assert inv["wrt"] == ("weight",)
    assert inv["d_out"] is None
    assert inv["d_total"].shape == (4,)
    assert inv["out"].shape == (4, 3)


def test_an_explicit_backend_applies_to_the_backward() -> None:
    registry = make_registry(
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
    forward_only = make_registry(backward=True, scaled__one=kernel(compute))
    assert_close(
        jax.grad(lambda x: forward_only.call("scaled", x, W, backend="one")[1].sum())(X),
        jax.grad(lambda x: scaled(x, W)[1].sum())(X),
    )


def test_a_gradient_that_is_not_defined_is_refused() -> None:
    registry = make_registry()

    def sum_with_counts(counts: Any) -> Any:
        return registry.call("scaled", X, W, counts)[1].sum()

    with pytest.raises(NotDifferentiable, match="'scaled' has no gradient for counts"):
        jax.grad(sum_with_counts)(jnp.asarray([1.0, 2.0, 3.0, 4.0]))
    registry_without_reference = make_registry(reference=False, scaled__fast=kernel(compute))
    with pytest.raises(NotDifferentiable, match="neither a backward operation nor a reference"):
        jax.grad(lambda x: registry_without_reference.call("scaled", x, W)[1].sum())(X)


def test_a_backward_kernel_that_refuses_is_reported_with_its_reason() -> None:
    class RefusingKernel:
        @staticmethod
        @hookimpl
        def heuristic_cfg(inv: Any) -> None:
            raise Unsupported("weights are too heavy")

        @staticmethod
        @hookimpl
        def run_backend(inv: Any, cfg: Any) -> None: ...

    registry = make_registry(backward=True)
    registry.register(RefusingKernel, "scaled_bwd.reference")
    with pytest.raises(NoKernel, match=r"scaled_bwd.reference .*: refused, weights are too heavy"):
        jax.grad(lambda x: registry.call("scaled", x, W)[1].sum())(X)


FORWARD_MODE: dict[str, Callable[[Any], Any]] = {
    "jvp": lambda f: jax.jvp(f, (X, W), (X * 2, W + 1)),
    "jvp in one array": lambda f: jax.jvp(lambda x: f(x, W), (X,), (X,)),
    "jacfwd": lambda f: jax.jacfwd(f, (0, 1))(X, W),
    "grad of jvp": lambda f: jax.grad(lambda x: jax.jvp(f, (x, W), (X, W))[1][0])(X),
    "hessian": lambda f: jax.hessian(f, (0, 1))(X, W),
    "jacrev of jacfwd": lambda f: jax.jacrev(jax.jacfwd(f, (0, 1)), 1)(X, W),
    "linear_transpose": lambda f: jax.linear_transpose(jax.linearize(f, X, W)[1], X, W)(f(X, W)),
    "vmap of jvp": lambda f: jax.vmap(lambda x: jax.jvp(f, (x, W), (X, W)))(jnp.stack([X, X + 1])),
}


@pytest.mark.parametrize("derivative", FORWARD_MODE)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("backend", [None, pytest.param("reference", marks=pytest.mark.long)])  # JAX's own derivative
def test_forward_mode_differentiates_the_reference(backend: str | None, backward: bool, derivative: str) -> None:
    registry = make_registry(backward=backward, scaled__fast=kernel(compute, {"cpu": 50}))

    def call(x: Any, w: Any) -> Any:
        out, total = registry.call("scaled", x, w, COUNTS, power=2, backend=backend)
        return (out**2).sum(), total

    def reference(x: Any, w: Any) -> Any:
        out, total = scaled(x, w, COUNTS, power=2)
        return (out**2).sum(), total

    differentiate = FORWARD_MODE[derivative]
    jitted = jax.jit(differentiate, static_argnums=0)
    expected = jitted(reference)
    assert_close(differentiate(call), expected)
    assert_close(jitted(call), expected)


def test_forward_mode_without_a_reference_is_refused() -> None:
    registry = make_registry(reference=False, backward=True, scaled__fast=kernel(compute))

    def call(x: Any) -> Any:
        return registry.call("scaled", x, W)[0].sum()

    assert_close(jax.grad(call)(X), jnp.cos(X) * W)
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
    registry = make_registry(folds=folds, scaled__fast=fast)
    size = 5
    arrays = [
        value if axis is None else jnp.moveaxis(jnp.stack([value * (i + 1) for i in range(size)]), 0, axis)
        for value, axis in zip((X, W, COUNTS), axes, strict=True)
    ]

    def call(*args: Any) -> Any:
        return registry.call("scaled", *args, power=2)

    def slices(i: int) -> list[Any]:
        return [v if axis is None else jnp.take(v, i, axis) for v, axis in zip(arrays, axes, strict=True)]

    expected = jax.tree.map(lambda *rows: jnp.stack(rows), *(scaled(*slices(i), power=2) for i in range(size)))
    assert_close(jax.vmap(call, axes)(*arrays), expected)
    assert_close(jax.jit(jax.vmap(call, axes))(*arrays), expected)
    is_folded = folds and axes[1] is None
    assert {inv["x"].shape for inv in fast.invocations} == {(20, 3) if is_folded else (4, 3)}

    def gradient(f: Any) -> Any:
        return jax.vmap(jax.grad(lambda x, w, c: f(x, w, c)[0].sum() ** 2, argnums=(0, 1)), axes)

    assert_close(gradient(call)(*arrays), gradient(lambda *a: scaled(*a, power=2))(*arrays))
    out_axis = jax.vmap(lambda *a: call(*a)[1], axes, out_axes=1)(*arrays)
    assert_close(out_axis, expected[1].T)


def test_vmap_of_vmap_folds_twice() -> None:
    fast = kernel(compute, {"cpu": 50})
    registry = make_registry(folds=True, scaled__fast=fast)
    batches = jnp.stack([jnp.stack([X * i + j for i in range(2)]) for j in range(3)])
    actual = jax.vmap(jax.vmap(lambda x: registry.call("scaled", x, W)[0]))(batches)
    assert_close(actual, jnp.sin(batches) * W)
    assert [inv["x"].shape for inv in fast.invocations] == [(24, 3)]


def test_a_vmapped_call_makes_one_choice() -> None:
    fast = kernel(compute, {"cpu": 50})
    registry = make_registry(folds=True, scaled__fast=fast)
    jax.vmap(lambda x: registry.call("scaled", x, W)[0])(jnp.stack([X, X]))
    assert len(fast.invocations) == 1


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_has_local_shapes_and_sums_gradients_of_replicated_arrays(check_vma: bool) -> None:
    def compute_in_loop(a: Mapping[str, Any]) -> Any:  # the carry starts as replicated zeros
        out, _ = compute(a)
        total = jax.lax.fori_loop(0, out.shape[1], lambda i, t: t + out[:, i], jnp.zeros(out.shape[0]))
        return out, total

    fast = kernel(compute_in_loop, {"cpu": 50})
    registry = make_registry(backward=True, scaled__fast=fast)
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Auto,))

    def call(x: Any, w: Any, c: Any, power: int) -> Any:
        local = jax.shard_map(
            lambda x, w, c: registry.call("scaled", x, w, c, power=power),
            mesh=mesh,
            in_specs=(P("rows"), P(), P("rows")),
            out_specs=P("rows"),
            check_vma=check_vma,
        )
        return local(x, w, c)

    assert_close(call(X, W, COUNTS, 2), scaled(X, W, COUNTS, power=2))
    assert {inv["x"].shape for inv in fast.invocations} == {(1, 3)}
    assert_close(
        jax.grad(loss(call), argnums=(0, 1))(X, W, COUNTS), jax.grad(loss(scaled), argnums=(0, 1))(X, W, COUNTS)
    )


def test_calls_under_checkpoint_scan_and_disabled_jit() -> None:
    registry = make_registry(backward=True)

    def call(x: Any) -> Any:
        return registry.call("scaled", x, W)[0]

    def layers(f: Any) -> Any:
        return lambda x: jax.lax.scan(lambda c, _: (jax.checkpoint(f)(c), None), x, length=3)[0].sum()

    assert_close(jax.grad(layers(call))(X), jax.grad(layers(lambda x: scaled(x, W)[0]))(X))
    with jax.disable_jit():
        assert_close(call(X), scaled(X, W)[0])


def test_the_platform_is_that_of_the_lowering() -> None:
    def constant(number: float) -> Any:
        return lambda a: (jnp.full_like(a["x"], number), jnp.full_like(a["x"][:, 0], number))

    cpu, gpu = kernel(constant(1.5), {"cpu": 50}), kernel(constant(2.5), {"gpu": 50})
    registry = make_registry(scaled__cpu=cpu, scaled__gpu=gpu)
    traced = jax.jit(lambda x: registry.call("scaled", x, W)[0]).trace(X)
    assert not cpu.invocations  # nothing is chosen while tracing
    assert not gpu.invocations
    assert "1.5" in traced.lower(lowering_platforms=("cpu",)).as_text()
    for_cuda = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "2.5" in for_cuda
    assert "1.5" not in for_cuda
    assert {inv.platform for inv in gpu.invocations} == {"gpu"}
    assert {inv.device_kind for inv in gpu.invocations} == {None}
    text = traced.lower(lowering_platforms=("cpu", "cuda")).as_text()
    assert "1.5" in text
    assert "2.5" in text


def test_a_kernel_is_traced_with_the_settings_of_its_call() -> None:
    """JAX may lower a trace later, under other settings."""

    def compute_product(a: Mapping[str, Any]) -> Any:
        out = (a["x"] @ jnp.diag(a["weight"])).astype(a["x"].dtype)
        return out, jnp.zeros(len(out), out.dtype)

    registry = make_registry(scaled__fast=kernel(compute_product, {"cpu": 50}))
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


@pytest.mark.parametrize("transform", [lambda function: function, jax.jit])
@pytest.mark.parametrize("backward", [False, True])
def test_a_derivative_is_computed_with_the_settings_of_its_call(
    backward: bool, transform: Callable[[Any], Any]
) -> None:
    """A pullback may be called later, under other settings."""

    def cast(results: Any) -> tuple[Any, ...]:
        return tuple(result.astype(jnp.float64) for result in results)

    kernels = {"scaled__reference": kernel(lambda a: cast(compute(a)))}
    if backward:
        kernels["scaled_bwd__reference"] = kernel(lambda a: cast(gradients(a)))
    registry = make_registry(backward=backward, **kernels)
    with jax.enable_x64(True):
        x, w = jnp.asarray(X, jnp.float64) / 3, jnp.asarray(W, jnp.float64)
        _, pullback = jax.vjp(lambda x: registry.call("scaled", x, w)[0], x)
        _, tangent = jax.linearize(lambda x: registry.call("scaled", x, w)[0], x)
    expected = np.cos(np.asarray(x)) * np.asarray(w) * np.asarray(x)
    np.testing.assert_allclose(transform(pullback)(x)[0], expected, rtol=1e-14)
    np.testing.assert_allclose(transform(tangent)(x), expected, rtol=1e-14)


@pytest.mark.always
@pytest.mark.parametrize("backward", [False, True])
def test_two_pullbacks_in_one_program_have_their_own_settings(backward: bool) -> None:
    def cast(a: Mapping[str, Any], results: Any) -> tuple[Any, ...]:
        return tuple(result.astype(a["x"].dtype) for result in results)  # float32 wherever float64 is off

    kernels = {"scaled__reference": kernel(lambda a: cast(a, compute(a)))}
    if backward:
        kernels["scaled_bwd__reference"] = kernel(lambda a: cast(a, gradients(a)))
    registry = make_registry(backward=backward, **kernels)

    def pullback_of(x: Any, w: Any) -> Any:
        return jax.vjp(lambda x: registry.call("scaled", x, w)[0], x)[1]

    with jax.enable_x64(True):
        wide, w = jnp.asarray(X, jnp.float64) / 3, jnp.asarray(W, jnp.float64)
        wide_pullback = pullback_of(wide, w)
    narrow = jnp.asarray(X, jnp.float32) / 3
    narrow_pullback = pullback_of(narrow, jnp.asarray(W, jnp.float32))
    program = jax.jit(lambda wide, narrow: (*wide_pullback(wide), *narrow_pullback(narrow)))
    expected = np.cos(np.asarray(wide)) * np.asarray(w) * np.asarray(wide)
    for is_wide_enabled in (False, True):
        with jax.enable_x64(is_wide_enabled):
            results = program(wide, narrow)
        assert [result.dtype for result in results] == [jnp.float64, jnp.float32]
        np.testing.assert_allclose(results[0], expected, rtol=1e-14)
        np.testing.assert_allclose(results[1], expected, rtol=1e-6)


def test_a_kernel_may_call_back_to_the_host() -> None:
    def compute_on_host(a: Mapping[str, Any]) -> Any:
        results = outputs(a)
        return jax.pure_callback(lambda x, w: tuple(map(np.asarray, scaled(x, w))), results, a["x"], a["weight"])

    registry = make_registry(scaled__host=kernel(compute_on_host, {"cpu": 50}))

    def call(x: Any) -> Any:
        return registry.call("scaled", x, W)[0]

    assert_close(call(X), scaled(X, W)[0])
    assert_close(jax.jit(lambda x: call(x) + 1)(X), scaled(X, W)[0] + 1)
    assert_close(jax.grad(lambda x: call(x).sum())(X), jnp.cos(X) * W)


def test_a_call_keeps_its_name_in_the_compiled_code() -> None:
    text = jax.jit(lambda x: make_registry().call("scaled", x, W)[0]).lower(X).as_text(debug_info=True)
    assert "jit(scaled)" in text


def test_without_declared_outputs_the_reference_determines_them() -> None:
    registry = Registry(plugins="")
    registry.register(Operation(name="scaled", signature=scaled, results=("out", "total")))
    registry.register(kernel(compute), "scaled.reference")
    registry.register(kernel(compute, {"cpu": 90}), "scaled.fast")
    assert_close(registry.call("scaled", X, W), scaled(X, W))


def test_a_reference_is_not_differentiated_in_an_array_without_gradient():
    registry = Registry(plugins="")
    registry.register(Operation(name="scaled", signature=lambda x, scale: None, differentiable=("x",)))

    @hookimpl
    def heuristic_cfg(inv):
        return None

    @hookimpl
    def run_backend(inv, cfg):
        return inv["x"] * inv["scale"]

    registry.register(SimpleNamespace(heuristic_cfg=heuristic_cfg, run_backend=run_backend), "scaled.reference")

    def scaled(x, scale):
        return registry.call("scaled", x, scale, backend="reference")

    assert jax.grad(scaled)(3.0, 5.0) == 5.0
    assert jax.jit(jax.vmap(scaled))(jnp.ones(2), jnp.full(2, 5.0)).tolist() == [5.0, 5.0]
    for transform in (lambda f: f, jax.jit, jax.checkpoint):
        with pytest.raises(NotDifferentiable, match="'scaled' has no gradient for scale"):
            transform(jax.grad(scaled, argnums=(0, 1)))(3.0, 5.0)
        with pytest.raises(NotDifferentiable, match="'scaled' has no gradient for scale"):
            jax.grad(transform(scaled), argnums=1)(3.0, 5.0)


def test_gradients_have_the_shardings_of_their_arrays_on_explicit_axes() -> None:
    """The results of an operation without axes are replicated; a gradient is nevertheless sharded as its array is."""
    registry = make_registry(backward=True)
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Explicit,))
    gradient = jax.grad(loss(lambda *args, **kwargs: registry.call("scaled", *args, **kwargs)))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("rows")))
        for transform in (lambda f: f, jax.jit):
            result = transform(gradient)(x, W, COUNTS)
            assert_close(result, jax.grad(loss(scaled))(X, W, COUNTS))
            assert jax.typeof(result).sharding == jax.typeof(x).sharding
