"""Losses and log-probabilities on Hopper, in the interpreter: random calls, every configuration, the borders of tiles,
what is ignored or infinite, and what is refused.

``EJKERNEL_RANDOM_CALLS=60 pytest plugins/triton/tests/test_loss_gluon.py`` runs 60 random calls of each.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_core
from ejkernel_core import Unsupported
from ejkernel_ops.fused_linear_cross_entropy import random_calls
from ejkernel_ops.fused_linear_cross_entropy.random_calls import RandomCall
from ejkernel_ops.linear_log_probs import random_calls as random_log_probs
from ejkernel_triton import fused_linear_cross_entropy_sm90 as by_row
from ejkernel_triton import linear_log_probs_sm90 as log_probs
from ejkernel_triton.fused_linear_cross_entropy_sm90 import Config, _launch, _tiling, backward, total
from ejkernel_triton.gluon import requirements
from ejkernel_triton.interpreter import interpreted, interpreted_registry
from ejkernel_triton.launch import _jax_triton

if _jax_triton.unavailable_reason():
    pytest.skip(_jax_triton.unavailable_reason(), allow_module_level=True)

COUNT = int(os.environ.get("EJKERNEL_RANDOM_CALLS", "8"))
DTYPES = ("bfloat16", "float16")
OP = "fused_linear_cross_entropy"
KERNELS: dict[str, Any] = {
    OP: by_row,
    f"{OP}_bwd": backward,
    f"{OP}_sum": total,
    "linear_log_probs": log_probs,
}
#: Rows of as many bytes as the copy engine reads.
DIMS, VOCABULARIES = (8, 16, 40, 136), (8, 128, 256, 264, 1000)
EVERYTHING = {"logits_soft_cap": 5.0, "z_loss": 1e-2, "label_smoothing": 0.1}
IGNORED = -100
SMALL = Config(128, 4, 1)


@pytest.fixture(scope="module", name="registry")
def _registry() -> Iterator[Any]:
    """Few programs compute all tiles of a call. The interpreter needs no version of jax-triton that takes Gluon."""
    with pytest.MonkeyPatch.context() as patch, interpreted():
        patch.setattr(requirements, "_unavailable_reason", lambda: None)
        patch.setattr(_launch, "multiprocessors", lambda inv: 3)
        yield interpreted_registry({f"{op}.gluon_sm90": module for op, module in KERNELS.items()})


# -- random calls ------------------------------------------------------------------------------------------------------


def has_rows(seed: int) -> bool:
    """Whether a random call has any."""
    return random_calls.random_call(seed, "bfloat16", VOCABULARIES, DIMS).arguments["labels"].size > 0


@pytest.mark.parametrize("seed", [seed for seed in range(COUNT) if has_rows(seed)])
def test_random_calls(registry: Any, seed: int) -> None:
    """With all gradients: those of other kernels in float16, and of logits with a cap."""
    sizes = {"dims": DIMS, "vocabularies": VOCABULARIES}
    cfg = (None, SMALL)[seed // 2 % 2]
    options = {"registry": registry, "backend": "gluon_sm90", "cfg": cfg}
    random_calls.check(seed, dtype=DTYPES[seed % 2], **sizes, **options)


@pytest.mark.parametrize("seed", range(COUNT))
def test_random_log_probs(registry: Any, seed: int) -> None:
    """With the gradients of other kernels."""
    sizes = {"dims": DIMS, "vocabularies": VOCABULARIES}
    options = {"registry": registry, "backend": "gluon_sm90"}
    random_log_probs.check(seed, DTYPES[seed % 2], **sizes, shapes=((1,), (2, 3), (37,), (130,)), **options)


# -- tiles -------------------------------------------------------------------------------------------------------------


def call_of(rows: int, vocab: int, dim: int = 40, dtype: str = "bfloat16", **options: Any) -> RandomCall:
    """Logits of a few units; some labels are ignored, the others those at the borders of tiles and of halves."""
    rng = np.random.default_rng([rows, vocab])
    shape = (vocab, dim) if options.get("transpose_weight") else (dim, vocab)
    arrays = {
        "hidden": rng.standard_normal((rows, dim)),
        "weight": rng.standard_normal(shape) / 3,
        "bias": rng.standard_normal(vocab),
    }
    borders = [word for border in range(0, vocab + 65, 64) for word in (border - 1, border) if 0 <= word < vocab]
    labels = np.resize([*borders, vocab - 1, IGNORED], rows).astype(np.int32)
    call = {name: np.asarray(array, jnp.dtype(dtype)) for name, array in arrays.items()}
    call |= {"labels": labels, "ignore_index": IGNORED, "reduction": "none", "return_lse": True, **options}
    return RandomCall(call, np.zeros(rows, np.float32), np.zeros(rows, np.float32))


def close(registry: Any, call: RandomCall, cfg: Config | None = None) -> None:
    """Compare the values with float64."""
    values = random_calls.results(call, registry=registry, backend="gluon_sm90", cfg=cfg)
    right, _, _ = random_calls.expected(call)
    assert values.keys() == right.keys()
    for name, array in right.items():
        random_calls.compare(name, values[name], array, random_calls.TOLERANCES["float32"], 1.0)


@pytest.mark.parametrize(
    "cfg", [Config(c, s, b) for c, s in ((256, 4), (256, 3), (128, 6), (128, 4)) for b in (1, 16)], ids=str
)
@pytest.mark.parametrize("transposed", [False, True])
def test_every_configuration(registry: Any, cfg: Config, transposed: bool) -> None:
    """Of three tiles of rows and several tiles of words, the last of which are not full."""
    close(registry, call_of(300, 520, 136, transpose_weight=transposed, **EVERYTHING), cfg)


@pytest.mark.parametrize("band", [2, 8, 32])
def test_bands_of_rows(registry: Any, band: int) -> None:
    """One of two tiles, and a last one of one tile; and bands that are higher than all rows."""
    close(registry, call_of(300, 264, 8), Config(128, 4, band))


@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (1, 2), (63, 127), (64, 128), (65, 129), (129, 257), (128, 385)])
def test_any_number_of_rows_and_words(registry: Any, rows: int, vocab: int) -> None:
    """With a weight (vocab, hidden_dim), whose rows are those that the copy engine reads."""
    for cfg in (None, SMALL):
        close(registry, call_of(rows, vocab, transpose_weight=True, **EVERYTHING), cfg)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "value"), [("plain", None), *EVERYTHING.items()], ids=["plain", *EVERYTHING])
def test_each_option_alone(registry: Any, name: str, value: float | None, dtype: str) -> None:
    close(registry, call_of(70, 264, dtype=dtype, **({} if value is None else {name: value})))


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_a_shard_of_the_vocabulary_and_weights_of_rows(registry: Any, reduction: str) -> None:
    call = call_of(70, 264, vocab_start=np.int32(128), reduction=reduction, return_lse=reduction == "none")
    call.arguments["labels"] = np.where(np.arange(70) % 3, call.arguments["labels"] + 64, IGNORED).astype(np.int32)
    call.arguments["token_weights"] = np.linspace(0, 2, 70, dtype=np.float32)
    close(registry, call)


def test_a_row_of_one_launch_has_the_same_bits_in_another_tile(registry: Any) -> None:
    """Partial results are added up in the order of the words, whatever program computes them."""
    call = call_of(130, 520).arguments
    options = {"backend": "gluon_sm90", "bias": call["bias"], "cfg": SMALL}
    run = lambda rows: registry.call(OP, call["hidden"][rows], call["weight"], call["labels"][rows], **options)
    np.testing.assert_array_equal(run(slice(3, 40)), run(slice(None))[3:40])


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.fixture(name="no_plain_jax")
def _no_plain_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients in plain JAX are an error."""
    monkeypatch.setattr(_launch.gradients, "with_gradients", None)


