"""The loss in Triton: random calls in chunks of a few rows, every kind of configuration, and what is compiled.

``EJKERNEL_RANDOM_CALLS=60 pytest plugins/triton/tests/test_fused_linear_cross_entropy.py`` runs 60 random calls.
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
from ejkernel_ops.fused_linear_cross_entropy import chunks, random_calls
from ejkernel_ops.fused_linear_cross_entropy.random_calls import RandomCall
from ejkernel_triton import fused_linear_cross_entropy as by_row
from ejkernel_triton.fused_linear_cross_entropy import Config, _launch, backward, total
from ejkernel_triton.interpreter import Compiled, compiled_for, interpreted, interpreted_registry
from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.launch._launch import launch_p

if _jax_triton.unavailable_reason():
    pytest.skip(_jax_triton.unavailable_reason(), allow_module_level=True)

COUNT = int(os.environ.get("EJKERNEL_RANDOM_CALLS", "20"))
DTYPES = ("float32", "bfloat16", "float16")
OP = "fused_linear_cross_entropy"
KERNELS: dict[str, Any] = {OP: by_row, f"{OP}_bwd": backward, f"{OP}_sum": total}
H200 = "NVIDIA H200"
#: Steps of a column a thread and of several, of rows that are longer and shorter; fewer programs than rows.
CONFIGS = (
    Config(4, 256, 1, 0),
    Config(4, 512, 1, 0),
    Config(3, 512, 2, 2),
    Config(64, 128, 4, 5),
    Config(64, 1024, 2, 1),
)
EVERYTHING = {"logits_soft_cap": 5.0, "z_loss": 1e-2, "label_smoothing": 0.1}
IGNORED = -100


@pytest.fixture(scope="module", name="registry")
def _registry() -> Iterator[Any]:
    with interpreted():
        yield interpreted_registry({f"{op}.triton": module for op, module in KERNELS.items()})


def close(registry: Any, call: RandomCall, dtype: str, cfg: Config | None = None) -> None:
    """Compare values and gradients with float64."""
    values, gradients = random_calls.outcome(call, backend="triton", registry=registry, cfg=cfg)
    right_values, right_gradients, terms = random_calls.expected(call)
    assert gradients.keys() == right_gradients.keys()
    for name, right in right_values.items():
        random_calls.compare(name, values[name], right, random_calls.TOLERANCES["float32"], 1.0)
    for name, right in right_gradients.items():
        beside = terms if name == "token_weights" else 1e-3
        random_calls.compare(name, gradients[name], right, random_calls.TOLERANCES[dtype], beside)


def call_of(
    dtype: str, rows: int = 9, vocab: int = 301, reduction: str = "mean", bias: bool = True, **options: Any
) -> RandomCall:
    """Logits of a few units; the third label and those at both ends are ignored."""
    rng = np.random.default_rng([rows, vocab])
    arrays = {
        "hidden": rng.standard_normal((rows, 24)),
        "weight": rng.standard_normal((24, vocab)) / 3,
        **({"bias": rng.standard_normal(vocab)} if bias else {}),
        "token_weights": np.abs(rng.standard_normal(rows)),
    }
    labels = rng.integers(0, vocab, rows, dtype=np.int32)
    labels[[0, 2 % rows, -1]] = IGNORED if rows > 1 else 0
    call = {name: np.asarray(array, jnp.dtype(dtype)) for name, array in arrays.items()}
    call |= {"labels": labels, "ignore_index": IGNORED, "reduction": reduction, **options}
    d_lse = rng.standard_normal(rows).astype(np.float32) if options.get("return_lse") else None
    d_loss = rng.standard_normal(rows if reduction == "none" else ()).astype(np.float32)
    return RandomCall(call, d_loss, d_lse)


# -- values and gradients ----------------------------------------------------------------------------------------------


@pytest.fixture(name="few_rows")
def _few_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Chunks of 16 rows."""
    monkeypatch.setattr(chunks, "MEMORY_ELSEWHERE", 1)
    monkeypatch.setattr(chunks, "FEWEST", 16)
    jax.clear_caches()
    yield
    monkeypatch.undo()
    jax.clear_caches()


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("seed", range(COUNT))
def test_random_calls(registry: Any, seed: int) -> None:
    random_calls.check(seed, dtype=DTYPES[seed % 3], backend="triton", registry=registry)


