"""The typed functions of the operations: an argument they do not take raises the error of ``ejkernel_core.call``."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any, TypeVar

import ejkernel_core
from ejkernel_core.extend import ends_at_caller, hide_frames

Function = TypeVar("Function", bound=Callable[..., Any])

hide_frames(os.path.dirname(__file__))


def front_door(function: Function) -> Function:
    """The function, with the error of the operation of its name for an argument that it does not have. A function that
    takes any argument by name has errors of its own.

    >>> def rms_norm(x, epsilon=1e-6): ...
    >>> front_door(rms_norm)(1, eps=1e-5)
    Traceback (most recent call last):
    TypeError: rms_norm: got an unexpected keyword argument 'eps'; 'eps' is called 'epsilon' here
    """
    name, parameters = function.__name__, dict(inspect.signature(function).parameters)
    count = sum(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters.values())
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    @ends_at_caller
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > count or not (takes_any or kwargs.keys() <= parameters.keys()):
            operation = ejkernel_core.registry.operation(name)
            known = operation.signature.parameters
            # Without options of the function that are none of the operation: those are right.
            raised = {key: value for key, value in kwargs.items() if key in known or key not in parameters}
            operation.bind(args, raised)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]
