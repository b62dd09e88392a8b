"""The typed front door of ``flash_attention``.

Beside it: ``operation`` (with ``axes``, ``arguments``, ``values``, ``cost``, ``samples`` and ``fold``), ``reference``,
``examples``, and the parts of the definition that kernels share: ``tokens`` says which queries see which keys,
``positions`` where both stand in a cache, ``geometry`` which blocks see which blocks, ``statistics`` what a backward
pass takes from whole rows, ``dropout`` which weights are dropped, ``far`` the gradients of rows whose lse is too far
from 0 to compute weights from.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import jax
from jax.typing import ArrayLike

import ejkernel_core
from ejkernel_ops.front_door import front_door

#: Arguments that may not be None: an explicit None is passed on, and refused.
NEVER_NONE = ("causal", "dropout_prob", "return_lse", "validate")


@overload
def flash_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    attention_mask: ArrayLike | None = None,
    q_segment_ids: ArrayLike | None = None,
    kv_segment_ids: ArrayLike | None = None,
    cum_seqlens_q: ArrayLike | None = None,
    cum_seqlens_k: ArrayLike | None = None,
    q_start: ArrayLike | None = None,
    kv_lengths: ArrayLike | None = None,
    kv_positions: ArrayLike | None = None,
    softmax_aux: ArrayLike | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    sliding_window: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: ArrayLike | None = None,
    return_lse: Literal[False] = False,
    backend: str | None = None,
    cfg: Any = None,
    validate: bool = False,
) -> jax.Array: ...


@overload
def flash_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    attention_mask: ArrayLike | None = None,
    q_segment_ids: ArrayLike | None = None,
    kv_segment_ids: ArrayLike | None = None,
    cum_seqlens_q: ArrayLike | None = None,
    cum_seqlens_k: ArrayLike | None = None,
    q_start: ArrayLike | None = None,
    kv_lengths: ArrayLike | None = None,
    kv_positions: ArrayLike | None = None,
    softmax_aux: ArrayLike | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    sliding_window: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: ArrayLike | None = None,
    return_lse: Literal[True],
    backend: str | None = None,
    cfg: Any = None,
    validate: bool = False,
) -> tuple[jax.Array, jax.Array]: ...


@overload
def flash_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    attention_mask: ArrayLike | None = None,
    q_segment_ids: ArrayLike | None = None,
    kv_segment_ids: ArrayLike | None = None,
    cum_seqlens_q: ArrayLike | None = None,
    cum_seqlens_k: ArrayLike | None = None,
    q_start: ArrayLike | None = None,
    kv_lengths: ArrayLike | None = None,
    kv_positions: ArrayLike | None = None,
    softmax_aux: ArrayLike | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    sliding_window: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: ArrayLike | None = None,
    return_lse: bool,
    backend: str | None = None,
    cfg: Any = None,
    validate: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


@front_door
def flash_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    attention_mask: ArrayLike | None = None,
    q_segment_ids: ArrayLike | None = None,
    kv_segment_ids: ArrayLike | None = None,
    cum_seqlens_q: ArrayLike | None = None,
    cum_seqlens_k: ArrayLike | None = None,
    q_start: ArrayLike | None = None,
    kv_lengths: ArrayLike | None = None,
    kv_positions: ArrayLike | None = None,
    softmax_aux: ArrayLike | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    sliding_window: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: ArrayLike | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    cfg: Any = None,
    validate: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Softmax attention, by the best installed kernel for the device at hand.

    The logits of a head are ``softmax_scale * query @ key.T``; then, if given: capped, ``cap * tanh(logits / cap)``;
    the bias added; masked ones removed. The softmax runs over the keys and the sinks together. Statistics
    and sums are float32 or better, whatever the inputs are. A query that sees nothing gives 0.

    >>> import jax, jax.numpy as jnp
    >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 128, 4, 64))
    >>> flash_attention(query, key, value, causal=True).shape
    (2, 128, 4, 64)

    Grouped queries: eight query heads share two key heads. The last query is at the position of the last key, also when
    there are fewer queries than keys, so that decoding is causal attention with a short query:

    >>> q, k, v = jnp.ones((1, 1, 8, 64)), jnp.ones((1, 100, 2, 64)), jnp.ones((1, 100, 2, 32))
    >>> flash_attention(q, k, v, causal=True, sliding_window=(31, 0)).shape
    (1, 1, 8, 32)

    Packed sequences, here of 3, 0 and 5 tokens:

    >>> q, k, v = jax.random.normal(jax.random.key(1), (3, 8, 4, 64))
    >>> bounds = jnp.array([0, 3, 3, 8])
    >>> out, lse = flash_attention(q, k, v, cum_seqlens_q=bounds, cum_seqlens_k=bounds, return_lse=True)
    >>> out.shape, lse.shape
    ((8, 4, 64), (4, 8))

    Args:
      query: (batch, length, heads, head_dim); packed: (total, heads, head_dim), with ``cum_seqlens_*``.
      key: (batch, key length, kv heads, head_dim); ``heads`` is a multiple of ``kv heads``, and query head ``h`` uses
        key head ``h // (heads // kv heads)``.
      value: Like ``key``; its head_dim may be another one.
      bias: Added to the logits; broadcasts to (batch, heads, length, key length), batch 1 when packed. Its gradient has
        its own shape.
      attention_mask: Booleans that broadcast likewise: True where a query may see a key.
      q_segment_ids, kv_segment_ids: Integers (batch, length): tokens see each other where their ids are equal and
        above 0.
      cum_seqlens_q, cum_seqlens_k: The boundaries of packed sequences, n + 1 integers from 0 that do not decrease.
        Each sequence sees only itself; tokens after the last boundary are padding. The values are checked only with
        ``validate``.
      q_start: The position of the first query, an integer or one for each batch entry; by default the last query stands
        at the last key. It may be traced, and negative.
      kv_lengths: How many keys a cache holds, an integer or one for each batch entry. Those behind them are never used,
        even if they are NaN.
      kv_positions: Integers (batch, key length): the position of the key in each slot of a cache, -1 for an empty slot.
        With ``q_start``.
      softmax_aux: Sink logits, (heads,) or (heads, n): each row's softmax includes them, without a value.
      softmax_scale: Default ``head_dim ** -0.5``.
      causal: A query sees no key after its own.
      sliding_window: (left, right): how many keys before and after its own a query sees; an int is both. (0, 0) is its
        own key alone.
      logits_soft_cap: Bound of the logits.
      dropout_prob: Probability in [0, 1) with which a weight is dropped; the others are divided by 1 - probability.
      dropout_seed: Integer that decides which weights are dropped: the same on every backend, forward and backward.
      return_lse: Also return the log-sum-exp of each row, (batch, heads, length), packed (heads, total), in float32
        (float64 for float64): differentiable, sinks included, before dropout, -inf where nothing is seen.
      backend: Use this kernel, or raise with the reason.
      cfg: Use this configuration (of the kernel whose ``Config`` it is).
      validate: Check the values of boundaries, ids, lengths and positions before anything runs; a ValueError names the
        first wrong one. If an argument is traced (jit, grad, vmap), a TypeError is raised.

    Returns:
      (batch, length, heads, value's head_dim), in the inputs' dtype; with ``return_lse`` a pair.
    """
    arguments = {name: argument for name, argument in locals().items() if argument is not None or name in NEVER_NONE}
    results: jax.Array | tuple[jax.Array, jax.Array] = ejkernel_core.call("flash_attention", **arguments)
    return results
