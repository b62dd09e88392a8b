"""Where a call runs."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterable
from platform import machine
from typing import Any, NamedTuple

import jax

#: The names XLA has for the platforms that JAX calls "gpu".
_GPU = frozenset({"cuda", "rocm", "gpu"})


class Target(NamedTuple):
    """What a kernel may know of the device it is compiled for."""

    platform: str
    #: See ``device_name``.
    device_kind: str | None = None
    compute_capability: tuple[int, int] | None = None


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
    return None if here else Target(platform, told.device_kind)


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
    return Target(jax_platform(platform), device_name(device), _capability(device))


def device_name(device: Any) -> str:
    """What tells devices apart that are not equally fast: JAX's ``device_kind``, and of a CPU the processor.

    >>> device_name(jax.devices("cpu")[0]) == processor()
    True
    """
    return processor() if device.platform == "cpu" else str(device.device_kind)


@functools.cache
def processor() -> str:
    """The model of this machine's processor, and how many of its cores this process may use.

    JAX calls every CPU "cpu", and what is best on one is not on another. Families and numbers of models are in it
    because a virtual machine may be told little more than the maker's name.
    """
    known = _cpuinfo()
    name = known.get("model name") or known.get("cpu") or os.environ.get("PROCESSOR_IDENTIFIER") or machine() or "cpu"
    numbers = (known.get(field) for field in ("cpu family", "model", "CPU implementer", "CPU part"))
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    words = [name, "-".join(filter(None, numbers))]
    return " ".join(" ".join(words).split()) + f", {usable} core{'s' * (usable > 1)}"


def _cpuinfo() -> dict[str, str]:
    """What Linux tells of the first core."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            fields = [line.partition(":") for line in itertools.takewhile(str.strip, lines)]
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in fields}


def _given(device: Any) -> Any:
    if device is None:
        return jax.devices()[0]
    if not isinstance(device, jax.Device):
        raise TypeError(f"device: takes one of jax.devices(); got {type(device).__name__} {device!r:.60}")
    return device


def device_fingerprint(device: Any = None) -> str:
    """What a device is, in one line that is the same in every process: its name, and its platform's version.

    >>> device_fingerprint(jax.devices("cpu")[0]).startswith(f"{processor()} (")
    True
    """
    device = _given(device)
    version = " ".join(str(device.client.platform_version).split())
    return f"{device_name(device)} ({version})"


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
