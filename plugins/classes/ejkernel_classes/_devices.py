"""What a device is, in the words of ejKernel's documents."""

from __future__ import annotations

from typing import Any

from ejkernel_core._devices import _given, jax_platform


def get_device_platform(device: Any = None) -> str:
    """What JAX calls the platform of a device (its first by default): gpu, tpu or cpu; unknown for any other.

    >>> import jax
    >>> get_device_platform(jax.devices("cpu")[0])
    'cpu'
    """
    platform = jax_platform(_given(device).platform.lower())
    return platform if platform in ("gpu", "tpu", "cpu") else "unknown"


def device_kind(device: Any = None) -> str:
    """The same as ``get_device_platform``; what the device is called is ``device.device_kind``.

    >>> import jax
    >>> device_kind(jax.devices("cpu")[0])
    'cpu'
    """
    return get_device_platform(device)


def preferred_backend(device: Any = None) -> str:
    """The backend that is written for this kind of device: "triton", "pallas_tpu", or "xla" for all others.

    >>> import jax
    >>> preferred_backend(jax.devices("cpu")[0])
    'xla'
    """
    return {"gpu": "triton", "tpu": "pallas_tpu"}.get(get_device_platform(device), "xla")
