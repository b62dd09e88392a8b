"""Read the labels of kernels from the text of a compiled program, and the configurations from the labels."""

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
from ejkernel_core.extend import SCHEMA, digest_label, field_types, nested_class, value_text

#: The label of a call, ``flash_attention.xla(q_block=256,kv_block=256)``, or a custom one, ``label(my_attention)``.
_LABEL = re.compile(
    r"(?<![\w.%~-])(?:label\(([\w.-]+)\)|([\w.%~-]+)\.([\w%~-]+)\(([0-9a-f]{12}|[\w%~]+=[\w.%~+=,-]*|)\))", re.ASCII
)
_SIZES = re.compile(r"\d+x(\d+(x\d+)*)?")

Function = TypeVar("Function", bound=Callable[..., Any])


@attrs.frozen
class Label:
    """One label of a compiled program."""

    #: The name of the operation, or of a custom label.
    name: str
    #: None for a custom label.
    backend: str | None = None
    #: The fields of the configuration, "q_block=256,kv_block=256"; or a digest of it.
    config: str | None = None

    def __str__(self) -> str:
        return self.name if self.backend is None else f"{self.name}.{self.backend}({self.config})"


def label(name: str) -> Callable[[Function], Function]:
    """Give a function a custom label, by which it can be found in compiled code.

    >>> @label("my_attention")
    ... def double(x):
    ...     return x * 2
    >>> find_labels_in_lowered(jax.jit(double).lower(1.0))
    [Label(name='my_attention', backend=None, config=None)]
    """
    if not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(f"label: takes letters, digits, '_', '.' and '-', which survive compilation; got {name!r}")

    def add_label(function: Function) -> Function:
        @functools.wraps(function)
        def labelled(*args: Any, **kwargs: Any) -> Any:
            with jax.named_scope(f"label({name})"):
                return function(*args, **kwargs)

        return labelled  # type: ignore[return-value]

    return add_label


def find_labels_in_lowered(lowered: Any) -> list[Label]:
    """The labels in a ``jax.stages.Lowered`` or ``Compiled``, each once, in the order of the text.

    >>> twice = jax.jit(label("twice")(lambda x: x * 2))
    >>> [label.name for label in find_labels_in_lowered(twice.lower(1.0))]
    ['twice']
    """
    if isinstance(lowered, jax.stages.Lowered):
        return extract_labels_from_hlo_text(lowered.as_text(debug_info=True))
    return extract_labels_from_hlo_text(lowered.as_text())


def extract_labels_from_hlo_text(hlo_text: str) -> list[Label]:
    """The labels in a text, which is HLO or StableHLO with locations. Another process may have written it.

    >>> extract_labels_from_hlo_text('op_name="jit(f)/flash_attention.xla(q_block=256,kv_block=128)/mul"')
    [Label(name='flash_attention', backend='xla', config='q_block=256,kv_block=128')]
    """
    return list(dict.fromkeys(_label(*match.groups()) for match in _LABEL.finditer(hlo_text)))


def _unquote(text: str) -> str:
    return unquote(text, errors="surrogatepass")  # the error handler with which labels are written


def _label(custom_name: str | None, name: str, backend: str, config: str) -> Label:
    return Label(custom_name) if custom_name else Label(_unquote(name), _unquote(backend), config)


def labels_to_configs(
    labels: Iterable[Label],
    types: Mapping[str, type] | None = None,
    records: Iterable[tuple[Key, Iterable[Record]]] = (),
) -> dict[Label, Any]:
    """The configuration for every label of a call.

    ``types`` has the type of the configurations by the name of a kernel, such as "flash_attention.xla". By default it
    is that of the installed kernel. ``RecordError`` names the place where a configuration is not of this type.

    >>> Config = attrs.make_class("Config", {"block": attrs.field(type=int)}, frozen=True)
    >>> call = Label("double", "xla", "block=64")
    >>> labels_to_configs([call], {"double.xla": Config})[call].block
    64

    A label has a digest in place of a configuration with too many fields, or fields without a short text. These are
    looked up in ``records``, for example ``ejkernel_cache.default_cache().items()``.
    """
    calls = [label for label in labels if label.backend is not None]
    cfg_by_label = _cfg_by_label(records) if any(_is_digest(label) for label in calls) else {}
    return {label: _config(label, types or {}, cfg_by_label) for label in calls}


def _cfg_by_label(records: Iterable[tuple[Key, Iterable[Record]]]) -> dict[Label, Any]:
    pairs = ((key, record) for key, records_of_key in records for record in records_of_key)
    texts = ((digest_label(f"{key.op}.{record.backend}", record.cfg), record.cfg) for key, record in pairs)
    return {extract_labels_from_hlo_text(text)[0]: cfg for text, cfg in texts}


def _is_digest(label: Label) -> bool:
    return bool(label.config) and "=" not in str(label.config)


def _config(label: Label, types: Mapping[str, type], cfg_by_label: Mapping[Label, Any]) -> Any:
    kernel = f"{label.name}.{label.backend}"
    if _is_digest(label):
        if label not in cfg_by_label:
            raise RecordError(f"{label} has a digest for its configuration, and none of the records has it")
        return cfg_by_label[label]
    config_type: Any = types[kernel] if kernel in types else ejkernel_core.config_type(kernel)
    if config_type is None and label.config:
        raise RecordError(
            f"{label}: no kernel {kernel} that says the type of its configurations is installed; give it in types"
        )
    if config_type in (None, type(None)):
        return None
    hints = field_types(config_type)
    fields = {**_defaults(config_type, hints), **_label_fields(label)}
    values = {name: _value(_unquote(text), hints.get(name)) for name, text in fields.items()}
    return from_json(json.dumps({"schema": SCHEMA, "fields": values}), config_type)


def _label_fields(label: Label) -> dict[str, str]:
    """The fields in a label, by name."""
    pairs = [field.partition("=") for field in label.config.split(",")] if label.config else []
    fields = {_unquote(name): text for name, _, text in pairs}
    if len(fields) < len(pairs) or not all(equals for _, equals, _ in pairs):
        raise RecordError(f"{label}: its fields are damaged; they are written name=value, each once")
    return fields


def _defaults(config_type: Any, hints: Mapping[str, Any]) -> dict[str, str]:
    """The texts of the default values, which a label may leave out."""
    fields = attrs.fields(config_type) if attrs.has(config_type) else dataclasses.fields(config_type)
    texts = {field.name: value_text(field.default, hints.get(field.name)) for field in fields}
    return {name: text for name, text in texts.items() if text is not None}


def _value(text: str, hint: Any) -> Any:
    """The value of a field in a record, for its text in a label."""
    if _SIZES.fullmatch(text) and (nested := nested_class(hint)):
        names = [field.name for field in attrs.fields(nested)]
        return dict(zip(names, map(int, filter(None, text.split("x"))), strict=False))
    try:
        return ast.literal_eval(text)
    except Exception:  # it is not a Python literal, so it is text
        return text
