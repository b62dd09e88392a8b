"""Configurations and records as JSON, which people can read too. cattrs converts them.

Reading is strict. A field that is missing, unknown or of another type is a ``RecordError`` that names the place. No
default is filled in, and no value is converted.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping, Set
from datetime import datetime
from typing import Any, get_origin

import attrs
import jax
import numpy as np

from ._content import TAG, canonical_json, stable_json
from ._display import brief
from ._errors import RecordError
from ._keys import Key
from ._records import Provenance, Record

#: The version of the format of records.
SCHEMA = 2


#: The first and the last year in which a record may have been measured.
YEARS = 1970, 2199


def to_json(value: Any) -> str:
    """A configuration (a frozen attrs class or dataclass) as JSON, with the version of the format.

    Raises ``RecordError`` where a field has a value that JSON cannot represent.

    >>> Config = attrs.make_class("Config", {"block": attrs.field(type=int)}, frozen=True)
    >>> json.loads(to_json(Config(block=64)))["fields"]["block"]
    64
    """
    return _dump({"schema": SCHEMA, "fields": _fields(value)})


def from_json(text: str, kind: type[Any]) -> Any:
    """Read a configuration that ``to_json`` wrote. ``RecordError`` names the place where it is not of type ``kind``.

    >>> Config = attrs.make_class("Config", {"block": attrs.field(type=int)}, frozen=True)
    >>> from_json(to_json(Config(block=64)), Config) == Config(block=64)
    True
    """
    data = _parse(text)
    _check_schema(data)
    if "fields" not in data:
        raise RecordError("$ lacks fields")
    _check_names(data, ("schema", "fields"))
    return _config(data["fields"], kind, "$.fields")


def record_to_json(key: Key, record: Record) -> str:
    """A record as a JSON document: the problem of its key, the kernel, the configuration and the provenance.

    >>> Config = attrs.make_class("Config", {"block": attrs.field(type=int)}, frozen=True)
    >>> key = Key("double", "cpu", problem=stable_json({"op": "double"}))
    >>> document = json.loads(record_to_json(key, Record(Config(block=64), "xla")))
    >>> document["kernel"], document["config"]
    ('double.xla', {'block': 64})

    The kernel gives meaning to the fields. A record without a backend has the type of the configuration instead.
    """
    document = {
        "schema": SCHEMA,
        "problem": json.loads(key.problem),
        "kernel": None if record.backend is None else f"{key.op}.{record.backend}",
        "config": _fields(record.cfg),
        "provenance": None if record.provenance is None else _unstructured(record.provenance),
    }
    if record.backend is None and record.cfg is not None:
        document["type"] = type_name(type(record.cfg))
    check_characters(document)
    return _dump(document)


def record_from_json(text: str, key: Key, kind: type[Any] | None) -> Record:
    """Read the record that was written for ``key``, with a configuration of type ``kind`` (None for no configuration).

    >>> Config = attrs.make_class("Config", {"block": attrs.field(type=int)}, frozen=True)
    >>> key = Key("double", "cpu", problem=stable_json({"op": "double"}))
    >>> record = Record(Config(block=64), "xla")
    >>> record_from_json(record_to_json(key, record), key, Config) == record
    True
    """
    data = _parse(text)
    check_characters(data)
    _check_schema(data)
    names = {"problem", "kernel", "config", "provenance"}
    missing = names - data.keys()
    if missing:
        raise RecordError(f"$ lacks {', '.join(sorted(missing))}", damaged=True)
    _check_names(data, ("schema", "type", *names))
    # As text: in Python, 1, 1.0 and True are equal.
    if canonical_json(data["problem"]) != key.problem:
        raise RecordError("$.problem is another one than that of the key")
    if kind not in (None, type(None)) and data.get("type", type_name(kind)) != type_name(kind):
        raise RecordError(f"$.type is {data['type']!r}, not {type_name(kind)!r}")
    # First of all: the configuration of a record that is for something else is not to be constructed.
    backend, provenance = _backend(data["kernel"], key.op), data["provenance"]
    if provenance is not None:
        provenance = _structured(provenance, Provenance, "$.provenance")
        check_time(provenance.when)
    return Record(_config(data["config"], kind, "$.config"), backend, provenance)


def check_time(when: str) -> None:
    """``RecordError`` unless a text in a record is a time at which something may have been measured.

    It is not compared with the clock, which may be wrong here or there. But the latest measurement counts, so that a
    time of no working clock would count for ever.
    """
    try:
        year = datetime.fromisoformat(when).year
    except ValueError:
        year = 0
    if not YEARS[0] <= year <= YEARS[1]:
        raise RecordError(f"$.provenance.when is {_brief(when)}; it takes the time of a measurement, as ISO 8601")


def _backend(kernel: Any, op: str) -> str | None:
    if kernel is None:
        return None
    if not isinstance(kernel, str) or not kernel.startswith(f"{op}."):
        raise RecordError(f"$.kernel is {_brief(kernel)}, not a kernel of {op}")
    return kernel.removeprefix(f"{op}.")


def type_name(kind: Any) -> str:
    """The path by which a type is imported."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _fields(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    if isinstance(value, type) or not (attrs.has(type(value)) or hasattr(type(value), "__dataclass_fields__")):
        raise RecordError(
            f"a configuration is an attrs class or a dataclass; got {type(value).__qualname__} {brief(value)}"
        )
    fields = _unstructured(value)
    reread = _structured(fields, type(value), "$")
    if reread != value:
        raise RecordError(f"{brief(value)} would be read back as {brief(reread)}")
    json_fields: dict[str, Any] = fields
    return json_fields


