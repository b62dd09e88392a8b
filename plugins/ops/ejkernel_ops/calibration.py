"""The resources of a block of threads on a GPU: shared memory, warps and pipeline stages of an attention kernel.

For the heuristics and configuration spaces of backends. All results follow from block sizes: nothing is compiled, and
no GPU is needed.
"""

from __future__ import annotations

import operator
import os
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel_core.extend import device_or_default, target_of_device

__all__ = ["estimate_shared_memory_bytes", "get_shared_memory_limit", "select_num_stages", "select_num_warps"]

#: The environment variable with the limit of shared memory in bytes, for any device.
VARIABLE = "EJKERNEL_TRITON_SMEM_LIMIT"
KIB = 1024
#: The shared memory of a block on every CUDA device, without an opt-in.
DEFAULT_KIB = 48
#: The largest shared memory that a block can opt in to, by compute capability. The 164 KiB of the A100 are those of the
#: whole multiprocessor, as in the data sheet; CUDA reserves 1 KiB of them.
LIMIT_KIB = {(7, 0): 96, (7, 5): 64, (8, 0): 164, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227}
#: By major version, where it is the same for all of its devices.
LIMIT_KIB_OF_MAJOR = {10: 227, 12: 99}

ALIGNMENT = 128
WARPS = (4, 8, 16)
STAGES = 3
THREADS_OF_WARP = 32
REGISTER_BYTES = 4
#: The registers of a thread that tiles may use, of 255. The others hold addresses, statistics and operands in flight.
TILE_REGISTERS = 160


def estimate_shared_memory_bytes(
    q_block: int, kv_block: int, head_dim: int, dtype: Any = jnp.float16, include_softmax: bool = True
) -> int:
    """The shared memory of one stage of an attention kernel, in bytes, a multiple of 128.

    It holds a tile of queries, one of keys and one of values in ``dtype``, and with ``include_softmax`` two float32
    numbers for each query: its maximum and its sum.

    >>> estimate_shared_memory_bytes(128, 256, 64)
    82944
    >>> estimate_shared_memory_bytes(128, 256, 64, include_softmax=False)
    81920
    """
    q_block, kv_block, head_dim = _sizes(q_block=q_block, kv_block=kv_block, head_dim=head_dim)
    tiles = (q_block + 2 * kv_block) * head_dim * _itemsize(dtype)
    statistics = 2 * 4 * q_block if include_softmax else 0
    return -(-(tiles + statistics) // ALIGNMENT) * ALIGNMENT


def get_shared_memory_limit(device: Any = None, *, compute_capability: tuple[int, int] | None = None) -> int:
    """The most shared memory that a block of threads can use, in bytes.

    The environment variable EJKERNEL_TRITON_SMEM_LIMIT comes first, for any device: a whole number of bytes above 0, or
    empty for no limit of its own. Then the compute capability decides: the argument, for a device that is not present,
    or that of ``device``, by default the first of JAX. Unknown devices, and those without one such as a CPU, have
    a limit of 48 KiB.

    >>> [get_shared_memory_limit(compute_capability=version) // 1024 for version in ((7, 5), (8, 0), (9, 0), (12, 0))]
    [64, 164, 227, 99]
    >>> import jax
    >>> get_shared_memory_limit(jax.devices("cpu")[0])
    49152
    """
    if device is not None and compute_capability is not None:
        raise TypeError("get_shared_memory_limit: takes a device or a compute capability, not both")
    if device is not None:
        device_or_default(device)
    if compute_capability is not None:
        _check_capability(compute_capability)
    if (limit := _limit_from_environment()) is not None:
        return limit
    capability = compute_capability or target_of_device(device_or_default(device)).compute_capability
    if capability is None:
        return DEFAULT_KIB * KIB
    return LIMIT_KIB.get(capability, LIMIT_KIB_OF_MAJOR.get(capability[0], DEFAULT_KIB)) * KIB


def select_num_warps(q_block: int, kv_block: int, head_dim: int, dtype: Any = jnp.float16) -> int:
    """The fewest of 4, 8 and 16 warps that hold the tiles of an attention kernel in registers, or 16.

    The tiles are the scores, (q_block, kv_block), and the output, (q_block, head_dim), both in float32 (float64 for
    float64), and the weights, which have the shape of the scores, in ``dtype``. A warp holds 20 KiB of them: 160
    registers of four bytes in each of its 32 threads.

    >>> select_num_warps(64, 64, 64), select_num_warps(128, 128, 128), select_num_warps(256, 128, 128)
    (4, 8, 16)
    """
    q_block, kv_block, head_dim = _sizes(q_block=q_block, kv_block=kv_block, head_dim=head_dim)
    size = _itemsize(dtype)
    accumulator_size = max(size, 4)
    tile_bytes = q_block * (kv_block * (accumulator_size + size) + head_dim * accumulator_size)
    warp_bytes = THREADS_OF_WARP * TILE_REGISTERS * REGISTER_BYTES
    return next((warps for warps in WARPS if tile_bytes <= warps * warp_bytes), WARPS[-1])


def select_num_stages(smem_bytes: int, limit: int | None = None) -> int:
    """How many pipeline stages of ``smem_bytes`` each fit into the limit of shared memory: 1, 2, or 3 for more.

    ``limit`` is in bytes, by default ``get_shared_memory_limit()``. The result is 1 even if no stage fits:
    callers compare ``smem_bytes > limit`` to find blocks that are too large.

    >>> [select_num_stages(smem, limit=227 * 1024) for smem in (64 * 1024, 82944, 128 * 1024)]
    [3, 2, 1]
    """
    (smem_bytes,) = _sizes(smem_bytes=smem_bytes)
    (limit,) = _sizes(limit=get_shared_memory_limit() if limit is None else limit)
    return min(max(limit // smem_bytes, 1), STAGES)


def _limit_from_environment() -> int | None:
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise ValueError(f"{VARIABLE}: takes a whole number of bytes above 0; got {text!r}")
    return int(text)


def _check_capability(value: Any) -> None:
    requirement = "compute_capability: takes two whole numbers, as (9, 0)"
    if not isinstance(value, tuple) or not all(isinstance(n, int) and not isinstance(n, bool) for n in value):
        raise TypeError(f"{requirement}; got {value!r}")
    if len(value) != 2 or min(value) < 0:
        raise ValueError(f"{requirement}; got {value!r}")


def _sizes(**values: Any) -> list[int]:
    """The values, if they are whole numbers of at least 1."""
    return [_size(name, value) for name, value in values.items()]


def _size(name: str, value: Any) -> int:
    try:
        size = operator.index(value)
    except TypeError:
        size = None
    if size is None or isinstance(value, bool):
        raise TypeError(f"{name}: takes a whole number; got {value!r}")
    if size < 1:
        raise ValueError(f"{name}: must be at least 1; got {size}")
    return size


def _itemsize(dtype: Any) -> int:
    try:
        np_dtype = None if dtype is None else np.dtype(dtype)  # None would be float64
    except TypeError:
        np_dtype = None
    if np_dtype is None or not jnp.issubdtype(np_dtype, jnp.number):
        raise TypeError(f"dtype: takes a numeric dtype; got {dtype!r}")
    return int(np_dtype.itemsize)
