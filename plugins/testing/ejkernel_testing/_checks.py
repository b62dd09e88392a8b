"""The checks: each proves one property of one kernel on one example, by the operation's reference in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import numpy as np

from ejkernel_core import Example, Registry

from ._outcome import (
    REFERENCE,
    arguments,
    array_alone,
    backward_kernels,
    machine_epsilon,
    outcome_arrays,
    rounding_errors_of_gradients,
)

#: The relative error that is allowed in the dtypes with enough digits for one number to be right for all kernels.
TOLERANCE = {"float32": 2e-5, "float64": 1e-12}
#: In low precision the error of the reference, which rounds once, is the measure. A kernel's may be this many times
#: larger, because sums in another order round differently.
RESULT_FACTOR = 1.1
GRADIENT_FACTOR = 1.5
#: Gradients may also be off by this many units in the last place: a kernel computes them from the forward's rounded
#: result, unlike the reference, which is differentiated as a whole. This shows where a sum nearly cancels (0.65 at most
#: was measured, and float64 arithmetic on a rounded result has the same error).
GRADIENT_UNITS = 1.0
#: For gradients of at most this many entries, each of which is such a sum, units are not enough. Then the error may be
#: this many times the typical error that rounded results cause (1.4 was measured), up to a limit.
SMALL_SIZE, PROPAGATION_FACTOR, PROPAGATION_LIMIT = 64, 3.0, 0.05
#: The share of 8-bit results that may be rounded to a neighbour: in float32 they are halfway between the two.
EIGHT_BIT_TIES = 1e-3
#: How far a change may be from the reference's change, relative to that. In low precision both ends of it are rounded,
#: so it may be off by another half unit in the last place of each. A result in float32 may be made of numbers of fewer
#: digits, as a gradient is by rounded gradients of logits. So a change may also be off by PROPAGATION_FACTOR times what
#: the reference's own change in the dtype of the example is off by (1.0 was measured), up to PROPAGATION_LIMIT.
CHANGE_TOLERANCE = 1e-3


def values(registry: Registry, kernel: str, example: Example, roundings: float = 1.0) -> None:
    """Every result equals the reference's, to the precision of its dtype: infinite in the same places, without NaN.

    >>> from ejkernel_testing._double import double
    >>> registry, kernel, example = double()
    >>> values(registry, kernel, example)
    """
    _check_outcomes("values", registry, kernel, example, "result", roundings)


def zeros(registry: Registry, example: Example, results: Sequence[str]) -> list[str]:
    """Those of the results that are 0 everywhere on this example.

    >>> from ejkernel_testing._double import double
    >>> registry, _, example = double()
    >>> zeros(registry, example, ["out"])
    []
    """
    exact = outcome_arrays(registry, REFERENCE, example, is_float64=True)
    return [name for name in results if not np.any(exact[f"result {name}"])]


def gradients(
    registry: Registry, kernel: str, example: Example, roundings: float = 1.0, backward: str | None = None
) -> None:
    """Every gradient of a random weighted sum of all results equals the reference's. If ``backward`` names a kernel of
    the backward operation, this kernel computes them.

    >>> from ejkernel_testing._double import double
    >>> registry, kernel, example = double()
    >>> gradients(registry, kernel, example)
    """
    if backward is not None and example.wrt:
        source = _gradient_source(registry, kernel, example)
        assert source == backward, (
            f"gradients: {kernel} on {example.name}: the gradients are those of {source}; {backward} is declared"
        )
    _check_outcomes("gradients", registry, kernel, example, "gradient", roundings)


def needed(registry: Registry, kernel: str, example: Example, roundings: float = 1.0) -> None:
    """Each result is the same where no other is needed.

    >>> from ejkernel_testing._double import double
    >>> registry, kernel, example = double()
    >>> needed(registry, kernel, example)
    """
    exact = outcome_arrays(registry, REFERENCE, example, is_float64=True)
    for place, result in enumerate(registry.operation(example.op).results):
        name = f"result {result}"
        alone, expected = array_alone(registry, kernel.rpartition(".")[2], example, place), exact[name]
        tolerance = _tolerance(registry, example, name, expected, roundings)
        compare("needed", kernel, example, name, alone, expected, tolerance, lambda: "; no other result is needed")


def accumulation(registry: Registry, kernel: str, example: Example, roundings: float = 1.0) -> None:
    """Sums over long axes are as exact as those of the reference, which accumulates in float32.

    >>> from ejkernel_testing._double import double
    >>> registry, kernel, example = double()
    >>> accumulation(registry, kernel, example)
    """
    _check_outcomes("accumulation", registry, kernel, example, "result", roundings)
    _check_outcomes("accumulation", registry, kernel, example, "gradient", roundings)


def rows(registry: Registry, kernel: str, example: Example) -> None:
    """Where a result of the reference is exactly 0 or -inf, the kernel's is too: in fully masked rows, and in padding.

    >>> from ejkernel_testing._double import double
    >>> registry, kernel, example = double()
    >>> rows(registry, kernel, example)
    """
    actual, exact = _outcomes(registry, kernel, example)
    for name, expected in exact.items():
        if name.startswith("gradient"):  # the gradient of a row that sees one key is 0 too, but only by cancellation
            allowed_error = 100 * machine_epsilon(example.dtype)
            zero_rows = actual[name].astype(np.float64)[(expected == 0).all(axis=-1)]
            count = int((np.abs(zero_rows) > allowed_error).sum())
        else:
            is_checked = ((expected == 0) | np.isinf(expected)) & (expected.dtype.itemsize > 1)  # 8 bits round to 0
            count = int((actual[name].astype(np.float64)[is_checked] != expected[is_checked]).sum())
        assert not count, f"rows: {kernel} on {example.name}: {name} is not 0 or -inf in {count} places"


def sensitivity(registry: Registry, kernel: str, example: Example, variation: Example, roundings: float = 1.0) -> None:
    """If an argument is added or changed, results and gradients change as those of the reference do.

    ``roundings``: how many times the error of rounding the results to 16 bits is allowed.

    >>> from ejkernel_testing._double import double
    >>> registry, kernel, example = double()
    >>> twos = Example("twos", "double", lambda draw: {"x": np.full(8, 2.0)}, wrt=("x",))
    >>> sensitivity(registry, kernel, example, twos)
    """
    before, exact_before = _outcomes(registry, kernel, example)
    after, exact_after = _outcomes(registry, kernel, variation, example.name)
    for name in exact_before.keys() & exact_after.keys():
        change, expected = _change(after[name], before[name]), _change(exact_after[name], exact_before[name])
        error, tolerance = relative_error(change, expected), CHANGE_TOLERANCE
        if example.dtype not in TOLERANCE and np.any(expected):
            ends = exact_before[name], exact_after[name]
            size = sum(float(np.linalg.norm(end[np.isfinite(end)])) for end in ends)
            tolerance += roundings * machine_epsilon(before[name].dtype) / 2 * size / float(np.linalg.norm(expected))
            if error > tolerance:
                propagated = _reference_change_error(registry, example, variation, name, expected)  # takes a second
                tolerance = max(tolerance, min(PROPAGATION_LIMIT, PROPAGATION_FACTOR * propagated))
        assert error <= tolerance, (
            f"sensitivity: {kernel} on {example.name}: with {variation.name}, {name} changes by "
            f"{np.linalg.norm(change):.2e}, and in the reference by {np.linalg.norm(expected):.2e}; the change is off "
            f"by {error:.2e}, allowed {tolerance:.2e}; that of the reference itself in {example.dtype} is off by "
            f"{_reference_change_error(registry, example, variation, name, expected):.2e}"
            f"{_backward_details(registry, kernel, variation, name)}"
        )


def refusals(
    registry: Registry,
    kernel: str,
    example: Example,
    refuses: frozenset[str] = frozenset(),
    refuses_gradients: frozenset[str] = frozenset(),
) -> bool:
    """The kernel refuses what it is declared to refuse, with a reason, and nothing else. True if it runs the example.

    >>> from ejkernel_testing._double import double
    >>> registry, kernel, example = double()
    >>> refusals(registry, kernel, example)
    True
    """
    backend = kernel.rpartition(".")[2]
    with jax.enable_x64(example.dtype == "float64"):
        explanation = registry.explain(example.op, **arguments(registry, example), backend=backend)
    is_supported = _is_supported(kernel, example, explanation.error, refuses)
    backward_op, backward = registry.operation(example.op).backward, explanation.backward
    if backward is None or not (is_supported and example.wrt and backend in registry.backends(str(backward_op))):
        return is_supported
    return _is_supported(f"{backward_op}.{backend}", example, backward.error, refuses_gradients)


def _is_supported(kernel: str, example: Example, error: str | None, refuses: frozenset[str]) -> bool:
    """Whether the kernel runs the example. Raises if that is not as declared."""
    features, prefix = sorted(example.features & refuses), f"refusals: {kernel} on {example.name}: "
    if error is None:
        assert not features, f"{prefix}is not refused, but the kernel is declared to refuse {', '.join(features)}"
        return True
    line = next((line.strip() for line in error.splitlines() if line.strip().startswith(f"{kernel} (")), error)
    assert ": refused, " in line, f"{prefix}is not refused by Unsupported('reason'): {line}"
    known = ", ".join(sorted(example.features)) or "none"
    assert features, f"{prefix}is refused, but no feature of it ({known}) is in the kernel's REFUSES: {line}"
    return False


def compare(
    check: str,
    kernel: str,
    example: Example,
    name: str,
    actual: np.ndarray,
    expected: np.ndarray,
    tolerance: float,
    details: Callable[[], str] = str,
) -> None:
    """Raise if the relative error of an array is above the tolerance. ``details`` returns the end of the message."""
    if _is_equal_up_to_ties(actual, expected):
        return
    mismatch = _mismatch(actual.astype(np.float64), expected.astype(np.float64), tolerance)
    assert not mismatch, f"{check}: {kernel} on {example.name}: {name} {mismatch}{details()}"


def _mismatch(actual: np.ndarray, expected: np.ndarray, tolerance: float) -> str:
    """How the arrays differ, in words; empty if they are equal within the tolerance."""
    if actual.shape != expected.shape:
        return f"has shape {actual.shape}, expected {expected.shape}"
    if not np.array_equal(np.isnan(actual), np.isnan(expected)):
        return f"has {np.isnan(actual).sum()} NaN, and the reference {np.isnan(expected).sum()}, or in other places"
    if not np.array_equal(_infinity_signs(actual), _infinity_signs(expected)):
        return "is infinite in other places than the reference"
    error = relative_error(actual, expected)
    return "" if error <= tolerance else f"is off by {error:.2e}, allowed {tolerance:.2e}"


def _is_equal_up_to_ties(actual: np.ndarray, expected: np.ndarray) -> bool:
    """Whether 8-bit numbers are equal, except for a few near the middle of two numbers that are rounded to the other
    one.
    """
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape) or actual.dtype.itemsize > 1:
        return False
    steps = np.abs(_ordinals(actual) - _ordinals(expected))
    if np.isnan(actual.astype(np.float32)).any():
        return False
    return bool(steps.max(initial=0) <= 1 and steps.sum() <= max(1, EIGHT_BIT_TIES * steps.size))


def _ordinals(array: np.ndarray) -> np.ndarray:
    """The position of 8-bit numbers in the order of all of them. Floats are a sign and a magnitude."""
    if np.issubdtype(array.dtype, np.integer):
        return array.astype(int)
    bits = array.view(np.uint8).astype(int)
    return np.where(bits < 128, bits, 128 - bits)


def _infinity_signs(array: np.ndarray) -> np.ndarray:
    """1 and -1 for infinities, and 0 for all other numbers."""
    return np.where(np.isinf(array), np.sign(array), 0)


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """The norm of the difference divided by the norm of the expected array, where that is finite.

    An array that is 0 by cancellation, such as the gradient of a bias that is the same for all keys, has no norm to
    divide by. The terms that cancel are used instead. They are products of the vectors of a head, around 10.
    """
    is_finite = np.isfinite(expected)
    size, count = float(np.linalg.norm(expected[is_finite])), max(int(is_finite.sum()), 1)
    distance = float(np.linalg.norm(actual[is_finite].astype(np.float64) - expected[is_finite]))
    return distance / (size if size > 1e-6 * count**0.5 else 10 * count**0.5)


def _outcomes(
    registry: Registry, kernel: str, example: Example, weights_name: str | None = None
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The kernel's outcome, and the reference's in float64."""
    actual = outcome_arrays(registry, kernel.rpartition(".")[2], example, weights_name=weights_name)
    return actual, outcome_arrays(registry, REFERENCE, example, is_float64=True, weights_name=weights_name)


def _check_outcomes(check: str, registry: Registry, kernel: str, example: Example, kind: str, roundings: float) -> None:
    actual = outcome_arrays(registry, kernel.rpartition(".")[2], example)
    check_outcome(check, registry, kernel, example, actual, roundings, kind=kind)


def check_outcome(
    check: str,
    registry: Registry,
    kernel: str,
    example: Example,
    actual: Mapping[str, np.ndarray],
    roundings: float,
    details: str = "",
    kind: str = "",
) -> None:
    """Compare results and gradients with the reference's: those whose names begin with ``kind``. ``details`` are the
    end of the message.
    """
    exact = outcome_arrays(registry, REFERENCE, example, is_float64=True)
    assert actual.keys() == exact.keys(), (
        f"{check}: {kernel} on {example.name}: has {', '.join(actual)}; the reference has {', '.join(exact)}{details}"
    )
    for name, expected in exact.items():
        if name.startswith(kind):
            tolerance = _gradient_tolerance(registry, example, name, actual[name], expected, roundings)
            describe = partial(_details, registry, kernel, example, name, details)
            compare(check, kernel, example, name, actual[name], expected, tolerance, describe)


def _gradient_tolerance(
    registry: Registry, example: Example, name: str, actual: np.ndarray, expected: np.ndarray, roundings: float
) -> float:
    """The tolerance, which is larger for small gradients that are sums of rounded results."""
    tolerance = _tolerance(registry, example, name, expected, roundings)
    is_small = name.startswith("gradient") and example.dtype not in TOLERANCE and expected.size <= SMALL_SIZE
    is_comparable = is_small and actual.shape == expected.shape
    if not is_comparable or relative_error(actual, expected) <= tolerance:
        return tolerance
    propagated = PROPAGATION_FACTOR * _propagated_error(registry, example, name, expected)  # takes a second
    return max(tolerance, min(PROPAGATION_LIMIT, propagated))


