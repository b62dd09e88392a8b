"""Steps of fixed shapes, and the stream of their tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from attrs.validators import ge, instance_of

from ejkernel_bench._profile import part
from ejkernel_ops import paged_attention_metadata, sample_tokens
from ejkernel_ops.sample_tokens.arguments import VALID

from .pages import PagePool
from .scheduler import Request, Scheduler, Sequence

Finish = Literal["length", "stop", "cancelled", "error"]
_NUMBERS = ("temperature", "top_k", "top_p", "min_p")
_COUNT = (instance_of(int), ge(1))


@attrs.frozen
class Limits:
    """The sizes of an engine, by which its programs are compiled."""

    pages: int = attrs.field(validator=_COUNT)
    page_size: int = attrs.field(default=16, validator=_COUNT)
    #: Of a sequence, with its prompt.
    most_length: int = attrs.field(default=2048, validator=_COUNT)
    most_sequences: int = attrs.field(default=64, validator=_COUNT)
    #: Of all sequences of a step; prompts that are longer are computed in chunks.
    most_tokens: int = attrs.field(default=256, validator=_COUNT)


Array = jax.Array | np.ndarray


class Batch(NamedTuple):
    """What a model needs to know of the sequences of a step, besides its tokens and their positions."""

    slot_mapping: Array
    kv_lens: Array
    block_tables: Array
    query_start_loc: Array
    num_seqs: Array
    #: The last token of each sequence, whose logits are wanted.
    last: Array
    #: `paged_attention_metadata`, for all layers.
    metadata: jax.Array | None = None
    max_query_len: int | None = None


#: (params, tokens, positions, cache, batch) to (logits of the last tokens, cache).
Model = Callable[[Any, jax.Array, jax.Array, Any, Batch], tuple[jax.Array, Any]]


class Output(NamedTuple):
    """A token of a request, or why there are no more."""

    number: int
    token: int | None = None
    finish: Finish | None = None
    error: str | None = None


class Engine:
    """A model, its cache, and the requests that it answers. ``step`` computes one token of each that is ready.

    ``cache`` has the pages of a layer behind those of the one before: its first axis is ``layers * limits.pages``.
    """

    def __init__(self, model: Model, params: Any, cache: Any, limits: Limits) -> None:
        if limits.most_tokens < limits.most_sequences:
            raise ValueError("most_tokens: must be at least most_sequences, so that all can decode in one step")
        self.params, self.cache, self.limits = params, cache, limits
        self.pool = PagePool(limits.pages, limits.page_size)
        self.scheduler = Scheduler(self.pool, limits.most_sequences, limits.most_tokens)
        self.table = -(-limits.most_length // limits.page_size)
        self._step = jax.jit(partial(decode, model), static_argnames="max_query_len", donate_argnums=1)
        self._copy = jax.jit(partial(_copy_pages, limits.pages), donate_argnums=0)
        self._vocabulary = self._words_of(model)
        self._requests = 0
        self._cancelled: set[int] = set()
        self._outputs: list[Output] = []
        self.compile_seconds = self._compile()

    @property
    def has_place(self) -> bool:
        return len(self.scheduler.waiting) + len(self.scheduler.running) < self.limits.most_sequences

    def add(self, request: Request) -> int:
        """The number of the request in the outputs. One that can never be answered has an error there."""
        number, self._requests = self._requests, self._requests + 1
        if (error := self._error(request)) is not None:
            self._outputs.append(Output(number, finish="error", error=error))
        else:
            self.scheduler.waiting.append(Sequence(number, request, [*map(int, request.prompt)]))
        return number

    def cancel(self, number: int) -> None:
        """End a request before the next step. A number that no request has, or that has ended, changes nothing."""
        if number < self._requests:
            self._cancelled.add(number)

    def step(self) -> list[Output]:
        """Compute a step, if there is something to do: the new tokens, and what has ended."""
        self._remove_cancelled()
        shares, copies = self.scheduler.step()
        if copies:
            self.cache = self._copy(self.cache, *self._pairs(copies))
            for source, _ in copies:
                self.pool.give_back(source)
        if shares:
            is_decode = all(count == 1 for _, count in shares)
            arrays = self._arrays(shares, self.limits.most_sequences if is_decode else self.limits.most_tokens)
            tokens, self.cache = self._step(self.params, self.cache, *arrays, max_query_len=1 if is_decode else None)
            for (sequence, count), token in zip(shares, np.asarray(tokens).tolist(), strict=False):
                self._advance(sequence, count, token)
        outputs, self._outputs = self._outputs, []
        return outputs

    @property
    def is_idle(self) -> bool:
        return not (self.scheduler.waiting or self.scheduler.running or self._outputs)

    # -- requests ----------------------------------------------------------------------------------------------------

    def _error(self, request: Request) -> str | None:
        if not isinstance(request, Request):
            return f"takes a Request; got {type(request).__name__}"
        for name in ("max_tokens", "seed", "top_k"):
            if not isinstance(getattr(request, name), Integral):
                return f"{name}: must be an integer; got {getattr(request, name)!r}"
        for name, (words, is_valid) in VALID.items():
            if not (isinstance(value := getattr(request, name), Real) and is_valid(value)):
                return f"{name}: must be {words}; got {value!r}"
        for name in ("prompt", "stop_tokens"):
            for token in getattr(request, name):
                if not (isinstance(token, Integral) and 0 <= int(token) < self._vocabulary):
                    return f"{name}: has {token!r}; the model's tokens are 0 to {self._vocabulary - 1}"
        most = min(self.limits.most_length, self.limits.pages * self.limits.page_size)
        if not len(request.prompt):
            return "the prompt is empty"
        if request.max_tokens < 1:
            return f"max_tokens: must be at least 1; got {request.max_tokens}"
        if len(request.prompt) + request.max_tokens > most:
            limit = "most_length" if most == self.limits.most_length else "all pages have"
            return f"{len(request.prompt)} tokens and max_tokens {request.max_tokens} are more than {limit}, {most}"
        return None

    def _remove_cancelled(self) -> None:
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            if sequence.number in self._cancelled:
                self._end(sequence, "cancelled")
        self._cancelled.clear()

    def _end(self, sequence: Sequence, finish: Finish, error: str | None = None) -> None:
        if sequence in self.scheduler.running:
            self.scheduler.remove(sequence)
        else:
            self.scheduler.waiting.remove(sequence)
        self._outputs.append(Output(sequence.number, finish=finish, error=error))

    def _advance(self, sequence: Sequence, count: int, token: int) -> None:
        """Note that ``count`` more tokens are computed, and after the last one add the one that was drawn."""
        sequence.computed += count
        if token < 0:  # also before the last one: no other request may find these pages
            self._end(sequence, "error", "no logit of the model is finite")
            return
        self.scheduler.publish(sequence)
        if sequence.left:
            return
        request = sequence.request
        if token in request.stop_tokens:
            self._end(sequence, "stop")
            return
        sequence.tokens.append(token)
        self._outputs.append(Output(sequence.number, token))
        if len(sequence.tokens) == len(request.prompt) + request.max_tokens:
            self._end(sequence, "length")

    # -- programs ----------------------------------------------------------------------------------------------------

    def _arrays(self, shares: list[tuple[Sequence, int]], size: int) -> tuple[Any, ...]:
        """The arguments of a step of ``size`` tokens, padded."""
        most, page_size = self.limits.most_sequences, self.limits.page_size
        tokens, positions = np.zeros((2, size), np.int32)
        slots, lengths = np.full(size, -1, np.int32), np.zeros(most, np.int32)
        tables, starts = np.full((most, self.table), -1, np.int32), np.zeros(most + 1, np.int32)
        seeds, numbers = np.zeros(most, np.uint32), np.zeros((len(_NUMBERS), most), np.float32)
        for row, (sequence, count) in enumerate(shares):
            begin, end = sequence.computed, sequence.computed + count
            part = slice(starts[row], starts[row] + count)
            places, pages = np.arange(begin, end), np.array(sequence.pages, np.int32)
            tokens[part], positions[part] = sequence.tokens[begin:end], places
            slots[part] = pages[places // page_size] * page_size + places % page_size
            lengths[row], tables[row, : len(pages)], starts[row + 1 :] = end, pages, part.stop
            seeds[row] = int(sequence.request.seed) % 2**32
            numbers[:, row] = [getattr(sequence.request, name) for name in _NUMBERS]
        last = np.maximum(starts[1:] - 1, 0)
        batch = Batch(slots, lengths, tables, starts, np.array([len(shares)], np.int32), last)
        return tokens, positions, batch, seeds, numbers

    def _pairs(self, copies: list[tuple[int, int]]) -> np.ndarray:
        """The pages to copy, and to where: behind all pages, where nothing is written, if there are fewer."""
        pairs = np.tile([[0], [2**30]], self.limits.most_sequences).astype(np.int32)
        pairs[:, : len(copies)] = np.reshape(copies, (-1, 2)).T
        return pairs

    def _words_of(self, model: Model) -> int:
        """How many tokens the model knows."""
        pages, size = self.limits.pages, self.limits.page_size
        for shape in (leaf.shape for leaf in jax.tree.leaves(self.cache)):
            if len(shape) < 2 or shape[0] % pages or shape[1] != size:
                words = f"the first axes must be layers * {pages} pages, and {size} tokens, as in the limits"
                raise ValueError(f"cache: {words}; got shape {shape}")
        tokens, positions, batch, *_ = self._arrays([], self.limits.most_sequences)
        results = jax.eval_shape(model, self.params, tokens, positions, self.cache, batch)
        logits, _ = _checked(results, batch.last, self.cache)
        return int(logits.shape[-1])

    def _compile(self) -> float:
        """Compile the programs: steps of prompts, decoding, and copies of pages; the seconds that it took."""
        begin = time.perf_counter()
        for size, most in ((self.limits.most_tokens, None), (self.limits.most_sequences, 1)):
            _, self.cache = self._step(self.params, self.cache, *self._arrays([], size), max_query_len=most)
        self.cache = jax.block_until_ready(self._copy(self.cache, *self._pairs([])))
        return time.perf_counter() - begin


def decode(
    model: Model,
    params: Any,
    cache: Any,
    tokens: jax.Array,
    positions: jax.Array,
    batch: Batch,
    seeds: jax.Array,
    numbers: jax.Array,
    max_query_len: int | None,
) -> tuple[jax.Array, Any]:
    """The token that is drawn behind the last one of each sequence, and the cache."""
    metadata = paged_attention_metadata(
        batch.kv_lens, batch.query_start_loc, batch.num_seqs, num_tokens=tokens.shape[0]
    )
    logits, new_cache = _checked(
        model(params, tokens, positions, cache, batch._replace(metadata=metadata, max_query_len=max_query_len)),
        batch.last,
        cache,
    )
    with part("sampling"):
        keys = jax.vmap(jax.random.fold_in)(jax.vmap(jax.random.key)(seeds), batch.kv_lens)
        temperature, top_k, top_p, min_p = numbers
        filters = {"top_k": top_k.astype(jnp.int32), "top_p": top_p, "min_p": min_p}
        drawn = sample_tokens(logits, keys, temperature=temperature, **filters)
    return drawn, new_cache


def _checked(results: Any, last: Array, cache: Any) -> tuple[Any, Any]:
    """What a model returns: the logits, and the cache."""
    if not isinstance(results, tuple) or len(results) != 2:
        count = f" of {len(results)}" if isinstance(results, tuple) else ""
        raise ValueError(f"the model returns (logits, cache); got {type(results).__name__}{count}")
    logits, new_cache = results
    if logits.ndim != 2 or logits.shape[0] != last.shape[0]:
        raise ValueError(f"the model returns logits ({last.shape[0]}, vocabulary); got shape {logits.shape}")
    if jax.tree.map(jax.typeof, new_cache) != jax.tree.map(jax.typeof, cache):
        raise ValueError("the model returns the cache that it got, with its shapes and dtypes")
    return logits, new_cache


def _copy_pages(pages: int, cache: Any, sources: jax.Array, targets: jax.Array) -> Any:
    """The cache with copies of pages, in all layers."""

    def copied(array: jax.Array) -> jax.Array:
        first = jnp.arange(0, array.shape[0], pages)[:, None]
        return array.at[first + targets].set(array[first + sources], mode="drop")

    return jax.tree.map(copied, cache)


def generate(engine: Engine, requests: Iterable[Request]) -> Iterator[Output]:
    """Stream the tokens of requests as they are computed. A request is read when there is a place for it, and a step is
    computed when its outputs are read.
    """
    source, is_more = iter(requests), True
    while is_more or not engine.is_idle:
        while is_more and engine.has_place:
            request = next(source, None)
            if request is None:
                is_more = False
            else:
                engine.add(request)
        yield from engine.step()
