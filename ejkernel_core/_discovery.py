"""What is installed, read from entry-point metadata alone: no plugin is imported here."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import metadata
from typing import Any

import attrs

KERNELS = "ejkernel.kernels"
OPERATIONS = "ejkernel.operations"
POLICIES = "ejkernel.policies"


@attrs.frozen
class Entry:
    """One promise of one distribution: that ``value`` (module or module:attribute) is the plugin called ``name``."""

    group: str
    name: str
    value: str
    distribution: str
    version: str
    _point: Any = attrs.field(eq=False, repr=False)

    @property
    def provider(self) -> str:
        return f"{self.distribution} {self.version}".rstrip()

    @property
    def is_local(self) -> bool:
        """Registered at run time."""
        return self._point is None

    def load(self) -> Any:
        return self._point.load()


def installed(selection: str | None) -> tuple[Entry, ...]:
    """Every entry of the three groups, of the distributions that ``selection`` (EJKERNEL_PLUGINS) lets in.

    A distribution that is on the path twice counts once: the first one, as for imports.
    """
    points = metadata.entry_points()
    entries = [_entry(point) for group in (OPERATIONS, KERNELS, POLICIES) for point in points.select(group=group)]
    return tuple(dict.fromkeys(entry for entry in entries if _selected(entry.distribution, selection)))


def local_entry(group: str, name: str) -> Entry:
    """The entry of something registered at run time."""
    return Entry(group, name, "", "registered at run time", "", None)


def version_of(distribution: str) -> str:
    """The version that is installed, or "not installed"."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _entry(point: metadata.EntryPoint) -> Entry:
    dist = point.dist
    name, version = (dist.name, dist.version) if dist else ("unknown distribution", "")
    return Entry(point.group, point.name, point.value, name, version, point)


def _selected(distribution: str, selection: str | None) -> bool:
    if selection is None:
        return True
    words = [word.strip() for word in selection.split(",") if word.strip()]
    left_out = {_normal(word[1:]) for word in words if word.startswith("-")}
    let_in = {_normal(word) for word in words if not word.startswith("-")}
    name = _normal(distribution)
    # "-a" alone means all but a; an empty list means none.
    return name not in left_out and (name in let_in or (bool(left_out) and not let_in))


def _normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def duplicates(entries: Iterable[Entry]) -> str:
    """The sentence for one name that several distributions claim."""
    owners = " and ".join(f"{entry.provider} ({entry.value})" for entry in entries)
    return f"claimed by {owners}; uninstall one, or leave one out: EJKERNEL_PLUGINS=-<distribution>"
