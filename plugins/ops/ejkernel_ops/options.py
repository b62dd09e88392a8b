"""Checks of options that are numbers."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

from ejkernel_core import extend


def number(name: str, value: Any) -> float:
    """The value as a float. Raises unless it is a finite number, known while tracing."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: takes a number, known while tracing; got {type_and_value(value)}")
    try:
        result = float(value)
    except OverflowError:
        raise ValueError(f"{name}: takes a number that a float holds; got {brief(value)}") from None
    if not math.isfinite(result):
        raise ValueError(f"{name}: takes a finite number; got {value}")
    return result


def finite(name: str, value: Any, dtype: Any) -> float:
    """The number, if it is finite and not rounded to 0 in the dtype of arithmetic on arrays of ``dtype``."""
    result = number(name, value)
    limits = np.finfo(np.promote_types(dtype, np.float32))
    smallest = math.ldexp(1.0, int(limits.minexp) - int(limits.nmant))  # with subnormals
    if abs(result) > float(limits.max) or 0 < abs(result) < smallest:
        raise ValueError(f"{name}: takes a number that {limits.dtype} holds; got {brief(value)}")
    return result


def integer(name: str, value: Any, most: int, what: str) -> int:
    """The value as an int. Raises unless it is an integer from 1 to ``most``, which is ``what``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}: takes an int, known while tracing; got {type_and_value(value)}")
    result = int(value)
    if not 1 <= result <= most:
        raise ValueError(f"{name}: takes a number from 1 to {most}, {what}; got {brief(value)}")
    return result


def type_and_value(value: Any) -> str:
    """For messages.

    >>> type_and_value("abc")
    "str 'abc'"
    """
    return f"{type(value).__name__} {brief(value)}"


def brief(value: Any) -> str:
    """The ``repr`` of a value, truncated.

    >>> brief(1.5)
    '1.5'
    """
    if isinstance(value, int) and value.bit_length() > 10_000:  # Python may refuse to print it
        return f"{type(value).__name__} of thousands of digits"
    return extend.brief(value)
