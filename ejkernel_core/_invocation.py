"""One call, frozen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import jax


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


def abstract(value: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array, and nothing else of it."""
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def _described(arguments: Mapping[str, Any]) -> list[str]:
    """The arguments that are given, one short text each."""
    return [f"{name}={_short(value)}" for name, value in arguments.items() if value is not None and value is not False]


def _short(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    return repr(value)
