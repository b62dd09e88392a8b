"""The gradients of losses on TPUs: several tiles along each axis, their programs, and what they refuse."""

from __future__ import annotations

from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import ejkernel_core as core
from ejkernel_ops.fused_linear_cross_entropy import random_calls
from ejkernel_pallas_tpu import fused_linear_cross_entropy
from ejkernel_pallas_tpu.fused_linear_cross_entropy import backward
from ejkernel_pallas_tpu.fused_linear_cross_entropy.backward import Config
from ejkernel_pallas_tpu.launch._generations import KINDS
from ejkernel_pallas_tpu.testing import interpreted_registry

OP = "fused_linear_cross_entropy_bwd"
KERNELS = {"fused_linear_cross_entropy.pallas_tpu": fused_linear_cross_entropy, f"{OP}.pallas_tpu": backward}
DEVICES = ("TPU v4", "TPU v5e", "TPU v5p", "TPU v6e", "TPU7x")
ARRAYS = ("hidden", "weight", "bias", "token_weights")
#: Three tiles along each axis, with a rest, and several chunks of rows; and one tile of each.
SMALL, LARGE = Config(128, 128, 32, interpret=True), Config(512, 512, 128, interpret=True)
ROWS, DIM, VOCAB = 300, 70, 301
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cap": {"logits_soft_cap": 2.5},
    "z-loss": {"z_loss": 1e-2},
    "smoothing": {"label_smoothing": 0.3},
    "shard": {"vocab_start": np.array([100], np.int32)},
    "padding that is a word": {"ignore_index": 7},
    "everything": {"logits_soft_cap": 4.0, "z_loss": 1e-2, "label_smoothing": 0.2},
}


def drawn(dtype: str, transpose: bool, has_d_lse: bool) -> random_calls.RandomCall:
    """A call with all arrays, some of whose rows are ignored, and its cotangents."""
    rng = np.random.default_rng([71, transpose, has_d_lse])
    weight = rng.standard_normal((DIM, VOCAB)) * 3 / np.sqrt(DIM)
    labels = rng.integers(0, VOCAB, ROWS, dtype=np.int32)
    labels[rng.random(ROWS) < 0.2] = -100
    call = {
        "hidden": rng.standard_normal((ROWS, DIM)).astype(jnp.dtype(dtype)),
        "weight": np.ascontiguousarray(weight.T if transpose else weight).astype(jnp.dtype(dtype)),
        "labels": labels,
        "bias": rng.standard_normal(VOCAB).astype(np.float32),
        "token_weights": np.abs(rng.standard_normal(ROWS)).astype(np.float32),
        "transpose_weight": transpose,
        "ignore_index": -100,
    }
    d_lse = rng.standard_normal(ROWS).astype(np.float32) if has_d_lse else None
    return random_calls.RandomCall(call, rng.standard_normal(ROWS).astype(np.float32), d_lse)


