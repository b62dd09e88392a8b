"""The rule by which a kernel is chosen: Ulysses where the devices divide the heads, or else gathered keys while these
are not too many, or else the ring.

All three have the same work. Ulysses makes plain calls, which every kernel of attention can do at its full rate.
Gathered keys take fewer bytes than Ulysses where n * K < H + K, for n devices, H heads and K key heads. But a causal
call of them is packed: our fastest kernel for packed calls has 0.80 to 0.87 of its plain rate forward (see
docs/performance.md), and cuDNN's refuse them. For H = 32 and K = 8 on two cards, the bytes that Ulysses has more are
reckoned to take 3 % of the time of 32k tokens, and 12 % of that of 8k. The ring divides the work into n steps, each of
which is a smaller call with a merge. It is for keys that are too many to be gathered: its steps are then long enough to
hide the transfers.

All processes of a program have to choose alike, so the rule depends on nothing but the call.
"""

from __future__ import annotations

from ejkernel_core import Invocation

from .mesh import in_words

#: The most bytes of the keys and values of the whole sequence that are gathered: a backward holds them, and their
#: gradients in float32, in all three times as much in 16 bits. Of a device with 80 GB this is a twenty-fifth.
MOST_GATHERED = 2**30
#: The ranks on every platform.
ULYSSES, GATHER, RING, GATHER_TOO_MANY = 30, 20, 10, 5


def gathered_bytes(inv: Invocation) -> int:
    """The bytes of the keys and values of the whole sequence."""
    shards = int(inv["axis_size"])
    return shards * sum(int(inv[name].size * inv[name].dtype.itemsize) for name in ("key", "value"))


def gather_rank(inv: Invocation) -> int:
    """The rank of gathered keys."""
    return GATHER if gathered_bytes(inv) <= MOST_GATHERED else GATHER_TOO_MANY


def indivisible_heads(inv: Invocation) -> str | None:
    """Why the heads cannot be divided among the devices; None where they can."""
    shards = inv["axis_size"]
    for name in ("query", "key"):
        heads = inv[name].shape[2]
        if heads % shards:
            return f"{name}: its {heads} heads cannot be divided among the {shards} devices of {in_words(inv['axis'])}"
    return None
