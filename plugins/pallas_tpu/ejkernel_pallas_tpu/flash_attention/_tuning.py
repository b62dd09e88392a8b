"""The sizes of blocks: the best for each generation of TPUs, and all that fit into vector memory."""

from __future__ import annotations

from itertools import product

from ejkernel_core import Invocation
from ejkernel_ops.flash_attention.geometry import block_count
from ejkernel_ops.flash_attention.tokens import band
from ejkernel_pallas_tpu.flash_attention._problem import LANES, layout, whole_lanes
from ejkernel_pallas_tpu.launch._generations import generation

Shape = tuple[int, int]

BLOCKS = (128, 256, 512, 1024)
#: (queries, keys) of a block, by pass and generation, for 16-bit inputs: the quickest by the estimates of
#: ``ejkernel tpu``. Wider matrix units need larger blocks.
FIRST: dict[str, dict[str, Shape]] = {
    "forward": {"v4": (512, 512), "v5e": (512, 512), "v5p": (512, 512), "v6e": (1024, 1024), "v7x": (1024, 1024)},
    "queries": {"v4": (256, 512), "v5e": (512, 512), "v5p": (512, 512), "v6e": (1024, 1024), "v7x": (1024, 1024)},
    "keys": {"v4": (256, 256), "v5e": (512, 512), "v5p": (512, 512), "v6e": (1024, 1024), "v7x": (1024, 1024)},
    "fused": {"v4": (256, 256), "v5e": (512, 512), "v5p": (512, 512), "v6e": (1024, 1024), "v7x": (1024, 1024)},
    "bias": {"v4": (256, 256), "v5e": (256, 512), "v5p": (256, 512), "v6e": (512, 512), "v7x": (512, 512)},
}
#: The same for a forward pass of so many queries or more.
MANY_QUERIES, FIRST_OF_MANY = 8192, {"v5e": (1024, 512), "v5p": (1024, 512)}
#: The float32 arrays of a tile's shape that are alive at a time, by pass, without a bias and dropout.
TILE_ARRAYS = {"forward": 2, "queries": 3, "keys": 3, "fused": 4, "bias": 4}
#: Narrower windows have the blocks of a window this wide: smaller blocks are slower, although less of them is masked.
NARROWEST_WINDOW = 1024
#: The most steps of a pass. Each has a word in scalar memory, of which there is 1 MiB.
MAX_STEPS = 2**17


def block_shapes(inv: Invocation, pass_name: str) -> list[Shape]:
    """The blocks of a pass that fit into vector memory, the best first. Only a fused pass may have none."""
    chip = generation(inv.device_kind or "")
    assert chip is not None  # `check` refuses other devices
    if pass_name == "fused" and inv["key"].shape[0] * inv["key"].shape[2] < chip.cores:
        return []  # heads that share keys are added up one after another, so a core would be idle
    longest = [_smallest_block(inv[name].shape[1]) for name in ("query", "key")]
    shapes = product(*([block for block in BLOCKS if block <= limit] for limit in longest))
    fits = [
        (q, k)
        for q, k in shapes
        if vmem_bytes(inv, pass_name, (q, k)) <= chip.budget and _step_count(inv, (q, k)) <= MAX_STEPS
    ]
    if not fits:
        # The sums of a fused pass grow with the length. Where they do not fit, there are the other passes.
        return [] if pass_name == "fused" else [(LANES, LANES)]
    half = _half_of_window(inv)
    best = FIRST[pass_name][chip.name]
    if pass_name == "forward" and inv["query"].shape[1] >= MANY_QUERIES:
        best = FIRST_OF_MANY.get(chip.name, best)
    q_limit, k_limit = (min(sizes) for sizes in zip(best, (half, half), longest, strict=True))
    first = max((shape for shape in fits if shape[0] <= q_limit and shape[1] <= k_limit), key=_area, default=fits[-1])
    # Only blocks of a similar size are worth measuring.
    similar = (shape for shape in fits if all(x <= 2 * y and y <= 2 * x for x, y in zip(shape, first, strict=True)))
    return sorted(similar, key=lambda shape: (shape != first, _area(shape) > _area(first), -_area(shape), -shape[1]))


