"""The warning for a call that runs by the reference because there is no better kernel."""

from __future__ import annotations

import warnings

from ._plan import Plan
from ._plugins import Plugins

#: The operations that a warning was given for. The values are tokens, so that one thread alone gives it.
_warned_operations: dict[str, object] = {}


def warn_of_reference(plan: Plan, registry: Plugins) -> None:
    """Warn, once for each operation, where the plan falls back to the reference for lack of another kernel."""
    operation, kernel, token = plan.invocation.operation, plan.kernel, object()
    if operation is None or kernel.backend != operation.reference or _is_meant_to_run(plan):
        return
    reason = _reason(plan, registry)
    if reason and _warned_operations.setdefault(operation.name, token) is token:
        warnings.warn(
            f"{operation.name} runs by its reference, {kernel.name} ({kernel.provider}), which is slow: {reason}. Or "
            f"pass backend={kernel.backend!r}, and nothing is said",
            RuntimeWarning,
            stacklevel=2,
        )


def _is_meant_to_run(plan: Plan) -> bool:
    """Whether the reference has a rank of its own on the platform: then it is not a fallback."""
    rank = (plan.kernel.platforms or {}).get(plan.invocation.platform, 0)
    return callable(rank) or rank > 0


def _reason(plan: Plan, registry: Plugins) -> str | None:
    """Why there is no better kernel, and what to do; None where others can run the call, or refuse it with a reason."""
    op, reference = plan.invocation.op, plan.kernel
    names = {f"{op}.{backend}" for backend in registry.backends(op)} - {reference.name}
    other_verdicts = [verdict for verdict in plan.verdicts if verdict.name in names]
    broken = [verdict for verdict in other_verdicts if verdict.status == "broken"]
    if not other_verdicts and not registry.is_local(reference):
        return registry.hints.no_other_kernel(op)
    if not broken or any(verdict.status == "able" for verdict in other_verdicts):
        return None
    faults = "; ".join(map(str, broken))
    subject, objects = ("another kernel is", "it") if len(broken) == 1 else ("other kernels are", "them")
    return f"{subject} broken: {faults}. Mend {objects}, or uninstall; EJKERNEL_PLUGINS=-<distribution> leaves one out"
