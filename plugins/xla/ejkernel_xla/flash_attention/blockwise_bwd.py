"""Flash attention backward, block by block, in plain JAX: one pass over the tiles, from the forward's out and lse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from jax import lax

from ejkernel_xla.flash_attention.tiling import Tiling, accumulator, tiling

Sums = dict[str, jax.Array]


def backward(arguments: Mapping[str, Any], q_block: int, kv_block: int) -> tuple[jax.Array, ...]:
    """The gradients that ``wrt`` names, in its order, each with its argument's shape and dtype."""
    wrt, d_out, lse = arguments["wrt"], arguments["d_out"], arguments["lse"]
    shift = _shift(arguments)
    asked = set(wrt) if shift is not None else set()
    if d_out is None:
        asked.discard("value")  # values reach the log-sum-exp nowhere
    # In a row that saw nothing every weight is exp(logit - inf) = 0, with no test in the tiles.
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)
    found: dict[str, jax.Array] = {}
    if "softmax_aux" in asked:
        found["softmax_aux"] = _sinks(arguments, lse, shift)
    tiled = tuple(name for name in wrt if name in asked - {"softmax_aux"})
    if tiled:
        found |= _tiled(tiling(arguments, q_block, kv_block), tiled, lse, shift)
    return tuple(_like(found.get(name), arguments[name]) for name in wrt)


@attrs.frozen(eq=False)
class _Rows:
    """What one block of queries brings to all its tiles."""

    i: Any
    query: jax.Array
    d_out: jax.Array | None
    lse: jax.Array
    shift: jax.Array


def _tiled(grid: Tiling, wrt: tuple[str, ...], lse: jax.Array, shift: Any) -> Sums:
    # The gradients of keys, values and bias are carried whole through both loops and updated in place, a block a tile;
    # the query's is finished with its block. So five products a tile are all there is, and nothing is visited twice.
    arguments = grid.arguments
    keys, values = grid.cut_keys(arguments["key"]), grid.cut_keys(arguments["value"])
    d_out = arguments["d_out"]
    rows = {
        "i": jnp.arange(grid.q_count, dtype=jnp.int32),
        "query": grid.queries(),
        "d_out": None if d_out is None else grid.cut_queries(d_out),
        "lse": grid.cut_rows(lse.astype(grid.dtype), jnp.inf),  # queries that only fill a block up weigh nothing
        "shift": grid.cut_rows(shift),
    }
    scale = float(arguments["softmax_scale"])

    def visit(whole: Sums, block: dict[str, Any]) -> tuple[Sums, jax.Array | None]:
        row = _Rows(**block)

        def tile(j: Any, sums: Sums, masked: bool) -> Sums:
            return _tile(grid, row, keys[j], values[j], j, masked, sums)

        start = dict(whole)
        if "query" in wrt:
            start["query"] = jnp.zeros(row.query.shape, grid.dtype)
        sums = grid.sweep(row.i, tile, start)
        d_query = sums.pop("query", None)
        if d_query is None:
            return sums, None
        return sums, (d_query * scale).astype(arguments["query"].dtype)

    shapes = {"key": keys.shape, "value": values.shape, "bias": grid.bias.shape if grid.bias is not None else ()}
    start = {name: jnp.zeros(shapes[name], grid.dtype) for name in wrt if name != "query"}
    whole, d_query = lax.scan(visit, start, rows)
    return _finished(grid, whole, d_query)


def _tile(grid: Tiling, row: _Rows, key: Any, value: Any, j: Any, masked: bool, sums: Sums) -> Sums:
    sums, i, prob = dict(sums), row.i, grid.arguments["dropout_prob"]
    logits, bent = grid.logits(row.query, key, i, j, masked)
    weights = jnp.exp(logits - row.lse)
    kept = grid.kept(i, j) if prob else None
    if "value" in sums and row.d_out is not None:
        dropped = weights if kept is None else jnp.where(kept, weights, 0)
        sums["value"] = sums["value"].at[j].add(grid.inner("bhrk,bhrd->bhkd", dropped, row.d_out))
    if not {"query", "key", "bias"} & set(sums):
        return sums
    if row.d_out is None:
        slopes = weights * -row.shift
    else:
        d_weights = grid.outer(row.d_out, value).reshape(logits.shape)
        if kept is not None:
            d_weights = jnp.where(kept, d_weights * (1 / (1 - prob)), 0)
        slopes = weights * (d_weights - row.shift)
    if "bias" in sums:
        # Summed over the axes along which the bias was broadcast, before it is stored.
        at, size = grid.place(sums["bias"], i, j)
        over = tuple(axis for axis in range(5) if size[axis] == 1 and slopes.shape[axis] != 1)
        piece = lax.dynamic_slice(sums["bias"], at, size) + slopes.sum(over, keepdims=True)
        sums["bias"] = lax.dynamic_update_slice(sums["bias"], piece, at)
    if bent is not None:
        slopes = slopes * (1 - bent * bent)
    if "query" in sums:
        sums["query"] = sums["query"] + grid.inner("bhrk,bhkd->bhrd", slopes, key)
    if "key" in sums:
        sums["key"] = sums["key"].at[j].add(grid.inner("bhrk,bhrd->bhkd", slopes, row.query))
    return sums


def _finished(grid: Tiling, whole: Sums, d_query: jax.Array | None) -> Sums:
    # The constant factors that no tile had to multiply by.
    arguments, found = grid.arguments, {}
    if d_query is not None:
        found["query"] = grid.join_queries(d_query)
    if "key" in whole:
        cap, scale = arguments["logits_soft_cap"], float(arguments["softmax_scale"])
        found["key"] = grid.join_keys(whole["key"]) * ((cap or 1.0) if grid.folded else scale)
    if "value" in whole:
        found["value"] = grid.join_keys(whole["value"]) * (1 / (1 - arguments["dropout_prob"]))
    if "bias" in whole:
        _, _, q_length, k_length = arguments["bias"].shape
        found["bias"] = whole["bias"][..., :q_length, :k_length].reshape(arguments["bias"].shape)
    return found


def _shift(arguments: Mapping[str, Any]) -> jax.Array | None:
    # The gradient of a logit is weight * (d_weight - shift). The softmax's own part of the shift, the sum of
    # weight * d_weight over the row, is out . d_out, with dropout too; the log-sum-exp's own gradient comes off it.
    d_out, d_lse, dtype = arguments["d_out"], arguments["d_lse"], accumulator(arguments)
    shift = None
    if d_out is not None:
        shift = (d_out.astype(dtype) * arguments["out"].astype(dtype)).sum(-1).transpose(0, 2, 1)
    if d_lse is not None:
        # Whatever arrives at a row whose log-sum-exp is -inf, and be it NaN, moves nothing.
        shift = (0 if shift is None else shift) - jnp.where(arguments["lse"] == -jnp.inf, 0, d_lse).astype(dtype)
    return shift


def _sinks(arguments: Mapping[str, Any], lse: jax.Array, shift: Any) -> jax.Array:
    # A sink is one more weight of every row, with no value and so no d_weight: one sink at a time, for memory's sake.
    sinks = arguments["softmax_aux"].astype(shift.dtype)
    each = lax.map(lambda sink: -(jnp.exp(sink[None, :, None] - lse) * shift).sum((0, 2)), sinks.T)
    return jnp.transpose(each)


def _like(gradient: jax.Array | None, argument: jax.Array) -> jax.Array:
    return jnp.zeros_like(argument) if gradient is None else gradient.astype(argument.dtype)
