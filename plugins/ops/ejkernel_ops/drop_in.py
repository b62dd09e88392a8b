"""Functions with the arguments of another library: the error for an argument says what it is called there."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ejkernel_core.extend import ends_at_caller

from .flash_attention.other_names import BY_NAME

Function = TypeVar("Function", bound=Callable[..., Any])


def drop_in(names: Mapping[str, str]) -> Callable[[Function], Function]:
    """A decorator for a function that attends with arguments of another library.

    ``names`` has their names by those of ``flash_attention``, whose users, and those of others, are told them.

    >>> @drop_in({"softmax_scale": "scale"})
    ... def attend(query, scale=1.0): ...
    >>> attend(1, sm_scale=0.5)
    Traceback (most recent call last):
    TypeError: attend() got an unexpected keyword argument 'sm_scale'; 'sm_scale' is called 'scale' here
    """
    names_here = {other: here for name, here in names.items() for other in (name, *BY_NAME.get(name, "").split())}

    def decorate(function: Function) -> Function:
        parameters = inspect.signature(function).parameters

        @ends_at_caller
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for name in kwargs:
                if name in names_here and name not in parameters:
                    hint = f"{name!r} is called {names_here[name]!r} here"
                    raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}; {hint}")
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate
