"""The plugins that are installed, and those that could be, read from metadata. No plugin is imported here."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable
from importlib import metadata
from typing import Any

import attrs

from ._display import suggestion

#: The group of the entry points of kernels, "<operation>.<backend>".
KERNELS = "ejkernel.kernels"
#: That of operations.
OPERATIONS = "ejkernel.operations"
#: That of policies.
POLICIES = "ejkernel.policies"
GROUPS = (OPERATIONS, KERNELS, POLICIES)

#: The distribution of the core. Its extras name the project's other distributions, which share the prefix ``FAMILY``.
CORE = "ejkernel-core"
FAMILY = "ejkernel-"
#: The extras for one kind of device, by the platform.
EXTRAS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}
#: The distribution that has the command ``ejkernel``.
COMMAND = "ejkernel-cli"
#: One line of a distribution's requirements that holds for an extra alone.
_REQUIREMENT = r"""(?P<name>[\w.-]+).*;.*\bextra\s*==\s*['"](?P<extra>[\w.-]+)['"]"""


@attrs.frozen(eq=False)
class PluginEntry:
    """An entry point: a distribution says that ``value`` (module or module:attribute) is the plugin ``name``."""

    group: str
    name: str
    value: str = ""
    #: None for a plugin that is registered at run time.
    _point: metadata.EntryPoint | None = attrs.field(default=None, repr=False)

    # Reading the metadata of a distribution is slow, and most programs need it for a few distributions only.

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
        """The distribution's metadata; empty where an interrupted installation left the entry points alone."""
        dist = self._point and self._point.dist
        return (dist and dist.metadata) or {}

    @property
    def provider(self) -> str:
        return f"{self.distribution} {self.version}".rstrip()

    @property
    def title(self) -> str:
        """The plugin and its distribution, as messages begin."""
        if self._point is None:
            return f"{self.name!r}, registered at run time"
        return f"{self.name!r} of {self.provider} ({self.value})"

    @property
    def is_standard(self) -> bool:
        """Whether the plugin is of a distribution that an extra of the core installs."""
        return any(normalized(self.distribution) in names for names in extras().values())

    @property
    def is_local(self) -> bool:
        """Whether the plugin was registered at run time."""
        return self._point is None

    def load(self) -> Any:
        assert self._point is not None
        return self._point.load()


@attrs.frozen(eq=False)
class Broken:
    """A plugin that cannot be used, and the reason."""

    entry: PluginEntry
    reason: str


def installed_entries(selection: str | None) -> tuple[PluginEntry, ...]:
    """All entries of the three groups, of the distributions that ``selection`` (EJKERNEL_PLUGINS) includes.

    Of a distribution that is on the path twice, the first one counts, as it does for imports.
    """
    entries = all_entries()
    claims = Counter((entry.group, entry.name) for entry in entries)
    unique: dict[tuple[str, ...], PluginEntry] = {}
    for entry in filter(lambda entry: _is_selected(entry, selection), entries):
        name = entry.group, entry.name
        unique.setdefault((*name, entry.value, entry.provider) if claims[name] > 1 else name, entry)
    return tuple(unique.values())


def selection_fault(selection: str | None) -> str | None:
    """The end of a sentence about the first name in ``selection`` that is not a distribution's, or None.

    A distribution of this project may be left out where it is not installed.
    """
    for word in _words(selection or ""):
        name = normalized(word.removeprefix("-"))
        is_of_project = any(name in names for names in extras().values())
        if not _is_installed(name) and not (is_of_project and word.startswith("-")):
            distributions = {entry.distribution for entry in all_entries()}
            hint = f"; 'pip install {name}' installs it" if is_of_project else suggestion(name, distributions)
            return f"takes names of installed distributions, with or without '-' in front; got {word!r}{hint}"
    return None


def _is_installed(distribution: str) -> bool:
    try:
        metadata.distribution(distribution)
    except (metadata.PackageNotFoundError, ValueError):  # ValueError for an empty name
        return False
    return True


def all_entries() -> list[PluginEntry]:
    """What all installed distributions declare, whatever is selected."""
    entry_points = metadata.entry_points()
    return [PluginEntry(p.group, p.name, p.value, p) for group in GROUPS for p in entry_points.select(group=group)]


def version_of(distribution: str) -> str:
    """The installed version of a distribution, or "not installed"."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def extras() -> dict[str, tuple[str, ...]]:
    """By the core's extras: the distributions of the project that each of them installs."""
    try:
        requirements = metadata.requires(CORE) or []
    except metadata.PackageNotFoundError:
        requirements = []
    plugins: dict[str, tuple[str, ...]] = {}
    for requirement in filter(None, (re.match(_REQUIREMENT, line) for line in requirements)):
        name, extra = normalized(requirement["name"]), requirement["extra"]
        if name.startswith(FAMILY) and name != CORE:
            plugins[extra] = (*plugins.get(extra, ()), name)
    return plugins


def backend_of(distribution: str) -> str:
    """The backend in the name of one of the project's distributions.

    >>> backend_of("ejkernel-pallas-tpu")
    'pallas_tpu'
    """
    return distribution.removeprefix(FAMILY).replace("-", "_")


def _is_selected(entry: PluginEntry, selection: str | None) -> bool:
    if selection is None:
        return True
    words = _words(selection)
    excluded = {normalized(word[1:]) for word in words if word.startswith("-")}
    included = {normalized(word) for word in words if not word.startswith("-")}
    name = normalized(entry.distribution)
    # "-a" alone selects all but a; an empty list selects none.
    return name not in excluded and (name in included or (bool(excluded) and not included))


def _words(selection: str) -> list[str]:
    return [word.strip() for word in selection.split(",") if word.strip()]


def normalized(distribution: str) -> str:
    """The name of a distribution in its normal form, in which names are compared.

    >>> normalized("Ejkernel_Pallas.TPU")
    'ejkernel-pallas-tpu'
    """
    return re.sub(r"[-_.]+", "-", distribution).lower()


def conflict(entries: Iterable[PluginEntry]) -> str:
    """The end of a sentence about one name that several distributions claim."""
    owners = " and ".join(f"{entry.provider} ({entry.value})" for entry in entries)
    return f"claimed by {owners}; uninstall one, or leave one out: EJKERNEL_PLUGINS=-<distribution>"
