"""The errors for arguments of ejKernel that are not here: they say what to write in their place."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from ejkernel_core.extend import ends_at_caller

Function = TypeVar("Function", bound=Callable[..., Any])


def other_names(**hints: str) -> Callable[[Function], Function]:
    """A decorator. For each name in ``hints``, the error for an argument of that name ends with its sentence.

    >>> @other_names(iters="num_iters= has that number")
    ... def measure(num_iters=1): ...
    >>> measure(iters=3)
    Traceback (most recent call last):
    TypeError: measure: has no 'iters'; num_iters= has that number
    """

    def decorate(function: Function) -> Function:
        title = function.__qualname__.partition(".")[0]
        assert not hints.keys() & inspect.signature(function).parameters.keys()

        @ends_at_caller
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for name in kwargs:
                if name in hints:
                    raise TypeError(f"{title}: has no {name!r}; {hints[name]}")
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate
