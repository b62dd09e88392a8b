"""``moe_route`` in plain JAX, by its definition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

Arguments = Mapping[str, Any]
Results = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def forward(arguments: Arguments) -> Results:
    """The weights, the experts, their sizes and the order of the tokens."""
    logits = in_range(arguments["router_logits"])
    scores = scored(logits, arguments["score"])
    experts = best(chosen_from(scores, arguments), arguments["k"])
    weights = weighted(jnp.take_along_axis(scores, experts, -1), arguments)
    return weights, experts, *ordered(experts, logits.shape[-1])


def gradients(arguments: Arguments) -> tuple[jax.Array, ...]:
    """The gradients of the arrays that ``wrt`` names, with the experts of the forward. That of the bias is 0."""
    logits, experts = arguments["router_logits"], arguments["experts"]

    def weights(logits: jax.Array) -> jax.Array:
        scores = scored(in_range(logits), arguments["score"])
        return weighted(jnp.take_along_axis(scores, experts, -1), arguments)

    (d_logits,) = jax.vjp(weights, logits)[1](arguments["d_weights"])
    by_name = {"router_logits": d_logits}
    return tuple(by_name.get(name, jnp.zeros_like(arguments[name])) for name in arguments["wrt"])


def in_range(logits: jax.Array) -> jax.Array:
    """The logits in the dtype of the arithmetic; inf counts as the largest number, and NaN as -inf."""
    wide = without_nan(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)))
    return jnp.minimum(wide, jnp.finfo(wide.dtype).max)


def without_nan(scores: jax.Array) -> jax.Array:
    """The scores; a NaN counts as -inf."""
    return jnp.where(jnp.isnan(scores), -jnp.inf, scores)


def scored(logits: jax.Array, score: str) -> jax.Array:
    """What experts are compared by, without their bias."""
    if score == "softmax":
        peak = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
        exponentials = jnp.exp(logits - jnp.where(jnp.isfinite(peak), peak, 0))
        return exponentials / _nonzero(exponentials.sum(-1, keepdims=True))
    sigmoids: jax.Array = jax.nn.sigmoid(logits)
    return sigmoids if score == "sigmoid" else logits


def weighted(scores: jax.Array, arguments: Arguments) -> jax.Array:
    """The weights of the chosen experts by their scores."""
    if arguments["score"] == "softmax_after":
        scores = scored(scores, "softmax")
    elif arguments["renormalize"]:
        scores = scores / _nonzero(scores.sum(-1, keepdims=True))
    factor: float = arguments["scaling_factor"]
    return scores * factor


def chosen_from(scores: jax.Array, arguments: Arguments) -> jax.Array:
    """The scores by which experts are chosen: with their bias, and -inf outside of the chosen groups."""
    scores, bias = jax.lax.stop_gradient(scores), arguments["expert_bias"]
    if bias is not None:
        scores = without_nan(scores + jax.lax.stop_gradient(bias).astype(scores.dtype))
    if arguments["num_groups"] is None:
        return scores
    tokens, experts = scores.shape
    groups = scores.reshape(tokens, arguments["num_groups"], experts // arguments["num_groups"])
    count = 1 if bias is None else min(2, groups.shape[-1])
    group_scores = jax.lax.top_k(groups, count)[0].sum(-1)
    group = best(group_scores, arguments["group_topk"])
    is_chosen = (group[..., None] == jnp.arange(arguments["num_groups"])).any(-2)
    return jnp.where(is_chosen[..., None], groups, -jnp.inf).reshape(scores.shape)


def best(scores: jax.Array, count: int) -> jax.Array:
    """The places of the largest scores, the first of equal ones."""
    # For top_k, 0 is larger than -0.
    return jax.lax.top_k(jnp.where(scores == 0, 0, scores), count)[1].astype(jnp.int32)


def ordered(experts: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """How many places each expert has, and the places in the order of the experts."""
    places = experts.reshape(-1)
    sizes = jnp.zeros(count, jnp.int32).at[places].add(1)
    return sizes, jnp.argsort(places, stable=True).astype(jnp.int32)


def _nonzero(total: jax.Array) -> jax.Array:
    return jnp.where(total == 0, 1, total)
