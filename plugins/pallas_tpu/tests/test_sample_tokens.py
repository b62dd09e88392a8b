"""Sampling on TPUs: random calls, its noise, the interpreter of a whole TPU, its blocks, what it refuses."""

from __future__ import annotations

import doctest
import re
from collections.abc import Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import ejkernel_core as core
from ejkernel_core import Example
from ejkernel_ops.sample_tokens.noise import gumbel, random_bits
from ejkernel_pallas_tpu import sample_tokens
from ejkernel_pallas_tpu.launch._generations import KINDS
from ejkernel_pallas_tpu.sample_tokens import Config, _blocks, _numbers
from ejkernel_pallas_tpu.testing import interpreted_registry
from ejkernel_testing import KernelProofs

OP = "sample_tokens"
KERNELS = {f"{OP}.pallas_tpu": sample_tokens}
REGISTRY = interpreted_registry(KERNELS)


def test_doctests():
    assert doctest.testmod(_blocks).attempted
    assert not doctest.testmod(_blocks).failed


# -- random calls ----------------------------------------------------------------------------------------------------

CHOICES: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, 0.01, 0.6, 1.0, 3.0),
    "top_k": (-1, 0, 1, 2, 40, 10**9),
    "top_p": (0.0, 0.1, 0.7, 0.999, 1.0, 2.0),
    "min_p": (-1.0, 0.0, 1e-6, 0.05, 0.9, 1.0),
}
#: Blocks of rows that are full or not, bits of a pass, and noise for all words or for those that are kept.
CONFIGS = (Config(8), Config(16, bits=2), Config(8, has_weights=False, lane_words=0), Config(16, bits=2, lane_words=4))
#: The logits of a kind of row, from draws of a normal distribution.
KINDS_OF_LOGITS: dict[str, Any] = {
    "of a model": lambda draws, rng: 3 * draws,
    "flat": lambda draws, rng: 1e-3 * draws,
    "peaked": lambda draws, rng: 100 * draws,
    "equal": lambda draws, rng: np.round(draws),
    "half of them -inf": lambda draws, rng: np.where(rng.random(draws.shape) < 0.5, -np.inf, draws),
    "NaN and inf": lambda draws, rng: np.where(
        rng.random(draws.shape) < 0.01, rng.choice([np.nan, np.inf], draws.shape), draws
    ),
    "nothing finite": lambda draws, rng: rng.choice([np.nan, -np.inf], draws.shape),
}


def drawn_call(seed: int, rows: int, vocabulary: int) -> dict[str, Any]:
    """Each row has logits of a kind, and numbers, of its own."""
    rng = np.random.default_rng([seed, 51])
    draws, kinds = rng.normal(size=(rows, vocabulary)), rng.choice(list(KINDS_OF_LOGITS), rows)
    logits = [KINDS_OF_LOGITS[kind](row, rng) for kind, row in zip(kinds, draws, strict=True)]
    numbers = {name: rng.choice(np.array(choices), rows) for name, choices in CHOICES.items()}
    given = {name: x if x.dtype.kind == "i" else x.astype(np.float32) for name, x in numbers.items()}
    key = rng.integers(0, 2**32, (rows, 2), dtype=np.uint32)
    return {"logits": np.asarray(logits, np.float32), "key": key, **given}


def in_float64(call: dict[str, Any]) -> Any:
    """The tokens and log-probabilities by a sort, in float64."""
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(x, np.float64 if x.dtype == np.float32 else None) for name, x in call.items()}
        # An inf is the largest number of the dtype that is drawn from.
        wide["logits"] = jnp.minimum(wide["logits"], np.finfo(np.float32).max)
        return jax.tree.map(np.asarray, core.call(OP, **wide, return_logprobs=True, backend="reference"))


