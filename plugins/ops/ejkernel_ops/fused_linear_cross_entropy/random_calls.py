"""Random calls of the loss over all of its options, and a proof of a kernel on them: `check`.

Values and gradients are compared with those of `expected`, which is NumPy in float64, by formulas of its own. Rows
whose label is ignored are NaN in half of the calls that do not return the lse.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

import ejkernel_ops

Arguments = dict[str, Any]

IGNORED = -100
#: By dtype: the largest error of a gradient, as a part of the largest number of the array, or of 1.
TOLERANCES = {"float64": 1e-10, "float32": 3e-5, "float16": 4e-3, "bfloat16": 2e-2}
SHAPES = ((1,), (0,), (2, 3), (37,), (4, 1, 9), (130,))
DIMS = (1, 2, 16, 40, 130)
VOCABULARIES = (1, 2, 3, 31, 128, 257, 1000, 2000)
DIFFERENTIABLE = ("hidden", "weight", "bias", "token_weights")


@attrs.frozen
class RandomCall:
    """A call, and the cotangents of its results."""

    arguments: Arguments
    d_loss: Any
    d_lse: Any


# -- the proof -----------------------------------------------------------------------------------------------------


def check(
    seed: int,
    *,
    dtype: str = "float32",
    vocabularies: tuple[int, ...] = VOCABULARIES,
    dims: tuple[int, ...] = DIMS,
    has_gradients: bool = True,
    **options: Any,
) -> None:
    """Raise AssertionError unless a kernel has the right values and, if they are computed, the right gradients for the
    random call ``seed``. ``options`` are those of every call, such as ``backend`` or a ``registry``.
    """
    with jax.enable_x64(dtype == "float64"):
        call = random_call(seed, dtype, vocabularies, dims)
        values, gradients = outcome(call, **options) if has_gradients else (results(call, **options), {})
    right_values, right_gradients, terms = expected(call)
    for name, right in right_values.items():
        compare(f"random call {seed}: {name}", values[name], right, min(TOLERANCES[dtype], TOLERANCES["float32"]), 1.0)
    assert gradients.keys() == (right_gradients.keys() if has_gradients else set())
    for name, gradient in gradients.items():
        right = right_gradients[name]
        # Where the cap is reached, a slope of 0 is rounded to a unit in the last place.
        beside = terms if name == "token_weights" else 2e-2
        compare(f"random call {seed}: gradient of {name}", gradient, right, TOLERANCES[dtype], beside)


def outcome(call: RandomCall, **options: Any) -> tuple[Arguments, Arguments]:
    """The results of a call, and the gradients of all of its arrays that have one."""
    names = [name for name in DIFFERENTIABLE if name in call.arguments]
    has_lse = call.arguments.get("return_lse", False)

    def run(arrays: Arguments) -> tuple[Any, ...]:
        results = _call(**{**call.arguments, **arrays}, **options)
        return results if has_lse else (results,)

    results, pullback = jax.vjp(jax.jit(run), {name: jnp.asarray(call.arguments[name]) for name in names})
    cotangents = (call.d_loss, call.d_lse)
    (gradients,) = pullback(tuple(jnp.asarray(c, r.dtype) for c, r in zip(cotangents, results, strict=False)))
    return dict(zip(("loss", "lse"), results, strict=False)), gradients


def results(call: RandomCall, **options: Any) -> Arguments:
    """The results of a call that is not differentiated."""
    values = jax.jit(lambda: _call(**call.arguments, **options))()
    return dict(zip(("loss", "lse"), values if call.arguments.get("return_lse") else (values,), strict=False))


def _call(registry: Any = None, **call: Any) -> Any:
    """The results of a call, by the kernels of a registry."""
    if registry is None:
        return ejkernel_ops.fused_linear_cross_entropy(**call)
    reduction = call.pop("reduction")
    if reduction == "none":
        return registry.call("fused_linear_cross_entropy", **call)
    return registry.call("fused_linear_cross_entropy_sum", **call, reduction=reduction)


def compare(name: str, array: Any, right: np.ndarray, tolerance: float, beside: float) -> None:
    """``beside``: the least number that an error is a part of."""
    actual = np.asarray(array, np.float64)
    is_finite = np.isfinite(right)
    assert actual.shape == right.shape, f"{name}: {actual.shape}, not {right.shape}"
    assert np.array_equal(actual[~is_finite], right[~is_finite], equal_nan=True), f"{name}: infinities elsewhere"
    largest = max(beside, np.abs(right[is_finite]).max(initial=0))
    error = np.abs(actual[is_finite] - right[is_finite]).max(initial=0)
    assert error <= tolerance * largest, f"{name}: an error of {error:.3g} beside numbers up to {largest:.3g}"


# -- calls -----------------------------------------------------------------------------------------------------------


def random_call(
    seed: int, dtype: str, vocabularies: tuple[int, ...] = VOCABULARIES, dims: tuple[int, ...] = DIMS
) -> RandomCall:
    """A call with any of the options, whose arrays are NumPy's in this dtype."""
    rng = np.random.default_rng([52, seed])
    shape = SHAPES[rng.integers(len(SHAPES))]
    dim, vocab = int(rng.choice(dims)), int(rng.choice(vocabularies))
    scale = float(rng.choice([0.3, 2.0, 2.0, 20.0]))
    arrays: Arguments = {
        "hidden": rng.standard_normal((*shape, dim)),
        "weight": rng.standard_normal((dim, vocab)) * scale / np.sqrt(dim),
    }
    call: Arguments = {"labels": _labels(rng, shape, vocab), "reduction": str(rng.choice(["mean", "sum", "none"]))}
    if rng.random() < 0.5:
        arrays["bias"] = rng.standard_normal(vocab)
        if rng.random() < 0.3 and vocab > 2:
            arrays["bias"][rng.integers(vocab)] = -np.inf
    if rng.random() < 0.5:
        arrays["token_weights"] = np.abs(rng.standard_normal(shape)) * (rng.random(shape) < 0.8)
    arrays = {name: np.asarray(array, jnp.dtype(dtype)) for name, array in arrays.items()}
    if "token_weights" in arrays and rng.random() < 0.5 and dtype != "float64":
        arrays["token_weights"] = arrays["token_weights"].astype(np.float32)
    call |= _options(rng, vocab) | arrays
    if rng.random() < 0.5:
        call |= {"weight": np.ascontiguousarray(arrays["weight"].T), "transpose_weight": True}
    return _with_cotangents(rng, call, shape)