@pytest.mark.parametrize("cfg", CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
def test_every_kind_of_configuration(registry: Any, options: Any, dtype: str, cfg: Config) -> None:
    close(registry, call_of(dtype, bias=bool(options), **options), dtype, cfg)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "value"), EVERYTHING.items(), ids=EVERYTHING)
def test_each_option_alone_and_both_cotangents(registry: Any, name: str, value: float, dtype: str) -> None:
    options = {name: value, "return_lse": True, "reduction": "none"}
    close(registry, call_of(dtype, **options), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (1, 2), (7, 129), (2, 1024), (3, 2049)])
def test_any_size(registry: Any, rows: int, vocab: int, dtype: str) -> None:
    close(registry, call_of(dtype, rows, vocab, label_smoothing=0.2), dtype)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_large_logits_and_words_that_cannot_be(registry: Any, dtype: str, reduction: str) -> None:
    """Logits of 1e4, and most words impossible: some threads meet nothing but -inf, others at first."""
    call = call_of(dtype, reduction=reduction, return_lse=reduction == "none")
    call.arguments["bias"][:] = -np.inf
    call.arguments["bias"][[1, 130, 131, 300]] = 1e4, 1e4, 9990, -1e4
    call.arguments["labels"][:] = np.where(call.arguments["labels"] == IGNORED, IGNORED, 130)
    values, gradients = random_calls.outcome(call, backend="triton", registry=registry, cfg=None)
    right, right_gradients, _ = random_calls.expected(call)
    np.testing.assert_allclose(values["loss"], right["loss"], rtol=1e-3, atol=5e-3)
    for name in ("hidden", "weight", "bias"):
        np.testing.assert_allclose(gradients[name], right_gradients[name], rtol=2e-2, atol=5e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_small_probability_is_left_out(registry: Any, dtype: str) -> None:
    """Each word but one has a probability of some 1e-7: their gradients are right one by one."""
    call = call_of(dtype, rows=5, vocab=700, bias=False, reduction="sum")
    call.arguments["hidden"] = np.abs(call.arguments["hidden"])
    call.arguments["weight"][:, 33] = 1.0
    call.arguments["weight"][:, [*range(33), *range(34, 700)]] *= 0.1
    call.arguments["labels"][:] = [33, 33, 5, 33, 33]
    _, gradients = random_calls.outcome(call, backend="triton", registry=registry)
    _, right, _ = random_calls.expected(call)
    rare = np.delete(right["weight"], [5, 33], axis=1)
    assert 0 < np.abs(rare).max() < 1e-4
    own = np.delete(np.asarray(gradients["weight"], np.float64), [5, 33], axis=1)
    tolerance = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 3e-2}[dtype]
    unit = 2.0**-24 if dtype == "float16" else 0.0  # the smallest number of the gradient itself
    np.testing.assert_allclose(own, rare, rtol=tolerance, atol=tolerance * np.abs(rare).mean() + unit)


@pytest.mark.parametrize("op", ["none", "sum"])
@pytest.mark.parametrize("rows", [0, 6])
def test_no_rows_and_rows_that_do_not_count(registry: Any, op: str, rows: int) -> None:
    """They may be NaN."""
    hidden = jnp.full((rows, 8), jnp.nan, jnp.bfloat16)
    weight = jnp.ones((8, 40), jnp.bfloat16)
    call = {"hidden": hidden, "weight": weight, "labels": np.full(rows, IGNORED, np.int32), "reduction": op}
    call |= {"ignore_index": IGNORED}
    shape = (rows,) if op == "none" else ()
    values, gradients = random_calls.outcome(
        RandomCall(call, np.ones(shape, np.float32), None), backend="triton", registry=registry
    )
    for array, expected in ((values["loss"], shape), (gradients["hidden"], (rows, 8)), (gradients["weight"], (8, 40))):
        np.testing.assert_array_equal(array, np.zeros(expected, np.float32))


# -- in place ----------------------------------------------------------------------------------------------------------


