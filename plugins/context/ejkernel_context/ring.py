"""``context_attention`` by a ring: the keys and values travel from device to device.

At step i, a device has the keys of the device i places before it. Under a causal mask in the zigzag layout, the first
step is a causal call on the own shard. In each later one, two pairs of halves see one another whole, and the others not
at all: the second half of the queries and the first half of the keys; and, if the keys come from an earlier device, the
first halves of both, else the second halves. The two pairs are one call of twice the batch. Which halves is selected by
value: a branch would make a GPU's host wait for the device.
"""

from __future__ import annotations

from typing import Any

import attrs
import jax
import jax.numpy as jnp

from ejkernel_core import Invocation, Unsupported, hookimpl

from .mesh import Names, check_inside
from .parts import Part, attention, merged, plain_attention, with_sinks
from .positions import shard_index
from .rule import RING

#: The version of the kernel.
VERSION = 1
#: By the rule of this package.
PLATFORMS = {"cpu": RING, "gpu": RING, "tpu": RING}
PARTS = ("flash_attention",)


#: The most bytes of the keys that travel as one array with the values. Copying 16 MiB takes some 10 microseconds.
MOST_JOINED = 2**24


@hookimpl
def heuristic_cfg(inv: Invocation) -> None:
    """Windows, and a causal mask in the contiguous layout, are refused."""
    refuse_uneven_steps(inv)


@hookimpl
def run_backend(inv: Invocation, cfg: None) -> tuple[jax.Array, jax.Array]:
    """The results for the queries of this device."""
    if inv["axis_size"] == 1:
        return plain_attention(inv)
    check_inside(inv)
    part = _causal(inv) if inv["causal"] else _full(inv)
    return with_sinks(part, inv["softmax_aux"]).results(inv["query"].dtype)


def refuse_uneven_steps(inv: Invocation) -> None:
    """Raise for calls in which most steps would have nothing to do on some devices."""
    if inv["axis_size"] == 1:
        return
    if inv["sliding_window"] is not None:
        raise Unsupported("sliding_window: most steps of a ring would have no visible keys; gather and ulysses take it")
    if inv["causal"] and inv["layout"] == "contiguous":
        raise Unsupported(
            "layout: under a causal mask, devices of the contiguous layout would wait for the last one at every step; "
            "use layout='zigzag', or gather or ulysses"
        )


@attrs.frozen(eq=False)
class Keys:
    """The keys and values of a device, on their way around the ring; with their segment ids, if there are any."""

    key: Any
    value: Any
    ids: Any

    @classmethod
    def own(cls, inv: Invocation) -> Keys:
        """Those of this device."""
        return cls(inv["key"], inv["value"], inv["kv_segment_ids"])

    def hop(self, inv: Invocation) -> Keys:
        """Those of the device before, which come as one array, unless copying them into one would take longer than
        another transfer takes to start.
        """
        dim = self.key.shape[-1]
        if self.key.size * self.key.dtype.itemsize > MOST_JOINED:
            key, value = shifted(self.key, inv), shifted(self.value, inv)
        elif self.key.shape == self.value.shape:
            key, value = shifted(jnp.stack([self.key, self.value]), inv)
        else:
            both = shifted(jnp.concatenate([self.key, self.value], axis=-1), inv)
            key, value = both[..., :dim], both[..., dim:]
        return Keys(key, value, None if self.ids is None else shifted(self.ids, inv))


def shifted(array: jax.Array, inv: Invocation) -> jax.Array:
    """The array of the device before, in a ring."""
    names: Names = inv["axis"]
    size = inv["axis_size"]
    array_of_other: jax.Array = jax.lax.ppermute(array, names, [(i, (i + 1) % size) for i in range(size)])
    return array_of_other


def is_earlier(inv: Invocation, step: int) -> Any:
    """Whether the keys at this step come from an earlier device, rather than from a later one."""
    shard = shard_index(inv["axis"])
    return (shard - step) % inv["axis_size"] < shard


def halves(array: Any, dim: int = 1) -> tuple[Any, Any]:
    """The two chunks of a shard."""
    if array is None:
        return None, None
    first, last = jnp.split(array, 2, axis=dim)
    return first, last


def both_pairs(earlier: Any, array: Any, dim: int = 1) -> Any:
    """What the two pairs of a step have of an array of the queries, as one batch: the second half, and the half that
    the other pair has.
    """
    if array is None:
        return None
    first, last = halves(array, dim)
    return jnp.concatenate([last, jnp.where(earlier, first, last)])


def both_pairs_of_keys(earlier: Any, array: Any) -> Any:
    """The same of an array of the keys: the first half, and that of the other pair."""
    if array is None:
        return None
    first, last = halves(array)
    return jnp.concatenate([first, jnp.where(earlier, first, last)])


def step_call(inv: Invocation, keys: Keys, earlier: Any) -> dict[str, Any]:
    """The arguments of attention at a step under a causal mask."""
    return {
        "query": both_pairs(earlier, inv["query"]),
        "key": both_pairs_of_keys(earlier, keys.key),
        "value": both_pairs_of_keys(earlier, keys.value),
        "q_segment_ids": both_pairs(earlier, inv["q_segment_ids"]),
        "kv_segment_ids": both_pairs_of_keys(earlier, keys.ids),
    }


def whole_step_call(inv: Invocation, keys: Keys, causal: bool = False) -> dict[str, Any]:
    """The arguments of attention at a step of the whole shard."""
    ids = {"q_segment_ids": inv["q_segment_ids"], "kv_segment_ids": keys.ids}
    return {"query": inv["query"], "key": keys.key, "value": keys.value, "causal": causal, **ids}


def _full(inv: Invocation) -> Part:
    keys, part = Keys.own(inv), None
    for step in range(inv["axis_size"]):
        # The next keys are sent before the attention of this step, so that they can arrive meanwhile.
        following = keys.hop(inv) if step < inv["axis_size"] - 1 else keys
        new = Part.of(attention(inv, **whole_step_call(inv, keys)))
        part = new if part is None else merged(part, new)
        keys = following
    assert part is not None
    return part


def _causal(inv: Invocation) -> Part:
    own = Keys.own(inv)
    keys = own.hop(inv)
    first, last = _halves_of(Part.of(attention(inv, **whole_step_call(inv, own, causal=True))), 1)
    for step in range(1, inv["axis_size"]):
        following = keys.hop(inv) if step < inv["axis_size"] - 1 else keys
        earlier = is_earlier(inv, step)
        one, other = _halves_of(Part.of(attention(inv, **step_call(inv, keys, earlier))), 0)
        # The other pair is of the first queries or of the last ones, and has no weight in the other half.
        first = merged(first, other.where(earlier))
        last = merged(last, one, other.where(~earlier))
        keys = following
    return Part(jnp.concatenate([first.out, last.out], axis=1), jnp.concatenate([first.lse, last.lse], axis=1))


def _halves_of(part: Part, dim: int) -> tuple[Part, Part]:
    first, last = map(Part, halves(part.out, dim), halves(part.lse, dim))
    return first, last
