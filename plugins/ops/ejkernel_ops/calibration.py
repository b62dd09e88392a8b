"""What a block of threads on a GPU can hold: shared memory, warps and pipeline stages of an attention kernel.

For the heuristics and the configuration spaces of backends. All of it is arithmetic on block sizes; nothing is
compiled, and no GPU has to be there.
"""

from __future__ import annotations

import operator
import os
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel_core import _devices

__all__ = ["estimate_shared_memory_bytes", "get_shared_memory_limit", "select_num_stages", "select_num_warps"]

#: Says the limit of shared memory in bytes, whatever the device is.
VARIABLE = "EJKERNEL_TRITON_SMEM_LIMIT"
KIB = 1024
#: What every CUDA device gives to a block that asks for nothing special.
DEFAULT_KIB = 48
#: The most that a block can ask for, by compute capability. The A100's 164 are those of the multiprocessor, as its
#: data sheet and this project's sources say it; CUDA keeps one of them for itself.
LIMIT_KIB = {(7, 0): 96, (7, 5): 64, (8, 0): 164, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227}
#: Where all devices of a major version are alike.
LIMIT_KIB_OF_MAJOR = {10: 227, 12: 99}

ALIGNMENT = 128
WARPS = (4, 8, 16)
STAGES = 3
THREADS_OF_WARP = 32
REGISTER_BYTES = 4
#: Of the 255 registers of a thread, so many for tiles; the rest is for addresses, statistics and operands in flight.
TILE_REGISTERS = 160


def estimate_shared_memory_bytes(
    q_block: int, kv_block: int, head_dim: int, dtype: Any = jnp.float16, include_softmax: bool = True
) -> int:
    """The shared memory of one stage of an attention kernel, in bytes, a multiple of 128.

    That is a tile of queries, one of keys and one of values in ``dtype``; with ``include_softmax``, two float32
    numbers beside each query: its maximum and its sum.

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
    """The most shared memory that a block of threads can ask for, in bytes.

    Whatever the device is, the environment variable EJKERNEL_TRITON_SMEM_LIMIT goes first: a whole number of bytes
    above 0; empty is as good as not set. Then the compute capability decides, which is that of ``device``, by default
    of JAX's first, unless it is given: a backend compiles for devices that are not there, too. What has none, as a
    CPU, and what is not known have 48 KiB.

    >>> [get_shared_memory_limit(compute_capability=known) // 1024 for known in ((7, 5), (8, 0), (9, 0), (12, 0))]
    [64, 164, 227, 99]
    >>> import jax
    >>> get_shared_memory_limit(jax.devices("cpu")[0])
    49152
    """
    if device is not None and compute_capability is not None:
        raise TypeError("get_shared_memory_limit: takes a device or a compute capability, not both")
    if device is not None:
        _devices._given(device)
    if compute_capability is not None:
        _check_capability(compute_capability)
    if (limit := _limit_by_environment()) is not None:
        return limit
    known = compute_capability or _devices._capability(_devices._given(device))
    if known is None:
        return DEFAULT_KIB * KIB
    return LIMIT_KIB.get(known, LIMIT_KIB_OF_MAJOR.get(known[0], DEFAULT_KIB)) * KIB


def select_num_warps(q_block: int, kv_block: int, head_dim: int, dtype: Any = jnp.float16) -> int:
    """The fewest of 4, 8 and 16 warps that hold the tiles of an attention kernel in registers; 16 where none do.

    The tiles are the scores, (q_block, kv_block), and the output, (q_block, head_dim), both in float32 (float64 for
    float64), and the weights, which are the scores once more, in ``dtype``. A warp holds 20 KiB of them: 160 registers
    of four bytes in each of its 32 threads.

    >>> select_num_warps(64, 64, 64), select_num_warps(128, 128, 128), select_num_warps(256, 128, 128)
    (4, 8, 16)
    """
    q_block, kv_block, head_dim = _sizes(q_block=q_block, kv_block=kv_block, head_dim=head_dim)
    size = _itemsize(dtype)
    wide = max(size, 4)
    held = q_block * (kv_block * (wide + size) + head_dim * wide)
    of_warp = THREADS_OF_WARP * TILE_REGISTERS * REGISTER_BYTES
    return next((warps for warps in WARPS if held <= warps * of_warp), WARPS[-1])


def select_num_stages(smem_bytes: int, limit: int | None = None) -> int:
    """How many pipeline stages of ``smem_bytes`` each fit into the limit of shared memory: 1, 2, or 3 for more.

    ``limit`` is in bytes, by default ``get_shared_memory_limit()``. Where not even one stage fits, it is 1 all the
    same: that such blocks are too large is for the caller to see, by ``smem_bytes > limit``.

    >>> [select_num_stages(smem, limit=227 * 1024) for smem in (64 * 1024, 82944, 128 * 1024)]
    [3, 2, 1]
    """
    (smem_bytes,) = _sizes(smem_bytes=smem_bytes)
    (limit,) = _sizes(limit=get_shared_memory_limit() if limit is None else limit)
    return min(max(limit // smem_bytes, 1), STAGES)


def _limit_by_environment() -> int | None:
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise ValueError(f"{VARIABLE}: takes a whole number of bytes above 0; got {text!r}")
    return int(text)


def _check_capability(given: Any) -> None:
    wanted = "compute_capability: takes two whole numbers, as (9, 0)"
    if not isinstance(given, tuple) or not all(isinstance(n, int) and not isinstance(n, bool) for n in given):
        raise TypeError(f"{wanted}; got {given!r}")
    if len(given) != 2 or min(given) < 0:
        raise ValueError(f"{wanted}; got {given!r}")


def _sizes(**given: Any) -> list[int]:
    """Whole numbers from 1."""
    return [_size(name, value) for name, value in given.items()]


def _size(name: str, value: Any) -> int:
    try:
        size = operator.index(value)
    except TypeError:
        size = None
    if size is None or isinstance(value, bool):
        raise TypeError(f"{name}: takes a whole number; got {value!r}")
    if size < 1:
        raise ValueError(f"{name}: is at least 1; got {size}")
    return size


def _itemsize(dtype: Any) -> int:
    try:
        kind = None if dtype is None else np.dtype(dtype)  # None would be float64
    except TypeError:
        kind = None
    if kind is None or not jnp.issubdtype(kind, jnp.number):
        raise TypeError(f"dtype: takes a dtype of numbers; got {dtype!r}")
    return int(kind.itemsize)
