"""Tuning by hand: a call, or all the calls that a program was seen to make."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import attrs
import jax
import jax.numpy as jnp

import ejkernel_core
from ejkernel_core import _scopes
from ejkernel_core._call import AbstractCall, abstract_call
from ejkernel_core._choice import candidates_for
from ejkernel_core._errors import NoKernel, Unsupported
from ejkernel_core._kernel import Invocation, why_mutable
from ejkernel_core._keys import abstractify
from ejkernel_core._plugins import Plugins
from ejkernel_core._policies import ask_policies, is_incomplete
from ejkernel_core._records import DIED, Record
from ejkernel_core._scopes import AutotunePolicy
from ejkernel_core._tuning import check_tunable, exclusive_measurement, remember_records

from ._autotune import SEED, tune
from ._progress import Announcer
from ._result import Tuned, TuningResult
from ._threads import Settings, in_thread

DIRECTIONS = ("forward", "backward", "both")


def autotune(
    kernel: Any,
    *args: Any,
    configs: Iterable[Any] | None = None,
    num_warmup: int = 1,
    num_iters: int = 46,
    backend: str | None = None,
    direction: str = "forward",
    budget_s: float = 60.0,
    remember: bool = True,
    **kwargs: Any,
) -> TuningResult:
    """Measure all configurations of all kernels that can do this call, and remember the fastest.

    ``kernel`` is the name of an operation or a ``Kernel`` object; the rest is the call. On arrays, it is these that are
    measured with; on ``jax.ShapeDtypeStruct`` or under tracing, the operation makes some. ``configs`` and ``backend``
    narrow the field. ``direction`` is "forward", "backward" or "both". Nobody wins whose results are not those of the
    reference. ``result.cfg`` is the winner; see ``TuningResult``.

    >>> query = jnp.ones((1, 4, 2, 8))
    >>> result = autotune("flash_attention", query, query, query, backend="reference", num_iters=2, remember=False)
    >>> [entry.backend for entry in result.tuned[0].entries]
    ['reference']
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction: takes one of {', '.join(DIRECTIONS)}; got {direction!r}")
    if not budget_s > 0:
        raise ValueError(f"budget_s: takes seconds above 0; got {budget_s!r}")
    given = None if configs is None else list(configs)
    for reason in filter(None, map(why_mutable, given or ())):
        raise TypeError(f"configs: takes values that cannot be changed; {reason}")
    question = functools.partial(_tuned, direction, given, budget_s, remember, (num_warmup, num_iters))
    if isinstance(kernel, str):
        return question(ejkernel_core.registry, kernel, *args, backend=backend, **kwargs)
    result: TuningResult = kernel._ask(question, args, kwargs, backend=backend)
    return result


def autotune_recorded(
    invocations: Iterable[Any], budget_s: float = 60.0, remember: bool = True, retune: bool = False
) -> TuningResult:
    """Tune each of these, on made inputs. What is remembered already is passed over, unless ``retune``: an interrupted
    run goes on where it was, and with a larger budget, so does what an earlier one was too short for.

    >>> autotune_recorded([]).tuned
    ()
    """
    result = TuningResult()
    for inv, plugins in ((_core(one), _plugins_of(one)) for one in invocations):
        try:
            is_done, record = (False, None) if retune else _known(plugins, inv, budget_s)
            if not is_done:
                result |= _contest(plugins, inv, None, None, budget_s, remember, None, record=record)
        except Unsupported as reason:  # the others can be tuned all the same
            result |= TuningResult((Tuned(inv.tuning_keys, str(inv), (), (), notes=(f"not tuned: {reason}",)),))
    return result


