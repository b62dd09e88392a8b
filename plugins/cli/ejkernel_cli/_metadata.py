"""What is installed, read from metadata: neither the core nor any plugin is imported."""

from __future__ import annotations

import functools
import os
import re
import warnings
from importlib import metadata
from typing import Any

from ._output import Failure

OPERATIONS = "ejkernel.operations"
KERNELS = "ejkernel.kernels"
POLICIES = "ejkernel.policies"
BENCHMARKS = "ejkernel.benchmarks"
COMMANDS = "ejkernel.commands"

#: The distribution of the core. Its extras name the others of the project, which share the prefix ``FAMILY``.
CORE = "ejkernel-core"
FAMILY = "ejkernel-"
#: By JAX's names for platforms: the extra of the core that has what is for it.
EXTRAS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}


@functools.cache
def _all_entry_points() -> Any:
    """All entry points, which are read once. Their type differs between Python 3.11 and 3.12."""
    try:
        return metadata.entry_points()
    except Exception:  # of one distribution whose files are damaged: the others work
        faults = unreadable_distributions()
        for folder, fault in faults.items():
            warnings.warn(f"{folder} is left out: {fault}", RuntimeWarning, stacklevel=2)
        readable = (dist for dist in metadata.distributions() if _folder(dist) not in faults)
        return metadata.EntryPoints(point for dist in readable for point in dist.entry_points)


def unreadable_distributions() -> dict[str, str]:
    """By the folder of its metadata: why a distribution cannot be read."""
    faults: dict[str, str] = {}
    for dist in metadata.distributions():
        try:
            dist.metadata, dist.entry_points  # noqa: B018  (both are read here)
        except Exception as fault:
            faults[_folder(dist)] = f"{type(fault).__name__}: {fault}"
    return faults


def _folder(dist: metadata.Distribution) -> str:
    return str(getattr(dist, "_path", dist.locate_file("")))  # no public name has it


@functools.cache
def entry_points(group: str) -> tuple[metadata.EntryPoint, ...]:
    """The entry points of the group. Of a distribution that is on the path twice, the first one counts."""
    unique: dict[tuple[str, str, str], metadata.EntryPoint] = {}
    for point in _all_entry_points().select(group=group):
        unique.setdefault((distribution(point), point.name, point.value), point)
    return tuple(unique.values())


@functools.cache  # reading the metadata of a distribution takes most of the time of a list
def _name_and_version(dist: metadata.Distribution | None) -> tuple[str, str]:
    try:
        fields: Any = {} if dist is None else dist.metadata
    except UnicodeDecodeError:  # the doctor has a finding for it
        fields = {}
    return normalized(fields.get("Name") or "unknown distribution"), fields.get("Version") or ""


def distribution(point: metadata.EntryPoint) -> str:
    """The distribution of an entry point, as pip names it."""
    return _name_and_version(point.dist)[0]


def name_of(dist: metadata.Distribution) -> str:
    """The name of a distribution, as pip has it."""
    return _name_and_version(dist)[0]


def normalized(name: str) -> str:
    """The name of a distribution in its normal form, in which names are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def provider(point: metadata.EntryPoint) -> str:
    """The distribution of an entry point with its version."""
    return " ".join(filter(None, _name_and_version(point.dist)))


def version(name: str) -> str | None:
    """The version of a distribution; None where it is not installed."""
    try:
        return metadata.version(name)
    except (metadata.PackageNotFoundError, ValueError):  # ValueError for an empty name
        return None


def extras() -> dict[str, tuple[str, ...]]:
    """By the extras of the core: the distributions of the project that each of them installs."""
    try:
        requirements = metadata.requires(CORE) or []
    except metadata.PackageNotFoundError:
        return {}
    names: dict[str, tuple[str, ...]] = {}
    for line in requirements:
        match = re.match(r"""([\w.-]+).*;.*\bextra\s*==\s*['"]([\w.-]+)['"]""", line)
        if match and normalized(match[1]).startswith(FAMILY) and normalized(match[1]) != CORE:
            names[match[2]] = (*names.get(match[2], ()), normalized(match[1]))
    return names


def absent_distributions(platform: str) -> list[str]:
    """The distributions for this platform, by JAX's name, that are not installed."""
    return [name for name in extras().get(EXTRAS.get(platform, ""), ()) if version(name) is None]


# -- EJKERNEL_PLUGINS, as the core reads it ----------------------------------------------------------------------------


def selection() -> str | None:
    """The value of EJKERNEL_PLUGINS."""
    return os.environ.get("EJKERNEL_PLUGINS")


def is_selected(name: str, words: str | None) -> bool:
    """Whether the value of EJKERNEL_PLUGINS includes the distribution."""
    if words is None:
        return True
    names = [word.strip() for word in words.split(",") if word.strip()]
    excluded = {normalized(word[1:]) for word in names if word.startswith("-")}
    included = {normalized(word) for word in names if not word.startswith("-")}
    return name not in excluded and (name in included or (bool(excluded) and not included))


def check_selection(words: str | None) -> None:
    """Raise ``Failure`` for a name in EJKERNEL_PLUGINS that is not a distribution's."""
    known = {name for names in extras().values() for name in names}
    for word in filter(None, (word.strip() for word in (words or "").split(","))):
        name = normalized(word.removeprefix("-"))
        if version(name) is None and not (word.startswith("-") and name in known):
            raise Failure(f"EJKERNEL_PLUGINS takes names of installed distributions, with or without '-'; got {word!r}")
