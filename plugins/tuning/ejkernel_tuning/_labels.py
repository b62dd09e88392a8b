"""What a compiled program calls, read out of its text; and from these labels to configurations."""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar
from urllib.parse import unquote

import attrs
import jax

import ejkernel_core
from ejkernel_core import Key, Record, RecordError, from_json
from ejkernel_core._labels import digest_label, field_types, nested_class, value_text
from ejkernel_core._records import SCHEMA

#: Of a call, ``flash_attention.xla(q_block=256,kv_block=256)``, or of one's own, ``label(my_attention)``.
_LABEL = re.compile(
    r"(?<![\w.%~-])(?:label\(([\w.-]+)\)|([\w.%~-]+)\.([\w%~-]+)\(([0-9a-f]{12}|[\w%~]+=[\w.%~+=,-]*|)\))", re.ASCII
)
_SIZES = re.compile(r"\d+x(\d+(x\d+)*)?")

Function = TypeVar("Function", bound=Callable[..., Any])


@attrs.frozen
class Label:
    """One label of a compiled program."""

    #: Of the operation; or what was given to ``label``.
    name: str
    #: None for a label that ``label`` made.
    backend: str | None = None
    #: The fields of the configuration, "q_block=256,kv_block=256"; or a digest of it.
    config: str | None = None

    def __str__(self) -> str:
        return self.name if self.backend is None else f"{self.name}.{self.backend}({self.config})"


def label(name: str) -> Callable[[Function], Function]:
    """Mark everything that a function does, so that it is found in compiled code.

    >>> @label("my_attention")
    ... def double(x):
    ...     return x * 2
    >>> find_labels_in_lowered(jax.jit(double).lower(1.0))
    [Label(name='my_attention', backend=None, config=None)]
    """
    if not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(f"label: takes letters, digits, '_', '.' and '-', which survive compilation; got {name!r}")

    def mark(function: Function) -> Function:
        @functools.wraps(function)
        def marked(*args: Any, **kwargs: Any) -> Any:
            with jax.named_scope(f"label({name})"):
                return function(*args, **kwargs)

        return marked  # type: ignore[return-value]

    return mark


def find_labels_in_lowered(lowered: Any) -> list[Label]:
    """The labels of a ``jax.stages.Lowered`` or ``Compiled``, each once, in the order of the text.

    >>> twice = jax.jit(label("twice")(lambda x: x * 2))
    >>> [label.name for label in find_labels_in_lowered(twice.lower(1.0))]
    ['twice']
    """
    if isinstance(lowered, jax.stages.Lowered):
        return extract_labels_from_hlo_text(lowered.as_text(debug_info=True))
    return extract_labels_from_hlo_text(lowered.as_text())


def extract_labels_from_hlo_text(hlo_text: str) -> list[Label]:
    """The labels of a text, StableHLO with locations or HLO, which another process may have written.

    >>> extract_labels_from_hlo_text('op_name="jit(f)/flash_attention.xla(q_block=256,kv_block=128)/mul"')
    [Label(name='flash_attention', backend='xla', config='q_block=256,kv_block=128')]
    """
    return list(dict.fromkeys(_label(*match.groups()) for match in _LABEL.finditer(hlo_text)))


def _unquoted(text: str) -> str:
    return unquote(text, errors="surrogatepass")  # as they are written


def _label(own: str | None, name: str, backend: str, config: str) -> Label:
    return Label(own) if own else Label(_unquoted(name), _unquoted(backend), config)


def labels_to_configs(
    labels: Iterable[Label],
    types: Mapping[str, type] | None = None,
    records: Iterable[tuple[Key, Iterable[Record]]] = (),
) -> dict[Label, Any]:
    """The configuration of every call among the labels, by its label.

    ``types`` gives the class by the name of a kernel, "flash_attention.xla". By default it is the installed kernel's.
    ``RecordError`` tells where a configuration does not fit it.

    >>> Config = attrs.make_class("Config", {"block": attrs.field(type=int)}, frozen=True)
    >>> made = Label("double", "xla", "block=64")
    >>> labels_to_configs([made], {"double.xla": Config})[made].block
    64

    ``records``, ``ejkernel_cache.default_cache().items()`` for example, has the configurations whose labels are
    digests: those with too many fields, or fields that are no short text.
    """
    calls = [label for label in labels if label.backend is not None]
    remembered = _by_label(records) if any(_is_digest(label) for label in calls) else {}
    return {label: _config(label, types or {}, remembered) for label in calls}


def _by_label(records: Iterable[tuple[Key, Iterable[Record]]]) -> dict[Label, Any]:
    pairs = ((key, record) for key, kept in records for record in kept)
    texts = ((digest_label(f"{key.op}.{record.backend}", record.cfg), record.cfg) for key, record in pairs)
    return {extract_labels_from_hlo_text(text)[0]: cfg for text, cfg in texts}


def _is_digest(label: Label) -> bool:
    return bool(label.config) and "=" not in str(label.config)


def _config(label: Label, types: Mapping[str, type], remembered: Mapping[Label, Any]) -> Any:
    kernel = f"{label.name}.{label.backend}"
    if _is_digest(label):
        if label not in remembered:
            raise RecordError(f"{label} has a digest for its configuration, and none of the records has it")
        return remembered[label]
    kind: Any = types[kernel] if kernel in types else ejkernel_core.config_type(kernel)
    if kind is None and label.config:
        raise RecordError(
            f"{label}: no kernel {kernel} that says the type of its configurations is installed; give it in types"
        )
    if kind in (None, type(None)):
        return None
    hints = field_types(kind)
    fields = {**_defaults(kind, hints), **_given(label)}
    values = {name: _value(_unquoted(text), hints.get(name)) for name, text in fields.items()}
    return from_json(json.dumps({"schema": SCHEMA, "fields": values}), kind)


def _given(label: Label) -> dict[str, str]:
    """The fields that are in the label, by name."""
    pairs = [field.partition("=") for field in label.config.split(",")] if label.config else []
    fields = {_unquoted(name): text for name, _, text in pairs}
    if len(fields) < len(pairs) or not all(equals for _, equals, _ in pairs):
        raise RecordError(f"{label}: its fields are damaged; they are written name=value, each once")
    return fields


def _defaults(kind: Any, hints: Mapping[str, Any]) -> dict[str, str]:
    """What would stand in a label for the fields that it may leave out."""
    fields = attrs.fields(kind) if attrs.has(kind) else dataclasses.fields(kind)
    texts = {field.name: value_text(field.default, hints.get(field.name)) for field in fields}
    return {name: text for name, text in texts.items() if text is not None}


def _value(text: str, hint: Any) -> Any:
    """What stands in a record for the value of a field with this type."""
    if _SIZES.fullmatch(text) and (nested := nested_class(hint)):
        names = [field.name for field in attrs.fields(nested)]
        return dict(zip(names, map(int, filter(None, text.split("x"))), strict=False))
    try:
        return ast.literal_eval(text)
    except Exception:  # whatever it is, it is a text
        return text
