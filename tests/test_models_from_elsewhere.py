"""Models of other packages decode on our attention, by the adapters of docs/tutorials/decoding-a-model.md.

Their logits are those of their own attention, which is given masks and a cache of all slots.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.pages import FENCE

PAGE = Path(__file__).parents[1] / "docs/tutorials/decoding-a-model.md"
PROMPTS, CHUNK, STEPS, SLOTS, VOCABULARY = np.array([12, 7, 9]), 4, 20, 41, 97
BATCH, LONGEST = len(PROMPTS), int(PROMPTS.max())
TOKENS = np.random.default_rng(1).integers(1, VOCABULARY, (BATCH, LONGEST + STEPS), np.int32)
AT_ONCE, IN_CHUNKS = [LONGEST] + [1] * STEPS, [CHUNK] * (LONGEST // CHUNK) + [1] * STEPS

pytestmark = pytest.mark.long


def definitions(heading: str) -> SimpleNamespace:
    """What the page defines at its beginning and in one section. Running it exchanges the package's attention."""
    beginning, *sections = re.split("^## ", PAGE.read_text(), flags=re.MULTILINE)
    (section,) = (text for text in sections if text.startswith(heading))
    namespace: dict[str, Any] = {"__name__": PAGE.stem}
    for _, code in FENCE.findall(beginning + section):
        exec(compile(code, PAGE, "exec", dont_inherit=True), namespace)
    return SimpleNamespace(**namespace)


def random_like(tree: Any) -> Any:
    rng = np.random.default_rng(2)
    return jax.tree.map(lambda leaf: jnp.asarray(0.3 * rng.normal(size=leaf.shape), leaf.dtype), tree)


def logits_of(step: Callable[..., Any], cache: Any, positions: np.ndarray, parts: list[int], *masks: Any) -> np.ndarray:
    """The logits of all tokens, of which each call gets so many."""
    logits, first = [], 0
    for i, length in enumerate(parts):
        part = slice(first, first := first + length)
        out, cache = step(cache, TOKENS[:, part], positions[:, part], *(mask[i] for mask in masks))
        logits.append(np.asarray(out))
    return np.concatenate(logits, axis=1)


def their_masks(is_token: np.ndarray) -> list[np.ndarray]:
    """Of the prompt, and of each step. A token of the prompt and of a step is in the slot of its number."""
    is_held = np.pad(is_token, ((0, 0), (0, SLOTS - LONGEST)), constant_values=True)
    last, slot = np.arange(LONGEST + STEPS)[:, None], np.arange(SLOTS)
    masks = is_held[:, None] & (slot <= last)
    return [masks[:, :LONGEST], *np.split(masks[:, LONGEST:], STEPS, axis=1)]


def empty(cache: Any) -> Any:
    """The same, and all slots are NaN."""
    return {name: layer | {kind: layer[kind] * jnp.nan for kind in "kv"} for name, layer in cache.items()}


def equations(program: Any) -> Iterator[Any]:
    """All equations of a jaxpr, and of those inside."""
    for equation in program.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def assert_no_mask(step: Callable[..., Any], cache: Any, positions: np.ndarray) -> None:
    """Attention gets each layer's cache and positions, and the program has no array of queries x slots."""
    for length in (CHUNK, 1):
        arguments = cache, TOKENS[:, :length], positions[:, :length]
        program = list(equations(jax.make_jaxpr(step)(*arguments).jaxpr))
        calls = [[v.aval.shape for v in e.invars] for e in program if e.primitive.name == "ejkernel_call"]
        assert [shapes[1:3] for shapes in calls] == [[layer["k"].shape, layer["v"].shape] for layer in cache.values()]
        assert all({*shapes[3:]} <= {(BATCH,), (BATCH, shapes[1][1])} for shapes in calls)
        scores = {(length, shapes[1][1]) for shapes in calls}
        shapes = [variable.aval.shape for equation in program for variable in [*equation.invars, *equation.outvars]]
        assert [shape for shape in shapes if len(shape) > 2 and shape[-2:] in scores] == []


def assert_close(logits: np.ndarray, expected: np.ndarray, positions: np.ndarray) -> None:
    """Of all tokens but padding."""
    is_token, tolerance = positions >= 0, {"float32": 3e-6, "float64": 1e-13}[str(logits.dtype)]
    assert logits.dtype == expected.dtype
    np.testing.assert_allclose(logits[is_token], expected[is_token], rtol=0, atol=tolerance * np.abs(expected).max())


# -- Qwen3 of tunix, with prompts padded on the left -------------------------------------------------------------------


@pytest.fixture
def qwen3(monkeypatch):
    module = pytest.importorskip("tunix.models.qwen3.model")
    monkeypatch.setattr(module.Attention, "block", module.Attention.block)  # theirs comes back
    return module


def qwen3_model(qwen3: Any) -> Any:
    from flax import nnx

    config = qwen3.ModelConfig(
        num_layers=2,
        vocab_size=VOCABULARY,
        embed_dim=24,
        hidden_dim=40,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        rope_theta=1_000_000,
        norm_eps=1e-6,
    )
    graph, state = nnx.split(qwen3.Qwen3(config, rngs=nnx.Rngs(0)))
    return nnx.merge(graph, random_like(state))


