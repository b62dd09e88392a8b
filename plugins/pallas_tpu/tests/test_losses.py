"""The passes over logits on TPUs: losses, log-probabilities and the most probable word in several tiles along each
axis, their programs, and what they refuse.

``EJKERNEL_RANDOM_CALLS=60 pytest plugins/pallas_tpu/tests/test_losses.py`` runs 60 random calls.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import ejkernel_core as core
from ejkernel_core import Example
from ejkernel_ops import fused_linear_cross_entropy, linear_argmax, linear_log_probs
from ejkernel_ops.fused_linear_cross_entropy import random_calls
from ejkernel_pallas_tpu import fused_linear_cross_entropy as loss_kernel
from ejkernel_pallas_tpu import linear_argmax as argmax_kernel
from ejkernel_pallas_tpu import linear_log_probs as log_probs_kernel
from ejkernel_pallas_tpu.fused_linear_cross_entropy import Config, _tuning
from ejkernel_pallas_tpu.launch._generations import KINDS
from ejkernel_pallas_tpu.testing import interpreted_registry
from ejkernel_testing import KernelProofs

COUNT = int(os.environ.get("EJKERNEL_RANDOM_CALLS", "4"))
MODULES = {
    "fused_linear_cross_entropy": loss_kernel,
    "linear_log_probs": log_probs_kernel,
    "linear_argmax": argmax_kernel,
}
KERNELS = {f"{op}.pallas_tpu": module for op, module in MODULES.items()}
DEVICES = ("TPU v4", "TPU v5e", "TPU v5p", "TPU v6e", "TPU7x")
#: Three tiles along each axis, with a rest, and several chunks of rows.
SMALL = Config(128, 128, 128, 32, interpret=True)
#: All of a hidden state at a time.
WHOLE = Config(256, 256, None, 128, interpret=True)
ROWS, DIM, VOCAB = 300, 330, 301


def drawn(dtype: str = "float32", *, transpose: bool = False, seed: int = 0, scale: float = 3.0) -> dict[str, Any]:
    """A call of so many rows, in NumPy's arrays."""
    rng = np.random.default_rng([61, seed])
    weight = rng.standard_normal((DIM, VOCAB)) * scale / np.sqrt(DIM)
    labels = rng.integers(0, VOCAB, ROWS, dtype=np.int32)
    labels[rng.random(ROWS) < 0.2] = -100
    return {
        "hidden": rng.standard_normal((ROWS, DIM)).astype(jnp.dtype(dtype)),
        "weight": np.ascontiguousarray(weight.T if transpose else weight).astype(jnp.dtype(dtype)),
        "labels": labels,
        "transpose_weight": transpose,
    }


def of_words(seed: int = 1) -> np.ndarray:
    return np.random.default_rng([62, seed]).standard_normal(VOCAB).astype(np.float32)


def of_tokens() -> np.ndarray:
    return np.abs(np.random.default_rng(63).standard_normal(ROWS)).astype(np.float32)


# -- losses in several tiles -----------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": of_words()},
    "cap": {"logits_soft_cap": 2.5},
    "z-loss": {"z_loss": 1e-2},
    "smoothing": {"label_smoothing": 0.3},
    "weights": {"token_weights": of_tokens()},
    "shard": {"vocab_start": np.int32(100)},
    "padding that is a word": {"ignore_index": 7},
    "everything": {
        "bias": of_words(),
        "logits_soft_cap": 4.0,
        "z_loss": 1e-2,
        "label_smoothing": 0.2,
        "token_weights": of_tokens(),
        "vocab_start": np.int32(31),
    },
}


