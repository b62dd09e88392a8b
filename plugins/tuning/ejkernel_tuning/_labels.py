"""From the labels of a compiled program to its configurations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import ejkernel_core
from ejkernel_core import Label, from_json


def labels_to_configs(labels: Iterable[Label], types: Mapping[str, type] | None = None) -> dict[Label, Any]:
    """The configuration of every call among the labels, by its label.

    ``types`` gives the class by the name of a kernel, "flash_attention.xla". By default it is the installed kernel's,
    or the one that is imported by that name. ``RecordError`` tells where a configuration does not fit it.

    >>> import attrs
    >>> Config = attrs.make_class("Config", {"block": attrs.field(type=int)}, frozen=True)
    >>> made = Label("double", "xla", config=ejkernel_core.to_json(Config(block=64)))
    >>> labels_to_configs([made], {"double.xla": Config})[made].block
    64
    """
    found = {}
    for one in labels:
        if one.backend is not None and one.config is not None:
            found[one] = from_json(one.config, _type_of(one, types or {}))
    return found


def _type_of(one: Label, types: Mapping[str, type]) -> Any:
    name = f"{one.name}.{one.backend}"
    if name in types:
        return types[name]
    return ejkernel_core.config_type(name)
