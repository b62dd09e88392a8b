"""The invocation of a kernel object, for its methods and its users."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import jax

import ejkernel_core
from ejkernel_core import Invocation as CoreInvocation
from ejkernel_core import Key, Registry
from ejkernel_core.extend import abstractify, device_fingerprint


@attrs.frozen(eq=False)
class Invocation:
    """One call of a kernel object, or of an operation given by name. It is frozen."""

    kernel: Any
    #: The arguments of the call. They are abstract while a configuration is chosen.
    args: tuple[Any, ...] = attrs.field(default=(), converter=tuple)
    kwargs: dict[str, Any] = attrs.field(factory=dict, converter=dict)
    metadata: Any = None
    #: The invocation that the core's policies see.
    core: CoreInvocation = attrs.field(repr=False, kw_only=True)

    @core.default
    def _core(self) -> CoreInvocation:
        if isinstance(self.kernel, str):
            return ejkernel_core.invocation(self.kernel, *self.args, **self.kwargs)
        return self.kernel._call_registry(Registry.invocation, self.args, self.kwargs)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return repr(self.core)

    def _repr_html_(self) -> str:
        return self.core._repr_html_()

    @property
    def key(self) -> Key:
        """The key under which a configuration is stored."""
        return self.core.key

    @property
    def platform(self) -> str:
        """JAX's name: "cpu", "gpu", "tpu"."""
        return self.core.platform

    @property
    def device_kind(self) -> str | None:
        """The device's name, where it is known."""
        return self.core.device_kind

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """The compute capability of an NVIDIA GPU; else None."""
        return self.core.compute_capability

    @property
    def abstract_args(self) -> tuple[Any, ...]:
        """The positional arguments with ``jax.ShapeDtypeStruct`` for every array."""
        return abstractify(self.args)  # type: ignore[no-any-return]

    @property
    def device_fingerprint(self) -> str:
        """The device, see ``device_fingerprint``; the platform if this machine has no such device."""
        try:
            return device_fingerprint(jax.local_devices(backend=self.platform)[0])
        except RuntimeError:
            return self.platform


def default_key_builder_with_sharding(kernel: Any, args: Any, kwargs: Mapping[str, Any] | None = None) -> Key:
    """The key under which a configuration for this call is stored. ``kernel`` is a ``Kernel`` or an operation's name.

    >>> query = jax.ShapeDtypeStruct((1, 4, 2, 8), "float32")
    >>> key = default_key_builder_with_sharding("flash_attention", (query, query, query), {"causal": True})
    >>> key == Invocation("flash_attention", (query, query, query), {"causal": True}).key
    True
    """
    return Invocation(kernel, args, kwargs or {}).key
