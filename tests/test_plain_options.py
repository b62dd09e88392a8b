"""Options may be NumPy's scalars, enums and other subclasses of Python's types: they are the plain values everywhere."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_core
from ejkernel_core import AutotunePolicy, Operation, Registry, hookimpl
from ejkernel_core._content import plain
from ejkernel_core.extend import OPERATIONS, content

REGISTRY = ejkernel_core.registry
PLAIN_TYPES = (type(None), bool, int, float, str, tuple)


class Score(enum.StrEnum):
    SOFTMAX = "softmax"
    SWISH = "silu_gated"


class TextEnum(str, enum.Enum):  # noqa: UP042  (the older kind, whose ``str`` and ``format`` are not its text)
    SOFTMAX = "softmax"


class Number(enum.IntEnum):
    TWO = 2


class Text(str):
    __slots__ = ()


def variants(value: Any) -> list[Any]:
    """The same value in other types."""
    if isinstance(value, bool):
        return [np.bool_(value)]
    if isinstance(value, str):
        kinds = [enum.StrEnum("Kind", {"MEMBER": value}), enum.Enum("Kind", {"MEMBER": value}, type=str)]
        return [np.str_(value), Text(value), *(kind["MEMBER"] for kind in kinds)]
    if isinstance(value, int):
        return [np.int64(value), *([np.int8(value)] if abs(value) < 100 else [])]
    if isinstance(value, float):
        return [np.float64(value), *([np.float32(value)] if float(np.float32(value)) == value else [])]
    if isinstance(value, tuple):
        return [*zip(*map(variants, value), strict=False)]
    return []


def options_of_examples(op: str) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Every value of every option of an operation, once, with the arguments of an example that has it."""
    operation, values = REGISTRY.operation(op), set()
    for example in operation.examples() if operation.examples else ():
        if example.uses or example.long:
            continue
        call = {**example.arguments(0)}
        for option, value in call.items():
            if option not in operation.arrays and (option, content(value)) not in values and variants(value):
                values.add((option, content(value)))
                yield {name: example.rounded(argument) for name, argument in call.items()}, option, value


def is_plain(value: Any) -> bool:
    return all(map(is_plain, value)) if type(value) is tuple else type(value) in PLAIN_TYPES


@pytest.mark.parametrize("op", REGISTRY.names(OPERATIONS))
def test_an_option_of_another_type_is_its_plain_value(op: str) -> None:
    options = set()
    for call, option, value in options_of_examples(op):
        expected = REGISTRY.invocation(op, **call)
        options.add(option)
        for variant in variants(value):
            inv = REGISTRY.invocation(op, **{**call, option: variant})
            assert inv.tuning_keys == expected.tuning_keys, (option, variant)
            assert content(inv[option]) == content(expected[option])
            assert is_plain(inv[option]) or not is_plain(expected[option])  # as a dtype, which has a text
    assert options >= OPTIONS.get(op, set())


#: Options that the examples are known to have, so that the test above does not pass without any.
OPTIONS = {
    "flash_attention": {"causal", "sliding_window", "softmax_scale"},
    "grouped_matmul": {"activation", "transpose_rhs", "precision"},
    "moe_route": {"score", "k", "renormalize"},
    "rms_norm": {"epsilon", "weight_offset"},
    "rms_norm_quantized": {"quantize"},
}


def scale(x, *, mode="plain", factor=1): ...


@pytest.fixture
def registry() -> tuple[Registry, list[Any]]:
    """A registry with one operation, and the options of every trace of its kernel."""
    options: list[Any] = []

    @hookimpl
    def run_backend(inv):
        options.append((inv["mode"], inv["factor"]))
        return inv["x"] * inv["factor"]

    from types import SimpleNamespace

    registry = Registry(plugins="")
    registry.register(Operation(name="scale", signature=scale, outputs=lambda arguments: (arguments["x"],)))
    registry.register(SimpleNamespace(run_backend=run_backend), "scale.two")
    return registry, options


def test_a_call_is_compiled_once_for_all_types_of_an_option(registry: Any) -> None:
    calls, options = registry
    x = jnp.arange(3.0)
    for mode in ("softmax", np.str_("softmax"), Score.SOFTMAX, TextEnum.SOFTMAX, Text("softmax")):
        for factor in (2, np.int64(2), np.int8(2), Number.TWO):
            result = calls.call("scale", x, mode=mode, factor=factor, backend=Text("two"))
            np.testing.assert_array_equal(result, 2 * x)
    assert options == [("softmax", 2)]
    assert [*map(type, options[0])] == [str, int]


def test_the_plan_and_the_explanation_have_plain_values(registry: Any) -> None:
    calls, _ = registry
    text = str(calls.explain("scale", jnp.ones(3), mode=Score.SOFTMAX, factor=np.int64(2), backend=Text("two")))
    assert "mode='softmax', factor=2)" in text
    assert "np." not in text


def test_names_of_gradients_may_be_numpys() -> None:
    x = jnp.ones((2, 8))
    arrays = {"x": x, "out": x, "sum": x, "rstd": jnp.ones(2), "d_out": x}
    inv = REGISTRY.invocation("rms_norm_bwd", **arrays, wrt=(np.str_("x"),))
    assert inv["wrt"] == ("x",)
    assert is_plain(inv["wrt"])


def test_a_policy_takes_a_text_of_any_type() -> None:
    assert content(AutotunePolicy(np.str_("on_miss"))) == content(AutotunePolicy("on_miss"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value", [None, True, 1, 1.5, "a", (1, ("a", None)), np.longdouble(1), np.datetime64("2026-11-27"), 1j, b"a", len]
)
def test_other_values_stay_as_they_are(value: Any) -> None:
    assert plain(value) is value
