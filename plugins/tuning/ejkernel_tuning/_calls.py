"""Tuning by hand: one call, or all calls that were recorded in a program."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import jax

import ejkernel_core
from ejkernel_core import (
    AutotunePolicy,
    Candidate,
    Choice,
    Invocation,
    NoKernel,
    NotDifferentiable,
    Record,
    Registry,
    Scope,
    Unsupported,
    Verdict,
)
from ejkernel_core.extend import (
    AbstractCall,
    Earlier,
    Plugins,
    Progress,
    Reason,
    ScopeChange,
    Selection,
    abstract_call,
    abstractify,
    ask_policies,
    current_scope,
    exclusive_measurement,
    is_incomplete,
    remember_records,
    suggestion,
    why_mutable,
)

from ._autotune import tune
from ._progress import Announcer
from ._result import Tuned, TuningResult
from ._threads import Settings, run_in_thread

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
    """Measure all configurations of all kernels that can run this call, and store the fastest.

    ``kernel`` is the name of an operation or a ``Kernel`` object; the other arguments are those of the call. Arrays are
    the inputs of the measurement; for ``jax.ShapeDtypeStruct`` and under tracing, the operation makes samples.
    ``configs`` and ``backend`` restrict what is measured. ``direction`` is "forward", "backward" or "both". A
    configuration with wrong results, compared with the reference, is never selected. ``result.cfg`` is the fastest one;
    see ``TuningResult``.

    >>> query = jax.numpy.ones((1, 4, 2, 8))
    >>> result = autotune("flash_attention", query, query, query, backend="reference", num_iters=2, remember=False)
    >>> [entry.backend for entry in result.tuned[0].entries]
    ['reference']
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction: takes one of {', '.join(DIRECTIONS)}; got {direction!r}")
    if not budget_s > 0:
        raise ValueError(f"budget_s: takes seconds above 0; got {budget_s!r}")
    config_list = None if configs is None else list(configs)
    for reason in filter(None, map(why_mutable, config_list or ())):
        raise TypeError(f"configs: takes values that cannot be changed; {reason}")
    tune_call = functools.partial(_autotune_call, direction, config_list, budget_s, remember, (num_warmup, num_iters))
    if isinstance(kernel, str):
        return tune_call(ejkernel_core.registry, kernel, *args, backend=backend, **kwargs)
    result: TuningResult = kernel._call_registry(tune_call, args, kwargs, backend=backend)
    return result


def autotune_recorded(
    invocations: Iterable[Any], budget_s: float = 60.0, remember: bool = True, retune: bool = False
) -> TuningResult:
    """Tune each of these invocations, on samples of their operations. Those that have a record are skipped, unless
    ``retune``; so an interrupted run can be continued. One that ran out of time continues if the budget is larger now.

    >>> autotune_recorded([]).tuned
    ()
    """
    return TuningResult(
        tuple(
            outcome.tuned or Tuned(outcome.inv.tuning_keys, str(outcome.inv), (), (), notes=(outcome.reason,))
            for outcome in tune_each(invocations, budget_s, remember, retune)
            if outcome.tuned or outcome.is_refused
        )
    )


@attrs.frozen(eq=False)
class Outcome:
    """What came of an invocation that was to be tuned."""

    inv: Invocation
    #: The measurement, where there was one.
    tuned: Tuned | None = None
    #: What a store has, where there is nothing to measure.
    stored: Choice | None = None
    #: Why there is neither.
    reason: str = ""
    #: Whether that is because it cannot be measured, and not because no kernel can run it.
    is_refused: bool = False
    #: The kernel and the configuration that the heuristic takes.
    heuristic: Candidate | None = None
    #: The kernels that are not measured because they are broken, each with the reason.
    broken: tuple[str, ...] = ()


def tune_each(
    invocations: Iterable[Any],
    budget_s: float,
    remember: bool = True,
    retune: bool = False,
    backend: str | None = None,
    has_burst_ranking: bool = False,
) -> Iterator[Outcome]:
    """The outcome of each invocation as soon as it is there: see ``autotune_recorded`` and, for the rankings by bursts
    of what is measured anew, ``tune``.
    """
    for inv, plugins in ((_core_invocation(inv), _plugins_of(inv)) for inv in invocations):
        candidates, verdicts = _candidates(plugins, inv, backend)
        broken = _broken(verdicts)
        if not candidates:
            reasons = (str(verdict) for verdict in verdicts if verdict.status != "left out")  # by the backend
            yield Outcome(inv, reason="; ".join(["no kernel can run it", *reasons]))
            continue
        outcome = Outcome(inv, heuristic=candidates[0], broken=broken)
        try:
            result = _tuned_or_stored(plugins, inv, candidates, budget_s, remember, retune, has_burst_ranking)
            if "tuned" in result:
                result["tuned"] = _with_notes(result["tuned"], broken)
            yield attrs.evolve(outcome, **result)
        except Unsupported as reason:  # the others can be tuned all the same
            yield attrs.evolve(outcome, reason=f"not tuned: {reason}", is_refused=True)


