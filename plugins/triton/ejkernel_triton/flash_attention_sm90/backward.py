"""``flash_attention_bwd`` on Hopper, in Gluon."""

from __future__ import annotations

import os
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from attrs.validators import in_, instance_of

from ejkernel_core import Invocation, Unsupported, hookimpl
from ejkernel_triton.flash_attention import _problem, _tuning
from ejkernel_triton.flash_attention._rows import LOG2E, Rows, of_sinks
from ejkernel_triton.flash_attention.backward import Pass, of_queries
from ejkernel_triton.flash_attention_sm90._launch import constants, numbered, rows_of_threads, tiled, width
from ejkernel_triton.flash_attention_sm90._refusals import check
from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.launch._cards import capability

#: Of the kernel and of its Config: what was measured with another one is measured again.
VERSION = 1
PLATFORMS = {"gpu": 60}
COMPILERS = ("triton", "jax-triton")
#: Keys that a program keeps, by padded head dim.
K_BLOCKS = {64: 128, 128: 128, 256: 64}
#: Blocks of queries in shared memory at a time.
STAGES = 2
#: Which of the kernel's arrays it adds the gradient of queries to.
D_QUERY_PLACE = 6
SAME_BITS = ("--xla_gpu_deterministic_ops", "--xla_gpu_exclude_nondeterministic_ops")
#: Queries at a time, by padded head dim, the best first: what registers hold.
Q_BLOCKS = {64: (128, 64), 128: (64,), 256: (64,)}


@attrs.frozen
class Config:
    """How many queries at a time, and how their gradient is summed up."""

    q_block: int = attrs.field(default=64, validator=in_((64, 128)))
    #: In memory, in an order that is another every time. Without, a pass of the portable kernels computes it: the same
    #: bits every time, by seven products instead of five. Nor is it done where XLA is told to be deterministic.
    atomics: bool = attrs.field(default=True, validator=instance_of(bool))


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """The best of what was measured for such heads."""
    return config_space(inv)[0]


@hookimpl
def config_space(inv: Invocation) -> list[Config]:
    """What fits into registers, of which all but causality takes some."""
    check(inv)
    if inv["d_out"] is None:
        raise Unsupported("the Gluon kernels take a gradient of the output, not of the log-sum-exp alone")
    more = [inv[name] for name in ("sliding_window", "logits_soft_cap", "cum_seqlens_q", "q_segment_ids")]
    fitting = Q_BLOCKS[width(inv["query"].shape[3])]
    q_blocks = fitting if all(given is None for given in more) else fitting[-1:]
    return [Config(q_block, atomics=not _xla_is_deterministic()) for q_block in q_blocks]


@hookimpl
def check_cfg(inv: Invocation, cfg: Config) -> None:
    """Raise where it does not fit into registers."""
    offered = config_space(inv)
    if cfg.q_block not in [fitting.q_block for fitting in offered]:
        raise Unsupported(f"{cfg} does not fit into registers; these do: {offered}")


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array, ...]:
    """The gradients that ``wrt`` names, in its order."""
    # A configuration of a caller's, or a remembered one, knows nothing of XLA's flags.
    cfg = attrs.evolve(cfg, atomics=cfg.atomics and not _xla_is_deterministic())
    wrt, rows = inv["wrt"], Rows.of(inv)
    found = {}
    if "softmax_aux" in wrt:
        found["softmax_aux"] = of_sinks(inv, rows)
    if "key" in wrt or "value" in wrt or ("query" in wrt and cfg.atomics):
        found |= zip(("key", "value", "query"), _over_queries(inv, rows, cfg), strict=False)
    if "query" in wrt and not cfg.atomics:
        found["query"] = of_queries(inv, rows, Pass(*_tuning.queries(inv)[0]))
    return tuple(found[name].astype(inv[name].dtype) for name in wrt)


def _xla_is_deterministic() -> bool:
    """By the flags in the environment that XLA reads, of which the last counts."""
    asked = (flag.partition("=") for flag in os.environ.get("XLA_FLAGS", "").split())
    flags = {name: value.lower() in ("", "1", "true") for name, _, value in asked}
    return any(flags.get(name, False) for name in SAME_BITS)


