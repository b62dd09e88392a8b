"""``context_attention`` by gathering the keys and values of all devices.

Under a causal mask, how many keys a chunk of queries sees depends on the device. So a chunk is a packed sequence, with
traced boundaries, and every device runs the same program. A kernel that skips by boundaries computes nothing in vain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import jax
import jax.numpy as jnp

from ejkernel_core import Invocation, Unsupported, hookimpl

from .layouts import chunk_places, in_sequence
from .mesh import check_inside
from .parts import attention, plain_attention
from .positions import shard_index
from .rule import gather_rank

#: The version of the kernel.
VERSION = 1
#: By the rule of this package.
PLATFORMS = {"cpu": gather_rank, "gpu": gather_rank, "tpu": gather_rank}
PARTS = ("flash_attention",)


@hookimpl
def heuristic_cfg(inv: Invocation) -> None:
    """A window that ends after its query is refused."""
    refuse_open_window(inv)


@hookimpl
def run_backend(inv: Invocation, cfg: None) -> tuple[jax.Array, jax.Array]:
    """The results for the queries of this device."""
    if inv["axis_size"] == 1:
        return plain_attention(inv)
    check_inside(inv)
    if inv["causal"] and inv["layout"] == "zigzag":
        call = packed_chunks(inv)
    elif inv["causal"]:
        (chunk,) = chunks(inv)
        call = chunk.packed_call(inv, gathered_keys(inv))
    else:
        ids = {"q_segment_ids": inv["q_segment_ids"]}
        return attention(inv, query=inv["query"], softmax_aux=inv["softmax_aux"], **ids, **gathered_keys(inv))
    out, lse = attention(inv, softmax_aux=inv["softmax_aux"], **call)
    return out.reshape(*inv["query"].shape[:-1], out.shape[-1]), unpacked_lse(lse, len(inv["query"]))


def refuse_open_window(inv: Invocation) -> None:
    """Raise for a window to both sides."""
    if inv["sliding_window"] is not None and not inv["causal"] and inv["axis_size"] > 1:
        raise Unsupported(
            "sliding_window: without causal it ends after the keys of a chunk, which boundaries cannot say; ulysses can"
        )


def gathered(inv: Invocation, array: jax.Array) -> jax.Array:
    """The shards of all devices: in the order of the sequence where that matters, else in that of the devices."""
    whole: jax.Array = jax.lax.all_gather(array, inv["axis"], axis=1, tiled=True)
    if inv["causal"] and inv["layout"] == "zigzag":
        whole = in_sequence(whole, inv["axis_size"], 1)
    return whole


def gathered_keys(inv: Invocation) -> dict[str, Any]:
    """The keys, values and segment ids of the whole sequence."""
    names = ("key", "value", "kv_segment_ids")
    return {name: None if inv[name] is None else gathered(inv, inv[name]) for name in names}


@attrs.frozen(eq=False)
class Chunk:
    """Queries of this device that follow one another in the sequence."""

    #: Where they are in the shard.
    start: int
    length: int
    #: The number of keys up to the last of them, which depends on the device.
    num_keys: Any

    def rows(self, array: Any, dim: int = 1) -> Any:
        """Their rows of an array of the shard."""
        return None if array is None else jax.lax.slice_in_dim(array, self.start, self.start + self.length, axis=dim)

    def packed_call(self, inv: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a packed call of these queries, for the whole batch."""
        query, q_ids = self.rows(inv["query"]), self.rows(inv["q_segment_ids"])
        arrays = {"query": query, "q_segment_ids": q_ids, **keys}
        cum_q, cum_k = boundaries(query.shape[0], self.length, keys["key"].shape[1], self.num_keys)
        return {
            **{name: None if array is None else flat(array) for name, array in arrays.items()},
            "cum_seqlens_q": cum_q,
            "cum_seqlens_k": cum_k,
            "causal": True,
            "sliding_window": inv["sliding_window"],
        }


def chunks(inv: Invocation) -> list[Chunk]:
    """The chunks of this device."""
    shard, shards, length = shard_index(inv["axis"]), inv["axis_size"], inv["query"].shape[1]
    if inv["layout"] == "contiguous":
        return [Chunk(0, length, (shard + 1) * length)]
    half = length // 2
    return [Chunk(0, half, (shard + 1) * half), Chunk(half, half, (2 * shards - shard) * half)]


def packed_chunks(inv: Invocation) -> dict[str, Any]:
    """The arguments of one packed call of both chunks in the zigzag layout.

    The first chunk of device r of n sees r + 1 chunks of the keys, and the second one 2n - r. Together these are 2n + 1
    on every device, so both are packed one after the other, without keys that nothing sees.
    """
    shard, shards = shard_index(inv["axis"]), inv["axis_size"]
    batch, length = inv["query"].shape[0], inv["query"].shape[1] // 2
    chunk = jnp.arange(2 * shards + 1)
    chunk = jnp.where(chunk <= shard, chunk, chunk - shard - 1)
    places = jnp.asarray(chunk_places(shards))[chunk]

    def packed(array: Any) -> Any:
        if array is None:
            return None
        whole = jax.lax.all_gather(array, inv["axis"], axis=1, tiled=True)
        in_chunks = whole.reshape(batch, 2 * shards, length, *array.shape[2:])
        return jnp.take(in_chunks, places, axis=1).reshape(-1, *array.shape[2:])

    rows, num_keys = jnp.arange(batch, dtype=jnp.int32), (2 * shards + 1) * length
    starts = jnp.stack([rows * num_keys, rows * num_keys + (shard + 1) * length], axis=1)
    return {
        "query": flat(inv["query"]),
        "q_segment_ids": None if inv["q_segment_ids"] is None else flat(inv["q_segment_ids"]),
        **{name: packed(inv[name]) for name in ("key", "value", "kv_segment_ids")},
        "cum_seqlens_q": jnp.arange(2 * batch + 1, dtype=jnp.int32) * length,
        "cum_seqlens_k": jnp.append(starts.reshape(-1), batch * num_keys).astype(jnp.int32),
        "causal": True,
        "sliding_window": inv["sliding_window"],
    }


def boundaries(batch: int, queries: int, keys: int, num_keys: Any) -> tuple[jax.Array, jax.Array]:
    """The boundaries of a batch whose sequences have ``queries`` queries each, which see the first ``num_keys`` keys.

    The keys that a sequence does not see are a sequence without queries, and those at the end are padding.

    >>> [bounds.tolist() for bounds in boundaries(2, 3, 10, 6)]
    [[0, 3, 3, 6], [0, 6, 10, 16]]
    """
    rows = jnp.arange(batch, dtype=jnp.int32)
    cum_q = jnp.stack([rows * queries, (rows + 1) * queries], axis=1)
    cum_k = jnp.stack([rows * keys, rows * keys + num_keys], axis=1)
    return cum_q.reshape(-1), cum_k.reshape(-1).astype(jnp.int32)


def flat(array: jax.Array) -> jax.Array:
    """(batch, length, ...) to (batch * length, ...)."""
    return array.reshape(-1, *array.shape[2:])


def unpacked_lse(lse: jax.Array, batch: int) -> jax.Array:
    """(heads, batch * length) to (batch, heads, length)."""
    return lse.reshape(lse.shape[0], batch, lse.shape[1] // max(batch, 1)).swapaxes(0, 1)


def packed_lse(lse: jax.Array) -> jax.Array:
    """The inverse of ``unpacked_lse``."""
    return lse.swapaxes(0, 1).reshape(lse.shape[1], -1)
