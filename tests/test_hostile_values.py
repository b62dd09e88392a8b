"""Values whose ``repr`` raises, is huge or has many lines: they end no explanation, no error message and no display."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attrs
import jax.numpy as jnp
import pytest

import ejkernel_core
from ejkernel_core import (
    AutotunePolicy,
    Choice,
    ConfigCache,
    NoConfig,
    Operation,
    Record,
    RecordError,
    Registry,
    Unsupported,
    hookimpl,
    overlay_cache,
    policy_override,
    stable_json,
    to_json,
)
from ejkernel_core.extend import Entry, Progress, Trial

X = jnp.arange(1.0, 4.0)


@attrs.frozen(repr=False)
class Raising:
    factor: Any

    def __repr__(self) -> str:
        raise ZeroDivisionError("no text")


@attrs.frozen(repr=False)
class Huge:
    factor: Any

    def __repr__(self) -> str:
        return "x" * 1_000_000


@attrs.frozen(repr=False)
class ManyLines:
    factor: Any

    def __repr__(self) -> str:
        return "first\nsecond\n" * 1000


@attrs.frozen(repr=False)
class NoText:
    factor: Any

    def __repr__(self) -> str:
        return 3  # type: ignore[return-value]


def scale(x, *, mode=None): ...


@pytest.fixture(params=[Raising, Huge, ManyLines, NoText])
def hostile(request) -> Any:
    """The class of a configuration, which is an option too."""
    return request.param


@pytest.fixture
def registry(hostile) -> Registry:
    @hookimpl
    def heuristic_cfg(inv):
        return hostile(2)

    @hookimpl
    def check_cfg(inv, cfg):
        if cfg.factor > 2:
            raise Unsupported("too large")

    @hookimpl
    def run_backend(inv, cfg):
        return inv["x"] * cfg.factor

    registry = Registry(plugins="")
    registry.register(Operation(name="scale", signature=scale, outputs=lambda arguments: (arguments["x"],)))
    registry.register(
        SimpleNamespace(Config=hostile, heuristic_cfg=heuristic_cfg, check_cfg=check_cfg, run_backend=run_backend),
        "scale.two",
    )
    return registry


def is_short(text: str, lines: int = 20) -> bool:
    return len(text) < 3000 and len(text.splitlines()) <= lines


def test_a_call_runs_and_is_explained(registry: Registry, hostile: Any) -> None:
    assert registry.call("scale", X, mode=hostile(1)).tolist() == [2, 4, 6]
    explanation = registry.explain("scale", X, mode=hostile(1))
    plan = registry.plan("scale", X, mode=hostile(1))
    for value in (explanation, plan, plan.invocation, plan.choice, Record(plan.cfg), plan.invocation.call_text):
        assert is_short(str(value))
        assert is_short(repr(value))
    assert "scale.two with " in str(explanation)
    assert is_short(explanation._repr_html_())


class HostileText(str):
    """A text that raises whenever it is shown."""

    def _fail(self, *arguments: object) -> Any:
        raise ZeroDivisionError("no text")

    __str__ = __repr__ = __format__ = isprintable = _fail


def explain_choice(registry: Registry, **fields: Any) -> ejkernel_core.Explanation:
    """The explanation of a call for which a policy gives this choice."""

    @hookimpl
    def select_config(inv, candidates):
        return Choice(**{"backend": "two", "cfg": candidates[0].cfg, "origin": "a policy", **fields})

    registry.register(SimpleNamespace(select_config=select_config), "guess")
    assert registry.call("scale", X).tolist() == (X * 2).tolist()
    return registry.explain("scale", X)


#: For what does not depend on the class of the configuration.
one_class = pytest.mark.parametrize("hostile", [Raising], indirect=True)


@one_class
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"origin": Raising(3)}, "it gives a Raising for an origin"),
        ({"key": Raising(3)}, "a policy gives a Raising for a key"),
        ({"record": Record(3, "two", Raising(3))}, "a policy gives a Raising for a provenance"),
        ({"backend": Raising(3)}, "a policy gives a Raising for a backend"),
    ],
)
def test_a_choice_with_a_field_of_another_type_is_a_fault_of_its_policy(
    registry: Registry, fields: dict[str, Any], reason: str
) -> None:
    explanation = explain_choice(registry, **fields)
    assert explanation.plan.origin == "heuristic"
    assert f"guess (registered at run time): broken, {reason}" in str(explanation)


@one_class
def test_the_texts_of_a_choice_are_shown_with_escapes(registry: Registry) -> None:
    origin, escaped = "\x1b[31m\ud800", r"\u001b[31m\ud800"
    explanation = explain_choice(registry, origin=origin, note=origin)
    assert explanation.plan.origin == origin
    assert f", by {escaped} ({escaped})\n" in str(explanation)
    for text in (str(explanation), repr(explanation), explanation._repr_html_(), explanation.summary):
        assert escaped in text
        assert all(character.isprintable() or character == "\n" for character in text)


@one_class
def test_a_text_of_another_class_is_taken_as_a_plain_one(registry: Registry) -> None:
    text = HostileText("two")
    explanation = explain_choice(registry, backend=text, origin=text, note=text)
    assert (type(explanation.plan.origin), explanation.plan.origin) == (str, "two")
    assert ", by two (two)\n" in str(explanation)


def test_progress_is_shown(registry: Registry, hostile: Any) -> None:
    trials = (Trial("two", hostile(2), "running"),)
    progress = Progress(registry.invocation("scale", X), (Entry("two", hostile(2), 1.0),), 1.0, 2.0, trials=trials)
    assert str(progress).startswith("tuning scale: 1 of 1 measured")
    assert is_short(str(progress))
    assert "Entry(backend='two'" in repr(progress)


ERRORS: dict[str, tuple[type[Exception], str, Callable[[Registry, Any], Any]]] = {
    "no kernel": (ejkernel_core.NoKernel, "too large", lambda r, h: r.call("scale", X, mode=h(1), cfg=h(3))),
    "other type": (ejkernel_core.NoKernel, "left out", lambda r, h: r.plan("scale", X, cfg=SimpleConfig(h(1)))),
    "backend": (TypeError, "backend takes a name", lambda r, h: r.call("scale", X, backend=h(1))),
    "operation": (TypeError, "op: takes the name", lambda r, h: r.call(h(1))),
    "an array": (TypeError, "x takes an array", lambda r, h: r.call("scale", h(1))),
    "unhashable": (TypeError, "takes a hashable value", lambda r, h: r.call("scale", X, mode=[h(1)])),
    "validate": (TypeError, "validate takes", lambda r, h: r.call("scale", X, validate=h(1))),
    "mutable cfg": (TypeError, "cannot be changed", lambda r, h: r.plan("scale", X, cfg=[h(1)])),
    "mode": (ValueError, "mode: takes", lambda r, h: AutotunePolicy(h(1))),
    "budget": (TypeError, "budget_s: takes", lambda r, h: policy_override(budget_s=h(1))),
    "positional": (TypeError, "by name", lambda r, h: policy_override(h(1))),
    "maxsize": (TypeError, "maxsize: takes", lambda r, h: ConfigCache(h(1))),
    "name": (TypeError, "the name takes a text", lambda r, h: r.register(SimpleNamespace(), h(1))),
    "version": (ValueError, "version takes", lambda r, h: Operation(name="a", signature=scale, version=h(1))),
    "rank": (
        ejkernel_core.PluginError,
        "RANK takes",
        lambda r, h: r.register(SimpleNamespace(select_config=None, RANK=h(1)), "policy"),
    ),
    "content": (TypeError, "no content", lambda r, h: stable_json(Opaque(h))),
    "json": (RecordError, "cannot be written|would be read back|has no", lambda r, h: to_json(h(Opaque(h)))),
    "no configuration": (NoConfig, "no configuration is remembered", lambda r, h: error_on_miss(r, h)),
    "overlay": (Unsupported, "the overlay has", lambda r, h: with_overlay(r, h)),
}


@attrs.frozen
class SimpleConfig:
    inner: Any


class Opaque:
    """Has no content that could be written down."""

    def __init__(self, hostile: Any) -> None:
        self.hostile = hostile

    def __repr__(self) -> str:
        return repr(self.hostile(1))


def error_on_miss(registry: Registry, hostile: Any) -> None:
    with policy_override(mode="error_on_miss"):
        registry.plan("scale", X, mode=hostile(1))


def with_overlay(registry: Registry, hostile: Any) -> None:
    inv = registry.invocation("scale", X)
    cache = ConfigCache()
    cache.put(inv.key, Record(hostile(3), "two"))
    with overlay_cache(cache):
        registry.plan("scale", X)


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_has_its_own_type_and_words(name: str, registry: Registry, hostile: Any) -> None:
    kind, words, make = ERRORS[name]
    with pytest.raises(kind, match=words) as error:
        make(registry, hostile)
    assert type(error.value) is kind
    assert is_short(str(error.value))
