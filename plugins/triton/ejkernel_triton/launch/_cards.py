"""The compute capability of a card, in this machine or not."""

from __future__ import annotations

import re

from ejkernel_core import Invocation

Capability = tuple[int, int]

#: By a word in the name of the card.
_BY_WORD: dict[str, Capability] = {
    "V100": (7, 0),
    "T4": (7, 5),
    "A100": (8, 0),
    "A800": (8, 0),
    "A30": (8, 0),
    "A10": (8, 6),
    "A10G": (8, 6),
    "A40": (8, 6),
    "A6000": (8, 6),
    "L4": (8, 9),
    "L40": (8, 9),
    "L40S": (8, 9),
    "H100": (9, 0),
    "H200": (9, 0),
    "H800": (9, 0),
    "H20": (9, 0),
    "GH200": (9, 0),
    "B200": (10, 0),
    "GB200": (10, 0),
    "B300": (10, 3),
    "GB300": (10, 3),
    **dict.fromkeys(("3060", "3070", "3080", "3090"), (8, 6)),
    **dict.fromkeys(("4060", "4070", "4080", "4090"), (8, 9)),
    **dict.fromkeys(("5060", "5070", "5080", "5090"), (12, 0)),
}


def capability(inv: Invocation) -> Capability | None:
    """As the device reports it, or by the name of a card that is not in this machine. None if neither is known."""
    if inv.compute_capability is not None or inv.platform != "gpu" or inv.device_kind is None:
        return inv.compute_capability
    return capability_by_name(inv.device_kind)


def capability_by_name(device_kind: str) -> Capability | None:
    """The compute capability of a card of this name; None for an unknown name.

    >>> capability_by_name("NVIDIA A100-SXM4-80GB"), capability_by_name("NVIDIA X999")
    ((8, 0), None)
    """
    words = re.split(r"[\s-]", device_kind)
    return next((_BY_WORD[word] for word in words if word in _BY_WORD), None)
