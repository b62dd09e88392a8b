"""Programs as they are trained: what is differentiated differs from layer to layer, and from program to program."""

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

LAYERS, BATCH, LENGTH, HEADS, KV_HEADS, DIM, RANK, WORDS = 4, 2, 37, 4, 2, 16, 3, 11
WIDTH = HEADS * DIM
Tree = Any
Step = Callable[[str | None], Tree]


def normal(seed: int, *shape: int) -> Any:
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape) / shape[-1] ** 0.5, jnp.float32)


def projections(seed: int) -> Tree:
    """The weights of an attention layer."""
    widths = {"query": WIDTH, "key": KV_HEADS * DIM, "value": KV_HEADS * DIM, "out": WIDTH}
    return {name: normal(seed + place, WIDTH, width) for place, (name, width) in enumerate(widths.items())}


def adapters(seed: int) -> Tree:
    """LoRA on queries and values."""
    return {
        "query": (normal(seed, WIDTH, RANK), normal(seed + 1, RANK, WIDTH)),
        "value": (normal(seed + 2, WIDTH, RANK), normal(seed + 3, RANK, KV_HEADS * DIM)),
    }


def attend(backend: str | None, weights: Tree, x: Any, memory: Any = None, lora: Tree = None) -> Any:
    """An attention layer, with a residual connection: of x to itself, or to a memory."""
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


TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, WORDS, (BATCH, LENGTH)))
EMBEDDING = normal(1, WORDS, WIDTH)
FROZEN = [projections(10 * layer) for layer in range(LAYERS)]
LORA = [adapters(100 + 10 * layer) for layer in range(LAYERS)]


def same(got: Tree, expected: Tree) -> None:
    for (path, mine), theirs in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        scale = float(jnp.abs(theirs).max())
        assert scale > 0, jax.tree_util.keystr(path)
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-5 * scale, err_msg=jax.tree_util.keystr(path))


def next_token_loss(x: Any) -> Any:
    logits = jax.nn.log_softmax(x[:, :-1] @ EMBEDDING.T)
    return -jnp.take_along_axis(logits, TOKENS[:, 1:, None], axis=-1).mean()


SAVED = jax.checkpoint_policies.save_only_these_names("flash_attention.out", "flash_attention.lse")
REMATS: dict[str, Callable[[Any], Any]] = {
    "": lambda layer: layer,
    "remat": jax.checkpoint,
    "remat, saved": partial(jax.checkpoint, policy=SAVED),
}


#: Each form and each way of rematerialising once; all of them in the long sweep.
QUICK = {("written out", ""), ("scan", "remat, saved"), ("a jitted layer", "remat")}
FORMS = ("written out", "scan", "a jitted layer")
VARIANTS = [
    pytest.param(*variant, marks=() if variant in QUICK else pytest.mark.long) for variant in product(FORMS, REMATS)
]


@pytest.mark.parametrize(("form", "remat"), VARIANTS)
def test_lora_on_queries_and_values_of_a_frozen_transformer(form: str, remat: str) -> None:
    """The first layer's keys are of frozen embeddings alone; those of all others depend on what is trained."""

    def loss(lora: list[Tree], backend: str | None) -> Any:
        layer = REMATS[remat](lambda x, weights, lora: attend(backend, weights, x, lora=lora))
        layer = jax.jit(layer) if form == "a jitted layer" else layer
        x = EMBEDDING[TOKENS]
        if form == "scan":
            body = lambda x, parameters: (layer(x, *parameters), None)
            return next_token_loss(jax.lax.scan(body, x, (stacked(FROZEN), stacked(lora)))[0])
        for weights, own in zip(FROZEN, lora, strict=True):
            x = layer(x, weights, own)
        return next_token_loss(x)

    expected = jax.grad(loss)(LORA, "reference")
    same(jax.grad(loss)(LORA, None), expected)
    same(jax.jit(jax.grad(loss), static_argnums=1)(LORA, None), expected)


def test_a_decoder_on_a_frozen_encoder() -> None:
    decoder = {"own": projections(200), "cross": projections(210), "last": projections(220)}

    def loss(decoder: Tree, backend: str | None) -> Any:
        memory = attend(backend, FROZEN[1], attend(backend, FROZEN[0], EMBEDDING[TOKENS]))
        x = attend(backend, decoder["own"], EMBEDDING[TOKENS[:, ::-1]])
        x = attend(backend, decoder["cross"], x, memory)
        frozen = attend(backend, FROZEN[2], x, memory)  # gradients of its queries alone
        return next_token_loss(attend(backend, decoder["last"], frozen))

    expected = jax.grad(loss)(decoder, "reference")
    same(jax.grad(loss)(decoder, None), expected)
    same(jax.jit(jax.grad(loss), static_argnums=1)(decoder, None), expected)


def test_two_programs_of_one_process_take_turns() -> None:
    """A generator and a discriminator: each is trained through what is frozen for the other."""
    generator, discriminator = projections(300), projections(310)

    def verdict(backend: str | None, discriminator: Tree, x: Any) -> Any:
        return jax.nn.softplus(attend(backend, discriminator, x).mean((1, 2)) * 10)

    def generator_loss(generator: Tree, discriminator: Tree, backend: str | None) -> Any:
        return verdict(backend, discriminator, attend(backend, generator, EMBEDDING[TOKENS])).sum()

    def discriminator_loss(discriminator: Tree, generator: Tree, backend: str | None) -> Any:
        fake = attend(backend, generator, EMBEDDING[TOKENS])
        real = EMBEDDING[TOKENS[::-1]]
        return (verdict(backend, discriminator, real) - verdict(backend, discriminator, fake)).sum()

    steps: list[Step] = [
        lambda backend: jax.grad(generator_loss)(generator, discriminator, backend),
        lambda backend: jax.grad(discriminator_loss)(discriminator, generator, backend),
        lambda backend: jax.jit(jax.grad(generator_loss), static_argnums=2)(generator, discriminator, backend),
        lambda backend: jax.jit(jax.grad(discriminator_loss), static_argnums=2)(discriminator, generator, backend),
        lambda backend: jax.grad(lambda both: generator_loss(*both, backend))((generator, discriminator)),
    ]
    expected = [step("reference") for step in steps]
    for place in (0, 1, 0, 2, 3, 1, 4, 0, 3):
        same(steps[place](None), expected[place])