def _details(registry: Registry, kernel: str, example: Example, name: str, details: str) -> str:
    """Whether the kernel is wrong or the tolerance is too small, and which backward kernel to look at."""
    rounded, exact = (outcome_arrays(registry, REFERENCE, example, is_float64=flag)[name] for flag in (False, True))
    reference = f"; the reference itself in {example.dtype} is off by {relative_error(rounded, exact):.2e}"
    return reference + (details or _backward_details(registry, kernel, example, name))


def _backward_details(registry: Registry, kernel: str, example: Example, name: str) -> str:
    return f"; gradients by {_gradient_source(registry, kernel, example)}" if name.startswith("gradient") else ""


def _gradient_source(registry: Registry, kernel: str, example: Example) -> str:
    """The names of the kernels that compute the gradients of the example."""
    return " and ".join(backward_kernels(registry, kernel.rpartition(".")[2], example)) or "the reference"


def _reference_change_error(
    registry: Registry, example: Example, variation: Example, name: str, expected: np.ndarray
) -> float:
    """The error of the reference's change in the dtype of the example."""
    before, after = (outcome_arrays(registry, REFERENCE, e, weights_name=example.name) for e in (example, variation))
    return relative_error(_change(after[name], before[name]), expected)


def _tolerance(registry: Registry, example: Example, name: str, expected: np.ndarray, roundings: float) -> float:
    if name.startswith("result") and expected.dtype.itemsize == 2:
        # The operation rounds it whatever the dtype of the call, the reference in float64 too. A quarter of a unit is
        # the usual error of one rounding.
        return roundings * RESULT_FACTOR * machine_epsilon(expected.dtype) / 4 + TOLERANCE["float32"]
    if example.dtype in TOLERANCE:
        return TOLERANCE[example.dtype]
    reference_error = relative_error(outcome_arrays(registry, REFERENCE, example)[name], expected)
    if name.startswith("result"):
        return roundings * RESULT_FACTOR * reference_error + TOLERANCE["float32"]
    return roundings * GRADIENT_FACTOR * reference_error + GRADIENT_UNITS * machine_epsilon(example.dtype)


def _propagated_error(registry: Registry, example: Example, name: str, expected: np.ndarray) -> float:
    """The root mean square of the relative errors that rounded results cause."""
    roundings = rounding_errors_of_gradients(registry, example)[name]
    errors = [relative_error(expected + rounding, expected) for rounding in roundings]
    return float(np.sqrt(np.mean(np.square(errors))))


def _change(after: np.ndarray, before: np.ndarray) -> np.ndarray:
    """The difference where both are finite, and 0 elsewhere."""
    a, b = after.astype(np.float64), before.astype(np.float64)
    return np.subtract(a, b, where=np.isfinite(a) & np.isfinite(b), out=np.zeros(a.shape))
