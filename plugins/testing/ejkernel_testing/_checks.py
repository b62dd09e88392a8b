"""The checks: each proves one thing of one kernel on one case, against the operation's reference in float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import jax
import numpy as np

from ejkernel_core import Invocation, Registry
from ejkernel_core._kernel import MANY, LoadedKernel

from ._case import Case
from ._outcome import REFERENCE, backward_kernels, inputs, moved_by_rounding, options, outcome, unit

#: The relative error that a result may have, where its dtype holds enough digits for one number to say it.
TOLERANCE = {"float32": 2e-5, "float64": 1e-12}
#: In low precision, the error of the reference, which rounds once, is the measure: so many times it, since sums in
#: another order make a few roundings fall otherwise.
RESULT_FACTOR = 1.1
GRADIENT_FACTOR = 1.5
#: And so many units in the last place: a kernel computes its gradients from the forward's rounded result, which the
#: reference, differentiated whole, does not. Where a sum nearly cancels, that shows (0.65 at most was measured, and
#: float64 arithmetic on a rounded result makes the same error).
GRADIENT_UNITS = 1.0
#: Of few numbers, each of them such a sum, the units are not enough: then so many times what rounded results make of
#: them, as a rule (1.4 was measured), as long as that is little.
FEW, GRADIENT_MOVES, LITTLE = 64, 3.0, 0.05
#: How far a move may be from the reference's, relative to the move itself. In low precision both ends of it are
#: rounded, and so it may be off by half a unit in the last place of each, too.
MOVE = 1e-3


def values(registry: Registry, kernel: str, case: Case, roundings: float = 1.0) -> None:
    """Every result is the reference's, to the precision of its dtype, infinite where it is, and nowhere NaN.

    >>> from ejkernel_testing._example import double
    >>> registry, kernel, case = double()
    >>> values(registry, kernel, case)
    """
    _prove("values", registry, kernel, case, "result", roundings)


def gradients(registry: Registry, kernel: str, case: Case, roundings: float = 1.0, backward: str | None = None) -> None:
    """Every gradient, of a random weighted sum of all results, is the reference's; and ``backward``'s, where a kernel
    of the backward operation is named.

    >>> from ejkernel_testing._example import double
    >>> registry, kernel, case = double()
    >>> gradients(registry, kernel, case)
    """
    if backward is not None and case.wrt:
        given_by = _given_by(registry, kernel, case)
        assert given_by == backward, (
            f"gradients: {kernel} on {case.name}: are given by {given_by}, not by {backward} as declared"
        )
    _prove("gradients", registry, kernel, case, "gradient", roundings)


def accumulation(registry: Registry, kernel: str, case: Case, roundings: float = 1.0) -> None:
    """Sums over long axes are as exact as those of the reference, which adds up in float32.

    >>> from ejkernel_testing._example import double
    >>> registry, kernel, case = double()
    >>> accumulation(registry, kernel, case)
    """
    _prove("accumulation", registry, kernel, case, "result", roundings)
    _prove("accumulation", registry, kernel, case, "gradient", roundings)


def rows(registry: Registry, kernel: str, case: Case) -> None:
    """Where the reference says exactly nothing (0, or -inf), the kernel does: what sees nothing, and padding.

    >>> from ejkernel_testing._example import double
    >>> registry, kernel, case = double()
    >>> rows(registry, kernel, case)
    """
    own, exact = _both(registry, kernel, case)
    for name, wanted in exact.items():
        if name.startswith("gradient"):  # the gradient of a row that sees one key is 0 too, but only by cancellation
            dust = 100 * unit(case.dtype)
            wrong = int((np.abs(own[name].astype(np.float64)[(wanted == 0).all(axis=-1)]) > dust).sum())
        else:
            nothing = (wanted == 0) | np.isinf(wanted)
            wrong = int((own[name].astype(np.float64)[nothing] != wanted[nothing]).sum())
        assert not wrong, f"rows: {kernel} on {case.name}: {name} is not 0 or -inf at {wrong} places where it has to be"


def sensitivity(registry: Registry, kernel: str, case: Case, variation: Case) -> None:
    """An argument that is given, or changed, moves results and gradients as it moves the reference's.

    >>> from ejkernel_testing._example import double
    >>> registry, kernel, case = double()
    >>> changed = Case("twos", "double", lambda draw: {"x": np.full(8, 2.0)}, wrt=("x",))
    >>> sensitivity(registry, kernel, case, changed)
    """
    before, exact_before = _both(registry, kernel, case)
    after, exact_after = _both(registry, kernel, variation, case.name)
    for name in exact_before.keys() & exact_after.keys():
        move, wanted = _difference(after[name], before[name]), _difference(exact_after[name], exact_before[name])
        off, allowed = error(move, wanted), MOVE
        if case.dtype not in TOLERANCE and np.any(wanted):
            ends = sum(float(np.linalg.norm(end[np.isfinite(end)])) for end in (exact_before[name], exact_after[name]))
            allowed += unit(before[name].dtype) / 2 * ends / float(np.linalg.norm(wanted))
        assert off <= allowed, (
            f"sensitivity: {kernel} on {case.name}: {variation.name} moves {name} by {np.linalg.norm(move):.2e}, the "
            f"reference's by {np.linalg.norm(wanted):.2e}; the moves differ by {off:.2e} of it, allowed {allowed:.0e}; "
            f"the reference's own in {case.dtype} by {_own_move(registry, case, variation, name, wanted):.2e}"
            f"{_credit(registry, kernel, variation, name)}"
        )


def refusals(
    registry: Registry,
    kernel: str,
    case: Case,
    refuses: frozenset[str] = frozenset(),
    refuses_gradients: frozenset[str] = frozenset(),
) -> bool:
    """The kernel refuses what it is declared to refuse, with a reason, and nothing else. True where it runs.

    >>> from ejkernel_testing._example import double
    >>> registry, kernel, case = double()
    >>> refusals(registry, kernel, case)
    True
    """
    backend = kernel.rpartition(".")[2]
    with jax.enable_x64(case.dtype == "float64"):
        asked = registry.explain(case.op, **inputs(registry, case), **options(registry, case), backend=backend)
    runs = _refused_as_declared(kernel, case, asked.error, refuses)
    owner = registry.operation(case.op).backward
    if not runs or asked.backward is None or backend not in registry.backends(str(owner)):
        return runs
    return _refused_as_declared(f"{owner}.{backend}", case, asked.backward.error, refuses_gradients)


def configurations(registry: Registry, kernel: str, case: Case) -> None:
    """What the kernel offers to measure are configurations of its own, which nobody can change, each of them once; of
    its backward too, where it has one.

    >>> from ejkernel_testing._example import double
    >>> registry, kernel, case = double()
    >>> configurations(registry, kernel, case)
    """
    backend = kernel.rpartition(".")[2]
    with jax.enable_x64(case.dtype == "float64"):
        asked = registry.explain(case.op, **inputs(registry, case), **options(registry, case), backend=backend)
        for plan in (asked.plan, asked.backward.plan if asked.backward else None):
            if plan is not None and plan.kernel.backend == backend:
                _prove_space(plan.kernel, plan.invocation, case)


def _prove_space(kernel: LoadedKernel, inv: Invocation, case: Case) -> None:
    start, faults = f"configurations: {kernel.name} on {case.name}: ", list[str]()
    offered = list(kernel.configurations(inv, faults.append))
    assert not faults, f"{start}{faults[0]}"
    assert len(offered) < MANY, f"{start}there are more than {MANY}, or they have no end"
    for cfg, count in Counter(offered).items():
        assert count == 1, f"{start}gives {cfg} {'twice' if count == 2 else f'{count} times'}"


def _refused_as_declared(kernel: str, case: Case, error: str | None, refuses: frozenset[str]) -> bool:
    expected, start = sorted(case.features & refuses), f"refusals: {kernel} on {case.name}: "
    if error is None:
        assert not expected, f"{start}takes it, though it is declared to refuse {', '.join(expected)}"
        return True
    line = next((line.strip() for line in error.splitlines() if line.strip().startswith(f"{kernel} (")), error)
    assert ": refused, " in line, f"{start}does not refuse by Unsupported('reason'): {line}"
    assert expected, f"{start}is not declared to refuse this: {line}"
    return False


def compare(
    check: str,
    kernel: str,
    case: Case,
    name: str,
    got: np.ndarray,
    wanted: np.ndarray,
    allowed: float,
    more: Callable[[], str] = str,
) -> None:
    """Raise where one array is not another, within an error relative to it. ``more`` is worth knowing then."""
    fault = _fault(got.astype(np.float64), wanted.astype(np.float64), allowed)
    assert not fault, f"{check}: {kernel} on {case.name}: {name} {fault}{more()}"


def _fault(got: np.ndarray, wanted: np.ndarray, allowed: float) -> str:
    if got.shape != wanted.shape:
        return f"has shape {got.shape}, wanted {wanted.shape}"
    if np.isnan(got).any():
        return f"has {np.isnan(got).sum()} NaN"
    if not np.array_equal(_infinities(got), _infinities(wanted)):
        return "is infinite in other places than it should be"
    off = error(got, wanted)
    return "" if off <= allowed else f"is off by {off:.2e}, allowed {allowed:.2e}"


def _infinities(array: np.ndarray) -> np.ndarray:
    """1 and -1 where they are, and 0 elsewhere."""
    return np.where(np.isinf(array), np.sign(array), 0)


def error(got: np.ndarray, wanted: np.ndarray) -> float:
    """The norm of the difference over that of what is wanted, where that is finite.

    What is 0 by cancellation, as the gradient of a bias that is the same for all keys, has no size to be relative to:
    there the terms that cancel are the measure, products of the vectors of a head: around 10.
    """
    finite = np.isfinite(wanted)
    size, count = float(np.linalg.norm(wanted[finite])), max(int(finite.sum()), 1)
    off = float(np.linalg.norm(got[finite].astype(np.float64) - wanted[finite]))
    return off / (size if size > 1e-6 * count**0.5 else 10 * count**0.5)


def _both(
    registry: Registry, kernel: str, case: Case, weighted_as: str | None = None
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The kernel's outcome, and the reference's in float64."""
    own = outcome(registry, kernel.rpartition(".")[2], case, weighted_as=weighted_as)
    return own, outcome(registry, REFERENCE, case, precise=True, weighted_as=weighted_as)


