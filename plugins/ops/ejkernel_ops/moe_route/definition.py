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
    weights, experts = chosen(arguments)
    return weights, experts, *ordered(experts, arguments["router_logits"].shape[-1])


def chosen(arguments: Arguments) -> tuple[jax.Array, jax.Array]:
    """The weights and the experts."""
    scores = scored(in_range(arguments["router_logits"]), arguments["score"])
    experts = best(chosen_from(scores, arguments), arguments["k"])
    return weighted(jnp.take_along_axis(scores, experts, -1), arguments), experts


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
    """Numbers by which experts are chosen: the scores with their bias; with groups, integers in the same order, and
    less than all of them outside of the best groups, where a score may be -inf too.
    """
    scores, bias = jax.lax.stop_gradient(scores), arguments["expert_bias"]
    if bias is not None:
        scores = without_nan(scores + jax.lax.stop_gradient(bias).astype(scores.dtype))
    if arguments["num_groups"] is None:
        return scores
    tokens, experts = scores.shape
    groups = scores.reshape(tokens, arguments["num_groups"], experts // arguments["num_groups"])
    group = best(_scores_of_groups(groups, is_sum=bias is not None), arguments["group_topk"])
    is_chosen = (group[..., None] == jnp.arange(arguments["num_groups"])).any(-2)
    keys = _in_order(groups)
    return jnp.where(is_chosen[..., None], keys, jnp.iinfo(keys.dtype).min).reshape(scores.shape)


def _scores_of_groups(groups: jax.Array, *, is_sum: bool) -> jax.Array:
    """The best score of each group, or the sum of its two best ones.

    The sum is -inf only if all scores are: one expert whose score is finite is enough to be chosen.
    """
    if not is_sum or groups.shape[-1] == 1:
        return groups.max(-1)
    first, second = jnp.moveaxis(jax.lax.top_k(groups, 2)[0], -1, 0)
    lowest = jnp.finfo(groups.dtype).min
    return jnp.where(first == -jnp.inf, first, jnp.maximum(first + jnp.maximum(second, lowest), lowest))


def _in_order(scores: jax.Array) -> jax.Array:
    """Integers that compare as the scores do, of which none is the least integer."""
    integer = jnp.dtype(f"int{8 * scores.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0, 0, scores), integer)
    return jnp.where(bits < 0, bits ^ jnp.iinfo(integer).max, bits)


def best(scores: jax.Array, count: int) -> jax.Array:
    """The places of the largest scores, the first of equal ones."""
    # For top_k, 0 is larger than -0.
    return jax.lax.top_k(jnp.where(scores == 0, 0, scores), count)[1].astype(jnp.int32)


def ordered(experts: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """How many places each expert has, and the places in the order of the experts."""
    return group_sizes(experts, count), jnp.argsort(experts.reshape(-1), stable=True).astype(jnp.int32)


def group_sizes(experts: jax.Array, count: int) -> jax.Array:
    """How many places each expert has; ``count`` is not an expert."""
    return jnp.zeros(count, jnp.int32).at[experts.reshape(-1)].add(1)


def _nonzero(total: jax.Array) -> jax.Array:
    return jnp.where(total == 0, 1, total)