@pytest.mark.parametrize(
    ("rows", "vocabulary"), [(37, 1500), (40, 300), pytest.param(37, 9000, marks=pytest.mark.long), (6, 2), (1, 4099)]
)
@pytest.mark.parametrize("cfg", CONFIGS, ids=lambda cfg: f"{cfg.rows}-{cfg.bits}-{cfg.has_weights}-{cfg.lane_words}")
def test_random_calls(rows: int, vocabulary: int, cfg: Config) -> None:
    draw = jax.jit(lambda call: REGISTRY.call(OP, **call, return_logprobs=True, backend="pallas_tpu", cfg=cfg))
    for seed in range(3):
        call = drawn_call(seed, rows, vocabulary)
        (tokens, logprobs), (right, right_logprobs) = draw(call), in_float64(call)
        np.testing.assert_array_equal(tokens, right)
        np.testing.assert_allclose(logprobs, right_logprobs, rtol=2e-5, atol=2e-5)


def test_a_key_gives_one_token_in_any_batch() -> None:
    """Alone, in another order, and with words of -inf behind the vocabulary."""
    call = drawn_call(7, 20, 1100)

    def tokens(call: dict[str, Any]) -> Any:
        return REGISTRY.call(OP, **call, backend="pallas_tpu")

    together = tokens(call)
    order = np.random.default_rng(0).permutation(20)
    np.testing.assert_array_equal(tokens({name: array[order] for name, array in call.items()}), together[order])
    np.testing.assert_array_equal(tokens({name: array[17:18] for name, array in call.items()}), together[17:18])
    padded = np.pad(call["logits"], ((0, 0), (0, 1200)), constant_values=-np.inf)
    np.testing.assert_array_equal(tokens({**call, "logits": padded}), together)


@pytest.mark.parametrize("lane_words", [0, 16])
def test_the_first_of_equal_logits_is_the_best_one(lane_words: int) -> None:
    """Of one lane and of others, in one step and in several."""
    places = ([2500, 4000, 2501], [7, 135], [300, 301, 302], [4999], [130, 129, 4096 + 1])
    logits = np.zeros((len(places), 5000), np.float32)
    for row, words in enumerate(places):
        logits[row, words] = 1.0
    cfg = Config(8, lane_words=lane_words)
    tokens = REGISTRY.call(OP, logits, drawn_call(0, 5, 2)["key"], temperature=0.0, backend="pallas_tpu", cfg=cfg)
    assert tokens.tolist() == [min(words) for words in places]


@pytest.mark.parametrize("lane_words", [0, 4, 16])
def test_noise_is_made_for_the_words_that_are_kept(lane_words: int) -> None:
    """Several of a lane, all of which are drawn from."""
    logits = 1e-2 * np.random.default_rng(3).normal(size=(24, 6000)).astype(np.float32)
    is_kept = np.pad(logits >= np.sort(logits)[:, -200:-199], ((0, 0), (0, 16)))
    most = is_kept.reshape(24, -1, 128).sum(1).max()
    assert 4 < most <= 16
    call = {"logits": logits, "key": drawn_call(1, 24, 2)["key"], "top_k": np.full(24, 200)}
    cfg = Config(8, lane_words=lane_words)
    tokens = REGISTRY.call(OP, **call, backend="pallas_tpu", cfg=cfg)
    np.testing.assert_array_equal(tokens, in_float64(call)[0])


def test_a_call_without_rows() -> None:
    call = {name: array[:0] for name, array in drawn_call(0, 1, 30).items()}
    tokens, logprobs = REGISTRY.call(OP, **call, return_logprobs=True, backend="pallas_tpu")
    assert (tokens.shape, tokens.dtype) == ((0,), jnp.int32)
    assert (logprobs.shape, logprobs.dtype) == ((0,), jnp.float32)


# -- numbers ---------------------------------------------------------------------------------------------------------


