"""Kernels as objects: which method runs with which configuration, gradients, vmap, executors, and what is refused."""

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
from ejkernel_core.extend import device_name
from tests.distributions import MakeDistribution

X = jnp.arange(1.0, 4.0)
Y = jnp.array([2.0, -1.0, 0.5])


@pytest.fixture(autouse=True)
def core(use_registry: Any) -> Registry:
    """A registry of the core without plugins, so that no installed plugin is used."""
    registry = Registry(plugins="")
    use_registry(registry)
    return registry


@dataclasses.dataclass(frozen=True)
class Config:
    factor: int = 2


@attrs.frozen
class Other:
    factor: int = 2


class Scale(Kernel[Config, jax.Array]):
    """``x`` by the configuration's factor, so that the result shows which configuration was used."""

    def __init__(self) -> None:
        super().__init__(name="scale")
        self.factors: list[int] = []

    def run(self, x: Any, *, cfg: Config, shift: Any = 0.0) -> Any:
        self.factors.append(cfg.factor)
        return x * cfg.factor + shift


def assert_close(first: Any, second: Any, rtol: float = 1e-6) -> None:
    """Check that two trees have the same structure and close values."""
    assert jax.tree.structure(first) == jax.tree.structure(second)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=rtol, atol=1e-6), first, second)


# -- which method runs -----------------------------------------------------------------------------------------------


def raise_import_error(*args: Any, **kwargs: Any) -> Any:
    raise ImportError("no compiler of that kind here")


class Everywhere(Kernel[Config, jax.Array]):
    """Each method adds a different number. Two of them raise when they are traced."""

    def run(self, x: Any, *, cfg: Any) -> Any:
        return x + 1

    def run_xla(self, x: Any, *, cfg: Any) -> Any:
        return x + 2

    run_pallas = run_triton = raise_import_error


class Gpu(Kernel[Config, jax.Array]):
    """A kernel whose methods for GPUs and TPUs can be traced on the CPU."""

    def run(self, x: Any, *, cfg: Any) -> Any:
        return x + 1

    def run_pallas(self, x: Any, *, cfg: Any) -> Any:
        return x + 3

    def run_triton(self, x: Any, *, cfg: Any) -> Any:
        return x + 4


def test_the_best_method_of_the_platform_runs_and_no_other() -> None:
    kernel = Everywhere()
    assert_close(kernel(X), X + 2)
    assert_close(kernel(X, backend="run"), X + 1)
    assert_close(jax.grad(lambda x: kernel(x).sum())(X), jnp.ones(3))
    assert_close(jax.vmap(kernel)(jnp.stack([X, Y])), jnp.stack([X, Y]) + 2)
    verdicts = {v.name: (v.status, v.reason) for v in kernel.plan(X).verdicts}
    assert verdicts == {
        "Everywhere.xla": ("chosen", ""),
        "Everywhere.run": ("able", ""),
        "Everywhere.triton": ("refused", "it runs on gpu; this is cpu"),
        "Everywhere.pallas": ("refused", "it runs on tpu; this is cpu"),
    }


@pytest.mark.parametrize(("platform", "addend"), [("cpu", "1."), ("cuda", "4."), ("rocm", "4."), ("tpu", "3.")])
def test_the_method_is_chosen_by_the_platform_of_the_lowering(platform: str, addend: str) -> None:
    text = jax.jit(Gpu()).trace(X).lower(lowering_platforms=(platform,)).as_text()
    assert f"dense<{addend}" in text
    assert text.count("stablehlo.add") == 1


@pytest.mark.parametrize("backend", ["triton", "pallas"])
def test_methods_of_other_platforms_run(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class HereToo(Gpu):
        pass

    monkeypatch.setitem(_bridge.METHODS, backend, {"cpu": 30})
    kernel, addend = HereToo(), {"triton": 4, "pallas": 3}[backend]
    rows = jnp.stack([X, Y])
    assert_close(kernel(X), X + addend)
    assert_close(jax.vmap(kernel)(rows), rows + addend)
    assert_close(jax.vmap(jax.vmap(kernel))(rows), rows + addend)
    assert_close(jax.grad(lambda x: kernel(x).sum())(X), jnp.ones(3))
    assert kernel.plan(X).kernel.backend == backend


def test_an_unusable_or_unknown_backend_is_refused() -> None:
    with pytest.raises(NoKernel, match="Everywhere.triton .*: refused, it runs on gpu; this is cpu"):
        Everywhere()(X, backend="triton")
    with pytest.raises(UnknownBackend, match="no backend 'xla' of 'scale' is installed. Known: run"):
        Scale()(X, backend="xla")
    with pytest.raises(TypeError, match="backend takes a name; got int 3"):
        Scale()(X, backend=3)  # type: ignore[arg-type]


def test_methods_with_different_results_are_refused() -> None:
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
    assert_close(kernel(X), X * 2)
    assert kernel.config_type is Config
    assert kernel.plan(X).cfg == Config()
    assert kernel.plan(X).origin == "heuristic"
    assert list(kernel.config_space(kernel.invocation(X))) == [Config()]


def test_an_explicit_cfg_is_used_and_never_remembered(core: Registry) -> None:
    kernel = Scale()
    for mode in ("off", "on_miss", "error_on_miss"):
        with policy_override(mode=mode):
            assert_close(kernel(X, cfg=Config(5)), X * 5)
            assert kernel.plan(X, cfg=Config(5)).origin == "explicit cfg"
    assert_close(kernel(X), X * 2)
    assert_close(jax.jit(partial(kernel, cfg=Config(7)))(X), X * 7)
    assert_close(kernel(X), X * 2)
    assert len(core.memory) == 0


@pytest.mark.parametrize("value", [Other(3), 3, "fast"])
def test_a_cfg_of_another_type_is_refused(value: Any) -> None:
    with pytest.raises(NoKernel, match="cfg is of type .*, not its Config"):
        Scale()(X, cfg=value)


def test_an_unhashable_cfg_is_refused() -> None:
    class Loose(Kernel[dict, Any]):  # type: ignore[type-arg]
        def run(self, x: Any, *, cfg: Any) -> Any:
            return x

    with pytest.raises(TypeError, match="Loose: cfg takes a value that cannot be changed; a dict has no hash"):
        Loose()(X, cfg={"block": 3})


class Untyped(Kernel):  # type: ignore[type-arg]
    """A kernel that does not declare the type of its configurations."""

    def run(self, x: Any, *, cfg: Any) -> Any:
        return x * cfg.factor

    def heuristic_cfg(self, inv: Any) -> Any:
        return Config(3) if inv.args[0].size < 5 else Other(4)


def test_a_class_without_a_config_type_takes_any_configuration() -> None:
    kernel, long = Untyped(), jnp.ones(9)
    assert kernel.config_type is None
    assert_close((kernel(X), kernel(long)), (X * 3, long * 4))
    assert_close((kernel(X, cfg=Config(5)), kernel(X, cfg=Other(6))), (X * 5, X * 6))
    assert_close(kernel(X), X * 3)
    executor = Executor()
    executor.selector.cache.put(kernel.invocation(X).key, Config(8))
    executor.selector.cache.put(kernel.invocation(long).key, Config(8))  # not the type of the heuristic's configuration
    assert_close((executor(kernel, X), executor(kernel, long)), (X * 8, long * 4))


def test_a_class_without_configurations() -> None:
    class Plain(Kernel[None, jax.Array]):
        def run(self, x: Any, *, cfg: None) -> Any:
            assert cfg is None
            return -x

    assert_close(Plain()(X), -X)

    class Bare(Kernel):  # type: ignore[type-arg]
        def run(self, x: Any, *, cfg: Any) -> Any:
            return -x

    with pytest.raises(TypeError, match=r"Bare: write heuristic_cfg\(self, inv\), or subclass Kernel\[Config, Out\]"):
        Bare()


C = TypeVar("C")


def test_the_config_type_is_found_in_the_generic_base() -> None:
    class Middle(Kernel[Config, C], Generic[C]):
        pass

    class Leaf(Middle[jax.Array]):
        def run(self, x: Any, *, cfg: Any) -> Any:
            return x * cfg.factor

    class Forward(Kernel["Nowhere", Any]):  # type: ignore[name-defined]
        run, heuristic_cfg = Scale.run, Untyped.heuristic_cfg

    class Generally(Kernel[C, Any]):
        run, heuristic_cfg = Scale.run, Untyped.heuristic_cfg

    assert Leaf().config_type is Config
    assert_close(Leaf()(X), X * 2)
    assert Forward().config_type is None
    assert Generally().config_type is None


def test_a_heuristic_gets_the_invocation_and_its_result_is_checked() -> None:
    calls: list[Invocation] = []

    class RecordingScale(Scale):
        def heuristic_cfg(self, inv: Invocation) -> Any:
            calls.append(inv)
            return Config(inv.args[0].shape[0])

    kernel = RecordingScale()
    assert_close(kernel(X, shift=1.0), X * 3 + 1)
    inv = calls[-1]
    assert (inv.kernel, inv.args, inv.kwargs) == (kernel, (jax.ShapeDtypeStruct((3,), jnp.float32),), {"shift": 1.0})
    assert (inv.platform, inv.device_kind, inv.compute_capability) == ("cpu", device_name(jax.devices()[0]), None)

    class ScaleWithDict(Scale):
        def heuristic_cfg(self, inv: Invocation) -> Any:
            return {"factor": 3}

    with pytest.raises(TypeError, match="scale: heuristic_cfg returns a dict, not a Config"):
        ScaleWithDict()(X)


def test_a_kernel_refuses_with_a_reason() -> None:
    class Odd(Scale):
        def heuristic_cfg(self, inv: Invocation) -> Config:
            if inv.args[0].shape[0] % 2 == 0:
                raise Unsupported("odd lengths only: pad")
            return Config()

    kernel = Odd()
    for method in (kernel, kernel.plan, kernel.invocation, lambda x: kernel(x, cfg=Config(3))):
        with pytest.raises(NoKernel, match=r"no kernel can do scale\(x0=float32\[4\].*\n.*odd lengths only: pad"):
            method(jnp.ones(4))
    assert "odd lengths only: pad" in str(kernel.explain(jnp.ones(4)))
    assert_close(kernel(X), X * 2)
    with pytest.raises(NoKernel, match="odd lengths only: pad"):
        kernel(jnp.ones(4))


# -- the object ------------------------------------------------------------------------------------------------------


def test_init_need_not_call_super() -> None:
    class Mine(Kernel[Config, jax.Array]):
        def __init__(self, by: float) -> None:
            self.by = by

        def run(self, x: Any, *, cfg: Any) -> Any:
            return x * self.by

    assert (Mine(3.0).name, Mine(3.0).version) == ("Mine", 1)
    assert_close((Mine(3.0)(X), Mine(4.0)(X)), (X * 3, X * 4))


def test_name_and_version_may_be_class_attributes() -> None:
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
    assert_close(Frozen()(X), X * 3)
    assert_close(dataclasses.replace(Frozen(), by=4.0)(X), X * 4)
    assert Frozen() == Frozen(3.0)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda kernel: pickle.loads(pickle.dumps(kernel))])
def test_a_copy_computes_with_its_own_attributes(duplicate: Callable[[Any], Any]) -> None:
    kernel = Frozen()
    assert_close(kernel(X), X * 3)
    assert kernel.plugin.operation.name == "Frozen"
    copied = duplicate(kernel)
    object.__setattr__(copied, "by", 5.0)
    assert_close((copied(X), kernel(X)), (X * 5, X * 3))


def test_two_objects_of_one_class_do_not_share_compiled_functions() -> None:
    first, second = Frozen(3.0), Frozen(4.0)
    assert_close((first(X), second(X), first(X)), (X * 3, X * 4, X * 3))


def test_an_eager_call_is_traced_once() -> None:
    kernel = Scale()
    kernel(X)
    kernel.factors.clear()
    for _ in range(5):
        kernel(X)
        kernel(X + 1)
    assert kernel.factors == []
    kernel(jnp.ones(5))
    count = len(kernel.factors)
    assert count > 0
    for _ in range(3):
        kernel(jnp.ones(5))
        kernel(X)
    assert len(kernel.factors) == count


def test_the_number_of_call_forms_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ejkernel_classes._kernel.MAX_FORMS", 4)
    kernel = Scale()
    for shift in range(9):
        assert_close(kernel(X, shift=shift), X * 2 + shift)
    assert len(kernel._registries._registry_by_form) == 4
    assert_close(kernel(X, shift=0), X * 2)


def test_threads_may_share_a_kernel() -> None:
    kernel, faults, start = Scale(), [], threading.Barrier(4)

    def work(number: int) -> None:
        start.wait()
        for i in range(30):
            shift = float((number + i) % 7)
            if not np.allclose(kernel(X, shift=shift), X * 2 + shift):
                faults.append((number, i))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []


# -- arguments -------------------------------------------------------------------------------------------------------


