"""Attention of 1 to 16 queries against a cache, on a GPU, beside cuDNN, FA3 and FA4.

The calls that bars are about come first. Of our kernels only the chosen one is measured: others can take many times as
long. --kernels names those to measure beside it, such as --kernels triton_decode.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from importlib import import_module
from statistics import geometric_mean
from typing import Any

import attrs
import jax
import numpy as np

from ejkernel_core import Example

from . import suite
from ._flash_attention_peers import FA3, FA4, by_fa4, whole_forward, whole_library
from ._flash_attention_peers import peers as flash_attention_peers

#: Batch, slots, heads and key heads.
CACHES = ((64, 8192, 32, 8), (16, 32768, 32, 8), (256, 2048, 64, 8), (1, 131072, 32, 8), (128, 1024, 32, 4))
#: With fewer keys, which most of the time is the start of a kernel.
SHORT_CACHES = ((1, 16384, 32, 8), (8, 2048, 32, 8), (1, 1024, 32, 8))
QUERIES = (1, 2, 4, 8, 16)
VARIED: tuple[dict[str, Any], ...] = (
    {"kv_lengths": 819},
    {"sliding_window": (1023, 0)},
    {"softmax_aux": True},
    {"logits_soft_cap": 30.0},
)
SMALL = "B2 S96 H4/2 D16 float32, 2 queries"
#: The time of a cache that is filled to a tenth, of that of a full one.
TENTH = 0.15
MINIMA = tuple(suite.Minimum("forward", peer, 0.95) for peer in ("cuDNN", FA3, FA4))


def example(cache: tuple[int, ...], queries: int, dim: int = 128, dtype: str = "bfloat16", **options: Any) -> Example:
    """The last of the queries stands at the last key."""
    batch, slots, heads, kv_heads = cache
    words = [f"{queries} queries", *(f"{name} {value}" for name, value in options.items())]
    name = f"B{batch} S{slots} H{heads}/{kv_heads} D{dim} {dtype}, {', '.join(words)}"
    return Example(name, "flash_attention", partial(arguments, cache, queries, dim, dtype, options), dtype)


def arguments(
    cache: tuple[int, ...], queries: int, dim: int, dtype: str, options: Mapping[str, Any], draw: int
) -> dict[str, Any]:
    batch, slots, heads, kv_heads = cache
    shapes = {"query": (queries, heads), "key": (slots, kv_heads), "value": (slots, kv_heads)}
    keys = jax.random.split(jax.random.key(draw), 4)
    arrays: dict[str, Any] = {
        name: jax.random.normal(key, (batch, *shape, dim), dtype)
        for key, (name, shape) in zip(keys, shapes.items(), strict=False)
    }
    given = dict(options)
    if "kv_lengths" in given:
        given["kv_lengths"] = np.full(batch, given["kv_lengths"], np.int32)
    if "softmax_aux" in given:
        given["softmax_aux"] = jax.random.normal(keys[3], (heads,), dtype)
    return arrays | {"causal": True} | given


def examples() -> Iterator[Example]:
    """One query against each cache first, so that a run which is cut off has some of every kind."""
    yield from (example(cache, queries) for queries in QUERIES for cache in CACHES)
    yield from (example(CACHES[0], queries, **VARIED[0]) for queries in (1, 4))
    yield from (example(cache, queries) for cache in SHORT_CACHES for queries in (1, 4))
    yield from (example(CACHES[0], queries, **options) for options in VARIED[1:] for queries in (1, 4))


def run(
    backend: str | None = None, rounds: int = suite.ROUNDS, small: bool = False, kernels: str | None = None
) -> suite.Report:
    """The measured calls, or with ``small`` one that a CPU can run."""
    backends = suite.backends_of("flash_attention", kernels)
    options: dict[str, Any] = {"backend": backend, "backends": backends, "rounds": rounds}
    if small:
        calls, names = [example((2, 96, 4, 2), 2, 16, "float32")], {SMALL}
        return suite.run("flash_attention", peers(), examples=calls, names=names, **options)
    return suite.run("flash_attention", peers(), MINIMA, examples=[*examples()], reference="xla", bars=bars, **options)


def bars(measurements: Iterable[suite.Measurement]) -> Iterator[suite.Bar]:
    """Time follows the keys that are there; and the best peer of each plain call over ours, in geometric mean over
    those with at least 65,536 cached tokens.
    """
    measured = {one.example.name: one for one in measurements}
    for queries in (1, 4):
        full, tenth = (measured.get(example(CACHES[0], queries, **options).name) for options in ({}, VARIED[0]))
        if full and tenth:
            title = f"{queries} queries, filled to a tenth, of the time of a full cache"
            yield suite.Bar(title, tenth.seconds[suite.OURS] / full.seconds[suite.OURS], TENTH, "")
    large = (example(cache, n).name for cache in CACHES if cache[0] * cache[1] >= 65536 for n in QUERIES)
    over_best = (measured[name].over_best(("cuDNN", FA3, FA4)) for name in large if name in measured)
    if ratios := [1 / ratio for ratio in over_best if ratio]:
        yield suite.Bar("the best peer over ours, geometric mean", geometric_mean(ratios), 1.0, "times", True)


def peers() -> dict[str, suite.Peer | None]:
    found = flash_attention_peers()
    has_gpu = jax.default_backend() == "gpu"
    return {
        "cuDNN": by_cudnn if has_gpu else None,
        FA3: by_fa3 if found[FA3] else None,
        FA4: by_fa4_against_keys if found[FA4] else None,
    }


def is_like(call: Mapping[str, Any], *others: str) -> bool:
    names = {name for name, value in call.items() if value is not None}
    return names <= {"query", "key", "value", "causal", *others} and call["query"].dtype.itemsize == 2


def by_cudnn(call: Mapping[str, Any]) -> Any:
    """One query, through ``jax.nn``: its causal mask is aligned at the first key."""
    if not is_like(call, "kv_lengths") or call["query"].shape[1] != 1:
        return None
    return lambda query, key, value, kv_lengths=None: jax.nn.dot_product_attention(
        query, key, value, key_value_seq_lengths=kv_lengths, implementation="cudnn"
    )


def by_fa3(call: Mapping[str, Any]) -> suite.TorchFunction | None:
    """With a window, a cap or sinks by the whole FA3, where it is installed."""
    if is_like(call, "kv_lengths") and suite.is_installed("fa3_fwd_interface"):
        return suite.TorchFunction(plain_fa3, has_gradients=False)
    if not is_like(call, "kv_lengths", "sliding_window", "logits_soft_cap", "softmax_aux") or whole_library() is None:
        return None
    left, _ = call.get("sliding_window") or (-1, -1)

    def attention(query: Any, key: Any, value: Any, kv_lengths: Any = None, softmax_aux: Any = None) -> Any:
        options = {"causal": True, "window_left": left, "window_right": 0, "seqused_k": kv_lengths}
        options |= {"softcap": call.get("logits_soft_cap") or 0.0, "s_aux": softmax_aux}
        return whole_forward(q=query, k=key, v=value, softmax_scale=query.shape[-1] ** -0.5, num_splits=0, **options)[0]

    return suite.TorchFunction(attention, has_gradients=False)


def plain_fa3(query: Any, key: Any, value: Any, kv_lengths: Any = None) -> Any:
    function = import_module("fa3_fwd_interface").flash_attn_with_kvcache
    results = function(query, key, value, cache_seqlens=kv_lengths, causal=True, num_splits=0)
    return results[0] if isinstance(results, tuple) else results


def by_fa4_against_keys(call: Mapping[str, Any]) -> suite.TorchFunction | None:
    """Its check of equal lengths is for calls whose alignment differs elsewhere; FA4's is ours."""
    if not is_like(call, "sliding_window"):
        return None
    same = jax.ShapeDtypeStruct((call["query"].shape[0], call["query"].shape[1], 1, 1), call["query"].dtype)
    function = by_fa4({**call, "key": same})
    return None if function is None else attrs.evolve(function, has_gradients=False)
