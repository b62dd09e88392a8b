"""The lines of docs/coming-from-elsewhere.md for the caches of MaxText, SkyRL-tx and tunix, beside masks over them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_context import merge
from ejkernel_ops import flash_attention
from tests.pages import blocks

PAGE = Path(__file__).parents[3] / "docs" / "coming-from-elsewhere.md"
BATCH, HEADS, KV_HEADS, DIM = 2, 4, 2, 8


def of_page(name: str) -> Any:
    """A function of the page."""
    code = next(block.content for block in blocks(PAGE) if re.search(rf"^def {name}\(", block.content, re.M))
    names: dict[str, Any] = {"jax": jax, "jnp": jnp, "flash_attention": flash_attention}
    exec(code.split("\n\n\nids = ")[0], names)
    return names[name]


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def cache(seed: int, slots: int) -> tuple[jax.Array, jax.Array]:
    return normal(seed, BATCH, slots, KV_HEADS, DIM), normal(seed + 100, BATCH, slots, KV_HEADS, DIM)


def in_float64(query: Any, key: Any, value: Any, mask: Any, scale: float) -> Any:
    """By a mask, (B, T, S)."""
    q, k, v = (np.asarray(array, np.float64) for array in (query, key, value))
    k, v = (array.repeat(HEADS // KV_HEADS, axis=2) for array in (k, v))
    weights = np.where(np.asarray(mask)[:, None], np.exp(scale * np.einsum("bthd,bshd->bhts", q, k)), 0)
    total = weights.sum(-1, keepdims=True)
    return np.einsum("bhts,bshd->bthd", weights / np.where(total, total, 1), v)


def has_mask(function: Any, *arrays: Any, slots: int) -> bool:
    """Whether the traced program has booleans of more axes than a batch and slots."""
    return bool(re.search(rf"bool\[\d+,[\d,]+,{slots}\]", str(jax.make_jaxpr(function)(*arrays))))


# -- MaxText -----------------------------------------------------------------------------------------------------------

PROMPT, RING = 11, 21
QUERY = normal(1, BATCH, 1, HEADS, DIM)
PROMPT_IDS = (np.arange(PROMPT) < np.array([[11], [4]])).astype(np.int32)
#: The slots of a ring that all rows share; the second row's tokens go around its end.
RING_IDS = np.zeros((BATCH, RING), np.int32)
RING_IDS[0, 3:9] = RING_IDS[1, 18:] = RING_IDS[1, :2] = 1


def by_parts(query: Any, prompt: Any, ring: Any) -> jax.Array:
    attend_to_part = of_page("attend_to_part")
    parts = [attend_to_part(query, *prompt, PROMPT_IDS), attend_to_part(query, *ring, RING_IDS)]
    return merge(*map(jnp.stack, zip(*parts, strict=True)))[0]


def test_the_parts_of_maxtext() -> None:
    prompt, ring = cache(2, PROMPT), cache(3, RING)
    both = [jnp.concatenate(arrays, 1) for arrays in zip(prompt, ring, strict=True)]
    mask = np.concatenate([PROMPT_IDS, RING_IDS], 1)[:, None] == 1
    np.testing.assert_allclose(by_parts(QUERY, prompt, ring), in_float64(QUERY, *both, mask, 1.0), atol=2e-6)
    assert not has_mask(by_parts, QUERY, prompt, ring, slots=RING)
    with_mask = lambda query, key, value: flash_attention(query, key, value, attention_mask=mask[:, None])
    assert has_mask(with_mask, QUERY, *both, slots=PROMPT + RING)


class Config:
    """That of MaxText, with all options off but those that its attention compares with a number or a name."""

    attention_type = "global"
    ici_context_autoregressive_parallelism = 0
    matmul_precision = "highest"
    head_dim = DIM

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@pytest.mark.parametrize("is_in_place_of_a_part", [False, True])
def test_maxtext_itself(is_in_place_of_a_part: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its attention against both parts, and the same with the parts by the function of the page."""
    module = pytest.importorskip("maxtext.layers.attention_op", reason="MaxText is not in the environment")
    prompt, ring = cache(2, PROMPT), cache(3, RING)
    sizes = {"max_target_length": PROMPT + RING, "num_query_heads": HEADS, "num_kv_heads": KV_HEADS}
    attention = module.AttentionOp(
        Config(), jax.make_mesh((1,), ("data",)), "dot_product", max_prefill_predict_length=PROMPT, **sizes
    )
    lengths = jnp.array(RING_IDS.sum(1))
    parts = [(*prompt, jnp.array(PROMPT_IDS)), (*ring, jnp.array(RING_IDS), lengths)]
    call = lambda: attention(QUERY, *parts[0], None, module.MODEL_MODE_AUTOREGRESSIVE, cached_values=parts)
    expected = call()
    if is_in_place_of_a_part:

        def apply_attention(query: Any, key: Any, value: Any, decoder_segment_ids: Any, **options: Any) -> Any:
            out, lse = of_page("attend_to_part")(query, key, value, decoder_segment_ids)
            return out, lse.mT[..., None], jnp.ones(())

        monkeypatch.setattr(attention, "apply_attention", apply_attention)
        actual = call()
    else:
        actual = by_parts(QUERY, prompt, ring)
    np.testing.assert_allclose(actual, expected, atol=2e-6)


