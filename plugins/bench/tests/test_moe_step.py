"""The training step with experts at tiny sizes: the model by value, and what the suite finds. No time is judged."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_bench import _losses, _moe_model, _profile, moe_step
from ejkernel_bench._moe_model import Size
from ejkernel_bench._timing import Times
from ejkernel_bench.moe_step import JAX, OURS, SMALL, TOKAMAX, Contender, Figures, Run

ARMS = {OURS: moe_step.by_ejkernel, JAX: moe_step.by_jax}
TINY = attrs.evolve(SMALL, layers=1, length=8)


def drawn(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


# -- the model ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_a_wide_product_have_the_dtype_of_the_operands(dtype):
    x, matrix = drawn(2, 7, 24).astype(dtype), drawn(3, 24, 40).astype(dtype)
    out, pull_back = jax.vjp(_losses.wide_product, x, matrix)
    assert out.dtype == jnp.float32
    d_out = drawn(4, 7, 40)
    d_x, d_matrix = pull_back(d_out)
    assert d_x.dtype == d_matrix.dtype == dtype
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    exact = [np.asarray(array, np.float64) for array in (x, matrix, d_out)]
    for value, expected in (
        (out, exact[0] @ exact[1]),
        (d_x, exact[2] @ exact[1].T),
        (d_matrix, exact[0].T @ exact[2]),
    ):
        distance = np.linalg.norm(np.asarray(value, np.float64) - expected)
        assert distance <= tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize("name", ARMS)
def test_experts_are_the_weighted_sum_of_the_chosen_ones(name):
    layer = _moe_model.parameters_of(TINY, jax.random.key(0))["layers"][0]
    x = drawn(1, TINY.tokens, TINY.dim)
    out = _moe_model.experts(ARMS[name](), TINY, layer, x)
    router, up, down = (np.asarray(layer[key], np.float64) for key in ("router", "up", "down"))
    rows = np.asarray(x, np.float64)
    scores = np.exp(rows @ router)
    for token in range(TINY.tokens):
        chosen = np.argsort(-scores[token])[: TINY.chosen]
        total = 0
        for expert in chosen:
            gate, value = np.split(rows[token] @ up[expert], 2)
            total += scores[token, expert] * ((gate / (1 + np.exp(-gate)) * value) @ down[expert])
        np.testing.assert_allclose(out[token], total / scores[token, chosen].sum(), rtol=2e-4, atol=2e-5)


def test_pairs_are_rotated_by_angles_of_their_position():
    x = drawn(0, 2, 5, 3, 8)
    numbers = np.asarray(x[..., :4], np.float64) + 1j * np.asarray(x[..., 4:], np.float64)
    turned = numbers * np.exp(1j * np.arange(5)[:, None, None] * 1e6 ** (-np.arange(4) / 4))
    np.testing.assert_allclose(
        _moe_model.rotated(x), np.concatenate([turned.real, turned.imag], -1), rtol=1e-4, atol=1e-5
    )


def test_the_loss_in_chunks_is_that_of_all_rows():
    x, matrix = drawn(0, TINY.tokens, TINY.dim), drawn(1, TINY.dim, TINY.vocabulary)
    labels = jax.random.randint(jax.random.key(2), (TINY.tokens,), 0, TINY.vocabulary)

    def whole(x, matrix):
        return -jax.nn.log_softmax(x @ matrix)[jnp.arange(TINY.tokens), labels].mean()

    actual = jax.value_and_grad(lambda x, matrix: _losses.mean_in_chunks(x, matrix, labels, 4), (0, 1))(x, matrix)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), actual, jax.value_and_grad(whole, (0, 1))(x, matrix)
    )


def test_steps_of_adam():
    parameter, first, second = np.array([1.0, -2.0]), np.zeros(2), np.zeros(2)
    actual = (jnp.asarray(parameter, jnp.float32), jnp.zeros(2), jnp.zeros(2))
    for count, gradient in enumerate(np.array([[0.5, -3.0], [-0.25, 1.0]]), 1):
        actual = _moe_model.adam(jnp.float32(count), actual[0], jnp.asarray(gradient, jnp.float32), *actual[1:])
        first, second = 0.9 * first + 0.1 * gradient, 0.95 * second + 0.05 * gradient**2
        parameter = parameter - 1e-4 * (first / (1 - 0.9**count)) / (np.sqrt(second / (1 - 0.95**count)) + 1e-8)
    for result, right in zip(actual, (parameter, first, second), strict=True):
        np.testing.assert_allclose(result, right, rtol=1e-6)


@pytest.mark.long
def test_a_step_changes_every_parameter_and_lowers_the_loss():
    arm, tokens = moe_step.by_jax(), _moe_model.tokens_of(TINY, jax.random.key(1))
    start = _moe_model.state_of(_moe_model.parameters_of(TINY, jax.random.key(0)))
    step = jax.jit(partial(_moe_model.training_step, arm, TINY))
    state, losses = start, []
    for _ in range(3):
        state, loss = step(state, tokens)
        losses.append(float(loss))
    assert losses[0] > losses[1] > losses[2]
    assert int(state["count"]) == 3
    assert jax.tree.structure(state) == jax.tree.structure(start)
    for before, after in zip(jax.tree.leaves(start["parameters"]), jax.tree.leaves(state["parameters"]), strict=True):
        assert float(jnp.abs(after - before).max()) > 0


def test_the_work_of_a_layer():
    matrices = 2048 * 4096 * 2 + 2 * 2048 * 512 + 2048 * 128 + 8 * 3 * 2048 * 768
    attention = 4 * 32 * 4096**2 * 128  # two products of 2 x length^2 x dim, of which half are not masked, times three
    assert Size(3).layer_flops() == 3 * 6 * (4 * 4096 * matrices + attention)
    assert sum(int(np.prod(shape)) for shape in Size(1).layer_shapes().values()) == 623_120_640


# -- comparing ---------------------------------------------------------------------------------------------------------


def run_with(**arms):
    run = Run("full", 1, 16)
    run.contenders.update({name: Contender(arm) for name, arm in arms.items()})
    return run


def test_equal_arms_are_compared_and_timed():
    run = run_with(**{name: arm() for name, arm in ARMS.items()})
    report = run.measure(TINY)
    assert report.faults == ()
    times, figures, comparison = report.tables
    assert times.columns == ("", OURS, "range", JAX, "range")
    assert times.rows[0][0] == "a step"
    assert [row[0] for row in figures.rows] == [row[0] for row in comparison.rows] == [OURS, JAX]
    assert figures.rows[1][1] == pytest.approx(times.rows[0][3] / times.rows[0][1])
    assert all(row[-2] > 0 for row in figures.rows)
    assert comparison.rows[1][3] < 1e-4


def test_a_wrong_arm_is_found_and_a_failing_one_is_told():
    arm = moe_step.by_jax()

    def fails(rows, matrices, sizes):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    is_wrong = attrs.evolve(arm, combine=lambda made, order, weights: 1.02 * arm.combine(made, order, weights))
    run = run_with(**{OURS: arm, JAX: is_wrong, TOKAMAX: attrs.evolve(arm, product=fails)})
    table = run.compare(TINY)
    assert [row[0] for row in table.rows] == [OURS, JAX]
    assert any(fault.startswith(f"{JAX}: its gradient of ") for fault in run.faults)
    assert list(run.absences) == [(TOKAMAX, "RuntimeError: RESOURCE_EXHAUSTED: out of memory")]
    assert {*run.contenders} == {OURS, JAX}


def test_a_gradient_that_is_no_number_is_the_worst():
    run = run_with()
    right = (jnp.float32(2.0), {"a": jnp.ones(3), "b": jnp.ones(3)})
    wrong = (jnp.float32(2.0), {"a": jnp.full(3, 9.0), "b": jnp.array([1.0, jnp.nan, 1.0])})
    assert run._compared("it", TINY, wrong, right)[-1] == "['b']"
    assert run.faults == ["it: its gradient of ['b'] is nan from ours"]


def test_the_largest_batch_that_fits_is_chosen(monkeypatch):
    plans = {(4, 4096): None, (2, 4096): 200, (1, 4096): 90}
    monkeypatch.setattr(moe_step, "memory_limit", lambda: 100)
    monkeypatch.setattr(moe_step, "planned_bytes", lambda compiled: compiled.bytes)
    monkeypatch.setattr(moe_step, "_start", lambda size: (None, None))

    class Compiled:
        def __init__(self, size):
            self.bytes = plans[size.batch, size.length]

        def __call__(self, state, tokens):
            return jnp.zeros(())

    def compiled(self, name, size):
        if plans[size.batch, size.length] is None:
            raise RuntimeError("the compiler is out of memory")
        return Compiled(size)

    monkeypatch.setattr(Run, "compiled", compiled)
    run = run_with()
    assert run.largest(JAX, moe_step.BATCHES) == Size(2, 1, 4096)
    reasons = dict(run.absences)
    assert "out of memory" in reasons[f"{JAX}, 4 x 4096 tokens"]
    assert "its plan takes" in reasons[f"{JAX}, 2 x 4096 tokens"]


def test_layers_are_fewer_where_the_plan_is_too_large(monkeypatch):
    monkeypatch.setattr(moe_step, "memory_limit", lambda: 100)
    monkeypatch.setattr(moe_step, "planned_bytes", lambda step: 20 + 12 * step)
    attempts = []

    def compiled(self, name, size):
        attempts.append(size.layers)
        return size.layers

    monkeypatch.setattr(Run, "compiled", compiled)
    size, steps = run_with(**{OURS: None})._steps(Size(9))
    assert (size.layers, steps, attempts) == (6, {OURS: 6}, [9, 6])  # 128 of 97; six layers take 92


# -- figures and profiles ----------------------------------------------------------------------------------------------


def test_the_share_of_the_product_rate_and_the_bars():
    times = {OURS: Times([0.5, 0.6, 0.7]), JAX: Times([1.5]), TOKAMAX: Times([0.7])}
    memory, peaks = dict.fromkeys(times, 2**31), {OURS: 2**30, JAX: None}
    measured = moe_step.Measured(Size(2), times, memory, peaks, rate=8e14)
    figures = Figures(measured, dict.fromkeys(times, Times([0.1])))
    share = Size(2).layer_flops() / 0.5 / 8e14
    assert figures.share(OURS) == pytest.approx(share)
    assert figures.table().rows[0] == (OURS, 1.0, pytest.approx(share * 800), pytest.approx(share), 100.0, 2.0, 1.0)
    assert figures.table().rows[1][-2:] == (2.0, "-")
    full = {bar.name: (bar.measured, bar.is_held) for bar in figures.bars(is_full=True)}
    assert full == {
        "a step: over tokamax": (pytest.approx(0.7 / 0.6), False),
        "the layers: of the product rate": (pytest.approx(share), False),
    }
    (bar,) = figures.bars(is_full=False)
    assert (bar.name, bar.measured, bar.is_held) == (f"a step: over {JAX}", pytest.approx(2.5), False)
    slow = attrs.evolve(figures, rest={**figures.rest, OURS: Times([0.9])})
    assert slow.share(OURS) is None
    others = (pytest.approx(1400), 0.0, pytest.approx(600), 0.0)
    assert slow.times_table().rows[1] == ("its layers", "-", "-", *others)


def event(name, duration, **stats):
    return SimpleNamespace(name=name, duration_ns=duration, stats=list(stats.items()))


def test_kernels_belong_to_the_parts_of_their_instructions():
    text = """
      %fusion.1 = f32[] fusion(), metadata={op_name="jit(step)/jvp(part_norm)/mul"}
      ROOT gemm.2 = f32[] custom-call(), metadata={op_name="jit(s)/transpose(jvp(part_x))/part_experts/dot"}
      %again = f32[] dot(), metadata={op_name="jit(s)/transpose(jvp())/checkpoint/rematted_computation/part_experts/d"}
      %other = f32[] add(), metadata={op_name="jit(step)/apart_from/add"}
    """
    kernels = [
        event("fusion_1", 2_000_000),
        event("sm90_gemm", 5_000_000, hlo_module="jit_step", hlo_op="gemm.2"),
        event("nvjet", 1_000_000, hlo_op="again"),
        event("other", 500_000),
        event("MemcpyD2D", 3_000_000),
    ]
    streams = [SimpleNamespace(name="Stream #7", events=kernels), SimpleNamespace(name="XLA Ops", events=kernels)]
    planes = [SimpleNamespace(name="/device:GPU:0", lines=streams), SimpleNamespace(name="/host:CPU", lines=streams)]
    seconds, unknown = _profile.seconds_by_part(SimpleNamespace(planes=planes), text, calls=2)
    assert seconds == pytest.approx(
        {
            ("norm", "forward"): 1e-3,
            ("experts", "backward"): 2.5e-3,
            ("experts", "again"): 5e-4,
            ("others", "forward"): 1.75e-3,
        }
    )
    assert unknown == ["MemcpyD2D", "other"]
    notes: list[str] = []
    (table,) = moe_step._parts_table(Size(2), {OURS: (seconds, unknown), JAX: ({}, [])}, notes)
    labels = {row[0]: row[1] for row in table.rows}
    assert labels["all kernels"] == pytest.approx(5.75)
    assert {*labels} == {"all kernels", "norm", "experts, backward", "experts, again", "others"}
    assert notes == [f"{OURS}: the longest kernels of no part: MemcpyD2D, other"]


@pytest.mark.long
def test_all_parts_of_the_model_are_in_the_compiled_text():
    arm = moe_step.by_ejkernel(backend="xla")  # the rows are in order, which is a part of its own
    parameters, tokens = (
        _moe_model.parameters_of(TINY, jax.random.key(0)),
        _moe_model.tokens_of(TINY, jax.random.key(1)),
    )
    state = _moe_model.state_of(parameters)
    text = jax.jit(partial(_moe_model.training_step, arm, TINY)).lower(state, tokens).compile().as_text()
    labels = {*_profile.labels_in(text).values()}
    parts = {"norm", "projections", "rotation", "attention", "router", "experts", "activation", "combine"}
    assert {(name, "backward") for name in parts} <= labels
    assert {"permute", "adam", "embedding"} <= {name for name, _ in labels}
    assert ("head", "forward") in labels  # with its gradients
    assert ("experts", "again") in labels
    assert ("attention", "again") not in labels


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_command_writes_and_draws_all_arms(ejkernel, tmp_path):
    data, picture = tmp_path / "report.json", tmp_path / "step.svg"
    words = ("--part", "ragged_dot", "--small", "--rounds", "3", "--json", str(data), "--picture", str(picture))
    code, output, _ = ejkernel("bench", "moe-step", *words)
    assert code == 0
    assert f"a step: {OURS}" in output
    (report,) = json.loads(data.read_text())
    assert report["tables"][0]["series"][:2] == [OURS, JAX]
    assert JAX in picture.read_text()


def test_without_an_accelerator_it_says_what_to_do():
    assert "--small measures on the CPU" in moe_step.run().text
