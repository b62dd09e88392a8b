"""Training programs whose layers need gradients of different arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_ops import flash_attention

LAYERS, BATCH, LENGTH, HEADS, KV_HEADS, DIM, RANK, VOCABULARY = 4, 2, 37, 4, 2, 16, 3, 11
WIDTH = HEADS * DIM
Tree = Any
Step = Callable[[str | None], Tree]


def normal(seed: int, *shape: int) -> Any:
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape) / shape[-1] ** 0.5, jnp.float32)


def projections(seed: int) -> Tree:
    """The weights of an attention layer."""
    widths = {"query": WIDTH, "key": KV_HEADS * DIM, "value": KV_HEADS * DIM, "out": WIDTH}
    return {name: normal(seed + index, WIDTH, width) for index, (name, width) in enumerate(widths.items())}


def adapters(seed: int) -> Tree:
    """LoRA on queries and values."""
    return {
        "query": (normal(seed, WIDTH, RANK), normal(seed + 1, RANK, WIDTH)),
        "value": (normal(seed + 2, WIDTH, RANK), normal(seed + 3, RANK, KV_HEADS * DIM)),
    }


def attend(backend: str | None, weights: Tree, x: Any, memory: Any = None, lora: Tree = None) -> Any:
    """A layer of self-attention, or of cross-attention to a memory, with a residual connection."""
    source = x if memory is None else memory

    def heads(name: str, inputs: Any) -> Any:
        projected = inputs @ weights[name]
        if lora is not None and name in lora:
            down, up = lora[name]
            projected = projected + inputs @ down @ up
        return projected.reshape(*projected.shape[:2], -1, DIM)

    out = flash_attention(
        heads("query", x), heads("key", source), heads("value", source), causal=memory is None, backend=backend
    )
    return x + out.reshape(x.shape) @ weights["out"]


def stacked(trees: list[Tree]) -> Tree:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, VOCABULARY, (BATCH, LENGTH)))
EMBEDDING = normal(1, VOCABULARY, WIDTH)
FROZEN = [projections(10 * layer) for layer in range(LAYERS)]
LORA = [adapters(100 + 10 * layer) for layer in range(LAYERS)]


def check_close(results: Tree, expected: Tree) -> None:
    for (path, result), expected_leaf in zip(
        jax.tree.leaves_with_path(results), jax.tree.leaves(expected), strict=True
    ):
        scale = float(jnp.abs(expected_leaf).max())
        assert scale > 0, jax.tree_util.keystr(path)
        np.testing.assert_allclose(result, expected_leaf, rtol=0, atol=2e-5 * scale, err_msg=jax.tree_util.keystr(path))


def next_token_loss(x: Any) -> Any:
    logits = jax.nn.log_softmax(x[:, :-1] @ EMBEDDING.T)
    return -jnp.take_along_axis(logits, TOKENS[:, 1:, None], axis=-1).mean()


SAVE_RESULTS = jax.checkpoint_policies.save_only_these_names("flash_attention.out", "flash_attention.lse")
REMATS: dict[str, Callable[[Any], Any]] = {
    "": lambda layer: layer,
    "remat": jax.checkpoint,
    "remat, saved": partial(jax.checkpoint, policy=SAVE_RESULTS),
}


#: Each form and each way of rematerialization once. The long sweep has all pairs.
QUICK = {("written out", ""), ("scan", "remat, saved"), ("a jitted layer", "remat")}
FORMS = ("written out", "scan", "a jitted layer")
VARIANTS = [
    pytest.param(*variant, marks=() if variant in QUICK else pytest.mark.long) for variant in product(FORMS, REMATS)
]


@pytest.mark.long
@pytest.mark.parametrize(("form", "remat"), VARIANTS)
def test_lora_on_queries_and_values_of_a_frozen_transformer(form: str, remat: str) -> None:
    """The keys of the first layer depend on frozen embeddings only; those of the others on trained weights."""

    def loss(lora: list[Tree], backend: str | None) -> Any:
        layer = REMATS[remat](lambda x, weights, lora: attend(backend, weights, x, lora=lora))
        layer = jax.jit(layer) if form == "a jitted layer" else layer
        x = EMBEDDING[TOKENS]
        if form == "scan":
            body = lambda x, parameters: (layer(x, *parameters), None)
            return next_token_loss(jax.lax.scan(body, x, (stacked(FROZEN), stacked(lora)))[0])
        for weights, adapter in zip(FROZEN, lora, strict=True):
            x = layer(x, weights, adapter)
        return next_token_loss(x)

    expected = jax.grad(loss)(LORA, "reference")
    check_close(jax.grad(loss)(LORA, None), expected)
    check_close(jax.jit(jax.grad(loss), static_argnums=1)(LORA, None), expected)


@pytest.mark.long
def test_a_decoder_on_a_frozen_encoder() -> None:
    decoder = {"self": projections(200), "cross": projections(210), "last": projections(220)}

    def loss(decoder: Tree, backend: str | None) -> Any:
        memory = attend(backend, FROZEN[1], attend(backend, FROZEN[0], EMBEDDING[TOKENS]))
        x = attend(backend, decoder["self"], EMBEDDING[TOKENS[:, ::-1]])
        x = attend(backend, decoder["cross"], x, memory)
        frozen = attend(backend, FROZEN[2], x, memory)  # gradients only of its queries
        return next_token_loss(attend(backend, decoder["last"], frozen))

    expected = jax.grad(loss)(decoder, "reference")
    check_close(jax.grad(loss)(decoder, None), expected)
    check_close(jax.jit(jax.grad(loss), static_argnums=1)(decoder, None), expected)


def test_two_programs_alternate_in_one_process() -> None:
    """A generator and a discriminator, each trained through the other one, which is frozen."""
    generator, discriminator = projections(300), projections(310)

    def score(backend: str | None, discriminator: Tree, x: Any) -> Any:
        return jax.nn.softplus(attend(backend, discriminator, x).mean((1, 2)) * 10)

    def generator_loss(generator: Tree, discriminator: Tree, backend: str | None) -> Any:
        return score(backend, discriminator, attend(backend, generator, EMBEDDING[TOKENS])).sum()

    def discriminator_loss(discriminator: Tree, generator: Tree, backend: str | None) -> Any:
        fake = attend(backend, generator, EMBEDDING[TOKENS])
        real = EMBEDDING[TOKENS[::-1]]
        return (score(backend, discriminator, real) - score(backend, discriminator, fake)).sum()

    steps: list[Step] = [
        lambda backend: jax.grad(generator_loss)(generator, discriminator, backend),
        lambda backend: jax.grad(discriminator_loss)(discriminator, generator, backend),
        lambda backend: jax.jit(jax.grad(generator_loss), static_argnums=2)(generator, discriminator, backend),
        lambda backend: jax.jit(jax.grad(discriminator_loss), static_argnums=2)(discriminator, generator, backend),
        lambda backend: jax.grad(lambda models: generator_loss(*models, backend))((generator, discriminator)),
    ]
    expected = [step("reference") for step in steps]
    for index in (0, 1, 0, 2, 3, 1, 4, 0, 3):
        check_close(steps[index](None), expected[index])