def test_qwen3(qwen3):
    model = qwen3_model(qwen3)
    positions = np.arange(LONGEST + STEPS) - (LONGEST - PROMPTS)[:, None]
    masks = their_masks(positions[:, :LONGEST] >= 0)
    cache = model.init_cache(BATCH, SLOTS, jnp.float32)
    theirs = jax.jit(lambda cache, tokens, positions, mask: model(tokens, positions, cache, mask))
    expected = logits_of(theirs, cache, positions, AT_ONCE, masks)
    step = definitions("Qwen3").qwen3_step
    ours = jax.jit(lambda cache, tokens, positions: step(model, cache, tokens, positions))
    assert_no_mask(ours, cache, positions)
    assert_close(logits_of(ours, empty(cache), positions, IN_CHUNKS), expected, positions)


class Numbers:
    """A tokenizer, for which a text has the numbers of tokens."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, numbers: Any) -> str:
        return " ".join(map(str, numbers))

    pad_id, bos_id, eos_id = (staticmethod(lambda number=number: number) for number in range(3))


def test_the_sampler_of_tunix(qwen3):
    from tunix.generate import sampler

    model = qwen3_model(qwen3)
    model.num_embed = VOCABULARY  # which the sampler asks for, and the model does not have
    cache = sampler.CacheConfig(cache_size=SLOTS, num_layers=2, num_kv_heads=2, head_dim=8)
    texts = [" ".join(map(str, row[3:length])) for row, length in zip(TOKENS, PROMPTS, strict=True)]

    def sampled():
        sample = sampler.Sampler(model, Numbers(), cache)
        return sample(texts, STEPS, return_logits=True, forbidden_tokens=[0], eos_tokens=[VOCABULARY])

    expected = sampled()
    definitions("Qwen3")
    sample = sampled()
    np.testing.assert_array_equal(sample.tokens, expected.tokens)
    np.testing.assert_allclose(sample.logits, expected.logits, rtol=0, atol=1e-5)


# -- gemma 3, with prompts padded on the right, and rings that wrap around for layers with a window --------------------


@pytest.fixture
def modules(monkeypatch):
    module = pytest.importorskip("gemma.gm.nn._modules")
    monkeypatch.setattr(module, "Attention", module.Attention)  # theirs comes back
    return module


def gemma_model(modules: Any, dtype: Any, vocabulary: int = VOCABULARY) -> tuple[Any, Any]:
    """The model, of a class of its own because JAX caches its program, and its parameters."""
    from gemma.gm.nn import _config, _transformer

    config = _config.TransformerConfig(
        num_embed=vocabulary,
        embed_dim=24,
        hidden_dim=40,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        use_qk_norm=True,
        final_logit_softcap=None,
        attention_types=(modules.AttentionType.LOCAL_SLIDING, modules.AttentionType.GLOBAL) * 2,
        sliding_window_size=6,
        global_base_frequency=1_000_000,
    )
    model = type("Gemma", (_transformer.Transformer,), {})(config=config, dtype=dtype)
    return model, random_like(model.init(jax.random.key(0), TOKENS % vocabulary)["params"])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gemma_3(modules, dtype):
    with jax.enable_x64(dtype == "float64"):
        model, params = gemma_model(modules, dtype)
        is_token = np.arange(LONGEST) < PROMPTS[:, None]
        steps = PROMPTS[:, None] + np.arange(STEPS)
        positions = np.concatenate([np.where(is_token, np.arange(LONGEST), -1), steps], axis=1, dtype=np.int32)

        @jax.jit
        def theirs(cache, tokens, positions, mask):
            out = model.apply({"params": params}, tokens, cache=cache, positions=positions, attention_mask=mask)
            return out.logits, out.cache

        cache = model.init_cache(batch_size=BATCH, dtype=dtype, cache_length=SLOTS)
        cache = {name: layer | {"end_index": layer["end_index"].astype(int)} for name, layer in cache.items()}
        expected = logits_of(theirs, cache, positions, AT_ONCE, their_masks(is_token))
        page = definitions("gemma")
        cache = page.gemma_caches(model.config, BATCH, SLOTS, CHUNK, dtype)
        assert [layer["k"].shape[1] for layer in cache.values()] == [9, SLOTS] * 2
        ours = jax.jit(lambda *arguments: page.gemma_step(model, params, *arguments))
        assert_no_mask(ours, cache, positions)
        assert_close(logits_of(ours, empty(cache), positions, IN_CHUNKS), expected, positions)


def test_the_sampler_of_gemma(modules):
    from gemma import gm

    def tokens():
        tokenizer = gm.testing.DummyTokenizer()
        model, params = gemma_model(modules, jnp.float32, tokenizer.vocab_size)
        sampler = gm.text.Sampler(
            model=model,
            params=params,
            tokenizer=tokenizer,
            sampling=gm.text.RandomSampling(temperature=3.0),
            cache_length=64,
            max_out_length=STEPS,
            pad_length=16,
            stop_tokens=(),
        )
        texts = ["My name is Morgane ! hello there", "Hello world", "hello hello input string world"]
        return sampler.sample(texts, max_new_tokens=STEPS, rng=5, return_state=True).state.predicted_tokens

    expected = tokens()
    definitions("gemma")
    np.testing.assert_array_equal(tokens(), expected)
