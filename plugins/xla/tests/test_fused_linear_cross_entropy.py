"""The loss in plain JAX: random calls in chunks of a few rows, and rows and vocabularies on eight devices.

``EJKERNEL_RANDOM_CALLS=600 pytest plugins/xla/tests/test_fused_linear_cross_entropy.py`` runs 600 calls.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_core
import ejkernel_xla.fused_linear_cross_entropy
from ejkernel_ops import fused_linear_cross_entropy
from ejkernel_ops.fused_linear_cross_entropy import chunks, random_calls
from ejkernel_xla.fused_linear_cross_entropy import total

COUNT = int(os.environ.get("EJKERNEL_RANDOM_CALLS", "16"))
DTYPES = ("float32", "bfloat16", "float16", "float64")
ROWS, DIM, VOCAB = (8, 32), 16, 96
RNG = np.random.default_rng(8)
HIDDEN = jnp.asarray(RNG.standard_normal((*ROWS, DIM)), jnp.bfloat16)
WEIGHT = jnp.asarray(RNG.standard_normal((DIM, VOCAB)) / 4, jnp.bfloat16)
LABELS = jnp.asarray(np.where(RNG.random(ROWS) < 0.2, -100, RNG.integers(0, VOCAB, ROWS)))


def in_chunks_of(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Let heuristics take chunks of this many rows, a power of two."""
    monkeypatch.setattr(chunks, "MEMORY", {"cpu": 1})
    monkeypatch.setattr(chunks, "FEWEST", rows)
    jax.clear_caches()


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Chunks of 16 rows, of which there are several even on one of eight devices."""
    in_chunks_of(monkeypatch, 16)
    yield
    monkeypatch.undo()
    jax.clear_caches()


# -- random calls ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("seed", range(COUNT))
def test_random_calls(seed: int) -> None:
    random_calls.check(seed, dtype=DTYPES[seed % 4], backend="xla")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(60))
def test_many_random_calls(seed: int) -> None:
    random_calls.check(1000 + seed, dtype=DTYPES[seed % 4], backend="xla")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
def test_random_calls_of_large_vocabularies(seed: int) -> None:
    vocabularies = (32_001, 128_256, 199_999, 200_000)
    random_calls.check(5000 + seed, dtype=DTYPES[seed % 3], vocabularies=vocabularies, backend="xla")


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize(("rows", "most"), [(1, 1), (7, 2), (64, 16), (65, 16), (97, 16), (100, 4)])
def test_any_number_of_rows_in_chunks_of_any_size(
    rows: int, most: int, reduction: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients of all chunks add up, and rows that fill the last chunk have no part."""
    hidden, labels = HIDDEN.reshape(-1, DIM)[:rows].astype(jnp.float32), LABELS.reshape(-1)[:rows]

    def loss(hidden: Any, weight: Any) -> Any:
        options = {"reduction": reduction, "bias": jnp.ones(VOCAB), "return_lse": True}
        losses, lse = fused_linear_cross_entropy(hidden, weight, labels, **options)
        return losses.sum(), lse

    run = jax.value_and_grad(loss, (0, 1), has_aux=True)
    in_chunks_of(monkeypatch, 1024)
    whole = run(hidden, WEIGHT.astype(jnp.float32))
    in_chunks_of(monkeypatch, most)
    assert ("while" in jax.jit(run).lower(hidden, WEIGHT.astype(jnp.float32)).as_text()) == (rows > most)
    for a, e in zip(jax.tree.leaves(run(hidden, WEIGHT.astype(jnp.float32))), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("reduction", "forward"), [("sum", total), ("none", ejkernel_xla.fused_linear_cross_entropy)])
