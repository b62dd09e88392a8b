"""A backward operation is measured on the results of its forward, for any operation: here one of a stranger, written
as docs/writing-an-operation.md says.
"""

from __future__ import annotations

import gc
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_core
from ejkernel_core import Axes, Operation, Registry, Unsupported, hookimpl, policy_override
from ejkernel_core.extend import current_scope
from ejkernel_tuning import _forward, autotune, autotune_recorded, load_invocations, recording, save_invocations
from ejkernel_tuning._samples import sample_inputs

LOGITS = jax.random.normal(jax.random.key(3), (5, 7, 30))
LABELS = jax.random.randint(jax.random.key(4), (5, 7), 0, 30)

# -- the operation -----------------------------------------------------------------------------------------------------


def signature(logits, labels, *, label_smoothing=0.0): ...


def prepare(arguments: Any) -> Any:
    return arguments, lambda results: results[0]


def softmax_cross_entropy(**fields: Any) -> Operation:
    axes = Axes(
        {"logits": "... classes", "labels": "..."},
        {"loss": "...", "lse": "..."},
        independent="...",
        whole="classes",
        vmap="...",
        counts="...",
        positive="classes",
        statistics="lse",
    )
    return Operation(
        name="softmax_cross_entropy",
        signature=signature,
        axes=axes,
        differentiable=("logits",),
        prepare=prepare,
        backward="softmax_cross_entropy_bwd",
        **fields,
    )


def targets(inv: Any) -> Any:
    """The share of each class in the labels."""
    classes, smoothing = inv["logits"].shape[-1], inv["label_smoothing"]
    return jax.nn.one_hot(inv["labels"], classes) * (1 - smoothing) + smoothing / classes


def losses(inv: Any) -> Any:
    lse = jax.nn.logsumexp(inv["logits"], -1)
    return lse - (inv["logits"] * targets(inv)).sum(-1), lse


def slowed(x: Any) -> Any:
    """``x``, after so much work that any other kernel is faster."""
    large = jnp.full((20_000,), x.ravel()[0])
    return x + 0 * jax.lax.fori_loop(0, 300, lambda _, large: jnp.sin(large) * 1e-3, large).sum()


# -- its kernels -------------------------------------------------------------------------------------------------------


@attrs.frozen
class Config:
    #: What the gradient is multiplied by, which is right for 1.
    factor: float = 1.0


def kernel(run: Any, rank: int = 0, **members: Any) -> SimpleNamespace:
    @hookimpl
    def run_backend(inv, cfg):
        return run(inv) if cfg is None else tuple(cfg.factor * result for result in run(inv))

    return SimpleNamespace(PLATFORMS={"cpu": rank}, run_backend=run_backend, **members)


def with_factors(*factors: float) -> dict[str, Any]:
    """The members of a kernel with these configurations; the first is the heuristic's."""
    configs = [Config(factor) for factor in factors]
    return {
        "Config": Config,
        "heuristic_cfg": hookimpl(lambda inv: configs[0]),
        "config_space": hookimpl(lambda inv: configs),
    }


def gradient_by_lse(inv: Any) -> Any:
    """From the logarithm that the forward has saved, which is what a fast kernel does."""
    softmax = jnp.exp(inv["logits"] - inv["lse"][..., None])
    return ((softmax - targets(inv)) * inv["d_loss"][..., None],)


def wrong_lse(inv: Any) -> Any:
    loss, lse = losses(inv)
    return loss, lse + 1


def make_registry(*factors: float, **fields: Any) -> Registry:
    """The operation with a slow reference, a kernel, and a backward kernel with these configurations."""
    registry, operation = Registry(plugins="ejkernel-tuning"), softmax_cross_entropy(**fields)
    registry.register(operation)
    registry.register(operation.gradients())
    registry.register(kernel(losses), "softmax_cross_entropy.reference")
    registry.register(kernel(losses, 10), "softmax_cross_entropy.plain")
    by_jax = kernel(lambda inv: operation.gradients_by_jax(losses, {**inv, "logits": slowed(inv["logits"])}))
    registry.register(by_jax, "softmax_cross_entropy_bwd.reference")
    by_lse = kernel(gradient_by_lse, 10, **with_factors(*(factors or (1.0,))))
    registry.register(by_lse, "softmax_cross_entropy_bwd.by_lse")
    return registry


def gradient(registry: Registry, logits: Any = LOGITS) -> Any:
    return jax.jit(jax.grad(lambda x: (registry.call("softmax_cross_entropy", x, LABELS) ** 2).sum()))(logits)


def backward_plan(registry: Registry) -> Any:
    return registry.explain("softmax_cross_entropy", LOGITS, LABELS).backward.plan


# -- tuned, explained and chosen ---------------------------------------------------------------------------------------


def tune_on_miss(registry: Registry) -> None:
    with policy_override(autotune=True, budget_s=30):
        gradient(registry)


