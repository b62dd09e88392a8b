"""An invocation: one call, as kernels and policies see it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from ._content import read_only
from ._display import MAX_LENGTH, brief, html_table, one_line, suggestion
from ._keys import Key, key_of
from ._operation import Operation


@attrs.frozen(eq=False, repr=False)
class Invocation(Mapping[str, Any]):
    """One call of an operation, as its kernels see it: a mapping of the prepared arguments by name.

    It has every parameter of the operation; an array that the call does not have is None. Arrays are abstract
    (``jax.ShapeDtypeStruct``) while a configuration is chosen, and JAX values while the kernel runs.
    """

    op: str
    arguments: Mapping[str, Any] = attrs.field(converter=read_only)
    #: JAX's name: "cpu", "gpu", "tpu".
    platform: str
    #: The device's name: "NVIDIA H200", "AMD EPYC 9654 25-17, 16 cores" (JAX calls every processor "cpu"); None where
    #: this machine has no such device (JAX compiles for another machine).
    device_kind: str | None = None
    #: (9, 0) on a Hopper GPU; None where the device has none, or is not on this machine.
    compute_capability: tuple[int, int] | None = None
    #: The operation that is called.
    operation: Operation | None = attrs.field(default=None, repr=False)
    #: The processes whose devices run the program, sorted: (0, 1). One or none: this process alone. None: unknown, but
    #: there may be several. They are not part of any key.
    processes: tuple[int, ...] | None = ()
    #: The registry that chose the kernel; None in an invocation that was made by hand.
    registry: Any = attrs.field(default=None, repr=False)
    #: The results that something depends on; None for all. A kernel may return None in the place of the others. It is
    #: known where the kernel runs, not while it is chosen, and is not a part of any key.
    needed: frozenset[str] | None = attrs.field(default=None, repr=False)

    @functools.cached_property
    def key(self) -> Key:
        """The key under which a configuration for exactly this call is stored."""
        return self._key("arguments", self.arguments)

    @functools.cached_property
    def tuning_keys(self) -> tuple[Key, ...]:
        """The key, followed by the key of the bucket: of all calls that tuning does not distinguish from this one."""
        if self.operation is None or self.operation.tuning_key is None:
            return (self.key,)
        return self.key, self._key("bucket", self.operation.tuning_key(self.arguments))

    def _key(self, field: str, arguments: Any) -> Key:
        problem = {
            "operation": [self.op, self.operation.version if self.operation else 1],
            "device": [self.platform, self.device_kind],
        }
        axes = self.operation.axes if self.operation else None
        counters = {} if axes is None or not isinstance(arguments, Mapping) else axes.counted(arguments)
        return key_of(self.op, self.device_kind or self.platform, problem, field, arguments, counters)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arguments)

    def __len__(self) -> int:
        return len(self.arguments)

    def __str__(self) -> str:
        return f"{self.call_text} on {self._location}"

    def __repr__(self) -> str:
        return f"Invocation({one_line(self)})"

    def _repr_html_(self) -> str:
        return html_table(f"{self.op} on {self._location}", _argument_texts(self.arguments))

    @property
    def call_text(self) -> str:
        """The operation and its arguments, without the device."""
        arguments = ", ".join(f"{name}={text}" for name, text in _argument_texts(self.arguments))
        return f"{self.op}({arguments})"

    @property
    def _location(self) -> str:
        return self.platform + (f" ({self.device_kind})" if self.device_kind else "")

    @property
    def has_several_processes(self) -> bool:
        """Whether other processes may have to make the same choice."""
        return self.processes is None or len(self.processes) > 1

    def call(self, op: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call an operation by the registry that chose this kernel: for kernels that are made of other operations."""
        if self.registry is None:
            raise ValueError(f"{self.op}: the invocation was made without a registry, which would call {brief(op)}")
        return self.registry.call(op, *args, **kwargs)

    def needs(self, result: str) -> bool:
        """Whether something depends on this result."""
        results = self.get("wrt") or (self.operation.results if self.operation else (result,))
        if result not in results:
            raise ValueError(f"{self.op}: {result!r} is not a result{suggestion(result, results)}")
        return self.needed is None or result in self.needed

    def with_arrays(self, arrays: Mapping[str, Any]) -> Invocation:
        """The same invocation on these arrays."""
        return attrs.evolve(self, arguments={**self.arguments, **arrays})

    def with_sizes(self, sizes: Mapping[str, int]) -> Invocation:
        """The invocation of its bucket with other sizes of the axes that count things, by name as in a key."""
        axes = self.operation.axes if self.operation else None
        return self if axes is None else self.with_arrays(axes.with_sizes(self.arguments, sizes))


def _argument_texts(arguments: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The names and short texts of the arguments that the call has; False and None are left out."""
    return [
        (name, _argument_text(value)) for name, value in arguments.items() if value is not None and value is not False
    ]


def _argument_text(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    return brief(value, MAX_LENGTH)