def _labels(rng: np.random.Generator, shape: tuple[int, ...], vocab: int) -> np.ndarray:
    labels = rng.integers(0, vocab, shape, dtype=np.int32)
    flat, kind = labels.reshape(-1), rng.choice(["none", "some", "ends", "all"], p=[0.3, 0.4, 0.2, 0.1])
    if kind == "some":
        flat[rng.random(flat.size) < 0.3] = IGNORED
    elif kind == "ends" and flat.size:
        flat[0] = flat[-1] = IGNORED
    elif kind == "all":
        flat[:] = IGNORED
    return labels


def _options(rng: np.random.Generator, vocab: int) -> Arguments:
    options: Arguments = {}
    if rng.random() < 0.3:
        options["logits_soft_cap"] = float(rng.choice([0.7, 5.0, 30.0]))
    if rng.random() < 0.3:
        options["z_loss"] = float(rng.choice([1e-4, 1e-2]))
    if rng.random() < 0.2:
        options["label_smoothing"] = float(rng.choice([0.1, 0.9]))
    if rng.random() < 0.2:
        options["ignore_index"] = int(rng.integers(vocab))
    if rng.random() < 0.2:
        options["vocab_start"] = np.int32(rng.integers(0, vocab))
    return options


def _with_cotangents(rng: np.random.Generator, call: Arguments, shape: tuple[int, ...]) -> RandomCall:
    has_lse = rng.random() < 0.4
    if has_lse:
        call["return_lse"] = True
    if "bias" in call and np.isinf(call["bias"].astype(np.float64)).any():
        call.pop("label_smoothing", None)  # the mean of the logits would be -inf
    is_ignored = call["labels"] == call.setdefault("ignore_index", IGNORED)
    if not has_lse and rng.random() < 0.5:
        call["hidden"] = np.where(is_ignored[..., None], np.nan, call["hidden"]).astype(call["hidden"].dtype)
    d_loss = np.float32(rng.standard_normal(shape if call["reduction"] == "none" else ()))
    return RandomCall(call, d_loss, np.float32(rng.standard_normal(shape)) if has_lse else None)


