"""The kernel: a block of rows is fetched once, and all passes over it are in vector memory.

Logits below the best of their row, divided by the temperature, go from 0 to -inf. Their bits without the sign are their
depths: integers that grow with the distance. A filter keeps all depths up to a limit, which is found bit by bit, by
what is counted or summed up to each candidate. A register has some rows and 128 words: numbers of rows are the same in
all lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_ops.sample_tokens.definition import least_by_min_p
from ejkernel_pallas_tpu.launch import Launch
from ejkernel_pallas_tpu.sample_tokens._blocks import (
    LANES,
    Blocks,
    across,
    add_by_lanes,
    by_lanes,
    max_by_lanes,
    max_of_rows,
    sum_of_rows,
)
from ejkernel_pallas_tpu.sample_tokens._numbers import (
    BITS,
    LAST,
    LAST_FINITE,
    bits_of,
    earlier,
    in_range,
    larger,
    noise_of,
    number_of,
    words_of,
)
from ejkernel_pallas_tpu.sample_tokens._tuning import Config

Arguments = Mapping[str, Any]


def draw(a: Arguments, blocks: Blocks, cfg: Config, needs_logprobs: bool) -> Launch:
    """The launch that computes the tokens, and their log-probabilities if they are needed."""
    has_weights = a["top_p"] is not None and cfg.has_weights
    # Without a filter, all words of a lane are drawn from; and of few steps, none is saved.
    has_limit = any(a[name] is not None for name in ("temperature", "top_k", "top_p", "min_p"))
    is_sparse = has_limit and cfg.lane_words > 0 and blocks.steps > 1

    def kernel(refs: Any) -> None:
        fetch(refs)
        total = measure(refs)
        token = drawn(refs, limit(refs))
        refs.token[...] = token
        if needs_logprobs:
            own = distance_of(refs, token)
            refs.logprob[...] = jnp.where(token < 0, -jnp.inf, own - jnp.log(total))

    def fetch(refs: Any) -> None:
        """Write the logits into scratch memory, with -inf behind them, and the best one of each row."""
        refs.depth[:, blocks.padded - blocks.width :] = bits_of(jnp.full((blocks.block, blocks.width), -jnp.inf))

        def write(columns: Any, _: None) -> None:
            refs.depth[:, columns] = bits_of(in_range(refs.logits[:, columns]))

        blocks.over_logits(write)

        def compare(columns: Any, largest: jax.Array) -> jax.Array:
            return max_by_lanes(largest, number_of(refs.depth[:, columns]))

        best = max_of_rows(blocks.over_words(compare, blocks.full(-jnp.inf)))
        refs.best[...] = jnp.where(best == -jnp.inf, 0, best)

    def measure(refs: Any) -> jax.Array:
        """Turn the logits into depths. The sum of the exponentials of the logits as they were given."""
        best = refs.best[...]
        temperature = None if a["temperature"] is None else refs.temperature[...]

        def write(columns: Any, total: jax.Array) -> jax.Array:
            distances = number_of(refs.depth[:, columns]) - across(best, columns.size)
            scaled = distances
            if temperature is not None:
                ratios = distances / across(temperature, columns.size)
                # However a device divides by 0, or -inf: what is no number is far below.
                scaled = jnp.where(distances == 0, 0, jnp.where(ratios <= 0, ratios, -jnp.inf))
            refs.depth[:, columns] = bits_of(jnp.abs(scaled))
            if has_weights:
                refs.weights[:, columns] = jnp.exp(scaled)
            return add_by_lanes(total, jnp.exp(distances)) if needs_logprobs else total

        return sum_of_rows(blocks.over_words(write, blocks.full(0.0)))

    def limit(refs: Any) -> jax.Array:
        """The largest depth of each row that all filters keep."""
        largest = blocks.full(LAST, jnp.int32)
        if a["top_k"] is not None:
            largest = first_depth(refs, lambda columns: 1.0, refs.top_k[...])
        if a["top_p"] is not None:
            share, weights = refs.top_p[...], weights_of(refs)
            enough = share * sum_up_to(refs, weights, [largest])[0]
            nucleus = first_depth(refs, weights, enough)
            largest = jnp.where(share >= 1, largest, jnp.minimum(largest, nucleus))
        if a["min_p"] is not None:
            largest = jnp.minimum(largest, refs.min_p_depth[...])
        return largest

    def weights_of(refs: Any) -> Callable[[Any], jax.Array]:
        if has_weights:
            return lambda columns: refs.weights[:, columns]
        return lambda columns: jnp.exp(-number_of(refs.depth[:, columns]))

    def first_depth(refs: Any, weights: Any, enough: jax.Array) -> jax.Array:
        """The first depth up to which the sum of the weights is enough."""
        passes = -(-BITS // cfg.bits)

        def with_next_bits(i: Any, known: Any) -> Any:
            """Behind the bits that are known are the candidates, each up to where the next one begins."""
            shift = cfg.bits * (passes - 1 - i)
            ends = [known | (choice << shift) | ((1 << shift) - 1) for choice in range(2**cfg.bits - 1)]
            # A sign bit means that the choice has a bit too many.
            ends = [jnp.where(end < 0, LAST, end) for end in ends]
            digit = blocks.full(0, jnp.int32)
            for sums in sum_up_to(refs, weights, ends):
                digit += (sums < enough).astype(jnp.int32)
            return known | (digit << shift)

        depth: jax.Array = jax.lax.fori_loop(0, passes, with_next_bits, blocks.full(0, jnp.int32))
        return depth

    def sum_up_to(refs: Any, weights: Any, ends: list[jax.Array]) -> list[jax.Array]:
        """For each end the sum of the weights of depths up to it."""

        def add(columns: Any, sums: list[jax.Array]) -> list[jax.Array]:
            depth, own = refs.depth[:, columns], weights(columns)
            return [
                add_by_lanes(total, jnp.where(depth <= across(end, columns.size), own, 0.0))
                for total, end in zip(sums, ends, strict=True)
            ]

        return [sum_of_rows(sums) for sums in blocks.over_words(add, [blocks.full(0.0)] * len(ends))]

    def drawn(refs: Any, largest: jax.Array) -> jax.Array:
        """The first word with the largest sum of its logit and its noise, of those that are kept."""
        first_key, second_key = refs.first_key[...], refs.second_key[...]
        temperature = None if a["temperature"] is None else refs.temperature[...]
        largest = jnp.minimum(largest, LAST_FINITE)  # -inf is never drawn

        def compare(columns: Any, best: Any) -> Any:
            depth = refs.depth[:, columns]
            word = words_of(depth.shape, columns)
            return larger(best, by_lanes(larger, with_noise(depth, word, columns.size), word))

        def with_noise(depth: jax.Array, word: jax.Array, width: int) -> jax.Array:
            noise = noise_of(across(first_key, width), across(second_key, width), word)
            if temperature is not None:
                noise = jnp.where(across(temperature, width) == 0, 0, noise)
            return jnp.where(depth <= across(largest, width), noise - number_of(depth), -jnp.inf)

        def compare_next(_: Any, state: Any) -> Any:
            """The next word of each lane that is kept."""
            best, last = state
            depth, word = next_of_lanes(refs, largest, last)
            return larger(best, (with_noise(depth, word, LANES), word)), word

        best = (blocks.full(-jnp.inf), blocks.full(0, jnp.int32))
        steps = None
        if is_sparse:
            passes = words_of_lanes(refs, largest)
            is_few = passes <= cfg.lane_words
            state = (best, blocks.full(-1, jnp.int32))
            best, _ = jax.lax.fori_loop(0, jnp.where(is_few, passes, 0), compare_next, state)
            steps = jnp.where(is_few, 0, blocks.steps)
        sums, word = blocks.over_words(compare, best, steps)
        highest = max_of_rows(sums)
        # A float32 has all numbers of words, and its smallest one of a row is found without a detour.
        first = jnp.where(sums == highest, word.astype(jnp.float32), jnp.inf).min(1, keepdims=True)
        return jnp.where(highest == -jnp.inf, -1, jnp.broadcast_to(first, sums.shape)).astype(jnp.int32)

    def words_of_lanes(refs: Any, largest: jax.Array) -> jax.Array:
        """The most words that are kept of any lane."""

        def count(columns: Any, counts: jax.Array) -> jax.Array:
            return add_by_lanes(counts, jnp.where(refs.depth[:, columns] <= across(largest, columns.size), 1.0, 0.0))

        counts: jax.Array = blocks.over_words(count, blocks.full(0.0))
        return counts.max(1, keepdims=True).max(0, keepdims=True).astype(jnp.int32)[0, 0]

    def next_of_lanes(refs: Any, largest: jax.Array, last: jax.Array) -> tuple[jax.Array, ...]:
        """The first word of each lane behind the last one that is kept, and its depth; LAST where there is none."""

        def find(columns: Any, first: Any) -> Any:
            depth = refs.depth[:, columns]
            word = words_of(depth.shape, columns)
            is_next = (depth <= across(largest, columns.size)) & (word > across(last, columns.size))
            word, depth = (jnp.where(is_next, numbers, LAST) for numbers in (word, depth))
            return earlier(first, by_lanes(earlier, word, depth))

        word, depth = blocks.over_words(find, (blocks.full(LAST, jnp.int32),) * 2)
        return depth, word

    def distance_of(refs: Any, token: jax.Array) -> jax.Array:
        """How far the logit of the token is below the best one."""

        def find(columns: Any, own: Any) -> Any:
            logits = in_range(refs.logits[:, columns])
            is_token = words_of(logits.shape, columns) == token[:, :1]
            return own + jnp.where(is_token, logits, 0).sum(1, keepdims=True)

        distance: jax.Array = blocks.over_logits(find, blocks.full(0.0)) - refs.best[...]
        return distance

    numbers = _numbers(a)
    return Launch(
        name="sample_tokens",
        kernel=kernel,
        grid=(blocks.count,),
        semantics=("parallel",),
        tile_map=lambda i: (i,),
        operands={"logits": blocks.logits(a["logits"]), **{name: blocks.of_rows(x) for name, x in numbers.items()}},
        outputs={
            "token": blocks.output_of_rows(jnp.int32),
            **({"logprob": blocks.output_of_rows(jnp.float32)} if needs_logprobs else {}),
        },
        scratch={
            "depth": blocks.words("int32"),
            **({"weights": blocks.words("float32")} if has_weights else {}),
            "best": blocks.numbers,
        },
    )


def _numbers(a: Arguments) -> dict[str, jax.Array]:
    """The numbers of each row, as the kernel uses them."""
    numbers = {"first_key": a["key"][:, 0], "second_key": a["key"][:, 1]}
    for name in ("temperature", "top_p"):
        if a[name] is not None:
            numbers[name] = a[name].astype(jnp.float32)
    if a["top_k"] is not None:
        vocabulary = a["logits"].shape[1]
        count = jnp.where(a["top_k"] > 0, jnp.minimum(a["top_k"], vocabulary), vocabulary)
        numbers["top_k"] = count.astype(jnp.float32)
    if a["min_p"] is not None:
        numbers["min_p_depth"] = bits_of(jnp.abs(least_by_min_p(a, jnp.float32)[:, 0]))
    return numbers
