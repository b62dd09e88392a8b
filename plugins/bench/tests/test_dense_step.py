"""The dense training step at a tiny size: the model by value, and what the suite finds. No time is judged."""

from __future__ import annotations

import json
from functools import partial

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_bench import _moe_model, _profile, dense_step, moe_step
from ejkernel_bench._report import ABSENT
from ejkernel_bench._timing import Times
from ejkernel_bench.dense_step import JAX, OURS, SMALL, DenseRun, DenseSize, StepFigures
from ejkernel_bench.moe_step import Measured

ARMS = {OURS: dense_step.by_ejkernel, JAX: dense_step.by_jax}
TINY = attrs.evolve(SMALL, layers=1, length=8, chunk=8)


def inputs(size=TINY):
    return _moe_model.parameters_of(size, jax.random.key(0)), _moe_model.tokens_of(size, jax.random.key(1))


# -- the model, in float64 ---------------------------------------------------------------------------------------------


def normed(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def rotated(x):
    half = x.shape[-1] // 2
    numbers = x[..., :half] + 1j * x[..., half:]
    turned = numbers * np.exp(1j * np.arange(x.shape[1])[:, None, None] * 5e5 ** (-np.arange(half) / half))
    return np.concatenate([turned.real, turned.imag], -1)


def attended(query, key, value):
    group = query.shape[2] // key.shape[2]
    key, value = (array.repeat(group, axis=2) for array in (key, value))
    logits = np.einsum("bthd,bshd->bhts", query, key) / np.sqrt(query.shape[-1])
    weights = np.where(np.tri(query.shape[1], dtype=bool), np.exp(logits), 0)
    return np.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), value)


def in_float64(size, parameters, tokens):
    """The mean loss."""
    tokens = np.asarray(tokens)
    x = parameters["embedding"][tokens[:, :-1]]
    for layer in parameters["layers"]:
        qkv = (normed(x, layer["norm_1"]) @ layer["qkv"]).reshape(*x.shape[:2], -1, size.head_dim)
        query, key, value = np.split(qkv, (size.heads, size.heads + size.kv_heads), axis=2)
        x = x + attended(rotated(query), rotated(key), value).reshape(*x.shape[:2], -1) @ layer["out"]
        gate, up = np.split(normed(x, layer["norm_2"]) @ layer["up"], 2, axis=-1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["down"]
    logits = normed(x, parameters["norm"]) @ parameters["head"]
    lse = np.log(np.exp(logits).sum(-1))
    return (lse - np.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]).mean()


@pytest.mark.parametrize("name", ARMS)
def test_the_loss_and_its_derivative(name):
    """Along the gradient itself and along a random direction, beside differences of the loss in float64."""
    parameters, tokens = inputs()
    value, gradients = jax.value_and_grad(partial(_moe_model.loss, ARMS[name](), TINY))(parameters, tokens)
    wide = jax.tree.map(lambda array: np.asarray(array, np.float64), parameters)
    gradients = jax.tree.map(lambda array: np.asarray(array, np.float64), gradients)
    np.testing.assert_allclose(value, in_float64(TINY, wide, tokens), rtol=1e-5)
    rng = np.random.default_rng(0)
    for draw in (lambda array: array, lambda array: rng.standard_normal(array.shape) * np.abs(array).mean()):
        direction = unit(jax.tree.map(draw, gradients))
        ahead, behind = (in_float64(TINY, moved(wide, direction, step), tokens) for step in (1e-4, -1e-4))
        slope = sum((g * d).sum() for g, d in zip(*map(jax.tree.leaves, (gradients, direction)), strict=True))
        np.testing.assert_allclose(slope, (ahead - behind) / 2e-4, rtol=1e-3, atol=1e-4)


def unit(direction):
    size = np.sqrt(sum((array**2).sum() for array in jax.tree.leaves(direction)))
    return jax.tree.map(lambda array: array / size, direction)


def moved(parameters, direction, step):
    return jax.tree.map(lambda parameter, along: parameter + step * along, parameters, direction)


def test_the_arms_have_equal_losses_and_gradients():
    parameters, tokens = inputs(SMALL)
    ours, other = (
        jax.value_and_grad(partial(_moe_model.loss, arm(), SMALL))(parameters, tokens) for arm in ARMS.values()
    )
    np.testing.assert_allclose(ours[0], other[0], rtol=1e-6)
    for (path, one), right in zip(jax.tree_util.tree_leaves_with_path(ours[1]), jax.tree.leaves(other[1]), strict=True):
        assert np.linalg.norm(one - right) <= 1e-5 * np.linalg.norm(right), path


def test_the_sizes_and_the_work_of_llama():
    size = DenseSize(32)
    parameters = {**size.layer_shapes(), **size.other_shapes()}
    count = {name: int(np.prod(shape)) for name, shape in parameters.items()}
    layer = sum(count[name] for name in size.layer_shapes())
    assert layer == 2 * 4096 + 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336
    assert 32 * layer + count["embedding"] + count["head"] + 4096 == 8_030_261_248  # those of Llama-3.1-8B
    forward = 4 * 4 * 32 * 4096**2 * 128 / 2  # two products, of which half are not masked
    assert size.step_flops() == 6 * (32 * layer + count["head"]) * 16384 + 3.5 * 32 * forward


# -- the suite ---------------------------------------------------------------------------------------------------------


