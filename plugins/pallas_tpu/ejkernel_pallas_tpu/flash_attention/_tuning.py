"""Which blocks: the first choice of each generation, and what fits into vector memory."""

from __future__ import annotations

from itertools import product

from ejkernel_core import Invocation
from ejkernel_ops.flash_attention.tokens import band
from ejkernel_pallas_tpu.flash_attention._problem import LANES, blocks, plane_kind, whole_lanes
from ejkernel_pallas_tpu.launch._generations import generation

Shape = tuple[int, int]

BLOCKS = (128, 256, 512, 1024)
#: (queries, keys) of a block, by pass and generation, for 16-bit inputs: the quickest by the estimates of
#: ``python -m ejkernel_pallas_tpu.testing``. A wider matrix unit is fed by larger blocks.
FIRST: dict[str, dict[str, Shape]] = {
    "forward": {"v4": (512, 512), "v5e": (512, 512), "v5p": (512, 512), "v6e": (1024, 1024), "v7x": (1024, 1024)},
    "queries": {"v4": (256, 512), "v5e": (512, 512), "v5p": (512, 512), "v6e": (1024, 1024), "v7x": (1024, 1024)},
    "keys": {"v4": (256, 256), "v5e": (512, 512), "v5p": (512, 512), "v6e": (1024, 1024), "v7x": (1024, 1024)},
    "fused": {"v4": (256, 256), "v5e": (512, 512), "v5p": (512, 512), "v6e": (1024, 1024), "v7x": (1024, 1024)},
    "bias": {"v4": (256, 256), "v5e": (256, 512), "v5p": (256, 512), "v6e": (512, 512), "v7x": (512, 512)},
}
#: Planes of float32 that a tile has at a time, between its products, without a bias and dropout.
PLANES = {"forward": 2, "queries": 3, "keys": 3, "fused": 4, "bias": 4}
#: A window this wide is cut into several blocks; smaller blocks than half of it would not pay.
NARROW = 1024
#: How many steps a pass may have: each has a word in scalar memory, of which there is 1 MiB.
MOST_STEPS = 2**17


def fitting(inv: Invocation, which: str) -> list[Shape]:
    """What a pass may be cut into, the best first; a fused pass perhaps not at all, the others somehow."""
    told = generation(inv.device_kind or "")
    assert told is not None  # `check` has seen to it
    if which == "fused" and inv["key"].shape[0] * inv["key"].shape[2] < told.cores:
        return []  # heads that share keys are added up one after the other: a core would have nothing to do
    most = [_covering(inv[name].shape[1]) for name in ("query", "key")]
    cuts = product(*([block for block in BLOCKS if block <= longest] for longest in most))
    fits = [
        shape
        for shape in ((q, k) for q, k in cuts)
        if needed(inv, which, shape) <= told.budget and _steps(inv, shape) <= MOST_STEPS
    ]
    if not fits:
        # The sums of a fused pass grow with the length: where they do not fit, there are the other passes.
        return [] if which == "fused" else [(LANES, LANES)]
    half = _half_of_window(inv)
    q_most, k_most = (min(block, half, longest) for block, longest in zip(FIRST[which][told.name], most, strict=True))
    first = max((shape for shape in fits if shape[0] <= q_most and shape[1] <= k_most), key=_area, default=fits[-1])
    # Worth measuring is what is about as large.
    near = (shape for shape in fits if all(x <= 2 * y and y <= 2 * x for x, y in zip(shape, first, strict=True)))
    return sorted(near, key=lambda shape: (shape != first, _area(shape) > _area(first), -_area(shape), -shape[1]))


def _area(shape: Shape) -> int:
    return shape[0] * shape[1]


def _half_of_window(inv: Invocation) -> int:
    """Where a row sees a window, larger blocks than half of it would hold more of what nobody sees than of the rest."""
    before, after = band(inv["causal"], inv["sliding_window"])
    if before is None or after is None:
        return BLOCKS[-1]
    return _covering(max(before + after + 1, NARROW) // 2)


def _steps(inv: Invocation, shape: Shape) -> int:
    """At most so many: a row of them for each batch entry, where what is seen depends on it."""
    rows = inv["query"].shape[0] if inv["q_segment_ids"] is not None or inv["attention_mask"] is not None else 1
    pairs = [blocks(inv[name].shape[1], block) for name, block in zip(("query", "key"), shape, strict=True)]
    return rows * pairs[0] * pairs[1]


def _covering(length: int) -> int:
    """The smallest block that holds all of it, if any does."""
    return next((block for block in BLOCKS if block >= length), BLOCKS[-1])


def vmem(inv: Invocation) -> int | None:
    """How much vector memory a kernel asks the compiler for."""
    told = generation(inv.device_kind or "")
    return told.budget if told else None


def needed(inv: Invocation, which: str, shape: Shape) -> int:
    """At most so many bytes of vector memory a pass takes: blocks twice, since the next ones are fetched meanwhile."""
    size: int
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
    if which == "fused":
        length = k * blocks(inv["key"].shape[1], k)
        moving += size * (q * dim + length * (dim + v_dim))
        kept += 4 * (q * dim + length * (dim + v_dim))
    if which == "bias":
        moving += 4 * q * k
        kept += 4 * q * k
    planes = PLANES[which]
    if plane_kind(inv["bias"]) == "full":
        moving += q * k * inv["bias"].dtype.itemsize
        planes += 2
    if inv["dropout_prob"]:
        planes += 1
    if plane_kind(inv["attention_mask"]) == "full":
        moving += q * k
    # Float32 products are made of parts: operands are split into three bfloat16 each.
    parts = 6 * (q * max(dim, v_dim) + k * max(dim, v_dim) + q * k) if size == 4 else 0
    return 2 * moving + kept + 4 * planes * q * k + parts
