"""What a function computes, as a hash: the version of a kernel that was registered at run time."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import sys
import threading
import types
import uuid
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs
import jax
import numpy as np

from ._content import code_hash, short_hash, stable_json

#: An array with more bytes is not read. It counts as what has no content.
MOST_BYTES = 2**20
#: What has no content is another one each time, also in another process.
_PROCESS = uuid.uuid4().hex
_others = itertools.count()
#: By object: what its attributes were when they were first read.
_instances: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
#: By id: the objects whose attributes are read now, of which one may refer to another; and what protects both.
_reading: dict[int, Any] = {}
_lock = threading.RLock()


def code_fingerprint(functions: Iterable[Any]) -> str:
    """A short hash of functions and methods: of their code, closures and defaults, of the attributes of their objects,
    and of all that they read in their own module, and so on. What belongs to another module counts by its name.

    >>> def scaled(factor):
    ...     return lambda x: factor * x
    >>> code_fingerprint([scaled(2.0)]) == code_fingerprint([scaled(2.0)])
    True
    >>> code_fingerprint([scaled(2.0)]) == code_fingerprint([scaled(5.0)])
    False
    """
    return short_hash([_Reader(_module_of(function)).read(function) for function in functions])


def _module_of(function: Any) -> str | None:
    return getattr(getattr(function, "__func__", function), "__module__", None)


@attrs.frozen
class _Reader:
    """Reads the content of values, each once."""

    #: That of the function, of which the code may change while a program runs: a notebook, say.
    module: str | None
    #: By id: the number of each value that was read, which keeps it alive.
    known: dict[int, tuple[int, Any]] = attrs.field(factory=dict)
    #: Whether a module has the values. What has no content, such as a lock or an open file, counts by its type there.
    is_global: bool = False

    def read(self, value: Any) -> Any:
        if value is None or type(value) in (bool, int, float, complex, str, bytes):
            return stable_json(value)
        if id(value) in self.known:
            return ["known", self.known[id(value)][0]]
        self.known[id(value)] = len(self.known), value
        try:
            return self._read(value)
        except Exception:  # of any type: the class may be a user's own, and registering it must not fail for this
            return self._other(value)

    def _read(self, value: Any) -> Any:
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__]
        if isinstance(value, types.MethodType):
            return ["method", self.read(value.__func__), self._instance(value.__self__)]
        if isinstance(value, functools.partial):
            return ["partial", *map(self.read, (value.func, value.args, value.keywords))]
        if isinstance(value, type):
            return self._class(value)
        if callable(value) and getattr(value, "__module__", None) != self.module and (name := _name(value)):
            return ["name", name]
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, (types.WrapperDescriptorType, types.MethodDescriptorType)):
            return ["name", value.__qualname__]
        if isinstance(value, (jax.Array, np.ndarray)):
            return self._array(value)
        if callable(value) and (wrapped := getattr(value, "__wrapped__", None)) is not None:
            return ["wrapped", type(value).__qualname__, self.read(wrapped)]  # such as a jitted function
        if isinstance(value, (tuple, list)):
            return [type(value).__qualname__, *map(self.read, value)]
        if isinstance(value, Mapping):
            return [type(value).__qualname__, *([self.read(key), self.read(inner)] for key, inner in value.items())]
        return self._object(value)

    def _function(self, function: types.FunctionType) -> Any:
        cells = [cell.cell_contents for cell in function.__closure__ or () if _has_content(cell)]
        names = sorted(set(_names(function.__code__)) & function.__globals__.keys())
        return [
            "function",
            code_hash(function.__code__, self.read),
            *map(self.read, (cells, function.__defaults__, function.__kwdefaults__)),
            {name: attrs.evolve(self, is_global=True).read(function.__globals__[name]) for name in names},
        ]

    def _class(self, kind: Any) -> Any:
        """Its name, and if it is of the own module, what it defines. Methods that a decorator has generated follow from
        the fields.
        """
        title = f"{kind.__module__}.{kind.__qualname__}"
        if kind.__module__ != self.module:
            return ["class", title]
        fields: list[Any] = [[field.name, self.read(_default(field))] for field in _fields(kind)]
        functions = {name: value for name, value in vars(kind).items() if isinstance(value, types.FunctionType)}
        own = [name for name in sorted(functions) if not (fields and name.startswith("__"))]
        return ["class", title, fields, {name: self.read(functions[name]) for name in own}]

    def _array(self, array: Any) -> Any:
        if isinstance(array, jax.core.Tracer) or array.nbytes > MOST_BYTES:
            return self._other(array)
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            return self._other(array)
        data = np.asarray(array).tobytes()
        return ["array", str(array.dtype), list(array.shape), hashlib.sha256(data).hexdigest()]

    def _object(self, value: Any) -> Any:
        try:
            return stable_json(value)
        except TypeError:
            # Objects of other modules may have anything inside.
            kind: Any = type(value)
            is_plain = isinstance(value, types.SimpleNamespace) or attrs.has(kind) or dataclasses.is_dataclass(kind)
            return self._attributes(value) if is_plain or kind.__module__ == self.module else self._other(value)

    def _instance(self, value: Any) -> Any:
        """The attributes of a method's object, as they were first read: it may count its calls, or remember them."""
        with _lock:
            if id(value) in _reading:
                return ["itself"]
            with contextlib.suppress(TypeError):  # without a hash
                if (known := _instances.get(value)) is not None:
                    return known
            _reading[id(value)] = value
            try:
                attributes = _Reader(self.module)._attributes(value)
            finally:
                del _reading[id(value)]
            if not _reading:  # else it may be a part of an object that it refers to, and have "itself" in its place
                with contextlib.suppress(TypeError):  # without a hash, or without weak references
                    _instances[value] = attributes
            return attributes

    def _attributes(self, value: Any) -> Any:
        if isinstance(value, type | types.ModuleType):
            return self.read(value)
        kind: Any = type(value)
        names = [field.name for field in _fields(kind)] or [*getattr(value, "__dict__", ())]
        # A cached property follows from the others.
        own = [name for name in names if not isinstance(getattr(kind, name, None), functools.cached_property)]
        fields = {name: self.read(getattr(value, name)) for name in own if hasattr(value, name)}
        return ["object", f"{kind.__module__}.{kind.__qualname__}", fields]

    def _other(self, value: Any) -> Any:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        return ["other", kind] if self.is_global else ["other", kind, _PROCESS, next(_others)]


def _name(value: Any) -> str | None:
    """The name by which a function or another callable is found in its module."""
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    target: Any = sys.modules.get(getattr(value, "__module__", None) or "")
    for part in name.split(".") if isinstance(name, str) else ["<nameless>"]:
        target = getattr(target, part, None)
    return f"{value.__module__}.{name}" if target is value else None


def _fields(kind: Any) -> tuple[Any, ...]:
    """The fields of an attrs class or a dataclass, with their names and defaults."""
    if attrs.has(kind):
        return tuple(attrs.fields(kind))
    return dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()


def _default(field: Any) -> Any:
    """The default of a field, or what makes one; None where it has neither."""
    makers = getattr(field, "default_factory", None), getattr(field.default, "factory", None)
    absent = (None, attrs.NOTHING, dataclasses.MISSING)
    return next((v for v in (*makers, field.default) if not any(v is one for one in absent)), None)


def _has_content(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # of a name that is bound later
        return False
    return True


def _names(code: types.CodeType) -> Iterator[str]:
    """The names of globals and attributes that the code reads, and the code inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
