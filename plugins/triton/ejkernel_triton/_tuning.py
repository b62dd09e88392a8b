"""Which blocks, warps and stages: tables made by measuring, and what of them fits a card.

A shape is (query block, key block, warps, stages). Each table has the best first: it is the heuristic's answer, and the
whole table is what a tuner measures. Measured on an H200, full and causal, from 2k to 16k (docs/performance.md). The
tables for other cards have the shapes that do not spill registers there. No shape spills, but those of float32 beyond
a head dim of 128: docs/triton.md has what each takes, and a test compiles them all.
"""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel_core import Invocation
from ejkernel_core.calibration import estimate_shared_memory_bytes, get_shared_memory_limit
from ejkernel_triton._problem import width

Shape = tuple[int, int, int, int]
Table = Mapping[int, tuple[Shape, ...]]

#: By padded head dim; a head dim has the first table that it does not exceed. 16-bit inputs, wgmma.
HOPPER: dict[str, Table] = {
    "forward": {
        64: ((64, 64, 4, 3), (128, 64, 8, 3), (128, 64, 4, 3), (128, 128, 8, 3), (64, 64, 4, 2), (128, 32, 4, 3)),
        128: ((128, 128, 8, 3), (128, 64, 8, 3), (64, 64, 4, 3), (128, 128, 8, 2), (64, 64, 4, 2), (64, 32, 4, 3)),
        256: ((128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 4, 2), (64, 32, 8, 2), (64, 32, 8, 1)),
    },
    "keys": {
        64: ((64, 64, 4, 2), (32, 64, 4, 3), (32, 64, 4, 2), (64, 128, 8, 3), (32, 32, 4, 2)),
        128: ((64, 64, 4, 2), (32, 64, 4, 3), (32, 128, 8, 3), (32, 64, 4, 2), (32, 32, 4, 2)),
        256: ((32, 64, 8, 3), (32, 64, 8, 2), (32, 32, 4, 2), (32, 32, 8, 1)),
    },
    "queries": {
        64: ((64, 64, 4, 2), (128, 64, 8, 2), (128, 32, 8, 3), (64, 64, 4, 3), (64, 32, 4, 2), (32, 32, 4, 2)),
        128: ((128, 64, 8, 3), (128, 32, 8, 3), (64, 64, 4, 2), (128, 64, 8, 2), (64, 32, 4, 2), (32, 32, 4, 2)),
        256: ((128, 32, 8, 3), (128, 32, 8, 2), (64, 32, 8, 2), (32, 32, 4, 2)),
    },
}
#: Compute capability 8, whose matrix instructions take their operands from registers.
AMPERE: dict[str, Table] = {
    "forward": {
        64: ((128, 64, 8, 3), (64, 64, 4, 3), (128, 32, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2)),
        128: ((128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 2), (64, 32, 4, 2)),
        256: ((64, 64, 8, 2), (64, 32, 8, 2), (64, 32, 8, 1), (64, 16, 4, 2)),
    },
    "keys": {
        64: ((64, 128, 8, 2), (32, 64, 4, 3), (32, 64, 4, 2), (64, 64, 8, 2), (32, 32, 4, 2)),
        128: ((32, 64, 4, 2), (32, 64, 8, 2), (64, 64, 8, 2), (32, 32, 4, 2)),
        256: ((32, 64, 8, 2), (32, 32, 8, 2), (32, 32, 8, 1)),
    },
    "queries": {
        64: ((128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 2), (64, 32, 4, 2), (32, 32, 4, 2)),
        128: ((128, 32, 8, 2), (64, 32, 4, 2), (64, 32, 8, 2), (32, 32, 4, 2)),
        256: ((64, 32, 8, 2), (32, 32, 8, 2), (32, 32, 8, 1)),
    },
}
#: Three products of TF32 parts need three times the operands. Head dims above 128 spill in any shape: one is offered.
FLOAT32: dict[str, Table] = {
    "forward": {
        64: ((64, 32, 8, 2), (32, 32, 4, 2), (32, 32, 4, 1), (32, 32, 8, 1)),
        128: ((32, 32, 8, 1), (16, 64, 8, 1), (16, 32, 8, 1)),
        256: ((16, 32, 8, 1),),
    },
    "keys": {
        64: ((64, 32, 8, 2), (32, 32, 4, 2), (32, 32, 8, 1)),
        128: ((16, 32, 8, 1), (32, 16, 4, 1), (16, 16, 4, 1)),
        256: ((16, 16, 4, 1),),
    },
    "queries": {
        64: ((32, 32, 4, 2), (32, 64, 8, 1), (32, 32, 8, 1)),
        128: ((16, 64, 8, 1), (16, 32, 8, 1), (16, 16, 4, 1)),
        256: ((16, 32, 8, 1),),
    },
}
#: For the gradient of a bias there is nothing to choose; it is rare.
BIAS: Shape = (32, 32, 4, 1)


def forward(inv: Invocation) -> list[Shape]:
    """What the forward pass may be cut into, the best first."""
    return _fitting(inv, "forward")


def keys(inv: Invocation) -> list[Shape]:
    """The pass for keys and values."""
    return _fitting(inv, "keys")


def queries(inv: Invocation) -> list[Shape]:
    """The pass for queries."""
    return _fitting(inv, "queries")


def _fitting(inv: Invocation, which: str) -> list[Shape]:
    dim = max(width(inv["query"].shape[3]), width(inv["value"].shape[3]))
    table = _tables(inv)[which]
    shapes = table[next(most for most in table if dim <= most)]
    limit = get_shared_memory_limit(compute_capability=inv.compute_capability)
    fitting = [shape for shape in shapes if shared_memory(inv, which, shape) <= limit] or [shapes[-1]]
    return list(dict.fromkeys(_shortened(inv, shape) for shape in fitting))


def _tables(inv: Invocation) -> dict[str, Table]:
    if inv["query"].dtype.itemsize == 4:
        return FLOAT32
    return AMPERE if inv.compute_capability is not None and inv.compute_capability < (9, 0) else HOPPER


def _shortened(inv: Invocation, shape: Shape) -> Shape:
    """No blocks of which the most would be empty: a single query needs no room for 128."""
    q_block, k_block, warps, stages = shape
    q_block, k_block = (
        min(block, max(16, 1 << (length - 1).bit_length()) if length else 16)
        for block, length in ((q_block, inv["query"].shape[1]), (k_block, inv["key"].shape[1]))
    )
    return q_block, k_block, min(warps, 4) if q_block * k_block <= 1024 else warps, stages


def shared_memory(inv: Invocation, which: str, shape: Shape) -> int:
    """At most so many bytes a program needs: what it keeps, what is on its way for each stage, and tiles of planes."""
    q_block, k_block, _, stages = shape
    dim, dtype = max(width(inv["query"].shape[3]), width(inv["value"].shape[3])), inv["query"].dtype
    kept, moving = (k_block, q_block) if which == "keys" else (q_block, k_block)
    # The backward keeps two tiles, queries and gradients of the output, or keys and values.
    needed = estimate_shared_memory_bytes(kept if which == "forward" else 2 * kept, moving * stages, dim, dtype)
    if dtype.itemsize == 4 and (which != "forward" or stages > 1):
        needed += 2 * max(q_block, k_block) * dim * dtype.itemsize  # operands turned round
    planes = (0 if inv["bias"] is None else inv["bias"].dtype.itemsize) + (inv["attention_mask"] is not None)
    return needed + q_block * k_block * planes * max(1, stages - 1)
