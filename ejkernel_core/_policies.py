"""The policies that ship with the core, and the chain that all policies form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pluggy

from ._hookspecs import PROJECT, PolicyHooks, hookimpl
from ._invocation import Invocation
from ._plan import Candidate, Choice, misfit


class Heuristic:
    """The last of the chain: the best candidate by rank, with the configuration its own heuristic gave."""

    @staticmethod
    @hookimpl(trylast=True)
    def select_config(inv: Invocation, candidates: Sequence[Candidate]) -> Choice:
        best = candidates[0]
        return Choice(best.backend, best.cfg, "heuristic")


BUILT_IN: dict[str, Any] = {"heuristic": Heuristic}


def policy_chain(policies: Iterable[tuple[str, Any]]) -> pluggy.PluginManager:
    """One manager for all policies: the first that answers decides."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(PolicyHooks)
    for name, policy in policies:
        manager.register(policy, name)
    return manager


def first_answer(
    chain: pluggy.PluginManager, inv: Invocation, candidates: Sequence[Candidate]
) -> tuple[Choice, dict[str, str]]:
    """Ask each policy in turn. One that fails, or answers what cannot be, is passed over: its name and the reason."""
    faults = {}
    for policy in reversed(chain.hook.select_config.get_hookimpls()):
        given = {"inv": inv, "candidates": candidates}
        try:
            choice: Any = policy.function(*(given[name] for name in policy.argnames))
        except Exception as fault:  # as for kernels: one broken plugin must not break everybody's calls
            faults[policy.plugin_name] = f"select_config raised {type(fault).__name__}: {fault}"
            continue
        wrong = misfit(choice, candidates)
        if wrong:
            faults[policy.plugin_name] = wrong
        elif choice is not None:
            return choice, faults
    raise AssertionError("the heuristic policy always answers")
