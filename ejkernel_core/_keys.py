"""The keys under which configurations are stored: the content of a call."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import attrs

from ._content import TAG, abstractify, canonical_json, read_only, stable_json
from ._display import brief
from ._errors import printable


@attrs.frozen
class Key:
    """The key under which a configuration is stored. It consists of content, so it is the same in every process."""

    op: str
    #: The device's name.
    device: str
    #: The operation, the arguments and the device, as ``stable_json`` writes them. ``sizes`` in it has the sizes of the
    #: axes that only count things; in the shapes these axes have names.
    problem: str

    def __attrs_post_init__(self) -> None:
        for name in ("op", "device", "problem"):
            if not isinstance(value := getattr(self, name), str):
                raise TypeError(f"Key: {name} takes text; got {type(value).__name__} {brief(value)}")

    @functools.cached_property
    def digest(self) -> str:
        """A short hash of the key."""
        return _key_digest(self.problem)

    @functools.cached_property
    def kind(self) -> str:
        """A short hash that is the same for all keys that differ only in the sizes of axes that count things."""
        content = self._content
        return _key_digest(canonical_json({name: content[name] for name in content if name != "sizes"}))

    @functools.cached_property
    def sizes(self) -> Mapping[str, int]:
        """The sizes of the axes that only count things, by name."""
        sizes = self._content.get("sizes")
        if not isinstance(sizes, dict) or any(type(size) is not int for size in sizes.values()):
            sizes = {}
        return read_only(sizes)

    @property
    def _content(self) -> dict[str, Any]:
        """The content of ``problem``, or its text if that is not a JSON object, as in a key made by hand."""
        try:
            content = json.loads(self.problem)
        except (ValueError, RecursionError):
            content = None
        return content if isinstance(content, dict) else {"problem": self.problem}

    def __str__(self) -> str:
        return printable(f"{self.op} {self.digest}")


def _key_digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def key_of(
    op: str,
    device: str,
    problem: Mapping[str, Any],
    field: str,
    arguments: Any,
    counters: Mapping[str, tuple[str | None, ...]],
) -> Key:
    """The key of a problem, with the arguments under the name ``field``. In their shapes, the axes that only count
    things have names, and ``sizes`` beside them has their sizes.
    """
    # Arguments that the call does not have are left out, so old keys stay valid when an operation gets a new parameter.
    if isinstance(arguments, Mapping):
        arguments = {name: value for name, value in abstractify(dict(arguments)).items() if value is not None}
    content, sizes = json.loads(stable_json({**problem, field: arguments})), dict[str, int]()
    shapes = content[field] if isinstance(content[field], dict) else {}
    for name, axes in counters.items():
        array = shapes[name][f"{TAG}array"] if name in shapes else [""]
        for place, (axis, size) in enumerate(zip(axes, array[1:], strict=False), 1):
            if axis is not None and sizes.setdefault(axis, size) == size:
                array[place] = axis
    return Key(op, device, canonical_json({**content, "sizes": sizes} if sizes else content))
