"""Devices, with the names of ejKernel's documents."""

from __future__ import annotations

from typing import Any

import jax

from ejkernel_core import extend


def device_fingerprint(dev: Any = None) -> str:
    """The name of a device (by default JAX's first), and in parentheses the version of its platform.

    >>> import jax
    >>> device_fingerprint(jax.devices("cpu")[0]).endswith("(cpu)")
    True
    """
    return extend.device_fingerprint(_device_or_default(dev))


def get_device_platform(dev: Any = None) -> str:
    """JAX's name for the platform of a device (by default its first): gpu, tpu or cpu; "unknown" for any other.

    >>> import jax
    >>> get_device_platform(jax.devices("cpu")[0])
    'cpu'
    """
    platform = extend.target_of_device(_device_or_default(dev)).platform
    return platform if platform in ("gpu", "tpu", "cpu") else "unknown"


def device_kind(dev: Any = None) -> str:
    """The same as ``get_device_platform``. The name of the device is ``dev.device_kind``.

    >>> import jax
    >>> device_kind(jax.devices("cpu")[0])
    'cpu'
    """
    return get_device_platform(dev)


def preferred_backend(dev: Any = None) -> str:
    """The backend for the platform of a device: "triton", "pallas_tpu", or "xla" for all others.

    >>> import jax
    >>> preferred_backend(jax.devices("cpu")[0])
    'xla'
    """
    return {"gpu": "triton", "tpu": "pallas_tpu"}.get(get_device_platform(dev), "xla")


def _device_or_default(dev: Any) -> Any:
    if dev is not None and not isinstance(dev, jax.Device):
        raise TypeError(f"dev: takes one of jax.devices(); got {type(dev).__name__} {dev!r:.60}")
    return jax.devices()[0] if dev is None else dev
