"""How many places of a block each expert has, and the number of each place among those of its expert in the block."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def count(
    experts, slots,
    counts, smaller, places,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Also how many places of the block the experts before each one have. The last expert stands for none."""
    number = tl.arange(0, BLOCK)
    slot = tl.program_id(0) * BLOCK + number
    mask = slot < slots
    # Behind the last slot there is no expert, so that nothing comes after what is counted there.
    expert = tl.load(experts + slot, mask=mask, other=EXPERTS - 1)
    is_before = (expert[None, :] == expert[:, None]) & (number[None, :] < number[:, None])
    tl.store(places + slot, tl.sum(is_before.to(tl.int32), 1), mask=mask)
    own = tl.histogram(expert, BINS)
    column = tl.arange(0, BINS)
    cell = tl.program_id(0) * EXPERTS + column
    tl.store(counts + cell, own, mask=column < EXPERTS)
    tl.store(smaller + cell, tl.cumsum(own, 0) - own, mask=column < EXPERTS)
