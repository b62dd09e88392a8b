"""The tokens of a tile and the slots of a block, from the shapes of a call and the generation."""

from __future__ import annotations

import math

import attrs
import jax.numpy as jnp
from attrs.validators import in_, instance_of

from ejkernel_core import Invocation, Unsupported
from ejkernel_ops.pages import pages_of
from ejkernel_ops.ragged_paged_attention.definition import output_dtype, page_size
from ejkernel_ops.ragged_paged_attention.tiles import TILE_SIZES
from ejkernel_pallas_tpu.launch._arrays import LANES
from ejkernel_pallas_tpu.launch._generations import Generation, generation
from ejkernel_pallas_tpu.online_softmax.words import has_pairs

from ._refusals import check, check_arguments
from ._sizes import Sizes, sizes

#: Keys and values of a block, as of the decode kernel of `flash_attention`.
BLOCK_BYTES, BLOCK_BYTES_OF = 2 << 20, {"v7x": 4 << 20}
MOST_SLOTS = 2048
#: The tokens of a tile where the results of a sequence may not depend on the call that it is in.
FIXED_TILE = 8
#: The rows of a tile that keep a matrix unit busy while the keys of a block are its weights.
MOST_ROWS = 512
#: The float32 arrays of a tile's shape that are alive at a time, for each head, and the heads that the compiler has
#: alive at a time.
TILE_ARRAYS, LIVE_HEADS = 3, 2


def _multiple_of_lanes(cfg: Config, _: object, value: int) -> None:
    if type(value) is not int or value < LANES or value % LANES:
        raise ValueError(f"k_block: takes a multiple of {LANES}; got {value!r}")


@attrs.frozen
class Config:
    """The tokens of a tile of queries, and the slots of a block of keys."""

    q_tile: int = attrs.field(default=1, validator=in_(TILE_SIZES))
    #: Some pages, or a part of one.
    k_block: int = attrs.field(default=512, validator=_multiple_of_lanes)
    #: Run in the interpreter of Pallas, on any device, for debugging.
    interpret: bool = attrs.field(default=False, validator=instance_of(bool))