def _area(shape: Shape) -> int:
    return shape[0] * shape[1]


def _half_of_window(inv: Invocation) -> int:
    """The largest block along a sliding window: in larger ones, more than half of the scores would be masked."""
    before, after = band(inv["causal"], inv["sliding_window"])
    if before is None or after is None:
        return BLOCKS[-1]
    return _smallest_block(max(before + after + 1, NARROWEST_WINDOW) // 2)


def _step_count(inv: Invocation, shape: Shape) -> int:
    """The most steps of a pass: one for each pair of blocks, for each batch entry where their masks may differ."""
    differ = any(inv[name] is not None for name in ("q_segment_ids", "attention_mask", "q_start"))
    entries = inv["query"].shape[0] if differ else 1
    counts = [block_count(inv[name].shape[1], block) for name, block in zip(("query", "key"), shape, strict=True)]
    return entries * counts[0] * counts[1]


def _smallest_block(length: int) -> int:
    """The smallest block that holds so many tokens, or the largest block of all."""
    return next((block for block in BLOCKS if block >= length), BLOCKS[-1])


def vmem_limit(inv: Invocation) -> int | None:
    """How much vector memory a kernel requests from the compiler."""
    chip = generation(inv.device_kind or "")
    return chip.budget if chip else None


def vmem_bytes(inv: Invocation, pass_name: str, shape: Shape) -> int:
    """The most bytes of vector memory of a pass. Blocks count twice, because the next ones are fetched early."""
    size: int
    q, k = (min(block, whole_lanes(inv[name].shape[1])) for block, name in zip(shape, ("query", "key"), strict=True))
    size = inv["query"].dtype.itemsize
    dim, v_dim = (whole_lanes(inv[name].shape[3]) for name in ("query", "value"))
    moving = size * (q * dim + k * (dim + v_dim))
    scratch = 0
    if pass_name == "forward":
        moving += size * q * v_dim
        scratch += 4 * q * (v_dim + 2 * LANES)
    else:
        moving += size * q * v_dim + 2 * 4 * 8 * q
    if pass_name == "queries":
        moving += size * q * dim
        scratch += 4 * q * dim
        if inv["q_segment_ids"] is not None:  # a row of ids takes eight sublanes; the tiles of other passes leave room
            moving += 4 * 8 * (q + k)
    if pass_name == "keys":
        moving += size * k * (dim + v_dim)
        scratch += 4 * k * (dim + v_dim)
    if pass_name == "fused":
        length = k * block_count(inv["key"].shape[1], k)
        moving += size * (q * dim + length * (dim + v_dim))
        scratch += 4 * (q * dim + length * (dim + v_dim))
    if pass_name == "bias":
        moving += 4 * q * k
        scratch += 4 * q * k
    tile_arrays = TILE_ARRAYS[pass_name]
    if layout(inv["bias"]) == "full":
        moving += q * k * inv["bias"].dtype.itemsize
        tile_arrays += 2
    if inv["dropout_prob"]:
        tile_arrays += 1
    if layout(inv["attention_mask"]) == "full":
        moving += q * k
    if inv["kv_positions"] is not None:
        moving += 4 * 8 * k
    if inv["kv_positions"] is not None or inv["kv_lengths"] is not None:
        scratch += 4 * k * (dim + v_dim)  # without what empty slots hold
    # For a product in float32, each operand is split into three arrays of bfloat16.
    parts = 6 * (q * max(dim, v_dim) + k * max(dim, v_dim) + q * k) if size == 4 else 0
    if pass_name == "keys" and size == 4:
        parts += 4 * q * max(dim, v_dim)  # both operands with rows of queries may be split at a time
    return 2 * moving + scratch + 4 * tile_arrays * q * k + parts