def matrix_gradients(registry: Any, call: RandomCall, cfg: Config | None = None) -> dict[str, np.ndarray]:
    """Those of the matrices: beside that of a bias, all are plain JAX's."""

    def run(arrays: dict[str, Any]) -> Any:
        options = {"registry": registry, "backend": "gluon_sm90", "cfg": cfg}
        return random_calls._call(**{**call.arguments, **arrays}, **options)

    cotangents: Any = call.d_loss if call.d_lse is None else (call.d_loss, call.d_lse)
    arrays = {name: jnp.asarray(call.arguments[name]) for name in ("hidden", "weight")}
    (gradients,) = jax.vjp(jax.jit(run), arrays)[1](jax.tree.map(jnp.asarray, cotangents))
    return {name: np.asarray(array, float) for name, array in gradients.items()}


def close_gradients(registry: Any, call: RandomCall, cfg: Config | None = None) -> dict[str, np.ndarray]:
    """Compare them with those of float64."""
    gradients = matrix_gradients(registry, call, cfg)
    _, right, _ = random_calls.expected(call)
    for name, array in gradients.items():
        size = np.linalg.norm(right[name])
        error = np.linalg.norm(array - right[name]) / (size or 1)
        assert error < 4e-3, (name, error)  # each number is rounded to bfloat16 three times: 1e-3 each
    return gradients


