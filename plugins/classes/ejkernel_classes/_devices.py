"""What a device is, in the words of ejKernel's documents."""

from __future__ import annotations

from typing import Any

import jax

from ejkernel_core import _devices


def device_fingerprint(dev: Any = None) -> str:
    """What a device (JAX's first by default) is, in one line: its name, and in parentheses its platform's version.

    >>> import jax
    >>> device_fingerprint(jax.devices("cpu")[0]).endswith("(cpu)")
    True
    """
    return _devices.device_fingerprint(_checked(dev))


def get_device_platform(dev: Any = None) -> str:
    """What JAX calls the platform of a device (its first by default): gpu, tpu or cpu; unknown for any other.

    >>> import jax
    >>> get_device_platform(jax.devices("cpu")[0])
    'cpu'
    """
    platform = _devices.jax_platform(_checked(dev).platform.lower())
    return platform if platform in ("gpu", "tpu", "cpu") else "unknown"


def device_kind(dev: Any = None) -> str:
    """The same as ``get_device_platform``; what the device is called is ``dev.device_kind``.

    >>> import jax
    >>> device_kind(jax.devices("cpu")[0])
    'cpu'
    """
    return get_device_platform(dev)


def preferred_backend(dev: Any = None) -> str:
    """The backend that is written for this kind of device: "triton", "pallas_tpu", or "xla" for all others.

    >>> import jax
    >>> preferred_backend(jax.devices("cpu")[0])
    'xla'
    """
    return {"gpu": "triton", "tpu": "pallas_tpu"}.get(get_device_platform(dev), "xla")


def _checked(dev: Any) -> Any:
    if dev is not None and not isinstance(dev, jax.Device):
        raise TypeError(f"dev: takes one of jax.devices(); got {type(dev).__name__} {dev!r:.60}")
    return jax.devices()[0] if dev is None else dev