def updated(dtype: str, needs: Any) -> list[list[int]]:
    """The arrays that each launch of a chunk updates, by their places."""
    inv = on_card(f"{OP}_sum", 256, dtype=dtype, bias=True)

    def run(arrays: Any, d_loss: Any) -> Any:
        own = inv.with_arrays(arrays)
        return _launch.with_gradients(own, Config(256), {"d_loss": d_loss}, needs, jnp.float32)

    arrays = {name: value for name, value in inv.arguments.items() if hasattr(value, "shape")}
    program = jax.make_jaxpr(run)(arrays, jax.ShapeDtypeStruct((64,), jnp.float32))
    launches = [equation.params["launch"] for equation in program.eqns if equation.primitive is launch_p]
    return [[place for place, _ in launch.aliases] for launch in launches]


def test_gradients_are_written_in_place_of_logits_of_their_dtype() -> None:
    matrices, all_three = (
        {"hidden": True, "weight": True, "bias": False},
        dict.fromkeys(("hidden", "weight", "bias"), True),
    )
    assert updated("float32", matrices) == updated("float32", all_three) == [[0]]
    assert updated("bfloat16", matrices) == updated("float16", matrices) == [[]]
    assert updated("bfloat16", all_three) == [[0]]  # what the gradient of the bias is summed from


def test_logits_that_are_used_again_stay_as_they_are(registry: Any) -> None:
    """XLA may find that the program multiplies the same arrays again."""
    call = call_of("float32", bias=False, reduction="sum").arguments
    arrays = {name: jnp.asarray(call[name]) for name in ("hidden", "weight", "labels")}

    @jax.jit
    def both(hidden: Any, weight: Any) -> Any:
        def loss(h: Any, w: Any) -> Any:
            run = lambda: registry.call(f"{OP}_sum", h, w, arrays["labels"], backend="triton")
            return run() + 3 * run()

        logits = jax.lax.dot(hidden, weight, precision="highest", preferred_element_type=jnp.float32)
        return logits, jax.value_and_grad(loss, (0, 1))(hidden, weight), logits.max()

    logits, (value, gradients), largest = both(arrays["hidden"], arrays["weight"])
    expected = np.asarray(call["hidden"], np.float64) @ np.asarray(call["weight"], np.float64)
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    np.testing.assert_allclose(largest, expected.max(), atol=1e-5)
    plain = RandomCall({**call, "reduction": "sum"}, np.float32(4), None)
    plain.arguments.pop("token_weights")
    right, right_gradients, _ = random_calls.expected(plain)
    np.testing.assert_allclose(value, 4 * right["loss"], rtol=1e-5)
    for own, name in zip(gradients, ("hidden", "weight"), strict=True):
        np.testing.assert_allclose(own, right_gradients[name], rtol=1e-4, atol=1e-5)


# -- what is compiled --------------------------------------------------------------------------------------------------


def arrays_of(rows: int, vocab: int, dtype: str, bias: bool) -> dict[str, Any]:
    shapes = {"hidden": ((rows, 64), dtype), "weight": ((64, vocab), dtype), "labels": ((rows,), "int32")}
    shapes |= {"bias": ((vocab,), dtype)} if bias else {}
    return {name: jax.ShapeDtypeStruct(shape, jnp.dtype(own)) for name, (shape, own) in shapes.items()}


def compiled(reduction: str, dtype: str, vocab: int = 128_256, bias: bool = False, **options: Any) -> list[Compiled]:
    """The kernels of a loss and its gradients on a card, inside of ``jit``."""
    op = OP if reduction == "none" else f"{OP}_sum"
    options |= {} if reduction == "none" else {"reduction": reduction}

    def gradients(arrays: Any) -> Any:
        labels = arrays.pop("labels")
        loss = lambda a: ejkernel_core.call(op, **a, labels=labels, **options, backend="triton").sum()
        return jax.jit(jax.value_and_grad(loss))(arrays)

    return compiled_for(H200, gradients, arrays_of(8192, vocab, dtype, bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"bias": True, **EVERYTHING}], ids=["plain", "everything"])
def test_the_heuristics_configurations_spill_nothing(options: Any, dtype: str) -> None:
    (kernel,) = compiled("mean", dtype, **options)
    assert kernel.grid == (256, 1, 1)
    assert kernel.spilled == 0
    assert ".local" not in kernel.ptx
    assert kernel.registers <= 64
    if not options:  # tiles stay in the threads that load them: only the reductions of a row go through shared memory
        assert kernel.shared_memory <= 256
        assert kernel.count("st.global.v4.b32") >= 1
        assert kernel.count("bar.sync") <= 10  # in Triton 3.8 four to six