def _tuned(
    direction: str,
    configs: Any,
    budget_s: float,
    remember: bool,
    calls: tuple[int, int],
    registry: Plugins,
    op: str,
    /,
    *args: Any,
    backend: str | None,
    **kwargs: Any,
) -> TuningResult:
    # Arrays that are there are prepared in a thread: under a trace, preparing would give tracers.
    has_tracers, cfg = _has_tracers(args, kwargs), kwargs.pop("cfg", None)
    prepare = functools.partial(abstract_call, registry, op, args, kwargs, backend, cfg, concrete=not has_tracers)
    question = prepare() if has_tracers else in_thread(prepare, None, Settings.here())
    if direction != "forward" and question.request.operation.backward is None:
        raise ValueError(f"{op} has no backward operation to tune")
    share = budget_s / 2 if direction == "both" else budget_s
    result = TuningResult()
    if direction != "backward":
        request, values = question.request, question.values
        inv = request.invocation(question.avals, question.target)
        inputs = None if values is None else dict(zip(request.arrays, values, strict=True))
        result |= _contest(registry, inv, backend, configs, share, remember, inputs, calls)
    if direction != "forward":
        inv, inputs = _backward(question)
        result |= _contest(registry, inv, backend, configs, share, remember, inputs, calls)
    return result


def _has_tracers(*values: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))


def _backward(question: AbstractCall) -> tuple[Invocation, dict[str, Any] | None]:
    """The backward's invocation, and inputs for it where the forward has some: its results, and random cotangents."""
    backward, avals = question.backward()
    inv = backward.invocation(avals, question.target)
    if question.values is None:
        return inv, None
    request, plan = question.request, question.request.plan(question.avals, question.target)
    results = jax.jit(lambda *arrays: request.run(plan, arrays))(*question.values)
    keys = jax.random.split(jax.random.key(SEED), len(results))
    random = [jax.random.normal(k, r.shape, jnp.float32).astype(r.dtype) for k, r in zip(keys, results, strict=True)]
    _, arrays = question.gradients(question.values, results, random)
    return inv, dict(zip(backward.arrays, arrays, strict=True))


def _contest(
    plugins: Plugins,
    inv: Invocation,
    backend: str | None,
    configs: Any,
    budget_s: float,
    remember: bool,
    inputs: dict[str, Any] | None,
    calls: tuple[int, int] = (1, 46),
    record: Record | None = None,
) -> TuningResult:
    scope = _scopes.current()
    check_tunable(inv)
    kernels, broken = plugins.kernels(inv.op)
    candidates, verdicts = candidates_for(inv, kernels, backend if backend in plugins.backends(inv.op) else None, None)
    if not candidates:
        raise NoKernel(f"no kernel can do {inv}\n" + "\n".join(f"  {verdict}" for verdict in (*broken, *verdicts)))
    patient = attrs.evolve(scope, policy=attrs.evolve(scope.policy, budget_s=budget_s, wait=True))
    policies = plugins.policies(patient)
    with exclusive_measurement(policies, inv, patient) as (earlier, turn):
        announcer = Announcer(turn.report, inv, budget_s)
        # Of an interrupted contest, only what is dangerous: who tunes by hand has this measured, and now.
        dangerous = [entry for entry in earlier.entries if entry.reason.startswith(DIED)]
        known = (dangerous, calls, earlier.suspects, record)
        try:
            tuned = tune(inv, candidates, plugins.judge(inv), budget_s, inputs, configs, announcer, *known)
            announcer.finish(tuned.entries, tuned.seconds)
        finally:
            announcer.finish()
        if remember and tuned.records:
            remember_records(policies, inv, tuned.records, record)
            plugins.invalidate(inv)
    return TuningResult((tuned,))


def _known(plugins: Plugins, inv: Invocation, budget_s: float) -> tuple[bool, Record | None]:
    """Whether there is nothing that this budget would find out, and the record that a store has of it."""
    candidates, _ = candidates_for(inv, plugins.kernels(inv.op)[0], None, None)
    if not candidates:
        return True, None  # nobody can do it: there is nothing to tune
    scope = _scopes.current()
    choice, *_ = ask_policies(inv, candidates, plugins.policies(scope), scope)
    if choice is None or choice.record is None:
        return False, None
    return not is_incomplete(choice, AutotunePolicy("on_miss", budget_s)), choice.record


