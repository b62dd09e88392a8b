"""One call, frozen."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from ._keys import abstractify, short_hash, stable_json

if TYPE_CHECKING:
    from ._operation import Operation
    from ._registry import Registry


@attrs.frozen
class Key:
    """What a configuration is remembered by: content alone, so that it is the same in every process."""

    op: str
    #: The device's name.
    device: str
    #: What is computed, of what, and on what: as ``stable_json``.
    problem: str
    #: The versions of all that could change the answer, likewise.
    software: str

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
    #: The device's name, "NVIDIA H200" for one; None where the device is not at hand (compiling for another machine).
    device_kind: str | None = None
    #: (9, 0) on a Hopper GPU; None elsewhere.
    compute_capability: tuple[int, int] | None = None
    #: The arguments that are cut over several devices, and how: see ``sharding_fingerprint``.
    sharding: tuple[tuple[str, str], ...] = ()
    #: What is called, and where it was found: for who measures.
    operation: Operation | None = attrs.field(default=None, repr=False)
    registry: Registry | None = attrs.field(default=None, repr=False)

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
        software = self.registry.software(self.op) if self.registry else {}
        return Key(self.op, self.device_kind or self.platform, stable_json(problem), stable_json(software))

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arguments)

    def __len__(self) -> int:
        return len(self.arguments)

    def __str__(self) -> str:
        device = f" ({self.device_kind})" if self.device_kind else ""
        return f"{self.op}({', '.join(_described(self.arguments))}) on {self.platform}{device}"

    def with_arrays(self, arrays: Mapping[str, Any]) -> Invocation:
        """The same invocation on these arrays."""
        return attrs.evolve(self, arguments={**self.arguments, **arrays})


def _described(arguments: Mapping[str, Any]) -> list[str]:
    """The arguments that are given, one short text each."""
    return [f"{name}={_short(value)}" for name, value in arguments.items() if value is not None and value is not False]


def _short(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    return repr(value)
