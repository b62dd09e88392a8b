"""The reference as a last resort: whoever gets it without having asked for it is told."""

from __future__ import annotations

import warnings

from ._plan import Plan
from ._plugins import Plugins

#: The operations of which the caller was told that their reference runs.
_WARNED: dict[str, object] = {}


def warn_of_reference(plan: Plan, registry: Plugins) -> None:
    """Tell who has asked for nothing, and gets the reference for want of anything better: once an operation."""
    operation, kernel, here = plan.invocation.operation, plan.kernel, object()
    if operation is None or kernel.backend != operation.reference or _is_meant_to_run(plan):
        return
    reason = _want(plan, registry)
    if reason and _WARNED.setdefault(operation.name, here) is here:
        warnings.warn(
            f"{operation.name} runs by its reference, {kernel.name} ({kernel.provider}), which is slow: {reason}. Or "
            f"pass backend={kernel.backend!r}, and nothing is said",
            RuntimeWarning,
            stacklevel=2,
        )


def _is_meant_to_run(plan: Plan) -> bool:
    """A kernel that gives itself a rank is no last resort, even if it is what JAX differentiates."""
    return (plan.kernel.platforms or {}).get(plan.invocation.platform, 0) > 0


def _want(plan: Plan, registry: Plugins) -> str | None:
    """Why there is nothing better, and what to do; None where others are able, or are there and refuse this call."""
    op, reference = plan.invocation.op, plan.kernel
    names = {f"{op}.{backend}" for backend in registry.backends(op)} - {reference.name}
    others = [verdict for verdict in plan.verdicts if verdict.name in names]
    broken = [verdict for verdict in others if verdict.status == "broken"]
    if not others and not registry.is_local(reference):
        return f"no other kernel of it is installed. {registry.how_to_install()}"
    if not broken or any(verdict.status == "able" for verdict in others):
        return None
    faults = "; ".join(map(str, broken))
    which, them = ("another kernel is", "it") if len(broken) == 1 else ("other kernels are", "them")
    return f"{which} broken: {faults}. Mend {them}, or uninstall; EJKERNEL_PLUGINS=-<distribution> leaves one out"
