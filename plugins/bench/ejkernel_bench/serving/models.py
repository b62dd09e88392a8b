"""Decoders that an engine serves: as Llama's, and with experts as Qwen3's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
import jax
import jax.numpy as jnp

from ejkernel_bench._profile import part
from ejkernel_ops import (
    grouped_matmul,
    moe_combine,
    moe_permute_matmul,
    moe_route,
    ragged_paged_attention,
    rms_norm,
    update_kv_pages,
)

from .engine import Batch, Model

Params = dict[str, Any]


@attrs.frozen
class RopeScaling:
    """Llama 3.1's: slow rotations are ``factor`` times slower, for contexts longer than the original one."""

    factor: float
    #: Rotations with at most so many turns in the original context are slow, and with at least so many they are not.
    slow_turns: float
    fast_turns: float
    original_length: int


@attrs.frozen
class Decoder:
    """The sizes of a decoder."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    #: Of the multilayer perceptron, or of each expert.
    inner: int
    vocabulary: int
    #: 0 for a dense model.
    experts: int = 0
    experts_per_token: int = 0
    #: Whether the heads of queries and keys are normalized, as in Qwen3.
    has_head_norms: bool = False
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    epsilon: float = 1e-5
    dtype: str = "bfloat16"

    def cache(self, pages: int, page_size: int) -> jax.Array:
        """The pages of all layers, of one layer after another."""
        return jnp.zeros((self.layers * pages, page_size, 2 * self.kv_heads, self.head_dim), self.dtype)


def layer_shapes(sizes: Decoder) -> dict[str, tuple[int, ...]]:
    """Of the weights of a layer."""
    width, inner, attended = sizes.width, sizes.inner, sizes.heads * sizes.head_dim
    experts = (sizes.experts,) if sizes.experts else ()
    shapes = {
        "attention_norm": (width,),
        "qkv": (width, attended + 2 * sizes.kv_heads * sizes.head_dim),
        "out": (attended, width),
        "mlp_norm": (width,),
        "up": (*experts, width, 2 * inner),  # the gates and the values
        "down": (*experts, inner, width),
    }
    if sizes.has_head_norms:
        shapes |= {"q_norm": (sizes.head_dim,), "k_norm": (sizes.head_dim,)}
    if sizes.experts:
        shapes["router"] = (width, sizes.experts)
    return shapes


def other_shapes(sizes: Decoder) -> dict[str, tuple[int, ...]]:
    """Of the weights that are not those of a layer."""
    return {
        "embedding": (sizes.vocabulary, sizes.width),
        "norm": (sizes.width,),
        "head": (sizes.width, sizes.vocabulary),
    }


def count_weights(sizes: Decoder) -> int:
    """How many numbers they are."""
    layer, others = (sum(map(math.prod, shapes(sizes).values())) for shapes in (layer_shapes, other_shapes))
    return sizes.layers * layer + others


def init_params(sizes: Decoder, key: jax.Array) -> Params:
    """Random weights; norms are 1."""

    def drawn(shapes: dict[str, tuple[int, ...]], key: jax.Array) -> Params:
        keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
        return {name: _drawn(name, shape, sizes.dtype, keys[name]) for name, shape in shapes.items()}

    first, *of_layers = jax.random.split(key, 1 + sizes.layers)
    layers = [drawn(layer_shapes(sizes), of_layer) for of_layer in of_layers]
    return {**drawn(other_shapes(sizes), first), "layers": layers}


def _drawn(name: str, shape: tuple[int, ...], dtype: str, key: jax.Array) -> jax.Array:
    if name.endswith("norm"):
        return jnp.ones(shape, dtype)
    scale = 1.0 if name == "embedding" else shape[-2] ** -0.5
    return jax.random.normal(key, shape, dtype) * jnp.asarray(scale, dtype)


def decoder(sizes: Decoder, attention: Callable[..., jax.Array] = ragged_paged_attention) -> Model:
    """The model, whose weights are named as in ``other_shapes``, and those of each of "layers" as in ``layer_shapes``.
    Another attention has the same arguments.

    Each layer has arrays of its own: a scan over stacked ones copies those of a layer before they are multiplied, which
    takes a third of a step of Llama-3.1-8B.
    """

    def model(
        params: Params, tokens: jax.Array, positions: jax.Array, cache: jax.Array, batch: Batch
    ) -> tuple[jax.Array, jax.Array]:
        pages = cache.shape[0] // sizes.layers
        angles = _angles(sizes, positions)
        x = params["embedding"][tokens]
        for number, weights in enumerate(params["layers"]):
            with part("projections"):
                attended, cache = _attention(sizes, weights, x, angles, cache, batch, number * pages, attention)
            x = x + attended
            with part("experts" if sizes.experts else "mlp"):
                normed = rms_norm(x, weights["mlp_norm"], epsilon=sizes.epsilon)
                x = x + (_experts if sizes.experts else _mlp)(sizes, weights, normed)
        with part("head"):
            x = rms_norm(x[batch.last], params["norm"], epsilon=sizes.epsilon)
            return jnp.matmul(x, params["head"], preferred_element_type=jnp.float32), cache

    return model


def _attention(
    sizes: Decoder,
    weights: Params,
    x: jax.Array,
    angles: jax.Array,
    cache: jax.Array,
    batch: Batch,
    first_page: Any,
    attention: Callable[..., jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """The attention of a layer to its pages, and the cache with the new tokens."""
    normed = rms_norm(x, weights["attention_norm"], epsilon=sizes.epsilon)
    heads = (normed @ weights["qkv"]).reshape(x.shape[0], -1, sizes.head_dim)
    query, key, value = jnp.split(heads, [sizes.heads, sizes.heads + sizes.kv_heads], axis=1)
    if sizes.has_head_norms:
        query = rms_norm(query, weights["q_norm"], epsilon=sizes.epsilon)
        key = rms_norm(key, weights["k_norm"], epsilon=sizes.epsilon)
    query, key = _rotated(query, angles), _rotated(key, angles)
    with part("cache"):
        cache = update_kv_pages(key, value, cache, batch.slot_mapping, first_page=first_page)
    with part("attention"):
        out = attention(
            query,
            cache,
            batch.kv_lens,
            batch.block_tables,
            batch.query_start_loc,
            batch.num_seqs,
            metadata=batch.metadata,
            max_query_len=batch.max_query_len,
            first_page=first_page,
        )
    return out.reshape(x.shape[0], -1) @ weights["out"], cache


def _angles(sizes: Decoder, positions: jax.Array) -> jax.Array:
    frequencies = sizes.rope_theta ** (-jnp.arange(0, sizes.head_dim, 2) / sizes.head_dim)
    if (scaling := sizes.rope_scaling) is not None:
        turns = scaling.original_length * frequencies / (2 * jnp.pi)
        fast = jnp.clip((turns - scaling.slow_turns) / (scaling.fast_turns - scaling.slow_turns), 0, 1)
        frequencies = frequencies * (fast + (1 - fast) / scaling.factor)
    return positions[:, None, None] * frequencies


def _rotated(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotary positions: pairs are the numbers of both halves of a head."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def _mlp(sizes: Decoder, weights: Params, x: jax.Array) -> jax.Array:
    gate, value = jnp.split(x @ weights["up"], 2, axis=-1)
    product: jax.Array = (jax.nn.silu(gate) * value) @ weights["down"]
    return product


def _experts(sizes: Decoder, weights: Params, x: jax.Array) -> jax.Array:
    logits = jnp.matmul(x, weights["router"], preferred_element_type=jnp.float32)
    routes = moe_route(logits, sizes.experts_per_token)
    order, group_sizes = routes.token_order, routes.group_sizes
    hidden = moe_permute_matmul(x, order, weights["up"], group_sizes, sizes.experts_per_token, activation="silu_gated")
    return moe_combine(grouped_matmul(hidden, weights["down"], group_sizes), order, routes.weights)
