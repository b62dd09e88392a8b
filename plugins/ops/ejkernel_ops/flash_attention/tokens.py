"""The sequence and the position of each token, and which queries may see which keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_ops.symbolic import is_symbolic

from .positions import has_positions, is_filled, key_positions, query_positions

Ids = tuple[Any, Any]


@attrs.frozen(eq=False)
class Tokens:
    """The coordinates that masks are made of, one row for each batch entry or one for all.

    A query's own key is the key at its position. Unless the call says where its queries stand, the last query of a
    sequence is at the position of its last key (bottom-right alignment). ``groups`` holds pairs of (query ids, key
    ids): a query may see a key if their ids are equal and positive in every group. A slot of a cache that holds no key
    has an id of 0, and all else in that group 1.

    Positions are NumPy arrays if they are known while tracing, so that a kernel can plan its blocks in Python.
    """

    q_position: Any
    k_position: Any
    groups: tuple[Ids, ...] = ()


def band(causal: bool, sliding_window: tuple[int, int] | None) -> tuple[int | None, int | None]:
    """How many keys to the left and to the right of its own a query may see; None is without limit.

    >>> band(True, None), band(False, (4, 2)), band(True, (4, 2))
    ((None, 0), (4, 2), (4, 0))
    """
    left, right = sliding_window or (None, None)
    return left, 0 if causal else right


def tokens(arguments: Mapping[str, Any]) -> Tokens:
    """The coordinates of a flash attention call, from its prepared arguments."""
    q_length, k_length = arguments["query"].shape[1], arguments["key"].shape[1]
    groups: list[Ids] = []
    q_position: jax.Array | np.ndarray
    k_position: jax.Array | np.ndarray
    if has_positions(arguments):
        q_position, k_position = query_positions(arguments), key_positions(arguments)
    elif is_symbolic(q_length) or is_symbolic(k_length):
        q_position = jnp.arange(q_length, dtype=jnp.int32)[None] + jnp.asarray(k_length - q_length, jnp.int32)
        k_position = jnp.arange(k_length, dtype=jnp.int32)[None]
    else:
        q_position = np.arange(q_length, dtype=np.int32)[None] + np.int32(k_length - q_length)
        k_position = np.arange(k_length, dtype=np.int32)[None]
    if arguments["cum_seqlens_q"] is not None:
        cum_q, cum_k = arguments["cum_seqlens_q"], arguments["cum_seqlens_k"]
        q_ids, k_ids = _sequence_ids(cum_q, q_length), _sequence_ids(cum_k, k_length)
        offset = cum_k[1:] - cum_q[1:]  # the last query of a sequence is at its last key
        q_position = (jnp.arange(q_length, dtype=jnp.int32) + offset[q_ids - 1])[None]
        groups.append((q_ids[None], k_ids[None]))
    if arguments["q_segment_ids"] is not None:
        groups.append((arguments["q_segment_ids"], arguments["kv_segment_ids"]))
    filled = is_filled(arguments)
    if filled is not None:
        groups.append((jnp.ones((1, q_length), jnp.int32), filled.astype(jnp.int32)))
    return Tokens(q_position, k_position, tuple(groups))


def visible(
    q_position: Any, k_position: Any, groups: tuple[Ids, ...], left: int | None, right: int | None
) -> jax.Array | None:
    """Which queries see which keys, (rows, queries, keys); None if every query sees every key."""
    # In JAX: with NumPy it would be a constant of the program, as large as all pairs of tokens.
    distance = jnp.asarray(k_position)[:, None, :] - jnp.asarray(q_position)[:, :, None]
    conditions = [(q_ids[:, :, None] == k_ids[:, None, :]) & (q_ids[:, :, None] > 0) for q_ids, k_ids in groups]
    if left is not None:
        conditions.append(distance >= -left)
    if right is not None:
        conditions.append(distance <= right)
    if not conditions:
        return None
    mask: jax.Array = conditions[0]
    for condition in conditions[1:]:
        mask = mask & condition
    return mask


def _sequence_ids(cum_seqlens: jax.Array, length: int) -> jax.Array:
    """1 for the tokens of the first sequence, 2 for the second, ...; 0 after the last. Empty sequences have none."""
    index = jnp.arange(length, dtype=cum_seqlens.dtype)
    # Unrolled, it fuses with the operations that read it; a loop would be many launches of tiny kernels.
    ids = jnp.searchsorted(cum_seqlens[1:], index, side="right", method="scan_unrolled") + 1
    return jnp.where(index < cum_seqlens[-1], ids, 0).astype(jnp.int32)