def differentiable(rows: int, vocab: int, dim: int = 40, **options: Any) -> RandomCall:
    """With random cotangents of the losses, or of their mean."""
    call = call_of(rows, vocab, dim, **options)
    rng = np.random.default_rng([rows, vocab, 1])
    d_loss, d_lse = rng.standard_normal((2, rows), np.float32)
    if call.arguments["reduction"] != "none":
        call.arguments["return_lse"] = False
        d_loss, d_lse = np.float32(1.3), None
    return RandomCall(call.arguments, d_loss, d_lse)


UNCAPPED = {"z_loss": 1e-2, "label_smoothing": 0.1}


@pytest.mark.usefixtures("no_plain_jax")
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("options", [{}, UNCAPPED], ids=["plain", "everything"])
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_several_chunks(
    registry: Any, monkeypatch: pytest.MonkeyPatch, reduction: str, options: Any, transposed: bool
) -> None:
    """The last chunk has rows that no tile is full of, and the last tile of words is not full."""
    monkeypatch.setattr(_launch, "rows_of_chunk", lambda inv: 128)
    call = differentiable(300, 520, 136, reduction=reduction, transpose_weight=transposed, **options)
    close_gradients(registry, call, SMALL)


@pytest.mark.usefixtures("no_plain_jax")
@pytest.mark.parametrize("vocab", [1, 127, 257, 300])
def test_gradients_of_any_number_of_words(registry: Any, vocab: int) -> None:
    """The rows of exponentials are longer than the vocabulary."""
    call = differentiable(70, vocab, transpose_weight=True, label_smoothing=0.1, z_loss=1e-2)
    call.arguments["labels"] = np.where(call.arguments["labels"] < vocab, call.arguments["labels"], IGNORED)
    close_gradients(registry, call)


@pytest.mark.usefixtures("no_plain_jax")
@pytest.mark.parametrize("cfg", [Config(256, 4, 16), Config(128, 4, 2)], ids=str)
def test_gradients_of_a_shard_of_the_vocabulary(registry: Any, cfg: Config) -> None:
    """Rows whose label is a word of another shard have no label here, and count."""
    call = differentiable(70, 264, vocab_start=np.int32(128))
    call.arguments["labels"] = np.where(np.arange(70) % 3, call.arguments["labels"] + 64, IGNORED).astype(np.int32)
    close_gradients(registry, call, cfg)


@pytest.mark.usefixtures("no_plain_jax")
def test_the_gradient_of_a_label_that_is_nearly_certain(registry: Any) -> None:
    """1 - p is 5e-3, and p in bfloat16 would be off by half of that."""
    call = differentiable(6, 16, 8, reduction="sum")
    weight, bias = np.zeros((8, 16)), np.full(16, -8.0)
    bias[3] = 0
    weight[0, :8] = 1
    call.arguments.update(
        hidden=np.eye(8)[[0, 0, 1, 1, 2, 3]].astype("bfloat16"),
        weight=weight.astype("bfloat16"),
        bias=bias.astype("bfloat16"),
        labels=np.array([3, 3, 3, 3, IGNORED, 3], np.int32),
    )
    gradients = close_gradients(registry, call)
    assert -1e-1 < gradients["weight"][1, 3] < -1e-3  # of two rows, times 1.3


@pytest.mark.usefixtures("no_plain_jax")
def test_gradients_of_ignored_rows_and_of_words_that_cannot_be(registry: Any) -> None:
    call = differentiable(70, 264, reduction="mean")
    is_ignored = call.arguments["labels"] == IGNORED
    bias = np.asarray(call.arguments["bias"], np.float32).copy()
    bias[[0, 5, *range(130, 256)]] = -np.inf
    labels = np.where(is_ignored, IGNORED, 7).astype(np.int32)
    clean = {**call.arguments, "bias": bias.astype("bfloat16"), "labels": labels}
    dirty = {**clean, "hidden": np.where(is_ignored[:, None], np.nan, clean["hidden"]).astype("bfloat16")}
    right = close_gradients(registry, RandomCall(clean, call.d_loss, call.d_lse))
    gradients = matrix_gradients(registry, RandomCall(dirty, call.d_loss, call.d_lse))
    for name, array in right.items():
        np.testing.assert_array_equal(gradients[name], array)
    assert (right["hidden"][is_ignored] == 0).all()
    assert (right["weight"][:, 130:256] == 0).all()


