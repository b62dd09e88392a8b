"""Flash attention backward, block by block, in plain JAX: one pass over the tiles, from out and lse of the forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from jax import lax

from ejkernel_ops.flash_attention.statistics import delta, sinks_gradient, weights_lse
from ejkernel_xla.flash_attention.tiling import Tiling, tiling

Sums = dict[str, jax.Array]


def backward(arguments: Mapping[str, Any], q_block: int, kv_block: int) -> tuple[jax.Array, ...]:
    """The gradients that ``wrt`` names, in its order, each with its argument's shape and dtype."""
    wrt, lse, row_delta = arguments["wrt"], weights_lse(arguments["lse"]), delta(arguments)
    gradients: Sums = {}
    if "softmax_aux" in wrt:
        gradients["softmax_aux"] = sinks_gradient(arguments["softmax_aux"], lse, row_delta)
    tiled = _differentiable(arguments)
    if tiled:
        gradients |= _tiled(tiling(arguments, q_block, kv_block), tiled, lse, row_delta)
    return tuple(_like(gradients.get(name), arguments[name]) for name in wrt)


def _differentiable(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """The arguments whose gradients are not 0 and are computed tile by tile."""
    if arguments["d_out"] is None and arguments["d_lse"] is None:
        return ()
    # The lse does not depend on values.
    constant = ("softmax_aux",) if arguments["d_out"] is not None else ("softmax_aux", "value")
    return tuple(name for name in arguments["wrt"] if name not in constant)


@attrs.frozen(eq=False)
class _Rows:
    """What all tiles of one block of queries read."""

    i: Any
    query: jax.Array
    d_out: jax.Array | None
    lse: jax.Array
    delta: jax.Array


def _tiled(grid: Tiling, wrt: tuple[str, ...], lse: jax.Array, row_delta: jax.Array) -> Sums:
    # The gradients of keys, values and bias are carried through both loops as whole arrays, and each tile updates a
    # block of them in place; that of queries is finished with its block. So each pair of blocks is visited once, with
    # five products.
    arguments = grid.arguments
    keys, values = grid.key_blocks(arguments["key"]), grid.key_blocks(arguments["value"])
    d_out = arguments["d_out"]
    rows = {
        "i": jnp.arange(grid.q_count, dtype=jnp.int32),
        "query": grid.queries(),
        "d_out": None if d_out is None else grid.split_queries(d_out),
        "lse": grid.split_rows(lse.astype(grid.dtype), jnp.inf),  # padding has no weights
        "delta": grid.split_rows(row_delta),
    }
    scale = float(arguments["softmax_scale"])

    def visit(carry: Sums, block: dict[str, Any]) -> tuple[Sums, jax.Array | None]:
        row = _Rows(**block)

        def tile(j: Any, sums: Sums, is_masked: bool) -> Sums:
            return _tile(grid, row, keys(j, is_masked), values(j, is_masked), j, is_masked, sums)

        start = dict(carry)
        if "query" in wrt:
            start["query"] = jnp.zeros(row.query.shape, grid.dtype)
        sums = grid.loop(row.i, tile, start)
        d_query = sums.pop("query", None)
        if d_query is None:
            return sums, None
        return sums, (d_query * scale).astype(arguments["query"].dtype)

    shapes = {
        "key": grid.shape_of_blocks(arguments["key"]),
        "value": grid.shape_of_blocks(arguments["value"]),
        "bias": grid.bias.shape if grid.bias is not None else (),
    }
    start = {name: jnp.zeros(shapes[name], grid.dtype) for name in wrt if name != "query"}
    sums, d_query = lax.scan(visit, start, rows)
    return _gradients(grid, sums, d_query)


def _tile(grid: Tiling, row: _Rows, key: Any, value: Any, j: Any, is_masked: bool, sums: Sums) -> Sums:
    sums, i, prob = dict(sums), row.i, grid.arguments["dropout_prob"]
    logits, tanh = grid.logits(row.query, key, i, j, is_masked)
    weights = jnp.exp(logits - row.lse)
    keep_mask = grid.keep_mask(i, j) if prob else None
    if "value" in sums and row.d_out is not None:
        after_dropout = weights if keep_mask is None else jnp.where(keep_mask, weights, 0)
        sums["value"] = sums["value"].at[j].add(grid.weighted_sums("bhrk,bhrd->bhkd", after_dropout, row.d_out))
    if not {"query", "key", "bias"} & set(sums):
        return sums
    if row.d_out is None:
        d_logits = weights * -row.delta
    else:
        d_weights = grid.products(row.d_out, value).reshape(logits.shape)
        if keep_mask is not None:
            d_weights = jnp.where(keep_mask, d_weights * (1 / (1 - prob)), 0)
        d_logits = weights * (d_weights - row.delta)
    if "bias" in sums:
        # Summed over the axes along which the bias was broadcast, before it is stored.
        start, size = grid.place(sums["bias"], i, j)
        over = tuple(axis for axis in range(5) if size[axis] == 1 and d_logits.shape[axis] != 1)
        block = lax.dynamic_slice(sums["bias"], start, size) + d_logits.sum(over, keepdims=True)
        sums["bias"] = lax.dynamic_update_slice(sums["bias"], block, start)
    if tanh is not None:
        d_logits = d_logits * (1 - tanh * tanh)
    if "query" in sums:
        sums["query"] = sums["query"] + grid.weighted_sums("bhrk,bhkd->bhrd", d_logits, key)
    if "key" in sums:
        sums["key"] = sums["key"].at[j].add(grid.weighted_sums("bhrk,bhrd->bhkd", d_logits, row.query))
    return sums


def _gradients(grid: Tiling, sums: Sums, d_query: jax.Array | None) -> Sums:
    # Constant factors are applied here once, not in each tile.
    arguments, gradients = grid.arguments, {}
    if d_query is not None:
        gradients["query"] = grid.join_queries(d_query)
    if "key" in sums:
        cap, scale = arguments["logits_soft_cap"], float(arguments["softmax_scale"])
        gradients["key"] = grid.join_keys(sums["key"]) * ((cap or 1.0) if grid.has_scaled_queries else scale)
    if "value" in sums:
        gradients["value"] = grid.join_keys(sums["value"]) * (1 / (1 - arguments["dropout_prob"]))
    if "bias" in sums:
        _, _, q_length, k_length = arguments["bias"].shape
        gradients["bias"] = sums["bias"][..., :q_length, :k_length].reshape(arguments["bias"].shape)
    return gradients


def _like(gradient: jax.Array | None, argument: jax.Array) -> jax.Array:
    return jnp.zeros_like(argument) if gradient is None else gradient.astype(argument.dtype)
