"""The rule by which a kernel is chosen: that of gathered keys and Ulysses which receives fewer bytes, or else the ring.

The number of bytes that a device receives decides, because both compute the same and neither hides what it waits for:
for n devices, H heads and K key heads, gathered keys are fewer where n * K < H + K. The ring receives as much as
gathered keys and divides the work into n steps, each of which is a smaller call. It is for keys that are too many to be
gathered. All processes of a program have to choose alike, so the rule depends on nothing but the call.
"""

from __future__ import annotations

from ejkernel_core import Invocation

from .mesh import in_words

#: The most bytes of the keys and values of the whole sequence that are gathered: a backward holds them, and their
#: gradients in float32, four times as much in 16 bits. Of a device with 80 GB this is a sixteenth. With more keys, the
#: steps of a ring are long enough to hide the transfers.
MOST_GATHERED = 2**30
#: The ranks on every platform. Gathered keys have one of three.
ULYSSES, RING = 25, 10
GATHER_FEWER, GATHER_MORE, GATHER_TOO_MANY = 30, 20, 5


def gathered_bytes(inv: Invocation) -> int:
    """The bytes of the keys and values of the whole sequence."""
    shards = int(inv["axis_size"])
    return shards * sum(int(inv[name].size * inv[name].dtype.itemsize) for name in ("key", "value"))


def gather_rank(inv: Invocation) -> int:
    """The rank of gathered keys."""
    if gathered_bytes(inv) > MOST_GATHERED:
        return GATHER_TOO_MANY
    query, value, shards = inv["query"], inv["value"], inv["axis_size"]
    heads, kv_heads = query.shape[2], value.shape[2]
    return GATHER_FEWER if shards * kv_heads <= heads + kv_heads else GATHER_MORE


def indivisible_heads(inv: Invocation) -> str | None:
    """Why the heads cannot be divided among the devices; None where they can."""
    shards = inv["axis_size"]
    for name in ("query", "key"):
        heads = inv[name].shape[2]
        if heads % shards:
            return f"{name}: its {heads} heads cannot be divided among the {shards} devices of {in_words(inv['axis'])}"
    return None
