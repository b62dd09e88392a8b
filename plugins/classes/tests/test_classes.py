"""Kernels as objects: which method runs with which configuration, what is differentiated how, and what is refused."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import pickle
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_classes
from ejkernel_classes import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    Invocation,
    Kernel,
    _bridge,
    default_key_builder_with_sharding,
    overlay_cache,
    policy_override,
)
from ejkernel_core import (
    Choice,
    NoConfig,
    NoKernel,
    NotDifferentiable,
    Operation,
    PluginError,
    Provenance,
    Record,
    Registry,
    UnknownBackend,
    Unsupported,
    _scopes,
    hookimpl,
)
from ejkernel_core._devices import device_name
from tests.conftest import MakeDistribution

X = jnp.arange(1.0, 4.0)
Y = jnp.array([2.0, -1.0, 0.5])


@pytest.fixture(autouse=True)
def core(use_registry: Any) -> Registry:
    """A registry of the core without plugins, so that nothing that is installed has a say."""
    fresh = Registry(plugins="")
    use_registry(fresh)
    return fresh


@dataclasses.dataclass(frozen=True)
class Config:
    factor: int = 2


@attrs.frozen
class Other:
    factor: int = 2


class Scale(Kernel[Config, jax.Array]):
    """``x`` by the configuration's factor, so that the result tells which one was used."""

    def __init__(self) -> None:
        super().__init__(name="scale")
        self.traced: list[int] = []

    def run(self, x: Any, *, cfg: Config, shift: Any = 0.0) -> Any:
        self.traced.append(cfg.factor)
        return x * cfg.factor + shift


