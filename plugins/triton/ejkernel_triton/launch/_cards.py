"""What is known of cards by their names: so every machine compiles the same program for a card, also without one."""

from __future__ import annotations

import itertools
import re

import attrs

from ejkernel_core import Invocation

Capability = tuple[int, int]


@attrs.frozen
class Card:
    """What the name of a card says."""

    capability: Capability
    #: Streaming multiprocessors; None for as many as most cards of its compute capability have.
    multiprocessors: int | None = None


#: By one or two words of a card's name; two come first.
_CARDS = {
    "V100": Card((7, 0)),
    "T4": Card((7, 5)),
    "A100": Card((8, 0)),
    "A800": Card((8, 0)),
    "A30": Card((8, 0), 56),
    "A10": Card((8, 6)),
    "A10G": Card((8, 6)),
    "A40": Card((8, 6), 84),
    "A6000": Card((8, 6), 84),
    "L4": Card((8, 9), 58),
    "L40": Card((8, 9), 142),
    "L40S": Card((8, 9), 142),
    "H100": Card((9, 0)),
    "H100 PCIe": Card((9, 0), 114),
    "H200": Card((9, 0)),
    "H800": Card((9, 0)),
    "H800 PCIe": Card((9, 0), 114),
    "H20": Card((9, 0), 78),
    "GH200": Card((9, 0)),
    "B200": Card((10, 0)),
    "GB200": Card((10, 0)),
    "B300": Card((10, 3)),
    "GB300": Card((10, 3)),
    **dict.fromkeys(("3060", "3070", "3080", "3090"), Card((8, 6))),
    **dict.fromkeys(("4060", "4070", "4080", "4090"), Card((8, 9))),
    **dict.fromkeys(("5060", "5070", "5080", "5090"), Card((12, 0))),
}
_MULTIPROCESSORS = {(8, 0): 108, (8, 6): 72, (8, 9): 128, (9, 0): 132, (10, 0): 148, (10, 3): 148, (12, 0): 170}
#: For unknown cards. A wrong number costs only speed.
_DEFAULT_MULTIPROCESSORS = 108


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
    card = _card(device_kind)
    return None if card is None else card.capability


def multiprocessors(inv: Invocation) -> int:
    """The streaming multiprocessors (SMs) of the card that a call runs on: for grids that fill it once."""
    card = _card(inv.device_kind or "")
    if card is not None and card.multiprocessors is not None:
        return card.multiprocessors
    return _MULTIPROCESSORS.get(capability(inv) or (0, 0), _DEFAULT_MULTIPROCESSORS)


def _card(device_kind: str) -> Card | None:
    words = re.split(r"[\s-]", device_kind)
    pairs = map(" ".join, itertools.pairwise(words))
    return next((_CARDS[name] for name in (*pairs, *words) if name in _CARDS), None)
