"""The gradients of rows whose logits are so far from 0 that rounding the lse loses the sum of their exponentials.

A backward computes the weights of a row from its lse, ``exp(logit - lse)``. With a bias of -1e9 for every key of a row,
as masks are often written, the lse is -1e9 plus the log of a sum. In float32 the log is lost: every weight would be 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_core import Invocation

from .dense import attend
from .statistics import statistics_dtype
from .tokens import Tokens, tokens

Gradients = tuple[jax.Array, ...]

#: Beyond it, rounding a float32 lse changes all weights of its row by a relative error of more than 2 ** -14.
FAR = 2.0**10
#: The number of scores that are in memory at a time.
SCORES = 2**23


def near_and_far(inv: Invocation, near: Callable[[Invocation], Gradients]) -> Gradients:
    """The gradients that ``wrt`` names: ``near`` computes those of all rows but the far ones.

    Without a bias no row is far. With one, this is decided at run time, and JAX differentiates the definition for far
    rows, some queries at a time.
    """
    has_no_far_rows = inv["bias"] is None or (inv["d_out"] is None and inv["d_lse"] is None)
    if has_no_far_rows or 0 in (*inv["query"].shape, *inv["key"].shape):
        return near(inv)
    lse = inv["lse"]
    is_far = (jnp.abs(lse) > FAR) & jnp.isfinite(lse)
    # `near` gets a far row as one that sees nothing, which adds 0 to every gradient.
    gradients = tuple(near(inv.with_arrays({"lse": jnp.where(is_far, -jnp.inf, lse)})))
    total: Gradients = jax.lax.cond(
        is_far.any(), lambda: _sums(gradients, _far_gradients(inv, is_far)), lambda: gradients
    )
    return total


def _sums(near: Gradients, far: Gradients) -> Gradients:
    return tuple((f + n.astype(f.dtype)).astype(n.dtype) for n, f in zip(near, far, strict=True))


def _far_gradients(arguments: Mapping[str, Any], is_far: jax.Array) -> Gradients:
    """The contribution of far rows to the gradients, in the dtype of sums."""
    dtype, wrt = statistics_dtype(arguments), arguments["wrt"]

    def forward(*primals: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _row_by_row({**arguments, **dict(zip(wrt, primals, strict=True))})

    results, pull_back = jax.vjp(forward, *(arguments[name].astype(dtype) for name in wrt))
    masks = is_far.transpose(0, 2, 1)[..., None], is_far
    cotangents = (
        jnp.zeros_like(result) if cotangent is None else jnp.where(mask, cotangent, 0).astype(result.dtype)
        for result, cotangent, mask in zip(results, (arguments["d_out"], arguments["d_lse"]), masks, strict=True)
    )
    return tuple(pull_back(tuple(cotangents)))


def _row_by_row(arguments: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
    """`dense_attention`, with memory linear in the length, also for its gradients."""
    coordinates, (batch, length, heads, _) = tokens(arguments), arguments["query"].shape
    arrays = {name: arguments[name] for name in ("bias", "attention_mask") if arguments[name] is not None}
    rows = {name: jnp.moveaxis(array, 2, 0) for name, array in arrays.items() if array.shape[2] > 1}
    rows["query"] = arguments["query"].swapaxes(0, 1)
    positions = jnp.asarray(coordinates.q_position).T, tuple(jnp.asarray(q_ids).T for q_ids, _ in coordinates.groups)

    @jax.checkpoint
    def attend_row(row: Any) -> tuple[jax.Array, jax.Array]:
        arrays, (position, ids), index = row
        arrays = {name: array[:, None] if name == "query" else array[:, :, None] for name, array in arrays.items()}
        groups = tuple((q[:, None], k) for q, (_, k) in zip(ids, coordinates.groups, strict=True))
        out, lse = attend(
            {**arguments, **arrays}, Tokens(position[:, None], coordinates.k_position, groups), index[None]
        )
        return out[:, 0], lse[:, :, 0]

    batch_size = max(1, min(length, SCORES // (batch * heads * arguments["key"].shape[1])))
    index = jnp.arange(length, dtype=jnp.uint32)
    out, lse = jax.lax.map(attend_row, (rows, positions, index), batch_size=batch_size)
    return out.swapaxes(0, 1), jnp.moveaxis(lse, 0, 2)