# -- SkyRL-tx ----------------------------------------------------------------------------------------------------------

SLOTS = 19
#: Whether the call is causal, how many queries it has, and how many slots of each row hold a token.
SKYRL = {"a prompt": (True, SLOTS, (19, 7)), "a step": (False, 1, (12, 19))}


def skyrl_inputs(name: str) -> tuple[Any, ...]:
    is_causal, length, lengths = SKYRL[name]
    mask = (np.arange(SLOTS) < np.array(lengths)[:, None]).astype(np.int32)
    return normal(4, BATCH, length, HEADS, DIM), *cache(5, SLOTS), mask, is_causal


@pytest.mark.parametrize("name", SKYRL)
def test_a_cache_of_skyrl_tx(name: str) -> None:
    *arrays, mask, is_causal = skyrl_inputs(name)
    rows = np.arange(arrays[0].shape[1])[:, None]
    seen = (mask[:, None] == 1) & ((np.arange(SLOTS) <= rows) if is_causal else True)
    step = lambda *arrays: of_page("attention_of_skyrl")(*arrays, is_causal, DIM)
    np.testing.assert_allclose(step(*arrays, mask), in_float64(*arrays, seen, DIM**-0.5), atol=2e-6)
    assert not has_mask(step, *arrays, mask, slots=SLOTS)


@pytest.mark.parametrize("name", SKYRL)
def test_skyrl_tx_itself(name: str) -> None:
    theirs = pytest.importorskip("tx.layers.attention", reason="SkyRL-tx is not in the environment")
    inputs = skyrl_inputs(name)
    expected = theirs.dot_product_attention(*inputs, DIM)
    np.testing.assert_allclose(of_page("attention_of_skyrl")(*inputs, DIM), expected, atol=2e-6)


# -- tunix -------------------------------------------------------------------------------------------------------------

#: The padding on the left of each prompt, and how many slots the prompts have.
PADDING, END = np.array([0, 5]), 9
#: By name: how many tokens are in the cache, and how many are new.
TUNIX = {"a prompt": (0, END), "the first step": (END, 1), "a later step": (END + 6, 1)}


def tunix_inputs(name: str) -> tuple[Any, ...]:
    end, length = TUNIX[name]
    query = normal(6, BATCH, length, HEADS, DIM)
    slots, own = np.arange(SLOTS), end + np.arange(length)[:, None]
    mask = (slots >= PADDING[:, None, None]) & (slots <= own)
    return query, *cache(7, SLOTS), mask, np.full(BATCH, end, np.int32)


@pytest.mark.parametrize("name", TUNIX)
def test_a_cache_of_tunix(name: str) -> None:
    *arrays, mask, end = tunix_inputs(name)
    step = of_page("attention_of_tunix")
    np.testing.assert_allclose(step(*arrays, mask, end), in_float64(*arrays, mask, DIM**-0.5), atol=2e-6)


@pytest.mark.parametrize("name", TUNIX)
def test_masks_of_tunix_itself(name: str) -> None:
    """They are those of the test above, but for queries of padding."""
    theirs = pytest.importorskip("tunix.generate.utils", reason="tunix is not in the environment")
    *_, expected, end = tunix_inputs(name)
    is_token = np.arange(SLOTS) >= PADDING[:, None]
    if name == "a prompt":
        actual = theirs.make_causal_attn_mask(jnp.array(is_token[:, :END]), SLOTS)
    else:
        actual = theirs.compute_attention_masks(int(end[0]), SLOTS, jnp.array(~is_token))
    np.testing.assert_array_equal(actual, expected)
