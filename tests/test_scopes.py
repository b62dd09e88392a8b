"""Scopes apply only inside their ``with`` block, and JAX retraces only if their content changes."""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
from collections.abc import Callable
from functools import partial
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
    Provenance,
    Record,
    Registry,
    UnknownBackend,
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


class TraceRecorder:
    """A registry with the operation ``scale``, which records the factor of each trace."""

    def __init__(self) -> None:
        self.factors: list[int] = []
        factors = self.factors

        @hookimpl
        def heuristic_cfg(inv):
            return Config()

        @hookimpl
        def run_backend(inv, cfg):
            factors.append(cfg.factor)
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
def recorder() -> TraceRecorder:
    return TraceRecorder()


def jit_and_scopes(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[str]]:
    """A jitted function, and the digests of the scopes that it is traced in."""
    scopes: list[str] = []

    def run(*arrays: Any) -> Any:
        scopes.append(_scopes.current_scope().digest)
        return function(*arrays)

    return jax.jit(run), scopes


# -- tracing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jitted", [False, True])
def test_a_hundred_overlays_of_equal_content_cause_one_trace(recorder: TraceRecorder, jitted: bool) -> None:
    function, scopes = jit_and_scopes(recorder) if jitted else (recorder, [])
    np.testing.assert_allclose(function(X), X * 2)
    key = recorder.key()
    for number in range(100):
        cache = ConfigCache()
        cache.put(key, Config(7))
        with overlay_cache(cache if number % 2 else {key: Config(7)}):
            np.testing.assert_allclose(function(X), X * 7)
        np.testing.assert_allclose(function(X), X * 2)
    assert recorder.factors == [2, 7]
    assert len(scopes) == (2 if jitted else 0)


@pytest.mark.parametrize("jitted", [False, True])
def test_an_overlay_of_other_content_is_always_traced(recorder: TraceRecorder, jitted: bool) -> None:
    function = jax.jit(recorder) if jitted else recorder
    for factor in range(3, 23):
        with recorder.overlay(factor):
            np.testing.assert_allclose(function(X), X * factor)
    assert recorder.factors == list(range(3, 23))


@pytest.mark.parametrize(
    "last_value",
    [Config(3, jnp.bfloat16), Config(3, "float32"), Config(3, 1.0), Config(3, True), Record(Config(3), "two")],
)
def test_values_that_differ_only_in_type_are_different_content(recorder: TraceRecorder, last_value: Any) -> None:
    key, digests = recorder.key(), set()
    for value in (Config(3, jnp.float32), Config(3, 1), Config(3), last_value):
        with overlay_cache({key: value}):
            digests.add(_scopes.current_scope().digest)
    assert len(digests) == 4


def test_a_change_of_a_cache_applies_when_it_is_entered_again(recorder: TraceRecorder) -> None:
    cache = ConfigCache()
    cache.put(recorder.key(), Config(3))
    with overlay_cache(cache):
        cache.put(recorder.key(), Config(4))
        np.testing.assert_allclose(recorder(X), X * 3)
    with overlay_cache(cache):
        np.testing.assert_allclose(recorder(X), X * 4)


def test_the_order_of_entries_does_not_matter(recorder: TraceRecorder) -> None:
    first, second = recorder.key(), recorder.key(jnp.ones(9))
    digests = set()
    for entries in ({first: Config(3), second: Config(4)}, {second: Config(4), first: Config(3)}):
        with overlay_cache(entries):
            digests.add(_scopes.current_scope().digest)
    assert len(digests) == 1


def test_an_overlay_for_an_unknown_backend_is_refused(recorder: TraceRecorder) -> None:
    message = r"^overlay_cache: no backend 'tow' of 'scale' is installed; did you mean 'two'\? Known: two\. "
    with overlay_cache({recorder.key(): Record(Config(3), "two")}), recorder.overlay(4):
        np.testing.assert_allclose(recorder(X), X * 4)
        with overlay_cache({recorder.key(): Record(Config(5), "tow")}):
            for use in (recorder, jax.jit(recorder), partial(recorder.registry.plan, "scale")):
                with pytest.raises(UnknownBackend, match=message):
                    use(X)
            np.testing.assert_allclose(recorder(jnp.ones(9)), jnp.full(9, 2.0))  # a call of another key


