"""``validate=True`` in a call: its operation looks at the values of arrays, where there are values to be seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ._operation import Arguments, Operation


def check_values(operation: Operation, given: Arguments, validate: Any, check_shapes: Callable[[], object]) -> None:
    """Raise for a value that the operation does not take. It is asked once shapes and dtypes are known to be right."""
    if not isinstance(validate, (bool, np.bool_)):
        raise TypeError(f"{operation.name}: validate takes True or False; got {type(validate).__name__}")
    if not validate:
        return
    if operation.validate is None:
        raise TypeError(
            f"{operation.name}: validate=True has nothing to check, for the operation says nothing of values"
        )
    for name in operation.arrays:
        if isinstance(given.get(name), (jax.core.Tracer, jax.ShapeDtypeStruct)):
            raise TypeError(
                f"{operation.name}: validate=True looks at values, and {name} has none while it is traced (jit, grad, "
                "vmap, scan): leave it out there, and make such a call once with it outside"
            )
    check_shapes()
    try:
        operation.validate(operation.complete(given))
    except ValueError as error:
        raise ValueError(f"{operation.name}: {error}") from error