def close(one: Any, other: Any, rtol: float = 1e-6) -> None:
    """The same tree, with the same numbers."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=rtol, atol=1e-6), one, other)


# -- which method runs -----------------------------------------------------------------------------------------------


def cannot(*args: Any, **kwargs: Any) -> Any:
    raise ImportError("no compiler of that kind here")


class Everywhere(Kernel[Config, jax.Array]):
    """Each method adds another number; two of them cannot even be traced here."""

    def run(self, x: Any, *, cfg: Any) -> Any:
        return x + 1

    def run_xla(self, x: Any, *, cfg: Any) -> Any:
        return x + 2

    run_pallas = run_triton = cannot


class Gpu(Kernel[Config, jax.Array]):
    """What a GPU and a TPU do can be traced here."""

    def run(self, x: Any, *, cfg: Any) -> Any:
        return x + 1

    def run_pallas(self, x: Any, *, cfg: Any) -> Any:
        return x + 3

    def run_triton(self, x: Any, *, cfg: Any) -> Any:
        return x + 4


def test_the_best_method_of_the_platform_runs_and_the_others_are_not_touched() -> None:
    kernel = Everywhere()
    close(kernel(X), X + 2)
    close(kernel(X, backend="run"), X + 1)
    close(jax.grad(lambda x: kernel(x).sum())(X), jnp.ones(3))
    close(jax.vmap(kernel)(jnp.stack([X, Y])), jnp.stack([X, Y]) + 2)
    verdicts = {v.name: (v.status, v.reason) for v in kernel.plan(X).verdicts}
    assert verdicts == {
        "Everywhere.xla": ("chosen", ""),
        "Everywhere.run": ("able", ""),
        "Everywhere.triton": ("refused", "it runs on gpu; this is cpu"),
        "Everywhere.pallas": ("refused", "it runs on tpu; this is cpu"),
    }


@pytest.mark.parametrize(("platform", "added"), [("cpu", "1."), ("cuda", "4."), ("rocm", "4."), ("tpu", "3.")])
def test_the_platform_that_is_compiled_for_decides(platform: str, added: str) -> None:
    text = jax.jit(Gpu()).trace(X).lower(lowering_platforms=(platform,)).as_text()
    assert f"dense<{added}" in text
    assert text.count("stablehlo.add") == 1


@pytest.mark.parametrize("backend", ["triton", "pallas"])
def test_on_another_platform_another_method_runs(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_bridge.METHODS, backend, {"cpu": 30})
    kernel, added = Gpu(), {"triton": 4, "pallas": 3}[backend]
    rows = jnp.stack([X, Y])
    close(kernel(X), X + added)
    close(jax.vmap(kernel)(rows), rows + added)
    close(jax.vmap(jax.vmap(kernel))(rows), rows + added)
    close(jax.grad(lambda x: kernel(x).sum())(X), jnp.ones(3))
    assert kernel.plan(X).kernel.backend == backend


def test_a_backend_that_cannot_is_refused_and_one_that_is_not_there_named() -> None:
    with pytest.raises(NoKernel, match="Everywhere.triton .*: refused, it runs on gpu; this is cpu"):
        Everywhere()(X, backend="triton")
    with pytest.raises(UnknownBackend, match="no backend 'xla' of 'scale' is installed. Known: run"):
        Scale()(X, backend="xla")
    with pytest.raises(TypeError, match="backend takes a name; got int 3"):
        Scale()(X, backend=3)  # type: ignore[arg-type]


def test_methods_that_return_different_things_are_told() -> None:
    class Torn(Kernel[Config, Any]):
        def run(self, x: Any, *, cfg: Any) -> Any:
            return x

        def run_xla(self, x: Any, *, cfg: Any) -> Any:
            return x, x

    with pytest.raises(TypeError, match=r"Torn: returns PyTreeDef\(\(\*, \*\)\); it returned PyTreeDef\(\*\) before"):
        Torn()(X)

    class Longer(Kernel[Config, Any]):
        def run(self, x: Any, *, cfg: Any) -> Any:
            return x

        def run_xla(self, x: Any, *, cfg: Any) -> Any:
            return jnp.concatenate([x, x])

    with pytest.raises(PluginError, match=r"Longer.xla .*returned \(float32\[6\]\).*promises \(float32\[3\]\)"):
        Longer()(X)


# -- which configuration ---------------------------------------------------------------------------------------------


def test_the_default_heuristic_is_the_configuration_with_all_defaults() -> None:
    kernel = Scale()
    close(kernel(X), X * 2)
    assert kernel.config_type is Config
    assert kernel.plan(X).cfg == Config()
    assert kernel.plan(X).origin == "heuristic"
    assert list(kernel.config_space(kernel.invocation(X))) == [Config()]


def test_an_explicit_cfg_is_obeyed_and_never_sticks(core: Registry) -> None:
    kernel = Scale()
    for mode in ("off", "on_miss", "error_on_miss"):
        with policy_override(mode=mode):
            close(kernel(X, cfg=Config(5)), X * 5)
            assert kernel.plan(X, cfg=Config(5)).origin == "explicit cfg"
    close(kernel(X), X * 2)
    close(jax.jit(partial(kernel, cfg=Config(7)))(X), X * 7)
    close(kernel(X), X * 2)
    assert len(core.memory) == 0


@pytest.mark.parametrize("wrong", [Other(3), 3, "fast"])
def test_a_cfg_of_another_type_is_refused(wrong: Any) -> None:
    with pytest.raises(NoKernel, match="cfg is of type .*, not its Config"):
        Scale()(X, cfg=wrong)


def test_a_cfg_has_to_be_hashable() -> None:
    class Loose(Kernel[dict, Any]):  # type: ignore[type-arg]
        def run(self, x: Any, *, cfg: Any) -> Any:
            return x

    with pytest.raises(TypeError, match="Loose: cfg takes a value that cannot be changed; a dict has no hash"):
        Loose()(X, cfg={"block": 3})


class Untyped(Kernel):  # type: ignore[type-arg]
    """Says nothing about its configurations."""

    def run(self, x: Any, *, cfg: Any) -> Any:
        return x * cfg.factor

    def heuristic_cfg(self, inv: Any) -> Any:
        return Config(3) if inv.args[0].size < 5 else Other(4)


def test_a_class_that_does_not_say_its_configurations_takes_any() -> None:
    kernel, long = Untyped(), jnp.ones(9)
    assert kernel.config_type is None
    close((kernel(X), kernel(long)), (X * 3, long * 4))
    close((kernel(X, cfg=Config(5)), kernel(X, cfg=Other(6))), (X * 5, X * 6))
    close(kernel(X), X * 3)
    executor = Executor()
    executor.selector.cache.put(kernel.invocation(X).key, Config(8))
    executor.selector.cache.put(kernel.invocation(long).key, Config(8))  # not of the type that its heuristic gives
    close((executor(kernel, X), executor(kernel, long)), (X * 8, long * 4))


def test_a_class_without_configurations_at_all() -> None:
    class Plain(Kernel[None, jax.Array]):
        def run(self, x: Any, *, cfg: None) -> Any:
            assert cfg is None
            return -x

    close(Plain()(X), -X)

    class Bare(Kernel):  # type: ignore[type-arg]
        def run(self, x: Any, *, cfg: Any) -> Any:
            return -x

    with pytest.raises(NotImplementedError, match=r"Bare: write heuristic_cfg, or say Kernel\[Config, Out\]"):
        Bare()(X)


C = TypeVar("C")


def test_the_type_of_the_configurations_is_found_where_it_is_said() -> None:
    class Middle(Kernel[Config, C], Generic[C]):
        pass

    class Leaf(Middle[jax.Array]):
        def run(self, x: Any, *, cfg: Any) -> Any:
            return x * cfg.factor

    class Forward(Kernel["Nowhere", Any]):  # type: ignore[name-defined]
        run = Scale.run

    class Generally(Kernel[C, Any]):
        run = Scale.run

    assert Leaf().config_type is Config
    close(Leaf()(X), X * 2)
    assert Forward().config_type is None
    assert Generally().config_type is None


def test_a_heuristic_is_told_the_call_and_its_answer_is_looked_at() -> None:
    seen: list[Invocation] = []

    class Asked(Scale):
        def heuristic_cfg(self, inv: Invocation) -> Any:
            seen.append(inv)
            return Config(inv.args[0].shape[0])

    kernel = Asked()
    close(kernel(X, shift=1.0), X * 3 + 1)
    inv = seen[-1]
    assert (inv.kernel, inv.args, inv.kwargs) == (kernel, (jax.ShapeDtypeStruct((3,), jnp.float32),), {"shift": 1.0})
    assert (inv.platform, inv.device_kind, inv.compute_capability) == ("cpu", device_name(jax.devices()[0]), None)

    class Wrong(Scale):
        def heuristic_cfg(self, inv: Invocation) -> Any:
            return {"factor": 3}

    with pytest.raises(TypeError, match="scale: heuristic_cfg returns a dict, not a Config"):
        Wrong()(X)


def test_a_kernel_refuses_with_a_reason() -> None:
    class Odd(Scale):
        def heuristic_cfg(self, inv: Invocation) -> Config:
            if inv.args[0].shape[0] % 2 == 0:
                raise Unsupported("odd lengths only: pad")
            return Config()

    kernel = Odd()
    for ask in (kernel, kernel.plan, kernel.invocation, lambda x: kernel(x, cfg=Config(3))):
        with pytest.raises(NoKernel, match=r"no kernel can do scale\(x0=float32\[4\].*\n.*odd lengths only: pad"):
            ask(jnp.ones(4))
    assert "odd lengths only: pad" in str(kernel.explain(jnp.ones(4)))
    close(kernel(X), X * 2)
    with pytest.raises(NoKernel, match="odd lengths only: pad"):
        kernel(jnp.ones(4))


# -- the object ------------------------------------------------------------------------------------------------------


def test_init_without_super_is_enough() -> None:
    class Mine(Kernel[Config, jax.Array]):
        def __init__(self, by: float) -> None:
            self.by = by

        def run(self, x: Any, *, cfg: Any) -> Any:
            return x * self.by

    assert (Mine(3.0).name, Mine(3.0).version) == ("Mine", 1)
    close((Mine(3.0)(X), Mine(4.0)(X)), (X * 3, X * 4))


def test_a_name_and_a_version_may_be_the_class_own() -> None:
    class Named(Kernel[Config, Any]):
        name, version, run = "mine", 3, Scale.run

    class Child(Named):
        pass

    assert (Named().name, Named().version, Child().name, Child().version) == ("mine", 3, "Child", 3)
    assert (Named("other").name, Named(version=4).version) == ("other", 4)


@dataclasses.dataclass(frozen=True)
class Frozen(Kernel[Config, Any]):
    by: float = 3.0

    def run(self, x: Any, *, cfg: Config) -> Any:
        return x * self.by


def test_a_kernel_may_be_a_frozen_dataclass() -> None:
    close(Frozen()(X), X * 3)
    close(dataclasses.replace(Frozen(), by=4.0)(X), X * 4)
    assert Frozen() == Frozen(3.0)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda kernel: pickle.loads(pickle.dumps(kernel))])
def test_a_copy_computes_with_what_it_holds_itself(duplicate: Callable[[Any], Any]) -> None:
    kernel = Frozen()
    close(kernel(X), X * 3)
    assert kernel.plugin.operation.name == "Frozen"
    other = duplicate(kernel)
    object.__setattr__(other, "by", 5.0)
    close((other(X), kernel(X)), (X * 5, X * 3))


def test_two_objects_of_one_class_do_not_share_what_is_compiled() -> None:
    one, other = Frozen(3.0), Frozen(4.0)
    close((one(X), other(X), one(X)), (X * 3, X * 4, X * 3))


def test_nothing_is_traced_twice_eagerly() -> None:
    kernel = Scale()
    kernel(X)
    kernel.traced.clear()
    for _ in range(5):
        kernel(X)
        kernel(X + 1)
    assert kernel.traced == []
    kernel(jnp.ones(5))
    count = len(kernel.traced)
    assert count > 0
    for _ in range(3):
        kernel(jnp.ones(5))
        kernel(X)
    assert len(kernel.traced) == count


def test_the_ways_of_calling_are_kept_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ejkernel_classes._kernel.MAX_FORMS", 4)
    kernel = Scale()
    for shift in range(9):
        close(kernel(X, shift=shift), X * 2 + shift)
    assert len(kernel._registries._registry_by_form) == 4
    close(kernel(X, shift=0), X * 2)


def test_threads_may_share_a_kernel() -> None:
    kernel, wrong, start = Scale(), [], threading.Barrier(4)

    def work(number: int) -> None:
        start.wait()
        for i in range(30):
            shift = float((number + i) % 7)
            if not np.allclose(kernel(X, shift=shift), X * 2 + shift):
                wrong.append((number, i))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# -- arguments -------------------------------------------------------------------------------------------------------


class Echo(Kernel[Config, Any]):
    """Returns its first argument, and shows everything else that it was given."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def run(self, x: Any, *rest: Any, cfg: Any, **kwargs: Any) -> Any:
        self.seen.append((rest, kwargs))
        return x


STATICS = [
    None,
    True,
    1,
    1.0,
    "1",
    0,
    0.0,
    -0.0,
    False,
    "",
    1j,
    b"1",
    ...,
    jnp.float32,
    np.float32,
    np.dtype("float32"),
    jnp.bfloat16,
    "float32",
    len,
    Config(1),
    Config(2),
    frozenset({1}),
]


def test_what_is_no_array_arrives_as_it_was_given() -> None:
    kernel = Echo()
    for again in (False, True):
        for value in STATICS:
            kernel.seen.clear()
            close(kernel(X, value, word=value, inside={"a": (value, [value])}), X)
            if again:
                assert kernel.seen == []
                continue
            (rest,), kwargs = kernel.seen[-1]
            for got in (rest, kwargs["word"], kwargs["inside"]["a"][0], kwargs["inside"]["a"][1][0]):
                assert (type(got), repr(got)) == (type(value), repr(value))


