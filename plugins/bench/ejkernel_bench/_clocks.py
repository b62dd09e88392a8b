"""The clock of an NVIDIA GPU, its power, and what limits the clock, read by NVML while work is running.

NVML comes with the driver, as nvidia-smi does. Where there is none, there are no readings.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import attrs
import jax

#: The time between two readings. Power is a mean over a second in any case.
INTERVAL_S = 0.02
#: NVML's number of the clock of the multiprocessors.
SM_CLOCK = 1
#: By bit, what holds the clock down. Others are settings, or an idle GPU.
LIMITS = {0x4: "power", 0x8: "hardware", 0x20: "heat", 0x40: "heat", 0x80: "power supply"}


@attrs.frozen
class Reading:
    """The state of a GPU at one moment."""

    mhz: float
    watts: float
    limits: tuple[str, ...] = ()


Read = Callable[[], Reading | None]


def summary(readings: Sequence[Reading]) -> Reading | None:
    """Medians, and what limited the clock in at least half of the readings.

    >>> summary([Reading(1500, 690, ("power",)), Reading(1470, 700, ("power",)), Reading(1980, 500)])
    Reading(mhz=1500, watts=690, limits=('power',))
    """
    if not readings:
        return None
    names = dict.fromkeys(name for reading in readings for name in reading.limits)
    usual = tuple(name for name in names if 2 * sum(name in one.limits for one in readings) >= len(readings))
    return Reading(
        statistics.median(reading.mhz for reading in readings),
        statistics.median(reading.watts for reading in readings),
        usual,
    )


def limits_of(bits: int) -> tuple[str, ...]:
    """What these bits of NVML's say in words.

    >>> limits_of(0x4 | 0x20 | 0x1)
    ('power', 'heat')
    """
    return tuple(dict.fromkeys(name for bit, name in LIMITS.items() if bits & bit))


@contextmanager
def watched(read: Read | None = None) -> Iterator[list[Reading]]:
    """The readings during the context, in a list that a thread fills. It stays empty where there are none."""
    readings: list[Reading] = []
    read, is_over = read or reader(), threading.Event()

    def watch() -> None:
        while (reading := read()) is not None:
            readings.append(reading)
            if is_over.wait(INTERVAL_S):
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield readings
    finally:
        is_over.set()
        thread.join()


def reader() -> Read:
    """Reads the GPU that JAX uses; nothing but None elsewhere."""
    if jax.default_backend() != "gpu":
        return lambda: None
    return reader_of(_number_of_gpu())


def _number_of_gpu() -> str:
    """The number or the UUID of JAX's first GPU, as NVML knows it."""
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    place = int(getattr(jax.local_devices()[0], "local_hardware_id", 0) or 0)
    return visible[place] if place < len(visible) else str(place)


@cache
def reader_of(number: str, load: Callable[[str], Any] = ctypes.CDLL) -> Read:
    """Reads the GPU of this number or UUID; nothing but None where NVML does not answer."""
    try:
        nvml = load("libnvidia-ml.so.1")
        device = _device(nvml, number)
        reasons = _function(nvml, "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
    except (OSError, AttributeError, NoAnswer):
        return lambda: None

    def read() -> Reading | None:
        mhz, milliwatts, bits = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_ulonglong()
        try:
            _check(nvml.nvmlDeviceGetClockInfo(device, SM_CLOCK, ctypes.byref(mhz)))
            _check(nvml.nvmlDeviceGetPowerUsage(device, ctypes.byref(milliwatts)))
            _check(reasons(device, ctypes.byref(bits)))
        except NoAnswer:
            return None
        return Reading(float(mhz.value), milliwatts.value / 1e3, limits_of(bits.value))

    return read


class NoAnswer(Exception):
    """NVML returned an error."""


def _device(nvml: Any, number: str) -> ctypes.c_void_p:
    device = ctypes.c_void_p()
    _check(nvml.nvmlInit_v2())
    if number.isdecimal():
        _check(nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(number)), ctypes.byref(device)))
    else:
        _check(nvml.nvmlDeviceGetHandleByUUID(number.encode(), ctypes.byref(device)))
    return device


def _function(nvml: Any, *names: str) -> Any:
    """The first of these that the driver has; older ones have older names."""
    for name in names:
        if hasattr(nvml, name):
            return getattr(nvml, name)
    raise AttributeError(names[0])


def _check(code: int) -> None:
    if code:
        raise NoAnswer(code)