def tune_recorded(registry: Registry) -> None:
    with recording() as invocations:
        gradient(registry)
    autotune_recorded(invocations, budget_s=30)


def tune_by_hand(registry: Registry) -> None:
    autotune("softmax_cross_entropy", LOGITS, LABELS, direction="both", budget_s=60)


@pytest.mark.parametrize("tune", [tune_on_miss, tune_recorded, tune_by_hand])
def test_a_kernel_that_uses_what_the_forward_saved_is_right_and_chosen(tune: Any, use_registry: Any) -> None:
    registry = make_registry(1.0, 1.1)
    use_registry(registry)
    tune(registry)
    plan = backward_plan(registry)
    assert (plan.kernel.backend, plan.cfg, plan.origin) == ("by_lse", Config(1.0), "memory")
    tried = dict(plan.choice.record.provenance.tried)
    assert {text for text, outcome in tried.items() if isinstance(outcome, str)} == {"by_lse Config(factor=1.1)"}
    assert tried["by_lse Config(factor=1.1)"].startswith("wrong: the result is off by 0.1 of the largest value")
    expected = jax.grad(lambda x: (losses({"logits": x, "labels": LABELS, "label_smoothing": 0.0})[0] ** 2).sum())
    np.testing.assert_allclose(gradient(registry), expected(LOGITS), rtol=1e-4, atol=1e-5)


def test_an_explanation_tells_wrong_from_slow() -> None:
    registry = make_registry(1.0, 1.1)
    registry.register(kernel(gradient_by_lse, 20, **with_factors(2.0, 3.0)), "softmax_cross_entropy_bwd.wrong")
    registry.register(kernel(fails, 5), "softmax_cross_entropy_bwd.fails")
    tune_recorded(registry)
    explanation = registry.explain("softmax_cross_entropy", LOGITS, LABELS)
    reasons = {v.name.partition(".")[2]: v.reason for v in explanation.backward.verdicts if v.status == "able"}
    assert reasons == {
        "fails": "excluded when it was measured, compiling raised ZeroDivisionError: no rows",
        "reference": "slower when it was measured",
        "wrong": "excluded when it was measured, wrong: the result is off by 1 of the largest value; 0.0001 is allowed",
    }
    assert f"wrong (registered at run time): able, {reasons['wrong']}" in str(explanation)


def test_calls_in_a_file_are_measured_on_the_results_of_their_forward(tmp_path: Path, use_registry: Any) -> None:
    use_registry(make_registry())
    with recording() as invocations:
        gradient(ejkernel_core.registry)
    save_invocations(tmp_path / "calls.json", invocations)
    forward, backward = load_invocations(tmp_path / "calls.json")
    check_residuals(backward)
    assert forward.registry is ejkernel_core.registry  # which makes the calls of a kernel that is made of others


# -- the results of the forward ----------------------------------------------------------------------------------------


def backward_invocation(registry: Registry) -> Any:
    return backward_plan(registry).invocation


