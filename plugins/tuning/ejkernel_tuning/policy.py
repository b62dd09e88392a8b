"""The policy ``tuner``. It measures a call for which no store has a record, where the scope's policy is to measure."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from ejkernel_core import Candidate, Invocation, Record, Scope, Unsupported, hookimpl
from ejkernel_core.extend import Broken, Earlier, LoadedKernel, Progress

from ._autotune import tune
from ._measurement import NO_WINNER, NOTHING_TO_SEE
from ._progress import Announcer
from ._result import Tuned

#: Low, so that any other tuner that is installed comes first.
RANK = 20


@hookimpl
def measure(
    inv: Invocation,
    candidates: Sequence[Candidate],
    reference: LoadedKernel | Broken | None,
    scope: Scope,
    earlier: Earlier,
    record: Record | None,
    report: Callable[[Progress], None],
) -> tuple[Record, ...]:
    """Measure all configurations of all candidates, within the policy's budget."""
    announcer = Announcer(report, inv, scope.policy.budget_s)
    try:
        tuned = tune(
            inv,
            candidates,
            reference,
            scope.policy.budget_s,
            report=announcer,
            earlier=earlier.entries,
            crashed=earlier.crashed,
            record=record,
        )
        if not tuned.records:
            # The announcer finishes without entries, so the next measurement starts from the beginning.
            if record is None:
                _warn_of_no_result(tuned, scope)
            raise Unsupported(f"nothing could be measured:\n{tuned}")
        announcer.finish(tuned.entries, tuned.seconds)
    finally:
        announcer.finish()
    return tuned.records


def _warn_of_no_result(tuned: Tuned, scope: Scope) -> None:
    reason = next((e.reason for e in tuned.entries if e.is_usual and e.reason), "")
    why = next((note for note in tuned.notes if note in (NO_WINNER, NOTHING_TO_SEE)), reason)
    warnings.warn(
        f"{tuned.description}: nothing was selected within {scope.policy.budget_s:g} s ({why}), so it runs as it "
        "would without tuning, which explain shows. Give it more time, policy_override(budget_s=...), or see what is "
        "wrong: print(ejkernel_tuning.autotune(...))",
        RuntimeWarning,
        stacklevel=2,
    )
