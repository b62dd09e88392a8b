"""Options that are equal in Python but differ in type or content are different calls."""

from __future__ import annotations

import dataclasses
import itertools
from decimal import Decimal
from types import SimpleNamespace
from typing import Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_classes import Kernel
from ejkernel_core import Operation, Registry, hookimpl
from ejkernel_core._content import plain
from ejkernel_core.extend import content, short_hash


class Pair(NamedTuple):
    a: Any
    b: Any = 2


class Couple(NamedTuple):
    a: Any
    b: Any = 2


@attrs.frozen
class Config:
    n: Any
    note: Any = attrs.field(default="", eq=False)


@attrs.frozen
class ByLength:
    n: Any = attrs.field(eq=len)


@dataclasses.dataclass(frozen=True)
class Plain:
    n: Any
    note: Any = dataclasses.field(default="", compare=False)


#: Within a group all values differ in type or content, and most compare equal.
GROUPS: dict[str, tuple[Any, ...]] = {
    "numbers": (1, 1.0, True, 1 + 0j, np.float32(1), np.int64(1), np.float64(1), np.bool_(True), Decimal("1.0")),
    "zeros": (0, 0.0, -0.0, False, complex(0.0, -0.0), np.float32(0.0), np.float32(-0.0), np.float16(-0.0)),
    "decimals": (Decimal("1.0"), Decimal("1.00"), Decimal(1)),
    "tuples": ((1, 2), (True, 2), (1.0, 2), Pair(1), Couple(1), Pair(True), Pair(1, 2.0), Pair((0.0,)), Pair((-0.0,))),
    "sets": (frozenset({1}), frozenset({True}), frozenset({1.0}), frozenset({(1, 0.0)}), frozenset({(1, -0.0)})),
    "attrs": (Config(1), Config(True), Config(1, "noted"), Config((1,)), Config((1.0,)), Config(Config(1, "within"))),
    "attrs by another comparison": (ByLength((1, 2)), ByLength((3, 4)), ByLength((3, 4.0))),
    "dataclasses": (Plain(1), Plain(1.0), Plain(1, "noted"), Plain(Plain(1, 1)), Plain(Plain(1, True))),
    "ranges": (range(0), range(1, 1), range(0, 0, 2)),
}
VALUES = tuple(itertools.chain.from_iterable(GROUPS.values()))
X = jnp.arange(3.0)


def index(value: Any) -> int:
    """The position of a value in ``VALUES``, found by its type and ``repr``."""
    identity = lambda v: (type(v), repr(v), getattr(v, "note", None))
    return [identity(v) for v in VALUES].index(identity(value))


def filled_with_index(value: Any, result: Any) -> Any:
    return result * 0 + index(value)


@pytest.fixture
def registry() -> Registry:
    registry = Registry(plugins="")
    registry.register(
        Operation(name="reveal", signature=lambda x, *, option=None: None, outputs=lambda a: (a["x"],)),
    )

    @hookimpl
    def heuristic_cfg(inv: Any) -> Any:
        return Config(1)

    def plugin(value_of: Any) -> Any:
        @hookimpl
        def run_backend(inv: Any, cfg: Any) -> Any:
            return filled_with_index(value_of(inv, cfg), inv["x"])

        return SimpleNamespace(heuristic_cfg=heuristic_cfg, run_backend=run_backend, Config=object)

    registry.register(plugin(lambda inv, cfg: inv["option"]), "reveal.option")
    registry.register(plugin(lambda inv, cfg: cfg), "reveal.cfg")
    return registry


class Reveal(Kernel[Any, Any]):
    def run(self, x: Any, option: Any, *, cfg: Any) -> Any:
        return filled_with_index(option if cfg == "heuristic" else cfg, x)

    def heuristic_cfg(self, inv: Any) -> Any:
        return "heuristic"


def calls(registry: Registry) -> dict[str, Any]:
    kernel = Reveal()
    return {
        "option": lambda x, value: registry.call("reveal", x, option=value, backend="option"),
        "cfg": lambda x, value: registry.call("reveal", x, backend="cfg", cfg=value),
        "class": lambda x, value: kernel(x, value),
        "class cfg": lambda x, value: kernel(x, 1, cfg=value),
    }


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("parameter", ["option", "cfg", "class", "class cfg"])
def test_each_value_is_a_separate_call(registry: Registry, parameter: str, group: str) -> None:
    call, values = calls(registry)[parameter], GROUPS[group]
    if parameter == "option":  # NumPy's scalars are the plain values there
        values = tuple(value for value in values if plain(value) is value)
    if parameter == "class":  # a kernel class takes a tuple as a pytree
        values = tuple(value for value in values if not isinstance(value, (tuple, np.generic)))
    expected = [index(value) for value in values]
    for order in (values, values[::-1], values):
        assert sorted(float(call(X, value)[0]) for value in order) == sorted(expected)
        assert [float(call(X, value)[0]) for value in values] == expected
    results = jax.jit(lambda x: [call(x, value)[0] for value in values])(X)
    assert [float(result) for result in results] == expected


@pytest.mark.parametrize("group", GROUPS)
def test_each_value_has_its_own_content(group: str) -> None:
    assert len({content(value) for value in GROUPS[group]}) == len(GROUPS[group])
    for value in GROUPS[group]:
        assert content(value) == content(value)


@pytest.mark.parametrize("group", [group for group in GROUPS if group not in ("decimals", "ranges", "numbers")])
def test_each_value_has_its_own_hash(group: str) -> None:
    assert len({short_hash(value) for value in GROUPS[group]}) == len(GROUPS[group])


def test_an_unhashable_option_is_refused(registry: Registry) -> None:
    for value in ([1], {1}, {"a": 1}, ([1],), Config([1])):
        with pytest.raises(TypeError, match="option is a static option and takes a hashable value"):
            registry.call("reveal", X, option=value, backend="option")


def test_the_hash_of_a_dtype_has_byte_order_and_fields() -> None:
    descriptions = (
        ">f4",
        "<f4",
        [("a", "f4")],
        [("b", "f4")],
        [("a", "f4"), ("b", "f4")],
        [("a", "f4", (2,))],
        [("a", ">f4")],
    )
    assert len({short_hash(np.dtype(description)) for description in descriptions}) == len(descriptions)
    packed, padded = np.dtype([("a", "i1"), ("b", "i4")]), np.dtype([("a", "i1"), ("b", "i4")], align=True)
    assert short_hash(packed) != short_hash(padded)
    assert short_hash(np.dtype("float32")) == short_hash(jnp.float32)
