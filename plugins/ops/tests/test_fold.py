"""``jax.vmap`` of attention: one larger call if its results are those of a loop, and a loop otherwise."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_core import Registry, hookimpl
from ejkernel_ops.flash_attention import reference
from ejkernel_ops.flash_attention.operation import DIFFERENTIABLE

SIZE, BATCH, TQ, TK = 3, 2, 5, 7


class Recorder:
    """The reference, with a record of the query shapes of its calls."""

    PLATFORMS = {"cpu": 50, "gpu": 50}

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.shapes = kernel, []

    @hookimpl
    def heuristic_cfg(self, inv: Any) -> Any:
        self.shapes.append(inv["query"].shape)
        return None

    @hookimpl
    def run_backend(self, inv: Any, cfg: Any) -> Any:
        return self.kernel.run_backend(inv, cfg)


def registry_with_recorders() -> tuple[Any, Recorder, Recorder]:
    registry = Registry(plugins="ejkernel-ops")
    kernels = Recorder(reference.forward), Recorder(reference.backward)
    registry.register(kernels[0], "flash_attention.recorder")
    registry.register(kernels[1], "flash_attention_bwd.recorder")
    return registry, *kernels


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def arguments() -> dict[str, jax.Array]:
    ids = jax.random.randint(jax.random.key(9), (SIZE, BATCH, TK), 0, 3)
    return {
        "query": normal(0, SIZE, BATCH, TQ, 4, 8),
        "key": normal(1, SIZE, BATCH, TK, 2, 8),
        "value": normal(2, SIZE, BATCH, TK, 2, 6),
        "bias": normal(3, SIZE, 1, 4, TQ, TK),
        "attention_mask": jax.random.bernoulli(jax.random.key(4), 0.7, (SIZE, BATCH, 1, 1, TK)),
        "q_segment_ids": ids[..., -TQ:],
        "kv_segment_ids": ids,
        "softmax_aux": normal(5, SIZE, 4),
    }


FOLDED = (SIZE * BATCH, TQ, 4, 8)
LOOPED = (BATCH, TQ, 4, 8)
# (mapped arguments, unmapped ones, options, shape that forward and backward see)
CASES = {
    "all": (("query", "key", "value"), (), {}, FOLDED, FOLDED),
    "query alone": (("query",), ("key", "value"), {}, FOLDED, FOLDED),
    "key and value": (("key", "value"), ("query",), {}, FOLDED, FOLDED),
    "mapped bias": (("query", "key", "value", "bias"), (), {}, FOLDED, LOOPED),
    "shared bias": (("query", "key", "value"), ("bias",), {}, FOLDED, LOOPED),
    "bias alone": (("bias",), ("query", "key", "value"), {}, FOLDED, LOOPED),
    "mapped mask": (("query", "attention_mask"), ("key", "value"), {}, FOLDED, FOLDED),
    "shared mask": (("query", "key"), ("value", "attention_mask"), {}, FOLDED, FOLDED),
    "mapped segments": (("query", "key", "value", "q_segment_ids", "kv_segment_ids"), (), {}, FOLDED, FOLDED),
    "shared segments": (("query", "key", "value"), ("q_segment_ids", "kv_segment_ids"), {}, FOLDED, FOLDED),
    "shared sinks": (("query", "key", "value"), ("softmax_aux",), {}, FOLDED, LOOPED),
    "mapped sinks": (("query", "softmax_aux"), ("key", "value"), {}, LOOPED, LOOPED),
    "dropout": (("query", "key"), ("value",), {"dropout_prob": 0.4, "dropout_seed": 11}, LOOPED, LOOPED),
}


def run(registry: Registry, names: tuple[str, ...], arrays: Any, backend: str | None, options: Any) -> Any:
    return registry.call(
        "flash_attention",
        **dict(zip(names, arrays, strict=True)),
        causal=True,
        return_lse=True,
        backend=backend,
        **options,
    )


def gradient(registry: Registry, names: tuple[str, ...], backend: str | None, options: Any) -> Any:
    argnums = tuple(i for i, name in enumerate(names) if name in DIFFERENTIABLE)

    def loss(*arrays: Any) -> Any:
        out, lse = run(registry, names, arrays, backend, options)
        return (out**2).sum() + jnp.where(lse > -jnp.inf, lse, 0).sum()

    return jax.grad(loss, argnums=argnums)


def close(results: Any, expected: Any) -> None:
    jax.tree.map(lambda r, e: np.testing.assert_allclose(r, e, rtol=2e-5, atol=2e-5), results, expected)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("position", [0, pytest.param(1, marks=pytest.mark.long)])
def test_vmap_against_a_loop(name: str, position: int) -> None:
    mapped, shared, options, forward_shape, backward_shape = CASES[name]
    registry, forward, backward = registry_with_recorders()
    names = mapped + shared
    rows = [arguments()[n] for n in mapped]
    unmapped = [arguments()[n][1] for n in shared]
    axes = (position,) * len(mapped) + (None,) * len(shared)
    arrays = [jnp.moveaxis(row, 0, position) for row in rows] + unmapped

    def loop(f: Any) -> Any:
        jitted = jax.jit(f)
        parts = [jitted(*(row[i] for row in rows), *unmapped) for i in range(SIZE)]
        return jax.tree.map(lambda *p: jnp.stack(p), *parts)

    results = jax.vmap(lambda *a: run(registry, names, a, None, options), axes)(*arrays)
    close(results, loop(lambda *a: run(registry, names, a, "reference", options)))
    assert forward.shapes == [forward_shape]

    results = jax.jit(jax.vmap(gradient(registry, names, None, options), axes))(*arrays)
    close(results, loop(gradient(registry, names, "reference", options)))
    assert backward.shapes == [backward_shape]


@pytest.mark.long
@pytest.mark.parametrize("mapped_bounds", [pytest.param(True, marks=pytest.mark.long), False])
def test_packed_rows_become_one_long_row(mapped_bounds: bool) -> None:
    registry, forward, backward = registry_with_recorders()
    arrays = [normal(0, SIZE, 9, 4, 8), normal(1, SIZE, 9, 2, 8), normal(2, SIZE, 9, 2, 6)]
    # With padding at the end of some rows, on one side or both, and sequences without queries or keys.
    q_bounds = jnp.asarray([[0, 3, 3, 7], [0, 1, 5, 9], [0, 0, 0, 4]])
    k_bounds = jnp.asarray([[0, 2, 4, 9], [0, 1, 5, 6], [0, 0, 5, 6]])
    bounds = (q_bounds, k_bounds) if mapped_bounds else (q_bounds[0], k_bounds[0])
    axes = (0, 0, 0, *((0, 0) if mapped_bounds else (None, None)))
    names = ("query", "key", "value", "cum_seqlens_q", "cum_seqlens_k")
    results = jax.vmap(lambda *a: run(registry, names, a, None, {}), axes)(*arrays, *bounds)

    def rows(i: int) -> list[jax.Array]:
        return [array[i] for array in arrays] + [b[i] if mapped_bounds else b for b in bounds]

    def loop(f: Any) -> Any:
        jitted = jax.jit(f)
        return jax.tree.map(lambda *p: jnp.stack(p), *(jitted(*rows(i)) for i in range(SIZE)))

    close(results, loop(lambda *a: run(registry, names, a, "reference", {})))
    assert forward.shapes == [(1, SIZE * 9, 4, 8)]
    results = jax.vmap(gradient(registry, names, None, {}), axes)(*arrays, *bounds)
    close(results, loop(gradient(registry, names, "reference", {})))
    assert backward.shapes == [(1, SIZE * 9, 4, 8)]


def test_vmap_of_vmap() -> None:
    registry, forward, _ = registry_with_recorders()
    query = normal(0, 2, SIZE, BATCH, TQ, 4, 8)
    key, value = arguments()["key"], arguments()["value"]
    names = ("query", "key", "value")
    inner = jax.vmap(lambda *a: run(registry, names, a, None, {}))
    results = jax.vmap(inner, (0, None, None))(query, key, value)
    for i in range(2):
        for j in range(SIZE):
            expected = run(registry, names, (query[i, j], key[j], value[j]), "reference", {})
            close(jax.tree.map(lambda x: x[i, j], results), expected)  # noqa: B023
    assert forward.shapes == [(2 * SIZE * BATCH, TQ, 4, 8)]
