"""One call, frozen."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from ._display import html_table, one_line
from ._keys import abstractify, short_hash, stable_json
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
    #: What is computed, of what, and on what: as ``stable_json``.
    problem: str = _text()
    #: The versions of all that could change the answer, likewise.
    software: str = _text()

    @property
    def digest(self) -> str:
        """A short name for the key."""
        return short_hash([self.problem, self.software])

    def __str__(self) -> str:
        return f"{self.op} {self.digest}"


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
    #: The versions of all that could change which configuration is best.
    software: Mapping[str, str] = attrs.field(factory=dict, repr=False)

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
        problem = {
            "operation": [self.op, self.operation.version if self.operation else 1],
            what: abstractify(arguments),
            "sharding": dict(self.sharding),
            "device": [self.platform, self.device_kind, self.compute_capability],
        }
        return Key(self.op, self.device_kind or self.platform, stable_json(problem), stable_json(self.software))

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