def expected(call: dict[str, Any]) -> dict[str, Any]:
    """The losses and the lse by NumPy in float64."""
    arguments = {"ignore_index": -100, "reduction": "none", "return_lse": True, **call}
    nothing = np.zeros(call["labels"].shape, np.float32)
    values, _, _ = random_calls.expected(random_calls.RandomCall(arguments, nothing, nothing))
    return values


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("transpose", [False, True])
def test_losses_of_many_tiles(options: str, transpose: bool) -> None:
    for dtype in ("float32", "bfloat16"):
        call = drawn(dtype, transpose=transpose) | OPTIONS[options]
        right = expected(call)
        for cfg in (SMALL, WHOLE):
            loss, lse = fused_linear_cross_entropy(**call, reduction="none", return_lse=True, cfg=cfg)
            np.testing.assert_allclose(lse, right["lse"], rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(loss, right["loss"], rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("cap", [None, 3.0])
def test_words_that_cannot_be_fill_whole_tiles(cap: float | None) -> None:
    """Their -inf comes before any finite logit of the row, and again at the end."""
    bias = of_words()
    bias[:140] = bias[290:] = -np.inf
    call = drawn() | {"bias": bias, "logits_soft_cap": cap}
    call["labels"] = np.where(call["labels"] == -100, -100, 140 + call["labels"] % 150)
    right = expected(call)
    loss, lse = fused_linear_cross_entropy(**call, reduction="none", return_lse=True, cfg=SMALL)
    np.testing.assert_allclose(lse, right["lse"], rtol=1e-5)
    np.testing.assert_allclose(loss, right["loss"], rtol=1e-5, atol=3e-5)
    entropy = linear_log_probs(
        **{n: call[n] for n in ("hidden", "weight", "labels", "bias", "logits_soft_cap")},
        return_entropy=True,
        cfg=SMALL,
    )[1]
    np.testing.assert_allclose(entropy, entropies(call), atol=2e-5)


def test_logits_that_are_large_and_close() -> None:
    """Their sum has no digits for the differences, of which the loss consists."""
    call = drawn(scale=0.5) | {"label_smoothing": 0.5, "bias": of_words() + np.float32(1e4)}
    right = expected(call)
    loss, _ = fused_linear_cross_entropy(**call, reduction="none", return_lse=True, cfg=SMALL)
    np.testing.assert_allclose(loss, right["loss"], atol=6e-3)  # the logits are rounded to a thousandth
    np.testing.assert_allclose(np.mean(loss), np.mean(right["loss"]), atol=5e-5)


def test_infinite_logits_and_rows_that_are_not_numbers() -> None:
    """As in the reference; other rows do not notice."""
    call = drawn()
    call["hidden"][5] = np.nan
    infinite = of_words()
    infinite[150] = np.inf
    plain = {"reduction": "none", "return_lse": True}
    for bias in (infinite, np.full(VOCAB, -np.inf, np.float32)):
        call["bias"] = bias
        right = fused_linear_cross_entropy(**call, **plain, backend="xla")
        for result, other in zip(fused_linear_cross_entropy(**call, **plain, cfg=SMALL), right, strict=True):
            np.testing.assert_allclose(result, other, rtol=1e-5, atol=3e-5)


def seeds_without_reduction(count: int, dtype: str) -> Iterator[int]:
    seeds = (n for n in range(10_000) if random_calls.random_call(n, dtype).arguments["reduction"] == "none")
    return (next(seeds) for _ in range(count))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_calls(dtype: str) -> None:
    for seed in seeds_without_reduction(COUNT, dtype):
        random_calls.check(seed, dtype=dtype, cfg=SMALL)


# -- log-probabilities and the most probable word --------------------------------------------------------------------


def logits_in_float64(call: dict[str, Any]) -> np.ndarray:
    matrix = call["weight"].T if call.get("transpose_weight") else call["weight"]
    logits = call["hidden"].astype(np.float64) @ matrix.astype(np.float64) + call.get("bias", 0.0)
    cap = call.get("logits_soft_cap")
    logits = logits if cap is None else cap * np.tanh(logits / cap)
    return np.asarray(logits / call.get("temperature", 1.0))


def log_softmax(call: dict[str, Any]) -> np.ndarray:
    logits = logits_in_float64(call)
    below = logits - logits.max(1, keepdims=True)
    return np.asarray(below - np.log(np.exp(below).sum(1, keepdims=True)))


def entropies(call: dict[str, Any]) -> np.ndarray:
    log_p = log_softmax(call)
    values = -(np.exp(log_p) * np.where(np.isinf(log_p), 0, log_p)).sum(1)
    return np.where(call["labels"] == -100, 0, values)


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.4}, {"bias": of_words(), "logits_soft_cap": 2.0, "temperature": 3.0}],
    ids=["plain", "temperature", "everything"],
)
@pytest.mark.parametrize("transpose", [False, True])
def test_log_probabilities_and_entropies_of_many_tiles(transpose: bool, options: dict[str, Any]) -> None:
    call = drawn(transpose=transpose) | options
    own = np.take_along_axis(log_softmax(call), np.maximum(call["labels"], 0)[:, None], 1)[:, 0]
    for cfg in (SMALL, WHOLE):
        log_probs, entropy = linear_log_probs(**call, return_entropy=True, cfg=cfg)
        np.testing.assert_allclose(log_probs, np.where(call["labels"] == -100, 0, own), rtol=1e-5, atol=3e-5)
        np.testing.assert_allclose(entropy, entropies(call), atol=3e-5)
        np.testing.assert_allclose(linear_log_probs(**call, cfg=cfg), log_probs, rtol=1e-6)