def check_residuals(inv: Any) -> dict[str, Any]:
    """The samples of the backward, of which the results of the forward are right."""
    samples = sample_inputs(inv)
    loss, lse = losses({**inv.arguments, **samples})
    np.testing.assert_allclose(samples["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(samples["lse"], lse, rtol=1e-5)
    return samples


def test_the_samples_of_the_forward_are_those_of_its_backward() -> None:
    def samples(arguments: Any, key: Any) -> Any:
        labels = jnp.arange(35).reshape(arguments["labels"].shape) % 30
        return {**arguments, "logits": jax.random.uniform(key, arguments["logits"].shape) + 2, "labels": labels}

    drawn = check_residuals(backward_invocation(make_registry(samples=samples)))
    np.testing.assert_array_equal(drawn["labels"].ravel()[:3], [0, 1, 2])
    assert drawn["logits"].min() >= 2
    assert abs(float(drawn["d_loss"].std()) - 1) < 0.3


def test_given_arrays_are_used_as_they_are() -> None:
    inv = backward_invocation(make_registry())
    samples = sample_inputs(inv, {"logits": LOGITS, "labels": LABELS})
    assert samples["logits"] is LOGITS
    np.testing.assert_allclose(samples["lse"], jax.nn.logsumexp(LOGITS, -1), rtol=1e-5)
    assert sample_inputs(inv, samples).keys() == samples.keys()
    assert all(array is samples[name] for name, array in sample_inputs(inv, samples).items())


def counted(run: Any, runs: list[str], name: str) -> Any:
    def count(inv: Any) -> Any:
        jax.debug.callback(lambda: runs.append(name))
        return run(inv)

    return count


def fails(inv: Any) -> Any:
    raise ZeroDivisionError("no rows")


@pytest.mark.parametrize(
    ("others", "most_bytes", "expected_runs"),
    [
        ({}, 2**30, ["reference"]),
        ({"plain": losses}, 2**30, ["reference", "plain"]),
        # A reference that takes much memory does not run where there is another kernel.
        ({"plain": losses}, 0, ["plain"]),
        ({"fails": fails, "plain": losses}, 0, ["plain"]),
        ({"fails": fails}, 0, ["reference"]),
        ({"wrong": wrong_lse, "plain": losses}, 2**30, ["reference", "wrong", "plain"]),
        ({"wrong": wrong_lse}, 2**30, ["reference", "wrong"]),
    ],
)
def test_the_forward_runs_by_the_first_kernel_that_is_right(
    monkeypatch: pytest.MonkeyPatch, others: Any, most_bytes: int, expected_runs: list[str]
) -> None:
    monkeypatch.setattr(_forward, "CHECK_BYTES", most_bytes)
    registry, runs = make_registry(), []
    registry.register(kernel(counted(losses, runs, "reference")), "softmax_cross_entropy.reference")
    no_kernel = kernel(losses)
    no_kernel.PLATFORMS = {}
    registry.register(no_kernel, "softmax_cross_entropy.plain")
    for rank, name in enumerate(reversed(others), 1):
        registry.register(kernel(counted(others[name], runs, name), rank), f"softmax_cross_entropy.{name}")
    check_residuals(backward_invocation(registry))
    jax.effects_barrier()
    assert runs == expected_runs


def test_a_kernel_in_plain_jax_is_preferred_to_an_opaque_one() -> None:
    registry, runs = make_registry(), []
    registry.register(kernel(counted(losses, runs, "plain"), 10), "softmax_cross_entropy.plain")
    registry.register(kernel(counted(losses, runs, "opaque"), 90, OPAQUE=("cpu",)), "softmax_cross_entropy.opaque")
    check_residuals(backward_invocation(registry))
    jax.effects_barrier()
    assert runs == ["plain"]


def test_without_results_of_the_forward_nothing_is_measured() -> None:
    registry = make_registry()
    for name in ("plain", "reference"):
        registry.register(kernel(fails), f"softmax_cross_entropy.{name}")
    reason = (
        "there are no results of softmax_cross_entropy to measure with: softmax_cross_entropy.plain: running raised "
        "ZeroDivisionError: no rows; softmax_cross_entropy.reference: running raised ZeroDivisionError: no rows"
    )
    with pytest.raises(Unsupported, match=reason):
        sample_inputs(backward_invocation(registry))


def test_the_measurement_of_a_backward_keeps_no_arrays() -> None:
    registry, shape = make_registry(), (3, 29, 31)  # a shape that threads of other tests do not have
    count = lambda: sum(array.shape in (shape, shape[:-1]) for array in jax.live_arrays())
    x = jax.ShapeDtypeStruct(shape, "float32")
    registry.register(kernel(wrong_lse, 20), "softmax_cross_entropy.wrong")
    plan = registry.explain("softmax_cross_entropy", x, jax.ShapeDtypeStruct(shape[:-1], "int32")).backward.plan
    gc.collect()
    gc.disable()
    try:
        with policy_override(autotune=True, budget_s=30):
            registry.choose(plan.invocation, None, None, current_scope())
        until = time.monotonic() + 10
        while count() and time.monotonic() < until:
            time.sleep(0.01)  # a thread that has given its result may not have ended yet
        assert count() == 0
    finally:
        gc.enable()
    assert len(registry.memory) > 0


SHIPPED = {
    "rms_norm": {"x": (3, 40), "residual": (3, 40)},
    "layer_norm": {"x": (3, 40), "weight": (40,)},
    "moe_route": {"router_logits": (40, 8), "k": 2},
    "flash_attention": {"query": (24, 2, 8), "key": (24, 2, 8), "value": (24, 2, 8), "cum_seqlens_q": (4,)},
}


@pytest.mark.parametrize("op", SHIPPED)
def test_the_samples_of_our_operations_are_the_results_of_their_forwards(op: str) -> None:
    def struct(name: str, shape: Any) -> Any:
        dtype = "int32" if name.startswith("cum") else "float32"
        return jax.ShapeDtypeStruct(shape, dtype) if isinstance(shape, tuple) else shape

    arguments = {name: struct(name, shape) for name, shape in SHIPPED[op].items()}
    if "cum_seqlens_q" in arguments:
        arguments["cum_seqlens_k"] = arguments["cum_seqlens_q"]
    inv = ejkernel_core.explain(op, **arguments).backward.plan.invocation
    samples = sample_inputs(inv)
    forward = ejkernel_core.registry.forward_of(inv)
    reference = ejkernel_core.registry.kernel(op, "reference")
    call = attrs.evolve(inv, op=op, operation=forward).with_arrays(samples)
    for name, result in zip(forward.results, reference.run_backend(call, None), strict=True):
        np.testing.assert_allclose(samples[name], result, rtol=1e-4, atol=1e-5)
    others = [array for name, array in samples.items() if not name.startswith("d_")]
    for cotangent in (array for name, array in samples.items() if name.startswith("d_")):
        assert not any(cotangent.shape == array.shape and np.allclose(cotangent, array) for array in others)
