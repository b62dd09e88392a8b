"""The generations of TPUs, with what the blocks of a kernel depend on."""

from __future__ import annotations

import attrs

MIB = 2**20
#: Bytes of scalar memory of a core, in every generation.
SMEM = MIB


@attrs.frozen
class Generation:
    """A generation, by the name of its chip."""

    name: str
    #: Bytes of vector memory of a core, and how many a kernel may use: the rest is XLA's, for the code around it.
    vmem: int
    budget: int
    #: How many cores share a kernel. They split the parallel axes of its grid.
    cores: int


V4 = Generation("v4", 16 * MIB, 15 * MIB, 2)
V5E = Generation("v5e", 128 * MIB, 100 * MIB, 1)
V5P = Generation("v5p", 64 * MIB, 56 * MIB, 2)
V6E = Generation("v6e", 128 * MIB, 100 * MIB, 1)
V7X = Generation("v7x", 64 * MIB, 56 * MIB, 1)

#: By JAX's name of the device. For some generations, older versions have another name than newer ones.
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
    """The generation of a device, by JAX's name of it; None if it is unknown.

    >>> generation("TPU v5 lite").name, generation("TPU v3")
    ('v5e', None)
    """
    return KINDS.get(device_kind)
