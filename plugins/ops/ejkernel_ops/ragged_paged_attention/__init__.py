"""The typed front door of ``ragged_paged_attention``, and the metadata of a step."""

from __future__ import annotations

from typing import Any, Literal, overload

import jax
from jax.typing import ArrayLike

import ejkernel_core
from ejkernel_ops.front_door import front_door

from .tiles import paged_attention_metadata

__all__ = ["paged_attention_metadata", "ragged_paged_attention"]


@overload
def ragged_paged_attention(
    query: ArrayLike,
    kv_pages: ArrayLike | tuple[ArrayLike, ArrayLike],
    kv_lens: ArrayLike,
    block_tables: ArrayLike,
    query_start_loc: ArrayLike,
    num_seqs: ArrayLike | None = None,
    *,
    return_lse: Literal[False] = False,
    metadata: ArrayLike | None = None,
    softmax_aux: ArrayLike | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    sliding_window: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    q_scale: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    max_query_len: int | None = None,
    split_size: int | None = None,
    first_page: ArrayLike | None = None,
    backend: str | None = None,
    cfg: Any = None,
    validate: bool = False,
) -> jax.Array: ...


@overload
def ragged_paged_attention(
    query: ArrayLike,
    kv_pages: ArrayLike | tuple[ArrayLike, ArrayLike],
    kv_lens: ArrayLike,
    block_tables: ArrayLike,
    query_start_loc: ArrayLike,
    num_seqs: ArrayLike | None = None,
    *,
    return_lse: Literal[True],
    metadata: ArrayLike | None = None,
    softmax_aux: ArrayLike | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    sliding_window: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    q_scale: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    max_query_len: int | None = None,
    split_size: int | None = None,
    first_page: ArrayLike | None = None,
    backend: str | None = None,
    cfg: Any = None,
    validate: bool = False,
) -> tuple[jax.Array, jax.Array]: ...


@front_door
def ragged_paged_attention(
    query: ArrayLike,
    kv_pages: ArrayLike | tuple[ArrayLike, ArrayLike],
    kv_lens: ArrayLike,
    block_tables: ArrayLike,
    query_start_loc: ArrayLike,
    num_seqs: ArrayLike | None = None,
    *,
    metadata: ArrayLike | None = None,
    softmax_aux: ArrayLike | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    sliding_window: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    q_scale: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    max_query_len: int | None = None,
    split_size: int | None = None,
    first_page: ArrayLike | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    cfg: Any = None,
    validate: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of the new tokens of sequences to the pages of a cache, in which their keys and values are already.

    >>> import jax.numpy as jnp
    >>> pages = jnp.zeros((3, 4, 2, 1)).at[2, 0, 1].set(6.0)  # the value of the first token of page 2
    >>> query, lengths, tables = jnp.ones((1, 1, 1)), jnp.array([3]), jnp.array([[2, -1]])
    >>> ragged_paged_attention(query, pages, lengths, tables, jnp.array([0, 1]))
    Array([[[2.]]], dtype=float32)

    Args:
      query: (tokens, heads, head_dim), the tokens of all sequences one after another.
      kv_pages: (pages, page_size, 2 * kv heads, head_dim), in which entry ``2 * h`` is the key of head ``h``, and the
        next one its value. Or a pair: (pages, page_size, kv heads, head_dim) for keys, and the same for values, whose
        head_dim may be another one. Of the query's dtype, or of 8 bits.
      kv_lens: Integers (sequences,): the keys of each, with those of the new tokens.
      block_tables: Integers (sequences, pages): the pages of each. Entries behind its last page are not read.
      query_start_loc: Integers (sequences + 1,): where the tokens of each begin, and where the last ones end.
      num_seqs: How many of the sequences count. By default all.
      metadata: What ``paged_attention_metadata`` returns, for all layers of a step.
      softmax_aux: (heads,) or (heads, sinks): logits of sinks, which have no value.
      softmax_scale: What products are multiplied by; by default ``head_dim ** -0.5``.
      causal: Whether a query sees only keys up to its own position. The last query of a sequence is at its last key.
      sliding_window: How many keys to the left, and to the right, of its position a query sees.
      logits_soft_cap: Logits become ``cap * tanh(logits / cap)``.
      q_scale, k_scale, v_scale: For queries and pages of 8 bits: a number, or one for each head, that they are
        multiplied by.
      max_query_len: No sequence has more new tokens: 1 where all decode. Kernels are chosen by it.
      split_size: Keys are split in parts of so many, so that the bits of a result do not depend on the other sequences.
      first_page: An integer that is added to the entries of tables, so that the pages of all layers can be one array.
      return_lse: Return (out, lse), with the logarithm of the sum of the exponentials of logits: (heads, tokens).
      backend: Use this kernel, or raise with the reason.
      cfg: Use this configuration (of the kernel whose ``Config`` it is).
      validate: Check that lengths, starts and tables are right.

    Returns:
      (tokens, heads, value head_dim). There are no gradients.
    """
    arrays = {
        "num_seqs": num_seqs,
        "metadata": metadata,
        "softmax_aux": softmax_aux,
        "q_scale": q_scale,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "first_page": first_page,
    }
    options: dict[str, Any] = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "sliding_window": sliding_window,
        "logits_soft_cap": logits_soft_cap,
        "max_query_len": max_query_len,
        "split_size": split_size,
        "return_lse": return_lse,
        "backend": backend,
        "cfg": cfg,
        "validate": validate,
    }
    pages: dict[str, Any] = {"kv_pages": kv_pages}
    if isinstance(kv_pages, (tuple, list)) and len(kv_pages) == 2:
        pages = dict(zip(("key_pages", "value_pages"), kv_pages, strict=True))
    options |= {name: array for name, array in arrays.items() if array is not None}
    options |= {"kv_lens": kv_lens, "block_tables": block_tables, "query_start_loc": query_start_loc}
    result: jax.Array | tuple[jax.Array, jax.Array] = ejkernel_core.call(
        "ragged_paged_attention", query, **pages, **options
    )
    return result
