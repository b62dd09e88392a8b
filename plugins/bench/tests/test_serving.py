"""Continuous batching: every token is that of the same request alone, and no page is lost."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_bench import serving
from ejkernel_bench.serving import Decoder, Engine, Limits, Output, PagePool, Request, generate
from ejkernel_bench.serving.models import RopeScaling, _angles
from ejkernel_bench.serving.scheduler import Scheduler
from ejkernel_bench.serving.weights import load
from ejkernel_ops import sample_tokens

DENSE = Decoder(
    layers=2, width=32, heads=4, kv_heads=2, head_dim=8, inner=48, vocabulary=61, dtype="float32"
)  # fmt: skip
EXPERTS = Decoder(
    layers=2, width=32, heads=4, kv_heads=2, head_dim=8, inner=24, vocabulary=61, experts=6, experts_per_token=2,
    has_head_norms=True, dtype="float32",
)  # fmt: skip
#: Logits so near to each other may change places by rounding, which depends on the batch.
NEAR = 1e-4


@functools.cache
def params_of(sizes: Decoder) -> Any:
    return serving.init_params(sizes, jax.random.key(0))


@functools.cache
def compiled_engine(sizes: Decoder, limits: Limits) -> Engine:
    return Engine(serving.decoder(sizes), params_of(sizes), sizes.cache(limits.pages, limits.page_size), limits)


def engine_of(sizes: Decoder = DENSE, pages: int = 14, most_sequences: int = 4) -> Engine:
    """An engine that has answered nothing, which tests share for its programs."""
    engine = compiled_engine(sizes, Limits(pages, 4, 40, most_sequences, 12))
    assert engine.is_idle
    engine.pool = PagePool(pages, 4)
    engine.scheduler = Scheduler(engine.pool, most_sequences, 12)
    engine._requests = 0
    return engine


@functools.cache
def alone(sizes: Decoder, request: Request) -> tuple[int, ...]:
    """The tokens of a request that nothing runs beside, and which finds no pages of others."""
    engine = engine_of(sizes, pages=10, most_sequences=1)
    return tuple(out.token for out in generate(engine, [request]) if out.token is not None)


def random_request(number: int, vocabulary: int = 61) -> Request:
    """Some begin alike, some of these end with a whole page; half of them draw."""
    rng = np.random.default_rng([number, 3])
    shared = np.random.default_rng(number % 3).integers(0, vocabulary, 12)[: rng.choice([0, 4, 7, 8, 12])]
    own = rng.integers(0, vocabulary, rng.integers(0 if len(shared) else 1, 12))
    return Request(
        prompt=tuple(map(int, [*shared, *own])),
        max_tokens=int(rng.integers(1, 16)),
        stop_tokens={3, 5, 11} if number % 4 == 0 else (),
        temperature=float(rng.choice([0.0, 0.7, 1.3])),
        top_k=int(rng.choice([0, 5])),
        top_p=float(rng.choice([1.0, 0.9])),
        min_p=float(rng.choice([0.0, 0.02])),
        seed=number % 17,
    )


def best_two(sizes: Decoder, tokens: tuple[int, ...]) -> float:
    """How far the best logit behind tokens is from the second."""
    best, second = np.sort(dense_logits(sizes, tokens)[-1])[::-1][:2]
    return float(best - second)


def serve(engine: Engine, count: int, cancel: float = 0.05) -> dict[int, list[Output]]:
    """Requests that arrive a few at a time, of which some are cancelled."""
    rng = np.random.default_rng(count)
    outputs: dict[int, list[Output]] = {number: [] for number in range(count)}
    arrived = 0
    while arrived < count or not engine.is_idle:
        for _ in range(min(int(rng.poisson(0.7)), count - arrived)):
            assert engine.add(random_request(arrived)) == arrived
            arrived += 1
        if arrived and rng.random() < cancel:
            engine.cancel(int(rng.integers(max(0, arrived - 8), arrived)))
        for output in engine.step():
            assert not outputs[output.number] or outputs[output.number][-1].finish is None
            outputs[output.number].append(output)
        check_pages(engine)
    return outputs


def check_pages(engine: Engine) -> None:
    """Each page is free, or has as many users as sequences have it."""
    users = np.zeros(engine.limits.pages, int)
    for sequence in engine.scheduler.running:
        assert len({*sequence.pages}) == len(sequence.pages)
        np.add.at(users, sequence.pages, 1)
    assert engine.pool._users == users.tolist()
    assert engine.pool.free == (users == 0).sum()
    assert not any(sequence.pages for sequence in engine.scheduler.waiting)


def check_tokens(sizes: Decoder, outputs: dict[int, list[Output]]) -> int:
    """Compare each request with itself alone; how many differ where two logits are near."""
    near = 0
    for number, answer in outputs.items():
        request = random_request(number)
        tokens = [output.token for output in answer if output.token is not None]
        right, finish = alone(sizes, request), answer[-1].finish
        if finish != "cancelled":
            assert finish == ("length" if len(tokens) == request.max_tokens else "stop")
            right = right[: max(len(tokens), len(right))]
        else:
            right = right[: len(tokens)]
        if tuple(tokens) == right:
            continue
        place = next(i for i, pair in enumerate(zip(tokens, right, strict=False)) if pair[0] != pair[1])
        assert request.temperature == 0
        assert best_two(sizes, request.prompt + right[:place]) < NEAR
        near += 1
    return near


@pytest.mark.parametrize("sizes", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_every_token_is_that_of_the_request_alone(sizes: Decoder) -> None:
    engine = engine_of(sizes)
    outputs = serve(engine, 150)
    assert check_tokens(sizes, outputs) <= 1
    finishes = {answer[-1].finish for answer in outputs.values()}
    assert finishes == {"length", "stop", "cancelled"}
    assert engine.scheduler.preemptions > 5
    assert engine.pool.free == 14


@pytest.mark.long
def test_a_day_of_serving() -> None:
    engine = engine_of(DENSE)
    outputs = serve(engine, 10_000, cancel=0.02)
    assert check_tokens(DENSE, outputs) <= 10
    assert engine.scheduler.preemptions > 500
    assert engine.pool.free == 14


# -- the model by its definition -------------------------------------------------------------------------------------


def dense_logits(sizes: Decoder, tokens: tuple[int, ...]) -> np.ndarray:
    """Of all tokens of a sequence, in NumPy and float64, without pages."""
    p = jax.tree.map(lambda array: np.asarray(array, np.float64), params_of(sizes))
    norm = lambda x, weight: x / np.sqrt((x**2).mean(-1, keepdims=True) + sizes.epsilon) * weight
    silu = lambda x: x / (1 + np.exp(-x))
    x, count, half = p["embedding"][list(tokens)], len(tokens), sizes.head_dim // 2
    angles = np.arange(count)[:, None] * sizes.rope_theta ** (-np.arange(half) / half)

    def rotated(x: np.ndarray) -> np.ndarray:
        pairs = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None]
        return np.concatenate([pairs.real, pairs.imag], -1)

    for w in p["layers"]:
        heads = (norm(x, w["attention_norm"]) @ w["qkv"]).reshape(count, -1, sizes.head_dim)
        query, key, value = np.split(heads, [sizes.heads, sizes.heads + sizes.kv_heads], axis=1)
        if sizes.has_head_norms:
            query, key = norm(query, w["q_norm"]), norm(key, w["k_norm"])
        group = sizes.heads // sizes.kv_heads
        query, key, value = rotated(query), rotated(key).repeat(group, 1), value.repeat(group, 1)
        logits = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(sizes.head_dim)
        logits = np.where(np.tri(count, dtype=bool), logits, -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", weights, value).reshape(count, -1) @ w["out"]
        normed = norm(x, w["mlp_norm"])
        if not sizes.experts:
            gate, hidden = np.split(normed @ w["up"], 2, -1)
            x = x + (silu(gate) * hidden) @ w["down"]
            continue
        scores = normed @ w["router"]
        for token, row in enumerate(scores):
            best = np.argsort(-row)[: sizes.experts_per_token]
            shares = np.exp(row[best]) / np.exp(row[best]).sum()
            for expert, share in zip(best, shares, strict=True):
                gate, hidden = np.split(normed[token] @ w["up"][expert], 2)
                x[token] += share * ((silu(gate) * hidden) @ w["down"][expert])
    return norm(x, p["norm"]) @ p["head"]


@pytest.mark.parametrize("sizes", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_the_best_tokens_are_those_of_the_definition(sizes: Decoder) -> None:
    for number in range(3):
        prompt = random_request(100 + number).prompt
        tokens = alone(sizes, Request(prompt, 6))
        for place, token in enumerate(tokens):
            logits = dense_logits(sizes, prompt + tokens[:place])[-1]
            assert logits[token] > logits.max() - NEAR


def test_a_drawn_token_has_the_key_of_its_request_and_position() -> None:
    numbers: dict[str, Any] = {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
    request = Request((5, 6, 7), 12, seed=9, **numbers)
    tokens = alone(DENSE, request)
    for place, token in enumerate(tokens):
        before = request.prompt + tokens[:place]
        key = jax.random.fold_in(jax.random.key(9), len(before))
        logits = jnp.asarray(dense_logits(DENSE, before)[-1:], jnp.float32)
        assert sample_tokens(logits, key[None], **numbers)[0] == token
    assert alone(DENSE, attrs.evolve(request, seed=10)) != tokens


# -- pages -----------------------------------------------------------------------------------------------------------


def run(engine: Engine, *requests: Request) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    for output in generate(engine, requests):
        assert output.finish != "error", output
        if output.token is not None:
            tokens.setdefault(output.number, []).append(output.token)
    return tokens


def test_prompts_that_begin_alike_share_pages() -> None:
    """The second one computes only what is new; a whole prompt computes its last token again, on a page of its own."""
    engine = engine_of()
    prompt = tuple(range(1, 17))
    first = engine.add(Request(prompt, 8))
    for _ in range(3):
        engine.step()
    (running,) = engine.scheduler.running
    assert running.number == first
    second, third = engine.add(Request((*prompt, 20), 8)), engine.add(Request(prompt, 8))
    tokens: dict[int, list[int]] = {first: [], second: [], third: []}
    counts = []
    while not engine.is_idle:
        before = {s.number: s.computed for s in engine.scheduler.running}
        outputs = engine.step()
        counts.append({s.number: s.computed - before.get(s.number, 0) for s in engine.scheduler.running})
        if len(counts) == 1:
            pages = {s.number: s.pages for s in engine.scheduler.running}
            assert pages[second][:4] == pages[first][:4]
            assert pages[third][:3] == pages[first][:3]
            assert pages[third][3] != pages[first][3]
            check_pages(engine)
        for output in outputs:
            if output.token is not None:
                tokens[output.number].append(output.token)
    assert tokens[second] == list(alone(DENSE, Request((*prompt, 20), 8)))
    assert tokens[third] == list(alone(DENSE, Request(prompt, 8)))


def test_a_page_that_others_read_is_copied_in_all_layers() -> None:
    engine = engine_of()
    before = np.asarray(jax.random.normal(jax.random.key(3), engine.cache.shape))
    after = engine._copy(jnp.array(before), *engine._pairs([(2, 0), (5, 13)]))
    right = before.copy()
    right[[0, 13, 14, 27]] = before[[2, 5, 16, 19]]
    np.testing.assert_array_equal(after, right)


def test_pages_of_ended_requests_are_found_until_they_are_taken() -> None:
    engine = engine_of()
    prompt = tuple(range(30, 46))
    run(engine, Request(prompt, 4))
    number = engine.add(Request((*prompt, 1, 2), 4))
    engine.step()
    (sequence,) = engine.scheduler.running
    assert sequence.number == number
    assert sequence.published == 4
    assert sequence.computed == 18
    run(engine, *(Request(tuple(range(start, start + 20)), 10) for start in (1, 2, 3)))
    assert engine.pool.free == 14


def test_the_last_one_admitted_gives_its_pages_back_and_is_the_next() -> None:
    engine = engine_of()
    requests = [Request(tuple(range(start, start + 24)), 12) for start in (1, 2, 3)]
    for request in requests:
        engine.add(request)
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    while not engine.is_idle:
        before = engine.scheduler.preemptions
        for output in engine.step():
            if output.token is not None:
                tokens[output.number].append(output.token)
        if engine.scheduler.preemptions > before == 0:
            assert [sequence.number for sequence in engine.scheduler.running] == [0]
            assert [sequence.number for sequence in engine.scheduler.waiting] == [1, 2]
    assert engine.scheduler.preemptions
    assert [tuple(tokens[number]) for number in range(3)] == [alone(DENSE, request) for request in requests]


def test_a_page_is_not_given_back_twice() -> None:
    pool = PagePool(3, 4)
    page = pool.take()
    pool.share(page)
    pool.give_back(page)
    assert pool.free == 2
    pool.give_back(page)
    assert pool.free == 3
    with pytest.raises(RuntimeError, match=f"page {page} is given back, and nobody uses it"):
        pool.give_back(page)


# -- requests --------------------------------------------------------------------------------------------------------


def test_requests_that_cannot_be_answered_have_errors_and_the_others_go_on() -> None:
    engine = engine_of()
    requests = [
        Request((), 4),
        Request((1, 2), 3),
        Request((1,) * 38, 3),
        Request((1,), 0),
        Request((1,), 2, temperature=-1.0),
        Request((4, 5), 3),
        Request((1, 2**40), 3),
        Request((-1,), 3),
        Request((1,), 2, temperature=float("nan")),
        Request((1,), 2, top_p=-0.5),
        Request((1,), 2, min_p=1.5),
        Request((1, 2.5), 2),
        Request((1,), 2.5),  # type: ignore[arg-type]
        Request((1,), 2, seed=None),  # type: ignore[arg-type]
        Request((1,), 2, stop_tokens={"</s>"}),  # type: ignore[arg-type]
        Request(np.array([1, 2]), np.int64(3), seed=np.uint32(3)),  # type: ignore[arg-type]
        (1, 2),
    ]
    outputs = list(generate(engine, requests))
    errors = {out.number: out.error for out in outputs if out.finish == "error"}
    assert errors == {
        0: "the prompt is empty",
        2: "38 tokens and max_tokens 3 are more than most_length, 40",
        3: "max_tokens: must be at least 1; got 0",
        4: "temperature: must be finite and at least 0; got -1.0",
        6: f"prompt: has {2**40}; the model's tokens are 0 to 60",
        7: "prompt: has -1; the model's tokens are 0 to 60",
        8: "temperature: must be finite and at least 0; got nan",
        9: "top_p: must be at least 0; got -0.5",
        10: "min_p: must be at most 1; got 1.5",
        11: "prompt: has 2.5; the model's tokens are 0 to 60",
        12: "max_tokens: must be an integer; got 2.5",
        13: "seed: must be an integer; got None",
        14: "stop_tokens: has '</s>'; the model's tokens are 0 to 60",
        16: "takes a Request; got tuple",
    }
    for number, request in ((1, requests[1]), (5, requests[5]), (15, Request((1, 2), 3, seed=3))):
        tokens = tuple(out.token for out in outputs if out.number == number and out.token is not None)
        assert tokens == alone(DENSE, request)


def test_a_request_of_more_tokens_than_the_pool_is_refused() -> None:
    engine = engine_of()
    engine.limits = attrs.evolve(engine.limits, pages=3)
    (output,) = generate(engine, [Request((1,) * 10, 5)])
    engine.limits = attrs.evolve(engine.limits, pages=14)
    assert output == Output(0, finish="error", error="10 tokens and max_tokens 5 are more than all pages have, 12")


def test_a_request_without_a_finite_logit_has_an_error_and_the_others_go_on() -> None:
    """A model that gives NaN after one of the tokens, as after an overflow."""
    right = serving.decoder(DENSE)

    def model(params: Any, tokens: Any, positions: Any, cache: Any, batch: Any) -> Any:
        logits, cache = right(params, tokens, positions, cache, batch)
        return jnp.where((tokens[batch.last] == 60)[:, None], jnp.nan, logits), cache

    engine = Engine(model, params_of(DENSE), DENSE.cache(14, 4), Limits(14, 4, 40, 4, 12))
    outputs = list(generate(engine, [Request((1, 60), 3), Request((4, 5), 3)]))
    assert [out for out in outputs if out.number == 0] == [
        Output(0, finish="error", error="no logit of the model is finite")
    ]
    assert tuple(out.token for out in outputs if out.number == 1 and out.token is not None) == alone(
        DENSE, Request((4, 5), 3)
    )
    assert engine.pool.free == 14


def test_pages_behind_a_token_that_overflows_are_not_shared() -> None:
    """Its keys and values are inf from the first layer on, and so are those before it in the second."""
    params = {**params_of(DENSE), "embedding": params_of(DENSE)["embedding"].at[60].set(jnp.inf)}
    engine = Engine(serving.decoder(DENSE), params, DENSE.cache(24, 4), Limits(24, 4, 40, 4, 16))
    shared, good = tuple(range(8)), Request((*range(8), 9), 3)
    outputs = list(generate(engine, [Request((*shared, 60), 3), Request((*shared, 60, *shared, *shared), 3)]))
    assert [out.error for out in outputs] == ["no logit of the model is finite"] * 2
    number = engine.add(good)
    tokens = tuple(out.token for out in generate(engine, []) if out.number == number and out.token is not None)
    assert tokens == alone(DENSE, good)


def test_a_stop_token_ends_a_request_and_is_not_returned() -> None:
    request = Request((7, 8, 9), 6)
    tokens = alone(DENSE, request)
    first = tokens.index(tokens[-1])
    stopped = Request(request.prompt, 6, stop_tokens={tokens[-1]})
    assert alone(DENSE, stopped) == tokens[:first]
    (output,) = generate(engine_of(), [Request(request.prompt, 6, stop_tokens={tokens[0]})])
    assert output == Output(0, finish="stop")


def test_a_prompt_stays_as_it_was_added() -> None:
    """Whatever becomes of the list, such as that of a conversation."""
    engine, history = engine_of(), [7, 8, 9]
    tokens = []
    for output in generate(engine, [Request(history, 6)]):
        if output.token is not None:
            tokens.append(output.token)
            history.append(output.token)
    assert tuple(tokens) == alone(DENSE, Request((7, 8, 9), 6))
    assert engine.pool.free == 14


@pytest.mark.parametrize(
    "prompt", [np.array([7, 8, 9]), jnp.array([7, 8, 9]), iter([7, 8, 9])], ids=["np", "jnp", "iter"]
)
def test_a_prompt_is_any_tokens(prompt: Any) -> None:
    assert alone(DENSE, Request(prompt, 6)) == alone(DENSE, Request((7, 8, 9), 6))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": 5}, "prompt: takes several tokens; got 5"),
        ({"prompt": (1,), "stop_tokens": 3}, "stop_tokens: takes several tokens; got 3"),
        ({"prompt": (1,), "stop_tokens": None}, "stop_tokens: takes several tokens; got None"),
    ],
)
def test_one_number_is_not_a_prompt(arguments: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Request(**arguments)


def test_requests_are_read_when_there_is_a_place() -> None:
    """No more than there are places, and no step is computed before its outputs are wanted."""
    read = []

    def requests() -> Any:
        for number in range(30):
            read.append(number)
            yield Request((number + 1,) * 8, 12)

    engine = engine_of()
    stream = generate(engine, requests())
    assert read == []
    next(stream)
    assert len(read) == 4
    assert sum(output.finish == "length" for output in stream) == 30


def test_cancelled_requests_give_their_pages_back() -> None:
    engine = engine_of()
    running, waiting, done = engine.add(Request((1, 2, 3), 9)), None, None
    engine.step()
    assert engine.pool.free == 13
    waiting = engine.add(Request((4, 5), 9))
    for number in (running, waiting, 99):
        engine.cancel(number)
    assert engine.step() == [Output(running, finish="cancelled"), Output(waiting, finish="cancelled")]
    assert engine.pool.free == 14
    done = engine.add(Request((1, 2, 3), 3))
    assert [out.token for out in generate(engine, []) if out.number == done and out.token is not None] == list(
        alone(DENSE, Request((1, 2, 3), 3))
    )


# -- programs --------------------------------------------------------------------------------------------------------


def test_all_programs_are_compiled_before_the_first_token() -> None:
    engine = Engine(serving.decoder(DENSE), params_of(DENSE), DENSE.cache(14, 4), Limits(14, 4, 40, 4, 12))
    assert engine.compile_seconds > 0
    assert engine._step._cache_size() == 2  # type: ignore[attr-defined]
    serve(engine, 20)
    assert engine._step._cache_size() == 2  # type: ignore[attr-defined]
    assert engine._copy._cache_size() == 1  # type: ignore[attr-defined]


def test_the_cache_stays_in_its_place() -> None:
    engine = engine_of()
    place = engine.cache.unsafe_buffer_pointer()
    serve(engine, 10)
    assert engine.cache.unsafe_buffer_pointer() == place


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda logits, cache: logits, r"returns \(logits, cache\); got ShapeDtypeStruct"),
        (lambda logits, cache: (logits, cache, cache), r"returns \(logits, cache\); got tuple of 3"),
        (lambda logits, cache: (logits[:2], cache), r"logits \(4, vocabulary\); got shape \(2, 61\)"),
        (lambda logits, cache: (logits, cache[1:]), "the cache that it got, with its shapes"),
        (lambda logits, cache: (logits, cache.astype("bfloat16")), "the cache that it got, with its shapes and dtypes"),
    ],
)
def test_a_model_that_returns_other_arrays_is_refused(change: Any, message: str) -> None:
    right = serving.decoder(DENSE)
    model = lambda *arguments: change(*right(*arguments))
    with pytest.raises(ValueError, match=message):
        Engine(model, params_of(DENSE), DENSE.cache(14, 4), Limits(14, 4, 40, 4, 12))


def test_all_sequences_must_fit_into_a_step() -> None:
    with pytest.raises(ValueError, match="most_tokens: must be at least most_sequences"):
        Engine(serving.decoder(DENSE), params_of(DENSE), DENSE.cache(14, 4), Limits(14, 4, 40, 4, 3))


@pytest.mark.parametrize("cache", [DENSE.cache(14, 4)[1:], DENSE.cache(14, 8), jnp.zeros(()), jnp.zeros(28)])
def test_a_cache_of_other_pages_is_refused(cache: Any) -> None:
    words = "cache: the first axes must be layers \\* 14 pages, and 4 tokens, as in the limits; got shape"
    with pytest.raises(ValueError, match=words):
        Engine(serving.decoder(DENSE), params_of(DENSE), cache, Limits(14, 4, 40, 4, 12))


@pytest.mark.parametrize("name", ["pages", "page_size", "most_length", "most_sequences", "most_tokens"])
def test_sizes_of_an_engine_are_at_least_1(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' must be >= 1: 0"):
        Limits(**{"pages": 14, name: 0})


# -- published weights -----------------------------------------------------------------------------------------------


def write_folder(folder: Path, sizes: Decoder, changes: dict[str, Any] | None = None) -> dict[str, np.ndarray]:
    """A model as Hugging Face publishes Llama and Qwen3, with random weights, in two files."""
    rng = np.random.default_rng(6)
    width, dim = sizes.width, sizes.head_dim
    shapes = {"model.embed_tokens": (sizes.vocabulary, width), "model.norm": (width,)}
    for layer in range(sizes.layers):
        own = {
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
            "self_attn.q_proj": (sizes.heads * dim, width),
            "self_attn.k_proj": (sizes.kv_heads * dim, width),
            "self_attn.v_proj": (sizes.kv_heads * dim, width),
            "self_attn.o_proj": (width, sizes.heads * dim),
        }
        if sizes.has_head_norms:
            own |= {"self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,)}
        mlps = [f"mlp.experts.{expert}" for expert in range(sizes.experts)] or ["mlp"]
        for mlp in mlps:
            own |= {f"{mlp}.{name}_proj": (sizes.inner, width) for name in ("gate", "up")}
            own[f"{mlp}.down_proj"] = (width, sizes.inner)
        if sizes.experts:
            own["mlp.gate"] = (sizes.experts, width)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    arrays = {f"{name}.weight": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for number in range(2):
        write_safetensors(folder / f"model-{number}.safetensors", dict([*arrays.items()][number::2]))
    config = {
        "model_type": "qwen3_moe" if sizes.has_head_norms else "llama",
        "num_hidden_layers": sizes.layers,
        "hidden_size": width,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": dim,
        "intermediate_size": sizes.inner,
        "vocab_size": sizes.vocabulary,
        "rms_norm_eps": sizes.epsilon,
        "tie_word_embeddings": True,
    }
    if sizes.experts:
        of_experts = {"num_experts": sizes.experts, "num_experts_per_tok": sizes.experts_per_token}
        of_experts["norm_topk_prob"] = True
        config |= {"moe_intermediate_size": sizes.inner, "intermediate_size": 999, **of_experts}
    (folder / "config.json").write_text(json.dumps(config | (changes or {})))
    return arrays


def write_safetensors(file: Path, arrays: dict[str, np.ndarray], dtype: str = "F32") -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in arrays.items():
        part = array.tobytes()
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [len(data), len(data) + len(part)]}
        data += part
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("sizes", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_published_weights_are_read(sizes: Decoder, tmp_path: Path) -> None:
    arrays = write_folder(tmp_path, sizes)
    read, params = load(tmp_path, "float32")
    assert read == sizes
    layer, weights = "model.layers.1.", params["layers"][1]
    q, k, v = (arrays[f"{layer}self_attn.{name}_proj.weight"] for name in "qkv")
    np.testing.assert_array_equal(weights["qkv"], np.concatenate([q, k, v]).T)
    np.testing.assert_array_equal(params["head"], arrays["model.embed_tokens.weight"].T)
    np.testing.assert_array_equal(params["embedding"], arrays["model.embed_tokens.weight"])
    np.testing.assert_array_equal(weights["mlp_norm"], arrays[f"{layer}post_attention_layernorm.weight"])
    mlp, place = (f"{layer}mlp.experts.4.", 4) if sizes.experts else (f"{layer}mlp.", ...)
    gate, up, down = (arrays[f"{mlp}{name}_proj.weight"] for name in ("gate", "up", "down"))
    np.testing.assert_array_equal(weights["up"][place], np.concatenate([gate.T, up.T], -1))
    np.testing.assert_array_equal(weights["down"][place], down.T)
    if sizes.experts:
        np.testing.assert_array_equal(weights["router"], arrays[f"{layer}mlp.gate.weight"].T)
        np.testing.assert_array_equal(weights["k_norm"], arrays[f"{layer}self_attn.k_norm.weight"])


def test_rotary_positions_of_llama_3_1(tmp_path: Path) -> None:
    """By wavelengths, as its authors define them."""
    factors = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
    scaling = factors | {"original_max_position_embeddings": 8192}
    write_folder(tmp_path, DENSE, {"rope_scaling": scaling, "rope_theta": 500_000.0})
    assert load(tmp_path, "float32")[0].rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)
    sizes = attrs.evolve(DENSE, head_dim=128, rope_theta=500_000.0, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192))
    right = []
    for pair in range(64):
        frequency = 500_000.0 ** (-pair / 64)
        wavelength = 2 * np.pi / frequency
        if wavelength > 8192 / 1.0:
            frequency /= 8
        elif wavelength >= 8192 / 4.0:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            frequency *= smooth + (1 - smooth) / 8
        right.append(frequency)
    assert len({*np.round(np.array(right) * 500_000.0 ** (np.arange(64) / 64), 6)}) > 3
    np.testing.assert_allclose(_angles(sizes, jnp.array([3]))[0, 0], 3 * np.array(right), rtol=1e-5)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({}, 10_000.0, None),
        ({"rope_theta": 7.0, "rope_scaling": None, "rope_parameters": None}, 7.0, None),
        ({"rope_theta": 7, "rope_scaling": {"type": "default"}}, 7.0, None),
        ({"rope_theta": 7.0, "rope_scaling": {"type": "llama3", **LLAMA3}}, 7.0, RopeScaling(8.0, 1.0, 4.0, 8192)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}, 5e6, None),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            5e5,
            RopeScaling(8.0, 1.0, 4.0, 8192),
        ),
    ],
)
def test_rotary_positions_of_old_and_new_configurations(
    changes: Any, theta: float, scaling: Any, tmp_path: Path
) -> None:
    write_folder(tmp_path, DENSE, changes)
    assert load(tmp_path, "float32")[0] == attrs.evolve(DENSE, rope_theta=theta, rope_scaling=scaling)


def test_fields_that_may_be_left_out_or_have_another_name(tmp_path: Path) -> None:
    fields = {
        "num_experts": None,
        "num_local_experts": 6,
        "head_dim": None,
        "hidden_act": "silu",
        "mlp_only_layers": [],
    }
    write_folder(tmp_path, EXPERTS, fields)
    assert load(tmp_path, "float32")[0] == EXPERTS
    sizes = attrs.evolve(DENSE, kv_heads=4)
    write_folder(tmp_path, sizes, {"num_key_value_heads": None})
    assert load(tmp_path, "float32")[0] == sizes


def test_a_head_of_its_own_and_files_of_several_dtypes(tmp_path: Path) -> None:
    arrays = write_folder(tmp_path, DENSE, {"tie_word_embeddings": False})
    head = np.random.default_rng(7).normal(size=(61, 32)).astype(np.float16)
    added = {"lm_head.weight": head, "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float16)}
    write_safetensors(tmp_path / "model-2.safetensors", added, "F16")
    key = "model.layers.0.self_attn.k_proj.weight"
    narrow = arrays.pop(key).astype(jnp.bfloat16)
    write_safetensors(tmp_path / "model-3.safetensors", {key: narrow}, "BF16")
    write_safetensors(tmp_path / "model-0.safetensors", arrays)
    (tmp_path / "model-1.safetensors").unlink()
    _, params = load(tmp_path, "float32")
    np.testing.assert_array_equal(params["head"], head.T)
    np.testing.assert_array_equal(params["embedding"], arrays["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["layers"][0]["qkv"][:, 32:48], narrow.T)
    # The head of a model whose head is the embedding is not used, as published files have one.
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    _, params = load(tmp_path, "float16")
    np.testing.assert_array_equal(params["head"], arrays["model.embed_tokens.weight"].T.astype(np.float16))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling: only .* llama3 is supported; config.json has {'rope"),
        ({"rope_parameters": {"full_attention": {}}}, "only .* llama3 is supported; config.json has {'full_attention"),
        ({"rope_scaling": [8]}, r"only .* llama3 is supported; config.json has \[8\]"),
        ({"rope_scaling": {"type": "llama3", **LLAMA3, "factor": 0}}, "factor must be a positive number: 0"),
        ({"rope_theta": "1e4"}, "rope_theta must be a positive number: '1e4'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number: nan"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a positive number: None"),
        ({"vocab_size": 62}, r"model.embed_tokens.weight: has shape \(61, 32\), and config.json says \(62, 32\)"),
        ({"num_hidden_layers": 10**12}, "no tensor model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, "9 tensors are not used: model.layers.1"),
        ({"tie_word_embeddings": False}, "no tensor lm_head.weight"),
        ({"tie_word_embeddings": None}, "no tensor lm_head.weight"),
        ({"model_type": "mistral"}, "config.json: model_type must be llama, qwen3 or qwen3_moe: 'mistral'"),
        ({"model_type": None}, "model_type must be .*: None"),
        ({"model_type": "qwen3"}, "no tensor model.layers.0.self_attn.q_norm.weight"),
        ({"hidden_act": "gelu"}, 'config.json: hidden_act must be "silu": "gelu"'),
        ({"attention_bias": True}, "config.json: attention_bias must be false: true"),
        ({"mlp_bias": True}, "mlp_bias must be false: true"),
        ({"use_sliding_window": True}, "use_sliding_window must be false: true"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step must be 1: 2"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers must be \[\]: \[0\]"),
        ({"hidden_size": 32.0}, "config.json: hidden_size must be a positive integer: 32.0"),
        ({"num_attention_heads": None}, "num_attention_heads must be a positive integer: None"),
        ({"num_attention_heads": True}, "num_attention_heads must be a positive integer: True"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide num_attention_heads, 4: 3"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be a positive integer: 0"),
        ({"head_dim": -8}, "head_dim must be a positive integer: -8"),
        ({"intermediate_size": "48"}, "intermediate_size must be a positive integer: '48'"),
    ],
)
def test_weights_of_another_model_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_folder(tmp_path, DENSE, changes)
    with pytest.raises(ValueError, match=message):
        load(tmp_path, "float32")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob must be true: false"),
        ({"norm_topk_prob": None}, "norm_topk_prob must be true: false"),  # which is what transformers takes
        ({"num_experts": None}, "num_experts must be a positive integer: None"),
        ({"num_experts": 5}, r"mlp.gate.weight: has shape \(6, 32\), and config.json says \(5, 32\)"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok must be a positive integer: 0"),
    ],
)
def test_other_experts_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_folder(tmp_path, EXPERTS, changes)
    with pytest.raises(ValueError, match=message):
        load(tmp_path, "float32")


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"self_attn.q_proj.bias": (32,)}, r": 1 tensors are not used: model.layers.1.self_attn.q_proj.bias$"),
        ({f"{name}.bias": (1,) for name in "abcd"}, r": 4 tensors are not used: (model.layers.1.\w.bias(, |$)){3}"),
        ({"mlp.down_proj.weight": None}, "no tensor model.layers.1.mlp.down_proj.weight"),
        # Side by side they have the right shape.
        ({"self_attn.q_proj.weight": (16, 32), "self_attn.k_proj.weight": (32, 32)}, r"q_proj.weight: .* \(16, 32\)"),
        ({"self_attn.k_proj.weight": (8, 32), "self_attn.v_proj.weight": (24, 32)}, r"k_proj.weight: .* \(8, 32\)"),
        ({"mlp.gate_proj.weight": (40, 32), "mlp.up_proj.weight": (56, 32)}, r"gate_proj.weight: .* \(40, 32\)"),
    ],
)
def test_tensors_of_another_model_are_refused(shapes: dict[str, Any], message: str, tmp_path: Path) -> None:
    arrays = write_folder(tmp_path, DENSE)
    arrays |= {f"model.layers.1.{name}": np.ones(shape or 1, np.float32) for name, shape in shapes.items()}
    arrays = {name: array for name, array in arrays.items() if shapes.get(name.removeprefix("model.layers.1."), 1)}
    for number in range(2):
        write_safetensors(tmp_path / f"model-{number}.safetensors", dict([*arrays.items()][number::2]))
    with pytest.raises(ValueError, match=message):
        load(tmp_path, "float32")


def with_header(header: bytes) -> Any:
    return lambda content: len(header).to_bytes(8, "little") + header


def with_entry(**changes: Any) -> Any:
    """The first tensor of a file, whose data is 128 bytes, with another entry."""

    def change(content: bytes) -> bytes:
        begin = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:begin])
        header["model.norm.weight"] |= changes
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + content[begin:]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: b"", "has 0 bytes, and its header ends at 8"),
        (lambda content: content[:3], "has 3 bytes, and its header ends at "),
        (lambda content: (999).to_bytes(8, "little") + b"{}", "has 10 bytes, and its header ends at 1007"),
        (lambda content: b"\xff" * 8 + content[8:], "its header ends at 18446744073709551623"),
        (with_header(b""), "the header is not JSON"),
        (with_header(b"{"), "the header is not JSON"),
        (with_header(b'"\xff"'), "the header is not JSON"),
        (with_header(b"[" * 100_000), "the header is not JSON"),
        (with_header(b"[1]"), r"the header is not a JSON object: \[1\]"),
        (with_header(b'{"a": 1}'), "a must have dtype, shape and two data_offsets: 1"),
        (with_header(b'{"a": {"dtype": "F32", "shape": []}}'), "a must have dtype, shape and two data_offsets: {'dt"),
        (with_entry(dtype="F8_E4M3"), "model.norm.weight has dtype F8_E4M3, and BF16, F16, F32 are supported"),
        (with_entry(dtype=["F32"]), "model.norm.weight must have dtype, shape"),
        (with_entry(shape=32), "model.norm.weight must have dtype, shape"),
        (with_entry(shape=[-32]), r"model.norm.weight must have a shape of at most two positive integers: \[-32\]"),
        (with_entry(shape=[-4, -8]), "model.norm.weight must have a shape"),
        (with_entry(shape=[32.0]), "model.norm.weight must have a shape"),
        (with_entry(shape=[True, 32]), "model.norm.weight must have a shape"),
        (with_entry(shape=[1] * 65 + [32]), "model.norm.weight must have a shape"),
        (with_entry(shape=[31]), r"model.norm.weight has data_offsets \[0, 128\], and F32 of shape \[31\] takes 124"),
        (with_entry(data_offsets=[128, 0]), r"model.norm.weight has data_offsets \[128, 0\], and F32 .* takes 128"),
        (with_entry(data_offsets=[0]), "model.norm.weight must have dtype, shape and two data_offsets"),
        (with_entry(data_offsets=["0", 128]), "model.norm.weight must have dtype, shape and two data_offsets"),
        (
            with_entry(data_offsets=[-128, 0]),
            r"model.norm.weight has data_offsets \[-128, 0\]: it must begin at 0, and",
        ),
        (
            with_entry(data_offsets=[128, 256]),
            r"has data_offsets \[128, .*\]: it must begin at 0, and the data has \d+ bytes",
        ),
        (
            lambda content: content[:-1],
            r"weight has data_offsets \[\d+, \d+\]: it must begin at \d+, and the data has \d+ bytes",
        ),
        (lambda content: content + b"0000", r"has \d+ bytes of data, and its tensors end at \d+"),
    ],
)
def test_a_broken_file_is_named(change: Any, message: str, tmp_path: Path) -> None:
    write_folder(tmp_path, DENSE)
    file = tmp_path / "model-1.safetensors"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ValueError, match=f"model-1.safetensors: .*{message}"):
        load(tmp_path, "float32")


def test_a_file_whose_numbers_begin_anywhere_is_read(tmp_path: Path) -> None:
    arrays = write_folder(tmp_path, DENSE)
    file = tmp_path / "model-1.safetensors"
    content = file.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    file.write_bytes((begin - 7).to_bytes(8, "little") + content[8:begin] + b" " + content[begin:])
    np.testing.assert_array_equal(load(tmp_path, "float32")[1]["norm"], arrays["model.norm.weight"])


def test_a_folder_without_its_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="config.json"):
        load(tmp_path)
    arrays = write_folder(tmp_path, DENSE)
    with pytest.raises(ValueError, match="dtype must be bfloat16, float16 or float32: 'int8'"):
        load(tmp_path, "int8")
    write_safetensors(tmp_path / "more.safetensors", {"model.norm.weight": arrays["model.norm.weight"]})
    with pytest.raises(ValueError, match="more.safetensors: model.norm.weight is in another file, too"):
        load(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}: has no safetensors files"):
        load(tmp_path)
    for text, message in (("{", "config.json is not JSON: "), ("[]", r"config.json is not a JSON object: \[\]")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            load(tmp_path)
