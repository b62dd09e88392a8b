"""Scopes hold where they are entered and nowhere else, and JAX traces again where the content is another, only."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_core
from ejkernel_core import (
    AutotunePolicy,
    ConfigCache,
    Operation,
    Record,
    Registry,
    Unsupported,
    _scopes,
    hookimpl,
    overlay_cache,
    policy_override,
)
from ejkernel_xla.flash_attention import backward as xla_backward

X = jnp.arange(1.0, 6.0)


@attrs.frozen
class Config:
    factor: int = 2
    name: Any = None


def scale(x): ...


class Counted:
    """``scale`` in a registry of its own, with the factors that were traced."""

    def __init__(self) -> None:
        self.traced: list[int] = []
        traced = self.traced

        @hookimpl
        def heuristic_cfg(inv):
            return Config()

        @hookimpl
        def run_backend(inv, cfg):
            traced.append(cfg.factor)
            return inv["x"] * cfg.factor

        self.registry = Registry(plugins="ejkernel-tuning")
        self.registry.register(Operation(name="scale", signature=scale, outputs=lambda a: (a["x"],)))
        self.registry.register(
            SimpleNamespace(Config=Config, heuristic_cfg=heuristic_cfg, run_backend=run_backend), "scale.two"
        )

    def __call__(self, x: Any, **options: Any) -> Any:
        return self.registry.call("scale", x, **options)

    def key(self, x: Any = X) -> Any:
        return self.registry.invocation("scale", x).key

    def overlay(self, factor: int) -> Any:
        return overlay_cache({self.key(): Config(factor)})


@pytest.fixture
def times() -> Counted:
    return Counted()


def counted(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[str]]:
    """A jitted function, and the scopes it was traced in."""
    traces: list[str] = []

    def run(*arrays: Any) -> Any:
        traces.append(_scopes.current().digest)
        return function(*arrays)

    return jax.jit(run), traces


# -- tracing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jitted", [False, True])
def test_a_hundred_overlays_of_equal_content_trace_once_more_in_all(times: Counted, jitted: bool) -> None:
    function, traces = counted(times) if jitted else (times, [])
    np.testing.assert_allclose(function(X), X * 2)
    key = times.key()
    for number in range(100):
        cache = ConfigCache()
        cache.put(key, Config(7))
        with overlay_cache(cache if number % 2 else {key: Config(7)}):
            np.testing.assert_allclose(function(X), X * 7)
        np.testing.assert_allclose(function(X), X * 2)
    assert times.traced == [2, 7]
    assert len(traces) == (2 if jitted else 0)


@pytest.mark.parametrize("jitted", [False, True])
def test_other_content_is_always_traced_again(times: Counted, jitted: bool) -> None:
    function = jax.jit(times) if jitted else times
    for factor in range(3, 23):
        with times.overlay(factor):
            np.testing.assert_allclose(function(X), X * factor)
    assert times.traced == list(range(3, 23))


@pytest.mark.parametrize(
    "other",
    [Config(3, jnp.bfloat16), Config(3, "float32"), Config(3, 1.0), Config(3, True), Record(Config(3), "two")],
)
def test_content_that_differs_in_type_alone_is_other_content(times: Counted, other: Any) -> None:
    key, digests = times.key(), set()
    for value in (Config(3, jnp.float32), Config(3, 1), Config(3), other):
        with overlay_cache({key: value}):
            digests.add(_scopes.current().digest)
    assert len(digests) == 4


def test_a_changed_cache_counts_when_it_is_entered_again(times: Counted) -> None:
    cache = ConfigCache()
    cache.put(times.key(), Config(3))
    with overlay_cache(cache):
        cache.put(times.key(), Config(4))
        np.testing.assert_allclose(times(X), X * 3)
    with overlay_cache(cache):
        np.testing.assert_allclose(times(X), X * 4)


def test_the_order_of_entries_is_no_content(times: Counted) -> None:
    one, other = times.key(), times.key(jnp.ones(9))
    digests = set()
    for entries in ({one: Config(3), other: Config(4)}, {other: Config(4), one: Config(3)}):
        with overlay_cache(entries):
            digests.add(_scopes.current().digest)
    assert len(digests) == 1


# -- where it holds --------------------------------------------------------------------------------------------------


def test_a_scope_inside_a_jitted_function_holds_for_the_calls_in_it(times: Counted) -> None:
    @jax.jit
    def function(x: Any) -> Any:
        with times.overlay(5):
            inside = times(x)
        return inside, times(x)

    inside, outside = function(X)
    np.testing.assert_allclose(inside, X * 5)
    np.testing.assert_allclose(outside, X * 2)


def test_the_backward_pass_has_the_scope_of_its_forward() -> None:
    registry = ejkernel_core.registry
    arrays = [jax.random.normal(k, (1, 24, 2, 8)) for k in jax.random.split(jax.random.key(0), 3)]
    forward = registry.plan("flash_attention", *arrays)
    seen = []

    @hookimpl(tryfirst=True)
    def select_config(inv, scope):
        seen.append((inv.op, len(scope.overlays)))

    fresh = Registry()
    fresh.register(SimpleNamespace(select_config=select_config), "listener")
    # What is in the overlay is not asked for: so the forward is, and the backward is heard of.
    with overlay_cache({forward.invocation.key: attrs.evolve(forward.cfg, q_block=8)}):
        _, pull_back = jax.vjp(lambda *a: fresh.call("flash_attention", *a), *arrays)
    pull_back(jnp.ones((1, 24, 2, 8)))  # outside
    assert ("flash_attention_bwd", 1) in seen
    assert ("flash_attention_bwd", 0) not in seen


def test_an_overlay_with_the_key_that_explain_tells_decides_the_backward() -> None:
    arrays = [jax.random.normal(k, (1, 24, 2, 8)) for k in jax.random.split(jax.random.key(0), 3)]

    @hookimpl
    def check_cfg(inv, cfg):
        if cfg.q_block == 7:
            raise Unsupported("seven is no block")

    fresh = Registry()
    fresh.register(SimpleNamespace(**{**vars(xla_backward), "check_cfg": check_cfg}), "flash_attention_bwd.xla")
    backward = fresh.explain("flash_attention", *arrays).backward.plan
    loss = jax.grad(lambda *a: fresh.call("flash_attention", *a).sum(), (0, 1, 2))
    with overlay_cache({backward.invocation.key: attrs.evolve(backward.cfg, q_block=7)}):
        with pytest.raises(Unsupported, match="seven is no block"):
            loss(*arrays)
        assert "seven is no block" in str(fresh.explain("flash_attention", *arrays).backward.error)


def test_a_call_under_vmap_is_inside_the_scope(times: Counted) -> None:
    rows = jnp.stack([X, X + 1])
    with overlay_cache({times.key(): Config(5), times.key(rows): Config(6)}):
        np.testing.assert_allclose(jax.vmap(times)(rows), rows * 5)


def test_an_exception_leaves_the_scope(times: Counted) -> None:
    with pytest.raises(ZeroDivisionError), times.overlay(5), policy_override(mode="on_miss"):
        1 / 0  # noqa: B018
    assert _scopes.current() == _scopes.EMPTY
    assert _scopes.jit_key.value == _scopes.current().digest
    np.testing.assert_allclose(times(X), X * 2)


def test_threads_never_see_each_others_scopes(times: Counted) -> None:
    """Each thread enters its own again and again, while the others are inside theirs."""
    wrong: list[Any] = []
    start, function = threading.Barrier(4), jax.jit(times)

    def work(number: int) -> None:
        start.wait()
        for _ in range(50):
            factor, mode = 3 + number, ["off", "on_miss", "error_on_miss"][number % 3]
            with times.overlay(factor), policy_override(mode=mode):
                results = [float(run(X)[0]) for run in (times, function)]
                if results != [factor, factor] or _scopes.current().policy.mode != mode:
                    wrong.append((number, results))
            if float(times(X)[0]) != 2 or _scopes.current() != _scopes.EMPTY:
                wrong.append((number, "after"))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_new_thread_starts_with_nothing(times: Counted) -> None:
    found = []
    with times.overlay(5):
        thread = threading.Thread(target=lambda: found.append((float(times(X)[0]), _scopes.current())))
        thread.start()
        thread.join()
    assert found == [(2.0, _scopes.EMPTY)]


def test_tasks_that_take_turns_see_their_own(times: Counted) -> None:
    """In eager calls. JAX's jit key is a thread's, so a jitted function around a call is refused, never wrong."""
    function, seen = jax.jit(times), {}

    async def work(number: int) -> None:
        with times.overlay(3 + number):
            await asyncio.sleep(0)
            seen[number] = float(times(X)[0])
            await asyncio.sleep(0)
            try:
                seen[number, "jitted"] = float(function(X)[0])
            except RuntimeError as refused:
                seen[number, "jitted"] = "inside overlay_cache or policy_override" in str(refused)
            await asyncio.sleep(0)

    async def both() -> None:
        await asyncio.gather(work(0), work(1))

    asyncio.run(both())
    assert (seen[0], seen[1]) == (3.0, 4.0)
    assert seen[0, "jitted"] in (3.0, True)
    assert seen[1, "jitted"] in (4.0, True)
    assert _scopes.jit_key.value == _scopes.current().digest
    np.testing.assert_allclose(function(X), X * 2)


# -- what is wrong ---------------------------------------------------------------------------------------------------


def test_policy_override_knows_its_fields() -> None:
    known = "It has autotune, mode, budget_s, wait"
    with pytest.raises(TypeError, match=f"policy_override: has no 'autotnue'; did you mean 'autotune'\\? {known}"):
        policy_override(autotnue=True)
    with pytest.raises(TypeError, match=f"policy_override: has no 'zzz'. {known}"):
        policy_override(zzz=1)
    with pytest.raises(TypeError, match="policy_override: takes its fields by name, as mode='on_miss'; got 'on_miss'"):
        policy_override("on_miss")
    with pytest.raises(TypeError, match="policy_override: autotune=True is mode='on_miss'; give one of the two"):
        policy_override(autotune=True, mode="on_miss")
    with pytest.raises(TypeError, match="autotune: takes True or False; got 'off'"):
        policy_override(autotune="off")
    with pytest.raises(TypeError, match="autotune: takes True or False; got None"):
        policy_override(autotune=None)


WRONG_FIELDS = [
    ("mode", "always", ValueError, "mode: takes off, on_miss or error_on_miss; got 'always'"),
    ("mode", "on_mis", ValueError, "mode: takes off, on_miss or error_on_miss; got 'on_mis'"),
    ("mode", True, ValueError, "mode: takes off, on_miss or error_on_miss; got True"),
    ("mode", ["off"], ValueError, "mode: takes off, on_miss or error_on_miss; got \\['off'\\]"),
    ("mode", None, ValueError, "mode: takes off, on_miss or error_on_miss; got None"),
    ("budget_s", "x", TypeError, "budget_s: takes seconds above 0; got 'x'"),
    ("budget_s", True, TypeError, "budget_s: takes seconds above 0; got True"),
    ("budget_s", None, TypeError, "budget_s: takes seconds above 0; got None"),
    ("budget_s", 0, ValueError, "budget_s: takes seconds above 0; got 0"),
    ("budget_s", -1.5, ValueError, "budget_s: takes seconds above 0; got -1.5"),
    ("budget_s", float("nan"), ValueError, "budget_s: takes seconds above 0; got nan"),
    ("budget_s", float("inf"), ValueError, "budget_s: takes seconds above 0; got inf"),
    ("wait", 1, TypeError, "wait: takes True or False; got 1"),
    ("wait", "no", TypeError, "wait: takes True or False; got 'no'"),
]


@pytest.mark.parametrize("make", [AutotunePolicy, policy_override])
@pytest.mark.parametrize(("field", "value", "error", "message"), WRONG_FIELDS)
def test_fields_of_a_policy_take_what_they_take(
    make: Any, field: str, value: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}$"):
        make(**{field: value})


def test_a_budget_may_be_any_real_number() -> None:
    for budget in (5, 0.5, np.float32(0.25), np.int64(3)):
        with policy_override(budget_s=budget):
            assert _scopes.current().policy.budget_s == budget


def test_overrides_nest(times: Counted) -> None:
    with policy_override(autotune=True):
        first = _scopes.current().policy
        with policy_override(mode="error_on_miss"):
            second = _scopes.current().policy
        with policy_override(autotune=False):
            third = _scopes.current().policy
    assert [p.mode for p in (first, second, third)] == ["on_miss", "error_on_miss", "off"]
    assert _scopes.current().policy == AutotunePolicy()


def test_what_is_entered_may_be_entered_again(times: Counted) -> None:
    overlay, override = times.overlay(5), policy_override(autotune=True)
    for _ in range(2):
        with overlay, override:
            assert _scopes.current().policy.mode == "on_miss"
            with overlay:
                assert len(_scopes.current().overlays) == 2
                np.testing.assert_allclose(times(X), X * 5)
            assert len(_scopes.current().overlays) == 1
        assert _scopes.current() == _scopes.EMPTY


def test_an_override_changes_its_own_fields_of_what_holds_where_it_is_entered() -> None:
    patient = policy_override(wait=False)
    with policy_override(autotune=True, budget_s=7.0), patient:
        assert _scopes.current().policy == AutotunePolicy("on_miss", 7.0, wait=False)


def test_a_scope_is_a_value(times: Counted) -> None:
    with times.overlay(5):
        one = _scopes.current()
    with times.overlay(5):
        other = _scopes.current()
    assert one == other
    assert hash(one) == hash(other)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        one.state = "changed"


@pytest.mark.parametrize("what", [3, None, [1]])
def test_an_overlay_takes_a_cache(what: Any) -> None:
    with pytest.raises(TypeError, match="overlay_cache: takes a ConfigCache, a store or a mapping"):
        overlay_cache(what)


def test_a_configuration_without_content_is_refused(times: Counted) -> None:
    with pytest.raises(TypeError, match="has no content that could be written down"):
        overlay_cache({times.key(): object()})
