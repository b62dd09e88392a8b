"""The policies: how they are asked and notified, and how a store answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import pluggy

from ._discovery import Broken, PluginEntry
from ._display import brief, config_text
from ._errors import PluginError, Unsupported, description, message, plugin_faults
from ._hooks import BUILT_IN_PREFIX, PROJECT, PolicyHooks
from ._invocation import Invocation
from ._kernel import Candidate, LoadedKernel, why_mutable
from ._keys import Key
from ._plan import Choice, Verdict
from ._recall import recall, refuse_to_differ
from ._records import Provenance, Record
from ._scopes import AutotunePolicy, Scope

#: The rank of a policy without ``RANK``: it is asked after the stores.
DEFAULT_RANK = 50
#: The origin of a choice from an overlay.
OVERLAY = "overlay"
#: The core's own policies, in the order in which they are asked.
BUILT_IN_NAMES = ("override", "overlay", "memory", "heuristic")


@attrs.frozen(eq=False, repr=False)
class Policies:
    """The policies for one state of a registry and one scope."""

    #: All policies that are installed or registered, and the memory.
    stores: pluggy.PluginManager
    #: The policies with the hook ``measure``. They are asked last, also where the scope has policies of its own.
    tuners: pluggy.PluginManager
    #: Likewise those with the hook ``settle``.
    settlers: pluggy.PluginManager
    #: The verdicts on policies that do not load.
    broken: tuple[Verdict, ...] = ()
    #: By name: the entry of each installed or registered policy.
    entries: Mapping[str, PluginEntry] = attrs.field(factory=dict)
    #: By policy and hook: how the policy failed when it was last notified. The registry owns this dictionary.
    failures: dict[tuple[str, str], str] = attrs.field(factory=dict)

    def provider(self, name: str) -> str:
        """The distribution that provides a policy."""
        return self.entries[name].provider if name in self.entries else "built in"

    @property
    def verdicts(self) -> list[Verdict]:
        """The verdicts on policies that do not load, or failed when they were last notified."""
        failures = [(policy, failure) for (policy, _), failure in list(self.failures.items())]
        return [*self.broken, *(Verdict(name, self.provider(name), "broken", failure) for name, failure in failures)]


@attrs.frozen(eq=False, repr=False)
class Selection:
    """What a configuration is selected for, and by what."""

    inv: Invocation
    policies: Policies
    scope: Scope
    #: What the caller asks for, if anything.
    backend: str | None = None
    cfg: Any = None
    #: The kernel that the tuner compares results with.
    reference: LoadedKernel | Broken | None = None


def chain(policies: Iterable[tuple[str, Any]], first: Iterable[tuple[str, Any]] = ()) -> pluggy.PluginManager:
    """A plugin manager for policies, given with their names. Those in ``first`` are asked first, at any rank."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(PolicyHooks)
    # pluggy asks the one that was registered last first.
    ordered = sorted(policies, key=lambda item: getattr(item[1], "RANK", DEFAULT_RANK))
    for name, policy in (*ordered, *first):
        if not manager.is_registered(policy):  # it may be there under another name
            manager.register(policy, name)
    return manager


def ask_policies(
    selection: Selection, candidates: Sequence[Candidate]
) -> tuple[Choice | None, Choice | None, list[Verdict]]:
    """Ask the overlays, the memory and the policies, in this order, up to the first that has a choice for the call.

    Returns that choice, or None; in that case, the nearest of the choices for similar calls, or None; and a verdict on
    each policy that is broken (it failed or gave an invalid choice) or has a reason for giving no choice.
    """
    nearest: Choice | None = None
    verdicts: list[Verdict] = []
    for name, answer in _answers(selection, candidates):
        choice, status, reason = None, "broken", None
        try:
            choice = answer()
            reason = fault_of_choice(choice, candidates)
        except Unsupported as refusal:
            status, reason = "no answer", message(refusal)
        except plugin_faults() as fault:
            reason = f"select_config raised {description(fault)}"
        if reason is None and choice is not None:
            status, reason = _check_choice(selection.inv, choice, kernel_of(choice, candidates))
        if reason is not None:
            verdicts.append(Verdict(name, selection.policies.provider(name), status, reason))
        elif choice is not None and choice.distance > 0:
            nearest = min(nearest or choice, choice, key=lambda choice: choice.distance)
        elif choice is not None:
            return choice, None, verdicts
    return None, nearest, verdicts


def _check_choice(inv: Invocation, choice: Choice, kernel: LoadedKernel) -> tuple[str, str | None]:
    """Ask the kernel whether it can run with the choice. Return the status and the reason of a verdict, the reason None
    where it can. The choice of an overlay is explicit, so one that cannot run is an error.
    """
    try:
        kernel.check_cfg(inv, choice.cfg)
        return "", None
    except Unsupported as refusal:
        status, reason = "no answer", message(refusal)
    except plugin_faults() as fault:
        status, reason = "broken", f"check_cfg of {kernel.name} ({kernel.provider}) raised {description(fault)}"
    if choice.origin != OVERLAY:
        return status, reason
    error = Unsupported if status == "no answer" else PluginError
    raise error(f"the overlay has {config_text(choice.cfg)} for {kernel.name}, which cannot run with it: {reason}")


