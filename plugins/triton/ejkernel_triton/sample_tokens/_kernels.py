"""Sampling in five kernels, of which calls without ``top_k`` and ``top_p`` need four.

``survey`` reads all logits, and keeps the best of each chunk of words, with sums of its weights. From these ``choose``
finds, for each row, a few chunks that have every word the filters may keep: of the chunks of the k best ones, each has
one of the k best words or more. ``search`` finds the last word that is kept among those of these chunks, exactly, and
draws. Rows without a filter, and those with very many words to choose from, are left to ``draw``, in as many programs
as there are blocks. ``finish`` takes the best of all.

The depth of a word is how far its tempered logit is below the best one, as the integer of its bits: 0 is the best, and
LAST is never drawn. Sums are added up in an order that does not depend on the number of programs.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel_triton.sample_tokens._noise import gumbel

#: The largest number of float32, as which inf counts.
LARGEST = tl.constexpr(3.4028234663852886e38)
#: The bits of inf.
LAST = tl.constexpr(0x7F800000)
#: The bound of a row that ``search`` has drawn, and of one that it has not to search.
IS_DRAWN = tl.constexpr(-1)
#: What a depth is found to by chunks, where one more step would not leave fewer of them out.
NEAR = tl.constexpr(1 << 15)
#: By how much of the way a guess may be wrong.
GUESS = tl.constexpr(1 / 32)
#: What the sums by chunks may be wrong by, as a share.
SLACK = tl.constexpr(1e-5)


@triton.jit
def survey(
    logits, temperatures,
    chunk_best, chunk_weights, chunk_sums,
    VOCABULARY: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    TEMPERATURE: tl.constexpr, WEIGHTS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """The best logit of each chunk of a block of words, and the sums of the exponentials of the differences from it:
    ``chunk_weights`` with the temperature, ``chunk_sums`` without.
    """
    BLOCKS: tl.constexpr = (VOCABULARY + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    chunk = tl.program_id(0) % BLOCKS * (BLOCK // CHUNK) + tl.arange(0, BLOCK // CHUNK)
    word = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    x = _in_range(tl.load(logits + row * VOCABULARY + word, mask=word < VOCABULARY, other=-float("inf")))
    best = tl.max(x, 1)
    own = row * CHUNKS + chunk
    tl.store(chunk_best + own, best, mask=chunk < CHUNKS)
    if WEIGHTS or SUMS:
        distances = x - _finite(best)[:, None]
        if WEIGHTS:
            scaled = _tempered(distances, temperatures, row, TEMPERATURE)
            tl.store(chunk_weights + own, tl.sum(tl.exp(scaled), 1), mask=chunk < CHUNKS)
        if SUMS:
            tl.store(chunk_sums + own, tl.sum(tl.exp(distances), 1), mask=chunk < CHUNKS)


@triton.jit
def choose(
    chunk_best, chunk_weights, chunk_sums, temperatures, top_ks, top_ps,
    bests, logs, counts, bounds, totals, listed,
    VOCABULARY: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
    TEMPERATURE: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Of each row the best logit, and the chunks that may have words that the filters keep: how many, and which.

    There are none where all words are kept. ``bounds`` is a depth that no word that is kept lies behind, and ``totals``
    the sum of the weights of all words, where only ``top_p`` asks for it.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, WIDTH)
    own = row * CHUNKS + chunk
    is_chunk = chunk < CHUNKS
    maxima = tl.load(chunk_best + own, mask=is_chunk, other=-float("inf"))
    best = _finite(tl.max(maxima, 0))
    distances = maxima - best
    tl.store(bests + row, best)
    if SUMS:
        sums = tl.load(chunk_sums + own, mask=is_chunk, other=0.0)
        tl.store(logs + row, tl.log(tl.sum(sums * tl.exp(distances), 0)))
    if TOP_K or TOP_P:
        scaled = _tempered(distances, temperatures, row, TEMPERATURE)
        depth = _depth(scaled)
        # With a temperature of 0, and in a row without a finite logit, one chunk has the answer.
        is_one = tl.max(maxima, 0) == -float("inf")
        if TEMPERATURE:
            is_one = is_one | (tl.load(temperatures + row) == 0)
        k, has_k = _top_k(top_ks, row, VOCABULARY, TOP_K)
        p, has_p = _top_p(top_ps, row, TOP_P)
        low, high = -1, LAST
        total = 0.0
        if (has_k & (is_one == 0)) & (k <= CHUNKS):
            # As many chunks as words are kept, or a few more: each has one of them or more.
            found = WIDTH
            while (high - low > NEAR) & (found > k):
                middle = low + (high - low) // 2
                count = tl.sum((depth <= middle).to(tl.int32), 0)
                found = tl.where(count >= k, count, found)
                high = tl.where(count >= k, middle, high)
                low = tl.where(count >= k, low, middle)
        if TOP_P:
            if (has_p & (has_k == 0)) & (is_one == 0):
                largest = tl.exp(scaled)
                weights = tl.load(chunk_weights + own, mask=is_chunk, other=0.0) * largest
                total = tl.sum(weights, 0)
                rest = tl.maximum(weights - largest, 0.0)
                allowed = (1 - p - SLACK) * total
                # What may lie behind a depth: all of the chunks behind it, and of the others all but the best word,
                # each of which has less weight than the depth itself.
                while high - low > NEAR:
                    middle = low + (high - low) // 2
                    edge = tl.exp(-middle.to(tl.float32, bitcast=True)) * (CHUNK - 1)
                    behind = tl.sum(tl.where(depth > middle, weights, tl.minimum(rest, edge)), 0)
                    is_enough = behind <= allowed
                    high = tl.where(is_enough, middle, high)
                    low = tl.where(is_enough, low, middle)
        is_listed = (depth <= high) & (depth < LAST) & (has_k | has_p)
        first = tl.min(tl.where(distances == 0, chunk, WIDTH), 0)
        is_listed = tl.where(is_one, chunk == first % WIDTH, is_listed) & is_chunk
        place = tl.cumsum(is_listed.to(tl.int32), 0) - 1
        tl.store(listed + row * CHUNKS + place, chunk, mask=is_listed)
        tl.store(counts + row, tl.sum(is_listed.to(tl.int32), 0))
        tl.store(bounds + row, high)
        tl.store(totals + row, total)


@triton.jit
def search(
    logits, keys, temperatures, top_ks, top_ps, least, bests, counts, bounds, totals, listed,
    found_bounds, found_sums, found_words,
    VOCABULARY: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, LARGE_TILE: tl.constexpr,
    TEMPERATURE: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr,
):  # fmt: skip
    """The depth of the last word of each row that the filters keep, among those of the chunks that are listed; and the
    draw, if they are few. Else ``found_bounds`` has the depth, for ``draw``.
    """
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + row)
    bound, drawn, word = LAST, -float("inf"), -1
    if (count > 0) & (count <= TILE // CHUNK):
        found, scaled, words = _search_tile(
            logits, temperatures, top_ks, top_ps, bests, bounds, totals, listed, row, count,
            VOCABULARY, CHUNKS, CHUNK, TILE, TEMPERATURE, TOP_K, TOP_P,
        )  # fmt: skip
        is_kept = _depth(scaled) <= found
        if MIN_P:
            is_kept = is_kept & (scaled >= tl.load(least + row))
        drawn, word = _drawn(scaled, is_kept, words, keys, temperatures, row, TEMPERATURE)
        bound = IS_DRAWN
    elif (count > 0) & (count <= LARGE_TILE // CHUNK):
        bound, _, _ = _search_tile(
            logits, temperatures, top_ks, top_ps, bests, bounds, totals, listed, row, count,
            VOCABULARY, CHUNKS, CHUNK, LARGE_TILE, TEMPERATURE, TOP_K, TOP_P,
        )  # fmt: skip
    elif count > 0:
        bound = _search_tiles(
            logits, temperatures, top_ks, top_ps, bests, bounds, totals, listed, row, count,
            VOCABULARY, CHUNKS, CHUNK, LARGE_TILE // 2, TEMPERATURE, TOP_K, TOP_P,
        )  # fmt: skip
    tl.store(found_bounds + row, bound)
    tl.store(found_sums + row, drawn)
    tl.store(found_words + row, word)


@triton.jit
def _search_tile(
    logits, temperatures, top_ks, top_ps, bests, bounds, totals, listed, row, count,
    VOCABULARY: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    TEMPERATURE: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr,
):  # fmt: skip
    """With all words in registers; also their tempered logits, and which they are."""
    scaled, word = _listed_words(
        logits, temperatures, bests, listed, row, 0, count, VOCABULARY, CHUNKS, CHUNK, TILE, TEMPERATURE
    )
    depth = _depth(scaled)
    k, has_k = _top_k(top_ks, row, VOCABULARY, TOP_K)
    p, has_p = _top_p(top_ps, row, TOP_P)
    high = tl.load(bounds + row)
    if TOP_K:
        if has_k:
            low, found = -1, TILE
            while (high - low > 1) & (found > k):
                middle = low + (high - low) // 2
                number = tl.sum((depth <= middle).to(tl.int32))
                found = tl.where(number >= k, number, found)
                high = tl.where(number >= k, middle, high)
                low = tl.where(number >= k, low, middle)
    if TOP_P:
        if has_p:
            weights = tl.where(depth <= high, tl.exp(scaled), 0.0)
            enough = p * tl.where(has_k, tl.sum(weights), tl.load(totals + row))
            low, before, found = -1, 0, TILE
            # Until one word is left between both ends, or those that are left are equal.
            while (high - low > 1) & (found - before > 1):
                middle = low + (high - low) // 2
                is_before = depth <= middle
                number = tl.sum(is_before.to(tl.int32))
                is_enough = tl.sum(tl.where(is_before, weights, 0.0)) >= enough
                found = tl.where(is_enough, number, found)
                before = tl.where(is_enough, before, number)
                high = tl.where(is_enough, middle, high)
                low = tl.where(is_enough, low, middle)
    return high, scaled, word


@triton.jit
def _search_tiles(
    logits, temperatures, top_ks, top_ps, bests, bounds, totals, listed, row, count,
    VOCABULARY: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    TEMPERATURE: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr,
):  # fmt: skip
    """By passes over the words, which come from the cache."""
    k, has_k = _top_k(top_ks, row, VOCABULARY, TOP_K)
    p, has_p = _top_p(top_ps, row, TOP_P)
    high = tl.load(bounds + row)
    total = tl.load(totals + row)
    if TOP_K:
        if has_k:
            high, total = _passes(
                high, k.to(tl.float32), logits, temperatures, bests, listed, row, count,
                VOCABULARY, CHUNKS, CHUNK, TILE, TEMPERATURE, True,
            )  # fmt: skip
    if TOP_P:
        if has_p:
            high, _ = _passes(
                high, p * total, logits, temperatures, bests, listed, row, count,
                VOCABULARY, CHUNKS, CHUNK, TILE, TEMPERATURE, False,
            )  # fmt: skip
    return high


@triton.jit
def _passes(
    high, enough, logits, temperatures, bests, listed, row, count,
    VOCABULARY: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    TEMPERATURE: tl.constexpr, BY_NUMBER: tl.constexpr,
):  # fmt: skip
    """The first depth up to which there are enough words, and the weight up to there; or up to which there is enough
    weight.

    A pass sums up to three depths: a linear guess between both ends and one on each side, or quarters of the bits where
    the last guess was no good. It ends when one word is left between both ends, or those that are left are equal.
    """
    low, before, found = -1, 0, VOCABULARY
    little, much = 0.0, 2 * enough
    is_guess = False
    while (high - low > 1) & (found - before > 1):
        width = high - low
        first, second, third = low + width // 4, low + width // 2, high - width // 4
        if is_guess & (high < LAST):
            near = tl.maximum(low, 0).to(tl.float32, bitcast=True)
            far = high.to(tl.float32, bitcast=True)
            part = (enough - little) / (much - little)
            first = (near + (far - near) * tl.maximum(part - GUESS, 0.0)).to(tl.int32, bitcast=True)
            second = (near + (far - near) * part).to(tl.int32, bitcast=True)
            third = (near + (far - near) * tl.minimum(part + GUESS, 1.0)).to(tl.int32, bitcast=True)
        first = tl.minimum(tl.maximum(first, low + 1), high - 1)
        second = tl.minimum(tl.maximum(second, first), high - 1)
        third = tl.minimum(tl.maximum(third, second), high - 1)
        a, b, c, x, y, z = _sums_to(
            first, second, third, logits, temperatures, bests, listed, row, count,
            VOCABULARY, CHUNKS, CHUNK, TILE, TEMPERATURE,
        )  # fmt: skip
        low, before, little, high, found, much = _narrowed(
            low, before, little, high, found, much, third, c, z, enough, BY_NUMBER
        )
        low, before, little, high, found, much = _narrowed(
            low, before, little, high, found, much, second, b, y, enough, BY_NUMBER
        )
        low, before, little, high, found, much = _narrowed(
            low, before, little, high, found, much, first, a, x, enough, BY_NUMBER
        )
        is_guess = high - low <= width // 4
    weight = 0.0
    if BY_NUMBER:
        _, _, _, weight, _, _ = _sums_to(
            high, high, high, logits, temperatures, bests, listed, row, count,
            VOCABULARY, CHUNKS, CHUNK, TILE, TEMPERATURE,
        )  # fmt: skip
    return high, weight


@triton.jit
def _narrowed(low, before, little, high, found, much, middle, number, weight, enough, BY_NUMBER: tl.constexpr):
    """Both ends, how many words are up to each, and what is compared, after a look between them."""
    reached = weight
    if BY_NUMBER:
        reached = number.to(tl.float32)
    is_high = (reached >= enough) & (middle < high)
    is_low = (reached < enough) & (middle > low)
    low, before, little = (
        tl.where(is_low, middle, low),
        tl.where(is_low, number, before),
        tl.where(is_low, reached, little),
    )
    high, found, much = (
        tl.where(is_high, middle, high),
        tl.where(is_high, number, found),
        tl.where(is_high, reached, much),
    )
    return low, before, little, high, found, much


@triton.jit
def _sums_to(
    first, second, third, logits, temperatures, bests, listed, row, count,
    VOCABULARY: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, TEMPERATURE: tl.constexpr,
):  # fmt: skip
    """How many words of the chunks that are listed are up to each of three depths, and the sums of their weights."""
    a, b, c = 0, 0, 0
    x, y, z = 0.0, 0.0, 0.0
    for place in range(0, count, TILE // CHUNK):
        scaled, _ = _listed_words(
            logits, temperatures, bests, listed, row, place, count, VOCABULARY, CHUNKS, CHUNK, TILE, TEMPERATURE
        )
        depth = _depth(scaled)
        weights = tl.exp(scaled)
        a += tl.sum((depth <= first).to(tl.int32))
        b += tl.sum((depth <= second).to(tl.int32))
        c += tl.sum((depth <= third).to(tl.int32))
        x += tl.sum(tl.where(depth <= first, weights, 0.0))
        y += tl.sum(tl.where(depth <= second, weights, 0.0))
        z += tl.sum(tl.where(depth <= third, weights, 0.0))
    return a, b, c, x, y, z


@triton.jit
def _listed_words(
    logits, temperatures, bests, listed, row, first, count,
    VOCABULARY: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, TEMPERATURE: tl.constexpr,
):  # fmt: skip
    """The tempered logits of a tile of chunks from the list, and their words."""
    place = first + tl.arange(0, TILE // CHUNK)
    chunk = tl.load(listed + row * CHUNKS + place, mask=place < count, other=CHUNKS)
    word = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    x = _in_range(tl.load(logits + row * VOCABULARY + word, mask=word < VOCABULARY, other=-float("inf")))
    return _tempered(x - tl.load(bests + row), temperatures, row, TEMPERATURE), word


@triton.jit
def draw(
    logits, keys, temperatures, least, bests, found_bounds,
    sums, words,
    VOCABULARY: tl.constexpr, BLOCK: tl.constexpr,
    TEMPERATURE: tl.constexpr, MIN_P: tl.constexpr, SEARCHED: tl.constexpr,
):  # fmt: skip
    """The best word of each block, with its noise, among those that are kept; of rows that have no draw yet."""
    BLOCKS: tl.constexpr = (VOCABULARY + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    bound = LAST
    if SEARCHED:
        bound = tl.load(found_bounds + row)
    drawn, own = -float("inf"), -1
    if bound != IS_DRAWN:
        word = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
        x = _in_range(tl.load(logits + row * VOCABULARY + word, mask=word < VOCABULARY, other=-float("inf")))
        scaled = _tempered(x - tl.load(bests + row), temperatures, row, TEMPERATURE)
        depth = _depth(scaled)
        is_kept = (depth <= bound) & (depth < LAST)
        if MIN_P:
            is_kept = is_kept & (scaled >= tl.load(least + row))
        if tl.max(is_kept.to(tl.int32), 0) > 0:
            drawn, own = _drawn(scaled, is_kept, word, keys, temperatures, row, TEMPERATURE)
    tl.store(sums + tl.program_id(0), drawn)
    tl.store(words + tl.program_id(0), own)


@triton.jit
def finish(
    logits, bests, logs, sums, words, found_bounds, found_words,
    tokens, logprobs,
    VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, SEARCHED: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """The token of each row, and its log-probability."""
    BLOCKS: tl.constexpr = (VOCABULARY + BLOCK - 1) // BLOCK
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, WIDTH)
    own = row * BLOCKS + block
    drawn = tl.load(sums + own, mask=block < BLOCKS, other=-float("inf"))
    best = tl.max(drawn, 0)
    word = tl.load(words + own, mask=(block < BLOCKS) & (drawn == best), other=VOCABULARY)
    token = tl.where(best == -float("inf"), -1, tl.min(word, 0))
    if SEARCHED:
        token = tl.where(tl.load(found_bounds + row) == IS_DRAWN, tl.load(found_words + row), token)
    tl.store(tokens + row, token)
    if SUMS:
        x = _in_range(tl.load(logits + row * VOCABULARY + tl.maximum(token, 0)))
        logprob = x - tl.load(bests + row) - tl.load(logs + row)
        tl.store(logprobs + row, tl.where(token < 0, -float("inf"), logprob))


# -- of the kernels above --------------------------------------------------------------------------------------------


@triton.jit
def _drawn(scaled, is_kept, word, keys, temperatures, row, TEMPERATURE: tl.constexpr):
    """The largest sum of the words that are kept and their noise, and the first word that has it; -1 for none."""
    noise = gumbel(keys, row, word)
    if TEMPERATURE:  # then the first of equal logits is taken
        noise = tl.where(tl.load(temperatures + row) == 0, 0.0, noise)
    sums = tl.where(is_kept, scaled + noise, -float("inf"))
    drawn = tl.max(sums)
    first = tl.min(tl.where(sums == drawn, word, 0x7FFFFFFF))
    return drawn, tl.where(drawn == -float("inf"), -1, first)


@triton.jit
def _in_range(x):
    """As float32; inf counts as the largest number, and NaN as -inf."""
    x = x.to(tl.float32)
    return tl.where(x != x, -float("inf"), tl.minimum(x, LARGEST))


@triton.jit
def _finite(best):
    """What logits are measured from, where the largest may be -inf."""
    return tl.where(best == -float("inf"), 0.0, best)


@triton.jit
def _tempered(distances, temperatures, row, TEMPERATURE: tl.constexpr):
    """Divided by the temperature, and rounded as JAX does. With a temperature of 0 all but the best are -inf."""
    if TEMPERATURE:
        divided = tl.math.div_rn(distances, tl.load(temperatures + row) + tl.zeros_like(distances))
        distances = tl.where(distances == 0, 0.0, divided)
    return distances


@triton.jit
def _depth(scaled):
    """The bits of the absolute value, in the order of the words."""
    return scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _top_k(top_ks, row, VOCABULARY: tl.constexpr, TOP_K: tl.constexpr):
    """How many words a row keeps by number, and whether that is fewer than all."""
    k = VOCABULARY
    if TOP_K:
        k = tl.load(top_ks + row)
    return k, (k > 0) & (k < VOCABULARY)


@triton.jit
def _top_p(top_ps, row, TOP_P: tl.constexpr):
    """The share that a row keeps, and whether that is less than all."""
    p = 1.0
    if TOP_P:
        p = tl.load(top_ps + row)
    return p, p < 1
