"""``sample_tokens`` on NVIDIA GPUs, in Triton: one pass over the logits, and a search in a few chunks of them."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import jax
from attrs.validators import in_

from ejkernel_core import Invocation, Unsupported, hookimpl
from ejkernel_triton.launch._cards import multiprocessors
from ejkernel_triton.launch._requirements import require_card
from ejkernel_triton.sample_tokens import _launch


def rank(inv: Invocation) -> int:
    """Before plain JAX where there is a filter. Without one, plain JAX draws while it reads the logits once."""
    return 20 if any(inv[name] is not None for name in FILTERS) else 5


#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1
#: Where it runs, and how strongly it is preferred there.
PLATFORMS = {"gpu": rank}
#: XLA sees a custom call, which it cannot partition.
OPAQUE = ("gpu",)
COMPILERS = ("triton", "jax-triton")

DTYPES = ("float16", "bfloat16", "float32")
FILTERS = ("top_k", "top_p", "min_p")
#: The largest vocabulary. One program has the best words of all chunks of a row.
MOST_WORDS = 1 << 20
BLOCKS = (512, 1024, 2048, 4096, 8192)
TILES = (1024, 2048, 4096)
WARPS = (4, 8, 16)
#: The blocks that a multiprocessor has at least, where they are not the smallest.
PROGRAMS = 4
#: The chunks that a tile has at least, if it may: one for each word that a common top-k keeps.
LISTED = 64
#: From so many words on, the programs for a row are large.
MANY_WORDS = 1 << 15


@attrs.frozen
class Config:
    """How the words of a row are split, and the size of the programs that search."""

    #: The words of a program that reads all logits, or draws from all.
    block: int = attrs.field(default=4096, validator=in_(BLOCKS))
    #: The words that a program searches at once. For more there is a larger tile, and behind that a loop.
    tile: int = attrs.field(default=2048, validator=in_(TILES))
    #: The warps of a program that has all chunks of a row, or searches.
    num_warps: int = attrs.field(default=16, validator=in_(WARPS))


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """The largest blocks that fill the card, and tiles with as many chunks as most filters leave. After ``top_k`` these
    are few: with fewer warps, each step of the search waits for fewer.
    """
    check(inv)
    rows, words = inv["logits"].shape
    enough = PROGRAMS * multiprocessors(inv)
    fitting = [block for block in BLOCKS[:-1] if rows * _launch.blocks(words, block) >= enough]
    tile = next((tile for tile in TILES[1:] if tile >= LISTED * _launch.chunk_size(words)), TILES[-1])
    warps = 8 if inv["top_k"] is not None else 16
    return Config(max(fitting, default=BLOCKS[0]), tile, warps if words >= MANY_WORDS else 4)


@hookimpl
def config_space(inv: Invocation) -> Iterable[Config]:
    """The heuristic's; larger and smaller blocks, tiles and programs."""
    first = heuristic_cfg(inv)
    others = [
        *({"block": block} for block in (first.block // 2, 2 * first.block) if block in BLOCKS),
        *({"tile": tile} for tile in TILES if tile != first.tile),
        *({"num_warps": warps} for warps in WARPS if warps != first.num_warps),
    ]
    space = [first, *(attrs.evolve(first, **other) for other in others)]
    return [cfg for cfg in space if _excess(inv, cfg) is None]


@hookimpl
def check_cfg(inv: Invocation, cfg: Config) -> None:
    """Raise where a program has more chunks or words than registers."""
    check(inv)
    excess = _excess(inv, cfg)
    if excess is not None:
        raise Unsupported(f"{cfg.num_warps} warps have no registers for {excess}: use more")


def _excess(inv: Invocation, cfg: Config) -> str | None:
    """What the registers of a program have no room for, if there is anything."""
    words = inv["logits"].shape[1]
    if _launch.padded(_launch.chunks(words)) > _launch.MOST_OF_A_WARP * cfg.num_warps:
        return f"the chunks of {words} words"
    if cfg.tile > _launch.WORDS_OF_A_WARP * cfg.num_warps:
        return f"a tile of {cfg.tile} words"
    return None


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array, jax.Array | None]:
    """The tokens and, if they are needed, their log-probabilities."""
    return _launch.tokens(inv, cfg.block, cfg.tile, cfg.num_warps)


def check(inv: Invocation) -> None:
    """Raise where this card, these versions, or this call is not for Triton."""
    require_card(inv)
    logits = inv["logits"]
    if str(logits.dtype) not in DTYPES:
        raise Unsupported(f"the Triton kernel takes {', '.join(DTYPES)}; logits is {logits.dtype}")
    if logits.shape[1] > MOST_WORDS:
        raise Unsupported(f"the Triton kernel takes up to {MOST_WORDS} words; not {logits.shape[1]}")
