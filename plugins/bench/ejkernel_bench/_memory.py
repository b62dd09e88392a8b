"""The memory of a device: what JAX may take of it, what a compiled program takes, and what one took."""

from __future__ import annotations

from typing import Any

import jax

GIB = 2**30
#: The share of the memory that a program may take by the compiler's plan.
MEMORY_SHARE = 0.97


def memory_limit() -> int | None:
    """The bytes that JAX may take of the device's memory; None where it does not say."""
    return _statistic("bytes_limit")


def bytes_in_use() -> int | None:
    """The bytes of all arrays that are there now; None where the device does not say."""
    return _statistic("bytes_in_use")


def peak_bytes() -> int | None:
    """The most that was in use at once since the process began; None where the device does not say."""
    return _statistic("peak_bytes_in_use")


def _statistic(name: str) -> int | None:
    value = (jax.devices()[0].memory_stats() or {}).get(name)
    return None if value is None else int(value)


def planned_bytes(compiled: Any) -> int:
    """What a compiled program takes at once, with its arguments and results."""
    analysis = compiled.memory_analysis()
    sizes = (analysis.argument_size_in_bytes, analysis.output_size_in_bytes, analysis.temp_size_in_bytes)
    return int(sum(sizes) - analysis.alias_size_in_bytes)


def temporary_bytes(compiled: Any) -> int:
    """What a compiled program takes besides its arguments and results."""
    return int(compiled.memory_analysis().temp_size_in_bytes)
