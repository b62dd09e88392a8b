"""TPUs by generation, as far as blocks depend on them."""

from __future__ import annotations

import attrs

MIB = 2**20


@attrs.frozen
class Generation:
    """One generation."""

    name: str
    #: The vector memory of a core, and how much of it a kernel asks for: the rest is XLA's, for what lies around it.
    vmem: int
    budget: int
    #: How many cores share a kernel, by the axes of its grid that are parallel.
    cores: int


V4 = Generation("v4", 16 * MIB, 15 * MIB, 2)
V5E = Generation("v5e", 128 * MIB, 100 * MIB, 1)
V5P = Generation("v5p", 64 * MIB, 56 * MIB, 2)
V6E = Generation("v6e", 128 * MIB, 100 * MIB, 1)
V7X = Generation("v7x", 64 * MIB, 56 * MIB, 1)

#: By the name that JAX gives a device: the newer libraries and the older ones do not call all of them the same.
KINDS = {
    "TPU v4": V4,
    "TPU v5e": V5E,
    "TPU v5 lite": V5E,
    "TPU v5p": V5P,
    "TPU v5": V5P,
    "TPU v6e": V6E,
    "TPU v6 lite": V6E,
    "TPU7x": V7X,
}


def generation(device_kind: str) -> Generation | None:
    """That of a device, by its name; None for one that is not known.

    >>> generation("TPU v5 lite").name, generation("TPU v3")
    ('v5e', None)
    """
    return KINDS.get(device_kind)