def test_every_static_has_a_key_of_its_own() -> None:
    kernel = Echo()
    keys = [kernel.invocation(X, 0.5 if value is None else value).key for value in STATICS]
    # Three ways to write float32 are one content.
    assert len(set(keys)) == len(STATICS) - 2


def test_equal_statics_of_other_types_are_told_apart_within_one_program() -> None:
    class Kinds(Kernel[Config, Any]):
        def run(self, x: Any, value: Any, *, cfg: Any) -> Any:
            return x + {int: 10, float: 20, bool: 30}[type(value)] + np.copysign(1.0, value)

    def both(x: Any) -> Any:
        return [Kinds()(x, value) for value in (1, True, 1.0)], [kernel(x, value) for value in (0.0, -0.0, 0)]

    kernel = Kinds()
    wanted = [X + 11, X + 31, X + 21], [X + 21, X + 19, X + 11]
    close(both(X), wanted)
    close(jax.jit(both)(X), wanted)


def test_trees_go_in_and_come_out() -> None:
    class Tree(Kernel[Config, Any]):
        def run(self, tree: Any, *, cfg: Any, by: Any = None) -> Any:
            return {"sum": tree["a"] + tree["b"][0], "rest": (tree["b"][1], None, [tree["c"] * by["k"]])}

    given = {"a": X, "b": [Y, None], "c": jnp.ones((2, 2))}
    wanted = {"sum": X + Y, "rest": (None, None, [jnp.full((2, 2), 3.0)])}
    for by in ({"k": 3.0}, {"k": jnp.float32(3)}):
        close(Tree()(given, by=by), wanted)
        close(jax.jit(Tree())(given, by={"k": jnp.float32(3)}), wanted)
    del given["b"][1]
    with pytest.raises(IndexError, match="list index out of range"):
        Tree()(given, by={"k": 3.0})


@pytest.mark.parametrize(
    "value", [np.ones((2, 3), np.float32), np.ones(3), np.float32(3), np.int8(3), np.ones(2, bool)]
)
def test_numpys_arrays_and_scalars_are_arrays(value: Any) -> None:
    kernel = Echo()
    out = kernel(X, value)
    close(out, X)
    (seen,), _ = kernel.seen[-1]
    assert isinstance(seen, jax.core.Tracer)
    assert (seen.shape, seen.dtype) == (np.shape(value), jnp.asarray(value).dtype)
    close(kernel(value), jnp.asarray(value))


def test_random_keys_and_integers_are_arrays_too() -> None:
    class Dropout(Kernel[Config, Any]):
        def run(self, x: Any, key: Any, *, cfg: Any) -> Any:
            return x * jax.random.bernoulli(key, 0.5, x.shape)

    key, x = jax.random.key(3), jnp.ones(64)
    wanted = x * jax.random.bernoulli(key, 0.5, x.shape)
    close(Dropout()(x, key), wanted)
    close(jax.grad(lambda x: Dropout()(x, key).sum())(x), wanted)
    keys = jax.random.split(key, 3)
    close(jax.vmap(Dropout(), (None, 0))(x, keys), jnp.stack([x * jax.random.bernoulli(k, 0.5, x.shape) for k in keys]))


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "Unhashable()"


@pytest.mark.parametrize(
    ("args", "kwargs", "where"),
    [
        ((X, {1, 2}), {}, r"args\[1\] is no array.*got \{1, 2\}"),
        ((X,), {"set": {1}}, r"kwargs\['set'\] is no array"),
        ((X, [3, {"a": Unhashable()}]), {}, r"args\[1\]\[1\]\['a'\] is no array.*got Unhashable\(\)"),
        ((X, (bytearray(b"1"),)), {}, r"args\[1\]\[0\] is no array"),
    ],
)
def test_what_is_neither_array_nor_hashable_is_named(args: Any, kwargs: Any, where: str) -> None:
    kernel = Echo()
    for ask in (kernel, kernel.plan, kernel.explain, kernel.invocation):
        with pytest.raises(TypeError, match=f"Echo: {where}"):
            ask(*args, **kwargs)


def test_a_call_needs_an_array() -> None:
    with pytest.raises(TypeError, match="Echo: takes at least one array; numbers are static"):
        Echo()(3.0)


def test_what_it_returns_may_not_depend_on_shapes() -> None:
    class Unstack(Kernel[Config, Any]):
        def run(self, x: Any, *, cfg: Any) -> Any:
            return tuple(x)

    kernel = Unstack()
    close(kernel(X), tuple(X))
    with pytest.raises(TypeError, match="What it returns may depend on static arguments, not on shapes"):
        kernel(jnp.ones(2))
    close(kernel(X), tuple(X))


def test_numbers_that_a_run_returns_are_arrays() -> None:
    class Count(Kernel[Config, Any]):
        def run(self, x: Any, *, cfg: Any) -> Any:
            return x, x.shape[0], 0.5

    close(Count()(X), (X, jnp.asarray(3), jnp.asarray(0.5)))


# -- where it runs ---------------------------------------------------------------------------------------------------


def test_jit_of_a_kernel_object_itself() -> None:
    kernel = Scale()
    close(jax.jit(kernel)(X), X * 2)
    close(jax.jit(kernel, static_argnames="shift")(X, shift=3), X * 2 + 3)
    close(jax.jit(kernel)(X, shift=3.0), X * 2 + 3)
    with jax.disable_jit():
        close(kernel(X, shift=1.0), X * 2 + 1)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_arrays_that_are_cut(kind: Any) -> None:
    mesh = jax.make_mesh((4,), ("a",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("a")))
        for kernel in (Scale(), Twice()):
            wanted = kernel.run(jnp.arange(8.0), cfg=Config())
            close(kernel(x), wanted)
            close(jax.jit(kernel)(x), wanted)
            gradient = jax.grad(lambda x, kernel=kernel: kernel(x).sum())(x)
            close(gradient, jax.grad(lambda x, kernel=kernel: kernel.run(x, cfg=Config()).sum())(jnp.arange(8.0)))