@pytest.mark.parametrize("transpose", [False, True])
def test_the_largest_of_many_tiles_is_the_first_of_equal_ones(transpose: bool) -> None:
    rng = np.random.default_rng(64)
    hidden = rng.integers(-2, 3, (ROWS, DIM)).astype(np.float32)
    weight = rng.integers(-2, 3, (DIM, VOCAB)).astype(np.float32)
    weight[:, 128:256] = weight[:, :128]  # in the same lane of another tile
    weight[:, 256:] = weight[:, 3:48]  # in another lane
    logits = hidden @ weight
    assert ((logits == logits.max(1, keepdims=True)).sum(1) > 1).any()
    matrix = np.ascontiguousarray(weight.T) if transpose else weight
    for cfg in (SMALL, WHOLE):
        token = linear_argmax(hidden, matrix, transpose_weight=transpose, cfg=cfg)
        assert (token == logits.argmax(1)).all()


def test_nan_is_the_largest_and_without_a_finite_logit_it_is_the_first_word() -> None:
    call = drawn()
    bias = of_words()
    bias[[200, 260]] = np.nan
    assert (linear_argmax(call["hidden"], call["weight"], bias=bias, cfg=SMALL) == 200).all()
    bias[...] = -np.inf
    assert (linear_argmax(call["hidden"], call["weight"], bias=bias, cfg=SMALL) == 0).all()
    bias[300] = 0
    assert (linear_argmax(call["hidden"], call["weight"], bias=bias, cfg=SMALL) == 300).all()
    weight = call["weight"].copy()
    weight[0, 130] = np.inf
    token = linear_argmax(np.abs(call["hidden"]), weight, cfg=SMALL)
    assert (token == 130).all()


# -- with races detected ---------------------------------------------------------------------------------------------


class DetectingRaces(KernelProofs):
    """On a chip with two cores, which have their own rows."""

    refuses = frozenset({"float64", "float16"})
    roundings = 1.5
    registry = interpreted_registry(KERNELS, device_kind="TPU v5p", races=True)
    names: Sequence[str] = ("plain-blocks-and-a-tail",)

    def examples(self) -> Sequence[Example]:
        examples = [example for example in super().examples() if example.name in self.names]
        assert len(examples) == len(self.names)
        checks = frozenset({"values"})
        return [attrs.evolve(one, checks=checks, variations=(), long=False, wrt=()) for one in examples]

    @pytest.fixture(autouse=True)
    def _fresh_memory(self):
        pltpu.reset_tpu_interpret_mode_state()
        yield
        pltpu.reset_tpu_interpret_mode_state()


class TestLossesDetectingRaces(DetectingRaces):
    kernel = "fused_linear_cross_entropy.pallas_tpu"
    names = ("plain-blocks-and-a-tail", "everything")


class TestLogProbsDetectingRaces(DetectingRaces):
    kernel = "linear_log_probs.pallas_tpu"
    names = ("everything",)


class TestArgmaxDetectingRaces(DetectingRaces):
    kernel = "linear_argmax.pallas_tpu"


# -- tiles -----------------------------------------------------------------------------------------------------------


def arrays(op: str, rows: int, dim: int, vocab: int, dtype: str = "bfloat16", **options: Any) -> dict[str, Any]:
    """A call of these sizes, with a bias in float32."""
    sizes = (vocab, dim) if options.get("transpose_weight") else (dim, vocab)
    call = {
        "hidden": jax.ShapeDtypeStruct((rows, dim), jnp.dtype(dtype)),
        "weight": jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype)),
        "bias": jax.ShapeDtypeStruct((vocab,), jnp.dtype("float32")),
    }
    if op != "linear_argmax":
        call["labels"] = jax.ShapeDtypeStruct((rows,), jnp.dtype("int32"))
    return call | options


def invocation(op: str, *sizes: Any, device_kind: str = "TPU v5e", **options: Any) -> Any:
    inv = core.registry.invocation(op, **arrays(op, *sizes, **options))
    return attrs.evolve(inv, platform="tpu", device_kind=device_kind)