def _prove(check: str, registry: Registry, kernel: str, case: Case, kind: str, roundings: float) -> None:
    own, exact = _both(registry, kernel, case)
    assert own.keys() == exact.keys(), f"{check}: {kernel} on {case.name}: gives {[*own]}, the reference {[*exact]}"
    for name, wanted in exact.items():
        if name.startswith(kind):
            allowed = _allowed(registry, case, name, wanted, roundings)
            summed = kind == "gradient" and case.dtype not in TOLERANCE and wanted.size <= FEW
            same = own[name].shape == wanted.shape
            if summed and same and error(own[name], wanted) > allowed:  # asked so late because it takes a second
                allowed = max(allowed, min(LITTLE, GRADIENT_MOVES * _moved(registry, case, name, wanted)))
            compare(check, kernel, case, name, own[name], wanted, allowed, partial(_more, registry, kernel, case, name))


def _more(registry: Registry, kernel: str, case: Case, name: str) -> str:
    """What tells a kernel that is wrong from a tolerance that is too narrow, and whom to look at."""
    rounded, exact = (outcome(registry, REFERENCE, case, precise=precise)[name] for precise in (False, True))
    reference = f"; the reference itself in {case.dtype} is off by {error(rounded, exact):.2e}"
    return reference + _credit(registry, kernel, case, name)


