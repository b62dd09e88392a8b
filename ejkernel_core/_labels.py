"""Labels that survive compilation: the kernel and its configuration, in the names of the instructions of a call.

XLA keeps these names, and profilers show them. Of the characters in them, it cuts at "@" and splits at "/".
"""

from __future__ import annotations

import ast
import dataclasses
import math
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import attrs

from ._keys import content, short_hash

#: A name stands in every instruction of a call.
LONGEST = 100


def call_label(kernel: str, cfg: Any) -> str:
    """The label of a kernel and its configuration, of at most 100 characters.

    >>> Config = attrs.make_class("Config", {"q_block": attrs.field(type=int)}, frozen=True)
    >>> call_label("flash_attention.xla", Config(256))
    'flash_attention.xla(q_block=256)'

    A configuration that has no short text, or one that cannot be read back, leaves a digest.

    >>> call_label("flash_attention.xla", Config({"no": "number"}))
    'flash_attention.xla(99a6c73ce4a0)'
    """
    op, _, backend = quote(kernel, safe="").rpartition(".")
    for text in _config_texts(cfg):
        if len(label := f"{op}.{backend}({text})") <= LONGEST:
            return label
    end = f".{backend}({short_hash(f'{kernel} {_document(cfg)}', 12)})"
    return op[: LONGEST - len(end)] + end


def _config_texts(cfg: Any) -> Iterator[str]:
    """All fields; and, where this is too long, those that have not their default. None where one has no text."""
    if attrs.has(type(cfg)):
        fields: Any = attrs.fields(type(cfg))
    elif dataclasses.is_dataclass(cfg):
        fields = dataclasses.fields(cfg)
    elif cfg is None:
        fields = ()
    else:
        return
    values = [(field, getattr(cfg, field.name)) for field in fields]
    texts = {field.name: value_text(value) for field, value in values}
    if None not in texts.values():
        yield ",".join(f"{name}={text}" for name, text in texts.items())
        yield ",".join(f"{field.name}={texts[field.name]}" for field, value in values if not _is_default(field, value))


def _is_default(field: Any, value: Any) -> bool:
    return bool(content(value) == content(field.default))


def value_text(value: Any) -> str | None:
    """What stands in a label for the value of a field; None where that has no short text."""
    if value is None or type(value) in (bool, int) or (type(value) is float and math.isfinite(value)):
        return str(value)
    if type(value) is str:
        return quote(repr(value) if _is_literal(value) else value, safe="", errors="surrogatepass")
    if attrs.has(type(value)) and (sizes := attrs.astuple(value, recurse=False)):
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


def _document(cfg: Any) -> str:
    from ._errors import RecordError
    from ._records import to_json

    try:
        return to_json(cfg)
    except RecordError:  # what cannot be written down has its own text
        return str(cfg)
