"""Values as JSON, and back: the keys and configurations of a cache on disk.

A text names classes, and the reader says which ones there are. Reading imports, unpickles and evaluates nothing.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import jax
import numpy as np

from ejkernel_core import RecordError, from_json, to_json
from ejkernel_core.extend import type_name

#: Begins the name in an object that stands for a value JSON has no type for.
TAG = "!"
#: The classes that may be read, by name.
Classes = Mapping[str, Any]


def is_structured(kind: Any) -> bool:
    """Whether a type is an attrs class or a dataclass, whose objects a record can hold."""
    return attrs.has(kind) or dataclasses.is_dataclass(kind)


def _is_named_tuple(kind: Any) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _has_content(kind: Any) -> bool:
    return is_structured(kind) or issubclass(kind, enum.Enum) or _is_named_tuple(kind)


def encode(value: Any) -> Any:
    """A value in JSON's own types; ``RecordError`` if it could not be read back."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {f"{TAG}float": repr(value)}
    for rule in (_object, _collection, _atom):
        text = rule(value)
        if text is not None:
            return text
    raise RecordError(f"what cannot be kept on disk: a {type(value).__qualname__}, {value!r:.60}")


def decode_text(text: str, classes: Classes) -> Any:
    """Read the JSON text of ``encode``. ``RecordError`` for another text, or one with another class."""
    try:
        return _decode(json.loads(text), classes)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as fault:
        raise RecordError(f"{text!r:.60} is nothing that was written here: {fault}") from fault


def _decode(data: Any, classes: Classes) -> Any:
    if isinstance(data, list):
        return [_decode(item, classes) for item in data]
    if not isinstance(data, dict):
        return data
    ((tag, content),) = data.items()
    return _READERS[tag.removeprefix(TAG)](content, classes)


def classes_in(value: Any) -> dict[str, Any]:
    """The classes that are needed to read a value back, by name."""
    classes = {type_name(type(value)): type(value)} if _has_content(type(value)) else {}
    items = [part for pair in value.items() for part in pair] if isinstance(value, dict) else value
    if not isinstance(items, (tuple, list, set, frozenset)):
        return classes
    for item in items:
        classes |= classes_in(item)
    return classes


def _object(value: Any) -> Any:
    if is_structured(type(value)):
        return {f"{TAG}object": [type_name(type(value)), json.loads(to_json(value))]}
    if isinstance(value, enum.Enum):
        return {f"{TAG}enum": [type_name(type(value)), value.name]}
    if _is_named_tuple(type(value)):
        return {f"{TAG}namedtuple": [type_name(type(value)), [encode(item) for item in value]]}
    return None


def _collection(value: Any) -> Any:
    if type(value) is list:
        return [encode(item) for item in value]
    if type(value) is tuple:
        return {f"{TAG}tuple": [encode(item) for item in value]}
    if type(value) in (set, frozenset):
        return {f"{TAG}{type(value).__name__}": sorted(map(encode, value), key=json.dumps)}
    if type(value) is dict:
        # In order, which Python's dicts keep, also in keys. As pairs, because names are text in JSON.
        return {f"{TAG}dict": [[encode(key), encode(inner)] for key, inner in value.items()]}
    return None


def _atom(value: Any) -> Any:
    if isinstance(value, bytes):
        return {f"{TAG}bytes": value.hex()}
    if isinstance(value, complex):
        return {f"{TAG}complex": [encode(value.real), encode(value.imag)]}
    if isinstance(value, np.generic) and value.dtype.kind in "biufcV" and not value.dtype.fields:
        return {f"{TAG}scalar": [value.dtype.name, encode(value.item())]}
    if isinstance(value, (np.dtype, type)) or type(value) is _JAX_TYPE:
        return _dtype(value)
    return None


#: The type of ``jax.numpy.float32``.
_JAX_TYPE = type(jax.numpy.float32)


def _dtype(value: Any) -> Any:
    """A dtype, with its Python form: the three forms are different values."""
    if isinstance(value, np.dtype):
        return None if value.fields or value.subdtype or not value.isnative else {f"{TAG}dtype": ["dtype", value.name]}
    if type(value) is _JAX_TYPE:
        return {f"{TAG}dtype": ["jax", value.dtype.name]}
    return {f"{TAG}dtype": ["numpy", np.dtype(value).name]} if issubclass(value, np.generic) else None


# -- reading -----------------------------------------------------------------------------------------------------------


def _class_named(name: str, classes: Classes) -> Any:
    kind = classes.get(name)
    if kind is None:
        raise RecordError(f"it is of {name}, which the program has not named: pass the class in types=")
    return kind


def _read_object(content: Any, classes: Classes) -> Any:
    name, fields = content
    return from_json(json.dumps(fields), _class_named(name, classes))


def _read_enum(content: Any, classes: Classes) -> Any:
    kind, name = _class_named(content[0], classes), content[1]
    if name not in kind.__members__:
        raise RecordError(f"{content[0]} has no {name!r}")
    return kind[name]


def _read_named_tuple(content: Any, classes: Classes) -> Any:
    kind, items = _class_named(content[0], classes), content[1]
    if len(items) != len(kind._fields):
        raise RecordError(f"{content[0]} has {len(kind._fields)} fields, and {len(items)} are written")
    return kind(*(_decode(item, classes) for item in items))


def _read_dtype(content: Any, classes: Classes) -> Any:
    form, name = content
    dtype = np.dtype(name)
    return {"dtype": dtype, "numpy": dtype.type, "jax": getattr(jax.numpy, name, None)}[form]


def _collection_reader(kind: Callable[[Any], Any]) -> Callable[[Any, Classes], Any]:
    return lambda content, classes: kind(_decode(item, classes) for item in content)


_READERS: dict[str, Callable[[Any, Classes], Any]] = {
    "float": lambda content, _: float(content),
    "bytes": lambda content, _: bytes.fromhex(content),
    "complex": lambda content, classes: complex(*(_decode(part, classes) for part in content)),
    "scalar": lambda content, classes: np.dtype(content[0]).type(_decode(content[1], classes)),
    "dtype": _read_dtype,
    "tuple": _collection_reader(tuple),
    "set": _collection_reader(set),
    "frozenset": _collection_reader(frozenset),
    "dict": lambda content, classes: {_decode(key, classes): _decode(value, classes) for key, value in content},
    "object": _read_object,
    "enum": _read_enum,
    "namedtuple": _read_named_tuple,
}
