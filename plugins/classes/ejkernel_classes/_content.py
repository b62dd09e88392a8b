"""Content as text, under the documents' names for parameters; models of pydantic's kind have content too."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from typing import Any

import ejkernel_core
from ejkernel_core import _keys


def stable_json(obj: Any) -> str:
    """``ejkernel_core.stable_json``, where also what has ``model_dump`` is content: its class and what that gives.

    >>> stable_json({"b": (1, 2.0), "a": None})
    '{"a":null,"b":{"!tuple":[1,2.0]}}'
    """
    return json.dumps(_plain(obj, ()), sort_keys=True, separators=(",", ":"), allow_nan=False)


def short_hash(obj: Any, length: int = 16) -> str:
    """The first hexadecimal digits of the SHA-256 of ``stable_json(obj)``.

    >>> short_hash("flash_attention", 8)
    'c5ab4a7f'
    """
    return hashlib.sha256(stable_json(obj).encode()).hexdigest()[:length]


def abstractify(pytree: Any) -> Any:
    """The tree with every array in it, concrete or traced, replaced by its ``jax.ShapeDtypeStruct``.

    >>> import jax
    >>> abstractify({"x": jax.numpy.zeros((2, 3)), "causal": True})
    {'causal': True, 'x': ShapeDtypeStruct(shape=(2, 3), dtype=float32)}
    """
    return _keys.abstractify(pytree)


def _plain(value: Any, path: tuple[int, ...]) -> Any:
    """As the core writes it, by the core's rules: these ask ``inner`` for what is inside, where a model may be."""
    if isinstance(value, (str, int, float, type(None))):
        return _by_core(value)
    if id(value) in path:
        raise TypeError(f"stable_json: a {type(value).__qualname__} contains itself")
    inner = functools.partial(_plain, path=(*path, id(value)))
    for rule in (*_keys._RULES, _model):
        text = rule(value, inner)
        if text is not None:
            return text
    return _by_core(value)


def _by_core(value: Any) -> Any:
    return json.loads(ejkernel_core.stable_json(value))


def _model(value: Any, inner: Callable[[Any], Any]) -> Any:
    if isinstance(value, type) or not callable(getattr(type(value), "model_dump", None)):
        return None
    return {f"{_keys.TAG}model": [_keys._import_path(type(value)), inner(value.model_dump())]}
