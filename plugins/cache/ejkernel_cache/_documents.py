"""Records as they lie in files: read back whole, or a ``RecordError`` that says why not."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from typing import Any

import attrs

import ejkernel_core
from ejkernel_core import Key, Record, RecordError, record_from_json

from ._names import Place, component, stem, stem_of, written_out

#: No record is as large as this; what is was never one.
LIMIT = 1 << 20


def text_of(data: bytes, limit: int = LIMIT) -> str:
    """The content of a file as text."""
    if len(data) > limit:
        raise RecordError(f"larger than {limit} bytes", damaged=True)
    try:
        return data.decode()
    except UnicodeDecodeError as fault:
        raise RecordError(f"no UTF-8: {fault}", damaged=True) from fault


def decoded(text: str, key: Key, kind: type | None, put_here: Mapping[str, type] | None = None) -> Record:
    """The record in a text. Without a ``kind``, the type of its configuration is one of those that are known here: its
    kernel's, and where it is for none alone, the one that it names.
    """
    try:
        if kind is None:
            kind = _known_type(text, put_here or {})
        return record_from_json(text, key, kind)
    except RecursionError as fault:  # not to be called damaged: it may be the caller who is in too deep
        raise RecordError("nested too deep to be read") from fault


def _known_type(text: str, put_here: Mapping[str, type]) -> type | None:
    try:
        document = json.loads(text)
        if document["config"] is None:
            return None
        kernel, name = document["kernel"], document.get("type")
    except (ValueError, LookupError, TypeError, AttributeError):  # record_from_json says what is wrong
        return None
    if isinstance(kernel, str):
        kind = put_here.get(kernel) or ejkernel_core.config_type(kernel)
        if kind is None:
            raise RecordError(f"$.kernel is {kernel}, which is not known here; pass kind=")
        return kind
    kind = (put_here.get(name) or _imported_type(name)) if isinstance(name, str) else None
    if kind is None:
        raise RecordError(f"$.type is {name}, which nothing has imported; pass kind=")
    return kind


def _imported_type(name: str) -> type | None:
    """The class of configurations that is imported by this name, or None."""
    # A file must not have anything imported, so nothing is asked that could: no module's ``__getattr__`` either.
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:count]))
        for part in parts[count:]:
            found = getattr(found, "__dict__", {}).get(part)
        if isinstance(found, type) and name == f"{found.__module__}.{found.__qualname__}":
            return found if attrs.has(found) or dataclasses.is_dataclass(found) else None
    return None


# -- keys ------------------------------------------------------------------------------------------------------------


def canonical(data: Any) -> str:
    """The text of a document's part as a key has it.

    ``stable_json`` has made it once already, and would write its marks for tuples and dtypes down a second time.
    """
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def software_in(data: bytes) -> dict[str, str] | None:
    """The versions that the record in a file was measured with; None where there is nothing of that."""
    try:
        software = json.loads(text_of(data))["provenance"]["software"]
    except (ValueError, LookupError, TypeError, RecursionError, RecordError):
        return None
    return software if isinstance(software, dict) else None


def rebuilt_key(text: str, place: Place) -> Key | None:
    """The key of the record that lies in this place; None where it is not the one that belongs there."""
    try:
        problem = json.loads(text)["problem"]
        content = canonical(problem)
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    for device, op in (_named_by(place), named_in(problem)):
        if not (isinstance(device, str) and isinstance(op, str)):
            continue
        key = Key(op, device, content)
        if (component(device), component(op), stem(key)) == (*place[:2], stem_of(place[3])):
            return key
    return None


def _named_by(place: Place) -> tuple[str | None, str | None]:
    return written_out(place[0]), written_out(place[1])


def named_in(problem: Any) -> tuple[Any, Any]:
    """The full names, where the folders' are cut: anything at all, in a file that is not ours."""
    try:
        platform, device, *_ = problem["device"]
        return device or platform, problem["operation"][0]
    except (ValueError, LookupError, TypeError):
        return None, None
