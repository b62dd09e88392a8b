"""Which results a call needs: those that the caller gets, and those that its gradients are computed from.

The kernel returns None for every other result, so that a value shows whether anything depends on it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel_core import Axes, Operation, PluginError, Registry, hookimpl

RNG = np.random.default_rng(11)
X, WEIGHT = RNG.normal(size=(8, 6)), RNG.normal(size=6)
OUT = np.sin(X) * WEIGHT
D_X, D_WEIGHT = 2 * OUT * np.cos(X) * WEIGHT, (2 * OUT * np.sin(X)).sum(0)
AXES = Axes(
    {"x": "rows dim", "weight": "dim"},
    {"out": "rows dim", "sine": "rows dim", "count": "rows"},
    independent="rows",
    whole="dim",
    vmap="rows",
    residuals={"sine": "weight", "count": "", "out": ""},
    dtypes={"count": "int32"},
)


def weighted(x: Any, weight: Any, *, parts: str = "out") -> Any: ...


def prepare(arguments: Any) -> Any:
    """The caller gets the results that ``parts`` names, one array where it is one name."""
    names = arguments["parts"].split()

    def restore(results: Any) -> Any:
        by_name = dict(zip(("out", "sine", "count"), results, strict=True))
        return by_name[names[0]] if len(names) == 1 else tuple(by_name[name] for name in names)

    return arguments, restore


class Kernel:
    """The forward. Results that are not needed are None, and ``seen`` has what was needed."""

    PLATFORMS = {"cpu": 60}

    def __init__(self, opaque: bool) -> None:
        self.OPAQUE = ("cpu",) if opaque else ()
        self.seen: list[Any] = []

    @hookimpl
    def run_backend(self, inv: Any, cfg: Any) -> Any:
        self.seen.append(None if inv.needed is None else {*inv.needed})
        sine = jnp.sin(inv["x"])
        results = {"out": sine * inv["weight"], "sine": sine, "count": (inv["x"] > 0).sum(-1, dtype=jnp.int32)}
        return tuple(value if inv.needs(name) else None for name, value in results.items())


@hookimpl
def run_all(inv: Any, cfg: Any) -> Any:
    sine = jnp.sin(inv["x"])
    return sine * inv["weight"], sine, (inv["x"] > 0).sum(-1, dtype=jnp.int32)


@hookimpl
def run_backward(inv: Any, cfg: Any) -> Any:
    d_out = 0.0 if inv["d_out"] is None else inv["d_out"]
    d_sine = 0.0 if inv["d_sine"] is None else inv["d_sine"]
    gradients = {
        "x": lambda: (d_out * inv["weight"] + d_sine) * jnp.cos(inv["x"]),
        "weight": lambda: (d_out * inv["sine"]).sum(0),
    }
    return tuple(gradients[name]() for name in inv["wrt"])


def make_registry(opaque: bool = False, fold: bool = True) -> tuple[Registry, list[Any]]:
    registry, kernel = Registry(plugins=""), Kernel(opaque)
    fields: dict[str, Any] = {} if fold else {"fold": None}
    operation = Operation(
        name="weighted", signature=weighted, axes=AXES, prepare=prepare, backward="weighted_bwd", **fields
    )
    registry.register(operation)
    registry.register(operation.gradients(**fields), "weighted_bwd")
    registry.register(kernel, "weighted.fast")
    backward = SimpleNamespace(run_backend=run_backward, PLATFORMS={"cpu": 60}, OPAQUE=kernel.OPAQUE)
    registry.register(backward, "weighted_bwd.fast")
    return registry, kernel.seen


@pytest.fixture(params=[False, True], ids=["plain", "opaque"])
def registry(request: pytest.FixtureRequest) -> tuple[Registry, list[Any]]:
    return make_registry(request.param)


def arrays() -> tuple[jax.Array, jax.Array]:
    return jnp.asarray(X, jnp.float32), jnp.asarray(WEIGHT, jnp.float32)


def assert_close(actual: Any, expected: Any) -> None:
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=2e-5, atol=2e-5), actual, expected)


# -- what the caller gets ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_jitted", [False, True])
def test_only_what_the_caller_gets_is_needed(registry: Any, is_jitted: bool) -> None:
    registry, seen = registry
    for parts, needed in (("out", {"out"}), ("count sine", {"sine", "count"}), ("out sine count", None)):
        call = lambda x, weight, parts=parts: registry.call("weighted", x, weight, parts=parts)
        results = (jax.jit(call) if is_jitted else call)(*arrays())
        expected = {"out": OUT, "sine": np.sin(X), "count": (X > 0).sum(-1)}
        wanted = [expected[name] for name in parts.split()]
        assert_close(results, wanted[0] if len(wanted) == 1 else tuple(wanted))
        assert seen.pop() == needed
        assert not seen


def test_a_result_that_is_needed_has_to_be_returned() -> None:
    registry, _ = make_registry()
    empty = SimpleNamespace(run_backend=hookimpl(lambda inv, cfg: (None, None, None)), PLATFORMS={"cpu": 70})
    registry.register(empty, "weighted.empty")
    with pytest.raises(PluginError, match=r"returned \(None, None, None\); .*; of these, out cannot be None in this"):
        registry.call("weighted", *arrays())


WRONG: dict[str, Callable[[Any], Any]] = {
    "few": lambda inv: run_all(inv, None)[:2],
    "one": lambda inv: run_all(inv, None)[0],
    "shape": lambda inv: (*run_all(inv, None)[:2], jnp.zeros(3, jnp.int32)),
    "dtype": lambda inv: (*run_all(inv, None)[:2], jnp.zeros(8)),
    "type": lambda inv: (*run_all(inv, None)[:2], "count"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_result_is_found_where_it_is_not_needed(case: str) -> None:
    registry, _ = make_registry()
    kernel = SimpleNamespace(run_backend=hookimpl(lambda inv, cfg: WRONG[case](inv)), PLATFORMS={"cpu": 70})
    registry.register(kernel, "weighted.wrong")
    with pytest.raises(
        PluginError, match=r"weighted.wrong .* returned .* promises \(float32\[8, 6\], float32\[8, 6\], int"
    ):
        registry.call("weighted", *arrays())


@pytest.mark.parametrize("name", ["sin", "x"])
def test_only_a_result_can_be_needed(name: str) -> None:
    registry, _ = make_registry()
    kernel = SimpleNamespace(run_backend=hookimpl(lambda inv, cfg: inv.needs(name)), PLATFORMS={"cpu": 70})
    registry.register(kernel, "weighted.mistyped")
    with pytest.raises(ValueError, match=f"weighted: '{name}' is not a result"):
        registry.call("weighted", *arrays())


def test_a_kernel_may_return_more_than_is_needed() -> None:
    registry, _ = make_registry()
    registry.register(SimpleNamespace(run_backend=run_all, PLATFORMS={"cpu": 70}), "weighted.full")
    assert_close(registry.call("weighted", *arrays()), OUT)


def test_what_is_needed_is_in_no_key() -> None:
    registry, _ = make_registry()
    keys = set()

    class Watching(Kernel):
        @hookimpl
        def run_backend(self, inv: Any, cfg: Any) -> Any:
            keys.add(inv.key)
            return super().run_backend(inv, cfg)

    registry.register(kernel := Watching(False), "weighted.watching")
    registry.call("weighted", *arrays(), backend="watching")
    jax.grad(lambda x: registry.call("weighted", x, arrays()[1], backend="watching").sum())(arrays()[0])
    assert kernel.seen == [{"out"}, {"out"}]
    assert keys == {registry.invocation("weighted", *arrays()).key}


# -- what gradients are computed from ----------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(f))])
def test_a_gradient_needs_its_residuals(registry: Any, transform: Callable[..., Any]) -> None:
    registry, seen = registry
    loss = lambda x, weight: (registry.call("weighted", x, weight) ** 2).sum()
    both = (D_X, D_WEIGHT)
    for wrt, gradients, residuals in (((0,), both[:1], set()), ((1,), both[1:], {"sine"}), ((0, 1), both, {"sine"})):
        assert_close(jax.grad(transform(loss), wrt)(*arrays()), gradients)
        assert all(needed is not None and needed <= {"out", *residuals} for needed in seen)
        assert {"out", *residuals} == set().union(*seen)
        seen.clear()


def test_the_residuals_are_not_written_where_only_values_are_used(registry: Any) -> None:
    registry, seen = registry

    def value(x: Any, weight: Any) -> Any:
        return jax.value_and_grad(lambda x, w: (registry.call("weighted", x, w) ** 2).sum(), (0, 1))(x, weight)[0]

    assert_close(jax.jit(value)(*arrays()), (OUT**2).sum())
    assert seen == [{"out"}]


def test_a_gradient_needs_all_results_unless_the_axes_say_which() -> None:
    registry, seen = Registry(plugins=""), (kernel := Kernel(opaque=False)).seen
    axes = attrs.evolve(AXES, residuals={"count": ""})
    operation = Operation(name="weighted", signature=weighted, axes=axes, prepare=prepare, backward="weighted_bwd")
    registry.register(operation)
    registry.register(operation.gradients())
    registry.register(kernel, "weighted.fast")
    registry.register(SimpleNamespace(run_backend=run_backward), "weighted_bwd.fast")
    loss = lambda x, weight: (registry.call("weighted", x, weight, parts="out sine")[0] ** 2).sum()
    assert_close(jax.jit(jax.grad(loss))(*arrays()), D_X)
    assert seen == [{"out", "sine"}]


def test_gradients_of_every_order_and_in_forward_mode() -> None:
    registry, _ = make_registry()
    registry.register(SimpleNamespace(run_backend=run_all, PLATFORMS={"cpu": 0}), "weighted.reference")
    backward = SimpleNamespace(run_backend=run_backward, PLATFORMS={"cpu": 0})
    registry.register(backward, "weighted_bwd.reference")
    plain = lambda x, weight: jnp.sin(x) * weight
    call = lambda x, weight: registry.call("weighted", x, weight)
    loss = lambda function: lambda x, weight: (function(x, weight) ** 3).sum()
    tangents = tuple(jnp.asarray(RNG.normal(size=a.shape), jnp.float32) for a in arrays())
    assert_close(jax.jvp(call, arrays(), tangents), jax.jvp(plain, arrays(), tangents))
    for twice in (lambda f: jax.hessian(f, 1), lambda f: jax.jacrev(jax.grad(f, 0), 1)):
        assert_close(jax.jit(twice(loss(call)))(*arrays()), twice(loss(plain))(*arrays()))


def test_a_cotangent_of_each_result_that_the_caller_gets(registry: Any) -> None:
    registry, seen = registry

    def loss(x: Any, weight: Any) -> Any:
        sine, count = registry.call("weighted", x, weight, parts="sine count")
        return (sine * count[:, None]).sum()

    expected = np.cos(X) * (X > 0).sum(-1)[:, None]
    assert_close(jax.grad(loss)(*arrays()), expected)
    assert seen == [{"sine", "count"}]


# -- in programs -------------------------------------------------------------------------------------------------------


def test_dead_code_narrows_what_is_needed(registry: Any) -> None:
    registry, seen = registry
    call = jax.jit(lambda x, weight: registry.call("weighted", x, weight, parts="out sine count"))
    assert_close(jax.jit(lambda x, weight: call(x, weight)[1])(*arrays()), np.sin(X))
    assert seen.pop() == {"sine"}
    body = lambda carry, _: (carry, call(carry, arrays()[1])[2])
    _, counts = jax.jit(lambda x: jax.lax.scan(body, x, None, 3))(arrays()[0])
    assert_close(counts, np.stack([(X > 0).sum(-1)] * 3))
    assert seen.pop() == {"count"}
    assert not seen


def test_calls_of_a_program_and_of_programs_need_their_own_results(registry: Any) -> None:
    registry, seen = registry
    call = lambda x, weight: registry.call("weighted", x, weight, parts="out sine count")

    def program(x: Any, weight: Any) -> Any:
        first, second = call(x, weight), call(call(x, weight)[0], weight)
        gradient = jax.grad(lambda weight: call(x, weight)[0].sum())(weight)
        return first[1], second[2], gradient

    expected = np.sin(X), (OUT > 0).sum(-1), np.sin(X).sum(0)
    for _ in range(2):
        assert_close(jax.jit(program)(*arrays()), expected)
        assert_close(jax.jit(lambda x, weight: call(x, weight)[2])(*arrays()), (X > 0).sum(-1))
        assert_close(program(*arrays()), expected)
    assert {frozenset(needed) for needed in seen if needed} >= {frozenset({"sine"}), frozenset({"count"})}


def test_loops_and_branches(registry: Any) -> None:
    registry, seen = registry
    x, weight = arrays()
    call = lambda x: registry.call("weighted", x, weight)
    thrice = OUT
    for _ in range(2):
        thrice = np.sin(thrice) * WEIGHT
    assert_close(jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda _, x: call(x), x))(x), thrice)
    assert_close(jax.jit(lambda x: jax.lax.while_loop(lambda x: x.max() > 1e9, call, call(x)))(x), OUT)
    assert_close(jax.jit(lambda x: jax.lax.cond(x[0, 0] > 9, lambda x: x, call, x))(x), OUT)
    assert {frozenset(needed) for needed in seen} == {frozenset({"out"})}
    seen.clear()

    def scanned(weights: Any) -> Any:
        return (jax.lax.scan(lambda x, w: (registry.call("weighted", x, w), None), x, weights)[0] ** 2).sum()

    plain = lambda weights: (jnp.sin(jnp.sin(x) * weights[0]) * weights[1] ** 1).__pow__(2).sum()
    weights = jnp.stack([weight, 0.5 * weight])
    assert_close(jax.jit(jax.grad(scanned))(weights), jax.grad(plain)(weights))
    assert set().union(*seen) == {"out", "sine"}


@pytest.mark.parametrize("fold", [True, False], ids=["merged", "looped"])
@pytest.mark.parametrize("opaque", [False, True], ids=["plain", "opaque"])
def test_mapped_calls(fold: bool, opaque: bool) -> None:
    registry, seen = make_registry(opaque, fold)
    x, weight = arrays()
    xs = jnp.stack([x, x + 1, 2 * x])
    loss = lambda x, weight: (registry.call("weighted", x, weight) ** 2).sum()
    assert_close(jax.vmap(lambda x: registry.call("weighted", x, weight))(xs), np.sin(xs) * WEIGHT)
    assert set(map(frozenset, seen)) == {frozenset({"out"})}
    seen.clear()
    plain = lambda x, weight: ((jnp.sin(x) * weight) ** 2).sum()
    gradients = jax.vmap(jax.grad(loss, (0, 1)), (0, None))(xs, weight)
    assert_close(gradients, jax.vmap(jax.grad(plain, (0, 1)), (0, None))(xs, weight))
    of_sum = lambda f: jax.grad(lambda weight: jax.vmap(f, (0, None))(xs, weight).sum())
    assert_close(of_sum(loss)(weight), of_sum(plain)(weight))
    assert set().union(*seen) == {"out", "sine"}
    twice = lambda f: jax.vmap(jax.vmap(f, (0, None)), (None, 0))(xs, jnp.stack([weight, weight + 1]))
    assert_close(twice(jax.grad(loss)), twice(jax.grad(plain)))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_calls(registry: Any, kind: AxisType) -> None:
    registry, seen = registry
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(kind,), devices=jax.devices()[:4])
    x, weight = (jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays(), (P("rows"), P()), strict=True))
    with jax.set_mesh(mesh):
        loss = lambda x, weight: (registry.call("weighted", x, weight) ** 2).sum()
        assert_close(jax.jit(lambda x, w: registry.call("weighted", x, w))(x, weight), OUT)
        assert set(map(frozenset, seen)) == {frozenset({"out"})}
        assert_close(jax.jit(jax.grad(loss))(x, weight), D_X)
        assert set(map(frozenset, seen)) == {frozenset({"out"})}
        assert_close(jax.jit(jax.grad(loss, (0, 1)))(x, weight), (D_X, D_WEIGHT))
        assert set().union(*seen) == {"out", "sine"}


def test_inside_shard_map(registry: Any) -> None:
    registry, seen = registry
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    call = lambda x, weight: registry.call("weighted", x, weight)
    on_shards = jax.shard_map(call, mesh=mesh, in_specs=(P("rows"), P()), out_specs=P("rows"))
    assert_close(jax.jit(on_shards)(*arrays()), OUT)
    assert set(map(frozenset, seen)) == {frozenset({"out"})}
    loss = lambda x, weight: (on_shards(x, weight) ** 2).sum()
    assert_close(jax.jit(jax.grad(loss, (0, 1)))(*arrays()), (D_X, D_WEIGHT))
    assert set().union(*seen) == {"out", "sine"}


@pytest.mark.parametrize(
    ("residuals", "text"),
    [
        ({"sin": "weight"}, "axes, residuals: 'sin' is not a result; did you mean 'sine'"),
        ({"sine": "wait"}, "axes, residuals of sine: 'wait' is not an array"),
    ],
)
def test_residuals_are_of_results_and_for_arrays(residuals: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Axes({"x": "rows", "weight": "rows"}, {"out": "rows", "sine": "rows"}, whole="rows", residuals=residuals)


@pytest.mark.parametrize("residuals", ["sine", ["sine"], {"sine": None}])
def test_residuals_are_arrays_by_result(residuals: Any) -> None:
    with pytest.raises(TypeError, match=r"axes, residuals: take arrays by result, as \{'rstd': 'x weight'\}; got"):
        Axes({"x": "rows"}, {"out": "rows", "sine": "rows"}, whole="rows", residuals=residuals)
