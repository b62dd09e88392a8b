"""The lines of the page of the loss for programs that come from other libraries: beside NumPy in float64, and beside
the other libraries where they are installed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_core import UnknownBackend
from tests.pages import functions_of

pytest.importorskip("optax", reason="the page imports it")

PAGE = Path(__file__).parents[3] / "docs" / "operations" / "fused_linear_cross_entropy.md"
LINES = functions_of(PAGE)
ROWS, DIM, VOCAB = 37, 24, 131
close = partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6)

Function = Callable[..., Any]


def arrays() -> tuple[Any, Any, Any]:
    """Hidden states, labels at both ends of the vocabulary and between, and the weight."""
    rng = np.random.default_rng(7)
    hidden, weight = rng.standard_normal((ROWS, DIM)), rng.standard_normal((DIM, VOCAB)) / 3
    labels = rng.integers(0, VOCAB, ROWS)
    labels[:2] = 0, VOCAB - 1
    return jnp.asarray(hidden, jnp.float32), jnp.asarray(labels), jnp.asarray(weight, jnp.float32)


def in_float64(
    hidden: Any, labels: Any, weight: Any, d_loss: Any, d_lse: Any = 0.0, cap: float | None = None
) -> tuple[np.ndarray, ...]:
    """Losses, lse and tokens of the rows, and the gradients of hidden and weight from the cotangents of each row."""
    hidden, weight = np.asarray(hidden, np.float64), np.asarray(weight, np.float64)
    raw = hidden @ weight
    logits = raw if cap is None else cap * np.tanh(raw / cap)
    lse = np.log(np.exp(logits).sum(1))
    rows = np.arange(len(hidden))
    loss = lse - logits[rows, labels]
    probabilities = np.exp(logits - lse[:, None])
    is_label = np.arange(logits.shape[1]) == np.asarray(labels)[:, None]
    d_loss, d_lse = (np.broadcast_to(np.asarray(d, np.float64), loss.shape)[:, None] for d in (d_loss, d_lse))
    d_logits = d_loss * (probabilities - is_label) + d_lse * probabilities
    if cap is not None:
        d_logits = d_logits * (1 - (logits / cap) ** 2)
    return loss, lse, logits.argmax(1), d_logits @ weight.T, hidden.T @ d_logits


def gradients(loss: Function, *of: Any) -> Any:
    return jax.grad(loss, tuple(range(len(of))))(*of)


def assert_equal(actual: Any, expected: Any) -> None:
    for one, other in zip(actual, expected, strict=True):
        close(one, other)


# -- optax -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_optax(dtype: str) -> None:
    """The lines before and after, with labels of the page in their scope; and of each row."""
    optax = LINES["optax"]
    hidden, labels, weight = arrays()
    hidden, weight = hidden.astype(dtype), weight.astype(dtype)
    before, after = (LINES[name] for name in ("loss_of_logits", "loss_without_logits"))
    before.__globals__["labels"] = labels
    # Gradients of a mean have the size of 1 / ROWS; those in bfloat16 are rounded elsewhere.
    limit = {"float32": 1e-5, "bfloat16": 2e-2}[dtype]
    for value, expected in zip(
        (after(hidden, weight), *gradients(after, hidden, weight)),
        (before(hidden, weight), *gradients(before, hidden, weight)),
        strict=True,
    ):
        distance = np.asarray(value, np.float64) - np.asarray(expected, np.float64)
        assert np.linalg.norm(distance) <= limit * np.linalg.norm(np.asarray(expected, np.float64))
    if dtype == "float32":
        per_row = LINES["fused_linear_cross_entropy"](hidden, weight, labels, reduction="none")
        close(per_row, optax.softmax_cross_entropy_with_integer_labels(hidden @ weight, labels))


# -- levanter ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("return_argmax", [False, True])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_levanter(cap: float | None, return_argmax: bool) -> None:
    """As its API calls an entry: all arguments by name, a z-loss from the lse, and weights of the rows."""
    hidden, labels, weight = arrays()
    weights = jnp.linspace(0.0, 2.0, ROWS)

    def results(x: Any, w: Any) -> Any:
        options = {"block_sizes": object(), "dtype": jnp.float32, "logit_soft_cap": cap, "precision": None}
        options |= {"return_argmax": True} if return_argmax else {}
        return LINES["loss_for_levanter"](x, labels, w, **options)

    def total(x: Any, w: Any) -> Any:
        loss, lse, *_ = results(x, w)
        return ((loss + 0.1 * lse**2) * weights).sum()

    loss, lse, *tokens = results(hidden, weight)
    _, right_lse, *_ = in_float64(hidden, labels, weight, 0.0, 0.0, cap)
    expected = in_float64(hidden, labels, weight, weights, 0.2 * right_lse * np.asarray(weights), cap)
    assert_equal((loss, lse), expected[:2])
    assert loss.dtype == lse.dtype == jnp.float32
    assert len(tokens) == return_argmax
    if return_argmax:
        np.testing.assert_array_equal(tokens[0], expected[2])
    assert_equal(gradients(total, hidden, weight), expected[3:])


@pytest.mark.parametrize("dtype", [None, "float32", np.float32, jnp.float32])
def test_levanter_has_logits_of_float32(dtype: Any) -> None:
    hidden, labels, weight = arrays()
    loss, _ = LINES["loss_for_levanter"](hidden, labels, weight, dtype=dtype)
    close(loss, in_float64(hidden, labels, weight, 0.0)[0])
    with pytest.raises(NotImplementedError, match="^dtype: logits are float32 here; got bfloat16"):
        LINES["loss_for_levanter"](hidden, labels, weight, dtype="bfloat16")


@pytest.mark.parametrize("cap", [None, 2.0])
def test_the_api_of_levanter(cap: float | None) -> None:
    peer = pytest.importorskip("levanter.kernels.pallas.fused_cross_entropy_loss.api")
    hidden, labels, weight = arrays()
    options = {"logsumexp_weight": 0.1, "logit_soft_cap": cap, "return_argmax": True}

    def loss(implementation: Any) -> Function:
        call = partial(peer.fused_cross_entropy_loss_and_logsumexp_penalty, implementation=implementation, **options)
        return lambda x, w: call(x, labels, w)

    ours, theirs = loss([LINES["loss_for_levanter"]]), loss("reference")
    assert_equal(ours(hidden, weight), theirs(hidden, weight))
    first = lambda function: lambda *of: function(*of)[0]
    assert_equal(gradients(first(ours), hidden, weight), gradients(first(theirs), hidden, weight))


# -- tokamax -----------------------------------------------------------------------------------------------------------

COTANGENTS: dict[str, Any] = {"sum": 1.0, "mean": 1 / ROWS, "none": np.linspace(-1.0, 2.0, ROWS)}


@pytest.mark.parametrize("implementation", [None, "xla", "reference"])
@pytest.mark.parametrize("reduction", COTANGENTS)
def test_tokamax(reduction: str, implementation: str | None) -> None:
    hidden, labels, weight = arrays()
    call = partial(LINES["linear_softmax_cross_entropy_loss"], reduction=reduction, implementation=implementation)
    cotangent = COTANGENTS[reduction]
    loss, _, _, *right = in_float64(hidden, labels, weight, cotangent)
    close(call(hidden, labels, weight), {"sum": loss.sum(), "mean": loss.mean(), "none": loss}[reduction])
    scale = jnp.asarray(cotangent) if reduction == "none" else 1.0
    assert_equal(gradients(lambda x, w: (call(x, labels, w) * scale).sum(), hidden, weight), right)


def test_tokamax_reduces_to_a_sum_by_default() -> None:
    hidden, labels, weight = arrays()
    call = LINES["linear_softmax_cross_entropy_loss"]
    close(call(hidden, labels, weight), in_float64(hidden, labels, weight, 1.0)[0].sum())
    with pytest.raises(NotImplementedError, match="^precision: "):
        call(hidden, labels, weight, precision="highest")
    with pytest.raises(UnknownBackend, match="mosaic_tpu"):
        call(hidden, labels, weight, implementation="mosaic_tpu")


@pytest.mark.parametrize("implementation", ["xla", "chunked_xla"])
@pytest.mark.parametrize("reduction", COTANGENTS)
def test_the_loss_of_tokamax(reduction: str, implementation: str) -> None:
    peer = pytest.importorskip("tokamax._src.ops.linear_softmax_cross_entropy_loss.api", reason="tokamax is not there")
    pytest.importorskip("absl.flags").FLAGS.mark_as_parsed()
    rng = np.random.default_rng(9)  # its chunks are of 128 and more
    hidden, weight = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((256, 128), (128, 512)))
    labels = jnp.asarray(rng.integers(0, 512, 256))
    scale = jnp.asarray(rng.standard_normal(256)) if reduction == "none" else 1.0

    def results(call: Function) -> Any:
        loss = lambda x, w: (call(x, labels, w, reduction=reduction) * scale).sum()
        return call(hidden, labels, weight, reduction=reduction), *gradients(loss, hidden, weight)

    theirs = partial(peer.linear_softmax_cross_entropy_loss, implementation=implementation)
    for actual, expected in zip(results(LINES["linear_softmax_cross_entropy_loss"]), results(theirs), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


# -- MaxText -----------------------------------------------------------------------------------------------------------


def test_maxtext() -> None:
    """Segments of 0 have no part in the sums or the gradients, whatever their targets are."""
    hidden, labels, weight = arrays()
    segments = jnp.asarray(np.arange(ROWS) % 5)
    data = {"targets": labels, "targets_segmentation": segments}
    call = lambda x, w: LINES["vocab_tiling_loss"](x, w, data, z_loss=0.01)
    counts = np.asarray(segments) != 0
    loss, lse, *_ = in_float64(hidden, labels, weight, 0.0)
    total, total_z_loss = call(hidden, weight)
    close(total_z_loss, 0.01 * (lse[counts] ** 2).sum())
    close(total, loss[counts].sum() + 0.01 * (lse[counts] ** 2).sum())
    right = in_float64(hidden, labels, weight, counts, 0.02 * lse * counts)[3:]
    assert_equal(gradients(lambda *of: call(*of)[0], hidden, weight), right)
    # The sum of the z-losses is for the log: it has no gradient, and costs no product.
    assert_equal(gradients(lambda *of: sum(call(*of)), hidden, weight), right)
    text = jax.jit(jax.grad(lambda *of: sum(call(*of)), (0, 1))).lower(hidden, weight).as_text()
    assert text.count("stablehlo.dot_general") == 3
