"""``flash_attention_bwd`` on Hopper, in Gluon."""

from __future__ import annotations

import os
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from attrs.validators import in_

from ejkernel_core import Invocation, Unsupported, hookimpl
from ejkernel_ops.flash_attention.geometry import block_count
from ejkernel_ops.flash_attention.positions import has_positions
from ejkernel_ops.flash_attention.statistics import LOG2E, BackwardRows, sinks_gradient
from ejkernel_triton.flash_attention import _problem
from ejkernel_triton.flash_attention_sm90._launch import constants, numbered, rows_of_threads, tiled, width
from ejkernel_triton.flash_attention_sm90._refusals import check
from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.launch._cards import capability, multiprocessors

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1


def rank(inv: Invocation) -> int:
    """Before the portable kernel. With positions it has not been measured."""
    return 45 if has_positions(inv) else 60


PLATFORMS = {"gpu": rank}
#: XLA sees a custom call, which it cannot partition.
OPAQUE = ("gpu",)
COMPILERS = ("triton", "jax-triton")
KERNEL = "ejkernel_triton.flash_attention_sm90._backward:sum_over_queries"
#: For head dims over 128.
WIDE_KERNEL = "ejkernel_triton.flash_attention_sm90._backward_wide:sum_over_queries_of_wide_heads"
#: The block of keys that a program keeps, by padded head dim.
K_BLOCKS = {64: 128, 128: 128, 256: 64}
#: Blocks of queries in shared memory at a time.
STAGES = 2
#: The parameter of the kernel to which it adds the gradient of queries.
D_QUERY_PLACE = 6
#: XLA's flags for results that are the same bits every time.
SAME_BITS = ("--xla_gpu_deterministic_ops", "--xla_gpu_exclude_nondeterministic_ops")
#: Blocks of queries that fit into registers, by padded head dim, the best first.
Q_BLOCKS = {64: (128, 64), 128: (64,), 256: (64,)}


@attrs.frozen
class Config:
    """The size of the blocks of queries."""

    q_block: int = attrs.field(default=64, validator=in_((64, 128)))


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """The best measured configuration for the head dim."""
    return config_space(inv)[0]


@hookimpl
def config_space(inv: Invocation) -> list[Config]:
    """The blocks that fit into registers, of which every feature but causality takes some."""
    check(inv)
    if "query" in inv["wrt"] and _is_xla_deterministic():
        raise Unsupported(
            "the Gluon kernels sum the gradient of queries in an order that differs from run to run, and XLA_FLAGS "
            "asks for deterministic results: flash_attention_bwd.triton has them"
        )
    if inv["d_out"] is None:
        raise Unsupported("the Gluon kernels take a gradient of the output, not of the log-sum-exp alone")
    limited = ("sliding_window", "logits_soft_cap", "cum_seqlens_q", "q_segment_ids", "q_start")
    features = [inv[name] for name in limited]
    sizes = Q_BLOCKS[width(inv["query"].shape[3])]
    has_features = any(feature is not None for feature in features)
    return [Config(q_block) for q_block in (sizes[-1:] if has_features else sizes)]


@hookimpl
def check_cfg(inv: Invocation, cfg: Config) -> None:
    """Raise for a block that does not fit into registers."""
    if cfg not in (space := config_space(inv)):
        raise Unsupported(f"{cfg} does not fit into registers; these do: {space}")


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array, ...]:
    """The gradients that ``wrt`` names, in its order."""
    wrt, rows = inv["wrt"], _problem.backward_rows(inv)
    gradients = {}
    if "softmax_aux" in wrt:
        gradients["softmax_aux"] = sinks_gradient(inv["softmax_aux"], rows.lse, rows.delta, base2=True)
    if not {"key", "value", "query"}.isdisjoint(wrt):
        gradients |= zip(("key", "value", "query"), _over_queries(inv, rows, cfg), strict=False)
    return tuple(gradients[name].astype(inv[name].dtype) for name in wrt)


def _is_xla_deterministic() -> bool:
    """Whether the flags in the environment, of which the last counts, tell XLA to give the same bits every time."""
    flags = (flag.partition("=") for flag in os.environ.get("XLA_FLAGS", "").split())
    values = {name: value.lower() in ("", "1", "true") for name, _, value in flags}
    return any(values.get(name, False) for name in SAME_BITS)


