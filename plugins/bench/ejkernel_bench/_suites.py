"""The suites of benchmarks that distributions provide by entry points of the group ``ejkernel.benchmarks``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

import attrs
import click

from ejkernel_core.extend import PluginEntry, conflict

from ._report import Report

GROUP = "ejkernel.benchmarks"


class BrokenSuite(Exception):
    """A suite that cannot be loaded."""


@attrs.frozen(eq=False)
class Suite:
    """A suite by the name of its entry points: one, unless several distributions claim the name."""

    name: str
    entries: tuple[PluginEntry, ...]

    def load(self) -> tuple[Callable[..., Report], str]:
        """The function that runs the suite, and its description. Raises ``BrokenSuite`` with the distribution."""
        if len(self.entries) > 1:
            raise BrokenSuite(f"{self.name!r} is {conflict(self.entries)}")
        (entry,) = self.entries
        try:
            target = entry.load()
        except Exception as fault:  # a broken distribution must not stop the suites of others
            raise BrokenSuite(f"{entry.title} cannot be imported: {type(fault).__name__}: {fault}") from fault
        run = getattr(target, "run", None) if inspect.ismodule(target) else target
        if not callable(run):
            raise BrokenSuite(f"{entry.title} is neither a module with a function 'run' nor a function")
        return run, (inspect.getdoc(target) or "").partition("\n")[0].rstrip(".")

    def options(self) -> Sequence[click.Option]:
        """Those that this suite alone has: ``OPTIONS`` of its module."""
        return tuple(getattr(_module_of(self), "OPTIONS", ()))

    @property
    def documentation(self) -> str:
        """The whole docstring of the module or function, or the reason why there is none."""
        try:
            self.load()
            return inspect.getdoc(self.entries[0].load()) or ""
        except BrokenSuite as fault:
            return f"BROKEN: {fault}"

    @property
    def description(self) -> str:
        """The first line of the docstring of the module or function, or the reason why there is none."""
        try:
            return self.load()[1]
        except BrokenSuite as fault:
            return f"BROKEN: {fault}"


def suites() -> dict[str, Suite]:
    """The suites that are installed, by name. Nothing is imported."""
    entries: dict[str, dict[Any, PluginEntry]] = {}
    for point in metadata.entry_points(group=GROUP):
        entry = PluginEntry(point.group, point.name, point.value, point)
        # A distribution that is on the path twice counts once.
        entries.setdefault(point.name, {}).setdefault((point.value, entry.distribution), entry)
    return {name: Suite(name, tuple(of_name.values())) for name, of_name in sorted(entries.items())}


def peers_of(operation: str) -> Mapping[str, Any]:
    """The peers of the suite with the name of an operation, or whose module has it as ``OPERATION``, by the module's
    function ``peers``; none without it.
    """
    installed = suites()
    named = installed.get(operation)
    modules = map(_module_of, installed.values()) if named is None else [inspect.getmodule(named.load()[0])]
    for module in modules:
        if named is not None or getattr(module, "OPERATION", None) == operation:
            peers = getattr(module, "peers", None)
            return peers() if callable(peers) else {}
    return {}


def _module_of(suite: Suite) -> Any:
    """None for a broken suite."""
    try:
        return inspect.getmodule(suite.load()[0])
    except BrokenSuite:
        return None