def test_an_overlay_may_have_measured_records_of_backends_that_are_not_installed(recorder: TraceRecorder) -> None:
    provenance = Provenance(when="", device="", milliseconds=1.0, backends=("triton", "two"))
    with overlay_cache({recorder.key(): Record(Config(5), "triton", provenance)}):
        np.testing.assert_allclose(recorder(X), X * 2)


# -- where scopes apply ----------------------------------------------------------------------------------------------


def test_a_scope_inside_a_jitted_function_applies_to_the_calls_in_it(recorder: TraceRecorder) -> None:
    @jax.jit
    def function(x: Any) -> Any:
        with recorder.overlay(5):
            inside = recorder(x)
        return inside, recorder(x)

    inside, outside = function(X)
    np.testing.assert_allclose(inside, X * 5)
    np.testing.assert_allclose(outside, X * 2)


def test_the_backward_pass_has_the_scope_of_its_forward() -> None:
    arrays = [jax.random.normal(k, (1, 24, 2, 8)) for k in jax.random.split(jax.random.key(0), 3)]
    forward = ejkernel_core.registry.plan("flash_attention", *arrays)
    calls = []

    @hookimpl(tryfirst=True)
    def select_config(inv, scope):
        calls.append((inv.op, len(scope.overlays)))

    registry = Registry()
    registry.register(SimpleNamespace(select_config=select_config), "listener")
    # No policy is called for a key of the overlay, so the overlay has the forward only.
    with overlay_cache({forward.invocation.key: attrs.evolve(forward.cfg, q_block=8)}):
        _, vjp = jax.vjp(lambda *a: registry.call("flash_attention", *a), *arrays)
    vjp(jnp.ones((1, 24, 2, 8)))  # outside of the scope
    assert ("flash_attention_bwd", 1) in calls
    assert ("flash_attention_bwd", 0) not in calls


def test_the_derivative_of_a_reference_has_the_scope_of_the_call(recorder: TraceRecorder) -> None:
    @hookimpl
    def heuristic_cfg(inv):
        return Config()

    @hookimpl
    def run_backend(inv, cfg):
        return inv["x"] * cfg.factor

    hooks = {"heuristic_cfg": heuristic_cfg, "run_backend": run_backend}
    recorder.registry.register(SimpleNamespace(Config=Config, PLATFORMS={"cpu": 0}, **hooks), "scale.reference")
    with recorder.overlay(5):
        _, vjp = jax.vjp(recorder, X)
    (gradient,) = vjp(X)  # outside of the scope
    np.testing.assert_allclose(gradient, X * 5)


def test_an_overlay_with_the_backward_key_of_explain_applies_to_the_backward() -> None:
    arrays = [jax.random.normal(k, (1, 24, 2, 8)) for k in jax.random.split(jax.random.key(0), 3)]

    @hookimpl
    def check_cfg(inv, cfg):
        if cfg.q_block == 7:
            raise Unsupported("seven is not a block")

    registry = Registry()
    registry.register(SimpleNamespace(**{**vars(xla_backward), "check_cfg": check_cfg}), "flash_attention_bwd.xla")
    backward = registry.explain("flash_attention", *arrays).backward.plan
    loss = jax.grad(lambda *a: registry.call("flash_attention", *a).sum(), (0, 1, 2))
    with overlay_cache({backward.invocation.key: attrs.evolve(backward.cfg, q_block=7)}):
        with pytest.raises(Unsupported, match="seven is not a block"):
            loss(*arrays)
        assert "seven is not a block" in str(registry.explain("flash_attention", *arrays).backward.error)