def test_inside_shard_map() -> None:
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,))

    def loss(x: Any, by: Any) -> Any:
        return jax.shard_map(lambda x, by: Affine()(x, by), mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a"))(x, by)

    x, by = jnp.arange(8.0), jnp.asarray([2.0, 3.0])
    close(loss(x, by), x * 2 + 3)
    close(
        jax.grad(lambda *a: (loss(*a) ** 2).sum(), (0, 1))(x, by),
        jax.grad(lambda x, by: ((x * by[0] + by[1]) ** 2).sum(), (0, 1))(x, by),
    )


# -- gradients -------------------------------------------------------------------------------------------------------


class Square(Kernel[Config, jax.Array]):
    """Its gradient is three times what it should be, to see that it is the one that is used."""

    def __init__(self) -> None:
        self.forward: list[Any] = []
        self.backward: list[Any] = []

    def run(self, x: Any, *, cfg: Any) -> Any:
        self.forward.append(cfg)
        return x * x

    def custom_vjp(self, primals: Any, cfg: Any, kwargs: Any, cotangents: Any) -> Any:
        self.backward.append((primals, cfg, kwargs, cotangents))
        (x,), (ct,) = primals, cotangents
        return (6 * x * ct,)


class Affine(Kernel[Config, jax.Array]):
    """Primals of which one is small and shared."""

    def run(self, x: Any, by: Any, *, cfg: Any) -> Any:
        return x * by[0] + by[1]

    def custom_vjp(self, primals: Any, cfg: Any, kwargs: Any, cotangents: Any) -> Any:
        (x, by), (ct,) = primals, cotangents
        return ct * by[0], jnp.stack([(ct * x).sum(), ct.sum()])


class Twice(Scale):
    """With a gradient of its own, which is right."""

    def custom_vjp(self, primals: Any, cfg: Config, kwargs: Any, cotangents: Any) -> Any:
        return (cotangents[0] * cfg.factor,)


class Full(Kernel[Config, Any]):
    """Primals and results of every kind; the gradients are right."""

    def run(self, x: Any, tree: Any, count: Any, *, cfg: Any, w: Any = 1.0, mode: str = "plain") -> Any:
        y = x * tree["u"] * count * w
        return {"y": jnp.sin(y) if mode == "sin" else y, "z": ((x * x).sum(), x[0] + tree["v"][0])}

    def custom_vjp(self, primals: Any, cfg: Any, kwargs: Any, cotangents: Any) -> Any:
        (x, tree, count), (ct,) = primals, cotangents
        w, u = kwargs.get("w", 1.0), tree["u"]
        dy = ct["y"] * (jnp.cos(x * u * count * w) if kwargs.get("mode") == "sin" else 1.0) * count
        dx = dy * u * w + 2 * x * ct["z"][0]
        gradients = (dx.at[0].add(ct["z"][1]), {"u": dy * x * w, "v": [ct["z"][1], None]}, None)
        return (*gradients, {"w": (dy * x * u).sum()}) if isinstance(w, jax.Array) else gradients


TREE = {"u": Y, "v": [jnp.asarray(3.0), "a word"]}


def plainly(kernel: Kernel[Any, Any]) -> Callable[..., Any]:
    """What JAX makes of the method itself."""
    return partial(kernel.run, cfg=Config())


def losses(call: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Functions that use all of the results, or some."""
    yield lambda *a, **k: (call(*a, **k)["y"] ** 2).sum()
    yield lambda *a, **k: call(*a, **k)["z"][0]
    yield lambda *a, **k: call(*a, **k)["z"][1] * 3
    yield lambda *a, **k: sum(leaf.sum() * (i + 2) for i, leaf in enumerate(jax.tree.leaves(call(*a, **k))))


@pytest.mark.parametrize("count", [2, 2.0, jnp.asarray(2), jnp.asarray(2.0)])
@pytest.mark.parametrize("kwargs", [{}, {"mode": "sin"}, {"w": 2.0}, {"w": jnp.asarray(2.0), "mode": "sin"}], ids=str)
def test_gradients_are_those_of_the_plain_code(count: Any, kwargs: Any) -> None:
    kernel = Full()

    def gradient(loss: Callable[..., Any]) -> Any:
        return jax.grad(lambda x, u, v: loss(x, {"u": u, "v": [v, "a word"]}, count, **kwargs), (0, 1, 2))

    for ours, plain in zip(losses(kernel), losses(plainly(kernel)), strict=True):
        arrays = X, Y, jnp.asarray(3.0)
        close(gradient(ours)(*arrays), gradient(plain)(*arrays))
        close(jax.jit(gradient(ours))(*arrays), gradient(plain)(*arrays))


def test_the_gradient_is_the_class_own_with_any_backend() -> None:
    kernel = Square()
    for call in (kernel, partial(kernel, backend="run"), jax.jit(kernel), partial(kernel, cfg=Config(7))):
        close(jax.grad(lambda x, call=call: call(x).sum())(X), 6 * X)
    with pytest.raises(NotDifferentiable):
        jax.jvp(partial(kernel, backend="run"), (X,), (X,))


def test_the_gradient_of_run_has_the_configuration_that_was_given() -> None:
    """Where JAX differentiates the method: a configuration that changes results shows it."""
    kernel = Scale()
    for derivative in (
        lambda call: jax.grad(lambda x: call(x).sum())(X),
        lambda call: jax.jvp(call, (X,), (X,))[1],
        lambda call: jax.jit(jax.grad(lambda x: (call(x) ** 2).sum()))(X),
    ):
        close(derivative(partial(kernel, cfg=Config(7))), derivative(partial(kernel.run, cfg=Config(7))))


def test_the_gradient_is_told_the_configuration_that_was_given() -> None:
    kernel = Square()
    jax.grad(lambda x: kernel(x, cfg=Config(7)).sum())(X)
    assert {call[1] for call in kernel.backward} == {Config(7)}
    kernel.backward.clear()
    jax.grad(lambda x: kernel(x).sum())(X)
    assert {call[1] for call in kernel.backward} == {Config(2)}

    class Loosely(Untyped):
        custom_vjp = Square.custom_vjp
        backward: list[Any] = []

    loose = Loosely()
    jax.grad(lambda x: loose(x, cfg=Other(7)).sum())(X)
    assert {call[1] for call in loose.backward} == {Other(7)}


def test_the_gradient_of_one_key_has_its_own_configuration() -> None:
    kernel, executor = Square(), Executor()
    key = kernel.explain(X).backward.plan.invocation.key
    executor.selector.cache.put(key, Config(9))
    jax.grad(lambda x: executor(kernel, x).sum())(X)
    assert {call[1] for call in kernel.backward} == {Config(9)}
    assert {*kernel.forward} == {Config(2)}


def test_nothing_is_traced_again_for_another_gradient() -> None:
    kernel = Square()
    gradient = jax.grad(lambda x: kernel(x).sum())
    close(gradient(X), 6 * X)
    count = len(kernel.forward), len(kernel.backward)
    assert count[1] == 1
    for x in (X, X + 1, X):
        close(gradient(x), 6 * x)
        close(jax.grad(lambda x: kernel(x).sum())(x), 6 * x)
        close(jax.vjp(kernel, x)[1](Y)[0], 6 * x * Y)
    assert (len(kernel.forward), len(kernel.backward)) == count


def test_a_second_derivative_and_a_gradient_of_a_jitted_gradient() -> None:
    kernel = Square()  # the gradient is 6 x, so the second derivative is 6
    close(jax.grad(lambda x: jax.grad(lambda x: kernel(x).sum())(x)[0])(X), jnp.array([6.0, 0, 0]))
    close(jax.jacrev(jax.jit(jax.grad(lambda x: kernel(x).sum())))(X), 6 * jnp.eye(3))
    full = Full()
    for ours, plain in zip(losses(full), losses(plainly(full)), strict=True):
        second = [jax.jacrev(jax.grad(lambda x, f=f: f(x, TREE, 2, mode="sin")))(X) for f in (ours, plain)]
        close(*second, rtol=1e-5)


def test_the_same_array_twice() -> None:
    class Product(Kernel[Config, Any]):
        def run(self, a: Any, b: Any, *, cfg: Any) -> Any:
            return a * b

        def custom_vjp(self, primals: Any, cfg: Any, kwargs: Any, cotangents: Any) -> Any:
            (a, b), (ct,) = primals, cotangents
            return ct * b, ct * a

    close(jax.grad(lambda x: Product()(x, x).sum())(X), 2 * X)
    close(jax.grad(lambda x: Product()(x, jax.lax.stop_gradient(x)).sum())(X), X)


class Given(Kernel[Config, Any]):
    """``custom_vjp`` returns what the test says."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        self.answer = answer

    def run(self, x: Any, tree: Any = None, *, cfg: Any, w: Any = 1.0) -> Any:
        return x * w + (0 if tree is None else tree["u"] + tree["v"])

    def custom_vjp(self, primals: Any, cfg: Any, kwargs: Any, cotangents: Any) -> Any:
        return self.answer(cotangents[0])


@pytest.mark.parametrize("none", [None, {"u": None, "v": None}, {"u": None, "v": 0}], ids=str)
def test_none_is_no_gradient(none: Any) -> None:
    kernel = Given(lambda ct: (ct, none if none is None else {k: v if v is None else 5 * ct for k, v in none.items()}))
    found = jax.grad(lambda x, t: kernel(x, t).sum(), (0, 1))(X, {"u": Y, "v": Y})
    wanted = jnp.full(3, 5.0) if none and none["v"] == 0 else jnp.zeros(3)
    close(found, (jnp.ones(3), {"u": jnp.zeros(3), "v": wanted}))


def test_none_where_a_whole_part_has_no_gradient() -> None:
    class Deep(Kernel[Config, Any]):
        def run(self, tree: Any, *, cfg: Any) -> Any:
            return tree["a"] + tree["rest"]["b"] + tree["rest"]["c"][0]

        def custom_vjp(self, primals: Any, cfg: Any, kwargs: Any, cotangents: Any) -> Any:
            return ({"a": cotangents[0], "rest": None},)

    tree = {"a": X, "rest": {"b": Y, "c": (X, "word")}}
    found = jax.grad(lambda a, b, c: Deep()({"a": a, "rest": {"b": b, "c": (c, "word")}}).sum(), (0, 1, 2))
    close(found(X, Y, X), (jnp.ones(3), jnp.zeros(3), jnp.zeros(3)))
    close(Deep()(tree), X + Y + X)


def test_integers_have_no_gradient_and_need_none() -> None:
    class Take(Kernel[Config, Any]):
        def run(self, x: Any, index: Any, *, cfg: Any) -> Any:
            return x[index], index + 1

        def custom_vjp(self, primals: Any, cfg: Any, kwargs: Any, cotangents: Any) -> Any:
            (x, index), (ct, other) = primals, cotangents
            assert (other.shape, other.dtype) == (index.shape, index.dtype)
            return jnp.zeros_like(x).at[index].add(ct), None

    index = jnp.array([2, 0])
    close(jax.grad(lambda x: (Take()(x, index)[0] * jnp.array([5.0, 7.0])).sum())(X), jnp.array([7.0, 0, 5.0]))


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (lambda ct: (ct, {}), r"no gradient of kwargs\['w'\]: return a dict of such after the others"),
        (lambda ct: (ct,), r"no gradient of kwargs\['w'\]"),
        (lambda ct: [ct], r"no gradient of kwargs\['w'\]"),
    ],
)
def test_the_gradient_of_a_keyword_is_given_or_refused_and_never_zero(answer: Any, told: str) -> None:
    kernel = Given(answer)
    with pytest.raises(NotDifferentiable, match=f"Given: custom_vjp returns {told}"):
        jax.grad(lambda w: kernel(X, w=w).sum())(2.0)
    close(jax.grad(lambda x: kernel(x, w=jnp.asarray(2.0)).sum())(X), jnp.ones(3))  # it is not asked for here


