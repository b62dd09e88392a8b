"""Values as text by their content.

Equal values give equal text in every process. A value without such content (an object of an unknown class, the numbers
of an array) is a ``TypeError``: its address would differ between processes.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import math
import operator
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import attrs
import jax
import numpy as np
from jax.sharding import PartitionSpec

from ._display import brief

#: Gives the content of a part of a value.
Inner = Callable[[Any], Any]


#: The content of a value of one kind; None for another value.
Rule = Callable[[Any, Inner], Any]


#: Begins the name in an object that stands for a value JSON has no type for. Other objects differ: see ``_mapping``.
TAG = "!"


def stable_json(value: Any) -> str:
    """The content of a value as JSON: keys are sorted, dtypes have their names, functions their code and closures.

    >>> import jax.numpy as jnp
    >>> stable_json({"b": (1, 2.0), "a": jnp.float32})
    '{"a":{"!dtype":"float32"},"b":{"!tuple":[1,2.0]}}'
    """
    return canonical_json(content_json(value))


def content_json(value: Any, *rules: Rule) -> Any:
    """The content of a value in JSON's own types. Further ``rules`` are for values that have none in the core.

    A rule gets a value and a function that gives the content of a part of it. It returns content, or None for values
    that are not its own.

    >>> content_json([1j], lambda value, inner: ["list", *map(inner, value)] if isinstance(value, set) else None)
    [{'!complex': '1j'}]
    """
    return _to_json(value, (), (*_RULES, *rules))


def canonical_json(data: Any) -> str:
    """The text of a value of JSON's own types, in the form that ``stable_json`` uses."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def short_hash(value: Any, length: int = 16) -> str:
    """The first hexadecimal digits of the SHA-256 of ``stable_json(value)``.

    >>> short_hash("flash_attention", 8)
    'c5ab4a7f'
    """
    return hashlib.sha256(stable_json(value).encode()).hexdigest()[:length]


#: Types whose equal values have equal content.
_SIMPLE = frozenset({type(None), bool, int, str, bytes})


def content(value: Any) -> Any:
    """A hashable value that is equal for two values only if they and all their parts have the same type and content.

    In Python, 1, 1.0 and True are equal, so are 0.0 and -0.0, and a class may leave fields out of its comparison.

    >>> content((1, 0.0)) == content((1, 0.0)), content(1) == content(True), content(0.0) == content(-0.0)
    (True, False, False)
    """
    kind: Any = type(value)
    if kind in _SIMPLE:
        return kind, value
    if fields := _fields(kind):
        return (kind, *(content(getattr(value, name)) for name in fields))
    if isinstance(value, (float, complex)):
        return kind, repr(value)
    if isinstance(value, (np.generic, np.ndarray)):
        return kind, value.dtype, value.shape, value.tobytes()
    if isinstance(value, (tuple, list)):
        return (kind, *map(content, value))
    if isinstance(value, (frozenset, set)):
        return kind, frozenset(map(content, value))
    if isinstance(value, Mapping):
        return kind, frozenset((content(key), content(inner)) for key, inner in value.items())
    if isinstance(value, (Decimal, range)):
        return kind, repr(value)
    return kind, value


