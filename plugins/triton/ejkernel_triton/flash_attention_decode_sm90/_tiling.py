"""What the shapes of programs are chosen by: the rows and tiles of a call, its keys, and the card."""

from __future__ import annotations

from ejkernel_core import Invocation
from ejkernel_ops.calibration import get_shared_memory_limit
from ejkernel_triton.flash_attention_decode._tiling import most_seen, rows
from ejkernel_triton.flash_attention_sm90._launch import width
from ejkernel_triton.launch._cards import capability, multiprocessors
from ejkernel_triton.split_keys.shapes import Problem


def problem(inv: Invocation) -> Problem:
    """Of a call."""
    batch, _, kv_heads, _ = inv["key"].shape
    size, count = rows(inv)
    together = 2 if count > 1 else 1
    return Problem(
        size,
        (together, 1),
        (int(batch * kv_heads * -(-count // together)), int(batch * kv_heads * count)),
        most_seen(inv),
        width(inv["query"].shape[3]),
        width(inv["value"].shape[3]),
        int(inv["query"].dtype.itemsize),
        multiprocessors(inv),
        get_shared_memory_limit(compute_capability=capability(inv)),
    )