def _credit(registry: Registry, kernel: str, case: Case, name: str) -> str:
    return f"; gradients by {_given_by(registry, kernel, case)}" if name.startswith("gradient") else ""


def _given_by(registry: Registry, kernel: str, case: Case) -> str:
    """Who gives the gradients of the case."""
    return " and ".join(backward_kernels(registry, kernel.rpartition(".")[2], case)) or "the reference"


def _own_move(registry: Registry, case: Case, variation: Case, name: str, wanted: np.ndarray) -> float:
    """How far the reference's move is off, in the dtype of the case."""
    before, after = (outcome(registry, REFERENCE, one, weighted_as=case.name) for one in (case, variation))
    return error(_difference(after[name], before[name]), wanted)


def _allowed(registry: Registry, case: Case, name: str, wanted: np.ndarray, roundings: float) -> float:
    if case.dtype in TOLERANCE:
        return TOLERANCE[case.dtype]
    rounded = error(outcome(registry, REFERENCE, case)[name], wanted)
    if name.startswith("result"):
        return roundings * RESULT_FACTOR * rounded + TOLERANCE["float32"]
    return roundings * GRADIENT_FACTOR * rounded + GRADIENT_UNITS * unit(case.dtype)


def _moved(registry: Registry, case: Case, name: str, wanted: np.ndarray) -> float:
    errors = [error(wanted + moved, wanted) for moved in moved_by_rounding(registry, case)[name]]
    return float(np.sqrt(np.mean(np.square(errors))))


def _difference(after: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Of what is finite on both sides."""
    a, b = after.astype(np.float64), before.astype(np.float64)
    return np.subtract(a, b, where=np.isfinite(a) & np.isfinite(b), out=np.zeros(a.shape))