def _over_queries(inv: Invocation, rows: Rows, cfg: Config) -> tuple[jax.Array, ...]:
    with _jax_triton.importing():
        from ejkernel_triton.flash_attention_sm90._backward import sum_over_queries
        from ejkernel_triton.flash_attention_sm90._backward_wide import sum_over_queries_of_wide_heads
    from ejkernel_triton.flash_attention_sm90._schedule import programs, schedule
    from ejkernel_triton.flash_attention_sm90._sight import of_keys

    query, key, value = inv["query"], inv["key"], inv["value"]
    batch, q_length, heads, _ = query.shape
    _, k_length, kv_heads, _ = key.shape
    wide = width(query.shape[3])
    adds = "query" in inv["wrt"] and cfg.atomics
    padded = cfg.q_block * _problem.blocks(q_length, cfg.q_block)
    # For each thread that adds to it a row.
    d_query_shape = (batch * heads * padded * wide // 32, 32)

    def numbers(x: jax.Array, fill: float) -> Any:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, padded - q_length)), constant_values=fill)
        return numbered(x.reshape(batch * heads, padded), cfg.q_block)

    sight, steps = of_keys(inv, K_BLOCKS[wide], cfg.q_block)
    # What goes by each block: queries, gradients of the output, and their own in float32.
    row_bytes = q_length * (heads // kv_heads) * wide * (2 * query.dtype.itemsize + 4)
    dealt = schedule(batch * kv_heads, steps, row_bytes, count=programs(inv.device_kind))
    arrays = (
        tiled(query, cfg.q_block, wide),
        *(tiled(x, 64, wide) for x in (key, value)),
        tiled(rows.d_out, cfg.q_block, wide),
        # What is no query has no weight.
        tops := numbers(_within_reach(inv, rows.top), jnp.inf),
        numbers(rows.shift, 0.0),
        rows_of_threads(jnp.zeros(d_query_shape, jnp.float32)) if adds else tops,
        *(jnp.asarray(dealt), sight),
        *(_problem.intervals(inv)[2:] if inv["cum_seqlens_q"] is not None else (None, None)),
        *(inv["kv_segment_ids"], inv["q_segment_ids"]),
    )
    before, after = _problem.sides(inv)
    own = {} if wide > 128 else {"AHEAD": adds and _begins_logits_early(inv)}
    d_key, d_value, *d_query = _jax_triton.call(
        sum_over_queries_of_wide_heads if wide > 128 else sum_over_queries,
        _problem.operands(inv, arrays),
        (
            jax.ShapeDtypeStruct(key.shape, key.dtype),
            jax.ShapeDtypeStruct(value.shape, value.dtype),
            *([jax.ShapeDtypeStruct(d_query_shape, jnp.float32)] if adds else []),
        ),
        scalars=(
            *(q_length, k_length, dealt.shape[1]),
            sight[0].size if sight.shape[0] > 1 else 0,
        ),
        grid=(dealt.shape[0],),
        # A key is seen from behind as far as queries see before them.
        constants={
            **constants(inv),
            "BEFORE": after,
            "AFTER": before,
            "Q_BLOCK": cfg.q_block,
            "STAGES": STAGES,
            "D_QUERY": adds,
            **own,
        },
        num_warps=4,
        num_stages=1,
        compute_capability=capability(inv),
        name="flash_attention_bwd_gluon_sm90",
        updated={D_QUERY_PLACE: 2} if adds else None,
    )
    return d_key, d_value, *(in_order(x, query.shape, cfg.q_block) * inv["softmax_scale"] for x in d_query)


def _begins_logits_early(inv: Invocation) -> bool:
    """The arithmetic of a cap keeps a step from its products for longer: there they are worth their registers. That was
    measured with Triton 3.6, where a step reads back 10 numbers, as with 3.8; with 3.9, not measured, it would be 50.
    """
    capped = inv["logits_soft_cap"] is not None
    return capped and width(inv["query"].shape[3]) == 128 and _jax_triton.version_of_triton() < (3, 9)


def _within_reach(inv: Invocation, top: jax.Array) -> jax.Array:
    """With a soft cap the kernels mask logits by a number, not by -inf: what a row that sees nothing but sinks has for
    its log-sum-exp may be no less.
    """
    cap = inv["logits_soft_cap"]
    return top if cap is None else jnp.maximum(top, -2 * cap * LOG2E)


def in_order(found: jax.Array, shape: tuple[int, ...], q_block: int) -> jax.Array:
    """The gradient of queries as (batch, length, heads, dim), from how threads leave it: tiles of 64 queries and dims,
    of which each thread has 32 numbers in a row.
    """
    batch, length, heads, dim = shape
    wide = width(dim)
    # Batch, head, block, rows and columns of tiles; then warp, row, column of a thread, and its eights, rows, columns.
    tiles = found.reshape(batch, heads, -1, q_block // 64, wide // 64, 4, 8, 4, 8, 2, 2)
    tiles = tiles.transpose(0, 2, 3, 5, 9, 6, 1, 4, 8, 7, 10)
    return tiles.reshape(batch, -1, heads, wide)[:, :length, :, :dim]
