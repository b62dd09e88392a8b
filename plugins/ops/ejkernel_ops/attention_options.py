"""The options of attention: checked."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from .options import brief, finite, type_and_value


def softmax_scale(value: Any, dtype: Any) -> float | None:
    """A finite number, or None."""
    return None if value is None else finite("softmax_scale", value, dtype)


def soft_cap(value: Any, dtype: Any) -> float | None:
    """A number above 0, or None."""
    if value is None:
        return None
    cap = finite("logits_soft_cap", value, dtype)
    if cap <= 0:
        raise ValueError(f"logits_soft_cap: takes a number above 0, or None; got {brief(value)}")
    limits = np.finfo(np.promote_types(dtype, np.float32))
    if cap < float(limits.tiny):  # logits are divided by it, and it would be 0
        raise ValueError(f"logits_soft_cap: takes a number that {limits.dtype} holds; got {brief(value)}")
    return cap


#: For users of libraries in which -1 or None is a side without a limit.
_OPEN_SIDE = " (for a side without a limit, pass the length of the sequence)"


def window(value: Any) -> tuple[int, int] | None:
    """(left, right), or None."""
    if value is None:
        return None
    sides = (value, value) if not isinstance(value, tuple) else value
    if len(sides) != 2 or any(isinstance(s, (bool, np.bool_)) or not isinstance(s, numbers.Integral) for s in sides):
        raise TypeError(
            "sliding_window: takes an int, a pair (left, right) of ints, or None; got "
            f"{type_and_value(value)}{_OPEN_SIDE}"
        )
    left, right = (int(side) for side in sides)
    if left < 0 or right < 0:
        raise ValueError(f"sliding_window: takes sizes of at least 0; got {brief(value)}{_OPEN_SIDE}")
    return left, right


def flag(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: takes True or False; got {type_and_value(value)}")
    return bool(value)