def _candidates(plugins: Plugins, inv: Invocation, backend: str | None) -> tuple[tuple[Candidate, ...], list[Verdict]]:
    """The kernels that can run the invocation, and a verdict on every kernel, loaded or not: those of a backend alone,
    unless it has none for the operation.
    """
    return plugins.candidates(inv, backend if backend in plugins.backends(inv.op) else None)


def _broken(verdicts: Iterable[Verdict]) -> tuple[str, ...]:
    return tuple(" ".join(str(verdict).split()) for verdict in verdicts if verdict.status == "broken")


def _with_notes(tuned: Tuned, notes: Iterable[str]) -> Tuned:
    return attrs.evolve(tuned, notes=(*tuned.notes, *notes))


def _tuned_or_stored(
    plugins: Plugins,
    inv: Invocation,
    candidates: Sequence[Candidate],
    budget_s: float,
    remember: bool,
    retune: bool,
    has_burst_ranking: bool,
) -> dict[str, Any]:
    if retune:
        with _measurement(plugins, inv, budget_s) as measurement:
            return {"tuned": measurement.run(candidates, remember, has_burst_ranking=has_burst_ranking)}
    choice = _stored_choice(plugins, inv, candidates)
    if not _is_to_be_measured(choice, budget_s):
        return {"stored": choice}
    with _measurement(plugins, inv, budget_s) as measurement:
        choice = _stored_choice(plugins, inv, candidates)  # another process may have measured it meanwhile
        if not _is_to_be_measured(choice, budget_s):
            return {"stored": choice}
        record = choice.record if choice else None
        return {"tuned": measurement.run(candidates, remember, record=record, is_resumed=True)}


def _stored_choice(plugins: Plugins, inv: Invocation, candidates: Sequence[Candidate]) -> Choice | None:
    """What a store has for exactly this call or its bucket."""
    choice, *_ = ask_policies(plugins.selection(inv, current_scope()), candidates)
    return None if choice is None or choice.record is None else choice


def _is_to_be_measured(choice: Choice | None, budget_s: float) -> bool:
    """Whether nothing is stored, or what was measured with too small a budget, and this one is larger."""
    return choice is None or is_incomplete(choice, AutotunePolicy("on_miss", budget_s))


def _check_names(op: str, parameters: Iterable[str], kwargs: Iterable[str]) -> None:
    """Raise for an argument that is neither one of the operation nor one of ``autotune``."""
    signature = inspect.signature(autotune).parameters.values()
    options = [parameter.name for parameter in signature if parameter.kind is parameter.KEYWORD_ONLY]
    names = [*options, *parameters]
    for name in kwargs:
        if name not in names:
            hint = suggestion(name, names)
            raise TypeError(f"autotune: takes the arguments of {op}, and {', '.join(options)}; got {name!r}{hint}")


def _autotune_call(
    direction: str,
    configs: Any,
    budget_s: float,
    remember: bool,
    calls: tuple[int, int],
    registry: Registry,
    op: str,
    /,
    *args: Any,
    backend: str | None,
    **kwargs: Any,
) -> TuningResult:
    # Concrete arrays are prepared in a thread, because a trace around this call would turn them into tracers.
    has_tracers, cfg = _has_tracers(args, kwargs), kwargs.pop("cfg", None)
    _check_names(op, registry.operation(op).signature.parameters, kwargs)
    prepare = functools.partial(abstract_call, registry, op, args, kwargs, backend, cfg, has_values=not has_tracers)
    call = prepare() if has_tracers else run_in_thread(prepare, None, Settings.current())
    if direction != "forward" and call.request.operation.backward is None:
        raise ValueError(f"{op} has no backward operation to tune")
    share = budget_s / 2 if direction == "both" else budget_s
    result = TuningResult()
    if not all(map(_is_here, call.values or ())):
        call = attrs.evolve(call, values=None)  # the operation makes samples
    if direction != "backward":
        request, values = call.request, call.values
        inv = request.invocation(call.avals, call.target)
        inputs = None if values is None else dict(zip(request.arrays, values, strict=True))
        result |= _tune_invocation(registry, inv, backend, configs, share, remember, inputs, calls)
    if direction != "forward":
        inv, inputs = _backward(call)
        result |= _tune_invocation(registry, inv, backend, configs, share, remember, inputs, calls)
    return result


