"""Examples of attention against a cache: every slot that holds no key is NaN.

They are few, and each has several features at once, because they run for every kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from ejkernel_core import Example
from ejkernel_testing import TRANSFORMS

from .positions import ring_positions

Arguments = dict[str, Any]
LSE = {"return_lse": True}


def cached_examples() -> Iterator[Example]:
    """Lengths of none, one and all keys, starts before and behind the keys, rings, and what goes with them."""
    from .examples import example, normal, qkv, segments

    calls: dict[str, Callable[[int], Arguments]] = {
        "cache-of-no-key-one-and-all": lambda d: (
            with_lengths(qkv(d, 3, 5, 40, 4, 2, 16), [0, 1, 40]) | {"causal": True} | LSE
        ),
        "cache-of-one-length": lambda d: with_lengths(qkv(d, 2, 1, 70, 8, 8, 16), 33 + d) | LSE,
        "cache-over-many-blocks": lambda d: (
            with_lengths(qkv(d, 2, 70, 300, 2, 1, 16), [170 + d, 290]) | {"causal": True, "sliding_window": (90, 0)}
        ),
        "cache-with-all-there-is": lambda d: (
            with_lengths(qkv(d, 2, 9, 20, 4, 2, 16, 8), [13, 7 + d])
            | segments(d, 2, 9, 20)
            | {
                "bias": normal("bias", d, (1, 4, 9, 20)),
                "attention_mask": normal("mask", d, (2, 1, 9, 20)) < 1,
                "softmax_aux": normal("sinks", d, (4, 2)),
                "q_start": np.array([3, 1], np.int32),
                "causal": True,
                "sliding_window": (8, 0),
                "logits_soft_cap": 2.0,
            }
            | LSE
        ),
        "cache-queries-before-the-keys": lambda d: (
            qkv(d, 2, 9, 20, 4, 2, 16) | {"q_start": -4 - d, "causal": True, "softmax_aux": normal("sinks", d, (4,))}
        ),
        "cache-queries-behind-the-keys": lambda d: (
            qkv(d, 2, 9, 40, 4, 2, 16) | {"q_start": np.array([38, 60 + d], np.int32), "sliding_window": (25, 3)} | LSE
        ),
        "cache-ring": lambda d: (
            with_ring(qkv(d, 2, 3, 33, 4, 2, 16), [100 + d, 20]) | {"causal": True, "sliding_window": (25, 0)} | LSE
        ),
        "cache-ring-with-sinks-and-a-cap": lambda d: (
            with_ring(qkv(d, 1, 16, 150, 4, 1, 16), [2**29 - 1 - d])
            | {"causal": True, "softmax_aux": normal("sinks", d, (4,)), "logits_soft_cap": 3.0}
        ),
        "cache-of-slots-in-any-order": lambda d: in_any_order(qkv(d, 2, 4, 40, 4, 2, 16), d) | {"causal": True} | LSE,
    }
    for name, arguments in calls.items():
        yield example(name, arguments)
    yield example("cache-ring-bfloat16", calls["cache-ring"], dtype="bfloat16")
    yield example("cache-of-no-key-one-and-all-bfloat16", calls["cache-of-no-key-one-and-all"], dtype="bfloat16")
    yield from subjects()


def subjects() -> Iterator[Example]:
    """Small calls for JAX's transformations, and one argument at a time."""
    from .examples import example, qkv

    small: Callable[[int], Arguments] = lambda d: qkv(d, 2, 3, 9, 4, 2, 8)
    of_lengths = lambda d: with_lengths(small(d), [4 + d, 9]) | {"causal": True} | LSE
    of_a_ring = lambda d: with_ring(small(d), [20 + d, 7]) | {"causal": True, "sliding_window": (7, 0)}
    transforms = {*TRANSFORMS} - {"shard_map", "sharding", "sharded_derivatives", "forward_mode", "jacrev_of_jacrev"}
    yield example("cache-transformed", of_lengths, checks={"values", *transforms})
    yield example("cache-ring-transformed", of_a_ring, checks={"values", "vmap", "vmap_of_grad", "scan"})
    yield example(
        "cache-sharded",
        lambda d: with_lengths(qkv(d, 8, 3, 9, 4, 2, 8), list(range(1, 9))) | {"causal": True},
        checks={"values", "shard_map", "sharding"},
    )
    yield example(
        "cache-ring-sharded",
        lambda d: with_ring(qkv(d, 8, 3, 9, 4, 2, 8), list(range(3, 11))) | {"causal": True},
        checks={"values", "shard_map", "sharding"},
        long=True,
    )
    tiny = lambda d: with_lengths(qkv(d, 1, 2, 4, 2, 2, 2), [3]) | {"causal": True}
    yield example("cache-tiny", tiny, checks={"values", "forward_mode"}, long=True)
    base = lambda d: qkv(d, 2, 4, 30, 4, 2, 16) | {"causal": True, "q_start": 20} | LSE
    variations: dict[str, Arguments] = {
        "another-q_start": {"q_start": 11},
        "a-q_start-for-each-row": {"q_start": np.array([20, 7], np.int32)},
        "kv_lengths": {"kv_lengths": 15},
        "kv_lengths-for-each-row": {"kv_lengths": np.array([21, 15], np.int32)},
        "kv_positions": {"kv_positions": ring_positions(np.array([40, 31], np.int32), 30)},
    }
    yield example(
        "cache-one-at-a-time",
        base,
        checks={"values", "sensitivity"},
        variations=tuple(example(name, partial(_changed, base, changes)) for name, changes in variations.items()),
    )


def _changed(base: Callable[[int], Arguments], changes: Arguments, draw: int) -> Arguments:
    return base(draw) | changes


def with_lengths(arguments: Arguments, lengths: Any) -> Arguments:
    """The call on a cache that holds so many keys, one number or one for each batch entry."""
    lengths = np.asarray(lengths, np.int32)
    filled = np.arange(arguments["key"].shape[1])[None] < np.broadcast_to(lengths, len(arguments["key"]))[:, None]
    return without_keys(arguments, ~filled) | {"kv_lengths": lengths}


def with_ring(arguments: Arguments, ends: list[int]) -> Arguments:
    """The call on a ring that holds the keys of the positions before these, of which the queries have the last."""
    positions = ring_positions(np.asarray(ends, np.int32), arguments["key"].shape[1])
    starts = np.asarray(ends, np.int32) - np.int32(arguments["query"].shape[1])
    return without_keys(arguments, positions < 0) | {"kv_positions": positions, "q_start": starts}


def in_any_order(arguments: Arguments, draw: int) -> Arguments:
    """The call on a cache with its keys in any order, and empty slots between them."""
    rng = np.random.default_rng([2, draw])
    batch, slots = arguments["key"].shape[:2]
    positions = rng.permuted(np.tile(np.arange(slots, dtype=np.int32), (batch, 1)), axis=1)
    positions[rng.random(positions.shape) < 0.3] = -1
    return without_keys(arguments, positions < 0) | {"kv_positions": positions, "q_start": slots // 2}


def without_keys(arguments: Arguments, unfilled: Any) -> Arguments:
    """The call with NaN in these slots, (batch, slots)."""
    nan = {name: np.where(unfilled[:, :, None, None], np.nan, arguments[name]) for name in ("key", "value")}
    return arguments | nan
