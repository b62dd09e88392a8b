"""Device code of the loss and of log-probabilities: all that is computed from the logits of a chunk of rows, in one
launch.

The logits are the product alone, in float32: the bias, the cap and a temperature are applied where they are loaded. A
program has whole rows, one after another, and reads each of them twice: once for the statistics, and once more for the
gradient, which is in the L2 cache in part.

A tile is a step of a row, of ``DEPTH`` times ``LANES`` times ``VECTOR`` columns. A lane is a thread: it loads
``VECTOR`` neighbours at once, ``DEPTH`` times. Statistics are those of a lane until the end of the row, so that the
exponentials are hardly more than one a column, and a step has no barrier.

``logits`` are written only with ``IN_PLACE``. ``new_logits`` is for jax-triton 0.3, which passes a result that is an
argument a second time. Nothing uses it.
"""

# Triton's compiler gives the parameters their types.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel_triton.flash_attention._tile import tanh

#: In place of the column of an ignored label. That of another shard of the vocabulary is below 0 too, and counts.
IGNORED: tl.constexpr = tl.constexpr(-2)


@triton.jit
def lose(
    logits, bias, columns, d_loss, d_lse, d_entropy, rows, new_logits, rounded, losses, lse, scales, entropies,
    BIAS: tl.constexpr, CAP: tl.constexpr, SCALE: tl.constexpr, Z_LOSS: tl.constexpr, SMOOTHING: tl.constexpr,
    D_LSE: tl.constexpr, ENTROPY: tl.constexpr, IN_PLACE: tl.constexpr, ROUNDED: tl.constexpr, LARGEST: tl.constexpr,
    VOCAB: tl.constexpr, DEPTH: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """The loss and the lse of each row, with ``ENTROPY`` also the entropy, and, if there is somewhere to store it, the
    gradient of its logits before they are multiplied by ``SCALE``.

    ``IN_PLACE`` stores it in float32, ``ROUNDED`` in the dtype of ``rounded``. With ``LARGEST`` its largest number
    becomes this one before it is rounded, and ``scales`` has the factor that undoes it.
    """
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        own_logits = logits + row.to(tl.int64) * VOCAB
        column = tl.load(columns + row)
        counts = column != IGNORED
        # Before any warp can store a gradient in its place: the reductions below are barriers.
        label = load_label(own_logits, bias, column, BIAS, CAP, SCALE)
        top, total, gap, product = statistics(
            own_logits, bias, BIAS, CAP, SCALE, SMOOTHING, ENTROPY, IN_PLACE or ROUNDED, VOCAB, DEPTH, LANES, VECTOR
        )
        log_sum = tl.log(total)
        # Differences of logits first: the lse of large logits has too few digits.
        loss = log_sum + (top - label)
        if SMOOTHING > 0:
            loss = (1 - SMOOTHING) * loss + SMOOTHING * (log_sum + gap / VOCAB)
        if Z_LOSS > 0:
            loss += Z_LOSS * (top + log_sum) * (top + log_sum)
        tl.store(losses + row, tl.where(counts, loss, 0.0))
        tl.store(lse + row, top + log_sum)
        divisor, mean = tl.where(total == 0, 1.0, total), 0.0
        if ENTROPY:
            mean = product / divisor
            tl.store(entropies + row, tl.where(counts, log_sum - mean, 0.0))
        if IN_PLACE or ROUNDED:
            of_label = tl.where(counts, SCALE * tl.load(d_loss + row), 0.0)
            of_lse, is_active = of_label, counts
            if Z_LOSS > 0:
                of_lse *= 1 + 2 * Z_LOSS * (top + log_sum)
            if D_LSE:
                cotangent = tl.load(d_lse + row)
                of_lse += SCALE * cotangent
                is_active = is_active | (cotangent != 0)
            factor, slope = of_lse / divisor, 0.0
            if ENTROPY:
                slope = -SCALE * tl.load(d_entropy + row) / divisor
            unit = 1.0
            if LARGEST > 0:
                unit = largest_gradient(
                    own_logits, bias, column, top, mean, factor, slope, of_label, is_active,
                    BIAS, CAP, SCALE, SMOOTHING, ENTROPY, VOCAB, DEPTH, LANES, VECTOR,
                ) / LARGEST  # fmt: skip
                tl.store(scales + row, unit)
            for start in range(0, VOCAB, DEPTH * LANES * VECTOR):
                tile, word, is_word = load_tile(
                    own_logits, bias, start, BIAS, CAP, SCALE, VOCAB, DEPTH, LANES, VECTOR, "evict_first"
                )
                gradient = gradient_of(
                    tile, word, column, top, mean, factor, slope, of_label, is_active,
                    CAP, SCALE, SMOOTHING, ENTROPY, VOCAB,
                )  # fmt: skip
                if IN_PLACE:
                    tl.store(own_logits + word, gradient, mask=is_word)
                if ROUNDED:
                    if LARGEST > 0:
                        gradient = gradient / unit
                    own_rounded = rounded + row.to(tl.int64) * VOCAB
                    tl.store(own_rounded + word, gradient.to(rounded.dtype.element_ty), mask=is_word)


# -- logits ----------------------------------------------------------------------------------------------------------


@triton.jit
def load_label(own_logits, bias, column, BIAS: tl.constexpr, CAP: tl.constexpr, SCALE: tl.constexpr):
    """The logit of the label; 0 where there is none."""
    is_here = column >= 0
    logit = tl.load(own_logits + column, mask=is_here, other=0.0)
    if BIAS:
        logit += tl.load(bias + column, mask=is_here, other=0.0).to(tl.float32)
    return capped(logit, CAP) * SCALE


@triton.jit
def load_tile(own_logits, bias, start, BIAS: tl.constexpr, CAP: tl.constexpr, SCALE: tl.constexpr, VOCAB: tl.constexpr,
              DEPTH: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, EVICTION: tl.constexpr):  # fmt: skip
    """Logits of a row from the column ``start``, -inf behind the last; their columns; whether there are such."""
    word = tl.arange(0, DEPTH)[:, None, None] * (LANES * VECTOR) + tl.arange(0, LANES)[None, :, None] * VECTOR
    word += start + tl.arange(0, VECTOR)[None, None, :]
    is_word = word < VOCAB
    tile = tl.load(own_logits + word, mask=is_word, other=-float("inf"), eviction_policy=EVICTION)
    if BIAS:
        tile += tl.load(bias + word, mask=is_word, other=0.0, eviction_policy="evict_last").to(tl.float32)
    if CAP > 0:
        tile = tl.where(is_word, capped(tile, CAP), -float("inf"))
    return tile * SCALE, word, is_word


@triton.jit
def capped(logits, CAP: tl.constexpr):
    if CAP > 0:
        logits = CAP * tanh(logits * (1.0 / CAP), CAP)
    return logits


# -- statistics --------------------------------------------------------------------------------------------------------


@triton.jit
def statistics(
    own_logits, bias, BIAS: tl.constexpr, CAP: tl.constexpr, SCALE: tl.constexpr, SMOOTHING: tl.constexpr,
    ENTROPY: tl.constexpr, IS_READ_AGAIN: tl.constexpr, VOCAB: tl.constexpr, DEPTH: tl.constexpr, LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """The largest logit of a row, or 0 if that is not finite; the sum of the exponentials relative to it; with
    ``SMOOTHING`` the sum of what it is above each logit; and with ``ENTROPY`` that of the exponentials times what each
    logit is above it.

    Each lane has statistics of its own, relative to the largest logit that it has met.
    """
    largest = tl.full([LANES], -float("inf"), tl.float32)
    totals, gaps, count = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32)
    products = tl.zeros([LANES], tl.float32)
    EVICTION: tl.constexpr = "" if IS_READ_AGAIN else "evict_first"
    for start in range(0, VOCAB, DEPTH * LANES * VECTOR):
        tile, _word, is_word = load_tile(
            own_logits, bias, start, BIAS, CAP, SCALE, VOCAB, DEPTH, LANES, VECTOR, EVICTION
        )
        larger = tl.maximum(largest, max_of_lanes(tile))
        base = finite(larger)
        # 0 where nothing was met before: exp(-inf).
        rest = tl.exp(largest - base)
        parts = tl.exp(tile - base[None, :, None])
        if ENTROPY:
            products = rest * (products + totals * finite(largest - base))
            # 0 times -inf is 0: a word that cannot be adds nothing.
            products += sum_of_lanes(tl.where(parts > 0, parts * (tile - base[None, :, None]), 0.0))
        totals = totals * rest + sum_of_lanes(parts)
        if SMOOTHING > 0:
            gaps += tl.where(count > 0, count * (base - largest), 0.0)
            gaps += sum_of_lanes(tl.where(is_word, base[None, :, None] - tile, 0.0))
            count += sum_of_lanes(is_word.to(tl.float32))
        largest = larger
    top = finite(tl.max(largest, 0))
    total, gap, product = tl.sum(totals * tl.exp(largest - top), 0), 0.0, 0.0
    if ENTROPY:
        product = tl.sum(tl.exp(largest - top) * (products + totals * finite(largest - top)), 0)
    if SMOOTHING > 0:
        gap = tl.sum(gaps + tl.where(count > 0, count * (top - largest), 0.0), 0)
    return top, total, gap, product


@triton.jit
def max_of_lanes(tile):
    """Inside each thread."""
    return tl.max(tl.max(tile, 2), 0)


@triton.jit
def sum_of_lanes(tile):
    """Inside each thread."""
    return tl.sum(tl.sum(tile, 2), 0)


@triton.jit
def finite(largest):
    """0 in place of an infinity."""
    return tl.where(tl.abs(largest) < float("inf"), largest, 0.0)


# -- gradients ---------------------------------------------------------------------------------------------------------


@triton.jit
def gradient_of(tile, word, column, top, mean, factor, slope, of_label, is_active, CAP: tl.constexpr,
                SCALE: tl.constexpr, SMOOTHING: tl.constexpr, ENTROPY: tl.constexpr, VOCAB: tl.constexpr):  # fmt: skip
    """The gradient of logits before the cap. What stands in a row without a part in the results does not matter, also
    NaN.
    """
    part = tl.exp(tile - top)
    gradient = part * factor
    if ENTROPY:
        gradient += part * tl.where(part > 0, slope * ((tile - top) - mean), 0.0)
    gradient = tl.where(word == column, gradient - (1 - SMOOTHING) * of_label, gradient)
    if SMOOTHING > 0:
        gradient -= (SMOOTHING / VOCAB) * of_label
    if CAP > 0:
        tangent = tile * (1.0 / (CAP * SCALE))
        gradient *= 1 - tangent * tangent
    return tl.where(is_active, gradient, 0.0)


@triton.jit
def largest_gradient(
    own_logits, bias, column, top, mean, factor, slope, of_label, is_active, BIAS: tl.constexpr, CAP: tl.constexpr,
    SCALE: tl.constexpr, SMOOTHING: tl.constexpr, ENTROPY: tl.constexpr, VOCAB: tl.constexpr, DEPTH: tl.constexpr,
    LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """The largest absolute value of the gradient of a row; 1 if all are 0."""
    largest = tl.zeros([LANES], tl.float32)
    for start in range(0, VOCAB, DEPTH * LANES * VECTOR):
        tile, word, is_word = load_tile(own_logits, bias, start, BIAS, CAP, SCALE, VOCAB, DEPTH, LANES, VECTOR, "")
        gradient = gradient_of(
            tile, word, column, top, mean, factor, slope, of_label, is_active, CAP, SCALE, SMOOTHING, ENTROPY, VOCAB
        )
        largest = tl.maximum(largest, max_of_lanes(tl.where(is_word, tl.abs(gradient), 0.0)))
    most = tl.max(largest, 0)
    return tl.where(most == 0, 1.0, most)
