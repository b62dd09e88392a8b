"""The slots of a block and the splits of keys, from the shapes of a call and the generation."""

from __future__ import annotations

from ejkernel_core import Invocation, Unsupported
from ejkernel_ops.flash_attention.geometry import block_count
from ejkernel_ops.flash_attention.tokens import band
from ejkernel_pallas_tpu.flash_attention._problem import LANES, whole_lanes
from ejkernel_pallas_tpu.launch._generations import generation
from ejkernel_pallas_tpu.online_softmax.words import has_pairs

#: (slots, splits).
Shape = tuple[int, int]

#: The lowest bits of a word are the flags of a step, as in the general kernel. Above them is the block, and above that
#: the batch entry.
FLAG_BITS = 4
BLOCKS = (128, 256, 512, 1024, 2048)
SPLITS = (1, 2)
#: Keys and values of a block: a step takes far longer than its start, and vector memory holds two of them. On v7x, the
#: core is slower than its memory, and 4 MiB take a tenth less time.
STEP_BYTES, STEP_BYTES_OF = 2 << 20, {"v7x": 4 << 20}
#: The most visits of a split. Each has two words in scalar memory, of which there is 1 MiB.
MAX_VISITS = 2**15
#: The float32 arrays of a tile's shape that are alive at a time, for each head, and the heads that the compiler has
#: alive at a time.
TILE_ARRAYS, LIVE_HEADS = 3, 2


def block_bits(blocks: int) -> int:
    """The bits of the number of a block."""
    return (blocks - 1).bit_length()


def word_bits(batch: int, blocks: int) -> int:
    """The bits that the words of a call have."""
    return FLAG_BITS + block_bits(blocks) + (batch - 1).bit_length()


def rows(inv: Invocation) -> int:
    """The rows of a tile: the queries of a group of heads, in whole registers."""
    count = inv["query"].shape[1] * (inv["query"].shape[2] // inv["key"].shape[2])
    sublanes = 32 // int(inv["query"].dtype.itemsize)
    return sublanes * block_count(count, sublanes)


def shapes(inv: Invocation) -> list[Shape]:
    """The shapes that fit, the best first."""
    chip = generation(inv.device_kind or "")
    assert chip is not None  # `check` refuses other devices
    blocks = [block for block in BLOCKS if block == BLOCKS[0] or block <= inv["key"].shape[1]]
    fits = [block for block in blocks if vmem_bytes(inv, block) <= chip.budget and _has_words(inv, block)]
    if not fits:
        raise Unsupported(
            f"the decode kernel needs {vmem_bytes(inv, LANES) / 2**20:.1f} MiB of vector memory for a block of "
            f"{LANES} slots of all heads, of which there are {chip.budget / 2**20:.0f}, or too many visits"
        )
    preferred = _preferred(inv, STEP_BYTES_OF.get(chip.name, STEP_BYTES))
    best = max((block for block in fits if block <= preferred), default=fits[0])
    splits = min(chip.cores, SPLITS[-1])
    others = [block for block in (best // 2, best * 2) if block in fits]
    counts = [splits, *(count for count in SPLITS if count < splits)]
    return [(best, count) for count in counts] + [(block, splits) for block in others]


def _preferred(inv: Invocation, step_bytes: int) -> int:
    """The slots of a step, and less for a window: of its first and its last block, half is masked on average."""
    before, after = band(inv["causal"], inv["sliding_window"])
    most = max(LANES, step_bytes // _slot_bytes(inv))
    if before is None or after is None:
        return most
    return min(most, max(LANES, (before + after + 1) // 2))


def _slot_bytes(inv: Invocation) -> int:
    """Of the keys and values of a slot, as they lie in vector memory."""
    _, _, heads, dim = inv["key"].shape
    width = whole_lanes(dim) + whole_lanes(inv["value"].shape[3])
    return int(heads * width * inv["key"].dtype.itemsize)


def _has_words(inv: Invocation, block: int) -> bool:
    batch, blocks = inv["key"].shape[0], block_count(inv["key"].shape[1], block)
    return batch * blocks <= MAX_VISITS and word_bits(batch, blocks) < 31


def vmem_limit(inv: Invocation) -> int | None:
    """How much vector memory the kernel requests from the compiler."""
    chip = generation(inv.device_kind or "")
    return chip.budget if chip else None


def vmem_bytes(inv: Invocation, block: int) -> int:
    """The most bytes of vector memory. Blocks count twice, because the next ones are fetched early."""
    heads, tile = inv["key"].shape[2], rows(inv)
    size = int(inv["query"].dtype.itemsize)
    dim, v_dim = (whole_lanes(inv[name].shape[3]) for name in ("query", "value"))
    moving = block * _slot_bytes(inv) + heads * tile * (size * dim + 4 * (v_dim + 2 * LANES))
    if inv["kv_positions"] is not None:
        moving += 4 * 8 * block
    if inv["softmax_aux"] is not None:
        moving += 4 * heads * 2 * tile * LANES
    width = 0 if heads == 1 else 2 if has_pairs(inv["query"].dtype, heads) else 4
    scratch = width * block * heads * (dim + v_dim) + 4 * heads * tile * (v_dim + 2 * LANES)
    # Of a head: its keys and values in float32, and in three parts of bfloat16 for a product in float32.
    head = block * (dim + v_dim) * (4 + size + (6 if size == 4 else 0)) + 4 * TILE_ARRAYS * tile * block
    return int(2 * moving + scratch + head * min(heads, LIVE_HEADS))
