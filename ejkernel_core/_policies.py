"""Who has a say in the choice, and how a store answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import pluggy

from ._cache import ConfigCache
from ._discovery import Entry
from ._errors import PASSING, PluginError, RecordError, Unsupported, described, message
from ._hookspecs import BUILT_IN_PREFIX, PROJECT, PolicyHooks, hookimpl
from ._kernel import Candidate, Invocation, LoadedKernel, changeable, changes
from ._keys import Key
from ._layout import LEADING
from ._plan import Choice, Verdict
from ._records import Record, successor
from ._scopes import AutotunePolicy, Scope

#: The rank of a policy that does not say: after the stores.
DEFAULT_RANK = 50
#: The origin of what was laid over everything.
OVERLAY = "overlay"
#: The core's own, in the order in which they are asked.
BUILT_IN_NAMES = ("override", "overlay", "memory", "heuristic")


@attrs.frozen(eq=False, repr=False)
class Policies:
    """Whoever has a say in the choice, for one state of a registry and one scope."""

    #: All that is installed or registered, with memory among them.
    stores: pluggy.PluginManager
    #: What measures: asked last, whatever the scope's own policies are.
    tuners: pluggy.PluginManager
    #: Those that do not load.
    broken: tuple[Verdict, ...] = ()
    #: Where each comes from.
    entries: Mapping[str, Entry] = attrs.field(factory=dict)
    #: By policy and hook: what a policy failed at when it was last told of something. The registry's own.
    failures: dict[tuple[str, str], str] = attrs.field(factory=dict)

    def provider(self, name: str) -> str:
        """Who brings a policy."""
        return self.entries[name].provider if name in self.entries else "built in"

    @property
    def verdicts(self) -> list[Verdict]:
        """What is broken, or failed at the last time it was told of something."""
        failures = [(policy, failure) for (policy, _), failure in list(self.failures.items())]
        return [*self.broken, *(Verdict(name, self.provider(name), "broken", failure) for name, failure in failures)]


def chain(policies: Iterable[tuple[str, Any]], first: Iterable[tuple[str, Any]] = ()) -> pluggy.PluginManager:
    """One manager for policies by name: ``first`` is asked before the others, whatever their rank."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(PolicyHooks)
    # pluggy asks the one that was registered last first.
    ordered = sorted(policies, key=lambda item: getattr(item[1], "RANK", DEFAULT_RANK))
    for name, policy in (*ordered, *first):
        if not manager.is_registered(policy):  # under another name
            manager.register(policy, name)
    return manager


def recalled(
    inv: Invocation, candidates: Sequence[Candidate], policies: Policies, scope: Scope
) -> tuple[Choice | None, Choice | None, list[Verdict]]:
    """The answer of the first that has one, an overlay, memory, or a policy; where nobody has, the nearest of the
    answers for calls near this one; and why others have none. One that fails, or answers what cannot be, is passed over
    as broken; one that says why it has no answer is heard.
    """
    nearest: Choice | None = None
    given = {"inv": inv, "candidates": candidates, "scope": scope}
    passed: list[Verdict] = []
    for name, answer in _in_order(given, policies, scope):
        choice, status, reason = None, "broken", None
        try:
            choice = answer()
            reason = misfit(choice, candidates)
        except Unsupported as refusal:
            status, reason = "no answer", message(refusal)
        except PASSING:
            raise
        except BaseException as fault:
            reason = f"select_config raised {described(fault)}"
        if reason is None and choice is not None:
            status, reason = _checked(inv, choice, _kernel_of(choice, candidates))
        if reason is not None:
            passed.append(Verdict(name, policies.provider(name), status, reason))
        elif choice is not None and choice.distance > 0:
            nearest = min(nearest or choice, choice, key=lambda choice: choice.distance)
        elif choice is not None:
            return choice, None, passed
    return None, nearest, passed


def _checked(inv: Invocation, choice: Choice, kernel: LoadedKernel) -> tuple[str, str | None]:
    """Why the kernel cannot run with what was chosen, and whether the kernel is broken; for an overlay, which means
    what it says, an error.
    """
    try:
        kernel.check_cfg(inv, choice.cfg)
        return "", None
    except Unsupported as refusal:
        status, reason = "no answer", message(refusal)
    except PASSING:
        raise
    except BaseException as fault:
        status, reason = "broken", f"check_cfg of {kernel.name} ({kernel.provider}) raised {described(fault)}"
    if choice.origin != OVERLAY:
        return status, reason
    error = Unsupported if status == "no answer" else PluginError
    raise error(f"the overlay has {choice.cfg} for {kernel.name}, which cannot run with it: {reason}")