class Echo(Kernel[Config, Any]):
    """Returns its first argument, and records all others."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def run(self, x: Any, *rest: Any, cfg: Any, **kwargs: Any) -> Any:
        self.calls.append((rest, kwargs))
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


def test_static_arguments_are_passed_unchanged() -> None:
    kernel = Echo()
    for is_repeated in (False, True):
        for value in STATICS:
            kernel.calls.clear()
            assert_close(kernel(X, value, word=value, inside={"a": (value, [value])}), X)
            if is_repeated:
                assert kernel.calls == []
                continue
            (rest,), kwargs = kernel.calls[-1]
            for argument in (rest, kwargs["word"], kwargs["inside"]["a"][0], kwargs["inside"]["a"][1][0]):
                assert (type(argument), repr(argument)) == (type(value), repr(value))


def test_every_static_argument_has_its_own_key() -> None:
    kernel = Echo()
    keys = [kernel.invocation(X, 0.5 if value is None else value).key for value in STATICS]
    # Three values for float32 have one content.
    assert len(set(keys)) == len(STATICS) - 2


def test_equal_static_arguments_of_different_types_are_distinguished() -> None:
    class Kinds(Kernel[Config, Any]):
        def run(self, x: Any, value: Any, *, cfg: Any) -> Any:
            return x + {int: 10, float: 20, bool: 30}[type(value)] + np.copysign(1.0, value)

    def compute(x: Any) -> Any:
        return [Kinds()(x, value) for value in (1, True, 1.0)], [kernel(x, value) for value in (0.0, -0.0, 0)]

    kernel = Kinds()
    expected = [X + 11, X + 31, X + 21], [X + 21, X + 19, X + 11]
    assert_close(compute(X), expected)
    assert_close(jax.jit(compute)(X), expected)


def test_arguments_and_results_may_be_trees() -> None:
    class Tree(Kernel[Config, Any]):
        def run(self, tree: Any, *, cfg: Any, by: Any = None) -> Any:
            return {"sum": tree["a"] + tree["b"][0], "rest": (tree["b"][1], None, [tree["c"] * by["k"]])}

    tree = {"a": X, "b": [Y, None], "c": jnp.ones((2, 2))}
    expected = {"sum": X + Y, "rest": (None, None, [jnp.full((2, 2), 3.0)])}
    for by in ({"k": 3.0}, {"k": jnp.float32(3)}):
        assert_close(Tree()(tree, by=by), expected)
        assert_close(jax.jit(Tree())(tree, by={"k": jnp.float32(3)}), expected)
    del tree["b"][1]
    with pytest.raises(IndexError, match="list index out of range"):
        Tree()(tree, by={"k": 3.0})


@pytest.mark.parametrize(
    "value", [np.ones((2, 3), np.float32), np.ones(3), np.float32(3), np.int8(3), np.ones(2, bool)]
)
def test_numpy_arrays_and_scalars_are_arrays(value: Any) -> None:
    kernel = Echo()
    out = kernel(X, value)
    assert_close(out, X)
    (argument,), _ = kernel.calls[-1]
    assert isinstance(argument, jax.core.Tracer)
    assert (argument.shape, argument.dtype) == (np.shape(value), jnp.asarray(value).dtype)
    assert_close(kernel(value), jnp.asarray(value))


def test_random_keys_are_arrays() -> None:
    class Dropout(Kernel[Config, Any]):
        def run(self, x: Any, key: Any, *, cfg: Any) -> Any:
            return x * jax.random.bernoulli(key, 0.5, x.shape)

    key, x = jax.random.key(3), jnp.ones(64)
    expected = x * jax.random.bernoulli(key, 0.5, x.shape)
    assert_close(Dropout()(x, key), expected)
    assert_close(jax.grad(lambda x: Dropout()(x, key).sum())(x), expected)
    keys = jax.random.split(key, 3)
    assert_close(
        jax.vmap(Dropout(), (None, 0))(x, keys), jnp.stack([x * jax.random.bernoulli(k, 0.5, x.shape) for k in keys])
    )


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "Unhashable()"


@pytest.mark.parametrize(
    ("args", "kwargs", "where"),
    [
        ((X, {1, 2}), {}, r"args\[1\] is not an array.*got \{1, 2\}"),
        ((X,), {"set": {1}}, r"kwargs\['set'\] is not an array"),
        ((X, [3, {"a": Unhashable()}]), {}, r"args\[1\]\[1\]\['a'\] is not an array.*got Unhashable\(\)"),
        ((X, (bytearray(b"1"),)), {}, r"args\[1\]\[0\] is not an array"),
    ],
)
def test_an_argument_that_is_neither_array_nor_hashable_is_refused_by_path(args: Any, kwargs: Any, where: str) -> None:
    kernel = Echo()
    for method in (kernel, kernel.plan, kernel.explain, kernel.invocation):
        with pytest.raises(TypeError, match=f"Echo: {where}"):
            method(*args, **kwargs)


def test_a_call_needs_an_array() -> None:
    with pytest.raises(TypeError, match="Echo: takes at least one array; numbers are static"):
        Echo()(3.0)


def test_the_structure_of_results_may_not_depend_on_shapes() -> None:
    class Unstack(Kernel[Config, Any]):
        def run(self, x: Any, *, cfg: Any) -> Any:
            return tuple(x)

    kernel = Unstack()
    assert_close(kernel(X), tuple(X))
    with pytest.raises(TypeError, match="What it returns may depend on static arguments, not on shapes"):
        kernel(jnp.ones(2))
    assert_close(kernel(X), tuple(X))


def test_numbers_as_results_become_arrays() -> None:
    class Count(Kernel[Config, Any]):
        def run(self, x: Any, *, cfg: Any) -> Any:
            return x, x.shape[0], 0.5

    assert_close(Count()(X), (X, jnp.asarray(3), jnp.asarray(0.5)))


# -- transformations -------------------------------------------------------------------------------------------------


def test_jit_of_a_kernel_object_itself() -> None:
    kernel = Scale()
    assert_close(jax.jit(kernel)(X), X * 2)
    assert_close(jax.jit(kernel, static_argnames="shift")(X, shift=3), X * 2 + 3)
    assert_close(jax.jit(kernel)(X, shift=3.0), X * 2 + 3)
    with jax.disable_jit():
        assert_close(kernel(X, shift=1.0), X * 2 + 1)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharded_arrays(axis_type: Any) -> None:
    mesh = jax.make_mesh((4,), ("a",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("a")))
        for kernel in (Scale(), Twice()):
            expected = kernel.run(jnp.arange(8.0), cfg=Config())
            assert_close(kernel(x), expected)
            assert_close(jax.jit(kernel)(x), expected)
            gradient = jax.grad(lambda x, kernel=kernel: kernel(x).sum())(x)
            assert_close(
                gradient, jax.grad(lambda x, kernel=kernel: kernel.run(x, cfg=Config()).sum())(jnp.arange(8.0))
            )


def test_a_kernel_object_inside_shard_map() -> None:
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,))

    def loss(x: Any, by: Any) -> Any:
        return jax.shard_map(lambda x, by: Affine()(x, by), mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a"))(x, by)

    x, by = jnp.arange(8.0), jnp.asarray([2.0, 3.0])
    assert_close(loss(x, by), x * 2 + 3)
    assert_close(
        jax.grad(lambda *a: (loss(*a) ** 2).sum(), (0, 1))(x, by),
        jax.grad(lambda x, by: ((x * by[0] + by[1]) ** 2).sum(), (0, 1))(x, by),
    )


# -- gradients -------------------------------------------------------------------------------------------------------


class Square(Kernel[Config, jax.Array]):
    """A kernel whose ``custom_vjp`` is three times the gradient, so that its use shows."""

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
    """A kernel with a small second primal, which is shared by all rows."""

    def run(self, x: Any, by: Any, *, cfg: Any) -> Any:
        return x * by[0] + by[1]

    def custom_vjp(self, primals: Any, cfg: Any, kwargs: Any, cotangents: Any) -> Any:
        (x, by), (ct,) = primals, cotangents
        return ct * by[0], jnp.stack([(ct * x).sum(), ct.sum()])


class Twice(Scale):
    """``Scale`` with a correct ``custom_vjp``."""

    def custom_vjp(self, primals: Any, cfg: Config, kwargs: Any, cotangents: Any) -> Any:
        return (cotangents[0] * cfg.factor,)


class Full(Kernel[Config, Any]):
    """Primals and results of every kind, with correct gradients."""

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


def plain_run(kernel: Kernel[Any, Any]) -> Callable[..., Any]:
    """The method ``run`` as a plain function."""
    return partial(kernel.run, cfg=Config())


def losses(call: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Losses that use all results, or some."""
    yield lambda *a, **k: (call(*a, **k)["y"] ** 2).sum()
    yield lambda *a, **k: call(*a, **k)["z"][0]
    yield lambda *a, **k: call(*a, **k)["z"][1] * 3
    yield lambda *a, **k: sum(leaf.sum() * (i + 2) for i, leaf in enumerate(jax.tree.leaves(call(*a, **k))))