def run_with(**arms):
    run = DenseRun("dense-step", 1, 16, gradient_limits=dense_step.GRADIENT_LIMITS)
    for name, arm in arms.items():
        run.add(name, arm)
    return run


def test_equal_arms_are_compared_and_timed():
    report = run_with(**ARMS).measure(TINY)
    assert report.faults == ()
    times, figures, comparison = report.tables
    assert times.columns == ("", OURS, "range", JAX, "range")
    assert [row[0] for row in times.rows] == ["a step"]
    assert [row[0] for row in figures.rows] == [row[0] for row in comparison.rows] == [OURS, JAX]
    assert comparison.rows[1][3] < 1e-5
    assert all(row[-2] > 0 for row in figures.rows)
    assert [bar.name for bar in report.bars] == ["a step: of the product rate", f"a step: over {JAX}"]


def test_a_wrong_arm_is_found():
    def wrong():
        arm = dense_step.by_jax()
        return attrs.evolve(arm, loss=lambda x, matrix, labels, chunk: 1.01 * arm.loss(x, matrix, labels, chunk))

    run = run_with(**{OURS: dense_step.by_ejkernel, JAX: wrong})
    run.compare(TINY)
    assert run.faults[0].startswith(f"{JAX}: its loss is ")
    assert run.faults[1].startswith(f"{JAX}: its gradient of ")


def test_the_share_of_the_product_rate_and_the_bars():
    times = {OURS: Times([0.5, 0.6, 0.7]), JAX: Times([0.7])}
    peaks = {OURS: 3 * 2**30, JAX: None}
    figures = StepFigures(Measured(DenseSize(2), times, dict.fromkeys(times, 2**31), peaks, rate=4e14), {})
    share = DenseSize(2).step_flops() / 0.6 / 4e14
    assert figures.table().rows[0] == (OURS, 1.0, pytest.approx(share * 400), pytest.approx(share), 2.0, 3.0)
    assert figures.table().rows[1][-2:] == (2.0, ABSENT)
    held = {bar.name: (bar.measured, bar.is_held) for bar in figures.bars(is_full=True)}
    assert held == {
        "a step: of the product rate": (pytest.approx(share), share >= 0.6),
        f"a step: over {JAX}": (pytest.approx(0.7 / 0.6), True),
    }


def test_peaks_of_steps_come_in_the_order_of_the_plans(monkeypatch):
    """By a device that only tells the most until now."""
    most, order, needs = [10], [], {"a": 50, "b": 40, "c": 30}

    class Training:
        def run_to_end(self, name):
            order.append(name)
            most[0] = max(most[0], needs[name])
            return name

    monkeypatch.setattr(moe_step, "peak_bytes", lambda: most[0])
    steps = dict.fromkeys(needs)
    peaks = run_with()._first_steps(Training(), steps, {"a": 3, "b": 1, "c": 2})
    assert order == ["b", "c", "a"]
    assert peaks == {"b": 40, "c": None, "a": 50}


def test_layers_are_as_many_as_fit_and_no_more_than_the_model_has(monkeypatch):
    for limit, layers in ((0.93 * 80e9, 17), (0.93 * 300e9, 32), (None, 4)):
        monkeypatch.setattr(dense_step, "memory_limit", lambda limit=limit: limit)
        assert dense_step.full_size(quick=False) == DenseSize(layers)
        assert dense_step.full_size(quick=True) == DenseSize(4)


@pytest.mark.long
def test_all_parts_of_the_model_are_in_the_compiled_text():
    parameters, tokens = inputs()
    step = jax.jit(partial(_moe_model.training_step, dense_step.by_ejkernel(), TINY))
    labels = {*_profile.labels_in(step.lower(_moe_model.state_of(parameters), tokens).compile().as_text()).values()}
    parts = {"norm", "projections", "rotation", "attention", "feed_forward", "activation"}
    assert {(name, "backward") for name in parts} <= labels
    assert {"adam", "embedding", "head"} <= {name for name, _ in labels}
    assert ("feed_forward", "again") in labels
    assert ("attention", "again") not in labels


@pytest.mark.long
def test_a_step_lowers_the_loss_and_both_arms_train_alike():
    losses = {}
    for name, arm in ARMS.items():
        parameters, tokens = inputs()
        state, values = _moe_model.state_of(parameters), []
        step = jax.jit(partial(_moe_model.training_step, arm(), TINY))
        for _ in range(5):
            state, value = step(state, tokens)
            values.append(float(value))
        losses[name] = values
    assert losses[OURS] == sorted(losses[OURS], reverse=True)
    np.testing.assert_allclose(losses[OURS], losses[JAX], rtol=1e-5)
    assert all(isinstance(leaf, jnp.ndarray) for leaf in jax.tree.leaves(state))


@pytest.mark.long
def test_the_command_writes_and_draws_both_arms(ejkernel, tmp_path):
    data, picture = tmp_path / "report.json", tmp_path / "step.svg"
    words = ("--small", "--rounds", "3", "--json", str(data), "--picture", str(picture))
    code, output, _ = ejkernel("bench", "dense-step", *words)
    assert code == 0
    assert f"a step: {OURS}" in output
    (report,) = json.loads(data.read_text())
    assert report["tables"][0]["series"] == [OURS, JAX]
    assert f" {JAX} " in picture.read_text()


def test_without_an_accelerator_it_says_what_to_do():
    assert "--small measures on the CPU" in dense_step.run().text