def test_a_scope_applies_to_a_call_under_vmap(recorder: TraceRecorder) -> None:
    rows = jnp.stack([X, X + 1])
    with overlay_cache({recorder.key(): Config(5), recorder.key(rows): Config(6)}):
        np.testing.assert_allclose(jax.vmap(recorder)(rows), rows * 5)


def test_an_exception_leaves_the_scope(recorder: TraceRecorder) -> None:
    with pytest.raises(ZeroDivisionError), recorder.overlay(5), policy_override(mode="on_miss"):
        1 / 0  # noqa: B018
    assert _scopes.current_scope() == _scopes.EMPTY
    assert _scopes.jit_key.value == _scopes.current_scope().digest
    np.testing.assert_allclose(recorder(X), X * 2)


def test_threads_have_separate_scopes(recorder: TraceRecorder) -> None:
    """Each thread enters its own scope repeatedly, while the others are inside theirs."""
    faults: list[Any] = []
    start, function = threading.Barrier(4), jax.jit(recorder)

    def work(number: int) -> None:
        start.wait()
        for _ in range(50):
            factor, mode = 3 + number, ["off", "on_miss", "error_on_miss"][number % 3]
            with recorder.overlay(factor), policy_override(mode=mode):
                results = [float(run(X)[0]) for run in (recorder, function)]
                if results != [factor, factor] or _scopes.current_scope().policy.mode != mode:
                    faults.append((number, results))
            if float(recorder(X)[0]) != 2 or _scopes.current_scope() != _scopes.EMPTY:
                faults.append((number, "after"))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []


def test_a_new_thread_starts_without_a_scope(recorder: TraceRecorder) -> None:
    results = []
    with recorder.overlay(5):
        thread = threading.Thread(target=lambda: results.append((float(recorder(X)[0]), _scopes.current_scope())))
        thread.start()
        thread.join()
    assert results == [(2.0, _scopes.EMPTY)]


def test_interleaved_tasks_have_separate_scopes(recorder: TraceRecorder) -> None:
    """Eager calls use their task's scope. JAX's jit key is per thread, so a jitted call may be refused."""
    function, results = jax.jit(recorder), {}

    async def work(number: int) -> None:
        with recorder.overlay(3 + number):
            await asyncio.sleep(0)
            results[number] = float(recorder(X)[0])
            await asyncio.sleep(0)
            try:
                results[number, "jitted"] = float(function(X)[0])
            except RuntimeError as error:
                results[number, "jitted"] = "inside overlay_cache or policy_override" in str(error)
            await asyncio.sleep(0)

    async def run_both() -> None:
        await asyncio.gather(work(0), work(1))

    asyncio.run(run_both())
    assert (results[0], results[1]) == (3.0, 4.0)
    assert results[0, "jitted"] in (3.0, True)
    assert results[1, "jitted"] in (4.0, True)
    assert _scopes.jit_key.value == _scopes.current_scope().digest
    np.testing.assert_allclose(function(X), X * 2)


# -- invalid arguments -----------------------------------------------------------------------------------------------


def test_a_policy_refuses_unknown_fields() -> None:
    field_list = "It has mode, budget_s, wait, other_versions"
    modes = "mode='on_miss' measures, mode='off' does not"
    with pytest.raises(TypeError, match=f"AutotunePolicy: has no 'allow_autotune'; {modes}. {field_list}"):
        AutotunePolicy(allow_autotune=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=f"AutotunePolicy: has no 'budget'; did you mean 'budget_s'\\? {field_list}"):
        AutotunePolicy(budget=1)  # type: ignore[call-arg]
    assert AutotunePolicy("on_miss", budget_s=7).budget_s == 7
    assert [*inspect.signature(AutotunePolicy).parameters] == ["mode", "budget_s", "wait", "other_versions"]


