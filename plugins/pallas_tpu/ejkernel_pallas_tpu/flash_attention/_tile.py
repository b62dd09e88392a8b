"""Device code that the passes share: one block of queries against one block of keys of one head.

A tile is (queries, keys), or ``turned`` (keys, queries): a pass that adds up over queries multiplies by turned tiles,
and a product whose left side has to be turned first is slow. What is one number a query comes as a row: a turned tile
takes it as it is, and another has it turned into a column, once for each block. What a call does not have is not there
while the kernel is traced, and costs nothing.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from ejkernel_pallas_tpu.flash_attention._problem import LANES, LOG2E, Problem


def outer(x: Any, y: Any) -> Any:
    """Rows against rows."""
    return _product(x, y, 1)


def inner(weights: Any, y: Any) -> Any:
    """A tile of weights against rows, in the precision of the rows."""
    return _product(weights.astype(y.dtype), y, 0)


def _product(x: Any, y: Any, axis: int) -> Any:
    # One pass of the matrix unit multiplies bfloat16 exactly; float32 takes six.
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    contracted = (((1,), (axis,)), ((), ()))
    return lax.dot_general(x, y, contracted, precision=precision, preferred_element_type=jnp.float32)


def column(row: Any) -> Any:
    """(1, n) as (n, lanes), the same in every lane."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def row(column: Any) -> Any:
    """(n, lanes), the same in every lane, as (1, n)."""
    return column.T[:1]


def wide(column: Any, width: int) -> Any:
    """(n, lanes), the same in every lane, as (n, width)."""
    whole = jnp.concatenate([column] * -(-width // LANES), axis=1) if width > LANES else column
    return whole if whole.shape[1] == width else whole[:, :width]


def shape(p: Problem, turned: bool) -> tuple[int, int]:
    return (p.k_block, p.q_block) if turned else (p.q_block, p.k_block)


def of_queries(x: Any, p: Problem, turned: bool) -> Any:
    """A row of one number a query, so that it meets a tile."""
    return x if turned else wide(column(x), p.k_block)


def of_keys(x: Any, p: Problem, turned: bool) -> Any:
    return wide(column(x), p.q_block) if turned else x


def logits(p: Problem, refs: Any, i: Any, j: Any, masked: bool, turned: bool = False) -> tuple[Any, Any]:
    """In units of log2, -inf where nothing is seen; and what a soft cap bends their slope by, or None."""
    q, k = refs.query[...], refs.key[...]
    x = outer(k, q) if turned else outer(q, k)
    slope = None
    if p.cap:
        bent = jnp.tanh(x * (p.scale / p.cap))
        x, slope = bent * (p.cap * LOG2E), 1.0 - bent * bent
    else:
        x = x * (p.scale * LOG2E)
    if p.bias:
        x = x + _plane(refs.bias[...].astype(jnp.float32), p, p.bias, turned) * LOG2E
    if masked:
        seen = _seen(p, refs, i, j, turned)
        x = x if seen is None else jnp.where(seen, x, -jnp.inf)
    return x, slope


def _plane(x: Any, p: Problem, kind: str, turned: bool) -> Any:
    if kind == "queries":
        return of_queries(x, p, turned)
    if kind == "keys":
        return of_keys(x, p, turned)
    return x.T if turned else x


def _seen(p: Problem, refs: Any, i: Any, j: Any, turned: bool) -> Any:
    seen = None

    def also(condition: Any) -> None:
        nonlocal seen
        seen = condition if seen is None else seen & condition

    place = lax.broadcasted_iota(jnp.int32, shape(p, turned), 0 if turned else 1)
    if p.packed:
        keys = place + j * p.k_block
        also(keys >= of_queries(refs.start[...], p, turned))
        also(keys < of_queries(refs.end[...], p, turned))
    else:
        # How far a key lies behind the first query of the block, and how far a query does: the rest are numbers.
        distance = place - lax.broadcasted_iota(jnp.int32, shape(p, turned), 1 if turned else 0)
        own = i * p.q_block + p.shift - j * p.k_block
        if p.before is not None:
            also(distance >= own - p.before)
        if p.after is not None:
            also(distance <= own + p.after)
        if p.k_length < p.k_count * p.k_block:
            also(place < p.k_length - j * p.k_block)
    if p.segments:
        q_ids, k_ids = refs.q_ids[...], refs.k_ids[...]
        # What is no segment's is made no query's either: one comparison a pair is enough.
        k_ids = jnp.where(k_ids > 0, k_ids, -1)
        q_ids = jnp.where(q_ids > 0, q_ids, -2)
        also(of_queries(q_ids, p, turned) == of_keys(k_ids, p, turned))
    if p.mask:
        also(_plane(refs.mask[...].astype(jnp.int32), p, p.mask, turned) != 0)
    return seen


def kept(p: Problem, seed: Any, head: Any, i: Any, j: Any, turned: bool = False) -> Any:
    """Which weights survive dropout: the operation's own numbers, whose sums and products wrap around."""
    state = _mix(_mix(seed + _word(0x9E3779B9)) ^ head)
    queries = i * p.q_block + lax.broadcasted_iota(jnp.int32, (1, p.q_block), 1)
    keys = j * p.k_block + lax.broadcasted_iota(jnp.int32, shape(p, turned), 0 if turned else 1)
    bits = _mix(of_queries(_mix(state ^ queries), p, turned) + keys * _word(0x9E3779B9))
    # They are compared as unsigned numbers: with the highest bit turned over, signed ones have the same order.
    return (bits ^ _word(0x80000000)) >= _word(p.threshold ^ 0x80000000)


def _mix(x: Any) -> Any:
    x = x ^ lax.shift_right_logical(x, _like(x, 16))
    x = x * _word(0x7FEB352D)
    x = x ^ lax.shift_right_logical(x, _like(x, 15))
    x = x * _word(0x846CA68B)
    return x ^ lax.shift_right_logical(x, _like(x, 16))


def _word(bits: int) -> Any:
    """32 bits as a signed number."""
    return jnp.int32(bits - 2**32 if bits >= 2**31 else bits)


def _like(x: Any, value: int) -> Any:
    return jnp.full(jnp.shape(x), value, jnp.int32)


def slopes(p: Problem, refs: Any, seed: Any, head: Any, i: Any, j: Any, masked: bool, turned: bool) -> tuple[Any, ...]:
    """Of a tile: the weights after dropout, and the gradients of the logits, before the bias and behind it."""
    x, slope = logits(p, refs, i, j, masked, turned)
    weights = jnp.exp2(x - of_queries(refs.top[...], p, turned))
    v, d = refs.value[...], refs.d_out[...]
    d_weights = outer(v, d) if turned else outer(d, v)
    after = weights
    if p.drop:
        factor = jnp.where(kept(p, seed, head, i, j, turned), 1.0 / (1.0 - p.drop), 0.0)
        after, d_weights = weights * factor, d_weights * factor
    of_bias = weights * (d_weights - of_queries(refs.shift[...], p, turned))
    return after, of_bias if slope is None else of_bias * slope, of_bias