@pytest.mark.parametrize("count", [2, 2.0, jnp.asarray(2), jnp.asarray(2.0)])
@pytest.mark.parametrize("kwargs", [{}, {"mode": "sin"}, {"w": 2.0}, {"w": jnp.asarray(2.0), "mode": "sin"}], ids=str)
def test_gradients_equal_those_of_the_plain_code(count: Any, kwargs: Any) -> None:
    kernel = Full()

    def gradient(loss: Callable[..., Any]) -> Any:
        return jax.grad(lambda x, u, v: loss(x, {"u": u, "v": [v, "a word"]}, count, **kwargs), (0, 1, 2))

    for kernel_loss, plain_loss in zip(losses(kernel), losses(plain_run(kernel)), strict=True):
        arrays = X, Y, jnp.asarray(3.0)
        assert_close(gradient(kernel_loss)(*arrays), gradient(plain_loss)(*arrays))
        assert_close(jax.jit(gradient(kernel_loss))(*arrays), gradient(plain_loss)(*arrays))


def test_custom_vjp_is_used_with_any_backend() -> None:
    kernel = Square()
    for call in (kernel, partial(kernel, backend="run"), jax.jit(kernel), partial(kernel, cfg=Config(7))):
        assert_close(jax.grad(lambda x, call=call: call(x).sum())(X), 6 * X)
    with pytest.raises(NotDifferentiable):
        jax.jvp(partial(kernel, backend="run"), (X,), (X,))


def test_the_gradient_of_run_uses_the_explicit_configuration() -> None:
    """JAX differentiates the method with this configuration, which changes the results."""
    kernel = Scale()
    for derivative in (
        lambda call: jax.grad(lambda x: call(x).sum())(X),
        lambda call: jax.jvp(call, (X,), (X,))[1],
        lambda call: jax.jit(jax.grad(lambda x: (call(x) ** 2).sum()))(X),
    ):
        assert_close(derivative(partial(kernel, cfg=Config(7))), derivative(partial(kernel.run, cfg=Config(7))))


def test_custom_vjp_gets_the_explicit_configuration() -> None:
    kernel = Square()
    jax.grad(lambda x: kernel(x, cfg=Config(7)).sum())(X)
    assert {call[1] for call in kernel.backward} == {Config(7)}
    kernel.backward.clear()
    jax.grad(lambda x: kernel(x).sum())(X)
    assert {call[1] for call in kernel.backward} == {Config(2)}

    class UntypedSquare(Untyped):
        custom_vjp = Square.custom_vjp
        backward: list[Any] = []

    kernel = UntypedSquare()
    jax.grad(lambda x: kernel(x, cfg=Other(7)).sum())(X)
    assert {call[1] for call in kernel.backward} == {Other(7)}


def test_the_backward_key_has_its_own_configuration() -> None:
    kernel, executor = Square(), Executor()
    key = kernel.explain(X).backward.plan.invocation.key
    executor.selector.cache.put(key, Config(9))
    jax.grad(lambda x: executor(kernel, x).sum())(X)
    assert {call[1] for call in kernel.backward} == {Config(9)}
    assert {*kernel.forward} == {Config(2)}


def test_further_gradients_are_not_traced() -> None:
    kernel = Square()
    gradient = jax.grad(lambda x: kernel(x).sum())
    assert_close(gradient(X), 6 * X)
    count = len(kernel.forward), len(kernel.backward)
    assert count[1] == 1
    for x in (X, X + 1, X):
        assert_close(gradient(x), 6 * x)
        assert_close(jax.grad(lambda x: kernel(x).sum())(x), 6 * x)
        assert_close(jax.vjp(kernel, x)[1](Y)[0], 6 * x * Y)
    assert (len(kernel.forward), len(kernel.backward)) == count


def test_second_derivatives() -> None:
    kernel = Square()  # the gradient is 6 x, so the second derivative is 6
    assert_close(jax.grad(lambda x: jax.grad(lambda x: kernel(x).sum())(x)[0])(X), jnp.array([6.0, 0, 0]))
    assert_close(jax.jacrev(jax.jit(jax.grad(lambda x: kernel(x).sum())))(X), 6 * jnp.eye(3))
    full = Full()
    for loss, plain_loss in zip(losses(full), losses(plain_run(full)), strict=True):
        second = [jax.jacrev(jax.grad(lambda x, f=f: f(x, TREE, 2, mode="sin")))(X) for f in (loss, plain_loss)]
        assert_close(*second, rtol=1e-5)


def test_the_gradient_of_an_array_that_is_passed_twice() -> None:
    class Product(Kernel[Config, Any]):
        def run(self, a: Any, b: Any, *, cfg: Any) -> Any:
            return a * b

        def custom_vjp(self, primals: Any, cfg: Any, kwargs: Any, cotangents: Any) -> Any:
            (a, b), (ct,) = primals, cotangents
            return ct * b, ct * a

    assert_close(jax.grad(lambda x: Product()(x, x).sum())(X), 2 * X)
    assert_close(jax.grad(lambda x: Product()(x, jax.lax.stop_gradient(x)).sum())(X), X)