def test_policy_override_refuses_unknown_fields() -> None:
    field_list = "It has autotune, mode, budget_s, wait"
    with pytest.raises(TypeError, match=f"policy_override: has no 'autotnue'; did you mean 'autotune'\\? {field_list}"):
        policy_override(autotnue=True)
    with pytest.raises(TypeError, match=f"policy_override: has no 'zzz'. {field_list}"):
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
    ("budget_s", "x", TypeError, "budget_s: takes a finite number of seconds above 0; got 'x'"),
    ("budget_s", True, TypeError, "budget_s: takes a finite number of seconds above 0; got True"),
    ("budget_s", None, TypeError, "budget_s: takes a finite number of seconds above 0; got None"),
    ("budget_s", 0, ValueError, "budget_s: takes a finite number of seconds above 0; got 0"),
    ("budget_s", -1.5, ValueError, "budget_s: takes a finite number of seconds above 0; got -1.5"),
    ("budget_s", float("nan"), ValueError, "budget_s: takes a finite number of seconds above 0; got nan"),
    ("budget_s", float("inf"), ValueError, "budget_s: takes a finite number of seconds above 0; got inf"),
    ("wait", 1, TypeError, "wait: takes True or False; got 1"),
    ("wait", "no", TypeError, "wait: takes True or False; got 'no'"),
]


@pytest.mark.parametrize("function", [AutotunePolicy, policy_override])
@pytest.mark.parametrize(("field", "value", "error", "message"), WRONG_FIELDS)
def test_invalid_fields_of_a_policy_are_refused(
    function: Any, field: str, value: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}$"):
        function(**{field: value})


def test_a_budget_may_be_any_real_number() -> None:
    for budget in (5, 0.5, np.float32(0.25), np.int64(3)):
        with policy_override(budget_s=budget):
            assert _scopes.current_scope().policy.budget_s == budget


def test_overrides_nest(recorder: TraceRecorder) -> None:
    with policy_override(autotune=True):
        first = _scopes.current_scope().policy
        with policy_override(mode="error_on_miss"):
            second = _scopes.current_scope().policy
        with policy_override(autotune=False):
            third = _scopes.current_scope().policy
    assert [p.mode for p in (first, second, third)] == ["on_miss", "error_on_miss", "off"]
    assert _scopes.current_scope().policy == AutotunePolicy()


def test_a_scope_can_be_entered_again(recorder: TraceRecorder) -> None:
    overlay, override = recorder.overlay(5), policy_override(autotune=True)
    for _ in range(2):
        with overlay, override:
            assert _scopes.current_scope().policy.mode == "on_miss"
            with overlay:
                assert len(_scopes.current_scope().overlays) == 2
                np.testing.assert_allclose(recorder(X), X * 5)
            assert len(_scopes.current_scope().overlays) == 1
        assert _scopes.current_scope() == _scopes.EMPTY


def test_an_override_changes_only_its_own_fields() -> None:
    override = policy_override(wait=False)
    with policy_override(autotune=True, budget_s=7.0), override:
        assert _scopes.current_scope().policy == AutotunePolicy("on_miss", 7.0, wait=False)


def test_a_scope_is_a_value(recorder: TraceRecorder) -> None:
    with recorder.overlay(5):
        first = _scopes.current_scope()
    with recorder.overlay(5):
        second = _scopes.current_scope()
    assert first == second
    assert hash(first) == hash(second)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        first.state = "changed"


@pytest.mark.parametrize("value", [3, None, [1]])
def test_an_overlay_takes_a_cache(value: Any) -> None:
    with pytest.raises(TypeError, match="overlay_cache: takes a ConfigCache, a store or a mapping"):
        overlay_cache(value)


def test_a_configuration_without_content_is_refused(recorder: TraceRecorder) -> None:
    with pytest.raises(TypeError, match="has no content that could be written down"):
        overlay_cache({recorder.key(): object()})


# -- a block that is left elsewhere ----------------------------------------------------------------------------------


def in_thread(function: Callable[[], Any]) -> None:
    """Run a function in a thread of its own, and raise here what it raises there.

    The thread has its own context and its own part of JAX's jit key, so a scope that stays there reaches no other test.
    """
    faults: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as fault:
            faults.append(fault)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if faults:
        raise faults[0]


