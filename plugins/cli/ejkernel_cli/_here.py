"""The plugins as they are on this machine: what is loaded, what is broken, and what runs on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from ._metadata import (
    EXTRAS,
    KERNELS,
    OPERATIONS,
    absent_distributions,
    distribution,
    entry_points,
    is_selected,
    selection,
)

if TYPE_CHECKING:
    from ejkernel_core import Registry
    from ejkernel_core.extend import LoadedKernel

#: What the reason of a refusal has where something is missing.
INSTRUCTION = "pip install"


@attrs.frozen
class KernelHere:
    """One installed kernel, and whether it runs on the platform of this machine."""

    operation: str
    backend: str
    distribution: str
    #: "runs", "needs" (something to be installed), "not here", "broken", "not selected".
    status: str
    #: Its rank on the platform where that is a number.
    rank: int | None = None
    reason: str = ""


def kernels_here(registry: Registry, platform: str) -> list[KernelHere]:
    """All installed kernels, those that EJKERNEL_PLUGINS leaves out too."""
    rows = []
    needs = _needs(registry)
    broken = {entry.name: fault.reason for entry, fault in registry.inspect() if fault and entry.group == KERNELS}
    for point in entry_points(KERNELS):
        operation, _, backend = point.name.rpartition(".")
        name = distribution(point)
        if not is_selected(name, selection()):
            row = KernelHere(operation, backend, name, "not selected", reason="EJKERNEL_PLUGINS leaves it out")
        elif point.name in broken:
            row = KernelHere(operation, backend, name, "broken", reason=broken[point.name])
        else:
            row = _row(registry.kernel(operation, backend), name, platform, needs.get(point.name, ""))
        rows.append(row)
    return sorted(rows, key=lambda row: (row.operation, -(row.rank or 0), row.backend))


def _row(kernel: LoadedKernel, name: str, platform: str, need: str) -> KernelHere:
    rank = kernel.rank_on(platform)
    if rank is None:
        platforms = ", ".join(kernel.platforms or ())
        return KernelHere(kernel.op, kernel.backend, name, "not here", reason=f"runs on {platforms}")
    status, number = ("needs" if need else "runs"), (None if callable(rank) else rank)
    return KernelHere(
        kernel.op, kernel.backend, name, status, number, need or ("rank by call" if callable(rank) else "")
    )


def _needs(registry: Registry) -> dict[str, str]:
    """By kernel: why it refuses the first example of its operation, where the reason is that something is missing.

    A kernel says so only when it gets a call.
    """
    reasons: dict[str, str] = {}
    for name in registry.names(OPERATIONS):
        try:
            example = next(iter(registry.operation(name).examples()))  # type: ignore[misc]
            explanation = registry.explain(example.op, **example.abstract())
        except Exception:  # no example, or one of a broken plugin, which the list shows anyway
            continue
        verdicts = [*explanation.verdicts, *(explanation.backward.verdicts if explanation.backward else ())]
        reasons |= {v.name: v.reason for v in verdicts if v.status == "refused" and INSTRUCTION in v.reason}
    return reasons


def install_line(platform: str) -> str:
    """The sentence that says what would bring more kernels for a platform; "" where all of it is installed."""
    names = absent_distributions(platform)
    if not names:
        return ""
    return f'not installed: {", ".join(names)}; pip install "ejkernel-core[{EXTRAS[platform]}]" brings them'
