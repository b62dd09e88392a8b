"""What is installed, and what could be, read from metadata alone: no plugin is imported here."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import metadata
from typing import Any

import attrs

KERNELS = "ejkernel.kernels"
OPERATIONS = "ejkernel.operations"
POLICIES = "ejkernel.policies"

#: The distribution of the core. Its extras name the plugins that belong to it, and share the first word of their names.
CORE = "ejkernel-core"
FAMILY = "ejkernel-"
#: One line of a distribution's requirements that holds for an extra alone.
_REQUIREMENT = re.compile(r"""(?P<name>[\w.-]+).*;.*\bextra\s*==\s*['"](?P<extra>[\w.-]+)['"]""")


@attrs.frozen
class Entry:
    """One promise of one distribution: that ``value`` (module or module:attribute) is the plugin called ``name``."""

    group: str
    name: str
    value: str
    distribution: str
    version: str
    _point: Any = attrs.field(eq=False, repr=False)
    provider: str = attrs.field(init=False, eq=False, repr=False)

    @provider.default
    def _provider(self) -> str:
        return f"{self.distribution} {self.version}".rstrip()

    @property
    def is_local(self) -> bool:
        """Registered at run time."""
        return self._point is None

    def load(self) -> Any:
        return self._point.load()


@attrs.frozen
class Broken:
    """A plugin that cannot be used, and why."""

    entry: Entry
    reason: str


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


def extras() -> dict[str, tuple[str, ...]]:
    """The extras of the core that name plugins, and the distributions that each names."""
    try:
        requirements = metadata.requires(CORE) or []
    except metadata.PackageNotFoundError:
        requirements = []
    named: dict[str, tuple[str, ...]] = {}
    for needed in filter(None, map(_REQUIREMENT.match, requirements)):
        name, extra = normal(needed["name"]), needed["extra"]
        if name.startswith(FAMILY) and name != CORE:
            named[extra] = (*named.get(extra, ()), name)
    return named


def backend_of(distribution: str) -> str:
    """The backend that a distribution of the core's family has in its name.

    >>> backend_of("ejkernel-pallas-tpu")
    'pallas_tpu'
    """
    return distribution.removeprefix(FAMILY).replace("-", "_")


def _entry(point: metadata.EntryPoint) -> Entry:
    dist = point.dist
    # Where an installation was interrupted, there are entry points without the rest.
    described: Any = (dist and dist.metadata) or {}
    name, version = described.get("Name") or "unknown distribution", described.get("Version") or ""
    return Entry(point.group, point.name, point.value, name, version, point)


def _selected(distribution: str, selection: str | None) -> bool:
    if selection is None:
        return True
    words = [word.strip() for word in selection.split(",") if word.strip()]
    left_out = {normal(word[1:]) for word in words if word.startswith("-")}
    let_in = {normal(word) for word in words if not word.startswith("-")}
    name = normal(distribution)
    # "-a" alone means all but a; an empty list means none.
    return name not in left_out and (name in let_in or (bool(left_out) and not let_in))


def normal(distribution: str) -> str:
    """The one of the ways to write its name that metadata compares.

    >>> normal("Ejkernel_Pallas.TPU")
    'ejkernel-pallas-tpu'
    """
    return re.sub(r"[-_.]+", "-", distribution).lower()


def duplicates(entries: Iterable[Entry]) -> str:
    """The sentence for one name that several distributions claim."""
    owners = " and ".join(f"{entry.provider} ({entry.value})" for entry in entries)
    return f"claimed by {owners}; uninstall one, or leave one out: EJKERNEL_PLUGINS=-<distribution>"