def test_the_gradient_of_a_keyword() -> None:
    kernel = Given(lambda ct: (2 * ct, {"w": (X * ct).sum()}))
    close(jax.grad(lambda x, w: kernel(x, w=w).sum(), (0, 1))(X, 2.0), (jnp.full(3, 2.0), jnp.asarray(6.0)))
    zero = Given(lambda ct: (2 * ct, {"w": None}))
    close(jax.grad(lambda x, w: zero(x, w=w).sum(), (0, 1))(X, 2.0), (jnp.full(3, 2.0), jnp.asarray(0.0)))


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (lambda ct: (), "a gradient for each of its 1 primals, and a dict for keywords; got 0 values"),
        (lambda ct: (ct, {}, {}), "got 3 values"),
        (lambda ct: ct, r"got a \w*Tracer"),
        (lambda ct: None, "got a NoneType"),
        (lambda ct: (ct, ct), r"after those of its primals a dict for the keywords \[\]"),
        (lambda ct: (ct, {"v": ct}), r"a dict for the keywords \[\]"),
        (lambda ct: (ct[:2],), r"float32\[2\] as the gradient of args\[0\], which is float32\[3\]"),
        (lambda ct: (ct.sum(),), r"float32\[\] as the gradient of args\[0\], which is float32\[3\]"),
        (lambda ct: (ct.astype(jnp.bfloat16),), r"bfloat16\[3\] as the gradient of args\[0\], which is float32\[3\]"),
        (lambda ct: (ct.astype(int),), r"int32\[3\] as the gradient of args\[0\]"),
        (lambda ct: ({"u": ct},), "gradients of another structure than its arguments"),
        (lambda ct: ((ct,),), "gradients of another structure than its arguments"),
    ],
)
def test_a_wrong_gradient_names_the_kernel(answer: Any, told: str) -> None:
    kernel = Given(answer)
    for gradient in (jax.grad(lambda x: kernel(x).sum()), jax.jacrev(jax.grad(lambda x: kernel(x).sum()))):
        with pytest.raises(TypeError, match=f"Given: custom_vjp returns .*{told}"):
            gradient(X)


@pytest.mark.parametrize(
    ("gradient", "told"),
    [
        (lambda ct: ct, "another structure than its arguments: one value for {'u': x1, 'v': x2}"),
        (lambda ct: {"u": ct}, "another structure than its arguments"),
        (lambda ct: {"u": ct, "v": ct, "w": ct}, "another structure than its arguments"),
        (lambda ct: {"u": ct, "v": (ct,)}, "another structure than its arguments"),
        (lambda ct: {"u": ct, "v": ct[0]}, r"float32\[\] as the gradient of args\[1\]\['v'\], which is float32\[3\]"),
    ],
)
def test_a_wrong_gradient_of_a_tree_names_the_place(gradient: Any, told: str) -> None:
    kernel = Given(lambda ct: (ct, gradient(ct)))
    with pytest.raises(TypeError, match=f"Given: custom_vjp returns .*{told}"):
        jax.grad(lambda t: kernel(X, t).sum())({"u": Y, "v": Y})


def test_a_kernel_without_a_gradient_of_its_own_has_that_of_its_plainest_method() -> None:
    class Cubes(Kernel[Config, Any]):
        run_triton = run_pallas = cannot

        def run(self, x: Any, *, cfg: Any, w: Any = 1.0) -> Any:
            return {"cube": x**3 * w}

        def run_xla(self, x: Any, *, cfg: Any, w: Any = 1.0) -> Any:
            return {"cube": jax.lax.stop_gradient(x**3 * w)}

    kernel = Cubes()
    close(kernel(X), {"cube": X**3})
    close(jax.grad(lambda x: kernel(x)["cube"].sum())(X), 3 * X**2)
    close(jax.grad(lambda w: kernel(X, w=w)["cube"].sum())(2.0), (X**3).sum())
    close(jax.hessian(lambda x: kernel(x, backend="run")["cube"].sum())(X), jnp.diag(6 * X))


# -- vmap ------------------------------------------------------------------------------------------------------------

ROWS, MORE = jnp.arange(12.0).reshape(4, 3) / 7 + 0.1, jnp.cos(jnp.arange(12.0)).reshape(4, 3)


@pytest.mark.parametrize(
    ("axes", "args"),
    [
        ((0, 0), (ROWS, MORE)),
        ((0, None), (ROWS, Y)),
        ((None, 0), (X, MORE)),
        ((1, 0), (ROWS.T, MORE)),
        ((-1, None), (ROWS.T, Y)),
        ((1, 1), (ROWS.T, MORE.T)),
    ],
)
def test_vmap_and_vmap_of_grad(axes: Any, args: Any) -> None:
    kernel = Full()

    def run(call: Callable[..., Any], x: Any, u: Any) -> Any:
        return call(x, {"u": u, "v": [jnp.asarray(3.0), "word"]}, 2, mode="sin", w=jnp.asarray(2.0))

    def mapped(call: Callable[..., Any], out_axes: int = 0) -> Any:
        return jax.vmap(partial(run, call), axes, out_axes)(*args)

    close(mapped(kernel), mapped(plainly(kernel)))
    close(jax.jit(mapped, static_argnums=0)(kernel), mapped(plainly(kernel)))
    for ours, plain in zip(losses(kernel), losses(plainly(kernel)), strict=True):
        gradients = [jax.vmap(jax.grad(partial(run, loss), (0, 1)), axes)(*args) for loss in (ours, plain)]
        close(*gradients)
        # Here a primal that is not mapped has one gradient for all.
        summed = [
            jax.grad(lambda *a, f=f: jax.vmap(partial(run, f), axes)(*a).sum(), (0, 1))(*args) for f in (ours, plain)
        ]
        close(*summed)


