"""Records as they lie in files: read back whole, or a ``RecordError`` that says why not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ejkernel_core import Key, Record, RecordError, imported_type, record_from_json

from ._names import Place, place_of, written_out

#: No record is as large as this; what is was never one.
LIMIT = 1 << 20


def text_of(data: bytes) -> str:
    """The content of a file as text."""
    if len(data) > LIMIT:
        raise RecordError(f"larger than {LIMIT} bytes", damaged=True)
    try:
        return data.decode()
    except UnicodeDecodeError as fault:
        raise RecordError(f"no UTF-8: {fault}", damaged=True) from fault


def decoded(text: str, key: Key, kind: type | None, put_here: Mapping[str, type], any_software: bool = False) -> Record:
    """The record in a text. Without a ``kind``, the type of its configuration is one of those that are known here."""
    try:
        if kind is None:
            kind = _known_type(_type_name_in(text), put_here)
        return record_from_json(text, key, kind, any_software)
    except RecursionError as fault:  # not to be called damaged: it may be the caller who is in too deep
        raise RecordError("nested too deep to be read") from fault


def _type_name_in(text: str) -> str | None:
    try:
        name = json.loads(text)["config"]["type"]
    except (ValueError, LookupError, TypeError):  # record_from_json says what is wrong
        return None
    return name if isinstance(name, str) else None


def _known_type(name: str | None, put_here: Mapping[str, type]) -> type | None:
    if name is None:
        return None
    kind = put_here.get(name) or imported_type(name)
    if kind is None:
        raise RecordError(f"$.config.type is {name}, which nothing has imported; pass kind=")
    return kind


# -- keys ------------------------------------------------------------------------------------------------------------


def canonical(data: Any) -> str:
    """The text of a document's part as a key has it.

    ``stable_json`` has made it once already, and would write its marks for tuples and dtypes down a second time.
    """
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def rebuilt_key(text: str, place: Place) -> Key | None:
    """The key of the record that lies in this place; None where it is not the one that belongs there."""
    try:
        document = json.loads(text)
        problem, software = document["problem"], document["software"]
        texts = canonical(problem), canonical(software)
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    for device, op in (_named_by(place), _named_in(problem)):
        if not (isinstance(device, str) and isinstance(op, str)):
            continue
        key = Key(op, device, *texts)
        if place_of(key, None)[:2] == place[:2] and f"{key.digest}.json" == place[3]:
            return key
    return None


def _named_by(place: Place) -> tuple[str | None, str | None]:
    return written_out(place[0]), written_out(place[1])


def _named_in(problem: Any) -> tuple[Any, Any]:
    """The full names, where the folders' are cut: anything at all, in a file that is not ours."""
    try:
        platform, device, *_ = problem["device"]
        return device or platform, problem["operation"][0]
    except (ValueError, LookupError, TypeError):
        return None, None
