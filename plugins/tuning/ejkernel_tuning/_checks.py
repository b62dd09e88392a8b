"""Checks of a compiled variant: its memory and its results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_core import Invocation
from ejkernel_core.extend import Reason, message

#: The largest difference from the reference's results, relative to the largest of them, by dtype. By default, GPUs and
#: TPUs multiply float32 in lower precision.
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}
DEVICE_FLOAT32 = 5e-3


def fault_text(step: str, fault: BaseException) -> str:
    """The reason of a variant that raised an exception."""
    first = (message(fault).strip().splitlines() or [""])[0]
    return f"{step} raised {type(fault).__name__}: {first[:200]}"


def memory_fault(compiled: Any, device: Any) -> str | None:
    """The reason of a variant that needs more memory than is free, else None. On a CPU it could end the process."""
    needed, stats = bytes_needed(compiled), device.memory_stats() or {}
    bytes_free = stats["bytes_limit"] - stats.get("bytes_in_use", 0) if "bytes_limit" in stats else _available_memory()
    if bytes_free is None or needed <= bytes_free:
        return None
    return f"needs {needed / 2**30:.3g} GiB of memory; there are {bytes_free / 2**30:.3g}"


def bytes_needed(compiled: Any) -> int:
    """The memory that a compiled program needs beside its inputs."""
    analysis = compiled.memory_analysis()
    return int(getattr(analysis, "temp_size_in_bytes", 0)) + int(getattr(analysis, "output_size_in_bytes", 0))


def _available_memory() -> int | None:
    """The free memory of the system in bytes; None where it is unknown."""
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, LookupError):
        return None


def results_fault(results: Sequence[Any], expected: Sequence[Any], inv: Invocation) -> str | None:
    """The reason of a variant with wrong results, else None."""
    if _types(results) != _types(expected):
        return f"{Reason.WRONG}: returned ({', '.join(_types(results))}), not ({', '.join(_types(expected))})"
    for name, value, expected_value in zip(_names(inv, len(expected)), results, expected, strict=True):
        if not jnp.issubdtype(expected_value.dtype, jnp.inexact):
            if not bool(jnp.array_equal(value, expected_value)):
                return f"{Reason.WRONG}: {name} is another"
            continue
        error, places = (np.asarray(value).item() for value in _distance(value, expected_value))
        if places:
            where = f"in {places} places where the reference is not, or not where it is"
            return f"{Reason.WRONG}: {name} is NaN or infinite {where}"
        allowed = tolerance(expected_value.dtype, inv.platform)
        if not error <= allowed:
            return f"{Reason.WRONG}: {name} is off by {error:.2g} of the largest value; {allowed:.2g} is allowed"
    return None


def is_constant(result: Any) -> bool:
    """Whether all of a result is one value, which it may have whatever the kernel computes. A single number is a result
    like others, unless it is 0.
    """
    if result.size < 2:
        return not bool(jnp.any(result))
    first = result[(0,) * result.ndim]
    return bool(jnp.all((result == first) | (jnp.isnan(result) & jnp.isnan(first))))


def _names(inv: Invocation, count: int) -> list[str]:
    """The results in words, as the proofs of kernels name them."""
    if count == 1:
        return ["the result"]
    wrt = inv.arguments.get("wrt")
    names = wrt if isinstance(wrt, tuple) else inv.operation.results if inv.operation else ()
    if len(names) != count:  # the kernels return another number of results than the operation declares
        names = tuple(map(str, range(count)))
    return [f"{'gradient of' if names is wrt else 'result'} {name}" for name in names]


def tolerance(dtype: Any, platform: str) -> float:
    """The largest allowed difference, relative to the largest value."""
    name = jnp.dtype(dtype).name
    return DEVICE_FLOAT32 if name == "float32" and platform != "cpu" else TOLERANCE.get(name, 1e-4)


def _types(results: Sequence[Any]) -> list[str]:
    return [f"{result.dtype}{list(result.shape)}" for result in results]


@jax.jit
def _distance(result: Any, expected: Any) -> tuple[Any, Any]:
    """The largest difference relative to the largest value, and the number of places where only one is finite."""
    wide = jnp.promote_types(expected.dtype, jnp.float32)
    result, expected = result.astype(wide), expected.astype(wide)
    both = jnp.isfinite(result) & jnp.isfinite(expected)
    same = both | (result == expected) | (jnp.isnan(result) & jnp.isnan(expected))
    difference = jnp.max(jnp.where(both, jnp.abs(result - expected), 0), initial=0)
    scale = jnp.max(jnp.where(both, jnp.abs(expected), 0), initial=0)
    return difference / jnp.maximum(scale, np.finfo(wide).tiny), jnp.sum(~same)
