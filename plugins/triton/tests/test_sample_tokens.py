"""Sampling in Triton: the tokens of the definition, in every configuration and by every way through the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_core
from ejkernel_core import Unsupported
from ejkernel_ops.sample_tokens import noise
from ejkernel_triton import sample_tokens
from ejkernel_triton.interpreter import interpreted, interpreted_registry
from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.sample_tokens import BLOCKS, MOST_WORDS, TILES, WARPS, Config, _launch

if _jax_triton.unavailable_reason():
    pytest.skip(_jax_triton.unavailable_reason(), allow_module_level=True)

#: The smallest programs, so that few words need several of them.
SMALL = Config(512, 1024, 4)
#: Every configuration differs from the smallest in one number.
CONFIGURATIONS = (
    *(attrs.evolve(SMALL, block=block) for block in BLOCKS),
    *(attrs.evolve(SMALL, tile=tile, num_warps=8) for tile in TILES),
    *(attrs.evolve(SMALL, num_warps=warps) for warps in WARPS[1:]),
)
NUMBERS: dict[str, Any] = {
    "temperature": np.array([1.0, 0.0, 0.6, 3.0, 0.05], np.float32),
    "top_k": np.array([40, 0, -1, 1, 10**6, 7, 900], np.int32),
    "top_p": np.array([0.9, 1.0, 1e-9, 0.6, 2.0, 0.0, 0.99, 0.3], np.float32),
    "min_p": np.array([0.02, 0.0, -1.0, 1.0, 1e-6, 0.3], np.float32),
}


@pytest.fixture(scope="module", name="registry")
def _registry() -> Iterator[Any]:
    with interpreted():
        yield interpreted_registry({"sample_tokens.triton": sample_tokens})


def keys(rows: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng([seed, rows, 51]).integers(0, 2**32, (rows, 2), dtype=np.uint32))


def normal(rows: int, words: int, scale: float = 3.0) -> np.ndarray:
    return (scale * np.random.default_rng([rows, words]).normal(size=(rows, words))).astype(np.float32)


def numbers(rows: int, names: str, **own: Any) -> dict[str, Any]:
    """Of each row, those of NUMBERS with these names, or its own."""
    return {name: np.resize(NUMBERS[name], rows) for name in names.split()} | own


def check(registry: Any, logits: Any, cfg: Config | None = SMALL, dtype: Any = jnp.float32, **call: Any) -> list[int]:
    """Compare the tokens and their log-probabilities with those of the definition, by a sort."""
    call |= {"logits": jnp.asarray(logits, dtype), "key": keys(len(logits)), "return_logprobs": True}
    tokens, logprobs = registry.call("sample_tokens", **call, backend="triton", cfg=cfg)
    expected, expected_logprobs = ejkernel_core.call("sample_tokens", **call, backend="reference")
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_allclose(logprobs, expected_logprobs, rtol=2e-6, atol=2e-6)
    result: list[int] = tokens.tolist()
    return result


FILTERS = ("", "temperature", "top_k", "top_p", "min_p", "top_k top_p", "top_k min_p", "temperature top_p min_p")


@pytest.mark.parametrize("names", [*FILTERS, " ".join(NUMBERS)])
def test_all_filters_of_rows_that_have_their_own(registry: Any, names: str) -> None:
    check(registry, normal(40, 700), **numbers(40, names))


@pytest.mark.parametrize("cfg", CONFIGURATIONS, ids=str)
def test_every_configuration_draws_the_same(registry: Any, cfg: Config) -> None:
    check(registry, normal(7, 5003), cfg, **numbers(7, " ".join(NUMBERS)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_logits_of_16_bits(registry: Any, dtype: Any) -> None:
    """They have many equal ones, also at the last one that is kept."""
    check(registry, normal(16, 900), dtype=dtype, **numbers(16, " ".join(NUMBERS)))


@pytest.mark.parametrize("words", [1, 2, 15, 16, 17, 511, 512, 513, 1025])
def test_vocabularies_of_any_size(registry: Any, words: int) -> None:
    check(registry, normal(9, words), **numbers(9, " ".join(NUMBERS)))
    check(registry, normal(9, words))


# -- the ways through the search -------------------------------------------------------------------------------------


def listed(logits: np.ndarray, **call: Any) -> list[int]:
    """Of how many chunks the words of each row are searched."""
    arrays = {name: jnp.broadcast_to(value, len(logits)) for name, value in call.items()}
    launches = launches_of(logits=jnp.asarray(logits), key=keys(len(logits)), **arrays)
    counts: list[int] = launches.choose(*launches.survey())[2].tolist()
    return counts


def launches_of(**arrays: Any) -> _launch.Launches:
    inv = ejkernel_core.invocation("sample_tokens", **arrays).with_arrays(arrays)
    return _launch.Launches(inv, *attrs.astuple(SMALL), False)


@pytest.mark.parametrize(
    ("scale", "filters", "least", "most"),
    [
        (3.0, {"top_k": 40}, 35, 45),  # the first tile has 64 chunks
        (3.0, {"top_k": 40, "top_p": 0.8}, 35, 45),
        (3.0, {"top_p": 0.7}, 8, 64),
        (3.0, {"top_k": 150}, 110, 200),  # the larger one has 256
        (3.0, {"top_p": 0.85}, 65, 256),
        (3.0, {"top_k": 400}, 257, 376),  # and there are 376 in all
        (1.0, {"top_k": 3000, "top_p": 0.7}, 376, 376),
        (0.1, {"top_p": 0.6, "temperature": 2.0}, 257, 376),
        (3.0, {"top_k": 6001, "top_p": 1.0}, 0, 0),
    ],
    ids=str,
)
def test_few_and_many_words_to_choose_from(
    registry: Any, scale: float, filters: dict[str, Any], least: int, most: int
) -> None:
    logits = normal(3, 6001, scale)
    assert all(least <= count <= most for count in listed(logits, **filters))
    check(registry, logits, **filters)


#: Words in their order, of nearly the same weight: the best ones share chunks, and one word more would be drawn often.
SLOPE = -1e-3 * np.arange(6001, dtype=np.float32)


@pytest.mark.parametrize("filters", [{"top_k": 9}, {"top_k": 30, "top_p": 0.5}, {"top_k": 60, "min_p": 0.98}], ids=str)
def test_few_words_of_the_same_weight(registry: Any, filters: dict[str, Any]) -> None:
    assert len({*check(registry, np.repeat(SLOPE[None], 60, 0), **filters)}) >= 6


@pytest.mark.parametrize(
    ("k", "p", "is_large"),
    [
        (100, 1.0, False),
        (250, 0.5, False),
        (0, 0.8, False),
        (300, 1.0, True),
        (370, 0.7, True),
        (900, 0.4, True),
        (0, 0.99, True),
    ],
)
def test_many_words_of_the_same_weight(registry: Any, k: int, p: float, is_large: bool) -> None:
    """The limit lies behind the last word that is kept, and before the next."""
    call = {"top_k": jnp.full(1, k), "top_p": jnp.full(1, p)}
    (count,) = listed(SLOPE[None], **call)
    assert 64 < count <= 376
    assert (count > 256) == is_large
    launches = launches_of(logits=jnp.asarray(SLOPE[None]), key=keys(1), **call)
    best, _, *lists = launches.choose(*launches.survey())
    limit = np.asarray(launches.search(best, *lists)[0]).view(np.float32)[0]
    weights = np.exp(SLOPE[: k or 6001].astype(np.float64))
    expected = (np.cumsum(weights) - weights < p * weights.sum()).sum()
    assert (limit >= -SLOPE).sum() == expected


def test_every_word_that_is_kept_may_be_drawn(registry: Any) -> None:
    """And no other: by many keys."""
    logits = np.repeat(normal(1, 1200, 1.0), 120, 0)
    tokens = check(registry, logits, top_k=6, top_p=0.9)
    assert {*tokens} <= {*np.argsort(-logits[0])[:6].tolist()}
    assert len({*tokens}) >= 5


# -- logits that are equal, or not finite ----------------------------------------------------------------------------


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.2}, {"top_k": 3, "top_p": 0.2}, {"min_p": 1.0}, {}])
def test_equal_logits_are_kept_together(registry: Any, filters: dict[str, Any]) -> None:
    assert len({*check(registry, np.full((24, 2100), 0.25), **filters)}) > 16
    assert len({*check(registry, np.round(normal(24, 2100, 1.0)), **filters)}) > 4


@pytest.mark.parametrize("temperature", [1e6, 1e20])
def test_logits_that_are_equal_when_they_are_divided(registry: Any, temperature: float) -> None:
    check(registry, normal(6, 800, 1e-3), temperature=temperature, top_k=5)
    check(registry, normal(6, 800, 1e-3), temperature=temperature, top_p=0.4)


@pytest.mark.parametrize("names", ["", "temperature", "top_k", "top_p", "min_p", " ".join(NUMBERS)])
def test_logits_that_are_not_finite(registry: Any, names: str) -> None:
    logits = normal(12, 1100)
    logits[:, 30:600] = -np.inf
    logits[1:, 5] = np.nan
    logits[2], logits[3] = -np.inf, np.nan
    logits[4], logits[4, 900] = -np.inf, -3.0
    logits[5, 17], logits[6, [1000, 2]] = np.inf, np.inf
    tokens = check(registry, logits, **numbers(12, names))
    assert tokens[2:6] == [-1, -1, 900, 17]
    assert tokens[6] in (2, 1000)


def test_a_peak_leaves_one_word(registry: Any) -> None:
    logits = normal(8, 3000)
    logits[np.arange(8), 300 * np.arange(8) + 7] = 60.0
    assert check(registry, logits, top_p=0.95) == [300 * i + 7 for i in range(8)]
    assert check(registry, logits, **numbers(8, "temperature top_k")) == [300 * i + 7 for i in range(8)]


def test_one_word_is_the_best_one(registry: Any) -> None:
    logits = normal(8, 3000)
    best = logits.argmax(-1).tolist()
    for filters in ({"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-12}, {"min_p": 1.0}, {"temperature": 0.0}):
        assert check(registry, logits, **filters) == best


def test_the_first_of_equal_logits_without_noise(registry: Any) -> None:
    logits = np.zeros((3, 2000), np.float32)
    logits[1, 700:], logits[2, 1999] = 1.0, 1e-6
    for filters in ({}, {"top_k": 2}, {"top_p": 0.5}):
        assert check(registry, logits, temperature=0.0, **filters) == [0, 700, 1999]


# -- one key, one token ----------------------------------------------------------------------------------------------


def test_a_key_gives_one_token_in_any_batch(registry: Any) -> None:
    """Elsewhere in another batch, whose blocks are larger, and with words of -inf behind the vocabulary."""
    logits, key, own = normal(6, 1500), keys(6, 3), numbers(6, " ".join(NUMBERS))

    def draw(rows: Any, logits: np.ndarray, cfg: Config) -> list[int]:
        arrays = {name: array[rows] for name, array in own.items()}
        tokens = registry.call("sample_tokens", logits[rows], key[rows], **arrays, backend="triton", cfg=cfg)
        return list(tokens.tolist())

    together = draw(np.arange(6), logits, SMALL)
    order = np.array([4, 1, 5, 0])
    assert draw(order, logits, Config(2048, 2048, 8)) == [together[i] for i in order]
    padded = np.pad(logits, ((0, 0), (0, 701)), constant_values=-np.inf)
    for row in range(6):
        assert draw(slice(row, row + 1), padded, SMALL) == [together[row]]


def test_the_noise_is_that_of_the_operation(registry: Any) -> None:
    """Of equal logits, the sum that is the largest of a block is the noise of its word."""
    logits, key = jnp.zeros((20, 1300)), keys(20, 4)
    sums, words = launches_of(logits=logits, key=key).draw(jnp.zeros(20), jnp.zeros(20))
    with jax.enable_x64(True):
        expected = np.pad(noise.gumbel(key, 1300, jnp.float64), ((0, 0), (0, 236)), constant_values=-np.inf)
    by_blocks = expected.reshape(20, 3, 512)
    np.testing.assert_array_equal(words, by_blocks.argmax(-1) + 512 * np.arange(3))
    np.testing.assert_allclose(sums, by_blocks.max(-1), rtol=5e-7)


def test_no_rows(registry: Any) -> None:
    call = {"key": keys(0), "top_k": 3, "return_logprobs": True}
    tokens, logprobs = registry.call("sample_tokens", jnp.zeros((0, 9)), **call, backend="triton")
    assert (tokens.shape, tokens.dtype, logprobs.shape) == ((0,), jnp.int32, (0,))


# -- what is chosen, and refused -------------------------------------------------------------------------------------


def on_card(rows: int, words: int, dtype: Any = jnp.float32, **numbers: Any) -> Any:
    array = jax.ShapeDtypeStruct((rows, words), dtype)
    inv = ejkernel_core.invocation("sample_tokens", array, jax.ShapeDtypeStruct((rows, 2), jnp.uint32), **numbers)
    return attrs.evolve(inv, platform="gpu", device_kind="NVIDIA H200", compute_capability=(9, 0))


def test_plain_jax_comes_first_where_there_is_no_filter() -> None:
    plain = 10  # the rank of sample_tokens.xla
    ranks = [sample_tokens.rank(on_card(64, 1000, **{name: 1.0})) for name in ("top_p", "min_p", "temperature")]
    assert [rank > plain for rank in ranks] == [True, True, False]
    assert sample_tokens.rank(on_card(64, 1000, top_k=3)) > plain > sample_tokens.rank(on_card(64, 1000))


@pytest.mark.parametrize(
    ("rows", "words", "cfg"),
    [
        (64, 131072, Config(4096, 2048, 16)),
        (8, 131072, Config(1024, 2048, 16)),
        (1, 131072, Config(512, 2048, 16)),
        (256, 151936, Config(4096, 2048, 16)),
        (16, 32000, Config(512, 2048, 4)),
        (4, 524288, Config(2048, 4096, 16)),
    ],
)
def test_blocks_fill_the_card(rows: int, words: int, cfg: Config) -> None:
    inv = on_card(rows, words, top_p=0.9)
    assert sample_tokens.heuristic_cfg(inv) == cfg
    # What top_k leaves is searched by fewer warps.
    fewer = sample_tokens.heuristic_cfg(on_card(rows, words, top_p=0.9, top_k=50))
    assert fewer == attrs.evolve(cfg, num_warps=min(cfg.num_warps, 8))
    space = [*sample_tokens.config_space(inv)]
    assert space[0] == cfg
    assert len({*space}) == len(space) <= 8
    for other in space:
        sample_tokens.check_cfg(inv, other)


def test_what_is_not_supported_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"takes float16, bfloat16, float32; logits is float64"), jax.enable_x64(True):
        sample_tokens.heuristic_cfg(on_card(2, 100, jnp.float64))
    with pytest.raises(Unsupported, match=f"takes up to {MOST_WORDS} words; not {MOST_WORDS + 1}"):
        sample_tokens.heuristic_cfg(on_card(2, MOST_WORDS + 1))
    with pytest.raises(Unsupported, match="4 warps have no registers for the chunks of 131072 words: use more"):
        sample_tokens.check_cfg(on_card(2, 131072), Config(4096, 2048, 4))
    with pytest.raises(Unsupported, match="4 warps have no registers for a tile of 4096 words: use more"):
        sample_tokens.check_cfg(on_card(2, 1000), Config(4096, 4096, 4))