def test_vmap_within_vmap() -> None:
    kernel, left = Full(), jnp.stack([ROWS, ROWS + 1])

    def nested(call: Callable[..., Any]) -> Any:
        def one(x: Any, u: Any) -> Any:
            return call(x, {"u": u, "v": [x[0], "word"]}, 2, mode="sin")

        inner = jax.vmap(one, (0, None))
        return jax.vmap(jax.vmap(inner, (0, None)), (None, 1))(left, MORE.T)

    close(nested(kernel), nested(plainly(kernel)))
    for ours, plain in zip(losses(kernel), losses(plainly(kernel)), strict=True):
        close(nested(jax.grad(ours)), nested(jax.grad(plain)))
    close(jax.vmap(jax.vmap(jax.vmap(Square())))(left), left**2)
    close(jax.vmap(jax.jacrev(jax.grad(lambda x: Square()(x).sum())))(ROWS), jnp.stack([6 * jnp.eye(3)] * 4))


def test_gradients_within_and_around_vmap() -> None:
    """What is mapped around a gradient has one gradient an element; what is mapped inside of it alone, a sum."""
    kernel, left = Full(), jnp.stack([ROWS, ROWS + 1])

    def summed(call: Callable[..., Any], x: Any, u: Any) -> Any:
        """Over the rows of x; u is shared by all of them."""
        return jax.vmap(lambda x: call(x, {"u": u, "v": [u[0], "word"]}, 2, mode="sin"))(x).sum()

    for ours, plain in zip(losses(kernel), losses(plainly(kernel)), strict=True):
        for derivative in (
            lambda call: jax.grad(partial(summed, call), (0, 1))(ROWS, Y),
            lambda call: jax.vmap(jax.grad(partial(summed, call), (0, 1)), (0, None))(left, Y),
            lambda call: jax.vmap(jax.grad(partial(summed, call), (0, 1)), (None, 0))(ROWS, MORE),
            lambda call: jax.vmap(jax.grad(partial(summed, call), 1), (0, 0))(left, MORE[:2]),
            lambda call: jax.grad(lambda x, u: jax.vmap(partial(summed, call), (0, None))(x, u).sum(), (0, 1))(left, Y),
            lambda call: jax.grad(lambda x, u: jax.vmap(partial(summed, call), (None, 0))(x, u).sum(), (0, 1))(
                ROWS, MORE
            ),
            lambda call: jax.vmap(jax.vjp(partial(summed, call), ROWS, Y)[1])(jnp.arange(3.0)),
        ):
            close(derivative(ours), derivative(plain))


def test_scalars_strings_and_none_under_vmap() -> None:
    class Mixed(Kernel[Config, Any]):
        def run(self, x: Any, scale: Any, mode: Any, nothing: Any, *, cfg: Any, word: str = "", by: Any = 1) -> Any:
            assert (mode, nothing) == ("double", None)
            return x * scale * by * {"": 1, "twice": 2}[word]

    kernel = Mixed()
    mapped = jax.vmap(lambda x: kernel(x, 3.0, "double", None, word="twice", by=2))
    close(mapped(ROWS), ROWS * 12)
    close(jax.vmap(jax.grad(lambda x: kernel(x, 3.0, "double", None, word="twice").sum()))(ROWS), jnp.full((4, 3), 6.0))
    close(jax.vmap(lambda x, s: kernel(x, s, "double", None))(ROWS, jnp.arange(4.0)), ROWS * jnp.arange(4.0)[:, None])


def test_the_heuristic_sees_one_element_and_the_plan_all() -> None:
    shapes = []

    class Watching(Scale):
        def heuristic_cfg(self, inv: Invocation) -> Config:
            shapes.append(inv.args[0].shape)
            return Config()

    close(jax.vmap(jax.vmap(Watching()))(jnp.ones((4, 5, 3))), jnp.full((4, 5, 3), 2.0))
    assert set(shapes) == {(3,)}


# -- the chain and the executor --------------------------------------------------------------------------------------


def policy(origin: str, cfg: Any = None, measured: bool = False, **more: Any) -> SimpleNamespace:
    """A policy that answers with this configuration, or never."""
    asked: list[Any] = []
    when = "2026-11-20T12:00:00+00:00"

    @hookimpl(tryfirst=more.pop("tryfirst", False))
    def select_config(inv: Any, candidates: Any, scope: Any) -> Any:
        asked.append((inv.key, scope.policy.mode))
        backends = tuple(candidate.backend for candidate in candidates)
        found = Provenance(when=when, device="cpu", milliseconds=1.0, backends=backends)
        record = Record(cfg, backends[0], found) if measured else None
        return None if cfg is None else Choice(backends[0], cfg, origin, record=record, measured=measured)

    return SimpleNamespace(select_config=select_config, asked=asked, **more)


def used(executor: Executor, kernel: Any, **options: Any) -> int:
    result = executor(kernel, X, **options)
    factor = round(float(result[0]))
    close(result, X * factor)
    return factor


def origin(executor: Executor, kernel: Kernel[Any, Any], **options: Any) -> str:
    with executor.selector.entered():
        return kernel.plan(X, **options).origin


def test_the_chain_answers_in_its_order(core: Registry) -> None:
    kernel, cache, persistent = Scale(), ConfigCache(), ConfigCache()
    key = default_key_builder_with_sharding(kernel, (X,), {})
    core.remember(key, Config(99))  # of the registry, which the chain does not ask
    core.register(policy("the registry's", Config(98)), "somebody")
    policies = {"first": policy("mine", Config(4), RANK=99, tryfirst=True), "second": policy("too late", Config(3))}
    silent = Executor(ConfigSelectorChain(policies={"silent": policy("silent")}))
    assert (used(silent, kernel), origin(silent, kernel)) == (2, "heuristic")
    executor = Executor(ConfigSelectorChain(cache=cache, persistent=persistent, policies=policies))
    assert (used(executor, kernel), origin(executor, kernel)) == (4, "mine")
    persistent.put(key, Config(5))
    assert (used(executor, kernel), origin(executor, kernel)) == (5, "persistent")
    cache.put(key, Config(6))
    assert (used(executor, kernel), origin(executor, kernel)) == (6, "cache")
    with overlay_cache({key: Config(7)}):
        assert (used(executor, kernel), origin(executor, kernel)) == (7, "overlay")
        assert used(executor, kernel, cfg=Config(8)) == 8
        assert origin(executor, kernel, cfg=Config(8)) == "explicit cfg"
    assert used(executor, kernel) == 6
    cache.clear()
    assert used(executor, kernel) == 5
    assert kernel(X)[0] == 99  # and without the chain, the registry's own