def _in_order(
    given: Mapping[str, Any], policies: Policies, scope: Scope
) -> Iterator[tuple[str, Callable[[], Choice | None]]]:
    for overlay in scope.overlays:
        # Who lays something over everything means it, whatever took part when it was measured.
        find = partial(recall, given["inv"], given["candidates"], OVERLAY, overlay.find, by_hand=True)
        yield f"{BUILT_IN_PREFIX}overlay", find
    for policy in reversed(policies.stores.hook.select_config.get_hookimpls()):
        ask: Any = policy.function
        yield policy.plugin_name, partial(ask, *(given[name] for name in policy.argnames))


def _kernel_of(choice: Choice, candidates: Sequence[Candidate]) -> LoadedKernel:
    return next(candidate.kernel for candidate in candidates if candidate.backend == choice.backend)


def misfit(choice: Any, candidates: Sequence[Candidate]) -> str | None:
    """What is wrong with a policy's answer."""
    if choice is None:
        return None
    if not isinstance(choice, Choice):
        return f"select_config returned a {type(choice).__name__}, no Choice"
    if not isinstance(choice.record, (Record, type(None))):
        return f"{choice.origin} gives a {type(choice.record).__name__} for a record"
    if type(choice.distance) not in (int, float) or not choice.distance >= 0:
        return f"{choice.origin} gives {choice.distance!r} for a distance"
    if choice.measured and (choice.record is None or choice.record.provenance is None):
        return f"{choice.origin} measured, and gives no record with a provenance"
    chosen = next((c for c in candidates if c.backend == choice.backend), None)
    if chosen is None:
        return f"{choice.origin} chose backend {choice.backend!r}, which is not among the candidates"
    kind = chosen.kernel.config_type  # not the heuristic's type: a kernel that does not say may take several
    if kind is not None and not isinstance(choice.cfg, kind):
        got = f"a value of type {type(choice.cfg).__name__}"
        return f"{choice.origin} chose {got} for {chosen.kernel.name}, not its Config"
    reason = changeable(choice.cfg)
    return reason and f"{choice.origin} chose what can be changed for {chosen.kernel.name}: {reason}"


def tell(policies: Policies, hook: str, until: type | None = None, **given: Any) -> Any:
    """Tell every policy that implements this hook; with ``until``, up to the first that answers with one of these,
    which is given back, or says by ``Unsupported`` why not. Who failed is noted: what cannot be remembered or shown can
    be used.
    """
    for policy in reversed(getattr(policies.stores.hook, hook).get_hookimpls()):
        answer, failure = None, None
        try:
            answer = policy.function(*(given[name] for name in policy.argnames))
        except PASSING:
            raise
        except BaseException as fault:
            if until is not None and isinstance(fault, Unsupported):
                raise
            failure = f"{hook} raised {described(fault)}"
        if until is not None and not isinstance(answer, until | None):
            answer, failure = None, f"{hook} returned a {type(answer).__name__}, no {until.__name__}"
        if failure is not None:
            policies.failures[policy.plugin_name, hook] = failure
        else:
            policies.failures.pop((policy.plugin_name, hook), None)
        if until is not None and answer is not None:
            return answer
    return None


def learn(policies: Policies, inv: Invocation, choice: Choice) -> None:
    """Tell everybody who remembers what was measured."""
    tell(policies, "config_selected", inv=inv, choice=choice)


def tuner_name(policies: Policies) -> str | None:
    """The policy that measures; None where nothing that is installed does."""
    tuners = policies.tuners.hook.measure.get_hookimpls()
    return tuners[-1].plugin_name if tuners else None


def is_short(choice: Choice, policy: AutotunePolicy) -> bool:
    """Whether it comes of a contest that did not reach everything, and the policy has more time for it."""
    provenance = choice.record.provenance if choice.record else None
    # Who lays something over everything means it.
    if policy.mode != "on_miss" or choice.origin == OVERLAY or provenance is None or provenance.shortfall is None:
        return False
    return policy.budget_s > provenance.shortfall.budget_s


# -- how a store answers ---------------------------------------------------------------------------------------------

Find = Callable[[Key, Candidate], Record | None]
#: A record of calls that are further away from a call says nothing about it: the product of the ratios of their sizes.
FARTHEST = 256


