"""The sizes of blocks for the blockwise kernels, by platform and shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ejkernel_ops.flash_attention.tokens import band

# The elements of one tile over all heads. On a CPU all cores work on one tile in cache: below half a million elements
# the loop itself costs time, far above that memory does. On an accelerator few and large tiles are faster.
CPU_TILE, DEVICE_TILE = 2**19, 2**26


def block_sizes(arguments: Mapping[str, Any], platform: str, cpu: tuple[int, int]) -> tuple[int, int]:
    """The blocks of queries and of keys for a call; ``cpu`` are the largest ones that are worth it on a CPU."""
    tile = CPU_TILE if platform == "cpu" else DEVICE_TILE
    q_block, kv_block = cpu if platform == "cpu" else (1024, 1024)
    width = _width(arguments)
    if width is not None:
        # A block of queries needs the keys of the window and about a block more: smaller blocks waste less.
        narrow = max(128, _power_below(width // 2))
        q_block, kv_block = min(q_block, narrow), min(kv_block, narrow)
    batch, _, heads, _ = arguments["query"].shape
    limit = _power_below(tile // max(1, batch * heads * kv_block))
    return min(q_block, max(128, limit)), kv_block


def neighbours(arguments: Mapping[str, Any], platform: str, first: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """The sizes that are worth measuring beside the first: half and double of either. On a GPU only of both at once:
    there each pair takes seconds to compile, and in measurements larger ones were faster.
    """
    lengths = arguments["query"].shape[1], arguments["key"].shape[1]
    effective_sizes = set()
    one_side = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, -1), (-1, 1)) if platform != "gpu" else ()
    for q_steps, kv_steps in ((0, 0), (1, 1), (-1, -1), *one_side):
        sizes = _scaled(first[0], q_steps), _scaled(first[1], kv_steps)
        effective = min(sizes[0], lengths[0]), min(sizes[1], lengths[1])  # a block is no longer than the sequence
        if effective not in effective_sizes:
            effective_sizes.add(effective)
            yield sizes


def _width(arguments: Mapping[str, Any]) -> int | None:
    left, right = band(arguments["causal"], arguments["sliding_window"])
    return None if left is None or right is None else left + right + 1


def _scaled(size: int, steps: int) -> int:
    """The size, doubled so many times, or halved where ``steps`` is below 0."""
    return max(16, size << steps if steps >= 0 else size >> -steps)


def _power_below(number: int) -> int:
    return 1 << max(0, number.bit_length() - 1)
