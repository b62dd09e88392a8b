"""``moe_route`` against NumPy in float64: its scores, ties, numbers that are not finite, and its gradient."""

from __future__ import annotations

import itertools
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_core
from ejkernel_core.extend import ScopeChange, abstract_call
from ejkernel_ops import moe_combine, moe_route

RNG = np.random.default_rng(5)
TOKENS, EXPERTS, K = 17, 12, 3
BACKENDS = ("reference", "xla")
#: In place of -inf, where a group's scores are added up.
LOWEST = -1e200


def softmax(x: np.ndarray) -> np.ndarray:
    exponentials = np.exp(x - x.max())
    return exponentials / exponentials.sum()


def expected(
    logits: np.ndarray, score: str, bias: np.ndarray | None, groups: tuple[int, int] | None, renormalize: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The weights and the experts, token by token, each expert after those that are better or as good and before it."""
    weights, experts = np.zeros((len(logits), K)), np.zeros((len(logits), K), int)
    for token, row in enumerate(logits):
        scores = {"softmax": softmax(row), "sigmoid": 1 / (1 + np.exp(-row)), "softmax_after": row}[score]
        compared = scores if bias is None else scores + bias
        is_outside = np.zeros(EXPERTS, bool)
        if groups is not None:
            count, chosen = groups
            parts = np.sort(compared.reshape(count, -1), -1)[:, -(1 if bias is None else 2) :]
            # One number that is finite is more than none.
            of_groups = [(part.max() == -np.inf, -np.maximum(part, LOWEST).sum()) for part in parts]
            best = sorted(range(count), key=lambda group: (*of_groups[group], group))[:chosen]
            is_outside = ~np.isin(np.arange(EXPERTS) // (EXPERTS // count), best)
        order = sorted(range(EXPERTS), key=lambda expert: (is_outside[expert], -compared[expert], expert))[:K]
        own = softmax(scores[order]) if score == "softmax_after" else scores[order]
        is_divided = renormalize and score != "softmax_after"
        weights[token], experts[token] = own / own.sum() if is_divided else own, order
    return weights, experts


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "softmax_after"])
def test_values(score: str, backend: str) -> None:
    logits = RNG.standard_normal((TOKENS, EXPERTS))
    bias = RNG.standard_normal(EXPERTS)
    for own_bias, groups, renormalize in itertools.product((None, bias), (None, (4, 2)), (True, False)):
        arrays = {"router_logits": logits} | ({} if own_bias is None else {"expert_bias": own_bias})
        options: dict[str, Any] = {"score": score, "renormalize": renormalize, "scaling_factor": 2.5}
        if groups is not None:
            options |= dict(zip(("num_groups", "group_topk"), groups, strict=True))
        with jax.enable_x64(True):
            routes = moe_route(k=K, **{name: jnp.asarray(a) for name, a in arrays.items()}, **options, backend=backend)
        weights, experts = expected(logits, score, own_bias, groups, renormalize)
        np.testing.assert_array_equal(routes.experts, experts)
        np.testing.assert_allclose(routes.weights, 2.5 * weights, rtol=1e-12)
        np.testing.assert_array_equal(routes.group_sizes, np.bincount(experts.reshape(-1), minlength=EXPERTS))
        np.testing.assert_array_equal(routes.token_order, np.argsort(experts.reshape(-1), kind="stable"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "softmax_after"])
def test_no_expert_of_another_group_is_chosen(score: str, backend: str) -> None:
    """Not even where the best groups have too few experts with a finite score: a bias of -inf disables one."""
    logits = RNG.standard_normal((40, EXPERTS))
    if score == "softmax_after":
        logits[RNG.random(logits.shape) < 0.4] = -np.inf
        logits[:, 0] = 1.0
    for share in (0.3, 0.7):
        bias = np.where(RNG.random(EXPERTS) < share, -np.inf, RNG.standard_normal(EXPERTS))
        bias[0] = 0.0
        with jax.enable_x64(True):
            routes = moe_route(
                jnp.asarray(logits), K, score=score, expert_bias=jnp.asarray(bias), num_groups=4, group_topk=1,
                backend=backend,
            )  # fmt: skip
        weights, experts = expected(logits, score, bias, (4, 1), renormalize=True)
        np.testing.assert_array_equal(routes.experts, experts)
        np.testing.assert_allclose(routes.weights, weights, rtol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_lowest_scores_of_a_group_are_more_than_none(backend: str) -> None:
    lowest = np.finfo(np.float32).min
    options: dict[str, Any] = {"score": "softmax_after", "num_groups": 2, "group_topk": 1, "backend": backend}
    for logits in ([-np.inf, -np.inf, lowest, lowest], [-np.inf, -np.inf, lowest, -np.inf]):
        routes = moe_route(jnp.array([logits]), 1, expert_bias=jnp.zeros(4), **options)
        assert routes.experts.tolist() == [[2]]
        assert routes.weights.tolist() == [[1]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_zeros_of_both_signs_are_equal(backend: str) -> None:
    zeros = jnp.array([[-0.0, 0.0, -0.0, 0.0]])
    for score in ("softmax_after", "softmax", "sigmoid"):
        assert moe_route(zeros, 2, score=score, backend=backend).experts.tolist() == [[0, 1]]
    grouped = moe_route(
        jnp.array([[-0.0, -0.0, 0.0, 0.0]]), 1, score="softmax_after", num_groups=2, group_topk=1, backend=backend
    )
    assert grouped.experts.tolist() == [[0]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("score", "weights", "experts"),
    [
        ("softmax", [[1, 0], [0.5, 0.5], [0, 0]], [[1, 0], [0, 3], [0, 1]]),
        ("softmax_after", [[1, 0], [0.5, 0.5], [0, 0]], [[1, 3], [0, 3], [0, 1]]),
        ("sigmoid", [[0.5317, 0.4683], [0.5, 0.5], [0, 0]], [[1, 3], [0, 3], [0, 1]]),
    ],
)
def test_numbers_that_are_not_finite(score: str, weights: Any, experts: Any, backend: str) -> None:
    """inf counts as the largest number and NaN as -inf; without another logit all weights are 0."""
    inf, nan = np.inf, np.nan
    logits = jnp.array([[0, inf, 1, 2], [inf, 5, nan, inf], [nan, -inf, nan, -inf]])

    def weighted(logits: jax.Array) -> jax.Array:
        return (moe_route(logits, 2, score=score, backend=backend).weights * jnp.array([1.0, 3.0])).sum()

    routes = moe_route(logits, 2, score=score, backend=backend)
    np.testing.assert_allclose(routes.weights, weights, atol=1e-4)
    assert routes.experts.tolist() == experts
    assert np.isfinite(jax.grad(weighted)(logits)).all()


def test_the_backward_that_is_described_is_the_one_that_runs() -> None:
    """Results that are integers have no cotangents, so that a record of the one is found for the other."""
    logits, recorded = jax.ShapeDtypeStruct((8, 4), "float32"), []
    record = lambda inv, plugins: recorded.append(inv)
    with ScopeChange(lambda scope: attrs.evolve(scope, listeners=(record,), state="recording")):
        jax.jit(jax.grad(lambda logits: (moe_route(logits, 2).weights ** 2).sum())).lower(logits)
    call = abstract_call(ejkernel_core.registry, "moe_route", (logits, 2), {})
    backward, avals = call.backward()
    assert backward.invocation(avals, call.target).key in [inv.key for inv in recorded if inv.op == "moe_route_bwd"]


def test_weights_without_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="weights: k must be at least 1; got 0"):
        moe_combine(jnp.zeros((0, 4)), jnp.zeros(0, int), jnp.zeros((3, 0)))


def test_strict_promotion_of_a_program_is_not_that_of_kernels() -> None:
    logits = jnp.asarray(RNG.standard_normal((6, 4)), jnp.float16)
    loss = lambda logits: moe_route(logits, 2, expert_bias=jnp.zeros(4), backend="xla").weights[:, 0].sum()
    right = jax.grad(loss)(logits)
    jax.clear_caches()
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        np.testing.assert_array_equal(jax.grad(loss)(logits), right)
