"""List the operations, their backends, and the distributions that bring them.

Everything is read from metadata, so this works where JAX cannot be imported, too. Only ``--here`` imports the core.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata
from typing import Any

import click

from ._metadata import (
    BENCHMARKS,
    COMMANDS,
    KERNELS,
    OPERATIONS,
    POLICIES,
    check_selection,
    distribution,
    entry_points,
    is_selected,
    provider,
    selection,
)
from ._output import json_option, print_json, print_line, print_table

#: What the groups of entry points have, beside operations and kernels. EJKERNEL_PLUGINS selects policies only.
OTHERS = {POLICIES: "policies", BENCHMARKS: "benchmarks", COMMANDS: "commands"}


@click.command("list")
@click.option("--here", is_flag=True, help="Load all kernels, and show which of them run on this machine.")
@json_option
def command(here: bool, as_json: bool) -> None:
    """List the operations, their backends, and the distributions that bring them.

    EJKERNEL_PLUGINS selects distributions here as it does in a program.
    """
    check_selection(selection())
    if here:
        _list_here(as_json)
    elif as_json:
        print_json(_as_dict())
    else:
        _print()


def _selected(group: str) -> list[metadata.EntryPoint]:
    """The entry points of a group that a program would use."""
    is_plugin = group in (OPERATIONS, KERNELS, POLICIES)
    points = (p for p in entry_points(group) if not is_plugin or is_selected(distribution(p), selection()))
    return sorted(points, key=lambda point: (point.name, distribution(point)))


def _backends() -> dict[str, list[str]]:
    """By operation: the names of its backends, also where no distribution has the operation itself."""
    backends: dict[str, list[str]] = {point.name: [] for point in _selected(OPERATIONS)}
    for point in _selected(KERNELS):
        operation, _, backend = point.name.rpartition(".")
        backends.setdefault(operation, []).append(backend)
    return dict(sorted(backends.items()))


# -- from metadata -----------------------------------------------------------------------------------------------------


def _print() -> None:
    if selection() is not None:
        print_line(f"EJKERNEL_PLUGINS={selection()!r} selects these plugins:\n")
    owners = {point.name: distribution(point) for point in _selected(OPERATIONS)}
    rows = [(name, owners.get(name, "no distribution"), ", ".join(dict.fromkeys(b))) for name, b in _backends().items()]
    if not rows:
        print_line('no operations; pip install "ejkernel-core[cpu]" (or cuda, tpu, all) brings the standard ones\n')
    else:
        print_table(("operation", "from", "backends"), rows)
        print_line()
        print_table(("backend", "from", "kernels"), _kernel_counts())
        print_line()
    for group, heading in OTHERS.items():
        if points := _selected(group):
            print_table((heading, "from"), _names_by_provider(points))
            print_line()
    print_line("'ejkernel list --here' shows what runs on this machine")


def _kernel_counts() -> list[tuple[str, str, int]]:
    """By backend and distribution: the number of kernels."""
    counts: dict[tuple[str, str], int] = {}
    for point in _selected(KERNELS):
        key = point.name.rpartition(".")[2], provider(point)
        counts[key] = counts.get(key, 0) + 1
    return [(*key, count) for key, count in sorted(counts.items())]


def _names_by_provider(points: Iterable[metadata.EntryPoint]) -> list[tuple[str, str]]:
    """The names that each distribution brings, in one row."""
    names: dict[str, list[str]] = {}
    for point in points:
        names.setdefault(provider(point), []).append(point.name)
    return [(", ".join(row), owner) for owner, row in sorted(names.items())]


def _as_dict() -> dict[str, Any]:
    kernels = [
        {"operation": p.name.rpartition(".")[0], "backend": p.name.rpartition(".")[2], "distribution": provider(p)}
        for p in _selected(KERNELS)
    ]
    others = {heading: {p.name: provider(p) for p in _selected(group)} for group, heading in OTHERS.items()}
    operations = {point.name: provider(point) for point in _selected(OPERATIONS)}
    return {"selection": selection(), "operations": operations, "kernels": kernels, **others}


# -- on this machine ---------------------------------------------------------------------------------------------------


def _list_here(as_json: bool) -> None:
    from ._devices import devices

    device = devices()[0]
    platform = device.platform
    import ejkernel_core
    from ejkernel_core.extend import device_name

    from ._here import install_line, kernels_here

    rows = kernels_here(ejkernel_core.registry, platform)
    # Operations and policies that do not load; kernels have rows of their own.
    broken = {e.title: fault.reason for e, fault in ejkernel_core.registry.inspect() if fault and e.group != KERNELS}
    if as_json:
        import attrs

        kernels = [attrs.asdict(row) for row in rows]
        name = device_name(device)
        print_json({"device": name, "platform": platform, "kernels": kernels, "broken": broken})
        return
    print_line(f"on {platform}: {device_name(device)}\n")
    table = [(r.operation, r.backend, r.status, "" if r.rank is None else r.rank, r.reason) for r in rows]
    print_table(("operation", "backend", "here", "rank", "why"), _without_repetition(table))
    for title, reason in broken.items():
        print_line(f"broken: {title}: {reason}")
    print_line("\nof the kernels that run a call, a measured record or else the highest rank decides")
    if line := install_line(platform):
        print_line(line)


def _without_repetition(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The rows, with their first cell only where it differs from that of the row before."""
    previous = [None, *(row[0] for row in rows)]
    return [("" if row[0] == before else row[0], *row[1:]) for row, before in zip(rows, previous, strict=False)]
