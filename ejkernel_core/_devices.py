"""Where a call runs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import attrs
import jax

#: The names XLA has for the platforms that JAX calls "gpu".
_GPU = frozenset({"cuda", "rocm", "gpu"})


@attrs.frozen
class Target:
    """What a kernel may know of the device it is compiled for."""

    platform: str
    device_kind: str | None = None
    compute_capability: tuple[int, int] | None = None


#: The compute capabilities of cards that are compiled for where they are not, by a word of their names.
_CAPABILITIES = {
    "V100": (7, 0),
    "T4": (7, 5),
    "A100": (8, 0),
    "A800": (8, 0),
    "A30": (8, 0),
    "A10": (8, 6),
    "A10G": (8, 6),
    "A40": (8, 6),
    "A6000": (8, 6),
    "L4": (8, 9),
    "L40": (8, 9),
    "L40S": (8, 9),
    "H100": (9, 0),
    "H200": (9, 0),
    "H800": (9, 0),
    "H20": (9, 0),
    "GH200": (9, 0),
    "B200": (10, 0),
    "GB200": (10, 0),
    "B300": (10, 3),
    "GB300": (10, 3),
    **dict.fromkeys(("3060", "3070", "3080", "3090"), (8, 6)),
    **dict.fromkeys(("4060", "4070", "4080", "4090"), (8, 9)),
    **dict.fromkeys(("5060", "5070", "5080", "5090"), (12, 0)),
}


def absent() -> Target | None:
    """The device that JAX is told to compile for, if it is not this machine's: the one of the abstract mesh."""
    told = jax.sharding.get_abstract_mesh().abstract_device
    if told is None:
        return None
    platform = jax_platform(told.platform)
    try:
        here = jax.local_devices(backend=told.platform)[0].device_kind == told.device_kind
    except RuntimeError:
        here = False
    words = re.split(r"[\s-]", told.device_kind)
    known = next((_CAPABILITIES[word] for word in words if word in _CAPABILITIES), None) if platform == "gpu" else None
    return None if here else Target(platform, told.device_kind, known)


def target(platform: str) -> Target:
    """The target that ``platform`` is: the one that JAX is told to compile for, or the one on this machine.

    Where neither is there, the platform alone is known.
    """
    told = absent()
    if told is not None and told.platform == jax_platform(platform):
        return told
    try:
        device = jax.local_devices(backend=platform)[0]
    except RuntimeError:
        return Target(jax_platform(platform))
    return Target(jax_platform(platform), device.device_kind, _capability(device))


def get_device_platform(device: Any = None) -> str:
    """What JAX calls the platform of a device (its first by default): gpu, tpu or cpu; unknown for any other.

    >>> get_device_platform(jax.devices("cpu")[0])
    'cpu'
    """
    platform = jax_platform(_given(device).platform.lower())
    return platform if platform in ("gpu", "tpu", "cpu") else "unknown"


def device_kind(device: Any = None) -> str:
    """The same as ``get_device_platform``; what the device is called is ``device.device_kind``.

    >>> device_kind(jax.devices("cpu")[0])
    'cpu'
    """
    return get_device_platform(device)


def preferred_backend(device: Any = None) -> str:
    """The backend that is written for this kind of device: "triton", "pallas_tpu", or "xla" for all others.

    >>> preferred_backend(jax.devices("cpu")[0])
    'xla'
    """
    return {"gpu": "triton", "tpu": "pallas_tpu"}.get(get_device_platform(device), "xla")


def _given(device: Any) -> Any:
    if device is None:
        return jax.devices()[0]
    if not isinstance(device, jax.Device):
        raise TypeError(f"device: takes one of jax.devices(); got {type(device).__name__} {device!r:.60}")
    return device


def device_fingerprint(device: Any = None) -> str:
    """What a device is, in one line that is the same in every process: its kind, and its platform's version.

    >>> device_fingerprint(jax.devices("cpu")[0]).startswith("cpu (")
    True
    """
    device = _given(device)
    version = " ".join(str(device.client.platform_version).split())
    return f"{device.device_kind} ({version})"


def jax_platform(platform: str) -> str:
    """JAX's word for an XLA platform: "cuda" is "gpu"."""
    return "gpu" if platform in _GPU else platform


def current_platform(arrays: Iterable[Any]) -> str:
    """The platform of the arrays, if they are on a device, else of JAX's default device."""
    for array in arrays:
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
            return str(next(iter(array.devices())).platform)
    default = getattr(jax.config, "jax_default_device", None)  # a device, the name of a platform, or None
    return str(getattr(default, "platform", default) or jax.default_backend())


def _capability(device: Any) -> tuple[int, int] | None:
    text = getattr(device, "compute_capability", None)
    if not isinstance(text, str) or "." not in text:
        return None
    major, minor = text.split(".")[:2]
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None