def operands(call: random_calls.RandomCall, options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the gradients, without ``wrt``."""
    arguments = call.arguments | options
    loss, lse = core.call("fused_linear_cross_entropy", **arguments, return_lse=True, backend="xla")
    unweighted = core.call("fused_linear_cross_entropy", **arguments | {"token_weights": None}, backend="xla")
    results = {"loss": loss, "lse": lse, "row_losses": unweighted}
    return arguments | results | {"d_loss": call.d_loss, "d_lse": call.d_lse}


def expected(call: random_calls.RandomCall, options: dict[str, Any]) -> dict[str, Any]:
    """The gradients by NumPy in float64."""
    start = {"vocab_start": options["vocab_start"][0]} if "vocab_start" in options else {}
    arguments = call.arguments | options | start | {"reduction": "none"}
    _, gradients, _ = random_calls.expected(attrs.evolve(call, arguments=arguments))
    return gradients


def assert_close(result: Any, right: np.ndarray, tolerance: float) -> None:
    assert result.shape == right.shape
    error = np.abs(np.asarray(result, np.float64) - right).max()
    assert error <= tolerance * max(np.abs(right).max(), 1)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("transpose", [False, True])
def test_gradients_of_many_tiles(options: str, transpose: bool) -> None:
    """Ignored rows that are NaN have none, and none of them reaches a sum."""
    for dtype, has_d_lse in (("float32", True), ("bfloat16", False)):
        call = drawn(dtype, transpose, has_d_lse)
        if not has_d_lse:
            ignored = call.arguments["labels"] == OPTIONS[options].get("ignore_index", -100)
            call.arguments["hidden"][ignored] = np.nan
        right, arguments = expected(call, OPTIONS[options]), operands(call, OPTIONS[options])
        for cfg in (SMALL, LARGE) if dtype == "float32" else (SMALL,):
            gradients = core.call(OP, **arguments, wrt=ARRAYS, cfg=cfg)
            for name, gradient in zip(ARRAYS, gradients, strict=True):
                assert gradient.dtype == arguments[name].dtype
                assert_close(gradient, right[name], random_calls.TOLERANCES[dtype])


def test_each_gradient_alone() -> None:
    call = drawn("float32", False, True)
    right, arguments = expected(call, {}), operands(call, {})
    for name in ARRAYS:
        (gradient,) = core.call(OP, **arguments, wrt=(name,), cfg=SMALL)
        assert_close(gradient, right[name], random_calls.TOLERANCES["float32"])


def test_partial_sums_are_float32() -> None:
    call = drawn("bfloat16", True, True)
    right, arguments = expected(call, {}), operands(call, {})
    names = ("weight", "bias")
    gradients = core.call(OP, **arguments, wrt=names, partial_sums=names, cfg=SMALL)
    for name, gradient in zip(names, gradients, strict=True):
        assert gradient.dtype == jnp.float32
        assert_close(gradient, right[name], random_calls.TOLERANCES["bfloat16"])


def test_logits_of_ten_thousand() -> None:
    """Their lse is rounded to a thousandth; the statistics that gradients are made of are not."""
    call = drawn("float32", False, False)
    call.arguments["bias"] = call.arguments["bias"] + np.float32(2.0**14)
    call.arguments["weight"] = np.round(call.arguments["weight"] * 16) / np.float32(16)
    call.arguments["hidden"] = np.round(call.arguments["hidden"] * 4) / np.float32(4)
    call.arguments["bias"] = np.round(call.arguments["bias"] * 16) / np.float32(16)  # so that logits are exact
    right, arguments = expected(call, {}), operands(call, {})
    gradients = core.call(OP, **arguments, wrt=("hidden", "weight", "bias"), cfg=SMALL)
    for name, gradient in zip(("hidden", "weight", "bias"), gradients, strict=True):
        assert_close(gradient, right[name], random_calls.TOLERANCES["float32"])


def test_no_order_of_steps_matters() -> None:
    """In the interpreter of a whole TPU with two cores, which finds accesses without an order."""
    pltpu.reset_tpu_interpret_mode_state()
    registry = interpreted_registry(KERNELS, device_kind="TPU v5p", races=True)
    call = drawn("float32", False, True)
    arguments, cfg = operands(call, OPTIONS["everything"]), Config(128, 128, 64)
    gradients = registry.call(OP, **arguments, wrt=ARRAYS, backend="pallas_tpu", cfg=cfg)
    right = expected(call, OPTIONS["everything"])
    for name, gradient in zip(ARRAYS, gradients, strict=True):
        assert_close(gradient, right[name], random_calls.TOLERANCES["float32"])
    pltpu.reset_tpu_interpret_mode_state()


# -- tiles -----------------------------------------------------------------------------------------------------------


def shapes(rows: int, dim: int, vocab: int, dtype: str = "bfloat16", **options: Any) -> dict[str, Any]:
    """The arrays and the options of a call."""
    sizes = (vocab, dim) if options.get("transpose_weight") else (dim, vocab)
    of_rows = jax.ShapeDtypeStruct((rows,), jnp.dtype("float32"))
    arrays = {
        "hidden": jax.ShapeDtypeStruct((rows, dim), jnp.dtype(dtype)),
        "weight": jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype)),
        "bias": jax.ShapeDtypeStruct((vocab,), jnp.dtype("float32")),
        "labels": jax.ShapeDtypeStruct((rows,), jnp.dtype("int32")),
    }
    results = dict.fromkeys(("loss", "lse", "row_losses", "d_loss", "d_lse"), of_rows)
    return arrays | results | {"wrt": ("hidden", "weight", "bias"), **options}


def invocation(*sizes: Any, device_kind: str = "TPU v5e", **options: Any) -> Any:
    inv = core.registry.invocation(OP, **shapes(*sizes, **options))
    return attrs.evolve(inv, platform="tpu", device_kind=device_kind)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_configurations_fit_and_the_first_is_the_heuristics(dtype: str) -> None:
    for kind, chip in KINDS.items():
        # A v4 has no memory for longer ones in float32.
        dim = 1024 if (chip.name, dtype) == ("v4", "float32") else 4096
        for sizes in ((1, 1, 1), (0, 8, 8), (300, 40, 72), (8192, dim, 128256)):
            inv = invocation(*sizes, dtype, device_kind=kind)
            space = list(backward.config_space(inv))
            assert space[0] == backward.heuristic_cfg(inv)
            assert all(max(backward.vmem(inv, cfg).values()) <= chip.budget for cfg in space)


@pytest.mark.parametrize("device_kind", DEVICES)
def test_every_configuration_lowers(device_kind: str) -> None:
    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(device_kind, 1, "tpu"))
    for sizes in ((1000, 300, 2048, "bfloat16"), (1000, 520, 1001, "float32"), (3, 1, 1, "bfloat16")):
        for transpose in (False, True):
            options: Any = OPTIONS["everything"] | {"transpose_weight": transpose}
            call = shapes(*sizes, **options)
            arrays = {name: value for name, value in call.items() if isinstance(value, jax.ShapeDtypeStruct)}
            others = {name: value for name, value in call.items() if name not in arrays}
            for cfg in backward.config_space(invocation(*sizes, device_kind=device_kind, **options)):

                def function(arrays: Any, others: Any = others, cfg: Any = cfg) -> Any:
                    return core.call(OP, **arrays, **others, backend="pallas_tpu", cfg=cfg)

                with use_abstract_mesh(mesh):
                    lowered = jax.jit(function).trace(arrays).lower(lowering_platforms=("tpu",))
                assert lowered.as_text().count("tpu_custom_call") == 3


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(core.Unsupported, match="no tile of this call fits into the 15 MiB that v4 has"):
        backward.heuristic_cfg(invocation(512, 16384, 8192, device_kind="TPU v4"))
    with pytest.raises(core.Unsupported, match="take more than the 15 MiB of vector memory"):
        backward.check_cfg(invocation(4096, 4096, 8192, device_kind="TPU v4"), Config(512, 512))
    inv = invocation(8, 8, 8)
    half = jax.ShapeDtypeStruct((8, 8), jnp.float16)
    with pytest.raises(core.Unsupported, match="take bfloat16 and float32; hidden is float16"):
        backward.check_cfg(attrs.evolve(inv, arguments={**inv.arguments, "hidden": half}), Config(interpret=True))
