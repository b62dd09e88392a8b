"""Which values may be configurations, namely immutable ones, and what ``config_space`` may return."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_testing as testing
from ejkernel_classes import Kernel
from ejkernel_core import (
    Choice,
    Example,
    NoKernel,
    Operation,
    PluginError,
    Registry,
    Unsupported,
    hookimpl,
    overlay_cache,
)

X = np.array([1.0, 2.0], np.float32)


@attrs.frozen
class Config:
    n: Any = 2


@attrs.define
class Defined:
    n: int = 2


@attrs.define(unsafe_hash=True)
class Hashable:
    n: int = 2


@attrs.define
class Validated:
    n: int = attrs.field(default=2, validator=attrs.validators.instance_of(int))


@attrs.define(eq=False)
class ComparedByIdentity:
    n: int = 2


@dataclasses.dataclass(unsafe_hash=True)
class Data:
    n: int = 2


class Plain:
    n = 2


@dataclasses.dataclass(frozen=True)
class FrozenData:
    n: int = 2


class Inherited(Config):
    """A subclass of a frozen class, without a decorator."""


@attrs.frozen(eq=False)
class FrozenComparedByIdentity:
    n: int = 2


class Pair(NamedTuple):
    n: int = 2
    m: int = 3


class Speed(enum.Enum):
    FAST = 2


class Value:
    """An immutable class written by hand, which compares by value."""

    def __init__(self, n: int = 2) -> None:
        self._n = n

    @property
    def n(self) -> int:
        return self._n

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Value) and other.n == self.n

    def __hash__(self) -> int:
        return hash(self.n)


MUTABLE = {
    Defined: (Defined(), "a Defined is not frozen: use attrs.frozen"),
    Hashable: (Hashable(), "a Hashable is not frozen: use attrs.frozen"),
    Validated: (Validated(), "a Validated is not frozen: use attrs.frozen"),
    ComparedByIdentity: (ComparedByIdentity(), "a ComparedByIdentity is not frozen: use attrs.frozen"),
    Data: (Data(), "a Data is not frozen: use dataclass(frozen=True)"),
    Plain: (Plain(), "a Plain takes any attribute: use attrs.frozen"),
    SimpleNamespace: (SimpleNamespace(n=2), "a SimpleNamespace has no hash"),
    list: ([2], "a list has no hash"),
    dict: ({"n": 2}, "a dict has no hash"),
    set: ({2}, "a set has no hash"),
}
IMMUTABLE = [
    Config(),
    FrozenData(),
    Inherited(),
    FrozenComparedByIdentity(),
    Pair(),
    Speed.FAST,
    Value(),
    2,
    2.0,
    "2",
    None,
    (2, ("a", None)),
]


def kernel(cfg: Any, **names: Any) -> SimpleNamespace:
    """A kernel for ``double`` whose heuristic returns ``cfg``."""

    @hookimpl
    def heuristic_cfg(inv: object) -> Any:
        return cfg

    @hookimpl
    def run_backend(inv: dict[str, jax.Array], cfg: Any) -> jax.Array:
        return inv["x"] * 2

    return SimpleNamespace(**{"heuristic_cfg": heuristic_cfg, "run_backend": run_backend, **names})


@pytest.fixture
def registry() -> Registry:
    registry = Registry(plugins="")
    registry.register(Operation(name="double", signature=lambda x: None, outputs=lambda a: (a["x"],)))
    registry.register(kernel(Config(), Config=Config, PLATFORMS={"cpu": 10}), "double.good")
    return registry


def verdict(registry: Registry, name: str) -> tuple[str, str]:
    (match,) = (v for v in registry.plan("double", X).verdicts if v.name == name)
    return match.status, match.reason


# -- mutable values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MUTABLE)
def test_a_mutable_config_class_is_refused_when_the_kernel_is_loaded(registry: Registry, kind: type) -> None:
    cfg, message = MUTABLE[kind]
    with pytest.raises(PluginError) as error:
        registry.register(kernel(cfg, Config=kind), "double.bad")
    assert f"'double.bad', registered at run time: Config takes values that cannot be changed; {message}" in str(
        error.value
    )


@pytest.mark.parametrize("kind", MUTABLE)
def test_a_kernel_whose_heuristic_returns_a_mutable_value_is_broken(registry: Registry, kind: type) -> None:
    cfg, message = MUTABLE[kind]
    registry.register(kernel(cfg), "double.bad")
    np.testing.assert_array_equal(registry.call("double", X), 2 * X)
    assert verdict(registry, "double.bad") == ("broken", f"heuristic_cfg gives what can be changed: {message}")
    with pytest.raises(PluginError, match="heuristic_cfg gives what can be changed"):
        registry.call("double", X, backend="bad")


@pytest.mark.parametrize("cfg", [(2, [3]), Config([3])], ids=str)
def test_a_configuration_that_contains_a_list_is_mutable(registry: Registry, cfg: Any) -> None:
    registry.register(kernel(cfg, Config=type(cfg)), "double.bad")
    status, reason = verdict(registry, "double.bad")
    assert (status, "has no hash" in reason) == ("broken", True)


@pytest.mark.parametrize("cfg", IMMUTABLE, ids=lambda cfg: f"{type(cfg).__name__}-{str(cfg)[:20]}".partition("<")[0])
def test_an_immutable_value_can_be_a_configuration(registry: Registry, cfg: Any) -> None:
    registry.register(kernel(cfg), "double.untyped")
    registry.register(kernel(cfg, Config=type(cfg)), "double.typed")
    for backend in ("untyped", "typed"):
        np.testing.assert_array_equal(registry.call("double", X, backend=backend), 2 * X)
        assert verdict(registry, f"double.{backend}")[0] in ("able", "chosen")
    if cfg is not None:
        np.testing.assert_array_equal(registry.call("double", X, backend="typed", cfg=cfg), 2 * X)


@pytest.mark.parametrize("kind", MUTABLE)
def test_a_mutable_explicit_cfg_is_refused(registry: Registry, kind: type) -> None:
    cfg, message = MUTABLE[kind]
    registry.register(kernel(2, Config=object), "double.any")
    for method in (registry.plan, registry.explain):
        with pytest.raises(TypeError) as error:
            method("double", X, cfg=cfg)
        assert str(error.value) == f"double: cfg takes a value that cannot be changed; {message}"
    with pytest.raises(
        TypeError, match=r"double: cfg (takes a value that cannot be changed|is a static option and takes a hash)"
    ):
        registry.call("double", X, cfg=cfg)


def test_a_policy_that_chooses_a_mutable_value_is_skipped(registry: Registry) -> None:
    @hookimpl
    def select_config(candidates: Any) -> Choice:
        return Choice("untyped", Hashable(7), "a guess")

    registry.register(kernel(2, PLATFORMS={"cpu": 90}), "double.untyped")
    registry.register(SimpleNamespace(select_config=select_config), "guess")
    plan = registry.plan("double", X)
    assert (plan.cfg, plan.origin) == (2, "heuristic")
    message = "a guess chose what can be changed for double.untyped: a Hashable is not frozen: use attrs.frozen"
    assert verdict(registry, "guess") == ("broken", message)
    with overlay_cache({plan.invocation.key: Hashable(7)}):
        assert registry.plan("double", X).cfg == 2


def test_a_kernel_class_refuses_mutable_configurations() -> None:
    class Doubled(Kernel[Hashable, jax.Array]):
        def run(self, x: Any, *, cfg: Hashable) -> jax.Array:
            cfg.n += 1
            return x * 2

    with pytest.raises(
        PluginError,
        match=r"'Doubled.run', registered .*: Config takes values that cannot be changed; a Hashable is not frozen",
    ):
        Doubled()(jnp.asarray(X))
    with pytest.raises(TypeError, match="Doubled: cfg takes a value that cannot be changed; a Hashable is not frozen"):
        Doubled()(jnp.asarray(X), cfg=Hashable())


def test_an_untyped_kernel_class_refuses_mutable_configurations() -> None:
    class Doubled(Kernel):  # type: ignore[type-arg]
        def run(self, x: Any, *, cfg: Any) -> jax.Array:
            return x * 2

        def heuristic_cfg(self, inv: Any) -> Any:
            return Hashable()

    with pytest.raises(
        NoKernel, match="Doubled.run .*broken, heuristic_cfg gives what can be changed: a Hashable is not"
    ):
        Doubled()(jnp.asarray(X))
    with pytest.raises(TypeError, match="Doubled: cfg takes a value that cannot be changed; a Hashable is not frozen"):
        Doubled()(jnp.asarray(X), cfg=Hashable())
    np.testing.assert_array_equal(Doubled()(jnp.asarray(X), cfg=3), 2 * X)


# -- spaces ----------------------------------------------------------------------------------------------------------


def space_hook(make: Callable[[], Any]) -> Any:
    """The hook ``config_space`` that returns ``make()``."""

    @hookimpl
    def config_space(inv: object) -> Any:
        return make()

    return config_space


def one_then_error() -> Iterator[Config]:
    yield Config(4)
    raise ZeroDivisionError("blocks of 0")


def raising() -> list[Config]:
    raise BaseException("index out of bounds")


def refusing() -> list[Config]:
    raise Unsupported("not today")


def endless() -> Iterator[Any]:
    while True:
        yield "fast"


INVALID_SPACES = {
    "raises": (raising, [], "config_space raised BaseException: index out of bounds"),
    "refuses": (refusing, [], "config_space raised Unsupported: not today"),
    "raises halfway": (one_then_error, [Config(4)], "config_space raised ZeroDivisionError: blocks of 0"),
    "returns None": (lambda: None, [], "config_space raised TypeError: 'NoneType' object is not iterable"),
    "returns one": (Config, [], "config_space raised TypeError: 'Config' object is not iterable"),
    "gives None": (
        lambda: [Config(4), None],
        [Config(4)],
        "config_space gives a value of type NoneType, not its Config",
    ),
    "gives another type": (
        lambda: [4, Config(4)],
        [Config(4)],
        "config_space gives a value of type int, not its Config",
    ),
    "holds a list": (
        lambda: [Config([4]), Config(4)],
        [Config(4)],
        "config_space gives what can be changed: a Config has no hash: unhashable type: 'list'",
    ),
}


@pytest.mark.parametrize("name", INVALID_SPACES)
def test_an_invalid_space_is_reported_and_keeps_its_valid_configurations(registry: Registry, name: str) -> None:
    make, valid, message = INVALID_SPACES[name]
    registry.register(kernel(Config(), Config=Config, config_space=space_hook(make)), "double.bad")
    np.testing.assert_array_equal(registry.call("double", X), 2 * X)
    plan = registry.explain("double", X).plan
    assert plan is not None
    reasons = {verdict.name: (verdict.status, verdict.reason) for verdict in plan.verdicts}
    assert reasons == {"double.good": ("able", "with a lower rank"), "double.bad": ("chosen", message)}
    faults: list[str] = []
    bad = registry.kernel("double", "bad")
    assert list(bad.configurations(plan.invocation, faults.append)) == valid
    assert faults == [message]
    assert [bad.offers(plan.invocation, cfg) for cfg in (Config(4), Config(5))] == [bool(valid), False]


def test_an_explanation_reads_only_the_first_configurations_of_a_large_space(registry: Registry) -> None:
    numbers: list[int] = []

    def large_space() -> Iterator[Config]:
        for n in itertools.count():
            numbers.append(n)
            yield Config(n)

    registry.register(kernel(Config(), Config=Config, config_space=space_hook(large_space)), "double.large")
    assert registry.plan("double", X).kernel.name == "double.large"
    assert numbers == []
    assert "double.large (registered at run time): chosen\n" in str(registry.explain("double", X))
    assert 0 < len(numbers) < 100
    registry.register(kernel(Config(), Config=Config, config_space=space_hook(endless)), "double.large")
    assert "chosen, config_space gives a value of type str, not its Config\n" in str(registry.explain("double", X))
    large, inv = registry.kernel("double", "large"), registry.plan("double", X).invocation
    assert not large.offers(inv, Config())
    faults: set[str] = set()
    assert list(large.configurations(inv, faults.add)) == []
    assert faults == {"config_space gives a value of type str, not its Config"}


def test_the_space_of_a_kernel_without_a_heuristic_configuration_is_not_read(registry: Registry) -> None:
    @attrs.frozen
    class Interpreted:
        interpret: bool = True

    @hookimpl
    def check_cfg(cfg):
        assert cfg.interpret

    space = space_hook(refusing)
    bad = kernel(Interpreted(), Config=Interpreted, PLATFORMS={"abacus": 9}, config_space=space, check_cfg=check_cfg)
    registry.register(bad, "double.bead")
    explanation = str(registry.explain("double", X, cfg=Interpreted()))
    assert "double.bead (registered at run time): chosen\n" in explanation
    assert "refused, it runs on abacus; this is cpu\n" in str(registry.explain("double", X))


def test_without_a_space_the_only_configuration_is_the_heuristic(registry: Registry) -> None:
    kernel_of_good, inv = registry.kernel("double", "good"), registry.plan("double", X).invocation
    assert list(kernel_of_good.configurations(inv, pytest.fail)) == [Config()]
    assert kernel_of_good.offers(inv, Config(9))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (one_then_error, "configurations: double.bad on ones: config_space raised ZeroDivisionError: blocks of 0"),
        (
            lambda: ["fast"],
            "configurations: double.bad on ones: config_space gives a value of type str, not its Config",
        ),
        (lambda: [Config(4), Config(5), Config(4)], "configurations: double.bad on ones: gives Config(n=4) twice"),
        (itertools.count, "configurations: double.bad on ones: config_space gives a value of type int, not its Config"),
        (lambda: map(Config, itertools.count()), "configurations: double.bad on ones: there are more than"),
    ],
)
def test_the_proofs_check_the_space_of_each_example(registry: Registry, make: Callable[[], Any], message: str) -> None:
    example = Example("ones", "double", lambda draw: {"x": np.ones(8)})
    registry.register(kernel(Config(), Config=Config, config_space=space_hook(lambda: [Config(4)])), "double.bad")
    testing.configurations(registry, "double.bad", example)
    registry.register(kernel(Config(), Config=Config, config_space=space_hook(make)), "double.bad")
    with pytest.raises(AssertionError) as error:
        testing.configurations(registry, "double.bad", example)
    assert str(error.value).startswith(message)


def test_the_proofs_check_the_space_of_the_backward() -> None:
    registry = Registry(plugins="")

    class Doubled(Kernel[Config, jax.Array]):
        def run(self, x: Any, *, cfg: Config) -> jax.Array:
            return x * 2

        def custom_vjp(self, primals: Any, cfg: Config, kwargs: Any, cotangents: Any) -> Any:
            return (cotangents[0] * 2,)

    registry.register(Doubled())
    example = Example("ones", "Doubled", lambda draw: {"x": np.ones(8)}, wrt=("x",))
    testing.configurations(registry, "Doubled.run", example)
    backward = Doubled().plugin.backward
    bad = {name: getattr(backward, name) for name in ("Config", "heuristic_cfg", "run_backend")}
    registry.register(SimpleNamespace(**bad, config_space=space_hook(one_then_error)), "Doubled_bwd.run")
    with pytest.raises(
        AssertionError, match="configurations: Doubled_bwd.run on ones: config_space raised ZeroDivision"
    ):
        testing.configurations(registry, "Doubled.run", example)


def test_kernel_proofs_check_the_space(registry: Registry) -> None:
    example = Example("ones", "double", lambda draw: {"x": np.ones(8)})
    registry.register(kernel(Config(), Config=Config, config_space=space_hook(one_then_error)), "double.bad")

    class Proofs(testing.KernelProofs):
        kernel = "double.bad"

    Proofs.registry = registry
    with pytest.raises(AssertionError, match="configurations: double.bad on ones: config_space raised ZeroDivision"):
        Proofs().test_configurations(example)
    Proofs.kernel = "double.good"
    Proofs().test_configurations(example)
