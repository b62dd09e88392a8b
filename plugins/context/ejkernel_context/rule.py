"""The rule by which a kernel is chosen: gathered keys where these are few, or else Ulysses where the devices divide the
heads, or else gathered keys while these fit, or else the ring.

All three have the same work, and differ in what is sent and copied. Gathered keys take fewer bytes than Ulysses where
n * K < H + K, for n devices, H heads and K key heads. Ulysses also copies every array twice, because heads and tokens
change places, but its calls are plain ones. The ring divides the work into n steps, each of which is a smaller call
with a merge. It is for keys that are too many to be gathered: its steps are then long enough to hide the transfers. On
two H100s with H = 32 and K = 8, forward, the efficiencies of gathered keys, Ulysses and the ring are 0.92, 0.87 and
0.92 for 32k tokens, and 0.96, 0.93 and 0.96 for 128k (see docs/measurements).

All processes of a program have to choose alike, so the rule depends on nothing but the call.
"""

from __future__ import annotations

from ejkernel_core import Invocation

from .mesh import in_words

#: The most bytes of the keys and values of the whole sequence that are gathered: a backward holds them, and their
#: gradients in float32, in all three times as much in 16 bits. Of a device with 80 GB this is a twenty-fifth.
MOST_GATHERED = 2**30
#: The ranks on every platform.
GATHER_FEW, ULYSSES, GATHER, RING, GATHER_TOO_MANY = 40, 30, 20, 10, 5


def gathered_bytes(inv: Invocation) -> int:
    """The bytes of the keys and values of the whole sequence."""
    shards = int(inv["axis_size"])
    return shards * sum(int(inv[name].size * inv[name].dtype.itemsize) for name in ("key", "value"))


def gather_rank(inv: Invocation) -> int:
    """The rank of gathered keys."""
    if gathered_bytes(inv) > MOST_GATHERED:
        return GATHER_TOO_MANY
    heads, kv_heads = inv["query"].shape[2], inv["key"].shape[2]
    return GATHER_FEW if inv["axis_size"] * kv_heads < heads + kv_heads else GATHER


def indivisible_heads(inv: Invocation) -> str | None:
    """Why the heads cannot be divided among the devices; None where they can."""
    shards = inv["axis_size"]
    for name in ("query", "key"):
        heads = inv[name].shape[2]
        if heads % shards:
            return f"{name}: its {heads} heads cannot be divided among the {shards} devices of {in_words(inv['axis'])}"
    return None
