"""``sample_tokens`` against NumPy in float64, by frequencies, and in any batch."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ejkernel_core
from ejkernel_core import NotDifferentiable
from ejkernel_ops import sample_tokens
from ejkernel_ops.sample_tokens.noise import random_bits

BACKENDS = ("reference", "xla")


def kept(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> tuple[Any, Any]:
    """Which words of a row may be drawn, and their tempered logits, below the best one."""
    logits = np.minimum(np.where(np.isnan(logits), -np.inf, logits), np.finfo(np.float64).max)
    best = logits.max()
    if best == -np.inf:
        return np.zeros(len(logits), bool), logits
    scaled = np.array([0.0 if x == best else (x - best) / temperature if temperature else -np.inf for x in logits])
    is_kept = np.isfinite(scaled)
    if 0 < top_k < len(logits):
        is_kept &= scaled >= sorted(scaled)[-top_k]
    if top_p < 1:
        weights = np.where(is_kept, np.exp(scaled), 0)
        better = np.array([weights[scaled > x].sum() for x in scaled])
        is_kept &= (better < top_p * weights.sum()) | (scaled == 0)
    if min_p > 0:
        is_kept &= np.exp(scaled) >= min_p
    return is_kept, scaled


def expected(row: dict[str, Any]) -> tuple[int, float]:
    """The token and its log-probability, with the bits that ``jax.random`` gives for the key."""
    logits, key = row["logits"], row["key"]
    is_kept, scaled = kept(logits, row["temperature"], row["top_k"], row["top_p"], row["min_p"])
    if not is_kept.any():
        return -1, -np.inf
    share = (np.asarray(jax.random.bits(key, logits.shape, jnp.uint32)).astype(np.float64) + 0.5) / 2**32
    noise = -np.log(-np.log1p(-np.minimum(share, 1 - 2.0**-24)))
    token = int(np.argmax(np.where(is_kept, scaled + (noise if row["temperature"] else 0), -np.inf)))
    finite = logits[np.isfinite(logits)]
    return token, logits[token] - finite.max() - math.log(np.exp(finite - finite.max()).sum())


NOTHING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
CHOICES: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, 0.01, 0.6, 1.0, 3.0),
    "top_k": (-1, 0, 1, 2, 9, 10**9),
    "top_p": (0.0, 0.1, 0.7, 0.999, 1.0, 2.0),
    "min_p": (-1.0, 0.0, 1e-6, 0.05, 0.9, 1.0),
}


def drawn_call(seed: int) -> dict[str, Any]:
    """A random call, of which each row has its own numbers, and some have equal logits or -inf."""
    rng = np.random.default_rng([seed, 51])
    rows, vocabulary = int(rng.integers(1, 40)), int(rng.choice([1, 2, 30, 257, 1000], p=[0.1, 0.1, 0.3, 0.3, 0.2]))
    logits = rng.normal(size=(rows, vocabulary)) * rng.choice([0.1, 1, 3, 100], p=[0.3, 0.4, 0.2, 0.1])
    if rng.random() < 0.4:
        logits = np.round(logits)
    if rng.random() < 0.3:
        logits[rng.random(logits.shape) < 0.5] = -np.inf
    call: dict[str, Any] = {"logits": logits, "key": rng.integers(0, 2**32, (rows, 2), dtype=np.uint32)}
    for name, choices in CHOICES.items():
        if rng.random() < 0.5:
            call[name] = rng.choice(np.array(choices), rows)
    return call


def check(seed: int, backend: str, cfg: Any = None) -> None:
    call = drawn_call(seed)
    with jax.enable_x64(True):
        arrays = {name: jnp.asarray(array) for name, array in call.items()}
        tokens, logprobs = sample_tokens(**arrays, return_logprobs=True, validate=True, backend=backend, cfg=cfg)
    rows = [{**NOTHING, **{name: array[i] for name, array in call.items()}} for i in range(len(call["key"]))]
    right, right_logprobs = zip(*map(expected, rows), strict=True)
    assert tokens.tolist() == list(right), (seed, call)
    np.testing.assert_allclose(logprobs, right_logprobs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_calls(backend: str) -> None:
    for seed in range(12):
        check(seed, backend)


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("first", range(100, 700, 100))
def test_many_random_calls(first: int, backend: str) -> None:
    for seed in range(first, first + 100):
        check(seed, backend)


@pytest.mark.parametrize("bits", [2, 4])
def test_passes_that_find_several_bits(bits: int) -> None:
    config = type(ejkernel_core.plan("sample_tokens", ROWS, KEY, backend="xla").cfg)
    for seed in range(20, 24):
        check(seed, "xla", config(bits))


def test_bits_are_those_of_the_default_generator() -> None:
    words = jnp.array([7, 2**31 + 9], jnp.uint32)
    bits = random_bits(words[0], words[1], jnp.arange(5000, dtype=jnp.uint32))
    np.testing.assert_array_equal(bits, jax.random.bits(words, (5000,), jnp.uint32))


# -- frequencies -----------------------------------------------------------------------------------------------------

LOGITS = np.array([2.0, -1.0, 0.5, 1.75, -3.0, 1.0, 0.5, -np.inf, 1.9, 0.0, -0.5, 2.0], np.float32)
DRAWS = 1_000_000
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 5},
    "top_k-with-ties": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.2},
    "all": {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "min_p": 0.15},
}


@pytest.mark.parametrize("name", FILTERS)
def test_a_million_draws_have_the_frequencies_of_the_probabilities(name: str) -> None:
    """By chi-square: of 11 numbers at most, it is above 45 once in 200,000 tests."""
    draw = jax.jit(partial(sample_tokens, **FILTERS[name]))
    tokens = draw(jnp.broadcast_to(LOGITS, (DRAWS, len(LOGITS))), jax.random.key(4))
    counts = np.bincount(tokens, minlength=len(LOGITS))
    is_kept, scaled = kept(LOGITS.astype(np.float64), **{**NOTHING, **FILTERS[name]})
    weights = np.where(is_kept, np.exp(scaled), 0)
    right = DRAWS * weights / weights.sum()
    assert not counts[~is_kept].any()
    assert ((counts - right)[is_kept] ** 2 / right[is_kept]).sum() < 45


# -- one key, one token ----------------------------------------------------------------------------------------------

NUMBERS = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01}


def some_logits(rows: int = 16, vocabulary: int = 384) -> jax.Array:
    return 3 * jax.random.normal(jax.random.key(1), (rows, vocabulary))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_key_gives_one_token_in_any_batch(backend: str) -> None:
    """Alone, elsewhere in another batch, and with words behind the vocabulary that are -inf."""
    draw = jax.jit(partial(sample_tokens, **NUMBERS, backend=backend))
    logits, keys = some_logits(), jax.random.split(jax.random.key(2), 16)
    tokens = draw(logits, keys)
    assert len({*tokens.tolist()}) > 8
    order = np.random.default_rng(0).permutation(16)
    np.testing.assert_array_equal(draw(logits[order], keys[order]), tokens[order])
    for row in (0, 7, 15):
        assert draw(logits[row : row + 1], keys[row : row + 1])[0] == tokens[row]
    padded = jnp.pad(logits, ((0, 0), (0, 101)), constant_values=-jnp.inf)
    np.testing.assert_array_equal(draw(padded, keys), tokens)


def test_a_row_of_one_key_has_the_key_folded_with_its_place() -> None:
    logits, key = some_logits(), jax.random.key(3)
    tokens = sample_tokens(logits, key, **NUMBERS)
    each = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(16))
    np.testing.assert_array_equal(sample_tokens(logits, each, **NUMBERS), tokens)
    np.testing.assert_array_equal(sample_tokens(logits, jax.random.key_data(key), **NUMBERS), tokens)
    np.testing.assert_array_equal(sample_tokens(logits, jax.random.key_data(each), **NUMBERS), tokens)
    assert (sample_tokens(logits, jax.random.key(4), **NUMBERS) != tokens).any()


@pytest.mark.parametrize("implementation", ["rbg", "unsafe_rbg"])
def test_keys_of_four_words_are_taken(implementation: Any) -> None:
    logits = some_logits(200)
    one, other = (sample_tokens(logits, jax.random.key(seed, impl=implementation)) for seed in (0, 1))
    assert (one != other).sum() > 50


@pytest.mark.parametrize("spec", [PartitionSpec(None, "x"), PartitionSpec("x", None)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_on_eight_devices_draw_the_same(spec: PartitionSpec, backend: str) -> None:
    """With the vocabulary cut, or the rows."""
    logits, key = some_logits(), jax.random.key(5)
    draw = jax.jit(partial(sample_tokens, **NUMBERS, return_logprobs=True, backend=backend))
    tokens, logprobs = draw(logits, key)
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:8]), ("x",)), spec)
    sharded_tokens, sharded_logprobs = draw(jax.device_put(logits, sharding), key)
    np.testing.assert_array_equal(sharded_tokens, tokens)
    np.testing.assert_allclose(sharded_logprobs, logprobs, rtol=1e-5)


def test_a_loop_of_steps_draws_with_traced_numbers() -> None:
    """Each step has the key of its position, as a server has."""
    logits, key = some_logits(4), jax.random.key(6)

    def step(temperature: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
        token = sample_tokens(logits, jax.random.fold_in(key, position), temperature=temperature, top_k=position + 1)
        return temperature, token

    _, tokens = jax.lax.scan(step, jnp.array([0.0, 0.5, 1.0, 2.0]), jnp.arange(6))
    for position in range(6):
        own = jax.random.fold_in(key, position)
        right = sample_tokens(logits, own, temperature=jnp.array([0.0, 0.5, 1.0, 2.0]), top_k=position + 1)
        np.testing.assert_array_equal(tokens[position], right)
    assert (tokens[:, 0] == logits[0].argmax()).all()
    assert (tokens[0] == logits.argmax(-1)).all()


# -- numbers that are not finite -------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_a_finite_logit_have_no_token(backend: str) -> None:
    inf, nan = np.inf, np.nan
    logits = jnp.array([[-inf, nan, -inf], [nan, nan, 3.0], [inf, 0.0, 1.0], [-inf, -inf, -inf]])
    tokens, logprobs = sample_tokens(logits, jax.random.key(0), **NUMBERS, return_logprobs=True, backend=backend)
    assert tokens.tolist() == [-1, 2, 0, -1]
    assert logprobs.tolist() == [-inf, 0, 0, -inf]
    assert sample_tokens(logits, jax.random.key(0), temperature=0.0, backend=backend).tolist() == [-1, 2, 0, -1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_of_equal_logits_is_the_best_one(backend: str) -> None:
    logits = jnp.zeros((3, 50)).at[1, 20:].set(1.0).at[2, 7].set(1e-6)
    assert sample_tokens(logits, jax.random.key(1), temperature=0.0, backend=backend).tolist() == [0, 20, 7]


# -- bad input -------------------------------------------------------------------------------------------------------

ROWS = jnp.zeros((3, 5))
KEY = jax.random.key(0)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"logits": jnp.zeros((3, 5), int)}, TypeError, "logits: takes float16, .*; got int32"),
        ({"logits": jnp.zeros(5)}, ValueError, r"logits: takes \(rows, vocabulary\); got shape \(5,\)"),
        ({"logits": jnp.zeros((3, 0))}, ValueError, "logits: .*vocabulary.* at least 1; got 0"),
        ({"key": jnp.zeros(2)}, TypeError, "key: takes keys of jax.random, typed or uint32; got float32"),
        ({"key": jax.random.split(KEY, 4)}, ValueError, r"key: .* one for each of the 3 rows; got shape \(4,\)"),
        (
            {"key": jnp.zeros((3, 3), jnp.uint32)},
            ValueError,
            r"key: takes keys of two words, or four; got shape \(3, 3\)",
        ),
        ({"temperature": jnp.ones(4)}, ValueError, "temperature: .* one for each of the 3 rows; got shape"),
        ({"top_k": 2.5}, TypeError, "top_k: takes integers; got float32"),
        ({"top_p": jnp.ones((3, 1))}, ValueError, "top_p: .* one for each of the 3 rows; got shape"),
        ({"min_p": True}, TypeError, "min_p: takes float16"),
        ({"return_logprobs": 1}, TypeError, "return_logprobs: takes True or False; got int 1"),
        ({"topk": 3}, TypeError, "got an unexpected keyword argument 'topk'; 'topk' is called 'top_k' here"),
        ({"temperature": -0.5, "validate": True}, ValueError, "temperature: must be finite and at least 0; got -0.5"),
        ({"temperature": np.nan, "validate": True}, ValueError, "temperature: must be finite and at least 0; got nan"),
        ({"top_p": -0.1, "validate": True}, ValueError, "top_p: must be at least 0; got -0.1"),
        ({"min_p": 1.5, "validate": True}, ValueError, "min_p: must be at most 1; got 1.5"),
    ],
)
def test_bad_input_is_named(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    call = {"logits": ROWS, "key": KEY, **changes}
    with pytest.raises(error, match=f"^sample_tokens: {message}"):
        ejkernel_core.call("sample_tokens", **call)


def test_there_are_no_gradients() -> None:
    def loss(logits: jax.Array) -> jax.Array:
        return sample_tokens(logits, KEY, return_logprobs=True)[1].sum()

    with pytest.raises(NotDifferentiable, match="'sample_tokens' has no gradient for logits"):
        jax.grad(loss)(ROWS)


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_a_temperature_of_minus_0_is_that_of_0(backend: str) -> None:
    logits = np.random.default_rng(3).standard_normal((4, 50)).astype(np.float32)
    temperature = np.array([-0.0, 0.0, -0.0, -0.0], np.float32)
    tokens = sample_tokens(logits, jax.random.key(1), temperature=temperature, validate=True, backend=backend)
    np.testing.assert_array_equal(tokens, logits.argmax(1))
