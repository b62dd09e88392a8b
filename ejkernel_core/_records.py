"""Configurations as JSON, by cattrs: written so that a person can read them, and read back whole or not at all.

Reading is strict. What another version of a class has more, less, or of another type is a ``RecordError`` that names
the place; nothing is filled in by defaults and nothing is converted.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Set
from datetime import UTC, datetime
from typing import Any, get_origin

import attrs
import jax
import numpy as np
from attrs.validators import deep_iterable, instance_of

from ._errors import RecordError
from ._keys import TAG, Key, canonical_json, stable_json

SCHEMA = 2
#: How the reason begins of a configuration that took a process with it: it is told wherever its record is.
DIED = "the process died"


@attrs.frozen
class Shortfall:
    """A budget that was too short to measure everything."""

    #: How many configurations it did not reach.
    unreached: int
    budget_s: float

    def __str__(self) -> str:
        count = f"{self.unreached} configuration{'s were' if self.unreached > 1 else ' was'}"
        return f"{count} not reached in {self.budget_s:g} s, and a larger budget goes on there"


def _is_duration(provenance: Any, field: Any, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{field.name}: takes a number; got {value!r:.60}")
    if not value >= 0:
        raise ValueError(f"{field.name}: takes a number of at least 0; got {value!r}")


@attrs.frozen(kw_only=True)
class Provenance:
    """How a configuration was found to be the best."""

    #: When it was measured, in UTC, as ISO 8601 writes it.
    when: str = attrs.field(validator=instance_of(str))
    #: On what: see ``device_fingerprint``.
    device: str = attrs.field(validator=instance_of(str))
    #: How long one call took, in milliseconds.
    milliseconds: float = attrs.field(validator=_is_duration)
    #: The backends that took part. A measurement says nothing about the others.
    backends: tuple[str, ...] = attrs.field(validator=deep_iterable(instance_of(str), instance_of(tuple)))
    #: The versions of these backends' kernels ("flash_attention.xla"), of JAX and of the compilers.
    software: dict[str, str] = attrs.field(factory=dict)
    #: Every configuration that was tried, as text, with its milliseconds, or why it has none.
    tried: tuple[tuple[str, float | str], ...] = ()
    #: None where everything was measured; it is not written then, as in records that are older than this field.
    shortfall: Shortfall | None = None

    @property
    def casualties(self) -> list[str]:
        """What is out because it took a process with it, and the way back."""
        return [f"{what}: {why}" for what, why in self.tried if isinstance(why, str) and why.startswith(DIED)]

    def changes(self, software: Mapping[str, str]) -> str:
        """Which of these versions are others than those that were measured with; "" for none."""
        then = self.software
        changed = (name for name in sorted(software) if name in then and then[name] != software[name])
        return ", ".join(f"{name} was {then[name]}, is {software[name]}" for name in changed)

    def __str__(self) -> str:
        rest = f"; {self.shortfall}" if self.shortfall else ""
        return f"measured {_ago(self.when)} on {self.device}: {self.milliseconds:.3g} ms{rest}"


@attrs.frozen
class Record:
    """One configuration worth remembering. Without a provenance, it was put there by hand."""

    cfg: Any
    #: The backend it is for; None for the first one that takes a configuration of its type.
    backend: str | None = None
    provenance: Provenance | None = None


def as_record(value: Any) -> Record:
    """The value itself, or a record of that configuration put there by hand.

    >>> record = as_record(128)
    >>> record, as_record(record) is record
    (Record(cfg=128, backend=None, provenance=None), True)
    """
    return value if isinstance(value, Record) else Record(value)


def successor(old: Record | None, new: Record) -> Record:
    """What to keep of two records of one backend: a race of fewer does not undo one of more, but may better it.

    >>> def found(cfg, milliseconds, *raced):
    ...     return Record(cfg, "xla", Provenance(when="", device="", milliseconds=milliseconds, backends=raced))
    >>> successor(found(64, 2.0, "xla", "triton"), found(128, 3.0, "xla")).cfg
    64
    >>> successor(found(64, 2.0, "xla", "triton"), found(128, 1.0, "xla")).provenance.backends
    ('xla', 'triton')
    """
    if old is None or old.provenance is None or new.provenance is None:
        return new
    if not {*old.provenance.backends} > {*new.provenance.backends}:
        return new
    if new.provenance.milliseconds > old.provenance.milliseconds:
        return old
    return attrs.evolve(new, provenance=attrs.evolve(new.provenance, backends=old.provenance.backends))


def to_json(value: Any) -> str:
    """A configuration (a frozen attrs class or dataclass) as JSON, with the version of the format.

    Raises ``RecordError`` where a field holds something that JSON cannot.

    >>> Config = attrs.make_class("Config", {"block": attrs.field(type=int)}, frozen=True)
    >>> json.loads(to_json(Config(block=64)))["fields"]["block"]
    64
    """
    return _dump({"schema": SCHEMA, "fields": _fields(value)})


def from_json(text: str, kind: type[Any]) -> Any:
    """The configuration that ``to_json`` wrote. ``RecordError`` names the place where it does not fit ``kind``.

    >>> Config = attrs.make_class("Config", {"block": attrs.field(type=int)}, frozen=True)
    >>> from_json(to_json(Config(block=64)), Config) == Config(block=64)
    True
    """
    data = _parsed(text)
    _check_schema(data)
    if "fields" not in data:
        raise RecordError("$ lacks fields")
    return _config(data["fields"], kind, "$.fields")


def record_to_json(key: Key, record: Record) -> str:
    """A record as a document of its own: what the key stands for, the kernel and its configuration, how it was found.

    >>> Config = attrs.make_class("Config", {"block": attrs.field(type=int)}, frozen=True)
    >>> key = Key("double", "cpu", problem=stable_json({"op": "double"}))
    >>> document = json.loads(record_to_json(key, Record(Config(block=64), "xla")))
    >>> document["kernel"], document["config"]
    ('double.xla', {'block': 64})

    The kernel says what the fields mean. What is for no kernel alone names the type of the configuration.
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
    return _dump(document)


