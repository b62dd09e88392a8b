"""One call of a kernel object, as its own methods and its users see it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import jax

import ejkernel_core
from ejkernel_core import Invocation as CoreInvocation
from ejkernel_core import Key, Registry
from ejkernel_core._devices import device_fingerprint
from ejkernel_core._keys import abstractify


@attrs.frozen(eq=False)
class Invocation:
    """One call of a kernel object, or of an operation by its name, frozen."""

    kernel: Any
    #: The arguments as they were given; abstract where a configuration is chosen.
    args: tuple[Any, ...] = attrs.field(default=(), converter=tuple)
    kwargs: dict[str, Any] = attrs.field(factory=dict, converter=dict)
    metadata: Any = None
    #: The same call, as the core's policies see it.
    core: CoreInvocation = attrs.field(repr=False, kw_only=True)

    @core.default
    def _core(self) -> CoreInvocation:
        if isinstance(self.kernel, str):
            return ejkernel_core.invocation(self.kernel, *self.args, **self.kwargs)
        return self.kernel._ask(Registry.invocation, self.args, self.kwargs)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return repr(self.core)

    def _repr_html_(self) -> str:
        return self.core._repr_html_()

    @property
    def key(self) -> Key:
        """What a configuration is remembered by."""
        return self.core.key

    @property
    def platform(self) -> str:
        """JAX's word: "cpu", "gpu", "tpu"."""
        return self.core.platform

    @property
    def device_kind(self) -> str | None:
        """The device's name, where it is known."""
        return self.core.device_kind

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """Of an NVIDIA GPU."""
        return self.core.compute_capability

    @property
    def abstract_args(self) -> tuple[Any, ...]:
        """The positional arguments with ``jax.ShapeDtypeStruct`` for every array."""
        return abstractify(self.args)  # type: ignore[no-any-return]

    @property
    def device_fingerprint(self) -> str:
        """What it runs on: see ``device_fingerprint``. Without such a device, the platform."""
        try:
            return device_fingerprint(jax.local_devices(backend=self.platform)[0])
        except RuntimeError:
            return self.platform


def default_key_builder_with_sharding(kernel: Any, args: Any, kwargs: Mapping[str, Any] | None = None) -> Key:
    """What a configuration for this call is remembered by: of a ``Kernel``, or of an operation by name.

    >>> query = jax.ShapeDtypeStruct((1, 4, 2, 8), "float32")
    >>> key = default_key_builder_with_sharding("flash_attention", (query, query, query), {"causal": True})
    >>> key == Invocation("flash_attention", (query, query, query), {"causal": True}).key
    True
    """
    return Invocation(kernel, args, kwargs or {}).key
