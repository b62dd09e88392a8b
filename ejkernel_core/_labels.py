"""Labels of a kernel and its configuration, in the names of the compiled instructions of a call.

XLA keeps these names, and profilers show them. XLA truncates a name at "@" and splits it at "/".
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

from ._content import content, short_hash, stable_json
from ._errors import RecordError
from ._json import to_json

#: A label is short, because every instruction of a call has it.
MAX_LENGTH = 100


def call_label(kernel: str, cfg: Any, config_type: type | None = None) -> str:
    """The label of a kernel and its configuration, of at most 100 characters.

    >>> Config = attrs.make_class("Config", {"q_block": attrs.field(type=int)}, frozen=True)
    >>> call_label("flash_attention.xla", Config(256))
    'flash_attention.xla(q_block=256)'

    The label has a digest in place of a configuration without a short, readable text, and of one that is not of
    ``config_type``, the type of the kernel's configurations.

    >>> call_label("flash_attention.xla", Config({"no": "number"}))
    'flash_attention.xla(fa1365e83081)'
    """
    op, _, backend = quote(kernel, safe="").rpartition(".")
    for text in _config_texts(cfg) if config_type in (None, type(cfg)) else ():
        if len(label := f"{op}.{backend}({text})") <= MAX_LENGTH:
            return label
    return digest_label(kernel, cfg)


def digest_label(kernel: str, cfg: Any) -> str:
    """The label of a kernel with a digest of its configuration."""
    op, _, backend = quote(kernel, safe="").rpartition(".")
    backend = backend[: MAX_LENGTH // 2]
    suffix = f".{backend}({short_hash([kernel, _document(cfg)], 12)})"
    return op[: MAX_LENGTH - len(suffix)] + suffix


def _config_texts(cfg: Any) -> Iterator[str]:
    """The text of all fields, then that of the fields without default values. Nothing where a field has no text."""
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
        texts_by_field = {name: f"{quote(name)}={text}" for name, text in texts.items()}
        yield ",".join(texts_by_field.values())
        yield ",".join(texts_by_field[field.name] for field, value in values if not _is_default(field, value))


def _is_default(field: Any, value: Any) -> bool:
    return bool(content(value) == content(field.default))


def field_types(kind: Any) -> dict[str, Any]:
    """The types of the fields of a class; empty where its annotations cannot be evaluated."""
    try:
        return typing.get_type_hints(kind)
    except Exception:  # an annotation may be any expression, and may fail in any way
        return {}


def nested_class(hint: Any) -> Any:
    """The attrs class in the type of a field, if it is the only one."""
    classes = [kind for kind in (hint, *typing.get_args(hint)) if isinstance(kind, type) and attrs.has(kind)]
    return classes[0] if len(classes) == 1 else None


def value_text(value: Any, hint: Any) -> str | None:
    """The text of a field's value in a label; None where the value has no short text."""
    if value is None or type(value) in (bool, int) or (type(value) is float and math.isfinite(value)):
        return str(value)
    if type(value) is str:
        return quote(repr(value) if _is_literal(value) else value, safe="", errors="surrogatepass")
    if type(value) is nested_class(hint) and (sizes := attrs.astuple(value, recurse=False)):
        # Blocks in the usual notation: 128x64.
        return "x".join(map(str, sizes)) + "x" * (len(sizes) == 1) if all(_is_size(size) for size in sizes) else None
    return None


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_literal(text: str) -> bool:
    """Whether the text would be read as a value other than text."""
    try:
        ast.literal_eval(text)
    except Exception:  # it is not a Python literal
        return text[:1].isdigit() or not text
    return True


def _document(cfg: Any) -> Any:
    """The content that a digest is made of, the same in every process. The module of the class is not part of it."""
    try:
        return [type(cfg).__qualname__, to_json(cfg)]
    except RecordError:  # it has no JSON, so no store has it either
        pass
    try:
        return stable_json(cfg)
    except TypeError:  # something in it has no content
        return type(cfg).__qualname__
