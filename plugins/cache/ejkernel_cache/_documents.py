"""Read records from the text of files. ``RecordError`` says why one cannot be read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import ejkernel_core
from ejkernel_core import Key, Record, RecordError, record_from_json
from ejkernel_core.extend import SCHEMA, canonical_json, check_characters, config_types, type_name

from ._names import Place, component, decode_component, stem, stem_of

#: The largest size of a record.
LIMIT = 1 << 20
#: The end of the name of a file that has a record in each line, and the largest size of such a file.
LINES, MAX_FILE_SIZE = ".jsonl", 64 * LIMIT


def text_of(data: bytes, limit: int = LIMIT) -> str:
    """The content of a file as text."""
    if len(data) > limit:
        raise RecordError(f"larger than {limit} bytes", damaged=True)
    try:
        return data.decode()
    except UnicodeDecodeError as fault:
        raise RecordError(f"no UTF-8: {fault}", damaged=True) from fault


def read_record(text: str, key: Key, kind: type | None, types: Mapping[str, type] | None = None) -> Record:
    """The record in a text, with a configuration of type ``kind``.

    By default that is the ``Config`` of its kernel. A record without a backend names its type, which has to be one of
    ``types``, or the ``Config`` of a kernel of the operation that is loaded: a file never chooses a class.
    """
    try:
        if kind is None:
            kind = _known_type(text, key, types or {})
        return record_from_json(text, key, kind)
    except RecursionError as fault:  # the text need not be damaged: the caller's stack may be too deep
        raise RecordError("nested too deep to be read") from fault


def _known_type(text: str, key: Key, types: Mapping[str, type]) -> type | None:
    try:
        document = json.loads(text)
        if document["config"] is None:
            return None
        kernel, name = document["kernel"], document.get("type")
    except (ValueError, LookupError, TypeError, AttributeError):  # record_from_json says what is wrong
        return None
    if isinstance(kernel, str):
        if not kernel.startswith(f"{key.op}."):  # likewise
            return None
        kind = types.get(kernel) or kernel_config_type(key.op, kernel.removeprefix(f"{key.op}."))
        if kind is None:
            raise RecordError(f"$.kernel is {kernel}, which is not known here; pass kind=")
        return kind
    kind = (types.get(name) or _loaded_config_type(name, key.op)) if isinstance(name, str) else None
    if kind is None:
        raise RecordError(f"$.type is {name}, which is not the Config of a loaded kernel of {key.op}; pass kind=")
    return kind


def kernel_config_type(op: str, backend: str) -> type | None:
    """The ``Config`` of a kernel of this operation; None where there is no such kernel, or it has none."""
    # With a dot in the backend, it would be the kernel of another operation.
    return None if "." in backend else ejkernel_core.config_type(f"{op}.{backend}")


def _loaded_config_type(name: str, op: str) -> type | None:
    """The ``Config`` with this name among those of the operation's kernels, as far as they are loaded; else None."""
    kinds = (kind for kernel, kind in list(config_types.items()) if kernel.rpartition(".")[0] == op)
    return next((kind for kind in kinds if type_name(kind) == name), None)


def object_of(text: str) -> dict[str, Any]:
    """The JSON object of a record. ``RecordError`` says what is missing to one."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as fault:
        raise RecordError(f"no record: not JSON: {fault}", damaged=True) from fault
    if not isinstance(data, dict):
        raise RecordError(f"no record: it takes an object of JSON; got {json.dumps(data):.40}", damaged=True)
    missing = [repr(name) for name in ("problem", "kernel", "config", "provenance") if name not in data]
    if missing and data.get("schema", SCHEMA) != SCHEMA:
        raise RecordError(f"$.schema is {data['schema']!r:.40}; this version reads {SCHEMA}")
    if missing:
        raise RecordError(f"no record: it lacks {', '.join(missing)}", damaged=True)
    check_characters(data)
    return data


# -- keys ------------------------------------------------------------------------------------------------------------


def software_in(data: bytes) -> dict[str, str] | None:
    """The versions that the record in a file was measured with; None where it has none."""
    try:
        software = json.loads(text_of(data))["provenance"]["software"]
    except (ValueError, LookupError, TypeError, RecursionError, RecordError):
        return None
    return software if isinstance(software, dict) else None


def rebuilt_key(text: str, place: Place) -> Key | None:
    """The key of the record in a place; None where the record does not belong there."""
    try:
        problem = json.loads(text)["problem"]
        content = canonical_json(problem)
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    for device, op in (_device_and_op_of(place), device_and_op(problem)):
        if not (isinstance(device, str) and isinstance(op, str)):
            continue
        key = Key(op, device, content)
        if (component(device), component(op), stem(key)) == (*place[:2], stem_of(place[3])):
            return key
    return None


def _device_and_op_of(place: Place) -> tuple[str | None, str | None]:
    return decode_component(place[0]), decode_component(place[1])


def device_and_op(problem: Any) -> tuple[Any, Any]:
    """The device and the operation in a problem, which may be anything in a file of another program."""
    try:
        platform, device, *_ = problem["device"]
        return device or platform, problem["operation"][0]
    except (ValueError, LookupError, TypeError):
        return None, None