def test_noise_has_the_bits_of_the_definition() -> None:
    """In a kernel, for keys with and without a sign bit, and for words far behind."""
    keys = np.array([[7, 2**31 + 9], [2**32 - 1, 2**32 - 1], [0, 0], [12345, 2**31]], np.uint32)
    words = jnp.broadcast_to(100_000 + jnp.arange(512), (4, 512))
    first, second = (jnp.broadcast_to(keys[:, i : i + 1], (4, 512)) for i in (0, 1))

    def kernel(first: Any, second: Any, words: Any, bits: Any, noise: Any) -> None:
        bits[...] = random_bits(first[...], second[...], words[...].astype(jnp.uint32))
        noise[...] = _numbers.noise_of(first[...], second[...], words[...])

    shapes = [jax.ShapeDtypeStruct((4, 512), dtype) for dtype in (jnp.uint32, jnp.float32)]
    bits, noise = pl.pallas_call(kernel, shapes, interpret=True)(first, second, words)
    for row in range(4):
        np.testing.assert_array_equal(bits[row], jax.random.bits(keys[row], (100_512,), jnp.uint32)[100_000:])
    right = gumbel(jnp.asarray(keys), 100_512, jnp.float32)[:, 100_000:]
    np.testing.assert_allclose(noise, right, rtol=1e-6, atol=1e-6)  # logarithms in vectors of another length


def test_32_bits_are_rounded_once() -> None:
    rng = np.random.default_rng(0)
    ties = (rng.integers(0, 2**24, 5000, dtype=np.uint64) * 256 + 128).astype(np.uint32)
    bits = np.concatenate([rng.integers(0, 2**32, 5000, dtype=np.uint32), ties, ties + 1, ties - 1, [0, 2**32 - 1]])
    bits = bits.astype(np.uint32)
    np.testing.assert_array_equal(_numbers.rounded(jnp.asarray(bits)), bits.astype(np.float32))


def test_nothing_is_compared_for_being_unequal() -> None:
    """Mosaic takes a NaN to equal itself, so that ``isnan`` would be False on a TPU, and True in an interpreter."""
    call = drawn_call(0, 20, 5000)
    inv = attrs.evolve(core.registry.invocation(OP, **call, return_logprobs=True), device_kind="TPU v5e")
    text = str(jax.make_jaxpr(lambda arrays: sample_tokens.compute(inv.with_arrays(arrays), Config(), False))(call))
    operations = {*re.findall(r" = (\w+)", text)}
    assert {"pallas_call", "le", "eq"} < operations
    assert not operations & {"ne", "is_finite"}


# -- with races detected ---------------------------------------------------------------------------------------------


class TestDetectingRaces(KernelProofs):
    """On a chip with two cores, which have their own blocks of rows."""

    kernel = f"{OP}.pallas_tpu"
    refuses = frozenset({"float64", "float16"})
    registry = interpreted_registry(KERNELS, device_kind="TPU v5p", races=True)
    names = ("ties", "not-finite", "far-apart", "blocks-and-a-tail")

    def examples(self) -> Sequence[Example]:
        examples = [example for example in super().examples() if example.name in self.names]
        assert len(examples) == len(self.names)
        return [attrs.evolve(one, checks=frozenset({"values"}), variations=(), long=False) for one in examples]

    @pytest.fixture(autouse=True)
    def _fresh_memory(self):
        pltpu.reset_tpu_interpret_mode_state()
        yield
        pltpu.reset_tpu_interpret_mode_state()


# -- programs --------------------------------------------------------------------------------------------------------

DEVICES = ("TPU v4", "TPU v5e", "TPU v5p", "TPU v6e", "TPU7x")
CALLS = {example.name: example.abstract() for example in sample_tokens.examples()}


def invocation(name: str, device_kind: str = "TPU v5e", **changes: Any) -> Any:
    inv = core.registry.invocation(OP, **{**CALLS[name], **changes})
    return attrs.evolve(inv, platform="tpu", device_kind=device_kind)


def lowered(name: str, device_kind: str, **options: Any) -> str:
    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(device_kind, 1, "tpu"))
    arrays = {name: value for name, value in CALLS[name].items() if isinstance(value, jax.ShapeDtypeStruct)}
    rest = {name: value for name, value in CALLS[name].items() if name not in arrays}
    with use_abstract_mesh(mesh):
        traced = jax.jit(lambda arrays: core.call(OP, **arrays, **rest, **options)).trace(arrays)
        return str(traced.lower(lowering_platforms=("tpu",)).as_text())


