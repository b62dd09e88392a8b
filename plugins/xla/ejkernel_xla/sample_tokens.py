"""``sample_tokens`` on any device JAX runs on, without a sort.

Logits below the best of their row compare as the integers of their bits. The least one that a filter keeps is found
from its highest bits on, by what is counted or summed up to each candidate: passes over the logits, in place of a sort.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from attrs.validators import in_

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.sample_tokens import definition

VERSION = 1
PLATFORMS = {"cpu": 10, "gpu": 10, "tpu": 10}

BITS = (1, 2, 4)


@attrs.frozen
class Config:
    """How many bits of the least logit a pass finds."""

    bits: int = attrs.field(default=1, validator=in_(BITS))


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    return Config()


@hookimpl
def config_space(inv: Invocation) -> Iterable[Config]:
    return [Config(bits) for bits in BITS]


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array, jax.Array | None]:
    distances = definition.below_best(definition.in_range(inv["logits"]))
    scaled = definition.tempered(distances, inv)
    token = definition.drawn(scaled, _kept(scaled, inv, cfg.bits), inv)
    return token, definition.log_probabilities(distances, token) if inv.needs("logprobs") else None


def _kept(scaled: jax.Array, inv: Invocation, bits: int) -> jax.Array | None:
    """Which logits all filters keep; None for all."""
    vocabulary, is_kept = scaled.shape[1], None
    # Of numbers from 0 to -inf: the larger, the farther below.
    depth = jax.lax.bitcast_convert_type(jnp.abs(scaled), jnp.dtype(f"uint{8 * scaled.dtype.itemsize}"))
    is_drawn = True if inv["temperature"] is None else inv["temperature"] != 0
    if inv["top_k"] is not None:
        is_filter = (inv["top_k"] > 0) & (inv["top_k"] < vocabulary)
        count = jnp.where(is_filter, inv["top_k"], vocabulary)
        is_kept = depth <= _first_depth(depth, jnp.ones_like(depth, jnp.int32), count, is_filter & is_drawn, bits)
    if inv["top_p"] is not None:
        weights = jnp.exp(scaled) if is_kept is None else jnp.where(is_kept, jnp.exp(scaled), 0)
        share = inv["top_p"].astype(scaled.dtype)
        enough = share * weights.sum(-1)
        last = _first_depth(depth, weights, enough, (share < 1) & is_drawn, bits)
        is_needed = (depth <= last) | (share >= 1)[:, None]
        is_kept = is_needed if is_kept is None else is_kept & is_needed
    if inv["min_p"] is not None:
        is_likely = scaled >= definition.least_by_min_p(inv, scaled.dtype)
        is_kept = is_likely if is_kept is None else is_kept & is_likely
    return is_kept


def _first_depth(depth: jax.Array, weights: jax.Array, enough: jax.Array, is_filter: jax.Array, bits: int) -> jax.Array:
    """(rows, 1): for each row the first depth up to which the sum of the weights is enough; the largest if none is.

    Where there is no filter in any row, it is the largest, without a search: a server has steps of greedy requests.
    """
    largest = jnp.full((depth.shape[0], 1), jnp.iinfo(depth.dtype).max, depth.dtype)
    search = partial(_search, depth, weights, enough, bits)
    last: jax.Array = jax.lax.cond(is_filter.any(), search, lambda: largest)
    return last


def _search(depth: jax.Array, weights: jax.Array, enough: jax.Array, bits: int) -> jax.Array:
    width = 8 * depth.dtype.itemsize
    choices = jnp.arange(1 << bits, dtype=depth.dtype)

    def with_next_bits(i: Any, found: jax.Array) -> jax.Array:
        """``found`` has the bits that are known. Behind it are its candidates, each up to where the next begins."""
        shift = (width - bits * (i + 1)).astype(depth.dtype)
        ends = found[:, None] | (choices << shift) | ((jnp.ones_like(shift) << shift) - 1)
        sums = jnp.where(depth[:, None] <= ends[..., None], weights[:, None], 0).sum(-1, dtype=weights.dtype)
        is_too_little = (sums < enough[:, None])[:, :-1].sum(-1).astype(depth.dtype)
        known: jax.Array = found | (is_too_little << shift)
        return known

    least: jax.Array = jax.lax.fori_loop(0, width // bits, with_next_bits, jnp.zeros_like(depth[:, 0]))
    return least[:, None]