@pytest.mark.parametrize("op", MODULES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_configurations_fit_and_the_first_is_the_heuristics(op: str, dtype: str) -> None:
    for kind, chip in KINDS.items():
        for sizes in ((1, 1, 1), (0, 8, 8), (300, 40, 72), (32768, 2048, 151936), (8192, 16384, 524288)):
            inv = invocation(op, *sizes, dtype, device_kind=kind)
            space = list(MODULES[op].config_space(inv))
            assert space[0] == MODULES[op].heuristic_cfg(inv)
            assert len(space) == len({_tuning.tile_of(inv, cfg) for cfg in space})
            assert all(MODULES[op].vmem(inv, cfg) <= chip.budget for cfg in space)


def test_a_step_of_a_model_has_tiles_of_many_rows() -> None:
    """So that reading the weight takes less time than multiplying it; a v4 has no memory for more."""
    rows = {}
    for kind, chip in KINDS.items():
        inv = invocation("fused_linear_cross_entropy", 8192, 4096, 128256, device_kind=kind)
        rows[chip.name] = MODULES["fused_linear_cross_entropy"].heuristic_cfg(inv).rows
    assert min(rows[name] for name in ("v5e", "v5p", "v6e", "v7x")) >= 512, rows
    assert rows["v4"] >= 256, rows


def lowered(
    op: str, call: dict[str, Any], device_kind: str, cfg: Any = None, backend: str | None = "pallas_tpu"
) -> str:
    shapes = {name: value for name, value in call.items() if isinstance(value, jax.ShapeDtypeStruct)}
    options = {name: value for name, value in call.items() if name not in shapes}

    def function(shapes: Any) -> Any:
        return core.call(op, **shapes, **options, backend=backend, cfg=cfg)

    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(device_kind, 1, "tpu"))
    with use_abstract_mesh(mesh):
        return str(jax.jit(function).trace(shapes).lower(lowering_platforms=("tpu",)).as_text())


FURTHER: dict[str, dict[str, Any]] = {
    "fused_linear_cross_entropy": {"label_smoothing": 0.1, "z_loss": 0.1, "return_lse": True},
    "linear_log_probs": {"temperature": 2.0, "return_entropy": True},
    "linear_argmax": {},
}


@pytest.mark.parametrize("op", MODULES)
@pytest.mark.parametrize("device_kind", DEVICES)
def test_every_configuration_lowers(op: str, device_kind: str) -> None:
    """Whole tiles, and rows, words and entries behind the end of an array."""
    options: Any = FURTHER[op] | {"logits_soft_cap": 30.0}
    for sizes in ((1000, 300, 2048, "bfloat16"), (1000, 5000, 1001, "float32"), (3, 1, 1, "bfloat16")):
        for transpose in (False, True):
            call = arrays(op, *sizes, **options, transpose_weight=transpose)
            inv = invocation(op, *sizes, device_kind=device_kind, **options, transpose_weight=transpose)
            for cfg in (*MODULES[op].config_space(inv), Config(256, 256, 256, 64)):
                assert lowered(op, call, device_kind, cfg).count("tpu_custom_call") == 1


@pytest.mark.parametrize("op", MODULES)
def test_plain_jax_is_preferred(op: str) -> None:
    call = arrays(op, 256, 128, 1024)
    assert "tpu_custom_call" not in lowered(op, call, "TPU v5e", backend=None)
    assert "tpu_custom_call" in lowered(op, call, "TPU v5e")


def test_no_logits_are_in_main_memory() -> None:
    """Whatever is computed, no array of the program has as many entries as the logits."""
    call = arrays("fused_linear_cross_entropy", 1024, 256, 5000)
    text = lowered("fused_linear_cross_entropy", call, "TPU v5e")
    assert "1024x5000" not in text
    assert "1024x5120" not in text


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", MODULES)
def test_tiles_that_do_not_fit_are_refused(op: str) -> None:
    inv = invocation(op, 4096, 8192, 8192, device_kind="TPU v4")
    with pytest.raises(core.Unsupported, match="take more than the 15 MiB of vector memory: take smaller ones"):
        MODULES[op].check_cfg(inv, Config(512, 2048))


@pytest.mark.parametrize("op", MODULES)
@pytest.mark.parametrize("cfg", [Config(), Config(interpret=True)])
def test_what_a_tpu_does_not_have_is_refused(op: str, cfg: Config) -> None:
    for name in ("hidden", "bias"):
        inv = invocation(op, 8, 8, 8)
        half = jax.ShapeDtypeStruct(inv[name].shape, jnp.float16)
        inv = attrs.evolve(inv, arguments={**inv.arguments, name: half})
        with pytest.raises(core.Unsupported, match=f"take bfloat16 and float32; {name} is float16"):
            MODULES[op].check_cfg(inv, cfg)
    with pytest.raises(core.Unsupported, match="number up to 16777216 words; weight has 16777217"):
        MODULES[op].check_cfg(invocation(op, 8, 8, 2**24 + 1), cfg)


def test_other_devices_are_refused() -> None:
    inv = attrs.evolve(invocation("linear_argmax", 8, 8, 8), platform="cpu", device_kind="cpu")
    with pytest.raises(core.Unsupported, match="run on TPUs; this is cpu"):
        argmax_kernel.heuristic_cfg(inv)


def test_sizes_of_tiles_are_checked() -> None:
    with pytest.raises(ValueError, match="columns: takes a multiple of 128; got 200"):
        Config(columns=200)
    with pytest.raises(ValueError, match="rows"):
        Config(rows=100)
