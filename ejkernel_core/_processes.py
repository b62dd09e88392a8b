"""The choice for a program of several processes, which have to choose alike.

They compile one program together. If one of them chose another configuration, they would wait for each other for ever.
A policy with the hook ``settle`` has all of them choose the same. Without one, nothing is measured, and only answers
that are the same in every process are used.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import attrs

from ._errors import PluginError, description
from ._hooks import BUILT_IN_PREFIX
from ._invocation import Invocation
from ._kernel import Candidate
from ._plan import Choice, Verdict
from ._policies import Policies, Selection, fault_of_choice

#: Makes a choice for an invocation, with verdicts on policies. For one of several processes it measures nothing, and
#: uses only what is the same everywhere.
Select = Callable[[Invocation], tuple[Choice, list[Verdict]]]

_RESTRICTION = "nothing is measured, and only answers that are the same in every process count"
_INSTRUCTION = "'pip install ejkernel-agree', for all of them, has them agree"
#: Holds a token once a warning was given, so that one thread alone gives it.
_warnings: dict[str, object] = {}


def settled_choice(
    selection: Selection, candidates: Sequence[Candidate], verdicts: Sequence[Verdict], select: Select
) -> tuple[Choice, list[Verdict]]:
    """The choice of all processes of the program, and verdicts on policies."""
    inv, policies, scope = selection.inv, selection.policies, selection.scope
    settlers = policies.settlers.hook.settle.get_hookimpls()
    if inv.processes is None:
        reason = f"it is unknown here which processes run the program: {_RESTRICTION}"
        return _with_verdict(select(inv), f"{BUILT_IN_PREFIX}agreement", policies, reason)
    reason = f"{processes_in_words(inv.processes)} have to choose alike: {_RESTRICTION}"
    if not settlers:
        if scope.may_measure:
            _warn_once(f"{inv.op}: {reason}. {_INSTRUCTION}", policies)
        return _with_verdict(select(inv), f"{BUILT_IN_PREFIX}agreement", policies, f"{reason}; {_INSTRUCTION}")
    own_verdicts: list[Verdict] = []

    def choose() -> Choice:
        choice, own_verdicts[:] = select(attrs.evolve(inv, processes=()))
        return choice

    name = settlers[-1].plugin_name
    try:
        choice = policies.settlers.hook.settle(
            inv=inv, candidates=candidates, verdicts=verdicts, backend=selection.backend, scope=scope, choose=choose
        )
    except StopIteration as fault:  # a generator or a loop around the call would take it for its own end
        raise PluginError(f"settle of {name} ({policies.provider(name)}) raised {description(fault)}") from fault
    except BaseException as fault:
        fault.add_note(f"in settle of {name} ({policies.provider(name)})")
        raise
    if choice is not None:
        if reason_of_fault := fault_of_choice(choice, candidates):
            raise PluginError(f"settle of {name} ({policies.provider(name)}): {reason_of_fault}")
        return choice, own_verdicts
    if scope.may_measure:
        return _with_verdict(select(inv), name, policies, f"it has no choice. {reason}")
    reason = (
        f"{processes_in_words(inv.processes)} agree when the call is compiled; this is what this process would choose"
    )
    return _with_verdict(select(attrs.evolve(inv, processes=())), name, policies, reason)


def processes_in_words(processes: Sequence[int]) -> str:
    """Several processes, in words.

    >>> processes_in_words((0, 1)), processes_in_words((0, 2, 5))
    ('processes 0 and 1', 'processes 0, 2 and 5')
    """
    *others, last = map(str, processes)
    return f"processes {', '.join(others)} and {last}"


def _with_verdict(
    selected: tuple[Choice, list[Verdict]], name: str, policies: Policies, reason: str
) -> tuple[Choice, list[Verdict]]:
    choice, verdicts = selected
    return choice, [*verdicts, Verdict(name, policies.provider(name), "no answer", reason)]


def _warn_once(text: str, policies: Policies) -> None:
    token = object()
    if _warnings.setdefault("processes", token) is token:
        broken = "".join(f"; {verdict}" for verdict in policies.broken)
        warnings.warn(f"{text}{broken}", RuntimeWarning, stacklevel=2)
