"""What a configuration may be, and what a space of them: a kernel's configuration stays as it was chosen."""

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
class Itself:
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
    """Of a frozen class, without a decorator of its own."""


@attrs.frozen(eq=False)
class OnlyItself:
    n: int = 2


class Pair(NamedTuple):
    n: int = 2
    m: int = 3


class Speed(enum.Enum):
    FAST = 2


class Value:
    """Written by hand, with a value's equality."""

    def __init__(self, n: int = 2) -> None:
        self._n = n

    @property
    def n(self) -> int:
        return self._n

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Value) and other.n == self.n

    def __hash__(self) -> int:
        return hash(self.n)


CHANGEABLE = {
    Defined: (Defined(), "a Defined is not frozen: use attrs.frozen"),
    Hashable: (Hashable(), "a Hashable is not frozen: use attrs.frozen"),
    Validated: (Validated(), "a Validated is not frozen: use attrs.frozen"),
    Itself: (Itself(), "a Itself is not frozen: use attrs.frozen"),
    Data: (Data(), "a Data is not frozen: use dataclass(frozen=True)"),
    Plain: (Plain(), "a Plain takes any attribute: use attrs.frozen"),
    SimpleNamespace: (SimpleNamespace(n=2), "a SimpleNamespace has no hash"),
    list: ([2], "a list has no hash"),
    dict: ({"n": 2}, "a dict has no hash"),
    set: ({2}, "a set has no hash"),
}
FIT = [
    Config(),
    FrozenData(),
    Inherited(),
    OnlyItself(),
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
    """``double`` by a kernel whose heuristic gives this."""

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
    (mine,) = (v for v in registry.plan("double", X).verdicts if v.name == name)
    return mine.status, mine.reason


# -- what can be changed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CHANGEABLE)
def test_a_config_that_can_be_changed_is_refused_where_it_is_loaded(registry: Registry, kind: type) -> None:
    cfg, told = CHANGEABLE[kind]
    with pytest.raises(PluginError) as caught:
        registry.register(kernel(cfg, Config=kind), "double.bad")
    assert f"'double.bad', registered at run time: Config takes values that cannot be changed; {told}" in str(
        caught.value
    )


@pytest.mark.parametrize("kind", CHANGEABLE)
def test_a_heuristic_that_gives_what_can_be_changed_is_a_broken_kernel(registry: Registry, kind: type) -> None:
    cfg, told = CHANGEABLE[kind]
    registry.register(kernel(cfg), "double.bad")
    np.testing.assert_array_equal(registry.call("double", X), 2 * X)
    assert verdict(registry, "double.bad") == ("broken", f"heuristic_cfg gives what can be changed: {told}")
    with pytest.raises(PluginError, match="heuristic_cfg gives what can be changed"):
        registry.call("double", X, backend="bad")


@pytest.mark.parametrize("cfg", [(2, [3]), Config([3])], ids=str)
def test_what_holds_what_can_be_changed_can_be_changed(registry: Registry, cfg: Any) -> None:
    registry.register(kernel(cfg, Config=type(cfg)), "double.bad")
    status, reason = verdict(registry, "double.bad")
    assert (status, "has no hash" in reason) == ("broken", True)


@pytest.mark.parametrize("cfg", FIT, ids=lambda cfg: f"{type(cfg).__name__}-{str(cfg)[:20]}".partition("<")[0])
def test_what_stays_is_a_configuration(registry: Registry, cfg: Any) -> None:
    registry.register(kernel(cfg), "double.untyped")
    registry.register(kernel(cfg, Config=type(cfg)), "double.typed")
    for backend in ("untyped", "typed"):
        np.testing.assert_array_equal(registry.call("double", X, backend=backend), 2 * X)
        assert verdict(registry, f"double.{backend}")[0] in ("able", "chosen")
    if cfg is not None:
        np.testing.assert_array_equal(registry.call("double", X, backend="typed", cfg=cfg), 2 * X)


@pytest.mark.parametrize("kind", CHANGEABLE)
def test_a_cfg_that_can_be_changed_is_refused(registry: Registry, kind: type) -> None:
    cfg, told = CHANGEABLE[kind]
    registry.register(kernel(2, Config=object), "double.any")
    for ask in (registry.plan, registry.explain):
        with pytest.raises(TypeError) as caught:
            ask("double", X, cfg=cfg)
        assert str(caught.value) == f"double: cfg takes a value that cannot be changed; {told}"
    with pytest.raises(
        TypeError, match=r"double: cfg (takes a value that cannot be changed|is a static option and has to be hash)"
    ):
        registry.call("double", X, cfg=cfg)


def test_a_policy_that_chooses_what_can_be_changed_is_passed_over(registry: Registry) -> None:
    @hookimpl
    def select_config(candidates: Any) -> Choice:
        return Choice("untyped", Hashable(7), "a guess")

    registry.register(kernel(2, PLATFORMS={"cpu": 90}), "double.untyped")
    registry.register(SimpleNamespace(select_config=select_config), "guess")
    plan = registry.plan("double", X)
    assert (plan.cfg, plan.origin) == (2, "heuristic")
    told = "a guess chose what can be changed for double.untyped: a Hashable is not frozen: use attrs.frozen"
    assert verdict(registry, "guess") == ("broken", told)
    with overlay_cache({plan.invocation.key: Hashable(7)}):
        assert registry.plan("double", X).cfg == 2


def test_a_kernel_class_takes_no_configurations_that_can_be_changed() -> None:
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


def test_an_untyped_kernel_class_takes_none_either() -> None:
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


def spaced(make: Callable[[], Any]) -> Any:
    """The hook that gives what this makes."""

    @hookimpl
    def config_space(inv: object) -> Any:
        return make()

    return config_space


def halfway() -> Iterator[Config]:
    yield Config(4)
    raise ZeroDivisionError("blocks of 0")


def panicking() -> list[Config]:
    raise BaseException("index out of bounds")


def refusing() -> list[Config]:
    raise Unsupported("not today")


def endless() -> Iterator[Any]:
    while True:
        yield "fast"


NO_SPACE = {
    "raises": (panicking, [], "config_space raised BaseException: index out of bounds"),
    "refuses": (refusing, [], "config_space raised Unsupported: not today"),
    "raises halfway": (halfway, [Config(4)], "config_space raised ZeroDivisionError: blocks of 0"),
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


@pytest.mark.parametrize("name", NO_SPACE)
def test_what_is_no_space_is_told_and_costs_only_what_is_wrong(registry: Registry, name: str) -> None:
    make, good, told = NO_SPACE[name]
    registry.register(kernel(Config(), Config=Config, config_space=spaced(make)), "double.bad")
    np.testing.assert_array_equal(registry.call("double", X), 2 * X)
    plan = registry.explain("double", X).plan
    assert plan is not None
    reasons = {verdict.name: (verdict.status, verdict.reason) for verdict in plan.verdicts}
    assert reasons == {"double.good": ("able", ""), "double.bad": ("chosen", told)}
    faults: list[str] = []
    bad = registry.kernel("double", "bad")
    assert list(bad.configurations(plan.invocation, faults.append)) == good
    assert faults == [told]
    assert [bad.offers(plan.invocation, cfg) for cfg in (Config(4), Config(5))] == [bool(good), False]


def test_of_a_large_space_an_explanation_looks_at_the_first_few(registry: Registry) -> None:
    given: list[int] = []

    def counting() -> Iterator[Config]:
        for n in itertools.count():
            given.append(n)
            yield Config(n)

    registry.register(kernel(Config(), Config=Config, config_space=spaced(counting)), "double.large")
    assert registry.plan("double", X).kernel.name == "double.large"
    assert given == []
    assert "double.large (registered at run time): chosen\n" in str(registry.explain("double", X))
    assert 0 < len(given) < 100
    registry.register(kernel(Config(), Config=Config, config_space=spaced(endless)), "double.large")
    assert "chosen, config_space gives a value of type str, not its Config\n" in str(registry.explain("double", X))
    large, inv = registry.kernel("double", "large"), registry.plan("double", X).invocation
    assert not large.offers(inv, Config())
    faults: set[str] = set()
    assert list(large.configurations(inv, faults.add)) == []
    assert faults == {"config_space gives a value of type str, not its Config"}


def test_a_kernel_that_was_not_asked_is_not_asked_for_its_space(registry: Registry) -> None:
    @attrs.frozen
    class Interpreted:
        interpret: bool = True

    @hookimpl
    def check_cfg(cfg):
        assert cfg.interpret

    space = spaced(refusing)
    bad = kernel(Interpreted(), Config=Interpreted, PLATFORMS={"abacus": 9}, config_space=space, check_cfg=check_cfg)
    registry.register(bad, "double.bead")
    told = str(registry.explain("double", X, cfg=Interpreted()))
    assert "double.bead (registered at run time): chosen\n" in told
    assert "refused, it runs on abacus; this is cpu\n" in str(registry.explain("double", X))


def test_without_a_space_there_is_the_heuristics_configuration(registry: Registry) -> None:
    good, inv = registry.kernel("double", "good"), registry.plan("double", X).invocation
    assert list(good.configurations(inv, pytest.fail)) == [Config()]
    assert good.offers(inv, Config(9))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (halfway, "configurations: double.bad on ones: config_space raised ZeroDivisionError: blocks of 0"),
        (
            lambda: ["fast"],
            "configurations: double.bad on ones: config_space gives a value of type str, not its Config",
        ),
        (lambda: [Config(4), Config(5), Config(4)], "configurations: double.bad on ones: gives Config(n=4) twice"),
        (itertools.count, "configurations: double.bad on ones: config_space gives a value of type int, not its Config"),
        (lambda: map(Config, itertools.count()), "configurations: double.bad on ones: there are more than"),
    ],
)
def test_the_proofs_look_at_the_space_of_each_case(registry: Registry, make: Callable[[], Any], told: str) -> None:
    case = testing.Case("ones", "double", lambda draw: {"x": np.ones(8)})
    registry.register(kernel(Config(), Config=Config, config_space=spaced(lambda: [Config(4)])), "double.bad")
    testing.configurations(registry, "double.bad", case)
    registry.register(kernel(Config(), Config=Config, config_space=spaced(make)), "double.bad")
    with pytest.raises(AssertionError) as caught:
        testing.configurations(registry, "double.bad", case)
    assert str(caught.value).startswith(told)


