"""Random calls of the log-probabilities, and a proof of a kernel on them: `check`.

Values and gradients are compared with NumPy in float64, by formulas of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ejkernel_ops

#: By dtype: the largest error of a gradient, as a part of the largest number of the array.
TOLERANCES = {"float64": 1e-10, "float32": 3e-5, "float16": 4e-3, "bfloat16": 2e-2}
SHAPES = ((1,), (0,), (2, 3), (37,), (4, 1, 9))
DIMS, VOCABULARIES = (1, 2, 16, 130), (1, 2, 31, 257, 1500)


def check(
    seed: int,
    dtype: str,
    *,
    registry: Any = None,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    dims: Sequence[int] = DIMS,
    vocabularies: Sequence[int] = VOCABULARIES,
    **chosen: Any,
) -> None:
    """Raise AssertionError unless the random call ``seed`` has the right values and gradients. ``chosen`` has the
    ``backend`` and the ``cfg``, and ``registry`` the kernels, if they are not the installed ones.
    """
    rng = np.random.default_rng([54, seed])
    shape = shapes[int(rng.integers(len(shapes)))]
    dim, vocab = int(rng.choice(dims)), int(rng.choice(vocabularies))
    arrays = {"hidden": rng.standard_normal((*shape, dim)), "weight": rng.standard_normal((dim, vocab)) / dim**0.5}
    if rng.random() < 0.5:
        arrays["bias"] = rng.standard_normal(vocab)
        if vocab > 2 and rng.random() < 0.5:
            arrays["bias"][rng.integers(vocab)] = -np.inf
    labels = rng.integers(0, vocab, shape).astype(np.int32)
    labels[rng.random(shape) < 0.3] = -100
    if "bias" in arrays and np.isinf(arrays["bias"]).any():  # a label that cannot be has a log-probability of -inf
        labels[labels == int(np.argmin(arrays["bias"]))] = -100
    options: dict[str, Any] = {"temperature": float(rng.choice([1.0, 0.6, 3.0]))}
    if rng.random() < 0.3:
        options["logits_soft_cap"] = 2.0
    if rng.random() < 0.5:
        options["transpose_weight"], arrays["weight"] = True, arrays["weight"].T
    cotangents = rng.standard_normal(shape), rng.standard_normal(shape)
    with jax.enable_x64(dtype == "float64"):
        arrays = {name: jnp.asarray(array, dtype) for name, array in arrays.items()}

        def run(arrays: Any) -> Any:
            call = ejkernel_ops.linear_log_probs if registry is None else partial(registry.call, "linear_log_probs")
            return call(**arrays, labels=labels, return_entropy=True, **chosen, **options)

        results, pullback = jax.vjp(jax.jit(run), arrays)
        (gradients,) = pullback(tuple(jnp.asarray(ct, results[0].dtype) for ct in cotangents))
    exact = {name: np.asarray(array).astype(np.float64) for name, array in arrays.items()}
    right, right_gradients = expected(exact, labels, cotangents, **options)
    for actual, values in zip(results, right, strict=True):
        close(actual, values, min(TOLERANCES[dtype], 3e-5), 1.0)
    for name, gradient in gradients.items():
        # With one word a gradient is 0: what cancels is a number of the size of 1.
        close(gradient, right_gradients[name], TOLERANCES[dtype], 0.1)


def close(actual: Any, right: np.ndarray, tolerance: float, beside: float) -> None:
    largest = max(np.abs(right).max(initial=0), beside)
    np.testing.assert_allclose(np.asarray(actual, np.float64), right, atol=tolerance * largest, rtol=0)


def expected(
    arrays: Any,
    labels: np.ndarray,
    cotangents: Any,
    temperature: float,
    logits_soft_cap: float | None = None,
    transpose_weight: bool = False,
) -> Any:
    matrix = arrays["weight"].T if transpose_weight else arrays["weight"]
    hidden, column = arrays["hidden"].reshape(-1, matrix.shape[0]), labels.reshape(-1)
    raw, counts = hidden @ matrix + arrays.get("bias", 0.0), column != -100
    capped = raw if logits_soft_cap is None else logits_soft_cap * np.tanh(raw / logits_soft_cap)
    slope = 1.0 if logits_soft_cap is None else 1 - np.tanh(raw / logits_soft_cap) ** 2
    logits = capped / temperature
    log_p = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
    log_p = log_p - logits.max(1, keepdims=True)
    p, is_label = np.exp(log_p), (np.arange(logits.shape[1]) == column[:, None]) & counts[:, None]
    finite = np.where(p > 0, log_p, 0)
    entropy = -(p * finite).sum(1)
    of_label, of_entropy = (np.where(counts, ct.reshape(-1), 0)[:, None] for ct in cotangents)
    d_logits = (is_label - p) * of_label - p * (finite + entropy[:, None]) * of_entropy
    d_raw = np.where(counts[:, None], d_logits / temperature * slope, 0)
    d_matrix = hidden.T @ d_raw
    gradients = {"hidden": (d_raw @ matrix.T).reshape(arrays["hidden"].shape), "bias": d_raw.sum(0)}
    gradients["weight"] = d_matrix.T if transpose_weight else d_matrix
    log_probs = np.where(is_label, finite, 0).sum(1)
    return (log_probs.reshape(labels.shape), np.where(counts, entropy, 0).reshape(labels.shape)), gradients
