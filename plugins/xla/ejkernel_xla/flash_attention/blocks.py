"""How large the blocks of the blockwise kernels should be, by platform and shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ejkernel_ops.flash_attention.tokens import band

# The elements of one tile over all heads. On a CPU a tile is worked on in cache, by every core at once: below half a
# million the loop itself starts to cost, far above that the memory does. An accelerator wants few and large tiles.
CPU_TILE, DEVICE_TILE = 2**19, 2**26


def blocks(arguments: Mapping[str, Any], platform: str, cpu: tuple[int, int]) -> tuple[int, int]:
    """The query block and the kv block for a call; ``cpu`` are the greatest ones that pay on a CPU."""
    tile = CPU_TILE if platform == "cpu" else DEVICE_TILE
    q_block, kv_block = cpu if platform == "cpu" else (1024, 1024)
    width = _width(arguments)
    if width is not None:
        # A block of queries meets the window's keys and a block more: smaller blocks waste less of that.
        narrow = max(128, _power_below(width // 2))
        q_block, kv_block = min(q_block, narrow), min(kv_block, narrow)
    batch, _, heads, _ = arguments["query"].shape
    room = _power_below(tile // max(1, batch * heads * kv_block))
    return min(q_block, max(128, room)), kv_block


def nearby(arguments: Mapping[str, Any], platform: str, first: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """What is worth measuring around a first guess: half and double the size, either way. On a GPU both ways at
    once: there each takes seconds to compile, and was the faster the larger it was.
    """
    longest = arguments["query"].shape[1], arguments["key"].shape[1]
    seen = set()
    either = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, -1), (-1, 1)) if platform != "gpu" else ()
    for q_shift, kv_shift in ((0, 0), (1, 1), (-1, -1), *either):
        pair = _shifted(first[0], q_shift), _shifted(first[1], kv_shift)
        effective = min(pair[0], longest[0]), min(pair[1], longest[1])  # longer than the sequence is no other block
        if effective not in seen:
            seen.add(effective)
            yield pair


def _width(arguments: Mapping[str, Any]) -> int | None:
    left, right = band(arguments["causal"], arguments["sliding_window"])
    return None if left is None or right is None else left + right + 1


def _shifted(number: int, shift: int) -> int:
    return max(16, number << shift if shift >= 0 else number >> -shift)


def _power_below(number: int) -> int:
    return 1 << max(0, number.bit_length() - 1)