def configs(inv: Invocation) -> list[Config]:
    """The configurations that fit, the best first. With ``split_size`` there is one, which does not depend on how many
    tokens and sequences there are.
    """
    chip = _chip(inv)
    blocks, preferred = _blocks(inv), _preferred_tile(inv)
    tile = next((q for q in sorted(TILE_SIZES, reverse=True) if q <= preferred and _fits(inv, chip, q, blocks)), None)
    if tile is None:
        size = vmem_bytes(inv, 1, blocks[0]) / 2**20
        raise Unsupported(
            f"pages of {page_size(inv)} slots need {size:.1f} MiB of vector memory for a block of {blocks[0]} slots of "
            f"all heads, of which there are {chip.budget / 2**20:.0f}"
        )
    fits = [block for block in blocks if vmem_bytes(inv, tile, block) <= chip.budget]
    # A block of 8 bits has no more entries than one of 16: they are widened in registers.
    narrow = 2 if pages_of(inv)[0].dtype.itemsize == 1 else 1
    slots = max(LANES, BLOCK_BYTES_OF.get(chip.name, BLOCK_BYTES) // narrow // _slot_bytes(inv))
    best = max((block for block in fits if block <= slots), default=fits[0])
    first = Config(tile, best)
    if inv["split_size"] is not None:
        return [first]
    others = [Config(tile, block) for block in (best // 2, best * 2) if block in fits]
    tiles = (q for q in (tile // 2, tile * 2) if q in TILE_SIZES and q <= _most_queries(inv))
    return [first, *others, *(Config(q, best) for q in tiles if vmem_bytes(inv, q, best) <= chip.budget)]


def check_config(inv: Invocation, cfg: Config) -> None:
    """Raise for what the kernel does not support in a configuration; the interpreter runs on any device."""
    (check_arguments if cfg.interpret else check)(inv)
    size = page_size(inv)
    if cfg.k_block % size and size % cfg.k_block:
        raise Unsupported(f"a block of {cfg.k_block} slots is neither some pages of {size} slots nor a part of one")
    if not cfg.interpret and (needed := vmem_bytes(inv, cfg.q_tile, cfg.k_block)) > _chip(inv).budget:
        raise Unsupported(
            f"{cfg} needs {needed / 2**20:.1f} MiB of vector memory, of which there are {_chip(inv).budget / 2**20:.0f}"
        )
    if inv["split_size"] is not None and not cfg.interpret and cfg != configs(inv)[0]:
        raise Unsupported(f"with split_size, all calls of these heads and pages have {configs(inv)[0]}; not {cfg}")


def _chip(inv: Invocation) -> Generation:
    chip = generation(inv.device_kind or "")
    assert chip is not None  # `check` refuses other devices
    return chip


def cores(inv: Invocation) -> int:
    """How many cores share the tiles."""
    chip = generation(inv.device_kind or "")
    return chip.cores if chip else 1


def vmem_limit(inv: Invocation) -> int | None:
    """How much vector memory the kernel requests from the compiler."""
    chip = generation(inv.device_kind or "")
    return chip.budget if chip else None


def _blocks(inv: Invocation) -> list[int]:
    """The possible slots of a block: multiples of the lanes that are some pages, or a part of one."""
    size = page_size(inv)
    least = math.lcm(size, LANES) if size % LANES else LANES
    doubled = [least << n for n in range(5) if n == 0 or least << n <= MOST_SLOTS]
    return [block for block in doubled if block % size == 0 or size % block == 0]


def _fits(inv: Invocation, chip: Generation, q_tile: int, blocks: list[int]) -> bool:
    return vmem_bytes(inv, q_tile, blocks[0]) <= chip.budget


def _most_queries(inv: Invocation) -> int:
    """Of a sequence, as a power of two."""
    tokens = inv["query"].shape[0]
    return int(inv["max_query_len"] or 1 << (tokens - 1).bit_length())


def _preferred_tile(inv: Invocation) -> int:
    """One token where all decode; else as many as fill the rows of a tile, or as a sequence has on average."""
    if inv["split_size"] is not None:
        return FIXED_TILE
    s = sizes(inv, 1, LANES)
    tokens, sequences = inv["query"].shape[0], inv["block_tables"].shape[0]
    average = 1 << (-(-tokens // sequences) - 1).bit_length()
    most = _most_queries(inv) if inv["max_query_len"] else max(average, 1)
    return min(most, TILE_SIZES[-1], max(MOST_ROWS // s.group, 1))


def _lanes(dim: int) -> int:
    return LANES * -(-dim // LANES)


def _slot_bytes(inv: Invocation) -> int:
    """Of the keys and values of a slot, as they lie in vector memory."""
    return sum(array.shape[2] * _lanes(array.shape[3]) * array.dtype.itemsize for array in pages_of(inv))


def vmem_bytes(inv: Invocation, q_tile: int, block: int) -> int:
    """The most bytes of vector memory. What moves counts twice: the next of it is fetched early."""
    s = sizes(inv, q_tile, block)
    size, dim, v_dim = jnp.dtype(s.dtype).itemsize, _lanes(s.dim), _lanes(s.v_dim)
    row = size * dim + output_dtype(inv).itemsize * v_dim + 4 * LANES
    row += 4 * 2 * LANES * (s.has_sinks + s.has_scales)
    moving = s.kv_heads * s.rows * row + block * _slot_bytes(inv)
    scratch = 4 * s.kv_heads * s.rows * (v_dim + 2 * LANES) + _word_bytes(inv, s, block)
    # Of a head: its keys and values in float32, and in three parts of bfloat16 for a product in float32.
    head = 4 * TILE_ARRAYS * s.rows * block
    for width, dtype in ((dim, s.dtype), (v_dim, s.value_dtype)):
        head += block * width * (14 if dtype == "float32" else 6)
    return int(2 * moving + scratch + head * min(s.kv_heads, LIVE_HEADS))


def _word_bytes(inv: Invocation, s: Sizes, block: int) -> int:
    if s.slot_rows == 1:
        return 2 * 4 * 8 * LANES
    widths = [(2 if has_pairs(array.dtype, s.slot_rows) else 4) * _lanes(array.shape[3]) for array in pages_of(inv)]
    return block * s.slot_rows * sum(widths)
