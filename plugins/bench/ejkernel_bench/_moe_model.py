"""A model of layers in plain JAX, with a mixture of experts like Qwen3-30B-A3B, or dense, and its training step.

The model is defined once. What a library computes is in an ``Arm``: functions that the model is given. With a
``DenseArm``, layers have no experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs
import jax
import jax.numpy as jnp

from ._losses import mean_in_chunks, wide_product
from ._profile import part

Parameters = dict[str, Any]
#: The parameters, their two moments, and the number of steps.
State = dict[str, Any]

#: Of the rotation of queries and keys.
BASE = 1e6
EPSILON = 1e-6
#: Of Adam.
RATE, DECAY_1, DECAY_2, ADAM_EPSILON = 1e-4, 0.9, 0.95, 1e-8


@attrs.frozen
class Size:
    """A model and its batch. The defaults are Qwen3-30B-A3B's, but for the number of layers."""

    layers: int
    batch: int = 4
    length: int = 4096
    dim: int = 2048
    heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    experts: int = 128
    chosen: int = 8
    inner: int = 768
    vocabulary: int = 151936
    #: The rows whose logits are there at once.
    chunk: int = 2048
    dtype: str = "bfloat16"
    #: Of the rotation of queries and keys.
    base: float = BASE

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters of a layer."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        return {
            "norm_1": (self.dim,),
            "qkv": (self.dim, qkv),
            "norm_query": (self.head_dim,),
            "norm_key": (self.head_dim,),
            "out": (self.heads * self.head_dim, self.dim),
            "norm_2": (self.dim,),
            "router": (self.dim, self.experts),
            "up": (self.experts, self.dim, 2 * self.inner),
            "down": (self.experts, self.inner, self.dim),
        }

    def other_shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters beside the layers."""
        return {"embedding": (self.vocabulary, self.dim), "norm": (self.dim,), "head": (self.dim, self.vocabulary)}

    def layer_flops(self) -> float:
        """The useful work of the layers in a step: nothing for what is computed again, half of causal attention."""
        qkv_and_out = (2 * self.heads + 2 * self.kv_heads) * self.head_dim * self.dim
        active = qkv_and_out + self.dim * self.experts + self.chosen * 3 * self.dim * self.inner
        attention = self.batch * self.heads * self.length**2 * self.head_dim
        return 6.0 * self.layers * (self.tokens * active + attention)


@attrs.frozen(eq=False)
class DenseArm:
    """The functions of a library that a model without experts needs."""

    #: Of x (..., dim) and the weight.
    norm: Callable[[Any, Any], Any]
    #: Causal, of query, key and value (batch, length, heads, head_dim).
    attention: Callable[[Any, Any, Any], Any]
    #: The mean, of x (tokens, dim), a matrix (dim, vocabulary), labels, and the most rows whose logits may be there.
    loss: Callable[[Any, Any, Any, int], Any] = attrs.field(default=mean_in_chunks, kw_only=True)


@attrs.frozen(eq=False)
class Arm(DenseArm):
    """The functions of a library."""

    #: Of float32 logits and the number of experts of a token, to weights, experts, sizes of groups, order of tokens.
    route: Callable[[Any, int], tuple[Any, Any, Any, Any]]
    #: Of x (tokens, dim), the order, the number of experts of a token, matrices (experts, k, n) and sizes of groups. It
    #: multiplies the rows in the order of the experts.
    token_product: Callable[[Any, Any, int, Any, Any], Any]
    #: Of rows, matrices (experts, k, n), and sizes of groups.
    product: Callable[[Any, Any, Any], Any]
    #: Of rows in the order of experts, the order, and the weights.
    combine: Callable[[Any, Any, Any], Any]


# -- the model ---------------------------------------------------------------------------------------------------------


def loss(arm: DenseArm, size: Size, parameters: Parameters, tokens: Any) -> Any:
    """The mean loss of predicting each token (batch, length + 1) from those before it."""
    with part("embedding"):
        x = parameters["embedding"][tokens[:, :-1]]
    for layer in parameters["layers"]:
        x = block(arm, size, layer, x)
    with part("norm"):
        x = arm.norm(x, parameters["norm"])
    with part("head"):
        return arm.loss(x.reshape(-1, size.dim), parameters["head"], tokens[:, 1:].reshape(-1), size.chunk)


def block(arm: DenseArm, size: Size, layer: Parameters, x: Any) -> Any:
    """A layer. All but attention is computed again in the backward, so only its arrays and x are kept."""
    query, key, value = jax.checkpoint(partial(before_attention, arm, size))(layer, x)
    with part("attention"):
        attended = arm.attention(query, key, value)
    return jax.checkpoint(partial(after_attention, arm, size))(layer, x, attended)


def before_attention(arm: DenseArm, size: Size, layer: Parameters, x: Any) -> tuple[Any, Any, Any]:
    """Query, key and value, normalized by head where the layer has weights for it, and rotated."""
    with part("norm"):
        normed = arm.norm(x, layer["norm_1"])
    with part("projections"):
        qkv = (normed @ layer["qkv"]).reshape(*x.shape[:2], -1, size.head_dim)
    query, key, value = jnp.split(qkv, (size.heads, size.heads + size.kv_heads), axis=2)
    if "norm_query" in layer:
        with part("norm"):
            query, key = arm.norm(query, layer["norm_query"]), arm.norm(key, layer["norm_key"])
    with part("rotation"):
        return rotated(query, size.base), rotated(key, size.base), value


def rotated(x: Any, base: float = BASE) -> Any:
    """The two halves of each head as pairs, turned by angles that grow with the position."""
    length, half = x.shape[1], x.shape[-1] // 2
    angles = jnp.arange(length)[:, None] * base ** (-jnp.arange(half) / half)
    cosine, sine = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return turned.astype(x.dtype)


def after_attention(arm: DenseArm, size: Size, layer: Parameters, x: Any, attended: Any) -> Any:
    """The projection of what attention returns, and the experts or the dense layer."""
    with part("projections"):
        x = x + attended.reshape(*x.shape[:2], -1) @ layer["out"]
    with part("norm"):
        normed = arm.norm(x, layer["norm_2"])
    rows = normed.reshape(-1, size.dim)
    made = experts(arm, size, layer, rows) if isinstance(arm, Arm) else feed_forward(layer, rows)
    return x + made.reshape(x.shape)


def feed_forward(layer: Parameters, x: Any) -> Any:
    """The dense layer of each token (tokens, dim)."""
    with part("feed_forward"):
        hidden = x @ layer["up"]
    with part("activation"):
        hidden = gated(hidden)
    with part("feed_forward"):
        return hidden @ layer["down"]


def gated(hidden: Any) -> Any:
    """The second half, times the first one through its activation."""
    gate, up = jnp.split(hidden, 2, axis=-1)
    return jax.nn.silu(gate) * up


def experts(arm: Arm, size: Size, layer: Parameters, x: Any) -> Any:
    """The weighted sum of what its experts make of each token (tokens, dim)."""
    with part("router"):
        logits = wide_product(x, layer["router"])
        weights, _, sizes, order = arm.route(logits, size.chosen)
    with part("experts"):
        hidden = arm.token_product(x, order, size.chosen, layer["up"], sizes)
    with part("activation"):
        hidden = gated(hidden)
    with part("experts"):
        made = arm.product(hidden, layer["down"], sizes)
    with part("combine"):
        return arm.combine(made, order, weights)


# -- training ----------------------------------------------------------------------------------------------------------


def training_step(arm: DenseArm, size: Size, state: State, tokens: Any) -> tuple[State, Any]:
    """The state after a step of Adam, and the loss."""
    value, gradients = jax.value_and_grad(partial(loss, arm, size))(state["parameters"], tokens)
    with part("adam"):
        count = state["count"] + 1
        update = partial(adam, count.astype(jnp.float32))
        leaves = jax.tree.map(update, state["parameters"], gradients, state["first"], state["second"])
        is_leaf = lambda value: isinstance(value, tuple) and len(value) == 3 and not isinstance(value[0], dict)
        parts = [jax.tree.map(lambda leaf, place=place: leaf[place], leaves, is_leaf=is_leaf) for place in range(3)]
    return dict(zip(("parameters", "first", "second"), parts, strict=True), count=count), value


def adam(count: Any, parameter: Any, gradient: Any, first: Any, second: Any) -> tuple[Any, Any, Any]:
    """The parameter and its moments after a step, in float32."""
    gradient = gradient.astype(jnp.float32)
    first = DECAY_1 * first + (1 - DECAY_1) * gradient
    second = DECAY_2 * second + (1 - DECAY_2) * gradient * gradient
    mean, variance = first / (1 - DECAY_1**count), second / (1 - DECAY_2**count)
    step = RATE * mean / (jnp.sqrt(variance) + ADAM_EPSILON)
    return (parameter.astype(jnp.float32) - step).astype(parameter.dtype), first, second


# -- what a step starts from -------------------------------------------------------------------------------------------


def parameters_of(size: Size, key: Any) -> Parameters:
    """Random parameters, drawn on the device one by one."""
    keys = iter(jax.random.split(key, (size.layers + 1) * 10))
    layers = [
        {name: _drawn(next(keys), name, shape, size.dtype) for name, shape in size.layer_shapes().items()}
        for _ in range(size.layers)
    ]
    others = {name: _drawn(next(keys), name, shape, size.dtype) for name, shape in size.other_shapes().items()}
    return {**others, "layers": layers}


def _drawn(key: Any, name: str, shape: tuple[int, ...], dtype: str) -> Any:
    """Weights of norms near 1; an embedding of variance 1; matrices that keep the variance of what they multiply."""
    if name.startswith("norm"):
        return _normal(key, shape, dtype, 0.1) + 1
    return _normal(key, shape, dtype, 1.0 if name == "embedding" else shape[-2] ** -0.5)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(key: Any, shape: tuple[int, ...], dtype: str, scale: float) -> Any:
    return jax.random.normal(key, shape, dtype) * jnp.asarray(scale, dtype)


def state_of(parameters: Parameters) -> State:
    """The state before the first step."""
    zeros: Callable[[Any], Any] = lambda array: jnp.zeros(array.shape, jnp.float32)
    moments: Mapping[str, Any] = {name: jax.tree.map(zeros, parameters) for name in ("first", "second")}
    return {"parameters": parameters, **moments, "count": jnp.int32(0)}


def tokens_of(size: Size, key: Any) -> Any:
    """Random tokens, one more than the length."""
    return jax.random.randint(key, (size.batch, size.length + 1), 0, size.vocabulary, jnp.int32)
