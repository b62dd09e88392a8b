"""Devices and platforms: where a call runs."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterable, Sequence
from platform import machine
from typing import Any, NamedTuple

import jax

from ._display import brief

#: The names XLA has for the platforms that JAX calls "gpu".
_GPU = frozenset({"cuda", "rocm", "gpu"})


class Target(NamedTuple):
    """What a kernel may know about the device it is compiled for."""

    platform: str
    #: See ``device_name``.
    device_kind: str | None = None
    compute_capability: tuple[int, int] | None = None
    #: See ``Invocation.processes``.
    processes: tuple[int, ...] | None = ()


def absent_target() -> Target | None:
    """The device of JAX's abstract mesh, if this machine has none of its kind; else None."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        return None
    platform = jax_platform(device.platform)
    try:
        is_here = jax.local_devices(backend=device.platform)[0].device_kind == device.device_kind
    except RuntimeError:
        is_here = False
    return None if is_here else Target(platform, device.device_kind)


def target(platform: str) -> Target:
    """The device that JAX compiles for on ``platform``: that of the abstract mesh, else the first one of this machine.

    Where there is neither, the target has the platform alone.
    """
    absent_device = absent_target()
    if absent_device is not None and absent_device.platform == jax_platform(platform):
        return absent_device
    try:
        device = jax.local_devices(backend=platform)[0]
    except RuntimeError:
        return Target(jax_platform(platform))
    return target_of_device(device)


def target_of_device(device: Any) -> Target:
    """What a kernel may know about this device."""
    return Target(jax_platform(device.platform), device_name(device), _capability(device))


def target_of(arrays: Sequence[Any]) -> Target:
    """The device on which a call with these arrays would run here, and the processes that it would run in."""
    return target(current_platform(arrays))._replace(processes=processes_of(arrays))


def device_name(device: Any) -> str:
    """A name that differs between devices of different speed: JAX's ``device_kind``, or the model of a processor.

    >>> device_name(jax.devices("cpu")[0]) == processor()
    True
    """
    return processor() if device.platform == "cpu" else str(device.device_kind)


@functools.cache
def processor() -> str:
    """The model of this machine's processor, and the number of cores that this process may use.

    JAX calls every CPU "cpu", although the best configuration differs between them. The name includes the numbers of
    family and model, because a virtual machine may show little more than the maker's name.
    """
    fields = _cpuinfo()
    name = fields.get("model name") or fields.get("cpu") or os.environ.get("PROCESSOR_IDENTIFIER") or machine() or "cpu"
    numbers = (fields.get(field) for field in ("cpu family", "model", "CPU implementer", "CPU part"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    words = [name, "-".join(filter(None, numbers))]
    return " ".join(" ".join(words).split()) + f", {cores} core{'s' * (cores > 1)}"


def _cpuinfo() -> dict[str, str]:
    """The fields that Linux gives for the first core; none on other systems."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            fields = [line.partition(":") for line in itertools.takewhile(str.strip, file)]
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in fields}


def device_or_default(device: Any = None) -> Any:
    """The device, or JAX's first one for None."""
    if device is None:
        return jax.devices()[0]
    if not isinstance(device, jax.Device):
        raise TypeError(f"device: takes one of jax.devices(); got {type(device).__name__} {brief(device)}")
    return device


def device_fingerprint(device: Any = None) -> str:
    """The name of a device and the version of its platform, in one line that is the same in every process.

    >>> device_fingerprint(jax.devices("cpu")[0]).startswith(f"{processor()} (")
    True
    """
    device = device_or_default(device)
    version = " ".join(str(device.client.platform_version).split())
    return f"{device_name(device)} ({version})"


def jax_platform(platform: str) -> str:
    """JAX's name for an XLA platform: "gpu" for "cuda"."""
    return "gpu" if platform in _GPU else platform


def current_platform(arrays: Iterable[Any]) -> str:
    """The platform of the first concrete array, or of JAX's default device where there is none."""
    for array in arrays:
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
            return str(next(iter(array.devices())).platform)
    default = getattr(jax.config, "jax_default_device", None)  # a device, the name of a platform, or None
    return str(getattr(default, "platform", default) or jax.default_backend())


def processes_of(arrays: Iterable[Any]) -> tuple[int, ...] | None:
    """The processes of the arrays' devices, sorted; None where they are unknown, as in a trace.

    >>> processes_of([jax.numpy.ones(2)])
    ()
    """
    if jax.process_count() == 1:
        return ()
    devices: set[Any] = set()
    for array in arrays:
        sharding = getattr(array, "sharding", None)
        is_abstract = isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh)
        if isinstance(array, jax.core.Tracer) or is_abstract:
            return None
        devices |= getattr(sharding, "device_set", set())
    return tuple(sorted({device.process_index for device in devices}))


def explicit_mesh(avals: Sequence[Any]) -> Any:
    """The mesh whose explicit axes the types of these arrays may be sharded over; None where there is none."""
    meshes = (aval.sharding.mesh for aval in avals if aval.sharding is not None)
    return next((mesh for mesh in meshes if mesh.explicit_axes), None)


def partly_manual_mesh(avals: Sequence[Any]) -> Any:
    """The mesh of the types of arrays inside a ``shard_map`` over some of its axes, where the others are automatic."""
    meshes = (aval.sharding.mesh for aval in avals if aval.sharding is not None)
    return next((mesh for mesh in meshes if mesh.manual_axes and mesh.auto_axes), None)


def _capability(device: Any) -> tuple[int, int] | None:
    text = getattr(device, "compute_capability", None)
    if not isinstance(text, str) or "." not in text:
        return None
    major, minor = text.split(".")[:2]
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None
