"""The time and memory that a part of a program uses."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from ejkernel_core.extend import device_or_default

STATM = Path("/proc/self/statm")


class Elapsed:
    """The result of ``timer``."""

    #: None until the ``with`` block has ended.
    seconds: float | None = None

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return f"{self.name} is running" if self.seconds is None else f"{self.name} took {self.seconds:.3f} seconds"


@contextlib.contextmanager
def timer(name: str = "Operation") -> Iterator[Elapsed]:
    """Print the time of a ``with`` block, including the work that JAX does for it. The ``seconds`` are also in the
    object that the block gets.

    JAX returns before it has computed. At the beginning and at the end, the timer waits for all arrays of the default
    backend, so that earlier work does not count and the block's work does. It does not wait for work whose results are
    dropped inside the block. The time is printed also where the block raises.

    >>> with timer("Adding") as elapsed:  # doctest: +ELLIPSIS
    ...     total = jax.numpy.ones(1000).sum()
    Adding took ... seconds
    >>> elapsed.seconds > 0
    True
    """
    elapsed = Elapsed(name)
    _wait()
    start = time.perf_counter()
    try:
        yield elapsed
    finally:
        _wait()
        elapsed.seconds = time.perf_counter() - start
        print(elapsed)


def _wait() -> None:
    for array in jax.live_arrays():
        # An array that failed, or that another thread deletes, raises. That is for the code that reads it.
        with contextlib.suppress(RuntimeError):
            if not array.is_deleted():
                array.block_until_ready()


def get_memory_usage(device: Any = None) -> dict[str, int]:
    """The bytes that are allocated and reserved on a device (by default JAX's first), and the limit of both.

    A CPU has no such statistics. Its numbers are the operating system's: the memory of this process (its peak where
    there is no /proc), nothing reserved, and the memory of the machine.

    >>> usage = get_memory_usage(jax.devices("cpu")[0])
    >>> list(usage), 0 < usage["allocated"] < usage["limit"]
    (['allocated', 'reserved', 'limit'], True)
    """
    stats = device_or_default(device).memory_stats()
    if not stats:
        return {"allocated": _resident(), "reserved": 0, "limit": _pages("SC_PHYS_PAGES")}
    names = {"allocated": "bytes_in_use", "reserved": "bytes_reserved", "limit": "bytes_limit"}
    return {name: int(stats.get(field, 0)) for name, field in names.items()}


def _resident() -> int:
    if STATM.exists():
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource

    # In KiB, except on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _pages(name: str) -> int:
    return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
