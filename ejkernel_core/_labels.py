"""Labels that survive compilation: the kernel and its configuration, in the names of the instructions of a call.

XLA keeps these names, and profilers show them. Of the characters in them, it cuts at "@" and splits at "/".
"""

from __future__ import annotations

import ast
import dataclasses
import math
import typing
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import attrs

from ._errors import RecordError
from ._keys import content, short_hash, stable_json
from ._records import to_json

#: A name stands in every instruction of a call.
LONGEST = 100


def call_label(kernel: str, cfg: Any, kind: type | None = None) -> str:
    """The label of a kernel and its configuration, of at most 100 characters.

    >>> Config = attrs.make_class("Config", {"q_block": attrs.field(type=int)}, frozen=True)
    >>> call_label("flash_attention.xla", Config(256))
    'flash_attention.xla(q_block=256)'

    A configuration that has no short text, or one that cannot be read back, leaves a digest; so does one of another
    type than ``kind``, the kernel's own.

    >>> call_label("flash_attention.xla", Config({"no": "number"}))
    'flash_attention.xla(fa1365e83081)'
    """
    op, _, backend = quote(kernel, safe="").rpartition(".")
    for text in _config_texts(cfg) if kind in (None, type(cfg)) else ():
        if len(label := f"{op}.{backend}({text})") <= LONGEST:
            return label
    return digest_label(kernel, cfg)


def digest_label(kernel: str, cfg: Any) -> str:
    """The label that stands for a configuration without saying what is in it."""
    op, _, backend = quote(kernel, safe="").rpartition(".")
    backend = backend[: LONGEST // 2]
    end = f".{backend}({short_hash([kernel, _document(cfg)], 12)})"
    return op[: LONGEST - len(end)] + end


def _config_texts(cfg: Any) -> Iterator[str]:
    """All fields; and, where this is too long, those that have not their default. None where one has no text."""
    if cfg is None:
        yield ""
        return
    if not (attrs.has(type(cfg)) or dataclasses.is_dataclass(cfg)):
        return
    fields: Any = attrs.fields(type(cfg)) if attrs.has(type(cfg)) else dataclasses.fields(cfg)
    types = field_types(type(cfg))
    values = [(field, getattr(cfg, field.name)) for field in fields]
    texts = {field.name: value_text(value, types.get(field.name)) for field, value in values}
    if None not in texts.values():
        named = {name: f"{quote(name)}={text}" for name, text in texts.items()}
        yield ",".join(named.values())
        yield ",".join(named[field.name] for field, value in values if not _is_default(field, value))


def _is_default(field: Any, value: Any) -> bool:
    return bool(content(value) == content(field.default))


def field_types(kind: Any) -> dict[str, Any]:
    """The types of the fields of a class; nothing where they cannot be told."""
    try:
        return typing.get_type_hints(kind)
    except Exception:  # an annotation may be any expression, and name what is not there
        return {}


def nested_class(hint: Any) -> Any:
    """The attrs class in the type of a field, where there is one and no other."""
    classes = [kind for kind in (hint, *typing.get_args(hint)) if isinstance(kind, type) and attrs.has(kind)]
    return classes[0] if len(classes) == 1 else None


def value_text(value: Any, hint: Any) -> str | None:
    """What stands in a label for the value of a field of this type; None where that has no short text."""
    if value is None or type(value) in (bool, int) or (type(value) is float and math.isfinite(value)):
        return str(value)
    if type(value) is str:
        return quote(repr(value) if _is_literal(value) else value, safe="", errors="surrogatepass")
    if type(value) is nested_class(hint) and (sizes := attrs.astuple(value, recurse=False)):
        # Blocks, as their readers write them: 128x64.
        return "x".join(map(str, sizes)) + "x" * (len(sizes) == 1) if all(_is_size(size) for size in sizes) else None
    return None


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_literal(text: str) -> bool:
    """Whether it would be read as another value than this text."""
    try:
        ast.literal_eval(text)
    except Exception:  # whatever it is, it is not that value
        return text[:1].isdigit() or not text
    return True


def _document(cfg: Any) -> Any:
    """What the digest is of: the same in every process, and wherever the class is."""
    try:
        return [type(cfg).__qualname__, to_json(cfg)]
    except RecordError:  # no store can have it
        pass
    try:
        return stable_json(cfg)
    except TypeError:  # an object in it has no content either
        return type(cfg).__qualname__
