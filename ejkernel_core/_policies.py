"""The policies that ship with the core, and the chain that all policies form.

They are asked in this order: an explicit ``cfg``, the overlays of the scope, what is in memory, then everybody's
(stores and models, by RANK), and last the heuristic. pluggy's ``tryfirst`` and ``trylast`` move a policy up or down,
but not past an explicit ``cfg``, an overlay, memory, or the heuristic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pluggy

from ._cache import ConfigCache
from ._errors import NoConfig, RecordError, Unsupported
from ._hookspecs import PROJECT, PolicyHooks, hookimpl
from ._invocation import Invocation, Key
from ._plan import Candidate, Choice, misfit
from ._records import Record, successor
from ._scopes import Scope

#: The rank of a policy that does not say: after the stores, before what measures.
DEFAULT_RANK = 50


class Override:
    """The first of the chain: a configuration that the caller gave is obeyed."""

    @staticmethod
    @hookimpl(tryfirst=True)
    def select_config(candidates: Sequence[Candidate]) -> Choice | None:
        first = candidates[0]
        return Choice(first.backend, first.cfg, "explicit cfg") if first.explicit else None


class Overlays:
    """The second: what ``overlay_cache`` laid over everything, the innermost first."""

    @staticmethod
    @hookimpl(tryfirst=True)
    def select_config(inv: Invocation, candidates: Sequence[Candidate], scope: Scope) -> Choice | None:
        # Who lays something over everything means it, whatever took part when it was measured.
        found = (recall(inv, candidates, "overlay", overlay.find, by_hand=True) for overlay in scope.overlays)
        return next((choice for choice in found if choice is not None), None)


class Remembered:
    """What was measured and put into a store, or put there by hand: a ``ConfigCache``, or anything with its methods."""

    def __init__(self, store: Any, origin: str) -> None:
        self.store, self.origin = store, origin

    @hookimpl(tryfirst=True)
    def select_config(self, inv: Invocation, candidates: Sequence[Candidate]) -> Choice | None:
        return recall(inv, candidates, self.origin, self.store.find)

    @hookimpl
    def config_selected(self, inv: Invocation, choice: Choice) -> None:
        assert choice.record is not None  # nobody is told of a choice without one
        for key in inv.tuning_keys:
            same = (r for r in self.store.records(key) if r.backend == choice.backend)
            self.store.put(key, successor(next(same, None), choice.record))


class Heuristic:
    """The last of the chain: the best candidate by rank, with the configuration its own heuristic gave."""

    @staticmethod
    @hookimpl(trylast=True)
    def select_config(inv: Invocation, candidates: Sequence[Candidate], scope: Scope) -> Choice:
        best = candidates[0]
        if scope.policy.mode == "error_on_miss":
            raise NoConfig(f"no configuration is remembered for {inv}{_keyed(inv)}; the policy is error_on_miss")
        return Choice(best.backend, best.cfg, "heuristic")


def _keyed(inv: Invocation) -> str:
    try:
        return f" (key {inv.key})"
    except TypeError:  # an option that has no content to be remembered by
        return ""


def policy_chain(policies: Iterable[tuple[str, Any]], memory: ConfigCache | None, scope: Scope) -> pluggy.PluginManager:
    """One manager for all policies: these, and the built-in ones around them."""
    policies = list(policies)
    if scope.policy.mode == "on_miss":
        from .tuning import TUNER  # which builds on this module, and is not loaded before something is measured

        policies.append(("built-in tuner", TUNER))
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(PolicyHooks)
    # pluggy asks the one that was registered last first.
    for name, policy in sorted(policies, key=lambda item: getattr(item[1], "RANK", DEFAULT_RANK)):
        manager.register(policy, name)
    if memory is not None:
        manager.register(Remembered(memory, "memory"), "built-in memory")
    for name, built_in in BUILT_IN.items():
        manager.register(built_in, f"built-in {name}")
    return manager


BUILT_IN: dict[str, Any] = {"heuristic": Heuristic, "overlay": Overlays, "override": Override}
#: In the order in which they are asked.
BUILT_IN_NAMES = ("override", "overlay", "memory", "heuristic")


def first_answer(
    chain: pluggy.PluginManager, inv: Invocation, candidates: Sequence[Candidate], scope: Scope
) -> tuple[Choice, list[tuple[str, str, str]]]:
    """Ask each policy in turn. The others' (name, status, reason): one that fails, or answers what cannot be, is
    passed over as broken; one that says why it has no answer is heard.
    """
    passed = []
    given = {"inv": inv, "candidates": candidates, "scope": scope}
    for policy in reversed(chain.hook.select_config.get_hookimpls()):
        try:
            choice: Any = policy.function(*(given[name] for name in policy.argnames))
            wrong = misfit(choice, candidates)
        except Unsupported as reason:
            passed.append((policy.plugin_name, "no answer", str(reason)))
            continue
        except NoConfig as missing:
            why = "".join(f"\n  {name}: {status}, {reason}" for name, status, reason in passed)
            raise NoConfig(f"{missing}{why}") from None
        except Exception as fault:  # as for kernels: one broken plugin must not break everybody's calls
            wrong, choice = f"select_config raised {type(fault).__name__}: {fault}", None
        if wrong:
            passed.append((policy.plugin_name, "broken", wrong))
        elif choice is not None:
            return choice, passed
    raise AssertionError("the heuristic policy always answers")


def tell(chain: pluggy.PluginManager, hook: str, **given: Any) -> list[tuple[str, str, str]]:
    """Tell every policy that implements this hook; the faults, as above."""
    faults = []
    for policy in getattr(chain.hook, hook).get_hookimpls():
        try:
            policy.function(*(given[name] for name in policy.argnames))
        except Exception as fault:  # what cannot be remembered or shown can be used all the same
            faults.append((policy.plugin_name, "broken", f"{hook} raised {type(fault).__name__}: {fault}"))
    return faults


# -- how a store answers ---------------------------------------------------------------------------------------------

Find = Callable[[Key, Candidate], Record | None]


def recall(
    inv: Invocation, candidates: Sequence[Candidate], origin: str, find: Find, by_hand: bool = False
) -> Choice | None:
    """What a store answers: the fastest of the candidates that it has records of, for the call or for those like it.

    ``find`` gives the record of one candidate, None, or raises ``RecordError`` where there is one that cannot be read:
    if nothing else is found, these reasons are what ``Unsupported`` says.

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
        raise Unsupported(str(fault)) from fault
    reasons = []
    backends = {candidate.backend for candidate in candidates}
    for key in keys:
        found = []
        for candidate in candidates:
            try:
                record = find(key, candidate)
            except RecordError as fault:
                reasons.append(str(fault))
                continue
            # A race says nothing about a kernel that did not take part.
            if record and (by_hand or record.provenance is None or backends <= {*record.provenance.backends}):
                found.append((candidate.backend, record))
        if found:
            backend, best = min(found, key=lambda item: _milliseconds(item[1]))
            return Choice(backend, best.cfg, origin, key, best)
    if reasons:
        raise Unsupported("; ".join(reasons))
    return None


def _milliseconds(record: Record) -> float:
    """What was put there by hand goes before all that was measured."""
    return record.provenance.milliseconds if record.provenance else 0.0
