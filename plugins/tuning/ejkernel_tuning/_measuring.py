"""What a part of a program takes: seconds, with the work waited for, and bytes."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from ejkernel_core import _devices

STATM = Path("/proc/self/statm")


class Elapsed:
    """What ``timer`` found out."""

    #: None until the ``with`` block has ended.
    seconds: float | None = None

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return f"{self.name} is running" if self.seconds is None else f"{self.name} took {self.seconds:.3f} seconds"


@contextlib.contextmanager
def timer(name: str = "Operation") -> Iterator[Elapsed]:
    """Print how long a ``with`` block takes, with the work that JAX does for it; what is entered has the ``seconds``.

    JAX returns before it has computed. So what is on its way in arrays of the default backend is waited for, at the
    beginning, that it does not count, and at the end, that it does. Work whose results are dropped inside the block is
    not waited for. A block that raises prints too: how long something took to fail is worth knowing.

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
        # One that failed, or that another thread deletes meanwhile, raises: for who reads it, not for who waits.
        with contextlib.suppress(RuntimeError):
            if not array.is_deleted():
                array.block_until_ready()


def get_memory_usage(device: Any = None) -> dict[str, int]:
    """The bytes that are allocated and reserved on a device, JAX's first by default, and the limit of both.

    Where a device keeps no statistics, as a CPU, they are the operating system's: what this process has in memory (at
    its most, where there is no /proc), nothing reserved, and the memory of the machine.

    >>> usage = get_memory_usage(jax.devices("cpu")[0])
    >>> list(usage), 0 < usage["allocated"] < usage["limit"]
    (['allocated', 'reserved', 'limit'], True)
    """
    stats = _devices._given(device).memory_stats()
    if not stats:
        return {"allocated": _resident(), "reserved": 0, "limit": _pages("SC_PHYS_PAGES")}
    names = {"allocated": "bytes_in_use", "reserved": "bytes_reserved", "limit": "bytes_limit"}
    return {name: int(stats.get(theirs, 0)) for name, theirs in names.items()}


def _resident() -> int:
    if STATM.exists():
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource

    # In KiB, save on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _pages(name: str) -> int:
    return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
