"""Values as JSON, and back: what a cache on disk may be given for a key or a configuration.

What a text names is looked up among what is imported, and nothing is ever imported, unpickled or evaluated for it.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import jax
import numpy as np

from ejkernel_core import RecordError, from_json, to_json
from ejkernel_core._records import type_name

#: Stands before the word for what JSON has no word for.
TAG = "!"
#: Classes by the name that a text has them under, beside what is imported.
Classes = Mapping[str, Any]


def is_structured(kind: Any) -> bool:
    """Whether it is an attrs class or a dataclass, whose objects a record holds as they are."""
    return attrs.has(kind) or dataclasses.is_dataclass(kind)


def _is_named_tuple(kind: Any) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _has_content(kind: Any) -> bool:
    return is_structured(kind) or issubclass(kind, enum.Enum) or _is_named_tuple(kind)


def encoded(value: Any) -> Any:
    """JSON's own types; ``RecordError`` where there is no way back."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {f"{TAG}float": repr(value)}
    for rule in (_object, _collection, _named):
        text = rule(value)
        if text is not None:
            return text
    raise RecordError(f"what cannot be kept on disk: a {type(value).__qualname__}, {value!r:.60}")


def decoded(text: str, classes: Classes) -> Any:
    """What ``encoded`` gave; ``RecordError`` where it did not, or names a class that nothing has imported."""
    try:
        return _decoded(json.loads(text), classes)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as fault:
        raise RecordError(f"{text!r:.60} is nothing that was written here: {fault}") from fault


def _decoded(data: Any, classes: Classes) -> Any:
    if isinstance(data, list):
        return [_decoded(item, classes) for item in data]
    if not isinstance(data, dict):
        return data
    ((tag, content),) = data.items()
    return _MADE[tag.removeprefix(TAG)](content, classes)


def classes_in(value: Any) -> dict[str, Any]:
    """The classes that are needed to read it back, by name."""
    found = {type_name(type(value)): type(value)} if _has_content(type(value)) else {}
    items = [part for pair in value.items() for part in pair] if isinstance(value, dict) else value
    if not isinstance(items, (tuple, list, set, frozenset)):
        return found
    for item in items:
        found |= classes_in(item)
    return found


def _object(value: Any) -> Any:
    if is_structured(type(value)):
        return {f"{TAG}object": [type_name(type(value)), json.loads(to_json(value))]}
    if isinstance(value, enum.Enum):
        return {f"{TAG}enum": [type_name(type(value)), value.name]}
    if _is_named_tuple(type(value)):
        return {f"{TAG}namedtuple": [type_name(type(value)), [encoded(item) for item in value]]}
    return None


def _collection(value: Any) -> Any:
    if type(value) is list:
        return [encoded(item) for item in value]
    if type(value) is tuple:
        return {f"{TAG}tuple": [encoded(item) for item in value]}
    if type(value) in (set, frozenset):
        return {f"{TAG}{type(value).__name__}": sorted(map(encoded, value), key=json.dumps)}
    if type(value) is dict:
        # In their order, as a key too: Python's dicts keep it. As pairs, because only text is a name in JSON.
        return {f"{TAG}dict": [[encoded(key), encoded(inner)] for key, inner in value.items()]}
    return None


def _named(value: Any) -> Any:
    if isinstance(value, bytes):
        return {f"{TAG}bytes": value.hex()}
    if isinstance(value, complex):
        return {f"{TAG}complex": [encoded(value.real), encoded(value.imag)]}
    if isinstance(value, np.generic) and value.dtype.kind in "biufcV" and not value.dtype.fields:
        return {f"{TAG}scalar": [value.dtype.name, encoded(value.item())]}
    if isinstance(value, (np.dtype, type)) or type(value) is _JAX_TYPE:
        return _dtype(value)
    return None


#: What ``jax.numpy.float32`` is one of.
_JAX_TYPE = type(jax.numpy.float32)


def _dtype(value: Any) -> Any:
    """One of the three faces of a dtype: they are different values."""
    if isinstance(value, np.dtype):
        return None if value.fields or value.subdtype or not value.isnative else {f"{TAG}dtype": ["dtype", value.name]}
    if type(value) is _JAX_TYPE:
        return {f"{TAG}dtype": ["jax", value.dtype.name]}
    return {f"{TAG}dtype": ["numpy", np.dtype(value).name]} if issubclass(value, np.generic) else None


# -- back ------------------------------------------------------------------------------------------------------------


def _class(name: str, classes: Classes) -> Any:
    found = classes.get(name) or _imported(name)
    if found is None:
        raise RecordError(f"it is of {name}, which nothing has imported")
    return found


def _imported(name: str) -> Any:
    """The class that is imported by this name, if it is of a kind that ``encoded`` writes."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:count]))
        for part in parts[count:]:
            found = getattr(found, "__dict__", {}).get(part)  # no module's ``__getattr__``, which could import
        if isinstance(found, type) and type_name(found) == name and _has_content(found):
            return found
    return None


def _read_object(content: Any, classes: Classes) -> Any:
    name, fields = content
    return from_json(json.dumps(fields), _class(name, classes))


def _read_enum(content: Any, classes: Classes) -> Any:
    kind, name = _class(content[0], classes), content[1]
    if name not in kind.__members__:
        raise RecordError(f"{content[0]} has no {name!r}")
    return kind[name]


def _read_named_tuple(content: Any, classes: Classes) -> Any:
    kind, items = _class(content[0], classes), content[1]
    if len(items) != len(kind._fields):
        raise RecordError(f"{content[0]} has {len(kind._fields)} fields, and {len(items)} are written")
    return kind(*(_decoded(item, classes) for item in items))


def _read_dtype(content: Any, classes: Classes) -> Any:
    face, name = content
    dtype = np.dtype(name)
    return {"dtype": dtype, "numpy": dtype.type, "jax": getattr(jax.numpy, name, None)}[face]


def _each(kind: Callable[[Any], Any]) -> Callable[[Any, Classes], Any]:
    return lambda content, classes: kind(_decoded(item, classes) for item in content)


_MADE: dict[str, Callable[[Any, Classes], Any]] = {
    "float": lambda content, _: float(content),
    "bytes": lambda content, _: bytes.fromhex(content),
    "complex": lambda content, classes: complex(*(_decoded(part, classes) for part in content)),
    "scalar": lambda content, classes: np.dtype(content[0]).type(_decoded(content[1], classes)),
    "dtype": _read_dtype,
    "tuple": _each(tuple),
    "set": _each(set),
    "frozenset": _each(frozenset),
    "dict": lambda content, classes: {_decoded(key, classes): _decoded(value, classes) for key, value in content},
    "object": _read_object,
    "enum": _read_enum,
    "namedtuple": _read_named_tuple,
}