def _is_here(array: Any) -> bool:
    """Whether this process has all of an array, and not only the shards on its own devices."""
    return bool(getattr(array, "is_fully_addressable", True))


def _notes_on_processes() -> tuple[str, ...]:
    """What becomes of a measurement in a program of several processes."""
    if jax.process_count() == 1:
        return ()
    return (
        f"measured by process {jax.process_index()} of {jax.process_count()}, alone: their common programs take what "
        "the first process has stored, if ejkernel-agree is installed, and else no measurement",
    )


def _has_tracers(*values: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))


def _backward(call: AbstractCall) -> tuple[Invocation, dict[str, Any] | None]:
    """The invocation of the backward operation, and the forward's inputs if there are any."""
    backward, avals = call.backward()
    inputs = None if call.values is None else dict(zip(call.request.arrays, call.values, strict=True))
    return backward.invocation(avals, call.target), inputs


def passes_of(op: str, arguments: Mapping[str, Any], has_backward: bool = True) -> list[Invocation]:
    """The invocation of a call on abstract arrays, and that of its backward pass for the gradients of all floating
    arrays, if it has one.
    """
    call = abstract_call(ejkernel_core.registry, op, (), dict(arguments))
    passes = [call.request.invocation(call.avals, call.target)]
    if has_backward and call.request.operation.backward is not None:
        with contextlib.suppress(NotDifferentiable):
            backward, avals = call.backward()
            passes.append(backward.invocation(avals, call.target))
    return passes


def _tune_invocation(
    plugins: Plugins,
    inv: Invocation,
    backend: str | None,
    configs: Any,
    budget_s: float,
    remember: bool,
    inputs: dict[str, Any] | None,
    calls: tuple[int, int],
) -> TuningResult:
    """Measure an invocation from the beginning, whatever the stores have."""
    candidates, verdicts = _candidates(plugins, inv, backend)
    if not candidates:
        raise NoKernel(f"no kernel can do {inv}\n" + "\n".join(f"  {verdict}" for verdict in verdicts))
    with _measurement(plugins, inv, budget_s) as measurement:
        tuned = measurement.run(candidates, remember, inputs, configs, calls)
    return TuningResult((_with_notes(tuned, _broken(verdicts)),))


@attrs.frozen(eq=False)
class _Measurement:
    """The measurement of one invocation, which no other process makes meanwhile."""

    plugins: Plugins
    selection: Selection
    budget_s: float
    earlier: Earlier
    report: Callable[[Progress], None]

    def run(
        self,
        candidates: Sequence[Candidate],
        remember: bool,
        inputs: dict[str, Any] | None = None,
        configs: Any = None,
        calls: tuple[int, int] = (1, 46),
        record: Record | None = None,
        is_resumed: bool = False,
        has_burst_ranking: bool = False,
    ) -> Tuned:
        """Measure, and store the result. With ``is_resumed``, the results of an unfinished measurement count; without
        it, only those that ended a process do.
        """
        entries = self.earlier.entries
        known = entries if is_resumed else [entry for entry in entries if entry.reason.startswith(Reason.CRASHED)]
        inv, reference = self.selection.inv, self.selection.reference
        announcer = Announcer(self.report, inv, self.budget_s)
        arguments = (known, calls, self.earlier.crashed, record, has_burst_ranking)
        try:
            tuned = tune(inv, candidates, reference, self.budget_s, inputs, configs, announcer, *arguments)
            announcer.finish(tuned.entries, tuned.seconds)
        finally:
            announcer.finish()
        if remember and tuned.records:
            remember_records(self.selection, tuned.records, record)
            self.plugins.invalidate(inv)
        return _with_notes(tuned, _notes_on_processes())


