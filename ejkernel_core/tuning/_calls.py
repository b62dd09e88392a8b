"""Tuning by hand: a call, or all the calls that a program was seen to make."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp

import ejkernel_core
from ejkernel_core import _call, _gradients, _plan, _scopes
from ejkernel_core._errors import NoKernel, Unsupported
from ejkernel_core._invocation import Invocation
from ejkernel_core._keys import abstractify
from ejkernel_core._primitive import outputs
from ejkernel_core._registry import Registry

from ._autotune import SEED, check_tunable, tune
from ._contest import Settings, in_thread
from ._result import Tuned, TuningResult
from ._tuner import announce, choice_of

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
    question = functools.partial(
        _tuned, direction, None if configs is None else list(configs), budget_s, remember, (num_warmup, num_iters)
    )
    if isinstance(kernel, str):
        return question(ejkernel_core.registry, kernel, *args, backend=backend, **kwargs)
    result: TuningResult = kernel._ask(question, args, kwargs, backend=backend)
    return result


def autotune_recorded(
    invocations: Iterable[Any], budget_s: float = 60.0, remember: bool = True, retune: bool = False
) -> TuningResult:
    """Tune each of these, on made inputs. What is remembered already is passed over, unless ``retune``: an interrupted
    run goes on where it was.

    >>> autotune_recorded([]).tuned
    ()
    """
    result = TuningResult()
    for inv in map(_core, invocations):
        try:
            if retune or not _is_known(inv):
                result |= _contest(inv, None, None, budget_s, remember, None)
        except Unsupported as reason:  # the others can be tuned all the same
            result |= TuningResult((Tuned(inv.tuning_keys, str(inv), (), (), notes=(f"not tuned: {reason}",)),))
    return result


def _tuned(
    direction: str,
    configs: Any,
    budget_s: float,
    remember: bool,
    calls: tuple[int, int],
    registry: Registry,
    op: str,
    *args: Any,
    backend: str | None,
    **kwargs: Any,
) -> TuningResult:
    # Arrays that are there are prepared in a thread: under a trace, preparing would give tracers.
    given = {**kwargs, "backend": backend}
    asked, values, avals, where, restore = (
        in_thread(lambda: _call.asked_for(registry, op, args, given, concrete=True), None, Settings.here())
        if not _has_tracers(args, kwargs)
        else _call.asked_for(registry, op, args, given)
    )
    if direction != "forward" and asked.operation.backward is None:
        raise ValueError(f"{op} has no backward operation to tune")
    share = budget_s / 2 if direction == "both" else budget_s
    result = TuningResult()
    if direction != "backward":
        inputs = None if values is None else dict(zip(asked.arrays, values, strict=True))
        result |= _contest(asked.invocation(avals, where), backend, configs, share, remember, inputs, calls)
    if direction != "forward":
        inv, inputs = _backward(asked, values, avals, where, restore)
        result |= _contest(inv, backend, configs, share, remember, inputs, calls)
    return result


def _has_tracers(*values: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))


def _backward(
    asked: Any, values: Sequence[Any] | None, avals: Sequence[Any], where: Any, restore: Any
) -> tuple[Invocation, dict[str, Any] | None]:
    """The backward's invocation, and inputs for it where the forward has some: its results, and random cotangents."""
    results = outputs(asked, avals)
    used = _call.used(restore, results)
    wrt = _call.floating(asked, avals)

    def request(arrays: Sequence[Any], results: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, list[Any]]:
        some = [ct if yes else None for ct, yes in zip(cotangents, used, strict=True)]
        return _gradients.backward_request(asked, arrays, results, some, wrt)

    backward, shapes = request(avals, results, results)
    inv = backward.invocation(shapes, where)
    if values is None:
        return inv, None
    plan = asked.plan(avals, where)
    concrete = jax.jit(lambda *arrays: asked.run(plan, arrays))(*values)
    keys = jax.random.split(jax.random.key(SEED), len(concrete))
    random = [jax.random.normal(k, r.shape, jnp.float32).astype(r.dtype) for k, r in zip(keys, concrete, strict=True)]
    _, arrays = request(values, concrete, random)
    return inv, dict(zip(backward.arrays, arrays, strict=True))


def _contest(
    inv: Invocation,
    backend: str | None,
    configs: Any,
    budget_s: float,
    remember: bool,
    inputs: dict[str, Any] | None,
    calls: tuple[int, int] = (1, 46),
) -> TuningResult:
    registry, scope = inv.registry, _scopes.current()
    assert registry is not None
    check_tunable(inv)
    candidates, verdicts = _plan.ask_all(registry, inv, backend if backend in registry.backends(inv.op) else None, None)
    if not candidates:
        raise NoKernel(f"no kernel can do {inv}\n" + "\n".join(f"  {verdict}" for verdict in verdicts))
    report = functools.partial(announce, registry.policies(scope))
    tuned = tune(inv, candidates, budget_s, inputs, configs, report, calls=calls)
    if remember and tuned.records:
        registry.learn(inv, choice_of(tuned), scope)
    return TuningResult((tuned,))


def _is_known(inv: Invocation) -> bool:
    """Whether a store has a record for it."""
    assert inv.registry is not None
    candidates, _ = _plan.ask_all(inv.registry, inv, None, None)
    if not candidates:
        return True  # nobody can do it: there is nothing to tune
    with _scopes.policy_override(mode="off"):
        choice, _ = inv.registry.select_config(inv, candidates, _scopes.current())
    return choice.record is not None


# -- recording -------------------------------------------------------------------------------------------------------


class Recorder:
    """The invocations that a choice was made for, each once: shapes and options, no arrays."""

    def __init__(self) -> None:
        self._found: dict[Any, Invocation] = {}

    def __call__(self, inv: Invocation) -> None:
        try:
            key: Any = inv.key
        except TypeError:  # an option that has no content: nobody can remember anything for it, but it is called
            key = str(inv)
        self._found.setdefault((key, id(inv.registry)), inv)

    def __iter__(self) -> Iterator[Invocation]:
        return iter(list(self._found.values()))

    def __len__(self) -> int:
        return len(self._found)

    def clear(self) -> None:
        """Forget them."""
        self._found.clear()


_recorded = Recorder()
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
        listeners: tuple[Any, ...] = (*scope.listeners, recorder, _recorded)
        return attrs.evolve(scope, listeners=listeners, state=f"{scope.state};recording {number}")

    with _scopes.entered(change):
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
    _recorded(attrs.evolve(core, arguments=abstractify(dict(core.arguments))))


def _core(inv: Any) -> Invocation:
    """What a kernel object's invocation stands for."""
    core: Invocation = getattr(inv, "core", inv)
    return core


def get_invocations() -> list[Invocation]:
    """All that was recorded in this process.

    >>> clear_invocations()
    >>> get_invocations()
    []
    """
    return list(_recorded)


def clear_invocations() -> None:
    """Forget all that was recorded.

    >>> clear_invocations()
    >>> len(get_invocations())
    0
    """
    _recorded.clear()