# -- recording -------------------------------------------------------------------------------------------------------


class Recorder:
    """The invocations that a choice was made for, each once: shapes and options, no arrays."""

    def __init__(self) -> None:
        self._invocations: dict[Any, Invocation] = {}

    def __call__(self, inv: Invocation, plugins: Plugins) -> None:
        try:
            key: Any = inv.key
        except TypeError:  # an option that has no content: nobody can remember anything for it, but it is called
            key = str(inv)
        _keep_home(self._invocations.setdefault((key, id(plugins)), inv), plugins)

    def __iter__(self) -> Iterator[Invocation]:
        return iter(list(self._invocations.values()))

    def __len__(self) -> int:
        return len(self._invocations)

    def clear(self) -> None:
        """Forget them."""
        self._invocations.clear()


#: All that is recorded in this process.
recorded = Recorder()
_numbers = itertools.count(1)


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Collect the invocations of everything that is compiled in this ``with`` block, backward passes included.

    What JAX compiled before is compiled again, so that it is heard of. ``jax.jit(f).lower(...)`` is enough; nothing has
    to run. They are in ``get_invocations()`` too.

    >>> query = jax.ShapeDtypeStruct((1, 4, 2, 8), "float32")
    >>> with recording() as found:
    ...     _ = jax.jit(lambda q: ejkernel_core.call("flash_attention", q, q, q)).lower(query)
    >>> [inv.op for inv in found]
    ['flash_attention']
    """
    recorder, number = Recorder(), next(_numbers)

    def change(scope: _scopes.Scope) -> _scopes.Scope:
        listeners: tuple[Any, ...] = (*scope.listeners, recorder, recorded)
        return attrs.evolve(scope, listeners=listeners, state=f"{scope.state};recording {number}")

    with _scopes.ScopeChange(change):
        yield recorder


def record_invocation(kernel: Any, inv: Any) -> None:
    """Put one invocation of a kernel (an object, or an operation's name) among the recorded ones; no array is kept.

    >>> query = jax.ShapeDtypeStruct((1, 4, 2, 8), "float32")
    >>> inv = ejkernel_core.invocation("flash_attention", query, query, query)
    >>> record_invocation("flash_attention", inv)
    >>> inv.key in [known.key for known in get_invocations()]
    True
    >>> clear_invocations()
    """
    name, core = kernel if isinstance(kernel, str) else kernel.name, _core(inv)
    if core.op != name:
        raise ValueError(f"record_invocation: the invocation is of {core.op!r}, not of {name!r}")
    recorded(attrs.evolve(core, arguments=abstractify(dict(core.arguments))), _plugins_of(inv))


def _core(inv: Any) -> Invocation:
    """What a kernel object's invocation stands for."""
    core: Invocation = getattr(inv, "core", inv)
    return core


#: By the id of an invocation, as long as it lives: itself, and the plugins that a choice for it is made among.
_homes: dict[int, tuple[weakref.ref[Invocation], Plugins]] = {}


def _keep_home(inv: Invocation, plugins: Plugins) -> None:
    number = id(inv)
    _homes[number] = weakref.ref(inv, lambda _: _homes.pop(number, None)), plugins


def _plugins_of(inv: Any) -> Plugins:
    """The plugins that a choice for it is made among."""
    home = _homes.get(id(_core(inv)))
    if home is not None:
        return home[1]
    if hasattr(getattr(inv, "kernel", None), "_ask"):  # a kernel object has its own for each way of calling it
        own: Plugins = inv.kernel._ask(lambda plugins, *args, **kwargs: plugins, inv.args, inv.kwargs)
        return own
    return ejkernel_core.registry


def get_invocations() -> list[Invocation]:
    """All that was recorded in this process.

    >>> clear_invocations()
    >>> get_invocations()
    []
    """
    return list(recorded)


def clear_invocations() -> None:
    """Forget all that was recorded.

    >>> clear_invocations()
    >>> len(get_invocations())
    0
    """
    recorded.clear()
