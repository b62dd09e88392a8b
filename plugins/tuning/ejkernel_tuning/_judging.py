"""Whether a configuration may go on: by the memory that it needs, and by its results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

#: How far results may be from the reference's, over the largest of these, by dtype. A GPU or a TPU multiplies float32
#: in fewer bits unless it is told otherwise.
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}
DEVICE_FLOAT32 = 5e-3


def fault_text(doing: str, fault: BaseException) -> str:
    first = (str(fault).strip().splitlines() or [""])[0]
    return f"{doing} raised {type(fault).__name__}: {first[:200]}"


def too_large(compiled: Any, device: Any) -> str | None:
    """Whether it needs more memory than there is: on a CPU it would take the process with it."""
    analysis = compiled.memory_analysis()
    needed = getattr(analysis, "temp_size_in_bytes", 0) + getattr(analysis, "output_size_in_bytes", 0)
    stats = device.memory_stats() or {}
    room = stats["bytes_limit"] - stats.get("bytes_in_use", 0) if "bytes_limit" in stats else _available()
    if room is None or needed <= room:
        return None
    return f"needs {needed / 2**30:.3g} GiB of memory; there are {room / 2**30:.3g}"


def _available() -> int | None:
    """The bytes that the system can still give; None where it does not say."""
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, LookupError):
        return None


def wrong(found: Sequence[Any], wanted: Sequence[Any], platform: str) -> str | None:
    """What is wrong with the results, or None."""
    if _types(found) != _types(wanted):
        return f"wrong: returned ({', '.join(_types(found))}), not ({', '.join(_types(wanted))})"
    for place, (mine, right) in enumerate(zip(found, wanted, strict=True)):
        name = f"result {place}" if len(wanted) > 1 else "the result"
        if not jnp.issubdtype(right.dtype, jnp.inexact):
            if not bool(jnp.array_equal(mine, right)):
                return f"wrong: {name} is another"
            continue
        error, misplaced = (np.asarray(value).item() for value in _distance(mine, right))
        if misplaced:
            return (
                f"wrong: {name} is NaN or infinite in {misplaced} places where the reference is not, or not where it is"
            )
        allowed = tolerance(right.dtype, platform)
        if not error <= allowed:
            return f"wrong: {name} is off by {error:.2g} of the largest value; {allowed:.2g} is allowed"
    return None


def tolerance(dtype: Any, platform: str) -> float:
    """The error that is allowed, over the largest value."""
    name = jnp.dtype(dtype).name
    return DEVICE_FLOAT32 if name == "float32" and platform != "cpu" else TOLERANCE.get(name, 1e-4)


def _types(results: Sequence[Any]) -> list[str]:
    return [f"{result.dtype}{list(result.shape)}" for result in results]


@jax.jit
def _distance(found: Any, wanted: Any) -> tuple[Any, Any]:
    """The largest difference over the largest value, and in how many places the one is finite and the other is not."""
    wide = jnp.promote_types(wanted.dtype, jnp.float32)
    found, wanted = found.astype(wide), wanted.astype(wide)
    both = jnp.isfinite(found) & jnp.isfinite(wanted)
    same = both | (found == wanted) | (jnp.isnan(found) & jnp.isnan(wanted))
    difference = jnp.max(jnp.where(both, jnp.abs(found - wanted), 0), initial=0)
    scale = jnp.max(jnp.where(both, jnp.abs(wanted), 0), initial=0)
    return difference / jnp.maximum(scale, np.finfo(wide).tiny), jnp.sum(~same)