def _answers(
    selection: Selection, candidates: Sequence[Candidate]
) -> Iterator[tuple[str, Callable[[], Choice | None]]]:
    """The name of each overlay and policy, in order, with a function that asks it."""
    inv, scope = selection.inv, selection.scope
    for overlay in scope.overlays:
        # An overlay is explicit: it counts whichever kernels its records were measured against.
        yield f"{BUILT_IN_PREFIX}overlay", partial(recall, inv, candidates, OVERLAY, overlay.find, by_hand=True)
    arguments = {"inv": inv, "candidates": candidates, "scope": scope}
    for policy in reversed(selection.policies.stores.hook.select_config.get_hookimpls()):
        ask: Any = policy.function
        if inv.has_several_processes and not getattr(policy.plugin, "IS_SAME_EVERYWHERE", False):
            ask = refuse_to_differ
        yield policy.plugin_name, partial(ask, *(arguments[name] for name in policy.argnames))


def kernel_of(choice: Choice, candidates: Sequence[Candidate]) -> LoadedKernel:
    """The kernel of a choice."""
    for candidate in candidates:
        if candidate.backend == choice.backend:
            return candidate.kernel
    raise PluginError(_unknown_backend(choice))


def _unknown_backend(choice: Choice) -> str:
    return f"{choice.origin} chose backend {brief(choice.backend)}, which is not among the candidates"


#: The types of a choice's fields. The origin is first, because messages about the others name it. The type of ``cfg``
#: depends on the kernel, and ``note`` is always a text.
FIELD_TYPES = {"origin": str, "backend": str, "key": Key | None, "record": Record | None, "measured": bool}


def _fault_of_fields(choice: Choice) -> str | None:
    for name, kind in FIELD_TYPES.items():
        value = getattr(choice, name)
        if not isinstance(value, kind):
            source, noun = ("it", "an origin") if name == "origin" else (choice.origin, f"a {name}")
            return f"{source} gives a {type(value).__name__} for {noun}"
    if choice.record is not None and not isinstance(choice.record.provenance, Provenance | None):
        return f"{choice.origin} gives a {type(choice.record.provenance).__name__} for a provenance"
    if type(choice.distance) not in (int, float) or not choice.distance >= 0:
        return f"{choice.origin} gives {brief(choice.distance)} for a distance"
    return None


def fault_of_choice(choice: Any, candidates: Sequence[Candidate]) -> str | None:
    """What is wrong with the answer of a policy, in words; None where it is valid."""
    if choice is None:
        return None
    if not isinstance(choice, Choice):
        return f"select_config returned a {type(choice).__name__}, not a Choice"
    if fault := _fault_of_fields(choice):
        return fault
    if choice.measured and (choice.record is None or choice.record.provenance is None):
        return f"{choice.origin} measured, and gives no record with a provenance"
    chosen = next((c for c in candidates if c.backend == choice.backend), None)
    if chosen is None:
        return _unknown_backend(choice)
    config_type = chosen.kernel.config_type  # not the heuristic's type: a kernel that does not say may take several
    if config_type is not None and not isinstance(choice.cfg, config_type):
        got = f"a value of type {type(choice.cfg).__name__}"
        return f"{choice.origin} chose {got} for {chosen.kernel.name}, not its Config"
    reason = why_mutable(choice.cfg)
    return reason and f"{choice.origin} chose what can be changed for {chosen.kernel.name}: {reason}"


def notify(policies: Policies, hook: str, until: type | None = None, **arguments: Any) -> Any:
    """Call a hook of every policy that has it. With ``until``, stop at the first that returns a value of this type, and
    return that; ``Unsupported`` is raised then. Any other failure is noted in ``policies.failures``, and the call goes
    on: a result that cannot be stored or shown can still be used.
    """
    for policy in reversed(getattr(policies.stores.hook, hook).get_hookimpls()):
        answer, failure = None, None
        try:
            answer = policy.function(*(arguments[name] for name in policy.argnames))
        except plugin_faults() as fault:
            if until is not None and isinstance(fault, Unsupported):
                raise
            failure = f"{hook} raised {description(fault)}"
        if until is not None and not isinstance(answer, until | None):
            answer, failure = None, f"{hook} returned a {type(answer).__name__}, not an {until.__name__}"
        if failure is not None:
            policies.failures[policy.plugin_name, hook] = failure
        else:
            policies.failures.pop((policy.plugin_name, hook), None)
        if until is not None and answer is not None:
            return answer
    return None


def remember(policies: Policies, inv: Invocation, choice: Choice) -> None:
    """Have the stores store what was measured."""
    notify(policies, "config_selected", inv=inv, choice=choice)


def tuner_name(policies: Policies) -> str | None:
    """The name of the policy that measures; None where there is none."""
    tuners = policies.tuners.hook.measure.get_hookimpls()
    return tuners[-1].plugin_name if tuners else None


def is_incomplete(choice: Choice, policy: AutotunePolicy) -> bool:
    """Whether the choice is from a measurement that ran out of time, and the policy's budget is larger."""
    provenance = choice.record.provenance if choice.record else None
    # An overlay is explicit, so it is final.
    if policy.mode != "on_miss" or choice.origin == OVERLAY or provenance is None or provenance.shortfall is None:
        return False
    return policy.budget_s > provenance.shortfall.budget_s