# -- the results in float64 ------------------------------------------------------------------------------------------


@np.errstate(invalid="ignore")  # a weight of 0 times an infinite loss
def expected(call: RandomCall) -> tuple[Arguments, Arguments, float]:
    """The results, the gradients, and the largest of the terms that cancel in the gradient of the weights of a mean."""
    a = {name: _wide(value) for name, value in call.arguments.items()}
    counts = a["labels"].reshape(-1) != a["ignore_index"]
    hidden = a["hidden"].reshape(-1, a["hidden"].shape[-1])
    matrix = a["weight"].T if a.get("transpose_weight") else a["weight"]
    loss, lse, d_x = _rows(a, np.where(np.isnan(hidden), 0, hidden), matrix, counts)
    weights = np.where(counts, a.get("token_weights", np.ones(a["labels"].shape)).reshape(-1), 0)
    factor = 1 / weights.sum() if a["reduction"] == "mean" and weights.sum() else float(a["reduction"] != "mean")
    total = factor * (weights * loss).sum()
    d_rows = np.broadcast_to(np.asarray(call.d_loss, np.float64).reshape(-1), counts.shape) * factor
    d_weights = d_rows * loss
    terms = np.abs(d_weights[np.isfinite(d_weights)]).max(initial=1e-3)
    if a["reduction"] == "mean" and weights.sum():
        d_weights = d_weights - np.float64(call.d_loss) * total * factor
    d_logits = d_x((d_rows * weights), None if call.d_lse is None else np.asarray(call.d_lse, np.float64).reshape(-1))
    clean = np.where(np.isnan(hidden), 0, hidden)
    d_matrix = clean.T @ d_logits
    gradients = {
        "hidden": (d_logits @ matrix.T).reshape(a["hidden"].shape),
        "weight": d_matrix.T if a.get("transpose_weight") else d_matrix,
        "bias": d_logits.sum(0),
        "token_weights": np.where(counts, d_weights, 0).reshape(a["labels"].shape),
    }
    shape = a["labels"].shape
    values = {"loss": (weights * loss).reshape(shape) if a["reduction"] == "none" else np.asarray(total)}
    values |= {"lse": lse.reshape(shape)} if a.get("return_lse") else {}
    return values, {name: gradients[name] for name in DIFFERENTIABLE if name in a}, float(terms)


def _wide(value: Any) -> Any:
    is_float = isinstance(value, np.ndarray) and not np.issubdtype(value.dtype, np.integer)
    return value.astype(np.float64) if is_float else value


def _rows(a: Mapping[str, Any], hidden: np.ndarray, matrix: np.ndarray, counts: np.ndarray) -> tuple[Any, Any, Any]:
    """The loss and the lse of each row, and a function from their cotangents to those of the logits."""
    raw, cap = hidden @ matrix + a.get("bias", 0.0), a.get("logits_soft_cap")
    logits = raw if cap is None else cap * np.tanh(raw / cap)
    vocab, s, z = logits.shape[1], a.get("label_smoothing", 0.0), a.get("z_loss", 0.0)
    top = logits.max(1, keepdims=True)
    lse = (top + np.log(np.exp(logits - top).sum(1, keepdims=True)))[:, 0]
    p = np.exp(logits - lse[:, None])
    column = a["labels"].reshape(-1).astype(np.int64) - int(a.get("vocab_start", 0))
    is_label = (np.arange(vocab) == column[:, None]) & counts[:, None]
    own = np.where(is_label, logits, 0).sum(1)
    loss = (1 - s) * (lse - own) + z * lse**2
    loss = loss + s * (lse - logits.mean(1)) if s else loss
    slope = 1.0 if cap is None else 1 - np.tanh(raw / cap) ** 2

    def d_logits(d_loss: np.ndarray, d_lse: np.ndarray | None) -> np.ndarray:
        of_lse = d_loss * (1 + 2 * z * lse) + (0 if d_lse is None else d_lse)
        gradient = p * of_lse[:, None] - ((1 - s) * is_label + s / vocab) * d_loss[:, None]
        return np.asarray(gradient * slope)

    return np.where(counts, loss, 0), lse, d_logits
