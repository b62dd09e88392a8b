"""One call, frozen."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from ._display import html_table, one_line
from ._keys import TAG, abstractify, canonical_json, stable_json
from ._operation import Operation


def _text() -> Any:
    def check(key: Any, field: attrs.Attribute[str], value: Any) -> None:
        if not isinstance(value, str):
            raise TypeError(f"Key: {field.name} takes text; got {type(value).__name__} {value!r:.60}")

    return attrs.field(validator=check)


@attrs.frozen
class Key:
    """What a configuration is remembered by: content alone, so that it is the same in every process."""

    op: str = _text()
    #: The device's name.
    device: str = _text()
    #: What is computed, of what, and on what: JSON as ``stable_json`` writes it. Where it has ``sizes``, these are the
    #: sizes of the axes that only count things, by the names that the shapes have in their place.
    problem: str = _text()

    @functools.cached_property
    def digest(self) -> str:
        """A short name for the key."""
        return _digest(self.problem)

    @functools.cached_property
    def kind(self) -> str:
        """A short name that all keys share that differ in axes that only count things."""
        content = self._content
        return _digest(canonical_json({name: content[name] for name in content if name != "sizes"}))

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """The sizes of the axes that only count things, by name."""
        sizes = self._content.get("sizes")
        return sizes if isinstance(sizes, dict) and all(type(size) is int for size in sizes.values()) else {}

    @property
    def _content(self) -> dict[str, Any]:
        """Of a key that somebody made of other text, that text."""
        try:
            content = json.loads(self.problem)
        except (ValueError, RecursionError):
            content = None
        return content if isinstance(content, dict) else {"problem": self.problem}

    def __str__(self) -> str:
        return f"{self.op} {self.digest}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


@attrs.frozen(eq=False)
class Invocation(Mapping[str, Any]):
    """One call of an operation, as its kernels see it: a mapping of the prepared arguments by name.

    Every parameter of the operation is there; an array that was not given is None. Arrays are abstract
    (``jax.ShapeDtypeStruct``) while a configuration is chosen, and JAX values while the kernel runs.
    """

    op: str
    arguments: Mapping[str, Any]
    #: JAX's word: "cpu", "gpu", "tpu".
    platform: str
    #: The device's name: "NVIDIA H200", "AMD EPYC 9654 25-17, 16 cores" (JAX calls every processor "cpu"); None where
    #: the device is not at hand (compiling for another machine).
    device_kind: str | None = None
    #: (9, 0) on a Hopper GPU; None where the device says none, or is not at hand.
    compute_capability: tuple[int, int] | None = None
    #: The arguments that are cut over several devices, and how: see ``sharding_fingerprint``.
    sharding: tuple[tuple[str, str], ...] = ()
    #: What is called.
    operation: Operation | None = attrs.field(default=None, repr=False)

    @functools.cached_property
    def key(self) -> Key:
        """What a configuration for exactly this call is remembered by."""
        return self._key("arguments", self.arguments)

    @functools.cached_property
    def tuning_keys(self) -> tuple[Key, ...]:
        """The key, and then that of all the calls that are alike as far as tuning goes."""
        if self.operation is None or self.operation.tuning_key is None:
            return (self.key,)
        return self.key, self._key("bucket", self.operation.tuning_key(self.arguments))

    def _key(self, what: str, arguments: Any) -> Key:
        # An argument that is not given says nothing: one that an operation gets later leaves the old keys as they are.
        if isinstance(arguments, Mapping):
            arguments = {name: value for name, value in abstractify(arguments).items() if value is not None}
        problem = json.loads(
            stable_json(
                {
                    "operation": [self.op, self.operation.version if self.operation else 1],
                    what: arguments,
                    "device": [self.platform, self.device_kind],
                    **({"sharding": dict(self.sharding)} if self.sharding else {}),
                }
            )
        )
        sizes = self._name_counts(problem[what])
        return Key(self.op, self.device_kind or self.platform, canonical_json({**problem, **sizes}))

    def _name_counts(self, arguments: Any) -> dict[str, dict[str, int]]:
        """Put the names of axes that only count things in the place of their sizes, which are given back."""
        axes, sizes = self.operation.axes if self.operation else None, dict[str, int]()
        if not isinstance(arguments, dict):
            return {}
        for name, counters in axes.counted(self.arguments).items() if axes is not None else ():
            array = arguments[name][f"{TAG}array"] if name in arguments else [""]
            for place, (counter, size) in enumerate(zip(counters, array[1:], strict=False), 1):
                if counter is not None and sizes.setdefault(counter, size) == size:
                    array[place] = counter
        return {"sizes": sizes} if sizes else {}

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arguments)

    def __len__(self) -> int:
        return len(self.arguments)

    def __str__(self) -> str:
        arguments = ", ".join(f"{name}={text}" for name, text in _described(self.arguments))
        return f"{self.op}({arguments}) on {self._where}"

    def __repr__(self) -> str:
        return f"Invocation({one_line(self)})"

    def _repr_html_(self) -> str:
        return html_table(f"{self.op} on {self._where}", _described(self.arguments))

    @property
    def _where(self) -> str:
        return self.platform + (f" ({self.device_kind})" if self.device_kind else "")

    def with_arrays(self, arrays: Mapping[str, Any]) -> Invocation:
        """The same invocation on these arrays."""
        return attrs.evolve(self, arguments={**self.arguments, **arrays})


def _described(arguments: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The arguments that are given, by name, as short texts."""
    return [(name, _short(value)) for name, value in arguments.items() if value is not None and value is not False]


def _short(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    return repr(value)
