"""Content as text, with the parameter names of ejKernel's documents. Models like those of pydantic have content too."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from ejkernel_core import extend


def stable_json(obj: Any) -> str:
    """``ejkernel_core.stable_json``, and also for objects with ``model_dump``: their class and the fields it returns.

    >>> stable_json({"b": (1, 2.0), "a": None})
    '{"a":null,"b":{"!tuple":[1,2.0]}}'
    """
    return extend.canonical_json(extend.content_json(obj, _model))


def short_hash(obj: Any, length: int = 16) -> str:
    """The first hexadecimal digits of the SHA-256 of ``stable_json(obj)``.

    >>> short_hash("flash_attention", 8)
    'c5ab4a7f'
    """
    return hashlib.sha256(stable_json(obj).encode()).hexdigest()[:length]


def abstractify(pytree: Any) -> Any:
    """The tree, with a ``jax.ShapeDtypeStruct`` in the place of every array, concrete or traced.

    >>> import jax
    >>> abstractify({"x": jax.numpy.zeros((2, 3)), "causal": True})
    {'causal': True, 'x': ShapeDtypeStruct(shape=(2, 3), dtype=float32)}
    """
    return extend.abstractify(pytree)


def _model(value: Any, inner: Callable[[Any], Any]) -> Any:
    if isinstance(value, type) or not callable(getattr(type(value), "model_dump", None)):
        return None
    return {f"{extend.TAG}model": [extend.import_path(type(value)), inner(value.model_dump())]}