def record_from_json(text: str, key: Key, kind: type[Any] | None) -> Record:
    """The record that was written for ``key``, with a configuration of this type (None: none at all).

    >>> Config = attrs.make_class("Config", {"block": attrs.field(type=int)}, frozen=True)
    >>> key = Key("double", "cpu", problem=stable_json({"op": "double"}))
    >>> record = Record(Config(block=64), "xla")
    >>> record_from_json(record_to_json(key, record), key, Config) == record
    True
    """
    data = _parsed(text)
    _check_schema(data)
    missing = {"problem", "kernel", "config", "provenance"} - data.keys()
    if missing:
        raise RecordError(f"$ lacks {', '.join(sorted(missing))}", damaged=True)
    # As text: in Python, 1, 1.0 and True are equal.
    if canonical_json(data["problem"]) != key.problem:
        raise RecordError("$.problem is another one than that of the key")
    if kind is not None and data.get("type", type_name(kind)) != type_name(kind):
        raise RecordError(f"$.type is {data['type']!r}, not {type_name(kind)!r}")
    provenance = data["provenance"]
    return Record(
        _config(data["config"], kind, "$.config"),
        _backend(data["kernel"], key.op),
        None if provenance is None else _structured(provenance, Provenance, "$.provenance"),
    )


def _backend(kernel: Any, op: str) -> str | None:
    if kernel is None:
        return None
    if not isinstance(kernel, str) or not kernel.startswith(f"{op}."):
        raise RecordError(f"$.kernel is {_brief(kernel)}, no kernel of {op}")
    return kernel.removeprefix(f"{op}.")


def type_name(kind: Any) -> str:
    """By which a type is imported."""
    return f"{kind.__module__}.{kind.__qualname__}"


# -- one value -------------------------------------------------------------------------------------------------------


