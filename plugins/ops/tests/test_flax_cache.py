"""The caches of docs/coming-from-elsewhere.md in flax's modules, beside those that flax has: a prompt and ten steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_ops
from tests.pages import blocks

flax = pytest.importorskip("flax", reason="flax is an extra of the development environment")
linen, nnx = pytest.importorskip("flax.linen"), pytest.importorskip("flax.nnx")

PAGE = Path(__file__).parents[3] / "docs" / "coming-from-elsewhere.md"
BATCH, PROMPT, SLOTS, HEADS, DIM, FEATURES = 2, 6, 19, 4, 8, 24
TOKENS = jax.random.normal(jax.random.key(1), (BATCH, PROMPT + 10, FEATURES))
#: Which slots of each row may be seen, for a mask beside the cache. Slot 0 always, so that every row sees a key.
SEEN = jax.random.bernoulli(jax.random.key(2), 0.7, (BATCH, 1, 1, SLOTS)).at[..., 0].set(True)
Step = Callable[[Any, jax.Array], tuple[jax.Array, Any]]


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """What the page defines for caches of flax, without its examples."""
    names: dict[str, Any] = {"jax": jax, "jnp": jnp, "flash_attention": ejkernel_ops.flash_attention}
    code = [
        block.content for block in blocks(PAGE) if re.search(r"^def attend\(cache|^class \w+Cache", block.content, re.M)
    ]
    assert len(code) == 3
    for block in code:
        exec(block.split("\n\n\nattention = ")[0].split("\n\n\noptions = ")[0], names)
    return names


def linen_step(mask: Any = None, **options: Any) -> tuple[Step, Any]:
    module = linen.MultiHeadDotProductAttention(num_heads=HEADS, qkv_features=HEADS * DIM, **options)
    variables = module.init(jax.random.key(0), jnp.zeros((BATCH, SLOTS, FEATURES)))

    def step(cache: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        out, state = module.apply({"params": variables["params"], "cache": cache}, tokens, mask=mask, mutable="cache")
        return out, state["cache"]

    return step, variables["cache"]


def nnx_step(mask: Any = None, is_theirs: bool = False, **options: Any) -> tuple[Step, Any]:
    module = nnx.MultiHeadAttention(HEADS, FEATURES, HEADS * DIM, decode=is_theirs, rngs=nnx.Rngs(0), **options)
    if is_theirs:
        module.init_cache((BATCH, SLOTS, FEATURES))
    graph, cache, rest = nnx.split(module, nnx.Cache, ...)

    def step(cache: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        merged = nnx.merge(graph, cache, rest)
        out = merged(tokens, mask=mask)
        return out, nnx.state(merged, nnx.Cache)

    return step, cache


def steps_of(name: str, page: dict[str, Any], mask: Any = None) -> tuple[Any, Any]:
    """The step and the empty cache with a cache of the page, and with flax's own."""
    size = BATCH, SLOTS, HEADS, DIM
    if name == "linen":
        return linen_step(mask, attention_fn=page["LinenCache"](size)), linen_step(mask, decode=True)
    return nnx_step(mask, attention_fn=page["NnxCache"](*size)), nnx_step(mask, is_theirs=True)


def outs_of(step: Step, cache: Any, lengths: list[int]) -> jax.Array:
    """The outputs of calls with so many tokens each."""
    outs, compiled = [], jax.jit(step, donate_argnums=0)
    for end, length in zip(np.cumsum(lengths), lengths, strict=True):
        out, cache = compiled(cache, TOKENS[:, end - length : end])
        outs.append(out)
    return jnp.concatenate(outs, 1)


@pytest.mark.parametrize("mask", [None, SEEN], ids=["no mask", "mask"])
@pytest.mark.parametrize("name", ["linen", "nnx"])
def test_a_prompt_and_ten_steps(name: str, mask: Any, page: dict[str, Any]) -> None:
    """The prompt is one call here, and one for each token in flax."""
    ours, theirs = steps_of(name, page, mask)
    actual = outs_of(*ours, [PROMPT, *[1] * 10])
    expected = outs_of(*theirs, [1] * (PROMPT + 10))
    np.testing.assert_allclose(actual, expected, atol=2e-6)
    assert np.abs(expected).max() > 0.1


@pytest.mark.parametrize("name", ["linen", "nnx"])
def test_no_mask_over_the_cache_is_traced(name: str, page: dict[str, Any]) -> None:
    """As there is one in the program of flax's own cache."""
    ours, theirs = (jax.make_jaxpr(step)(cache, TOKENS[:, :1]) for step, cache in steps_of(name, page))
    assert "ejkernel_call" in str(ours)
    assert SLOTS not in sizes_of_masks(ours.jaxpr)
    assert SLOTS in sizes_of_masks(theirs.jaxpr)


def sizes_of_masks(jaxpr: Any) -> set[int]:
    """The lengths of all axes of arrays of booleans."""
    arrays = [x.aval for equation in equations_of(jaxpr) for x in equation.outvars]
    return {size for array in arrays if array.dtype == jnp.bool_ for size in array.shape}


def equations_of(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            if hasattr(value, "jaxpr"):
                yield from equations_of(value.jaxpr)