class Given(Kernel[Config, Any]):
    """``custom_vjp`` returns ``answer`` of the cotangent."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        self.answer = answer

    def run(self, x: Any, tree: Any = None, *, cfg: Any, w: Any = 1.0) -> Any:
        return x * w + (0 if tree is None else tree["u"] + tree["v"])

    def custom_vjp(self, primals: Any, cfg: Any, kwargs: Any, cotangents: Any) -> Any:
        return self.answer(cotangents[0])


@pytest.mark.parametrize("no_gradient", [None, {"u": None, "v": None}, {"u": None, "v": 0}], ids=str)
def test_none_is_a_zero_gradient(no_gradient: Any) -> None:
    kernel = Given(
        lambda ct: (
            ct,
            no_gradient if no_gradient is None else {k: v if v is None else 5 * ct for k, v in no_gradient.items()},
        )
    )
    actual = jax.grad(lambda x, t: kernel(x, t).sum(), (0, 1))(X, {"u": Y, "v": Y})
    expected = jnp.full(3, 5.0) if no_gradient and no_gradient["v"] == 0 else jnp.zeros(3)
    assert_close(actual, (jnp.ones(3), {"u": jnp.zeros(3), "v": expected}))


def test_none_for_a_subtree_is_a_zero_gradient() -> None:
    class Deep(Kernel[Config, Any]):
        def run(self, tree: Any, *, cfg: Any) -> Any:
            return tree["a"] + tree["rest"]["b"] + tree["rest"]["c"][0]

        def custom_vjp(self, primals: Any, cfg: Any, kwargs: Any, cotangents: Any) -> Any:
            return ({"a": cotangents[0], "rest": None},)

    tree = {"a": X, "rest": {"b": Y, "c": (X, "word")}}
    actual = jax.grad(lambda a, b, c: Deep()({"a": a, "rest": {"b": b, "c": (c, "word")}}).sum(), (0, 1, 2))
    assert_close(actual(X, Y, X), (jnp.ones(3), jnp.zeros(3), jnp.zeros(3)))
    assert_close(Deep()(tree), X + Y + X)


def test_integers_need_no_gradient() -> None:
    class Take(Kernel[Config, Any]):
        def run(self, x: Any, index: Any, *, cfg: Any) -> Any:
            return x[index], index + 1

        def custom_vjp(self, primals: Any, cfg: Any, kwargs: Any, cotangents: Any) -> Any:
            (x, index), (ct, index_cotangent) = primals, cotangents
            assert (index_cotangent.shape, index_cotangent.dtype) == (index.shape, index.dtype)
            return jnp.zeros_like(x).at[index].add(ct), None

    index = jnp.array([2, 0])
    assert_close(jax.grad(lambda x: (Take()(x, index)[0] * jnp.array([5.0, 7.0])).sum())(X), jnp.array([7.0, 0, 5.0]))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda ct: (ct, {}), r"no gradient of kwargs\['w'\]: return a dict of such after the others"),
        (lambda ct: (ct,), r"no gradient of kwargs\['w'\]"),
        (lambda ct: [ct], r"no gradient of kwargs\['w'\]"),
    ],
)
def test_a_missing_gradient_of_a_keyword_is_refused(answer: Any, message: str) -> None:
    kernel = Given(answer)
    with pytest.raises(NotDifferentiable, match=f"Given: custom_vjp returns {message}"):
        jax.grad(lambda w: kernel(X, w=w).sum())(2.0)
    # Here the gradient of w is not requested.
    assert_close(jax.grad(lambda x: kernel(x, w=jnp.asarray(2.0)).sum())(X), jnp.ones(3))


def test_the_gradient_of_a_keyword() -> None:
    kernel = Given(lambda ct: (2 * ct, {"w": (X * ct).sum()}))
    assert_close(jax.grad(lambda x, w: kernel(x, w=w).sum(), (0, 1))(X, 2.0), (jnp.full(3, 2.0), jnp.asarray(6.0)))
    zero = Given(lambda ct: (2 * ct, {"w": None}))
    assert_close(jax.grad(lambda x, w: zero(x, w=w).sum(), (0, 1))(X, 2.0), (jnp.full(3, 2.0), jnp.asarray(0.0)))


@pytest.mark.parametrize(
    ("answer", "message"),
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
def test_an_invalid_gradient_is_refused_with_the_kernels_name(answer: Any, message: str) -> None:
    kernel = Given(answer)
    for gradient in (jax.grad(lambda x: kernel(x).sum()), jax.jacrev(jax.grad(lambda x: kernel(x).sum()))):
        with pytest.raises(TypeError, match=f"Given: custom_vjp returns .*{message}"):
            gradient(X)


@pytest.mark.parametrize(
    ("gradient", "message"),
    [
        (lambda ct: ct, "another structure than its arguments: one value for {'u': x1, 'v': x2}"),
        (lambda ct: {"u": ct}, "another structure than its arguments"),
        (lambda ct: {"u": ct, "v": ct, "w": ct}, "another structure than its arguments"),
        (lambda ct: {"u": ct, "v": (ct,)}, "another structure than its arguments"),
        (lambda ct: {"u": ct, "v": ct[0]}, r"float32\[\] as the gradient of args\[1\]\['v'\], which is float32\[3\]"),
    ],
)
def test_an_invalid_gradient_of_a_tree_is_refused_with_its_path(gradient: Any, message: str) -> None:
    kernel = Given(lambda ct: (ct, gradient(ct)))
    with pytest.raises(TypeError, match=f"Given: custom_vjp returns .*{message}"):
        jax.grad(lambda t: kernel(X, t).sum())({"u": Y, "v": Y})


def test_without_custom_vjp_jax_differentiates_run() -> None:
    class Cubes(Kernel[Config, Any]):
        run_triton = run_pallas = raise_import_error

        def run(self, x: Any, *, cfg: Any, w: Any = 1.0) -> Any:
            return {"cube": x**3 * w}

        def run_xla(self, x: Any, *, cfg: Any, w: Any = 1.0) -> Any:
            return {"cube": jax.lax.stop_gradient(x**3 * w)}

    kernel = Cubes()
    assert_close(kernel(X), {"cube": X**3})
    assert_close(jax.grad(lambda x: kernel(x)["cube"].sum())(X), 3 * X**2)
    assert_close(jax.grad(lambda w: kernel(X, w=w)["cube"].sum())(2.0), (X**3).sum())
    assert_close(jax.hessian(lambda x: kernel(x, backend="run")["cube"].sum())(X), jnp.diag(6 * X))


# -- vmap ------------------------------------------------------------------------------------------------------------

ROWS, OTHER_ROWS = jnp.arange(12.0).reshape(4, 3) / 7 + 0.1, jnp.cos(jnp.arange(12.0)).reshape(4, 3)


@pytest.mark.parametrize(
    ("axes", "args"),
    [
        ((0, 0), (ROWS, OTHER_ROWS)),
        ((0, None), (ROWS, Y)),
        ((None, 0), (X, OTHER_ROWS)),
        ((1, 0), (ROWS.T, OTHER_ROWS)),
        ((-1, None), (ROWS.T, Y)),
        ((1, 1), (ROWS.T, OTHER_ROWS.T)),
    ],
)
def test_vmap_and_vmap_of_grad(axes: Any, args: Any) -> None:
    kernel = Full()

    def run(call: Callable[..., Any], x: Any, u: Any) -> Any:
        return call(x, {"u": u, "v": [jnp.asarray(3.0), "word"]}, 2, mode="sin", w=jnp.asarray(2.0))

    def mapped(call: Callable[..., Any], out_axes: int = 0) -> Any:
        return jax.vmap(partial(run, call), axes, out_axes)(*args)

    assert_close(mapped(kernel), mapped(plain_run(kernel)))
    assert_close(jax.jit(mapped, static_argnums=0)(kernel), mapped(plain_run(kernel)))
    for loss, plain_loss in zip(losses(kernel), losses(plain_run(kernel)), strict=True):
        gradients = [jax.vmap(jax.grad(partial(run, f), (0, 1)), axes)(*args) for f in (loss, plain_loss)]
        assert_close(*gradients)
        # A primal that is not mapped has one gradient, the sum over all elements.
        sums = [
            jax.grad(lambda *a, f=f: jax.vmap(partial(run, f), axes)(*a).sum(), (0, 1))(*args)
            for f in (loss, plain_loss)
        ]
        assert_close(*sums)


@pytest.mark.long
def test_nested_vmap() -> None:
    kernel, left = Full(), jnp.stack([ROWS, ROWS + 1])

    def nested(call: Callable[..., Any]) -> Any:
        def element(x: Any, u: Any) -> Any:
            return call(x, {"u": u, "v": [x[0], "word"]}, 2, mode="sin")

        inner = jax.vmap(element, (0, None))
        return jax.vmap(jax.vmap(inner, (0, None)), (None, 1))(left, OTHER_ROWS.T)

    assert_close(nested(kernel), nested(plain_run(kernel)))
    for loss, plain_loss in zip(losses(kernel), losses(plain_run(kernel)), strict=True):
        assert_close(nested(jax.grad(loss)), nested(jax.grad(plain_loss)))
    assert_close(jax.vmap(jax.vmap(jax.vmap(Square())))(left), left**2)
    assert_close(jax.vmap(jax.jacrev(jax.grad(lambda x: Square()(x).sum())))(ROWS), jnp.stack([6 * jnp.eye(3)] * 4))


@pytest.mark.long
def test_grad_inside_and_around_vmap() -> None:
    """vmap around grad gives one gradient per element. vmap inside grad gives their sum."""
    kernel, left = Full(), jnp.stack([ROWS, ROWS + 1])

    def sum_over_rows(call: Callable[..., Any], x: Any, u: Any) -> Any:
        """The sum over the rows of x, which share u."""
        return jax.vmap(lambda x: call(x, {"u": u, "v": [u[0], "word"]}, 2, mode="sin"))(x).sum()

    for loss, plain_loss in zip(losses(kernel), losses(plain_run(kernel)), strict=True):
        for derivative in (
            lambda call: jax.grad(partial(sum_over_rows, call), (0, 1))(ROWS, Y),
            lambda call: jax.vmap(jax.grad(partial(sum_over_rows, call), (0, 1)), (0, None))(left, Y),
            lambda call: jax.vmap(jax.grad(partial(sum_over_rows, call), (0, 1)), (None, 0))(ROWS, OTHER_ROWS),
            lambda call: jax.vmap(jax.grad(partial(sum_over_rows, call), 1), (0, 0))(left, OTHER_ROWS[:2]),
            lambda call: jax.grad(lambda x, u: jax.vmap(partial(sum_over_rows, call), (0, None))(x, u).sum(), (0, 1))(
                left, Y
            ),
            lambda call: jax.grad(lambda x, u: jax.vmap(partial(sum_over_rows, call), (None, 0))(x, u).sum(), (0, 1))(
                ROWS, OTHER_ROWS
            ),
            lambda call: jax.vmap(jax.vjp(partial(sum_over_rows, call), ROWS, Y)[1])(jnp.arange(3.0)),
        ):
            assert_close(derivative(loss), derivative(plain_loss))


def test_scalars_strings_and_none_under_vmap() -> None:
    class Mixed(Kernel[Config, Any]):
        def run(self, x: Any, scale: Any, mode: Any, nothing: Any, *, cfg: Any, word: str = "", by: Any = 1) -> Any:
            assert (mode, nothing) == ("double", None)
            return x * scale * by * {"": 1, "twice": 2}[word]

    kernel = Mixed()
    mapped = jax.vmap(lambda x: kernel(x, 3.0, "double", None, word="twice", by=2))
    assert_close(mapped(ROWS), ROWS * 12)
    assert_close(
        jax.vmap(jax.grad(lambda x: kernel(x, 3.0, "double", None, word="twice").sum()))(ROWS), jnp.full((4, 3), 6.0)
    )
    assert_close(
        jax.vmap(lambda x, s: kernel(x, s, "double", None))(ROWS, jnp.arange(4.0)), ROWS * jnp.arange(4.0)[:, None]
    )


def test_the_heuristic_sees_the_shapes_of_one_element_under_vmap() -> None:
    shapes = []

    class RecordingScale(Scale):
        def heuristic_cfg(self, inv: Invocation) -> Config:
            shapes.append(inv.args[0].shape)
            return Config()

    assert_close(jax.vmap(jax.vmap(RecordingScale()))(jnp.ones((4, 5, 3))), jnp.full((4, 5, 3), 2.0))
    assert set(shapes) == {(3,)}


# -- the chain and the executor --------------------------------------------------------------------------------------


def policy(origin: str, cfg: Any = None, measured: bool = False, **keywords: Any) -> SimpleNamespace:
    """A policy that chooses this configuration, if there is one, and records its calls."""
    calls: list[Any] = []
    when = "2026-11-20T12:00:00+00:00"

    @hookimpl(tryfirst=keywords.pop("tryfirst", False))
    def select_config(inv: Any, candidates: Any, scope: Any) -> Any:
        calls.append((inv.key, scope.policy.mode))
        backends = tuple(candidate.backend for candidate in candidates)
        provenance = Provenance(when=when, device="cpu", milliseconds=1.0, backends=backends)
        record = Record(cfg, backends[0], provenance) if measured else None
        return None if cfg is None else Choice(backends[0], cfg, origin, record=record, measured=measured)

    return SimpleNamespace(select_config=select_config, calls=calls, **keywords)


def used_factor(executor: Executor, kernel: Any, **options: Any) -> int:
    result = executor(kernel, X, **options)
    factor = round(float(result[0]))
    assert_close(result, X * factor)
    return factor


def origin(executor: Executor, kernel: Kernel[Any, Any], **options: Any) -> str:
    with executor.selector.entered():
        return kernel.plan(X, **options).origin


def test_the_order_of_a_selector_chain(core: Registry) -> None:
    kernel, cache, persistent = Scale(), ConfigCache(), ConfigCache()
    key = default_key_builder_with_sharding(kernel, (X,), {})
    core.remember(key, Config(99))  # in the registry's memory, which a chain does not use
    core.register(policy("the registry's", Config(98)), "somebody")
    policies = {"first": policy("mine", Config(4), RANK=99, tryfirst=True), "second": policy("too late", Config(3))}
    silent_executor = Executor(ConfigSelectorChain(policies={"silent": policy("silent")}))
    assert (used_factor(silent_executor, kernel), origin(silent_executor, kernel)) == (2, "heuristic")
    executor = Executor(ConfigSelectorChain(cache=cache, persistent=persistent, policies=policies))
    assert (used_factor(executor, kernel), origin(executor, kernel)) == (4, "mine")
    persistent.put(key, Config(5))
    assert (used_factor(executor, kernel), origin(executor, kernel)) == (5, "persistent")
    cache.put(key, Config(6))
    assert (used_factor(executor, kernel), origin(executor, kernel)) == (6, "cache")
    with overlay_cache({key: Config(7)}):
        assert (used_factor(executor, kernel), origin(executor, kernel)) == (7, "overlay")
        assert used_factor(executor, kernel, cfg=Config(8)) == 8
        assert origin(executor, kernel, cfg=Config(8)) == "explicit cfg"
    assert used_factor(executor, kernel) == 6
    cache.clear()
    assert used_factor(executor, kernel) == 5
    assert kernel(X)[0] == 99  # without a chain, the registry's memory is used


def test_only_measured_choices_are_stored() -> None:
    kernel, cache, persistent = Scale(), ConfigCache(), ConfigCache()
    executor_without_tuner = Executor(
        ConfigSelectorChain(cache=cache, persistent=persistent, policies={"model": policy("m", Config(3))})
    )
    assert [
        used_factor(executor_without_tuner, kernel),
        used_factor(executor_without_tuner, kernel, cfg=Config(9)),
        used_factor(executor_without_tuner, kernel),
    ] == [3, 9, 3]
    assert (len(cache), len(persistent)) == (0, 0)
    tuner = policy("the tuner", Config(4), measured=True)
    executor = Executor(ConfigSelectorChain(cache=cache, persistent=persistent, policies={"tuner": tuner}))
    assert [used_factor(executor, kernel, cfg=Config(9)), used_factor(executor, kernel)] == [9, 4]
    key = kernel.invocation(X).key
    for store in (cache, persistent):
        ((stored_key, (record,)),) = store.items()
        assert (stored_key, record.cfg, record.backend, record.provenance.milliseconds) == (key, Config(4), "run", 1.0)
    assert (used_factor(executor, kernel), origin(executor, kernel)) == (4, "cache")
    assert len(tuner.calls) == 1
    executor_with_store = Executor(ConfigSelectorChain(persistent=persistent, policies={"tuner": tuner}))
    assert (used_factor(executor_with_store, kernel), origin(executor_with_store, kernel)) == (4, "persistent")
    assert len(tuner.calls) == 1


def test_a_repeated_call_of_an_executor_is_not_traced() -> None:
    kernel, executor = Scale(), Executor()
    used_factor(executor, kernel)
    kernel.factors.clear()
    for _ in range(5):
        assert used_factor(executor, kernel) == 2
    assert kernel.factors == []
    executor.selector.cache.put(kernel.invocation(X).key, Config(3))
    assert [used_factor(executor, kernel) for _ in range(3)] == [3, 3, 3]
    assert kernel.factors.count(3) == 1


def test_executors_have_separate_caches() -> None:
    kernel, first, second = Scale(), Executor(), Executor()
    first.selector.cache.put(kernel.invocation(X).key, Config(5))
    assert [used_factor(first, kernel), used_factor(second, kernel), used_factor(first, kernel)] == [5, 2, 5]
    assert_close(kernel(X), X * 2)


def test_an_executor_under_jit_grad_and_vmap() -> None:
    kernel, executor = Scale(), Executor()
    executor.selector.cache.put(kernel.invocation(X).key, Config(5))
    assert_close(jax.jit(partial(executor, kernel))(X), X * 5)
    assert_close(jax.grad(lambda x: executor(kernel, x).sum())(X), jnp.full(3, 5.0))
    rows = jnp.stack([X, Y])
    assert_close(jax.vmap(partial(executor, kernel))(rows), rows * 2)


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
    assert used_factor(executor, "times") == 2
    key = default_key_builder_with_sharding("times", (X,))
    assert key == core.invocation("times", X).key == Invocation("times", (X,)).key
    executor.selector.cache.put(key, Config(6))
    assert [
        used_factor(executor, "times"),
        used_factor(executor, "times", cfg=Config(7)),
        used_factor(executor, "times"),
    ] == [6, 7, 6]
    assert used_factor(executor, "times", backend="two") == 6
    assert_close(core.call("times", X), X * 2)


def test_policy_override_takes_precedence_over_the_chain() -> None:
    def mode(chain: ConfigSelectorChain, **override: Any) -> str:
        with policy_override(**override) if override else contextlib.nullcontext(), chain.entered():
            return _scopes.current_scope().policy.mode

    kernel, tuning = Scale(), ConfigSelectorChain(autotune=True)
    assert (mode(tuning), mode(tuning, autotune=False), mode(tuning, autotune=True)) == ("on_miss", "off", "on_miss")
    assert (mode(ConfigSelectorChain()), mode(ConfigSelectorChain(), autotune=True)) == ("off", "on_miss")
    strict_executor = Executor(ConfigSelectorChain(policy=AutotunePolicy("error_on_miss")))
    with pytest.raises(NoConfig, match="no configuration is remembered for scale"):
        strict_executor(kernel, X)
    with policy_override(autotune=False):
        assert used_factor(strict_executor, kernel) == 2
    strict_executor.selector.cache.put(kernel.invocation(X).key, Config(4))
    assert used_factor(strict_executor, kernel) == 4


def test_threads_with_separate_executors() -> None:
    kernel, faults, start = Scale(), [], threading.Barrier(4)
    key = kernel.invocation(X).key

    def work(number: int) -> None:
        executor = Executor()
        executor.selector.cache.put(key, Config(3 + number))
        start.wait()
        for _ in range(30):
            faults.extend([number] if float(executor(kernel, X)[0]) != 3 + number else [])
            faults.extend(["none"] if float(kernel(X)[0]) != 2 else [])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []


@pytest.mark.parametrize("part", ["cache", "persistent"])
def test_a_chain_refuses_a_value_that_is_no_store(part: str) -> None:
    with pytest.raises(TypeError, match=f"{part}: takes a ConfigCache, or what has find and put too; got dict"):
        ConfigSelectorChain(**{part: {}})  # type: ignore[arg-type]
    empty = ConfigCache()
    assert ConfigSelectorChain(cache=empty).cache is empty


def test_a_chain_refuses_malformed_policies() -> None:
    with pytest.raises(PluginError, match="'bad', registered at run time.*select_config is not marked @hookimpl"):
        ConfigSelectorChain(policies={"bad": SimpleNamespace(select_config=lambda inv: None)})
    policies = {name: policy(name, Config(3)) for name in ("cache", "persistent", "heuristic", "overlay")}
    assert used_factor(Executor(ConfigSelectorChain(policies=policies)), Scale()) == 3


# -- without an executor ---------------------------------------------------------------------------------------------


def test_without_an_executor_the_cores_registry_chooses(core: Registry) -> None:
    kernel = Scale()
    assert_close(kernel(X), X * 2)
    core.register(policy("a model", Config(3)), "model")
    assert_close(kernel(X), X * 3)
    core.remember(kernel.invocation(X).key, Config(4))
    assert_close(kernel(X), X * 4)
    with overlay_cache({kernel.invocation(X).key: Config(5)}):
        assert_close(kernel(X), X * 5)
    assert_close(kernel(X), X * 4)
    assert kernel.plan(X).origin == "memory"
    core.memory.put(kernel.invocation(X).key, Config(7))
    assert_close(kernel(X), X * 7)
    core.memory.clear()
    assert_close(kernel(X), X * 3)
    tuner = policy("the tuner", Config(6), measured=True, RANK=90)
    core.register(tuner, "tuner")
    assert_close([kernel(X), kernel(X)], [X * 6, X * 6])
    assert len(tuner.calls) == 1
    assert list(core.memory) == [kernel.invocation(X).key]


def test_explain_has_the_plans_of_forward_and_backward() -> None:
    explanation = Square().explain(X)
    assert explanation.plan.kernel.name == "Square.run"
    assert explanation.backward.plan.kernel.name == "Square_bwd.backward"
    assert "Square.run with Config(factor=2), by heuristic" in str(explanation)
    assert Scale().explain(jax.ShapeDtypeStruct((4,), jnp.float32)).backward is None


# -- keys and invocations --------------------------------------------------------------------------------------------


def test_an_invocation_is_an_immutable_call() -> None:
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


def test_the_key_is_the_same_however_the_call_is_made() -> None:
    kernel, policy_of_chain = Scale(), policy("listener")
    executor = Executor(ConfigSelectorChain(policies={"listener": policy_of_chain}))
    key = kernel.invocation(X, shift=1.0).key
    executor(kernel, X, shift=1.0)
    jax.jit(lambda x: executor(kernel, x, shift=1.0))(X + 1)
    executor(Scale(), np.asarray(X), shift=1.0)
    assert {key_of_call for key_of_call, _ in policy_of_chain.calls} == {key}
    assert len(policy_of_chain.calls) == 3
    keys: list[Any] = []
    jax.jit(lambda x: keys.append(kernel.invocation(x, shift=1.0).key))(X)
    assert keys == [key]


def test_different_calls_have_different_keys() -> None:
    def key(*args: Any, name: str = "echo", version: int = 1, **kwargs: Any) -> Any:
        kernel = Echo()
        kernel.name, kernel.version = name, version
        return kernel.invocation(*args, **kwargs).key

    keys = [
        key(X),
        key(X, X),
        key(X, shift=X),
        key(X, second=X),
        key({"x": X}),
        key(X, {"y": X}),
        key(X, [X]),
        key(jnp.ones(4)),
        key(X[None]),
        key(X.astype(jnp.bfloat16)),
        key(X, name="renamed"),
        key(X, version=2),
    ]
    assert len(set(keys)) == len(keys)
    assert keys[0] == key(jax.ShapeDtypeStruct((3,), jnp.float32))
    assert key(X, a=X, b=Y) == key(Y, b=X, a=Y)


def test_a_call_on_a_sharded_array_has_the_key_of_any_other_call() -> None:
    """The compiler partitions what a kernel object runs, so its configuration is for the whole array."""
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,))
    unsharded, kernel, executor = jnp.arange(8.0), Scale(), Executor()
    sharded = jax.device_put(unsharded, NamedSharding(mesh, P("a")))
    executor.selector.cache.put(default_key_builder_with_sharding(kernel, (sharded,), {}), Config(5))
    assert_close((executor(kernel, sharded), executor(kernel, unsharded)), (unsharded * 5, unsharded * 5))


def test_a_call_with_a_static_argument_without_content_runs_without_a_key() -> None:
    kernel, executor = Echo(), Executor()
    assert_close(executor(kernel, X, thing=object()), X)
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
    assert_close(registry.call("published", rows, rows), (2 * rows**2, (2 * rows**2).sum(0)))
    assert_close(registry.call("published", rows, axis=1, loud=True), (20 * rows, (20 * rows).sum(1)))
    assert_close(registry.call("published", rows, None, 1, cfg=Config(3)), (3 * rows, (3 * rows).sum(1)))
    with pytest.raises(TypeError, match="published: got an unexpected keyword argument 'lout'; did you mean 'loud'"):
        registry.call("published", rows, lout=True)
    with pytest.raises(TypeError, match="published: x takes an array; got dict"):
        registry.call("published", {"x": rows})


def test_a_registered_kernel_can_be_differentiated_and_mapped() -> None:
    registry, kernel = Registry(plugins=""), Published()
    registry.register(kernel)
    rows = jnp.stack([X, Y])

    def loss(call: Callable[..., Any], x: Any, y: Any) -> Any:
        product, total = call(x, y, axis=1, loud=True)
        return (product**2).sum() + (total * jnp.arange(total.size)).sum()

    def registry_call(*args: Any, **kwargs: Any) -> Any:
        return registry.call("published", *args, **kwargs)

    def plain_call(*args: Any, **kwargs: Any) -> Any:
        return tuple(kernel.run(*args, cfg=Config(), **kwargs).values())

    actual, expected = (jax.grad(partial(loss, call), (0, 1))(rows, rows + 1) for call in (registry_call, plain_call))
    assert_close(actual, expected)
    batches = jnp.stack([rows, rows + 1, rows - 2])
    actual, expected = (
        jax.vmap(jax.grad(partial(loss, call)), (0, None))(batches, rows) for call in (registry_call, plain_call)
    )
    assert_close(actual, expected)
    assert_close(jax.grad(lambda x: registry.call("published", x)[1].sum())(X), jnp.full(3, 2.0))


def test_a_registered_kernel_with_a_wrong_number_of_results_is_refused() -> None:
    class Unnamed(Published):
        results = ("out",)

    registry = Registry(plugins="")
    registry.register(Unnamed(), "unnamed")
    with pytest.raises(TypeError, match=r"published: returns 2 arrays; results names \('out',\)"):
        registry.call("published", X)


def test_registering_again_replaces_a_kernel() -> None:
    registry = Registry(plugins="")
    for factor in (3, 4):

        class Again(Scale):
            def heuristic_cfg(self, inv: Any, factor: int = factor) -> Config:
                return Config(factor)

        registry.register(Again())
        assert_close(registry.call("scale", X), X * factor)


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


def test_a_kernel_object_can_be_published_by_entry_points(distribution: MakeDistribution) -> None:
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
    assert_close(registry.call("tripled", X), X * 20)
    assert_close(registry.call("tripled", X, backend="run"), X * 2)
    assert_close(jax.grad(lambda x: registry.call("tripled", x).sum())(X), jnp.full(3, 7.0))
    assert registry.plan("tripled", X).kernel.provider == "tripled-dist 1.0"
    assert registry.kernel("tripled", "run").software["tripled.run"] == "tripled-dist 1.0"
