"""``flash_attention`` on Hopper, in Gluon."""

from __future__ import annotations

import attrs
import jax
import jax.numpy as jnp
from attrs.validators import in_

from ejkernel_core import Invocation, Unsupported, hookimpl
from ejkernel_ops.flash_attention.positions import has_positions
from ejkernel_triton.flash_attention import _problem
from ejkernel_triton.flash_attention_sm90._launch import constants, tiled, width
from ejkernel_triton.flash_attention_sm90._refusals import check
from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.launch._cards import capability, multiprocessors

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1
#: With so few queries the large tiles of these kernels are almost empty, and the portable kernels are faster.
FEW_QUERIES = 16


def rank(inv: Invocation) -> int:
    """Before the portable kernel, unless there are few queries. With positions it has not been measured."""
    return 60 if inv["query"].shape[1] > FEW_QUERIES and not has_positions(inv) else 45


#: Where it runs, and how strongly it is preferred there.
PLATFORMS = {"gpu": rank}
#: XLA sees a custom call, which it cannot partition.
OPAQUE = ("gpu",)
COMPILERS = ("triton", "jax-triton")
KERNEL = "ejkernel_triton.flash_attention_sm90._forward:attend"

Q_BLOCK = 128
#: By padded head dim: the sizes of blocks of keys and how many of them are in shared memory at a time, the best first;
#: and the number of tiles of queries.
SHAPES = {64: ((128, 3), (128, 2), (64, 4)), 128: ((128, 2), (64, 4)), 256: ((64, 2),)}
TILES = {64: 2, 128: 2, 256: 1}


@attrs.frozen
class Config:
    """The size of the blocks of keys, and how many are fetched ahead."""

    k_block: int = attrs.field(default=128, validator=in_((64, 128)))
    #: Blocks of keys and values in shared memory at a time.
    stages: int = attrs.field(default=2, validator=in_((2, 3, 4)))


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """The best measured configuration for the head dim."""
    return config_space(inv)[0]


@hookimpl
def config_space(inv: Invocation) -> list[Config]:
    """The configurations that fit into registers and shared memory."""
    check(inv)
    return [Config(*shape) for shape in SHAPES[width(inv["query"].shape[3])]]


@hookimpl
def check_cfg(inv: Invocation, cfg: Config) -> None:
    """Raise for a configuration that does not fit."""
    if cfg not in (space := config_space(inv)):
        raise Unsupported(f"{cfg} does not fit; these do: {space}")


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array, jax.Array | None]:
    """The output and, if it is needed, the lse of every row."""
    from ejkernel_triton.flash_attention_sm90._ranges import key_ranges
    from ejkernel_triton.flash_attention_sm90._schedule import schedule

    query, key, sinks = inv["query"], inv["key"], inv["softmax_aux"]
    batch, q_length, heads, dim = query.shape
    ranges, steps = key_ranges(inv, Q_BLOCK, cfg.k_block)
    row_bytes = 2 * key.shape[1] * width(dim) * key.dtype.itemsize
    tiles = schedule(batch * heads, steps, row_bytes, heads // key.shape[2], multiprocessors(inv))
    arrays = (
        tiled(query, 64, width(dim)),
        *(tiled(x, cfg.k_block, width(dim)) for x in (key, inv["value"])),
        *(jnp.asarray(tiles), ranges),
        *_problem.row_arrays(inv),
        *(inv["q_segment_ids"], inv["kv_segment_ids"], sinks),
    )
    left, right = _problem.sides(inv)
    out, lse = _jax_triton.call(
        KERNEL,
        _problem.operands(inv, arrays),
        (
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct((batch, heads, q_length) if inv.needs("lse") else (1,), jnp.float32),
        ),
        scalars=(q_length, key.shape[1], tiles.shape[1], ranges[0].size if ranges.shape[0] > 1 else 0),
        grid=(tiles.shape[0],),
        constants={
            **constants(inv),
            "LSE": inv.needs("lse"),
            "LEFT": left,
            "RIGHT": right,
            "SINKS": 0 if sinks is None else sinks.shape[1],
            "SINK_WIDTH": 1 if sinks is None else 1 << (sinks.shape[1] - 1).bit_length(),
            "K_BLOCK": cfg.k_block,
            "STAGES": cfg.stages,
            "TILES": TILES[width(dim)],
        },
        num_warps=4,
        num_stages=1,
        compute_capability=capability(inv),
        name="flash_attention_gluon_sm90",
    )
    return out, lse if inv.needs("lse") else None
