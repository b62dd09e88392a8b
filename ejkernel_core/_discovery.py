"""What is installed, and what could be, read from metadata alone: no plugin is imported here."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable
from importlib import metadata
from typing import Any

import attrs

KERNELS = "ejkernel.kernels"
OPERATIONS = "ejkernel.operations"
POLICIES = "ejkernel.policies"
GROUPS = (OPERATIONS, KERNELS, POLICIES)

#: The distribution of the core. Its extras name the plugins that belong to it, and share the first word of their names.
CORE = "ejkernel-core"
FAMILY = "ejkernel-"
#: One line of a distribution's requirements that holds for an extra alone.
_REQUIREMENT = r"""(?P<name>[\w.-]+).*;.*\bextra\s*==\s*['"](?P<extra>[\w.-]+)['"]"""


@attrs.frozen(eq=False)
class Entry:
    """One promise of one distribution: that ``value`` (module or module:attribute) is the plugin called ``name``."""

    group: str
    name: str
    value: str = ""
    #: None for what is registered at run time.
    _point: metadata.EntryPoint | None = attrs.field(default=None, repr=False)

    # Reading a distribution's metadata takes longer than finding it, and most programs need it of few.

    @functools.cached_property
    def distribution(self) -> str:
        if self._point is None:
            return "registered at run time"
        return self._metadata.get("Name") or "unknown distribution"

    @functools.cached_property
    def version(self) -> str:
        return self._metadata.get("Version") or ""

    @property
    def _metadata(self) -> Any:
        """Where an installation was interrupted, there are entry points without the rest."""
        dist = self._point and self._point.dist
        return (dist and dist.metadata) or {}

    @property
    def provider(self) -> str:
        return f"{self.distribution} {self.version}".rstrip()

    @property
    def title(self) -> str:
        """The plugin, and whose it is, at the beginning of a message."""
        if self._point is None:
            return f"{self.name!r}, registered at run time"
        return f"{self.name!r} of {self.provider} ({self.value})"

    @property
    def is_local(self) -> bool:
        """Registered at run time."""
        return self._point is None

    def load(self) -> Any:
        assert self._point is not None
        return self._point.load()


@attrs.frozen(eq=False)
class Broken:
    """A plugin that cannot be used, and why."""

    entry: Entry
    reason: str


def installed(selection: str | None) -> tuple[Entry, ...]:
    """Every entry of the three groups, of the distributions that ``selection`` (EJKERNEL_PLUGINS) lets in.

    A distribution that is on the path twice counts once: the first one, as for imports.
    """
    points = metadata.entry_points()
    entries = [Entry(p.group, p.name, p.value, p) for group in GROUPS for p in points.select(group=group)]
    claims = Counter((entry.group, entry.name) for entry in entries)
    unique: dict[tuple[str, ...], Entry] = {}
    for entry in filter(lambda entry: _is_selected(entry, selection), entries):
        name = entry.group, entry.name
        unique.setdefault((*name, entry.value, entry.provider) if claims[name] > 1 else name, entry)
    return tuple(unique.values())


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
    for needed in filter(None, (re.match(_REQUIREMENT, line) for line in requirements)):
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


def _is_selected(entry: Entry, selection: str | None) -> bool:
    if selection is None:
        return True
    words = [word.strip() for word in selection.split(",") if word.strip()]
    left_out = {normal(word[1:]) for word in words if word.startswith("-")}
    let_in = {normal(word) for word in words if not word.startswith("-")}
    name = normal(entry.distribution)
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
