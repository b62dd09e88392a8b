"""Content as text, with the parameter names of ejKernel's documents. Models like those of pydantic have content too."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from typing import Any

import ejkernel_core
from ejkernel_core import _keys


def stable_json(obj: Any) -> str:
    """``ejkernel_core.stable_json``, and also for objects with ``model_dump``: their class and the fields it returns.

    >>> stable_json({"b": (1, 2.0), "a": None})
    '{"a":null,"b":{"!tuple":[1,2.0]}}'
    """
    return json.dumps(_to_json(obj, ()), sort_keys=True, separators=(",", ":"), allow_nan=False)


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
    return _keys.abstractify(pytree)


def _to_json(value: Any, path: tuple[int, ...]) -> Any:
    """A value in JSON's own types, by the rules of the core. They call ``inner`` for parts, which may be models."""
    if isinstance(value, (str, int, float, type(None))):
        return _core_json(value)
    if id(value) in path:
        raise TypeError(f"stable_json: a {type(value).__qualname__} contains itself")
    inner = functools.partial(_to_json, path=(*path, id(value)))
    for rule in (*_keys._RULES, _model):
        text = rule(value, inner)
        if text is not None:
            return text
    return _core_json(value)


def _core_json(value: Any) -> Any:
    return json.loads(ejkernel_core.stable_json(value))


def _model(value: Any, inner: Callable[[Any], Any]) -> Any:
    if isinstance(value, type) or not callable(getattr(type(value), "model_dump", None)):
        return None
    return {f"{_keys.TAG}model": [_keys._import_path(type(value)), inner(value.model_dump())]}