def _config(data: Any, kind: type[Any] | None, place: str) -> Any:
    config_type = None if kind is type(None) else kind
    if (data is None) != (config_type is None):
        raise RecordError(
            f"{place} is {_brief(data)}, and {config_type.__qualname__ if config_type else 'nothing'} is wanted"
        )
    return None if config_type is None else _structured(data, config_type, place)


def _unstructured(value: Any) -> Any:
    """A value in JSON's own types; ``RecordError`` where it has no such form."""
    try:
        return json.loads(_dump(_converter().unstructure(value)))
    except (TypeError, ValueError) as fault:
        raise RecordError(f"{brief(value)} cannot be written down: {fault}") from fault


def _structured(data: Any, kind: Any, place: str) -> Any:
    from cattrs import transform_error

    try:
        value = _converter().structure(data, kind)
    except Exception as fault:  # validators, converters and cattrs raise any exception for a wrong text
        reasons = transform_error(fault, path=place, format_exception=_reason)
        raise RecordError("; ".join(reasons)) from fault
    # cattrs reads "3" as 3, and fills in defaults. Written again, the text would be another one.
    try:
        difference = _difference(data, _unstructured(value), place)
    except RecursionError as fault:
        raise RecordError(f"{place} is nested too deep") from fault
    if difference is not None:
        raise RecordError(difference)
    return value


def _reason(fault: BaseException, kind: type[Any] | None) -> str:
    from cattrs.errors import ForbiddenExtraKeysError
    from cattrs.v import format_exception

    by_cattrs = isinstance(fault, (KeyError, ForbiddenExtraKeysError))
    return format_exception(fault, kind) if by_cattrs else str(fault)


def _difference(data: Any, reread: Any, place: str) -> str | None:
    """The first place where the two differ, and how, as text; None where they are equal."""
    if isinstance(data, dict) and isinstance(reread, dict):
        for name in sorted({*data, *reread}):
            if name not in data or name not in reread:
                return f"{place}.{name} is " + ("missing" if name not in data else "unknown")
            difference = _difference(data[name], reread[name], f"{place}.{name}")
            if difference is not None:
                return difference
        return None
    if isinstance(data, list) and isinstance(reread, list) and len(data) == len(reread):
        differences = (_difference(a, b, f"{place}[{i}]") for i, (a, b) in enumerate(zip(data, reread, strict=True)))
        return next((difference for difference in differences if difference is not None), None)
    # People write whole numbers in fields of floats. No other difference of types is allowed.
    if data == reread and (type(data) is type(reread) or (type(data), type(reread)) == (int, float)):
        return None
    return f"{place} is {_brief(data)}; of its type it would be {_brief(reread)}"


@functools.cache
def _converter() -> Any:
    # Imported here: a program that stores nothing never loads cattrs.
    from cattrs.gen import make_dict_unstructure_fn, override
    from cattrs.preconf.json import make_converter

    # Sorted, because the order of a set differs between processes.
    converter = make_converter(forbid_extra_keys=True, unstruct_collection_overrides={Set: _sorted})
    # A dtype is written by its name, in each of its three Python forms, and read as ``numpy.dtype``.
    for kind in (np.dtype, type, type(jax.numpy.float32)):
        converter.register_unstructure_hook(kind, _dtype_json)
    converter.register_structure_hook(np.dtype, lambda data, _: np.dtype(data[f"{TAG}dtype"]))
    converter.register_structure_hook_func(_may_be_a_dtype, lambda data, _: _dtype_or_json(data))
    unstructure_provenance = make_dict_unstructure_fn(Provenance, converter, shortfall=override(omit_if_default=True))
    converter.register_unstructure_hook(Provenance, unstructure_provenance)
    return converter


def _may_be_a_dtype(kind: Any) -> bool:
    return kind in (Any, type, jax.typing.DTypeLike) or get_origin(kind) is type


def _dtype_json(value: Any) -> dict[str, str]:
    content: Any = json.loads(stable_json(value))
    if not isinstance(content, dict) or not isinstance(content.get(f"{TAG}dtype"), str):
        raise TypeError(f"{brief(value)} is not a dtype of numbers")
    dtype_json: dict[str, str] = content
    return dtype_json


def _dtype_or_json(data: Any) -> Any:
    return np.dtype(data[f"{TAG}dtype"]) if isinstance(data, dict) and data.keys() == {f"{TAG}dtype"} else data


def _sorted(values: Iterable[Any]) -> list[Any]:
    return sorted(values, key=lambda value: json.dumps(value, sort_keys=True))


def check_characters(data: Any) -> None:
    """``RecordError`` if a text in the data has half of a character (a lone surrogate): no file and no terminal takes
    it as it is.
    """
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as fault:
        half = json.dumps(fault.object[fault.start])
        raise RecordError(f"a text in it has half of a character, {half}", damaged=True) from fault
    except RecursionError as fault:
        raise RecordError("nested too deep to be read") from fault


def _dump(data: Any) -> str:
    return json.dumps(data, indent=1, sort_keys=True, allow_nan=False)


def _parse(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except (ValueError, RecursionError) as fault:
        raise RecordError(f"not JSON: {fault}", damaged=True) from fault
    if not isinstance(data, dict):
        raise RecordError(f"$ is a {type(data).__name__}, not an object", damaged=True)
    return data


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is too large for a number")
    return number


def _check_schema(data: Mapping[str, Any]) -> None:
    if data.get("schema") != SCHEMA or type(data["schema"]) is not int:
        raise RecordError(f"$.schema is {data.get('schema')!r}; this version reads {SCHEMA}")


def _check_names(data: Mapping[str, Any], names: Iterable[str]) -> None:
    for name in sorted(data.keys() - set(names)):
        raise RecordError(f"$.{name} is unknown")


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