def test_nothing_but_what_was_measured_is_stored() -> None:
    kernel, cache, persistent = Scale(), ConfigCache(), ConfigCache()
    quiet = Executor(
        ConfigSelectorChain(cache=cache, persistent=persistent, policies={"model": policy("m", Config(3))})
    )
    assert [used(quiet, kernel), used(quiet, kernel, cfg=Config(9)), used(quiet, kernel)] == [3, 9, 3]
    assert (len(cache), len(persistent)) == (0, 0)
    tuner = policy("the tuner", Config(4), measured=True)
    executor = Executor(ConfigSelectorChain(cache=cache, persistent=persistent, policies={"tuner": tuner}))
    assert [used(executor, kernel, cfg=Config(9)), used(executor, kernel)] == [9, 4]
    key = kernel.invocation(X).key
    for store in (cache, persistent):
        ((stored, (record,)),) = store.items()
        assert (stored, record.cfg, record.backend, record.provenance.milliseconds) == (key, Config(4), "run", 1.0)
    assert (used(executor, kernel), origin(executor, kernel)) == (4, "cache")
    assert len(tuner.asked) == 1
    again = Executor(ConfigSelectorChain(persistent=persistent, policies={"tuner": tuner}))
    assert (used(again, kernel), origin(again, kernel)) == (4, "persistent")
    assert len(tuner.asked) == 1


def test_an_executor_does_not_trace_again() -> None:
    kernel, executor = Scale(), Executor()
    used(executor, kernel)
    kernel.traced.clear()
    for _ in range(5):
        assert used(executor, kernel) == 2
    assert kernel.traced == []
    executor.selector.cache.put(kernel.invocation(X).key, Config(3))
    assert [used(executor, kernel) for _ in range(3)] == [3, 3, 3]
    assert kernel.traced.count(3) == 1


def test_two_executors_do_not_share_their_caches() -> None:
    kernel, one, other = Scale(), Executor(), Executor()
    one.selector.cache.put(kernel.invocation(X).key, Config(5))
    assert [used(one, kernel), used(other, kernel), used(one, kernel)] == [5, 2, 5]
    close(kernel(X), X * 2)


def test_an_executor_under_jit_grad_and_vmap() -> None:
    kernel, executor = Scale(), Executor()
    executor.selector.cache.put(kernel.invocation(X).key, Config(5))
    close(jax.jit(partial(executor, kernel))(X), X * 5)
    close(jax.grad(lambda x: executor(kernel, x).sum())(X), jnp.full(3, 5.0))
    rows = jnp.stack([X, Y])
    close(jax.vmap(partial(executor, kernel))(rows), rows * 2)


def test_an_executor_takes_the_name_of_an_operation(core: Registry) -> None:
    @hookimpl
    def heuristic_cfg(inv: Any) -> Any:
        return Config()

    @hookimpl
    def run_backend(inv: Any, cfg: Any) -> Any:
        return inv["x"] * cfg.factor

    core.register(Operation(name="times", signature=lambda x: None, outputs=lambda a: (a["x"],)))
    core.register(SimpleNamespace(Config=Config, heuristic_cfg=heuristic_cfg, run_backend=run_backend), "times.two")
    executor = Executor()
    assert used(executor, "times") == 2
    key = default_key_builder_with_sharding("times", (X,))
    assert key == core.invocation("times", X).key == Invocation("times", (X,)).key
    executor.selector.cache.put(key, Config(6))
    assert [used(executor, "times"), used(executor, "times", cfg=Config(7)), used(executor, "times")] == [6, 7, 6]
    assert used(executor, "times", backend="two") == 6
    close(core.call("times", X), X * 2)


def test_what_the_chain_says_and_what_policy_override_says() -> None:
    def mode(chain: ConfigSelectorChain, **override: Any) -> str:
        with policy_override(**override) if override else contextlib.nullcontext(), chain.entered():
            return _scopes.current().policy.mode

    kernel, tuning = Scale(), ConfigSelectorChain(autotune=True)
    assert (mode(tuning), mode(tuning, autotune=False), mode(tuning, autotune=True)) == ("on_miss", "off", "on_miss")
    assert (mode(ConfigSelectorChain()), mode(ConfigSelectorChain(), autotune=True)) == ("off", "on_miss")
    strict = Executor(ConfigSelectorChain(policy=AutotunePolicy("error_on_miss")))
    with pytest.raises(NoConfig, match="no configuration is remembered for scale"):
        strict(kernel, X)
    with policy_override(autotune=False):
        assert used(strict, kernel) == 2
    strict.selector.cache.put(kernel.invocation(X).key, Config(4))
    assert used(strict, kernel) == 4


def test_threads_with_executors_of_their_own() -> None:
    kernel, wrong, start = Scale(), [], threading.Barrier(4)
    key = kernel.invocation(X).key

    def work(number: int) -> None:
        executor = Executor()
        executor.selector.cache.put(key, Config(3 + number))
        start.wait()
        for _ in range(30):
            wrong.extend([number] if float(executor(kernel, X)[0]) != 3 + number else [])
            wrong.extend(["none"] if float(kernel(X)[0]) != 2 else [])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("part", ["cache", "persistent"])
def test_a_chain_takes_what_is_a_store(part: str) -> None:
    with pytest.raises(TypeError, match=f"{part}: takes a ConfigCache, or what has find and put too; got dict"):
        ConfigSelectorChain(**{part: {}})  # type: ignore[arg-type]
    empty = ConfigCache()
    assert ConfigSelectorChain(cache=empty).cache is empty


def test_a_chain_takes_policies_that_keep_the_contract() -> None:
    with pytest.raises(PluginError, match="'bad', registered at run time.*select_config is not marked @hookimpl"):
        ConfigSelectorChain(policies={"bad": SimpleNamespace(select_config=lambda inv: None)})
    named = {name: policy(name, Config(3)) for name in ("cache", "persistent", "heuristic", "overlay")}
    assert used(Executor(ConfigSelectorChain(policies=named)), Scale()) == 3


# -- without an executor ---------------------------------------------------------------------------------------------


def test_the_cores_registry_chooses_for_a_kernel_object(core: Registry) -> None:
    kernel = Scale()
    close(kernel(X), X * 2)
    core.register(policy("a model", Config(3)), "model")
    close(kernel(X), X * 3)
    core.remember(kernel.invocation(X).key, Config(4))
    close(kernel(X), X * 4)
    with overlay_cache({kernel.invocation(X).key: Config(5)}):
        close(kernel(X), X * 5)
    close(kernel(X), X * 4)
    assert kernel.plan(X).origin == "memory"
    core.memory.put(kernel.invocation(X).key, Config(7))
    close(kernel(X), X * 7)
    core.memory.clear()
    close(kernel(X), X * 3)
    tuner = policy("the tuner", Config(6), measured=True, RANK=90)
    core.register(tuner, "tuner")
    close([kernel(X), kernel(X)], [X * 6, X * 6])
    assert len(tuner.asked) == 1
    assert list(core.memory) == [kernel.invocation(X).key]


def test_explain_tells_the_plan_and_that_of_the_gradient() -> None:
    explanation = Square().explain(X)
    assert explanation.plan.kernel.name == "Square.run"
    assert explanation.backward.plan.kernel.name == "Square_bwd.backward"
    assert "Square.run with Config(factor=2), by heuristic" in str(explanation)
    assert Scale().explain(jax.ShapeDtypeStruct((4,), jnp.float32)).backward is None


# -- keys and invocations --------------------------------------------------------------------------------------------


def test_an_invocation_is_a_call_frozen() -> None:
    kernel = Scale()
    inv = Invocation(kernel=kernel, args=(X,), kwargs={"shift": 1.0}, metadata={...})
    assert inv.abstract_args == (jax.ShapeDtypeStruct((3,), jnp.float32),)
    assert (inv.kernel, inv.args[0] is X, inv.kwargs, inv.metadata) == (kernel, True, {"shift": 1.0}, {...})
    assert inv.device_fingerprint == ejkernel_classes.device_fingerprint()
    assert inv.key == kernel.invocation(X, shift=1.0).key == kernel.plan(X, shift=1.0).invocation.key
    assert inv.key == default_key_builder_with_sharding(kernel, [X], {"shift": 1.0})
    assert inv.key.op == "scale"
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        inv.args = ()  # type: ignore[misc]
    assert attrs.evolve(inv, metadata=3).key == inv.key
    assert list(kernel.config_space(inv)) == [Config()]


