"""The tiles of the loss on Hopper, and what its kernels refuse."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import jax.numpy as jnp
from attrs.validators import in_

from ejkernel_core import Invocation, Unsupported, hookimpl
from ejkernel_ops.fused_linear_cross_entropy import chunks
from ejkernel_ops.fused_linear_cross_entropy.definition import rows, vocab
from ejkernel_triton.fused_linear_cross_entropy import _tiling
from ejkernel_triton.gluon.requirements import DTYPES, ELEMENTS, require_hopper

#: The rows of a tile.
ROWS = 128
#: By the words of a tile: how many stages fit into shared memory, the best first.
STAGES = {256: (4, 3), 128: (6, 4)}
BANDS = (32, 16, 8, 4)
#: The bytes of hidden states of a band that stay in the L2 beside the words that are read: a sixth of it.
BAND_BYTES = 1 << 23
#: The bytes of a logit where its exponential is stored.
STORED_BYTES = 2


@attrs.frozen
class Config:
    """The words of a tile, the stages in shared memory, and the tiles of rows of a band."""

    columns: int = attrs.field(default=256, validator=in_((128, 256)))
    stages: int = attrs.field(default=4, validator=in_((3, 4, 6)))
    band: int = attrs.field(default=16, validator=in_((1, 2, 4, 8, 16, 32, 64)))


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """Wide tiles, and as many rows in a band as stay in the L2: each band reads the whole weight."""
    check(inv)
    columns = 256 if vocab(inv) > 128 else 128
    of_tile = 2 * ROWS * inv["hidden"].shape[-1]
    band = next((band for band in BANDS if band * of_tile <= BAND_BYTES), BANDS[-1])
    return Config(columns, STAGES[columns][0], band)


@hookimpl
def config_space(inv: Invocation) -> Iterable[Config]:
    """The heuristic's tile with all stages and bands, and the other one with its best."""
    first = heuristic_cfg(inv)
    stages = [attrs.evolve(first, stages=count) for count in STAGES[first.columns]]
    bands = [attrs.evolve(first, band=band) for band in BANDS]
    other = 384 - first.columns
    return list(dict.fromkeys([first, *stages, *bands, Config(other, STAGES[other][0], first.band)]))


@hookimpl
def check_cfg(inv: Invocation, cfg: Config) -> None:
    """The stages have to fit into shared memory."""
    check(inv)
    if cfg.stages > max(STAGES[cfg.columns]):
        raise Unsupported(f"{cfg.stages} stages of {cfg.columns} words do not fit into shared memory: take fewer")


def rows_of_chunk(inv: Invocation) -> int:
    """The most rows whose exponentials are stored at a time: whole tiles, as many as the memory allows."""
    return max(chunks.MEMORY_ELSEWHERE // (STORED_BYTES * vocab(inv)) // ROWS, 1) * ROWS


def has_own_gradients(inv: Invocation) -> bool:
    """Whether gradients are made of exponentials. These have too few digits for the derivative of a cap, and fewer than
    float16.
    """
    return inv["hidden"].dtype == jnp.bfloat16 and inv["logits_soft_cap"] is None


def check(inv: Invocation) -> None:
    """Raise for a card, versions or arrays that the kernels do not support."""
    _tiling.check(inv)
    require_hopper(inv)
    dtype = str(inv["hidden"].dtype)
    if dtype not in DTYPES:
        raise Unsupported(f"the Gluon kernels take {' and '.join(DTYPES)}; hidden is {dtype}")
    # What the copy engine reads begins at a multiple of 16 bytes in each row.
    sizes = {"hidden_dim": inv["hidden"].shape[-1]} | ({} if inv["transpose_weight"] else {"vocab": vocab(inv)})
    for name, size in sizes.items():
        if size % ELEMENTS:
            hint = "" if name == "hidden_dim" else ", unless the weight is (vocab, hidden_dim)"
            raise Unsupported(f"the Gluon kernels take a {name} that is a multiple of {ELEMENTS}{hint}; not {size}")
    if not rows(inv):
        raise Unsupported("the Gluon kernels take no arrays without rows")
