"""Records of configurations, and their JSON, which people can read too. cattrs converts them.

Reading is strict. A field that is missing, unknown or of another type is a ``RecordError`` that names the place. No
default is filled in, and no value is converted.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Iterable, Mapping, Set
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, get_origin

import attrs
import jax
import numpy as np
from attrs.validators import deep_iterable, deep_mapping, instance_of, optional

from ._display import brief, repr_of
from ._errors import RecordError, printable
from ._keys import TAG, Key, canonical_json, read_only, stable_json

#: The version of the format of records.
SCHEMA = 2
#: The first and the last year in which a record may have been measured.
YEARS = 1970, 2199


class Reason(StrEnum):
    """How the reason begins for which a configuration has no time, or none that counts."""

    #: It ended its process, or ran without end: explanations show these with the record.
    DIED = "the process died"
    HUNG = "hung"
    #: Its results differ from those of the reference.
    WRONG = "wrong"
    #: It says nothing about the configuration itself.
    OUT_OF_TIME = "out of time"
    #: It is only about its time.
    SLOWER = "slower"


def _check_duration(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: takes a number; got {brief(value)}")
    if not 0 <= value <= sys.float_info.max:
        raise ValueError(f"{name}: takes a finite number of at least 0; got {brief(value)}")


def _is_duration(instance: Any, field: Any, value: Any) -> None:
    _check_duration(field.name, value)


def _are_outcomes(provenance: Any, field: Any, value: Any) -> None:
    for index, (text, outcome) in enumerate(value):
        if not isinstance(text, str):
            raise TypeError(f"{field.name}[{index}]: takes the text of a configuration; got {brief(text)}")
        if not isinstance(outcome, str):
            _check_duration(f"{field.name}[{index}]", outcome)


@attrs.frozen
class Shortfall:
    """A budget that was too short to measure every configuration."""

    #: The number of configurations for which no time was left. Those that hung are not among them.
    unreached: int
    budget_s: float = attrs.field(validator=_is_duration)

    def __str__(self) -> str:
        count = f"{self.unreached} configuration{'s were' if self.unreached > 1 else ' was'}"
        return f"{count} not measured in {self.budget_s:g} s, and a larger budget goes on there"


@attrs.frozen(kw_only=True)
class Provenance:
    """How a configuration was measured to be the best."""

    #: The time of the measurement in UTC, in the format of ISO 8601.
    when: str = attrs.field(validator=instance_of(str))
    #: The device: see ``device_fingerprint``.
    device: str = attrs.field(validator=instance_of(str))
    #: The time of one call.
    milliseconds: float = attrs.field(validator=_is_duration)
    #: The backends that were measured. The record says nothing about others.
    backends: tuple[str, ...] = attrs.field(validator=deep_iterable(instance_of(str), instance_of(tuple)))
    #: The versions of these backends' kernels ("flash_attention.xla"), of JAX and of the compilers.
    software: Mapping[str, str] = attrs.field(
        factory=dict,
        converter=read_only,
        validator=deep_mapping(instance_of(str), instance_of(str)),
        repr=lambda software: repr({**software}),
    )
    #: The text of every configuration that was tried, with its milliseconds or the reason for having none.
    tried: tuple[tuple[str, float | str], ...] = attrs.field(default=(), validator=_are_outcomes)
    #: None where everything was measured. None is not written, so records older than this field are still read.
    shortfall: Shortfall | None = attrs.field(default=None, validator=optional(instance_of(Shortfall)))

    @property
    def casualties(self) -> list[str]:
        """The configurations that ended their processes or hung, each with its reason."""
        reasons = [(text, reason) for text, reason in self.tried if isinstance(reason, str)]
        return [
            printable(f"{text}: {reason}") for text, reason in reasons if reason.startswith((Reason.DIED, Reason.HUNG))
        ]

    def why_not(self, backend: str) -> str:
        """Why the measurement did not select a backend."""
        if backend not in self.backends:
            return "it was not measured"
        outcomes = [outcome for text, outcome in self.tried if text.partition(" ")[0] == backend]
        reasons = [outcome for outcome in outcomes if isinstance(outcome, str)]
        wrong = [reason for reason in reasons if reason.startswith(Reason.WRONG)]
        if outcomes and len(reasons) == len(outcomes):
            return f"excluded when it was measured, {(wrong or reasons)[0]}"
        count = f"; {len(wrong)} of its {len(outcomes)} configurations {'was' if len(wrong) == 1 else 'were'} "
        return "slower when it was measured" + (count + wrong[0] if wrong else "")

    def changes(self, software: Mapping[str, str]) -> str:
        """The versions in ``software`` that differ from those of the measurement, as text; "" for none."""
        old = self.software
        names = (name for name in sorted(software) if name in old and old[name] != software[name])
        return printable(", ".join(f"{name} was {old[name]}, is {software[name]}" for name in names))

    def __str__(self) -> str:
        rest = f"; {self.shortfall}" if self.shortfall else ""
        text = f"measured {_ago(self.when)} on {self.device}: {self.milliseconds:.3g} ms{rest}"
        return " ".join(printable(text).splitlines())


@attrs.frozen
class Record:
    """One configuration to store. A record without a provenance was put there by hand."""

    cfg: Any = attrs.field(repr=repr_of)
    #: The backend that it is for; None for the first kernel that takes configurations of its type.
    backend: str | None = None
    provenance: Provenance | None = None


def as_record(value: Any) -> Record:
    """A record as it is; any other value as the configuration of a record put there by hand.

    >>> record = as_record(128)
    >>> record, as_record(record) is record
    (Record(cfg=128, backend=None, provenance=None), True)
    """
    return value if isinstance(value, Record) else Record(value)


def successor(old: Record | None, new: Record) -> Record:
    """The record to keep where a new one is stored for the same backend.

    The new one replaces the old one, with one exception: where it was measured against fewer backends, a slower one is
    dropped, and a faster one takes over the backends of the old one.

    >>> def record(cfg, milliseconds, *backends):
    ...     return Record(cfg, "xla", Provenance(when="", device="", milliseconds=milliseconds, backends=backends))
    >>> successor(record(64, 2.0, "xla", "triton"), record(128, 3.0, "xla")).cfg
    64
    >>> successor(record(64, 2.0, "xla", "triton"), record(128, 1.0, "xla")).provenance.backends
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
        raise RecordError(f"$.kernel is {_brief(kernel)}, no kernel of {op}")
    return kernel.removeprefix(f"{op}.")


def type_name(kind: Any) -> str:
    """The path by which a type is imported."""
    return f"{kind.__module__}.{kind.__qualname__}"


# -- one value -------------------------------------------------------------------------------------------------------


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


def _ago(when: str) -> str:
    """The time since then in words, in days, hours or minutes."""
    try:
        seconds = (datetime.now(UTC) - datetime.fromisoformat(when)).total_seconds()
    except (ValueError, TypeError):
        return f"at {when}"
    counts = [(int(seconds // size), unit) for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60))]
    return next((f"{count} {unit}{'s' * (count > 1)} ago" for count, unit in counts if count > 0), "just now")


# -- text ------------------------------------------------------------------------------------------------------------


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
        raise RecordError(f"$ is a {type(data).__name__}, no object", damaged=True)
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
