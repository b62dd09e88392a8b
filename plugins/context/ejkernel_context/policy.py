"""The policy ``context``: the rule of the kernels chooses among them, and nothing is measured.

A measurement would run a kernel on one device, which would wait for the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from ejkernel_core import Candidate, Choice, Invocation, Scope, hookimpl

OPERATIONS = frozenset({"context_attention", "context_attention_bwd"})


@hookimpl
def select_config(inv: Invocation, candidates: Sequence[Candidate], scope: Scope) -> Choice | None:
    """The kernel with the highest rank, for the operations of this package only."""
    if inv.op not in OPERATIONS:
        return None
    best = candidates[0]
    return Choice(best.backend, best.cfg, "heuristic", note="it communicates, so that it is never measured")