@pytest.mark.parametrize("device_kind", DEVICES)
@pytest.mark.parametrize("name", ["words that fill no register", "five rows in bfloat16"])
def test_every_configuration_lowers(name: str, device_kind: str) -> None:
    space = list(sample_tokens.config_space(invocation(name, device_kind)))
    assert len(space) > 3
    for cfg in space:
        assert lowered(name, device_kind, backend="pallas_tpu", cfg=cfg).count("tpu_custom_call") == 1


@pytest.mark.parametrize("name", CALLS)
def test_every_call_lowers(name: str) -> None:
    assert lowered(name, "TPU v6e", backend="pallas_tpu").count("tpu_custom_call") == 1


def test_plain_jax_is_preferred() -> None:
    """Nothing is known of this kernel's time."""
    assert "tpu_custom_call" not in lowered("all arguments", "TPU v5e")


# -- configurations and refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CALLS)
def test_configurations_fit_and_the_first_is_the_heuristics(name: str, kind: str) -> None:
    inv = invocation(name, kind)
    try:
        space = list(sample_tokens.config_space(inv))
    except core.Unsupported:
        assert KINDS[kind].name == "v4"
        return
    assert space[0] == sample_tokens.heuristic_cfg(inv)
    for cfg in space:
        sample_tokens.check_cfg(inv, cfg)
        assert sample_tokens.vmem(inv, cfg) <= KINDS[kind].budget
    assert len({*space}) == len(space)


@pytest.mark.parametrize(
    ("name", "device_kind", "rows", "has_weights"),
    [
        ("all arguments", "TPU v5e", 16, True),
        ("all arguments", "TPU v4", 8, False),  # with exponentials, 8 rows would take 16 MiB
        ("one row", "TPU v6e", 8, True),
        ("a long vocabulary", "TPU7x", 8, True),  # 16 rows would take 64.6 MiB
        ("a long vocabulary", "TPU v5p", 8, True),
    ],
)
def test_the_rows_of_a_block(name: str, device_kind: str, rows: int, has_weights: bool) -> None:
    cfg = sample_tokens.heuristic_cfg(invocation(name, device_kind))
    assert (cfg.rows, cfg.has_weights) == (rows, has_weights)


def test_there_is_nothing_to_search_for_without_a_filter() -> None:
    space = list(sample_tokens.config_space(invocation("no filter")))
    assert len({(cfg.bits, cfg.has_weights, cfg.lane_words) for cfg in space}) == 1


def test_rows_that_do_not_fit_are_refused() -> None:
    words = "8 rows of 262144 words take 24.6 MiB of vector memory, of which v4 has 15"
    with pytest.raises(core.Unsupported, match=words):
        sample_tokens.heuristic_cfg(invocation("a long vocabulary", "TPU v4"))
    with pytest.raises(core.Unsupported, match="needs 63.5 MiB of vector memory, of which there are 56"):
        sample_tokens.check_cfg(invocation("all arguments", "TPU7x"), Config(32))


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("cfg", [Config(), Config(interpret=True)])
def test_dtypes_that_a_tpu_does_not_have_are_refused(dtype: str, cfg: Config) -> None:
    with jax.enable_x64(True):
        inv = invocation("all arguments", logits=jax.ShapeDtypeStruct((64, 128256), jnp.dtype(dtype)))
    with pytest.raises(core.Unsupported, match=f"take bfloat16 and float32; logits is {dtype}"):
        sample_tokens.check_cfg(inv, cfg)


def test_other_devices_are_refused_unless_it_is_interpreted() -> None:
    inv = attrs.evolve(invocation("one word"), platform="cpu", device_kind="cpu")
    with pytest.raises(core.Unsupported, match="the Pallas TPU kernels run on TPUs; this is cpu"):
        sample_tokens.check_cfg(inv, Config())
    call = drawn_call(3, 9, 40)
    tokens = core.call(OP, **call, cfg=Config(interpret=True))
    np.testing.assert_array_equal(tokens, in_float64(call)[0])