def _fields(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    if isinstance(value, type) or not (attrs.has(type(value)) or hasattr(type(value), "__dataclass_fields__")):
        raise RecordError(f"a configuration is an attrs class or a dataclass; got {type(value).__qualname__} {value!r}")
    fields = _unstructured(value)
    back = _structured(fields, type(value), "$")
    if back != value:
        raise RecordError(f"{value!r} would be read back as {back!r}")
    own: dict[str, Any] = fields
    return own


def _config(data: Any, kind: type[Any] | None, place: str) -> Any:
    wanted = None if kind is type(None) else kind
    if (data is None) != (wanted is None):
        raise RecordError(f"{place} is {_brief(data)}, and {wanted.__qualname__ if wanted else 'nothing'} is wanted")
    return None if wanted is None else _structured(data, wanted, place)


def _unstructured(value: Any) -> Any:
    """Plain JSON of a value, or ``RecordError``."""
    try:
        return json.loads(_dump(_converter().unstructure(value)))
    except (TypeError, ValueError) as fault:
        raise RecordError(f"{value!r} cannot be written down: {fault}") from fault


def _structured(data: Any, kind: Any, place: str) -> Any:
    from cattrs import transform_error

    try:
        value = _converter().structure(data, kind)
    except Exception as fault:  # whatever a validator, a converter or cattrs raises, it is the text that is wrong
        told = transform_error(fault, path=place, format_exception=_reason)
        raise RecordError("; ".join(told)) from fault
    # cattrs takes "3" for 3 and a default for what is missing: neither would be written as it was read.
    try:
        where = _difference(data, _unstructured(value), place)
    except RecursionError as fault:
        raise RecordError(f"{place} is nested too deep") from fault
    if where is not None:
        raise RecordError(where)
    return value


def _reason(fault: BaseException, kind: type[Any] | None) -> str:
    from cattrs.errors import ForbiddenExtraKeysError
    from cattrs.v import format_exception

    by_cattrs = isinstance(fault, (KeyError, ForbiddenExtraKeysError))
    return format_exception(fault, kind) if by_cattrs else str(fault)


def _difference(given: Any, read: Any, place: str) -> str | None:
    """Where the two first differ, and how."""
    if isinstance(given, dict) and isinstance(read, dict):
        for name in sorted({*given, *read}):
            if name not in given or name not in read:
                return f"{place}.{name} is " + ("missing" if name not in given else "unknown")
            where = _difference(given[name], read[name], f"{place}.{name}")
            if where is not None:
                return where
        return None
    if isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        found = (_difference(a, b, f"{place}[{i}]") for i, (a, b) in enumerate(zip(given, read, strict=True)))
        return next((where for where in found if where is not None), None)
    # A whole number in a field of floats is what everybody writes; nothing else may be of another type.
    if given == read and (type(given) is type(read) or (type(given), type(read)) == (int, float)):
        return None
    return f"{place} is {_brief(given)}; of its type it would be {_brief(read)}"


@functools.cache
def _converter() -> Any:
    # Imported here: a program that remembers nothing never loads it.
    from cattrs.gen import make_dict_unstructure_fn, override
    from cattrs.preconf.json import make_converter

    # The order of a set is another one in every process.
    converter = make_converter(forbid_extra_keys=True, unstruct_collection_overrides={Set: _sorted})
    # A dtype is written by its name, whichever of its three faces the field holds, and read as ``numpy.dtype``.
    for kind in (np.dtype, type, type(jax.numpy.float32)):
        converter.register_unstructure_hook(kind, _named)
    converter.register_structure_hook(np.dtype, lambda data, _: np.dtype(data[f"{TAG}dtype"]))
    converter.register_structure_hook_func(_may_be_a_dtype, lambda data, _: _plain(data))
    written = make_dict_unstructure_fn(Provenance, converter, shortfall=override(omit_if_default=True))
    converter.register_unstructure_hook(Provenance, written)
    return converter


def _may_be_a_dtype(kind: Any) -> bool:
    return kind in (Any, type, jax.typing.DTypeLike) or get_origin(kind) is type


def _named(value: Any) -> dict[str, str]:
    content: Any = json.loads(stable_json(value))
    if not isinstance(content, dict) or not isinstance(content.get(f"{TAG}dtype"), str):
        raise TypeError(f"{value!r} is no dtype of numbers")
    named: dict[str, str] = content
    return named


def _plain(data: Any) -> Any:
    return np.dtype(data[f"{TAG}dtype"]) if isinstance(data, dict) and data.keys() == {f"{TAG}dtype"} else data


def _sorted(values: Iterable[Any]) -> list[Any]:
    return sorted(values, key=lambda value: json.dumps(value, sort_keys=True))


def _ago(when: str) -> str:
    """How long ago that was, in the largest unit that fits."""
    try:
        seconds = (datetime.now(UTC) - datetime.fromisoformat(when)).total_seconds()
    except (ValueError, TypeError):
        return f"at {when}"
    counts = [(int(seconds // size), unit) for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60))]
    return next((f"{count} {unit}{'s' * (count > 1)} ago" for count, unit in counts if count > 0), "just now")


# -- text ------------------------------------------------------------------------------------------------------------


def _dump(data: Any) -> str:
    return json.dumps(data, indent=1, sort_keys=True, allow_nan=False)


def _parsed(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as fault:
        raise RecordError(f"no JSON: {fault}", damaged=True) from fault
    if not isinstance(data, dict):
        raise RecordError(f"$ is a {type(data).__name__}, no object", damaged=True)
    return data


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _check_schema(data: Mapping[str, Any]) -> None:
    if data.get("schema") != SCHEMA or type(data["schema"]) is not int:
        raise RecordError(f"$.schema is {data.get('schema')!r}; this version reads {SCHEMA}")


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