def test_the_proofs_look_at_the_space_of_the_backward() -> None:
    registry = Registry(plugins="")

    class Doubled(Kernel[Config, jax.Array]):
        def run(self, x: Any, *, cfg: Config) -> jax.Array:
            return x * 2

        def custom_vjp(self, primals: Any, cfg: Config, kwargs: Any, cotangents: Any) -> Any:
            return (cotangents[0] * 2,)

    registry.register(Doubled())
    case = testing.Case("ones", "Doubled", lambda draw: {"x": np.ones(8)}, wrt=("x",))
    testing.configurations(registry, "Doubled.run", case)
    backward = Doubled().plugin.backward
    bad = {name: getattr(backward, name) for name in ("Config", "heuristic_cfg", "run_backend")}
    registry.register(SimpleNamespace(**bad, config_space=spaced(halfway)), "Doubled_bwd.run")
    with pytest.raises(
        AssertionError, match="configurations: Doubled_bwd.run on ones: config_space raised ZeroDivision"
    ):
        testing.configurations(registry, "Doubled.run", case)


def test_kernel_proofs_have_a_test_of_the_space(registry: Registry) -> None:
    case = testing.Case("ones", "double", lambda draw: {"x": np.ones(8)})
    registry.register(kernel(Config(), Config=Config, config_space=spaced(halfway)), "double.bad")

    class Proofs(testing.KernelProofs):
        kernel = "double.bad"

    Proofs.registry = registry
    with pytest.raises(AssertionError, match="configurations: double.bad on ones: config_space raised ZeroDivision"):
        Proofs().test_configurations(case)
    Proofs.kernel = "double.good"
    Proofs().test_configurations(case)
