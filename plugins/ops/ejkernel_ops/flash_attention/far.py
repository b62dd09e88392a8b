"""The gradients of rows whose logits are so far from 0 that their log-sum-exp tells nothing of their sum.

A backward makes a row's weights of its log-sum-exp, ``exp(logit - lse)``. A bias of -1e9 for every key a row sees, as
masks are often written, makes that -1e9 plus the log of a sum, and in float32 the sum is lost: every weight would be 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_core import Invocation

from .dense import attend, statistics_dtype
from .tokens import Tokens, tokens

Gradients = tuple[jax.Array, ...]

#: Beyond it, what rounding a float32 log-sum-exp does to all weights of its row is more than 2 ** -14 of them.
FAR = 2.0**10
#: Scores that are there at a time.
SCORES = 2**23


def near_and_far(inv: Invocation, near: Callable[[Invocation], Gradients]) -> Gradients:
    """The gradients that ``wrt`` names: ``near`` computes those of all rows but the far ones, which are made anew.

    Without a bias nothing is done but ``near``. With one, which rows are far is seen at run time, and only where there
    are any the definition is computed for them, some queries at a time.
    """
    absent = inv["bias"] is None or (inv["d_out"] is None and inv["d_lse"] is None)
    if absent or 0 in (*inv["query"].shape, *inv["key"].shape):
        return near(inv)
    lse = inv["lse"]
    far = (jnp.abs(lse) > FAR) & jnp.isfinite(lse)
    # For `near` a far row is one that saw nothing: it adds 0 to every gradient.
    gradients = tuple(near(inv.with_arrays({"lse": jnp.where(far, -jnp.inf, lse)})))
    whole: Gradients = jax.lax.cond(far.any(), lambda: _sums(gradients, _far(inv, far)), lambda: gradients)
    return whole


def _sums(gradients: Gradients, more: Gradients) -> Gradients:
    return tuple((m + g.astype(m.dtype)).astype(g.dtype) for g, m in zip(gradients, more, strict=True))


def _far(arguments: Mapping[str, Any], far: jax.Array) -> Gradients:
    """The far rows' part of the gradients, in the dtype of sums."""
    dtype, wrt = statistics_dtype(arguments), arguments["wrt"]

    def forward(*moving: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _row_by_row({**arguments, **dict(zip(wrt, moving, strict=True))})

    results, pull_back = jax.vjp(forward, *(arguments[name].astype(dtype) for name in wrt))
    places = far.transpose(0, 2, 1)[..., None], far
    cotangents = (
        jnp.zeros_like(result) if moved is None else jnp.where(place, moved, 0).astype(result.dtype)
        for result, moved, place in zip(results, (arguments["d_out"], arguments["d_lse"]), places, strict=True)
    )
    return tuple(pull_back(tuple(cotangents)))


def _row_by_row(arguments: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
    """`dense_attention`, with memory linear in the length: also where it is differentiated."""
    where, (batch, length, heads, _) = tokens(arguments), arguments["query"].shape
    planes = {name: arguments[name] for name in ("bias", "attention_mask") if arguments[name] is not None}
    rows = {name: jnp.moveaxis(plane, 2, 0) for name, plane in planes.items() if plane.shape[2] > 1}
    rows["query"] = arguments["query"].swapaxes(0, 1)
    positions = jnp.asarray(where.q_position).T, tuple(jnp.asarray(q_ids).T for q_ids, _ in where.groups)

    @jax.checkpoint
    def one(row: Any) -> tuple[jax.Array, jax.Array]:
        own, (position, ids), index = row
        own = {name: array[:, None] if name == "query" else array[:, :, None] for name, array in own.items()}
        groups = tuple((q[:, None], k) for q, (_, k) in zip(ids, where.groups, strict=True))
        out, lse = attend({**arguments, **own}, Tokens(position[:, None], where.k_position, groups), index[None])
        return out[:, 0], lse[:, :, 0]

    at_once = max(1, min(length, SCORES // (batch * heads * arguments["key"].shape[1])))
    index = jnp.arange(length, dtype=jnp.uint32)
    out, lse = jax.lax.map(one, (rows, positions, index), batch_size=at_once)
    return out.swapaxes(0, 1), jnp.moveaxis(lse, 0, 2)
