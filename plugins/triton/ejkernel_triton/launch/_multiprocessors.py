"""The number of streaming multiprocessors (SMs) of a GPU, for grids that fill the GPU once."""

from __future__ import annotations

import re

from ejkernel_core import Invocation
from ejkernel_triton.launch._cards import capability

#: By a word of the GPU's name, where the number differs from that for its compute capability.
_BY_WORD = {"A30": 56, "A40": 84, "A6000": 84, "L4": 58, "L40": 142, "L40S": 142, "H20": 78}
_BY_CAPABILITY = {(8, 0): 108, (8, 6): 72, (8, 9): 128, (9, 0): 132, (10, 0): 148, (10, 3): 148, (12, 0): 170}
#: For unknown GPUs. A wrong number costs only speed.
_DEFAULT = 108


def multiprocessors(inv: Invocation) -> int:
    """The number for the device of a call, from the device's name, so that every machine compiles the same grid."""
    words = re.split(r"[\s-]", inv.device_kind or "")
    by_word = next((_BY_WORD[word] for word in words if word in _BY_WORD), None)
    return by_word or _BY_CAPABILITY.get(capability(inv) or (0, 0), _DEFAULT)