# -- what is ignored, or infinite --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
def test_rows_that_are_ignored_may_hold_anything(registry: Any, options: Any) -> None:
    call = call_of(70, 264, **options)
    is_ignored = call.arguments["labels"] == IGNORED
    assert is_ignored.any()
    call.arguments["hidden"] = np.where(is_ignored[:, None], np.nan, call.arguments["hidden"]).astype("bfloat16")
    values = random_calls.results(call, registry=registry, backend="gluon_sm90")
    right, _, _ = random_calls.expected(call)
    np.testing.assert_allclose(values["loss"], right["loss"], rtol=3e-5, atol=1e-4)
    np.testing.assert_array_equal(np.isnan(values["lse"]), is_ignored)
    summed = {**call.arguments, "reduction": "mean", "return_lse": False}
    total = random_calls.results(RandomCall(summed, None, None), registry=registry, backend="gluon_sm90")
    np.testing.assert_allclose(total["loss"], right["loss"].sum() / (~is_ignored).sum(), rtol=3e-5)


def test_all_rows_are_ignored(registry: Any) -> None:
    call = call_of(9, 64)
    call.arguments.update(labels=np.full(9, IGNORED, np.int32), reduction="mean", return_lse=False)
    assert random_calls.results(call, registry=registry, backend="gluon_sm90")["loss"] == 0


@pytest.mark.parametrize("cfg", [None, SMALL], ids=str)
def test_large_logits_and_words_that_cannot_be(registry: Any, cfg: Config | None) -> None:
    """Whole tiles, halves of tiles, and most words of others are impossible."""
    call = call_of(70, 520, dtype="bfloat16")
    call.arguments["bias"] = np.full(520, -np.inf, np.float32)
    call.arguments["bias"][[1, 300, 301, 519]] = 1e4, 1e4, 9990, -1e4
    call.arguments["labels"] = np.where(call.arguments["labels"] == IGNORED, IGNORED, 300).astype(np.int32)
    values = random_calls.results(call, registry=registry, backend="gluon_sm90", cfg=cfg)
    right, _, _ = random_calls.expected(call)
    np.testing.assert_allclose(values["loss"], right["loss"], rtol=1e-3, atol=5e-3)
    np.testing.assert_allclose(values["lse"], right["lse"], rtol=1e-6)


def test_an_entropy_of_words_that_cannot_be(registry: Any) -> None:
    bias = np.full(520, -np.inf, np.float32)
    bias[[5, 300, 301, 519]] = 0, 1, 2, -50
    options = {"bias": bias, "return_entropy": True, "temperature": 0.5, "backend": "gluon_sm90"}
    hidden, weight = jnp.zeros((3, 8), jnp.bfloat16), jnp.zeros((8, 520), jnp.bfloat16)
    own, entropy = registry.call("linear_log_probs", hidden, weight, np.array([5, 519, IGNORED]), **options)
    log_p = 2 * np.array([0, 1, 2, -50.0])
    log_p -= np.log(np.exp(log_p).sum())
    np.testing.assert_allclose(own, [log_p[0], log_p[3], 0], rtol=1e-5)
    np.testing.assert_allclose(entropy, [-(np.exp(log_p) * log_p).sum()] * 2 + [0], rtol=1e-5)


# -- which calls -------------------------------------------------------------------------------------------------------


def on_card(op: str = OP, rows: int = 64, dim: int = 4096, vocab: int = 128_256, **options: Any) -> Any:
    dtype = options.pop("dtype", "bfloat16")
    weight = (vocab, dim) if options.get("transpose_weight") else (dim, vocab)
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((rows, dim), weight)]
    inv = ejkernel_core.invocation(op, *arrays, jax.ShapeDtypeStruct((rows,), "int32"), **options)
    capability = options.get("capability", (9, 0))
    return attrs.evolve(inv, platform="gpu", device_kind="NVIDIA H200", compute_capability=capability)