@functools.cache
def _fields(kind: Any) -> tuple[str, ...]:
    """The names of the fields of an attrs class or a dataclass; none for another class."""
    if attrs.has(kind):
        return tuple(field.name for field in attrs.fields(kind))
    return tuple(field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else ()


#: The scalars of NumPy that have a plain value. That of a long double would be rounded.
_SCALARS = (np.bool_, np.integer, np.floating, np.complexfloating, np.str_)


def plain(value: Any) -> Any:
    """An option as a value of Python's own types: that of a NumPy scalar, or of a text or number that is an enum or of
    another subclass; in a tuple, each of them. Any other value stays as it is.

    >>> plain((np.str_("swish"), np.int64(3), np.bool_(True), None))
    ('swish', 3, True, None)
    """
    kind = type(value)
    if kind in _SIMPLE or kind is float:
        return value
    if kind is tuple:
        parts = tuple(map(plain, value))
        return value if all(map(operator.is_, parts, value)) else parts
    if isinstance(value, _SCALARS) and not isinstance(value, (np.longdouble, np.clongdouble)):
        return value.item()
    if isinstance(value, str):
        return str.__str__(value)  # a copy of the type itself; ``str(value)`` of an enum is another text
    if isinstance(value, int):
        return int.__int__(value)
    return float.__float__(value) if isinstance(value, float) else value


def read_only(mapping: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """A copy that cannot be changed: a value that hooks get is the same for all of them."""
    return types.MappingProxyType(dict(mapping))


def abstract(value: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array."""
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def abstractify(tree: Any) -> Any:
    """The tree, with a ``jax.ShapeDtypeStruct`` in the place of every array, concrete or traced.

    >>> import numpy as np
    >>> abstractify({"x": np.zeros((2, 3), np.float32), "causal": True})
    {'causal': True, 'x': ShapeDtypeStruct(shape=(2, 3), dtype=float32)}
    """
    return jax.tree.map(lambda leaf: abstract(leaf) if _is_array(leaf) else leaf, tree)


def _is_array(value: Any) -> bool:
    return isinstance(value, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))


def _to_json(value: Any, path: tuple[int, ...], rules: Sequence[Rule]) -> Any:
    """A value in JSON's own types. ``path`` has the ids of the values around it, to detect one that contains itself."""
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {f"{TAG}float": repr(value)}
    if id(value) in path:
        raise TypeError(f"stable_json: a {_type_name(value)} contains itself")
    inner = functools.partial(_to_json, path=(*path, id(value)), rules=rules)
    for rule in rules:
        text = rule(value, inner)
        if text is not None:
            return text
    raise TypeError(f"stable_json: a {_type_name(value)} has no content that could be written down: {brief(value)}")


#: The type of ``jax.numpy.float32``.
_JaxScalarType = type(jax.numpy.float32)


def _dtype(value: Any, inner: Inner) -> Any:
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return {f"{TAG}dtype": _dtype_content(np.dtype(value))}
    return {f"{TAG}dtype": value.dtype.name} if isinstance(value, _JaxScalarType) else None


def _dtype_content(dtype: np.dtype[Any]) -> Any:
    """The name of a dtype, with a byte order that is not this machine's, and the fields of a structured dtype."""
    if dtype.fields:
        fields = {name: [_dtype_content(part[0]), part[1]] for name, part in dtype.fields.items()}
        return [dtype.itemsize, fields]
    if dtype.subdtype:
        return [_dtype_content(dtype.subdtype[0]), *dtype.subdtype[1]]
    return dtype.name if dtype.isnative else dtype.str


def _number(value: Any, inner: Inner) -> Any:
    if isinstance(value, np.generic):
        return {f"{TAG}scalar": [value.dtype.name, repr(value.item())]}
    if isinstance(value, complex):
        return {f"{TAG}complex": repr(value)}
    if value is ...:
        return {f"{TAG}name": "..."}
    return {f"{TAG}bytes": value.hex()} if isinstance(value, bytes) else None


def _array(value: Any, inner: Inner) -> Any:
    if isinstance(value, jax.ShapeDtypeStruct):
        return {f"{TAG}array": [value.dtype.name, *value.shape]}
    if _is_array(value):
        raise TypeError("stable_json: an array's numbers are not content; pass abstractify(array)")
    return None


def _tree(value: Any, inner: Inner) -> Any:
    """The text of a pytree structure by JAX, or the paths of its leaves if it has nodes of custom classes."""
    if not isinstance(value, jax.tree_util.PyTreeDef):
        return None
    if "CustomNode" not in (text := str(value)):
        return {f"{TAG}tree": text}
    leaves, _ = jax.tree_util.tree_flatten_with_path(value.unflatten(range(value.num_leaves)))
    return {f"{TAG}tree": [jax.tree_util.keystr(path) for path, _ in leaves]}


def _enum(value: Any, inner: Inner) -> Any:
    return {f"{TAG}enum": [import_path(type(value)), value.name]} if isinstance(value, enum.Enum) else None


def _sequence(value: Any, inner: Inner) -> Any:
    if isinstance(value, PartitionSpec):
        return {f"{TAG}spec": [inner(v) for v in value]}
    if isinstance(value, (set, frozenset)):
        return {f"{TAG}set": sorted((inner(v) for v in value), key=lambda v: json.dumps(v, sort_keys=True))}
    if type(value) is tuple:
        return {f"{TAG}tuple": [inner(v) for v in value]}
    if isinstance(value, tuple):  # a named tuple
        return {f"{TAG}object": [import_path(type(value)), [inner(v) for v in value]]}
    return [inner(v) for v in value] if type(value) is list else None


def _mapping(value: Any, inner: Inner) -> Any:
    if not isinstance(value, Mapping):
        return None
    if all(isinstance(key, str) and not key.startswith(TAG) for key in value):
        return {key: inner(v) for key, v in value.items()}
    pairs = [[inner(key), inner(v)] for key, v in value.items()]
    return {f"{TAG}dict": sorted(pairs, key=lambda pair: json.dumps(pair[0], sort_keys=True))}


def _record(value: Any, inner: Inner) -> Any:
    if isinstance(value, type):
        return None
    if not (attrs.has(type(value)) or dataclasses.is_dataclass(value)):
        return None
    kind: Any = type(value)
    fields = {name: inner(getattr(value, name)) for name in _fields(kind)}
    return {f"{TAG}object": [import_path(type(value)), fields]}


def _callable(value: Any, inner: Inner) -> Any:
    if isinstance(value, functools.partial):
        return {f"{TAG}partial": [inner(value.func), [inner(v) for v in value.args], inner(value.keywords)]}
    if isinstance(value, types.MethodType):
        return {f"{TAG}method": [inner(value.__self__), value.__name__]}
    if isinstance(value, (type, types.BuiltinFunctionType, np.ufunc)):
        return {f"{TAG}name": import_path(value)}
    if callable(value) and _is_importable(value):
        return {f"{TAG}name": import_path(value)}
    return _closure(value, inner) if isinstance(value, types.FunctionType) else None


_RULES = (_dtype, _number, _array, _tree, _enum, _record, _sequence, _mapping, _callable)


def _closure(function: types.FunctionType, inner: Inner) -> Any:
    """A lambda or a nested function: its code, its closure and its defaults."""
    cells = [inner(cell.cell_contents) for cell in function.__closure__ or ()]
    defaults = [inner(v) for v in function.__defaults__ or ()], inner(function.__kwdefaults__ or {})
    return {f"{TAG}function": [function.__module__, code_hash(function.__code__, inner), cells, *defaults]}


def code_hash(code: types.CodeType, inner: Inner) -> str:
    """A hash of code. It includes only the names of the globals that the code reads."""
    constants = [code_hash(c, inner) if isinstance(c, types.CodeType) else inner(c) for c in code.co_consts]
    return short_hash([code.co_code.hex(), constants, code.co_names, code.co_varnames])


def _is_importable(value: Any) -> bool:
    target: Any = sys.modules.get(getattr(value, "__module__", None) or "")
    for part in getattr(value, "__qualname__", "<nameless>").split("."):
        target = getattr(target, part, None)
    return target is value


def import_path(value: Any) -> str:
    """The path by which a class or a function is imported; ``TypeError`` where there is none."""
    if isinstance(value, np.ufunc):
        return f"numpy.{value.__name__}"
    if not isinstance(value, types.BuiltinFunctionType) and not _is_importable(value):
        raise TypeError(
            f"stable_json: {brief(value)} cannot be found again by its name; define it at the top level of a module"
        )
    return f"{value.__module__}.{value.__qualname__}"


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
