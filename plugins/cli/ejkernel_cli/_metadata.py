"""What is installed, read from metadata: neither the core nor any plugin is imported."""

from __future__ import annotations

import functools
import re
from importlib import metadata

OPERATIONS = "ejkernel.operations"
KERNELS = "ejkernel.kernels"
POLICIES = "ejkernel.policies"


@functools.cache
def entry_points(group: str) -> tuple[metadata.EntryPoint, ...]:
    """The entry points of the group. Of a distribution that is on the path twice, the first one counts."""
    unique: dict[tuple[str, str, str], metadata.EntryPoint] = {}
    for point in metadata.entry_points(group=group):
        unique.setdefault((distribution(point), point.name, point.value), point)
    return tuple(unique.values())


def distribution(point: metadata.EntryPoint) -> str:
    """The distribution of an entry point, as pip names it."""
    name = (point.dist.metadata["Name"] if point.dist else None) or "unknown distribution"
    return re.sub(r"[-_.]+", "-", name).lower()


def provider(point: metadata.EntryPoint) -> str:
    """The distribution of an entry point with its version."""
    return f"{distribution(point)} {(point.dist and point.dist.version) or ''}".rstrip()