def test_none_has_a_launch_in_each_direction() -> None:
    forward, differentiated = compiled("none", "bfloat16")
    assert (forward.grid, differentiated.grid) == ((1024, 1, 1), (256, 1, 1))
    assert forward.spilled == differentiated.spilled == 0


@pytest.mark.parametrize("vocab", [1, 50_257])
def test_rows_without_alignment_are_compiled(vocab: int) -> None:
    (kernel,) = compiled("sum", "bfloat16", vocab)
    assert kernel.spilled == 0


def test_a_program_for_a_card_updates_the_logits() -> None:
    """The custom call has the alias, inside of a loop and of a gradient."""
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    def run(hidden: Any, weight: Any, labels: Any) -> Any:
        return jax.grad(lambda h: ejkernel_core.call(f"{OP}_sum", h, weight, labels, backend="triton"))(hidden)

    shapes = arrays_of(8192, 128_256, "float32", bias=False)
    with use_abstract_mesh(AbstractMesh((1,), ("_",), abstract_device=AbstractDevice(H200, None, "gpu"))):
        lowered = jax.jit(run).trace(*shapes.values()).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert "stablehlo.while" in text
    assert text.count("#stablehlo.output_operand_alias<") == text.count("triton_kernel_call") == 1


# -- configurations ----------------------------------------------------------------------------------------------------


def on_card(op: str, vocab: int, rows: int = 64, dtype: str = "bfloat16", bias: bool = False) -> Any:
    inv = ejkernel_core.invocation(op, **arrays_of(rows, vocab, dtype, bias))
    return attrs.evolve(inv, platform="gpu", device_kind=H200, compute_capability=(9, 0))


@pytest.mark.parametrize(
    ("vocab", "rows", "cfg"),
    [
        (128_256, 8192, Config(1024, 8192, 16, 264)),
        (32_000, 32768, Config(4096, 8192, 16, 264)),
        (700, 128, Config(128, 512, 1, 264)),
        (1, 1, Config(1, 512, 1, 264)),
    ],
)
def test_programs_fill_the_card(vocab: int, rows: int, cfg: Config) -> None:
    assert total.heuristic_cfg(inv=on_card(f"{OP}_sum", vocab, rows)) == cfg
    # Without gradients they are read once.
    assert by_row.heuristic_cfg(inv=on_card(OP, vocab, rows)) == attrs.evolve(cfg, programs=0)
    # With a bias a thread has fewer columns.
    with_bias = total.heuristic_cfg(inv=on_card(f"{OP}_sum", vocab, rows, bias=True))
    assert with_bias == attrs.evolve(cfg, block=cfg.block // 2)


def test_the_configurations_are_around_the_heuristic() -> None:
    offered = [attrs.astuple(cfg) for cfg in total.config_space(inv=on_card(f"{OP}_sum", 128_256, 8192, bias=True))]
    rows = [(count, 4096, 16, 264) for count in (1024, 512, 2048, 4096)]
    shapes = [(1024, 2048, 8, 264), (1024, 8192, 32, 264), *((1024, 4096, 16, count) for count in (0, 132, 66))]
    assert offered == rows + shapes


def test_programs_have_equally_many_rows() -> None:
    assert [_launch._programs(rows, most) for rows, most in ((1024, 66), (1024, 0), (7, 264), (100, 99))] == [
        64,
        1024,
        7,
        50,
    ]


def test_what_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"up to 16 columns; 8192 in 8 warps are 32"):
        total.check_cfg(inv=on_card(f"{OP}_sum", 128), cfg=Config(64, 8192, 8))
    for extreme in (Config(rows=2**21), Config(programs=2**21)):
        with pytest.raises(Unsupported, match="up to 1048576 rows"):
            total.check_cfg(inv=on_card(f"{OP}_sum", 128), cfg=extreme)
    with jax.enable_x64(True), pytest.raises(Unsupported, match=r"take float16, bfloat16, float32; hidden is float64"):
        by_row.heuristic_cfg(inv=on_card(OP, 128, dtype="float64"))
