"""Which blocks: the first choice of each generation, and what fits into vector memory."""

from __future__ import annotations

from itertools import product

from ejkernel_core import Invocation
from ejkernel_pallas_tpu._generations import generation
from ejkernel_pallas_tpu._problem import LANES, plane_kind, whole_lanes

Shape = tuple[int, int]

BLOCKS = (128, 256, 512, 1024, 2048)
#: (queries, keys) of a block, by pass and generation, for 16-bit inputs. A wider matrix unit and more vector memory
#: want more; beyond that, longer blocks only hold more of what causality hides.
FIRST: dict[str, dict[str, Shape]] = {
    "forward": {"v4": (512, 512), "v5e": (512, 512), "v5p": (512, 512), "v6e": (1024, 1024), "v7x": (1024, 1024)},
    "queries": {"v4": (256, 512), "v5e": (512, 512), "v5p": (512, 512), "v6e": (512, 1024), "v7x": (512, 1024)},
    "keys": {"v4": (256, 256), "v5e": (512, 512), "v5p": (512, 512), "v6e": (512, 512), "v7x": (512, 512)},
    "bias": {"v4": (256, 256), "v5e": (256, 512), "v5p": (256, 512), "v6e": (512, 512), "v7x": (512, 512)},
}
#: Planes of float32 that a tile has at a time, between its products.
PLANES = {"forward": 3, "queries": 5, "keys": 5, "bias": 6}


def fitting(inv: Invocation, which: str) -> list[Shape]:
    """What a pass may be cut into, the best first; never without the smallest."""
    told = generation(inv.device_kind or "")
    assert told is not None  # `check` has seen to it
    q_most, k_most = (_covering(inv[name].shape[1]) for name in ("query", "key"))
    first = tuple(min(block, most) for block, most in zip(FIRST[which][told.name], (q_most, k_most), strict=True))
    others = product((b for b in BLOCKS if b <= q_most), (b for b in BLOCKS if b <= k_most))
    # Next to the first choice come those of nearly as many pairs, the larger ones before the smaller.
    by_size = sorted(
        others, key=lambda shape: (shape != first, shape[0] * shape[1] > first[0] * first[1], *_down(shape))
    )
    fits = [shape for shape in by_size if needed(inv, which, shape) <= told.budget]
    return fits or [(LANES, LANES)]


def _down(shape: Shape) -> tuple[int, int]:
    return -shape[0] * shape[1], -shape[1]


def _covering(length: int) -> int:
    """The smallest block that holds all of it, if any does."""
    return next((block for block in BLOCKS if block >= length), BLOCKS[-1])


def vmem(inv: Invocation) -> int | None:
    """How much vector memory a kernel asks the compiler for."""
    told = generation(inv.device_kind or "")
    return told.budget if told else None


def needed(inv: Invocation, which: str, shape: Shape) -> int:
    """At most so many bytes of vector memory a pass takes: blocks twice, since the next ones are fetched meanwhile."""
    q, k = (min(block, whole_lanes(inv[name].shape[1])) for block, name in zip(shape, ("query", "key"), strict=True))
    size = inv["query"].dtype.itemsize
    dim, v_dim = (whole_lanes(inv[name].shape[3]) for name in ("query", "value"))
    moving = size * (q * dim + k * (dim + v_dim))
    kept = 0
    if which == "forward":
        moving += size * q * v_dim
        kept += 4 * q * (v_dim + 2 * LANES)
    else:
        moving += size * q * v_dim + 2 * 4 * 8 * q
    if which == "queries":
        moving += size * q * dim
        kept += 4 * q * dim
    if which == "keys":
        moving += size * k * (dim + v_dim)
        kept += 4 * k * (dim + v_dim)
    if which == "bias":
        moving += 4 * q * k
        kept += 4 * q * k
    if plane_kind(inv["bias"]) == "full":
        moving += q * k * inv["bias"].dtype.itemsize
    if plane_kind(inv["attention_mask"]) == "full":
        moving += q * k
    # Float32 products are made of parts: operands are split into three bfloat16 each.
    parts = 6 * (q * max(dim, v_dim) + k * max(dim, v_dim) + q * k) if size == 4 else 0
    return 2 * moving + kept + 4 * PLANES[which] * q * k + parts
