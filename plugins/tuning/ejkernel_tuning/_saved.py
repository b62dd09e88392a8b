"""Invocations as text, so that another process can tune them: those that were recorded, and those of stored records."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import ejkernel_core
from ejkernel_core import Invocation, Key, RecordError, stable_json
from ejkernel_core.extend import TAG, target_of

from ._calls import _core_invocation

SCHEMA = 1


def save_invocations(file: str | os.PathLike[str], invocations: Iterable[Any]) -> None:
    """Write invocations to a file, from which ``load_invocations`` and ``ejkernel tune --recorded`` read them.

    They have shapes and options, and no arrays. ``RecordError`` if an option has no JSON.

    >>> import tempfile
    >>> query = jax.ShapeDtypeStruct((1, 4, 2, 8), "float32")
    >>> inv = ejkernel_core.invocation("flash_attention", query, query, query)
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     save_invocations(file.name, [inv])
    ...     [loaded] = load_invocations(file.name)
    >>> loaded.key == inv.key
    True
    """
    documents = [_document(_core_invocation(inv)) for inv in invocations]
    text = json.dumps({"schema": SCHEMA, "invocations": documents}, indent=1)
    Path(file).write_text(f"{text}\n", encoding="utf-8")


def load_invocations(file: str | os.PathLike[str]) -> list[Invocation]:
    """Read what ``save_invocations`` wrote, as invocations on this machine's device. ``RecordError`` says what cannot
    be read.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     save_invocations(file.name, [])
    ...     load_invocations(file.name)
    []
    """
    refusal = f"{file} is not a file of save_invocations"
    try:
        data = json.loads(Path(file).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as fault:
        raise RecordError(f"{refusal}: not JSON: {fault}", damaged=True) from fault
    if not isinstance(data, dict) or not isinstance(data.get("invocations"), list):
        raise RecordError(f"{refusal}: it takes an object of JSON with a list of invocations", damaged=True)
    if data.get("schema") != SCHEMA:
        raise RecordError(f"{file}: $.schema is {data.get('schema')!r}; this version reads {SCHEMA}")
    return [_call(document, f"{file}, call {number}") for number, document in enumerate(data["invocations"], 1)]


def _call(document: Any, place: str) -> Invocation:
    """The invocation in a document of ``save_invocations``."""
    if not isinstance(document, dict) or not {"operation", "arguments"} <= document.keys():
        raise RecordError(f"{place}: it takes an object of JSON with an operation and arguments", damaged=True)
    return _invocation(document["operation"], document["arguments"], {}, place)


def invocation_of(key: Key) -> Invocation | None:
    """The invocation whose key this is, on this machine's device; None for the key of a bucket, whose calls have other
    arguments, and for one of another device.
    """
    problem = json.loads(key.problem)
    if "arguments" not in problem:
        return None
    try:
        inv = _invocation(problem["operation"], problem["arguments"], problem.get("sizes", {}), str(key))
    except (RecordError, ejkernel_core.UnknownOperation):
        return None
    return inv if inv.key == key else None


def _document(inv: Invocation) -> dict[str, Any]:
    arguments = {}
    for name, value in inv.arguments.items():
        if value is None:
            continue
        try:
            # An array has a shape, and everything else its content.
            content = json.loads(
                stable_json(jax.ShapeDtypeStruct(value.shape, value.dtype) if _is_array(value) else value)
            )
            is_readable = stable_json(_value(content, {})) == stable_json(value) or _is_array(value)
        except (TypeError, RecordError):
            is_readable = False
        if not is_readable:
            raise RecordError(
                f"{inv.op}: {name}={value!r:.80} cannot be written; tune it in the program that recorded it"
            )
        arguments[name] = content
    return {"operation": [inv.op, inv.operation.version if inv.operation else 1], "arguments": arguments}


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _invocation(operation: Any, arguments: Any, sizes: Mapping[str, int], place: str) -> Invocation:
    try:
        (name, version), values = operation, {name: _value(content, sizes) for name, content in arguments.items()}
    except (ValueError, LookupError, TypeError, AttributeError) as fault:
        reason = "its operation is a name and a version, and its arguments are those of save_invocations by name"
        raise RecordError(f"{place}: {reason}", damaged=True) from fault
    definition = ejkernel_core.registry.operation(name)
    if version != definition.version:
        raise RecordError(f"{place} is of version {version} of {name}, and here is version {definition.version}")
    unknown = sorted(values.keys() - definition.signature.parameters.keys())
    if unknown:
        raise RecordError(f"{place}: {name} has no argument {unknown[0]!r}")
    complete = {**dict.fromkeys(definition.signature.parameters), **values}
    here = target_of(())
    device = here.platform, here.device_kind, here.compute_capability
    return Invocation(name, complete, *device, definition, registry=ejkernel_core.registry)


def _value(content: Any, sizes: Mapping[str, int]) -> Any:
    """The value with this content, as ``stable_json`` writes it; ``RecordError`` for one of another class."""
    if isinstance(content, list):
        return [_value(part, sizes) for part in content]
    if not isinstance(content, dict):
        return content
    kind, inner = next(iter(content.items())) if len(content) == 1 else ("", [])
    if kind == f"{TAG}array":
        dtype, *shape = inner
        return jax.ShapeDtypeStruct([sizes[size] if isinstance(size, str) else size for size in shape], dtype)
    if kind == f"{TAG}tuple":
        return tuple(_value(part, sizes) for part in inner)
    if kind == f"{TAG}dtype":
        return np.dtype(inner)
    if kind == f"{TAG}float":
        return float(str(inner))
    raise RecordError(f"{json.dumps(content):.80} cannot be read")