def test_the_key_is_that_of_the_call_wherever_it_is_made() -> None:
    kernel, listener = Scale(), policy("listener")
    executor = Executor(ConfigSelectorChain(policies={"listener": listener}))
    key = kernel.invocation(X, shift=1.0).key
    executor(kernel, X, shift=1.0)
    jax.jit(lambda x: executor(kernel, x, shift=1.0))(X + 1)
    executor(Scale(), np.asarray(X), shift=1.0)
    assert {asked for asked, _ in listener.asked} == {key}
    assert len(listener.asked) == 3
    keys: list[Any] = []
    jax.jit(lambda x: keys.append(kernel.invocation(x, shift=1.0).key))(X)
    assert keys == [key]


def test_other_calls_have_other_keys() -> None:
    def key(*args: Any, name: str = "echo", version: int = 1, **kwargs: Any) -> Any:
        kernel = Echo()
        kernel.name, kernel.version = name, version
        return kernel.invocation(*args, **kwargs).key

    mesh = jax.make_mesh((3,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:3])
    cut = jax.device_put(X, NamedSharding(mesh, P("a")))
    keys = [
        key(X),
        key(X, X),
        key(X, shift=X),
        key(X, other=X),
        key({"x": X}),
        key(X, {"y": X}),
        key(X, [X]),
        key(jnp.ones(4)),
        key(X[None]),
        key(X.astype(jnp.bfloat16)),
        key(cut),
        key(X, name="renamed"),
        key(X, version=2),
    ]
    assert len(set(keys)) == len(keys)
    assert keys[0] == key(jax.ShapeDtypeStruct((3,), jnp.float32))
    assert key(X, a=X, b=Y) == key(Y, b=X, a=Y)


def test_the_key_of_a_cut_array_is_the_one_that_the_chain_uses() -> None:
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,))
    whole, kernel, executor = jnp.arange(8.0), Scale(), Executor()
    cut = jax.device_put(whole, NamedSharding(mesh, P("a")))
    executor.selector.cache.put(default_key_builder_with_sharding(kernel, (cut,), {}), Config(5))
    close((executor(kernel, cut), executor(kernel, whole)), (whole * 5, whole * 2))


def test_a_static_without_content_has_no_key_and_the_call_goes_on() -> None:
    kernel, executor = Echo(), Executor()
    close(executor(kernel, X, thing=object()), X)
    with pytest.raises(TypeError, match="has no content"):
        _ = kernel.invocation(X, thing=object()).key


# -- as a plugin -----------------------------------------------------------------------------------------------------


class Published(Kernel[Config, Any]):
    """``x * y * factor`` and its sum, with options of every kind."""

    results = ("product", "total")

    def __init__(self) -> None:
        super().__init__("published")

    def run(self, x: Any, y: Any = None, axis: int = 0, *, cfg: Config, loud: bool = False, **kwargs: Any) -> Any:
        product = x * (1.0 if y is None else y) * cfg.factor * (10 if loud else 1)
        return {"a": product, "b": product.sum(axis)}

    def custom_vjp(self, primals: Any, cfg: Any, kwargs: Any, cotangents: Any) -> Any:
        (x, y, axis), (ct,) = primals, cotangents
        by = (ct["a"] + jnp.expand_dims(ct["b"], axis)) * cfg.factor * (10 if kwargs["loud"] else 1)
        return by * (1.0 if y is None else y), None if y is None else by * x, None


def test_a_kernel_object_is_registered_as_an_operation() -> None:
    registry, kernel = Registry(plugins=""), Published()
    assert registry.register(kernel) is kernel
    rows = jnp.stack([X, Y])
    close(registry.call("published", rows, rows), (2 * rows**2, (2 * rows**2).sum(0)))
    close(registry.call("published", rows, axis=1, loud=True), (20 * rows, (20 * rows).sum(1)))
    close(registry.call("published", rows, None, 1, cfg=Config(3)), (3 * rows, (3 * rows).sum(1)))
    with pytest.raises(TypeError, match="published: got an unexpected keyword argument 'lout'; did you mean 'loud'"):
        registry.call("published", rows, lout=True)
    with pytest.raises(TypeError, match="published: x takes an array; got dict"):
        registry.call("published", {"x": rows})


def test_what_is_registered_is_differentiated_and_mapped() -> None:
    registry, kernel = Registry(plugins=""), Published()
    registry.register(kernel)
    rows = jnp.stack([X, Y])

    def loss(call: Callable[..., Any], x: Any, y: Any) -> Any:
        product, total = call(x, y, axis=1, loud=True)
        return (product**2).sum() + (total * jnp.arange(total.size)).sum()

    def ours(*args: Any, **kwargs: Any) -> Any:
        return registry.call("published", *args, **kwargs)

    def plain(*args: Any, **kwargs: Any) -> Any:
        return tuple(kernel.run(*args, cfg=Config(), **kwargs).values())

    found, wanted = (jax.grad(partial(loss, call), (0, 1))(rows, rows + 1) for call in (ours, plain))
    close(found, wanted)
    many = jnp.stack([rows, rows + 1, rows - 2])
    found, wanted = (jax.vmap(jax.grad(partial(loss, call)), (0, None))(many, rows) for call in (ours, plain))
    close(found, wanted)
    close(jax.grad(lambda x: registry.call("published", x)[1].sum())(X), jnp.full(3, 2.0))


def test_a_registered_kernel_says_how_many_results_it_has() -> None:
    class Unnamed(Published):
        results = ("out",)

    registry = Registry(plugins="")
    registry.register(Unnamed(), "unnamed")
    with pytest.raises(TypeError, match=r"published: returns 2 arrays; results names \('out',\)"):
        registry.call("published", X)


def test_registered_again_it_replaces_what_was_there() -> None:
    registry = Registry(plugins="")
    for factor in (3, 4):

        class Again(Scale):
            def heuristic_cfg(self, inv: Any, factor: int = factor) -> Config:
                return Config(factor)

        registry.register(Again())
        close(registry.call("scale", X), X * factor)


MODULE = """
    import dataclasses
    import jax
    from ejkernel_classes import Kernel

    @dataclasses.dataclass(frozen=True)
    class Config:
        factor: int = 2

    class Tripled(Kernel[Config, jax.Array]):
        def run(self, x, *, cfg):
            return x * cfg.factor

        def run_xla(self, x, *, cfg):
            return x * cfg.factor * 10

        def custom_vjp(self, primals, cfg, kwargs, cotangents):
            return (cotangents[0] * 7,)

    kernel = Tripled(name="tripled")
"""


def test_a_kernel_object_is_published_by_entry_points(distribution: MakeDistribution) -> None:
    distribution(
        "tripled-dist",
        {"tripled_module": MODULE},
        operations={
            "tripled": "tripled_module:kernel.plugin.operation",
            "tripled_bwd": "tripled_module:kernel.plugin.backward_operation",
        },
        kernels={
            "tripled.run": "tripled_module:kernel.plugin.run",
            "tripled.xla": "tripled_module:kernel.plugin.xla",
            "tripled_bwd.backward": "tripled_module:kernel.plugin.backward",
        },
    )
    registry = Registry(plugins="tripled-dist")
    assert [fault for _, fault in registry.inspect()] == [None] * 5
    close(registry.call("tripled", X), X * 20)
    close(registry.call("tripled", X, backend="run"), X * 2)
    close(jax.grad(lambda x: registry.call("tripled", x).sum())(X), jnp.full(3, 7.0))
    assert registry.plan("tripled", X).kernel.provider == "tripled-dist 1.0"
    assert registry.kernel("tripled", "run").software["tripled.run"] == "tripled-dist 1.0"