def recall(
    inv: Invocation,
    candidates: Sequence[Candidate],
    origin: str,
    find: Find,
    by_hand: bool = False,
    near: Callable[[Key], Iterable[Key]] | None = None,
    other_versions: bool = False,
) -> Choice | None:
    """What a store answers: the fastest of the candidates that it has records of, for the call or for those like it.

    ``find`` gives the record of one candidate, None, or raises ``RecordError`` where there is one that cannot be read:
    if nothing else is found, these reasons are what ``Unsupported`` says. ``near`` gives the keys of the same ``kind``
    that the store has: the nearest answers where there is nothing for the call itself. ``other_versions`` takes what
    was measured with other versions, too.

    >>> import jax, ejkernel_core
    >>> query = jax.ShapeDtypeStruct((1, 4, 2, 8), "float32")
    >>> plan = ejkernel_core.plan("flash_attention", query, query, query, backend="reference")
    >>> candidate, store = Candidate(plan.kernel, plan.cfg), ejkernel_core.ConfigCache()
    >>> store.put(plan.invocation.key, plan.cfg)
    >>> recall(plan.invocation, [candidate], "my store", store.find).origin
    'my store'
    """
    try:
        keys = inv.tuning_keys
    except TypeError as fault:  # an option that has no content to be remembered by
        raise Unsupported(message(fault)) from fault
    reasons: list[str] = []
    for key in keys:
        found = _records(key, candidates, find, by_hand, by_hand or other_versions, reasons)
        if found:
            candidate, best = min(found, key=lambda item: _milliseconds(item[1]))
            changed = changes(best, candidate)
            note = f"measured with other versions: {changed}" if changed else ""
            return Choice(candidate.backend, best.cfg, origin, key, best, note=note)
    choice = _nearest(inv, candidates, origin, find, near, other_versions) if near and keys[-1].sizes else None
    if choice is None and reasons:
        raise Unsupported("; ".join(dict.fromkeys(reasons)))
    return choice and attrs.evolve(choice, note="; ".join([choice.note, *dict.fromkeys(reasons)]))


def _records(
    key: Key, candidates: Sequence[Candidate], find: Find, by_hand: bool, other_versions: bool, reasons: list[str]
) -> list[tuple[Candidate, Record]]:
    """The candidates that there is a record of, and that record; why there is none of the others is in ``reasons``."""
    backends, found = {candidate.backend for candidate in candidates}, []
    for candidate in candidates:
        try:
            record = find(key, candidate)
        except RecordError as fault:
            reasons.append(message(fault))
            continue
        # A race says nothing about a kernel that did not take part.
        if record is None or not (by_hand or record.provenance is None or backends <= {*record.provenance.backends}):
            continue
        changed = changes(record, candidate)
        if changed and not other_versions:
            reasons.append(f"there is a record of other versions ({changed}): tune again, or set other_versions=True")
        else:
            found.append((candidate, record))
    return found


def _nearest(
    inv: Invocation,
    candidates: Sequence[Candidate],
    origin: str,
    find: Find,
    near: Callable[[Key], Iterable[Key]],
    other_versions: bool,
) -> Choice | None:
    """The answer for the nearest call that differs in axes that only count things."""
    own = inv.tuning_keys[-1]
    distances = {key: _distance(own.sizes, key.sizes) for key in near(own) if key.sizes.keys() == own.sizes.keys()}
    for key in sorted(distances, key=lambda key: (distances[key], key.digest)):
        if not 0 < distances[key] <= math.log2(FARTHEST):
            continue
        found = _records(key, candidates, find, False, other_versions, [])
        # What is the fastest there has to be possible here.
        found = [(candidate, record) for candidate, record in found if candidate.kernel.offers(inv, record.cfg)]
        if found:
            candidate, best = min(found, key=lambda item: _milliseconds(item[1]))
            others = ", ".join(
                f"{_axis_in_words(name)} {key.sizes[name]} for {own.sizes[name]}"
                for name in own.sizes
                if key.sizes[name] != own.sizes[name]
            )
            note = f"the nearest that is remembered: {others}"
            return Choice(candidate.backend, best.cfg, origin, key, best, distance=distances[key], note=note)
    return None


def _axis_in_words(name: str) -> str:
    return f"leading axis {name.removeprefix(LEADING)}:" if name.startswith(LEADING) else name


def _distance(sizes: Mapping[str, int], others: Mapping[str, int]) -> float:
    return sum(abs(math.log2(max(others[name], 1) / max(size, 1))) for name, size in sizes.items())


def _milliseconds(record: Record) -> float:
    """What was put there by hand goes before all that was measured."""
    return record.provenance.milliseconds if record.provenance else 0.0


class Remembered:
    """What was measured and put into a store, or put there by hand: a ``ConfigCache``, or anything with its methods."""

    def __init__(self, store: Any, origin: str) -> None:
        self.store, self.origin = store, origin

    @hookimpl(tryfirst=True)
    def select_config(self, inv: Invocation, candidates: Sequence[Candidate], scope: Scope) -> Choice | None:
        if type(self.store) is ConfigCache and not self.store.generation:  # nothing was ever put
            return None
        near, others = getattr(self.store, "near", None), scope.policy.other_versions
        return recall(inv, candidates, self.origin, self.store.find, near=near, other_versions=others)

    @hookimpl
    def config_selected(self, inv: Invocation, choice: Choice) -> None:
        assert choice.record is not None  # nobody is told of a choice without one
        for key in inv.tuning_keys:
            same = (r for r in self.store.records(key) if r.backend == choice.backend)
            self.store.put(key, successor(next(same, None), choice.record))