def budgets_inside(budget_s: float) -> Any:
    """A generator that is inside of a scope until it is closed."""
    with policy_override(budget_s=budget_s):
        while True:
            yield _scopes.current_scope().policy.budget_s


def budget() -> float:
    return _scopes.current_scope().policy.budget_s


def test_a_generator_that_is_closed_in_another_thread_leaves_both_scopes_as_they_are() -> None:
    budgets = budgets_inside(7.0)

    def close_inside_of_a_scope() -> None:
        with policy_override(budget_s=3.0):
            budgets.close()
            assert budget() == 3.0
        assert budget() == AutotunePolicy().budget_s

    def run() -> None:
        assert next(budgets) == 7.0
        in_thread(close_inside_of_a_scope)
        assert budget() == 7.0  # nothing can change the scope of another thread
        with policy_override(budget_s=5.0):
            assert budget() == 5.0
        assert budget() == 7.0

    in_thread(run)


@pytest.mark.parametrize("enter", [lambda: policy_override(budget_s=7.0), lambda: overlay_cache({"a key": 1})])
def test_a_block_that_is_left_in_a_thread_without_scopes_raises_nothing(enter: Any) -> None:
    block = enter()

    def run() -> None:
        with block:
            inside = _scopes.current_scope()
            in_thread(lambda: block.__exit__(None, None, None))
            assert _scopes.current_scope() is inside
        assert _scopes.current_scope() is _scopes.EMPTY

    in_thread(run)


def test_a_collected_generator_leaves_the_scope_of_the_collecting_thread() -> None:
    holder: list[Any] = []

    def run() -> None:
        holder.append(budgets_inside(7.0))
        next(holder[0])

    def collect() -> None:
        with policy_override(budget_s=3.0):
            holder.clear()
            gc.collect()
            assert budget() == 3.0

    in_thread(run)
    in_thread(collect)


def test_a_task_that_inherits_a_block_does_not_leave_it() -> None:
    """A task and ``asyncio.to_thread`` have a copy of the context, with the block in it."""

    async def main() -> None:
        budgets = budgets_inside(7.0)
        assert next(budgets) == 7.0
        await asyncio.to_thread(lambda: (budgets.close(), assert_budget(7.0)))
        assert budget() == 7.0
        other = budgets_inside(4.0)
        next(other)

        async def close() -> None:
            await ended.wait()  # until the block has been left by its own task, which has used its token
            other_block.__exit__(None, None, None)
            assert budget() == 9.0

        ended, other_block = asyncio.Event(), policy_override(budget_s=9.0)
        with other_block:
            task = asyncio.create_task(close())
        assert budget() == 4.0
        ended.set()
        await task

    in_thread(lambda: asyncio.run(main()))


def assert_budget(expected: float) -> None:
    assert budget() == expected


def test_an_asynchronous_generator_that_the_loop_ends_raises_nothing() -> None:
    faults: list[Any] = []

    async def budgets() -> Any:
        with policy_override(budget_s=7.0):
            yield budget()

    async def begin() -> None:
        abandoned.append(budgets())
        assert await anext(abandoned[0]) == 7.0

    abandoned: list[Any] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context))
        await asyncio.create_task(begin())
        abandoned.clear()
        for _ in range(3):  # the loop closes the generator in a task of its own
            gc.collect()
            await asyncio.sleep(0)

    in_thread(lambda: asyncio.run(main()))
    assert faults == []


def test_generators_of_one_thread_may_be_closed_in_any_order() -> None:
    def run() -> None:
        first = budgets_inside(7.0)
        next(first)
        with policy_override(wait=False):
            assert (budget(), _scopes.current_scope().policy.wait) == (7.0, False)
            first.close()
            assert (budget(), _scopes.current_scope().policy.wait) == (AutotunePolicy().budget_s, False)
        assert _scopes.current_scope() == _scopes.EMPTY
        assert _scopes.jit_key.value == ""

    in_thread(run)