@pytest.fixture(name="any_version")
def _any_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "_unavailable_reason", lambda: None)


@pytest.mark.usefixtures("any_version")
@pytest.mark.parametrize("op", [OP, f"{OP}_sum", "linear_log_probs"])
def test_what_is_refused(op: str) -> None:
    module = KERNELS[op]
    for sizes, words in (
        ({"dtype": "float32"}, "take float16 and bfloat16; hidden is float32"),
        ({"dim": 36}, "a hidden_dim that is a multiple of 8; not 36"),
        ({"vocab": 50_257}, r"a vocab that is a multiple of 8, unless the weight is \(vocab, hidden_dim\); not 50257"),
        ({"rows": 0}, "no arrays without rows"),
    ):
        for refuses in (module.heuristic_cfg, module.config_space, lambda inv: module.check_cfg(inv, Config())):
            with pytest.raises(Unsupported, match=words):
                refuses(on_card(op, **sizes))
    module.heuristic_cfg(on_card(op, vocab=50_257, transpose_weight=True))
    with pytest.raises(Unsupported, match="6 stages of 256 words do not fit"):
        module.check_cfg(on_card(op), Config(256, 6))
    with pytest.raises(Unsupported, match=r"for compute capability 9\.0 \(Hopper\); this GPU has 8\.0"):
        module.heuristic_cfg(attrs.evolve(on_card(op), compute_capability=(8, 0)))


@pytest.mark.usefixtures("any_version")
def test_bands_stay_in_the_l2() -> None:
    """Of 8 megabytes of hidden states."""
    expected = {2048: Config(256, 4, 16), 4096: Config(256, 4, 8), 7168: Config(256, 4, 4), 32768: Config(256, 4, 4)}
    assert {dim: by_row.heuristic_cfg(on_card(dim=dim)) for dim in expected} == expected
    assert by_row.heuristic_cfg(on_card(vocab=128)) == Config(128, 6, 8)
    offered = [attrs.astuple(cfg) for cfg in by_row.config_space(on_card())]
    assert offered == [(256, 4, 8), (256, 3, 8), (256, 4, 32), (256, 4, 16), (256, 4, 4), (128, 6, 8)]


@pytest.mark.parametrize(("vocab", "rows"), [(128_256, 4096), (151_936, 3456), (2**29, 128), (32_000, 16_768)])
def test_the_exponentials_of_a_chunk_take_a_gibibyte(vocab: int, rows: int) -> None:
    """At least one tile of rows, whatever the vocabulary."""
    assert _tiling.rows_of_chunk(on_card(vocab=vocab)) == rows
    assert 2 * rows * vocab <= 2**30 or rows == 128


def launches_of(op: str, differentiate: bool, dtype: str = "bfloat16", **options: Any) -> int:
    """How many launches a program for a card has."""
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    inv = on_card(op, 64, 64, 512, dtype=dtype)
    arrays = {name: value for name, value in inv.arguments.items() if hasattr(value, "shape")}

    def run(hidden: Any) -> Any:
        others = {name: jnp.zeros(x.shape, x.dtype) for name, x in arrays.items() if name != "hidden"}
        call = ejkernel_core.call(op, hidden=hidden, **others, **options, backend="gluon_sm90")
        return jnp.sum(jax.tree.leaves(call)[0])

    device = AbstractDevice("NVIDIA H200", None, "gpu")
    with use_abstract_mesh(AbstractMesh((1,), ("_",), abstract_device=device)):
        function = jax.jit(jax.grad(run) if differentiate else run)
        lowered = function.trace(arrays["hidden"]).lower(lowering_platforms=("cuda",))
    return lowered.as_text().count("triton_kernel_call")


@pytest.mark.skipif(requirements._unavailable_reason() is not None, reason=str(requirements._unavailable_reason()))
def test_gradients_of_a_sum_are_made_by_its_only_launch_and_those_of_rows_by_a_second() -> None:
    assert [launches_of(op, False) for op in (OP, f"{OP}_sum", "linear_log_probs")] == [1, 1, 1]
    assert [launches_of(f"{OP}_sum", True), launches_of(OP, True)] == [1, 2]
    assert [launches_of(f"{OP}_sum", True, logits_soft_cap=5.0), launches_of(OP, True, dtype="float16")] == [
        0,
        1,
    ]