def _over_queries(inv: Invocation, rows: BackwardRows, cfg: Config) -> tuple[jax.Array, ...]:
    from ejkernel_triton.flash_attention_sm90._ranges import query_ranges
    from ejkernel_triton.flash_attention_sm90._schedule import schedule

    query, key, value = inv["query"], inv["key"], inv["value"]
    batch, q_length, heads, _ = query.shape
    _, k_length, kv_heads, _ = key.shape
    wide = width(query.shape[3])
    has_d_query = "query" in inv["wrt"]
    padded = cfg.q_block * block_count(q_length, cfg.q_block)
    # A row of 32 numbers for each thread.
    d_query_shape = (batch * heads * padded * wide // 32, 32)

    def per_query(x: jax.Array, fill: float) -> Any:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, padded - q_length)), constant_values=fill)
        return numbered(x.reshape(batch * heads, padded), cfg.q_block)

    ranges, steps = query_ranges(inv, K_BLOCKS[wide], cfg.q_block)
    # The bytes that each block of keys reads and writes: queries, d_out, and the gradient of queries in float32.
    row_bytes = q_length * (heads // kv_heads) * wide * (2 * query.dtype.itemsize + 4)
    tiles = schedule(batch * kv_heads, steps, row_bytes, count=multiprocessors(inv))
    arrays = (
        tiled(query, cfg.q_block, wide),
        *(tiled(x, 64, wide) for x in (key, value)),
        tiled(rows.d_out, cfg.q_block, wide),
        # Padding has no weights.
        lse := per_query(_bounded_lse(inv, rows.lse), jnp.inf),
        per_query(rows.delta, 0.0),
        rows_of_threads(jnp.zeros(d_query_shape, jnp.float32)) if has_d_query else lse,
        *(jnp.asarray(tiles), ranges),
        *_problem.column_arrays(inv),
        *(inv["kv_segment_ids"], inv["q_segment_ids"]),
    )
    left, right = _problem.sides(inv)
    early = {} if wide > 128 else {"EARLY_LOGITS": has_d_query and _begins_logits_early(inv)}
    d_key, d_value, *d_query = _jax_triton.call(
        WIDE_KERNEL if wide > 128 else KERNEL,
        _problem.operands(inv, arrays),
        (
            jax.ShapeDtypeStruct(key.shape, key.dtype),
            jax.ShapeDtypeStruct(value.shape, value.dtype),
            *([jax.ShapeDtypeStruct(d_query_shape, jnp.float32)] if has_d_query else []),
        ),
        scalars=(
            *(q_length, k_length, tiles.shape[1]),
            ranges[0].size if ranges.shape[0] > 1 else 0,
        ),
        grid=(tiles.shape[0],),
        # A query that sees keys to its left is to the right of these keys.
        constants={
            **constants(inv),
            "LEFT": right,
            "RIGHT": left,
            "Q_BLOCK": cfg.q_block,
            "STAGES": STAGES,
            "D_QUERY": has_d_query,
            **early,
        },
        num_warps=4,
        num_stages=1,
        compute_capability=capability(inv),
        name="flash_attention_bwd_gluon_sm90",
        aliases={D_QUERY_PLACE: 2} if has_d_query else None,
    )
    return d_key, d_value, *(in_order(x, query.shape, cfg.q_block) * inv["softmax_scale"] for x in d_query)


def _begins_logits_early(inv: Invocation) -> bool:
    """Whether the logits of the next step are computed early: with a soft cap, whose arithmetic delays the products of
    a step, that is worth the registers. Measured with Triton 3.6, where a step reloads 10 spilled registers, as with
    3.8; with 3.9 it would reload 50, and was not measured.
    """
    capped = inv["logits_soft_cap"] is not None
    return capped and width(inv["query"].shape[3]) == 128 and _jax_triton.triton_version() < (3, 9)


def _bounded_lse(inv: Invocation, lse: jax.Array) -> jax.Array:
    """The lse in base 2, no lower than masked logits: with a soft cap the kernels mask by a finite number, not by -inf,
    and a row that sees nothing but sinks may have a lower lse.
    """
    cap = inv["logits_soft_cap"]
    return lse if cap is None else jnp.maximum(lse, -2 * cap * LOG2E)


def in_order(d_query: jax.Array, shape: tuple[int, ...], q_block: int) -> jax.Array:
    """The gradient of queries as (batch, length, heads, dim), from the layout in which threads write it: tiles of 64
    queries and dims, with 32 numbers in a row from each thread.
    """
    batch, length, heads, dim = shape
    wide = width(dim)
    # Batch, head, block, rows and columns of tiles; warp, row and column of a thread; its groups of 8, rows, columns.
    tiles = d_query.reshape(batch, heads, -1, q_block // 64, wide // 64, 4, 8, 4, 8, 2, 2)
    tiles = tiles.transpose(0, 2, 3, 5, 9, 6, 1, 4, 8, 7, 10)
    return tiles.reshape(batch, -1, heads, wide)[:, :length, :, :dim]