@contextlib.contextmanager
def _measurement(plugins: Plugins, inv: Invocation, budget_s: float) -> Iterator[_Measurement]:
    scope = current_scope()
    waiting_scope = attrs.evolve(scope, policy=attrs.evolve(scope.policy, budget_s=budget_s, wait=True))
    selection = plugins.selection(inv, waiting_scope)
    with exclusive_measurement(selection) as (earlier, reporter):
        yield _Measurement(plugins, selection, budget_s, earlier, reporter.report)


# -- recording -------------------------------------------------------------------------------------------------------


class Recorder:
    """The invocations for which a choice was made, each once. They have shapes and options, and no arrays."""

    def __init__(self) -> None:
        self._invocations: dict[Any, Invocation] = {}

    def __call__(self, inv: Invocation, plugins: Plugins) -> None:
        try:
            key: Any = inv.key
        except TypeError:  # an option without content, so there is no key
            key = str(inv)
        _keep_plugins(self._invocations.setdefault((key, id(plugins)), inv), plugins)

    def __iter__(self) -> Iterator[Invocation]:
        return iter(list(self._invocations.values()))

    def __len__(self) -> int:
        return len(self._invocations)

    def clear(self) -> None:
        """Remove all invocations."""
        self._invocations.clear()


#: All invocations that are recorded in this process.
process_recorder = Recorder()
_numbers = itertools.count(1)


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Collect the invocations of all calls that are compiled in this ``with`` block, backward passes included.

    Functions that JAX compiled before are compiled again, so that their calls are recorded. ``jax.jit(f).lower(...)``
    is enough; nothing has to run. The invocations are in ``get_invocations()`` too.

    >>> query = jax.ShapeDtypeStruct((1, 4, 2, 8), "float32")
    >>> with recording() as recorder:
    ...     _ = jax.jit(lambda q: ejkernel_core.call("flash_attention", q, q, q)).lower(query)
    >>> [inv.op for inv in recorder]
    ['flash_attention']
    """
    recorder, number = Recorder(), next(_numbers)

    def change(scope: Scope) -> Scope:
        listeners: tuple[Any, ...] = (*scope.listeners, recorder, process_recorder)
        return attrs.evolve(scope, listeners=listeners, state=f"{scope.state};recording {number}")

    with ScopeChange(change):
        yield recorder


def record_invocation(kernel: Any, inv: Any) -> None:
    """Record one invocation of a kernel (an object, or the name of an operation), without its arrays.

    >>> query = jax.ShapeDtypeStruct((1, 4, 2, 8), "float32")
    >>> inv = ejkernel_core.invocation("flash_attention", query, query, query)
    >>> record_invocation("flash_attention", inv)
    >>> inv.key in [recorded.key for recorded in get_invocations()]
    True
    >>> clear_invocations()
    """
    name, core = kernel if isinstance(kernel, str) else kernel.name, _core_invocation(inv)
    if core.op != name:
        raise ValueError(f"record_invocation: the invocation is of {core.op!r}, not of {name!r}")
    process_recorder(attrs.evolve(core, arguments=abstractify(dict(core.arguments))), _plugins_of(inv))


def _core_invocation(inv: Any) -> Invocation:
    """The core's invocation in the invocation of a kernel object."""
    core: Invocation = getattr(inv, "core", inv)
    return core


#: By the id of an invocation, for as long as it exists: a reference to it, and the registry that chooses for it.
_plugins_by_id: dict[int, tuple[weakref.ref[Invocation], Plugins]] = {}


def _keep_plugins(inv: Invocation, plugins: Plugins) -> None:
    number = id(inv)
    _plugins_by_id[number] = weakref.ref(inv, lambda _: _plugins_by_id.pop(number, None)), plugins


def _plugins_of(inv: Any) -> Plugins:
    """The core of the registry that chooses for an invocation, which is what listeners get."""
    entry = _plugins_by_id.get(id(_core_invocation(inv)))
    if entry is not None:
        return entry[1]
    if hasattr(getattr(inv, "kernel", None), "_call_registry"):
        own: Plugins = inv.kernel._call_registry(lambda registry, *args, **kwargs: registry.core, inv.args, inv.kwargs)
        return own
    return ejkernel_core.registry.core


def get_invocations() -> list[Invocation]:
    """All invocations that were recorded in this process.

    >>> clear_invocations()
    >>> get_invocations()
    []
    """
    return list(process_recorder)


def clear_invocations() -> None:
    """Remove all recorded invocations.

    >>> clear_invocations()
    >>> len(get_invocations())
    0
    """
    process_recorder.clear()