def test_the_heuristic_keeps_to_the_memory(reduction: str, forward: Any) -> None:
    """A gigabyte of logits elsewhere than on CPUs, and never fewer than 64 rows."""
    op = "fused_linear_cross_entropy" + ("_sum" if reduction == "sum" else "")
    for vocab, rows in ((128_256, 1024), (512_000, 256), (3_000_000, 64), (50, 32768)):
        arrays = {
            "hidden": jax.ShapeDtypeStruct((32768, 64), "bfloat16"),
            "weight": jax.ShapeDtypeStruct((64, vocab), "bfloat16"),
            "labels": jax.ShapeDtypeStruct((32768,), "int32"),
        }
        inv = attrs.evolve(ejkernel_core.invocation(op, **arrays), platform="gpu", device_kind=None)
        assert forward.heuristic_cfg(inv=inv) == forward.Config(rows)
        space = [cfg.rows for cfg in forward.config_space(inv=inv)]
        assert space == [*dict.fromkeys((rows, rows // 2, min(2 * rows, 32768), min(4 * rows, 32768)))]
        assert rows * vocab * chunks.BYTES <= max(chunks.MEMORY_ELSEWHERE, 64 * vocab * chunks.BYTES)


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_logits_are_never_whole_in_memory(reduction: str) -> None:
    """Neither with gradients nor without: temporary memory is a small part of what the logits would take."""
    rows, dim, vocab = 2048, 8, 4096
    arrays = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((rows, dim), "float32"), ((dim, vocab), "float32"), ((rows,), "int32"))
    ]
    loss = partial(mean, reduction)
    for function in (loss, jax.value_and_grad(loss, (0, 1))):
        memory = jax.jit(function).lower(*arrays).compile().memory_analysis()
        assert memory.temp_size_in_bytes < 0.1 * 4 * rows * vocab


# -- eight devices -----------------------------------------------------------------------------------------------------


def mesh_of(kind: AxisType) -> Any:
    return jax.make_mesh((8,), ("x",), axis_types=(kind,))


def collectives(text: str) -> dict[str, int]:
    names = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-permute")
    counts = {name: len(re.findall(rf" {name}(?:-start)?\(", text)) for name in names}
    return {name: count for name, count in counts.items() if count}


def mean(reduction: str, hidden: Any, weight: Any, labels: Any) -> Any:
    """The mean, by the operation of the sum or by that of the rows."""
    if reduction == "mean":
        return fused_linear_cross_entropy(hidden, weight, labels)
    losses = fused_linear_cross_entropy(hidden, weight, labels, reduction="none")
    return losses.sum() / (labels != -100).sum()


def check_gradients(actual: Any, reduction: str) -> None:
    """Compare with float64."""
    hidden, weight = np.asarray(HIDDEN, np.float64).reshape(-1, DIM), np.asarray(WEIGHT, np.float64)
    call = {"hidden": hidden, "weight": weight, "labels": np.asarray(LABELS).reshape(-1)}
    call |= {"ignore_index": -100, "reduction": "mean"}
    values, right, _ = random_calls.expected(random_calls.RandomCall(call, 1.0, None))
    loss, (d_hidden, d_weight) = actual
    np.testing.assert_allclose(loss, values["loss"], rtol=1e-5)
    for gradient, expected in ((np.asarray(d_hidden).reshape(-1, DIM), right["hidden"]), (d_weight, right["weight"])):
        error = np.abs(np.asarray(gradient, np.float64) - expected).max()
        assert error <= 2**-8 * np.abs(expected).max(), reduction


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("axis", [0, 1])
def test_rows_on_explicit_axes_stay_sharded(reduction: str, axis: int) -> None:
    """One all-reduce of the count, which the factor needs first, and one of the loss with the gradient in float32."""
    mesh, run = mesh_of(AxisType.Explicit), jax.jit(jax.value_and_grad(partial(mean, reduction), (0, 1)))
    spec = P(*(None,) * axis, "x")
    with jax.set_mesh(mesh):
        hidden, labels = (jax.device_put(array, NamedSharding(mesh, spec)) for array in (HIDDEN, LABELS))
        weight = jax.device_put(WEIGHT, NamedSharding(mesh, P()))
        text = run.lower(hidden, weight, labels).compile().as_text()
        check_gradients(run(hidden, weight, labels), reduction)
    assert collectives(text) == {"all-reduce": 2}
    assert re.search(rf"f32\[{DIM},{VOCAB}\].* all-reduce\(", text)
    assert not re.search(rf"bf16\[{DIM},{VOCAB}\].* all-reduce\(", text)


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("arrays", [("hidden", "labels"), ("weight",)])
def test_automatic_axes_gather_nothing(reduction: str, arrays: tuple[str, ...]) -> None:
    """Rows, or the vocabulary: the compiler adds up what it has to."""
    mesh = mesh_of(AxisType.Auto)
    specs = {"hidden": P("x"), "labels": P("x"), "weight": P(None, "x")}
    shardings = {n: NamedSharding(mesh, s if n in arrays else P()) for n, s in specs.items()}
    gradients = shardings["hidden"], shardings["weight"]
    run = jax.jit(jax.value_and_grad(partial(mean, reduction), (0, 1)), out_shardings=(None, gradients))
    call = {"hidden": HIDDEN, "weight": WEIGHT, "labels": LABELS}
    placed = [jax.device_put(call[name], shardings[name]) for name in ("hidden", "weight", "labels")]
    text = run.lower(*placed).compile().as_text()
    assert {*collectives(text)} == {"all-reduce"}
    check_gradients(run(*placed), reduction)


@pytest.mark.usefixtures("few_rows")
def test_rows_inside_shard_map() -> None:
    """A sum of every shard, over the count of all."""

    def loss(hidden: Any, weight: Any, labels: Any) -> Any:
        count = jax.lax.psum((labels != -100).sum(), "x")
        own = fused_linear_cross_entropy(
            hidden, weight, labels, token_weights=jnp.full(labels.shape, 1 / count), reduction="sum"
        )
        return jax.lax.psum(own, "x")

    mesh = mesh_of(AxisType.Auto)
    run = jax.shard_map(loss, mesh=mesh, in_specs=(P("x"), P(), P("x")), out_specs=P())
    check_gradients(jax.jit(jax.value_and_grad(run, (0, 1)))(HIDDEN, WEIGHT, LABELS), "sum")


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_shards_of_the_vocabulary(smoothing: float) -> None:
    """As the page of the operation has it: the lse of all shards, and what the labels take off it."""

    def losses(hidden: Any, weight: Any, labels: Any, z_loss: float, smoothing: float, shards: int) -> Any:
        start = jax.lax.axis_index("x") * weight.shape[1]
        share = 1 - smoothing + smoothing / shards
        own, own_lse = fused_linear_cross_entropy(
            hidden,
            weight,
            labels,
            vocab_start=start,
            label_smoothing=smoothing / shards / share,
            reduction="none",
            return_lse=True,
        )
        top = jax.lax.pmax(jax.lax.stop_gradient(own_lse), "x")
        lse = top + jnp.log(jax.lax.psum(jnp.exp(own_lse - top), "x"))
        loss = lse + share * jax.lax.psum(own - own_lse, "x") + z_loss * lse**2
        return jnp.where(labels == -100, 0, loss)

    mesh = mesh_of(AxisType.Auto)
    on_shards = jax.shard_map(
        partial(losses, z_loss=1e-2, smoothing=smoothing, shards=8),
        mesh=mesh,
        in_specs=(P(), P(None, "x"), P()),
        out_specs=P(),
    )
    weights = jnp.asarray(RNG.random(ROWS), jnp.float32)
    hidden, weight = HIDDEN.astype(jnp.float32), WEIGHT.astype(jnp.float32)
    options = {"reduction": "none", "z_loss": 1e-2, "label_smoothing": smoothing}
    whole = lambda h, w: (weights * fused_linear_cross_entropy(h, w, LABELS, **options)).sum()
    run = jax.jit(jax.value_and_grad(lambda h, w: (weights * on_shards(h, w, LABELS)).sum(), (0, 1)))
    text = run.lower(hidden, weight).compile().as_text()
    assert {*collectives(text)} == {"all-reduce"}
    assert not re.search(rf"f32\[{DIM},{VOCAB}\]", text.split("ENTRY")[0])  # no device has the whole weight
    actual, expected = run(hidden, weight), jax.value_and_grad(whole, (0, 1))(hidden, weight)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)
