"""Layers that write tokens into the pages of a cache and attend to them: values, copies, shards, and export."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_core
from ejkernel_core import Registry
from ejkernel_ops import paged_attention_metadata
from ejkernel_ops.ragged_paged_attention import reference
from ejkernel_ops.ragged_paged_attention.random_calls import expected

RNG = np.random.default_rng(23)
LAYERS, PAGES, PAGE_SIZE, HEADS, KV_HEADS, DIM = 3, 9, 4, 16, 8, 6
TABLES = np.array([[4, 0, 7, -1], [2, 8, -1, -1], [1, 3, 5, 6]], np.int32)
#: Of each step the lengths with its tokens, and where the tokens of sequences begin: two prompts, then decoding.
STEPS = ((np.array([6, 3, 0]), np.array([0, 6, 9, 9])), (np.array([7, 4, 0]), np.array([0, 1, 2, 2])))
TOKENS = 11
BACKENDS = ("reference", "xla")
ATTENTION = "ragged_paged_attention"


def projections() -> np.ndarray:
    """(layers; query, key, value of the width of all heads; tokens, width)."""
    return RNG.normal(size=(LAYERS, TOKENS, (HEADS + 2 * KV_HEADS) * DIM)).astype(np.float32)


def slots_of(lengths: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Of each token; -1 for those of no sequence."""
    slots = np.full(TOKENS, -1, np.int32)
    for sequence, length in enumerate(lengths):
        for token in range(starts[sequence], starts[sequence + 1]):
            position = length - (starts[sequence + 1] - token)
            slots[token] = TABLES[sequence, position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
    return slots


def divided(rows: Any) -> tuple[Any, Any, Any]:
    """Query, key and value."""
    query, key, value = np.split(rows, [HEADS * DIM, (HEADS + KV_HEADS) * DIM], axis=-1)
    return tuple(x.reshape(*x.shape[:-1], -1, DIM) for x in (query, key, value))


def step(
    pool: Any, query: Any, key: Any, value: Any, lengths: Any, starts: Any, slots: Any, call: Any, backend: str
) -> Any:
    """All layers of a step, whose pages are one array: the pool with the new tokens, and the outputs."""
    metadata = paged_attention_metadata(lengths, starts, num_tokens=TOKENS)

    def layer(pool: Any, inputs: Any) -> Any:
        number, query, key, value = inputs
        first_page = number * PAGES
        pool = ejkernel_core.call("update_kv_pages", key, value, pool, slots, first_page=first_page)
        options = {"metadata": metadata, "first_page": first_page, "backend": backend}
        return pool, call(ATTENTION, query, pool, lengths, TABLES, starts, **options)

    return jax.lax.scan(layer, pool, (jnp.arange(LAYERS), query, key, value))


def arrays_of(number: int) -> list[Any]:
    lengths, starts = STEPS[number]
    return [*divided(projections()), lengths.astype(np.int32), starts.astype(np.int32), slots_of(lengths, starts)]


def check(pool: Any, out: Any, arrays: list[Any]) -> None:
    query, _, _, lengths, starts, _ = arrays
    for number in range(LAYERS):
        call = {"kv_pages": pool, "kv_lens": lengths, "block_tables": TABLES, "query_start_loc": starts}
        right, _ = expected({**call, "query": query[number], "first_page": number * PAGES})
        np.testing.assert_allclose(out[number], right, atol=2e-5)


def empty_pool() -> np.ndarray:
    return np.full((LAYERS * PAGES, PAGE_SIZE, 2 * KV_HEADS, DIM), np.nan, np.float32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_share_a_pool_that_is_not_copied(backend: str) -> None:
    """A prompt, then decoding. The program has no room for another pool, and returns its memory."""
    pool = jnp.array(empty_pool())
    function = lambda *arrays: step(*arrays, ejkernel_core.call, backend)
    for number in range(2):
        arrays = arrays_of(number)
        compiled = jax.jit(function, donate_argnums=0).lower(pool, *arrays).compile()
        shape = ",".join(map(str, pool.shape))
        assert not re.findall(rf"= f32\[{shape}\]\S* copy\(", compiled.as_text())
        assert compiled.memory_analysis().alias_size_in_bytes == pool.nbytes
        place, previous = pool.unsafe_buffer_pointer(), np.array(pool)
        pool, out = compiled(pool, *arrays)
        assert pool.unsafe_buffer_pointer() == place
        _, key, value, _, _, slots = arrays
        for token, slot in enumerate(slots):
            if slot >= 0:
                for layer in range(LAYERS):
                    page, row = layer * PAGES + slot // PAGE_SIZE, slot % PAGE_SIZE
                    previous[page, row, ::2], previous[page, row, 1::2] = key[layer, token], value[layer, token]
        np.testing.assert_array_equal(pool, previous)
        check(previous, out, arrays)


# -- devices -----------------------------------------------------------------------------------------------------------


def registry_with_an_opaque_kernel() -> Registry:
    """A kernel of a GPU is a custom call, which XLA cannot partition: it asks for the rule of the operation."""
    registry = Registry()
    opaque = SimpleNamespace(run_backend=reference.forward.run_backend, PLATFORMS={"cpu": 90}, OPAQUE=("cpu",))
    registry.register(opaque, f"{ATTENTION}.opaque")
    return registry


@pytest.mark.parametrize("backend", [*BACKENDS, "opaque"])
@pytest.mark.parametrize("kind", ["automatic", "explicit", "shard_map"])
def test_heads_over_eight_devices(kind: str, backend: str) -> None:
    """Nothing is gathered: each device has one key head, the queries of it, and its own part of the cache."""
    axis_type = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((8,), ("heads",), axis_types=(axis_type,), devices=jax.devices()[:8])
    arrays = arrays_of(0)
    of_heads, of_pages = P(None, None, "heads"), P(None, None, "heads")
    specs = [of_pages, of_heads, of_heads, of_heads, P(), P(), P()]
    call = registry_with_an_opaque_kernel().call if backend == "opaque" else ejkernel_core.call
    function: Any = lambda *arrays: step(*arrays, call, backend)
    if kind == "shard_map":
        function = jax.shard_map(function, mesh=mesh, in_specs=tuple(specs), out_specs=(of_pages, of_heads))
    given = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip([empty_pool(), *arrays], specs, strict=True)
    ]
    with jax.set_mesh(mesh):
        shardings = tuple(NamedSharding(mesh, spec) for spec in (of_pages, of_heads))
        compiled = jax.jit(function, donate_argnums=0, out_shardings=shardings).lower(*given).compile()
        pool, out = compiled(*given)
    assert not re.findall(r"all-gather|all-to-all|all-reduce|collective-permute", compiled.as_text())
    assert compiled.memory_analysis().alias_size_in_bytes == empty_pool().nbytes // 8
    check(np.asarray(pool), np.asarray(out), arrays)


def test_replicas_have_caches_of_their_own() -> None:
    """Inside ``shard_map``, tables count the pages of the device."""
    mesh = jax.make_mesh((2,), ("replicas",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    arrays = [arrays_of(0), arrays_of(1)]
    own = [jnp.concatenate([x[None] for x in pair]) for pair in zip(*arrays, strict=True)]
    pools = jnp.array(RNG.normal(size=(2, *empty_pool().shape)), jnp.float32)

    def replica(pool: Any, *arrays: Any) -> Any:
        pool, out = step(pool[0], *(x[0] for x in arrays), ejkernel_core.call, "xla")
        return pool[None], out[None]

    spec = P("replicas")
    pools, out = jax.jit(jax.shard_map(replica, mesh=mesh, in_specs=spec, out_specs=spec))(pools, *own)
    for number in range(2):
        check(np.asarray(pools[number]), np.asarray(out[number]), arrays[number])


# -- programs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_is_exported(backend: str) -> None:
    function = jax.jit(lambda *arrays: step(*arrays, ejkernel_core.call, backend))
    arrays = arrays_of(0)
    exported = export.deserialize(export.export(function)(empty_pool(), *arrays).serialize())
    pool, out = exported.call(empty_pool(), *arrays)
    check(np.asarray(pool), np.asarray(out), arrays)


@pytest.mark.parametrize("backend", BACKENDS)
def test_mapped(backend: str) -> None:
    """Over queries and lengths, of one cache."""
    query, _, _, lengths, starts, _ = arrays_of(0)
    pages = RNG.normal(size=(PAGES, PAGE_SIZE, 2 * KV_HEADS, DIM)).astype(np.float32)
    lengths = np.stack([lengths, lengths + 3, lengths + 1])
    call = lambda query, lengths: ejkernel_core.call(ATTENTION, query, pages, lengths, TABLES, starts, backend=backend)
    out = jax.vmap(call)(query, lengths)
    given = {"kv_pages": pages, "block_tables": TABLES, "query_start_loc": starts}
    for number in range(3):
        right, _ = expected({**given, "query": query[number], "kv_lens": lengths[number]})
        np.testing.assert_allclose(out[number], right, atol=2e-5)
