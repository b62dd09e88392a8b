"""What a kernel makes of a case: its results, and the gradients of a random weighted sum of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any
from urllib.parse import quote

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_core import Registry, Unsupported
from ejkernel_core._call import whole

from ._case import Case

Arrays = Mapping[str, Any]
Results = tuple[Any, ...]
Function = Callable[[Arrays], Results]

REFERENCE = "reference"

#: Of the checks' own. Whoever draws the arguments of a case draws from a seed that he thinks of, and numbers that are
#: equal to them by chance would hide a kernel that takes the one for the other.
ENTROPY = 0x8F4C_21D6_93BE_E705_5A1C_7720_B8D9_346F


def outcome(
    registry: Registry, backend: str, case: Case, precise: bool = False, weighted_as: str | None = None
) -> dict[str, np.ndarray]:
    """Every result of the kernel, and the gradients of those that the caller sees: of the first draw, named for
    messages, of the dtypes that came back.

    ``precise``: of the same inputs, rounded to the case's dtype, as float64. ``weighted_as``: with the weights of the
    case of this name.
    """
    return _computed(registry, backend, case, precise, weighted_as).arrays


def backward_kernels(registry: Registry, backend: str, case: Case) -> tuple[str, ...]:
    """The kernels that give the gradients of ``outcome``, as its program tells; none where JAX differentiates the
    reference.
    """
    return _computed(registry, backend, case, False, None).backward


@attrs.frozen
class Outcome:
    """Of one program."""

    arrays: dict[str, np.ndarray]
    #: The kernels of the backward operation in it.
    backward: tuple[str, ...]


@attrs.frozen
class Question:
    """What is to be computed. Two are equal where all that the answer depends on is."""

    registry: Registry = attrs.field(eq=False)
    backend: str
    case: Case = attrs.field(eq=False)
    precise: bool
    weighted_as: str
    #: The operation, what is called in the case, and the code that is.
    content: tuple[Any, ...]


def _computed(registry: Registry, backend: str, case: Case, precise: bool, weighted_as: str | None) -> Outcome:
    owners = case.op, registry.operation(case.op).backward
    kernels = tuple(kernel for owner in owners if owner for kernel in registry.kernels(owner)[0])
    named = weighted_as or case.name
    judges = _judges(registry, case) if backend == REFERENCE else None
    if judges is None:
        # As long as the kernels are these: one that was mended is registered anew.
        return _of_a_kernel(Question(registry, backend, case, precise, named, (registry, case, kernels)))
    call = case.name, case.op, case.arguments, case.dtype, case.wrt
    return _of_the_reference(Question(registry, backend, case, precise, named, (*judges, *call)))


def _judges(registry: Registry, case: Case) -> tuple[Any, ...] | None:
    """The operations and the functions that the reference's outcome is computed by, where they are no others than
    these: whichever registry they are in, it is the same.
    """
    operation = registry.operation(case.op)
    if operation.backward is None:
        owners = [operation]
    elif REFERENCE in registry.backends(operation.backward):
        owners = [operation, registry.operation(operation.backward)]
    else:  # the registry chooses who differentiates
        return None
    if operation.reference != REFERENCE:
        return None
    relays = [registry.kernel(owner.name, REFERENCE)._hooks for owner in owners]
    hooks = [hook for relay in relays for hook in (relay.heuristic_cfg, relay.run_backend)]
    return (*owners, *(implementation.function for hook in hooks for implementation in hook.get_hookimpls()))


@lru_cache(maxsize=64)
def _of_a_kernel(question: Question) -> Outcome:
    """Of a case and its variations; then the next one's turn comes."""
    return _evaluated(question)


@lru_cache(maxsize=512)
def _of_the_reference(question: Question) -> Outcome:
    """Every kernel of the operation is compared with it."""
    return _evaluated(question)


def _evaluated(question: Question) -> Outcome:
    registry, backend, case = question.registry, question.backend, question.case
    with jax.enable_x64(question.precise or case.dtype == "float64"):
        arrays = inputs(registry, case, precise=question.precise)
        function = partial(called, registry, backend, case)
        ct = weights(question.weighted_as, function, arrays)
        try:
            evaluated = jax.jit(partial(_pulled_beside, partial(_whole, registry, backend, case), case.wrt))
            program = evaluated.lower(arrays, ct)
            _, gradients, results = program.compile()(arrays, ct)
        except Unsupported as late:
            told = f"refusals: {case.op}.{backend} on {case.name}: refused in run_backend, not in heuristic_cfg: {late}"
            raise AssertionError(told) from late
        names = registry.operation(case.op).results
        named = {f"result {name}": result for name, result in zip(names, results, strict=True)}
        named |= {f"gradient of {name}": gradient for name, gradient in gradients.items()}
        arrays = {name: np.asarray(array) for name, array in named.items()}
        return Outcome(arrays, _backward_kernels(registry, case, program))


def _backward_kernels(registry: Registry, case: Case, program: jax.stages.Lowered) -> tuple[str, ...]:
    owner = registry.operation(case.op).backward
    names = [] if owner is None else [f"{owner}.{backend}" for backend in registry.backends(owner)]
    text = program.as_text(debug_info=True) if names else ""
    # As they stand in the labels of its calls.
    return tuple(name for name in names if f"{quote(name, safe='')}(" in text)


def unit(dtype: Any) -> float:
    """The relative distance of neighbouring numbers."""
    return float(jax.numpy.finfo(dtype).eps)  # type: ignore[no-untyped-call]


def moved_by_rounding(registry: Registry, case: Case) -> dict[str, np.ndarray]:
    """How gradients, in float64, move where the weights of the results are off by half a unit of theirs: 32 draws.

    Kernels compute gradients from results that are rounded, times these weights.
    """
    function = partial(called, registry, REFERENCE, case)
    halves = [unit(result.dtype) / 2 for result in jax.eval_shape(function, inputs(registry, case))]
    with jax.enable_x64(True):
        arrays = inputs(registry, case, precise=True)
        ct = weights(case.name, function, arrays)
        given = [half * weight for half, weight in zip(halves, ct, strict=True)]

        seed = numbers(case.name, "moved by rounding").integers(2**31)

        def gradients(key: jax.Array) -> dict[str, jax.Array]:
            keys = jax.random.split(key, len(given))
            off = (w * jax.random.uniform(k, w.shape, minval=-1) for k, w in zip(keys, given, strict=True))
            return pulled(function, case.wrt, arrays, tuple(off))[1]  # linear in them: of what is off alone

        found = jax.lax.map(gradients, jax.random.split(jax.random.key(seed), 32))
        return {f"gradient of {name}": np.asarray(moved) for name, moved in found.items()}


def called(registry: Registry, backend: str, case: Case, arrays: Arrays) -> Results:
    """The case's call on these arrays, by one kernel; the results as a tuple."""
    if _is_judge_alone(registry, backend, case):
        return _whole(registry, backend, case, arrays)[0]
    return tuple(jax.tree.leaves(registry.call(case.op, **arrays, **options(registry, case), backend=backend)))


def pulled(function: Function, wrt: Sequence[str], arrays: Arrays, ct: Results) -> tuple[Results, dict[str, Any]]:
    """The results, and the gradients of their sum weighted by ``ct``, in which only finite results count."""
    results, gradients, _ = _pulled_beside(lambda given: (function(given), None), wrt, arrays, ct)
    return results, gradients


def _whole(registry: Registry, backend: str, case: Case, arrays: Arrays) -> tuple[Results, Results]:
    """What ``called`` gives, and every result of the kernel: the backward works with those that no caller sees, too."""
    arguments, by_jax = {**arrays, **options(registry, case)}, _is_judge_alone(registry, backend, case)
    results, restore = whole(registry, case.op, arguments, backend, by_jax=by_jax)
    return tuple(jax.tree.leaves(restore(results))), results


def _is_judge_alone(registry: Registry, backend: str, case: Case) -> bool:
    """Whether the kernel is the reference of the proofs, and not the operation's: that of a class that differentiates
    itself. A call of it would have the gradient that is to be proved; this one has JAX's own.
    """
    return backend == REFERENCE != registry.operation(case.op).reference


def _pulled_beside(
    function: Callable[[Arrays], tuple[Results, Any]], wrt: Sequence[str], arrays: Arrays, ct: Results
) -> tuple[Results, dict[str, Any], Any]:
    """The same of a function that gives something beside its results, on which no gradient depends."""
    moving = {name: arrays[name] for name in wrt}
    results, pull_back, beside = jax.vjp(lambda moved: function({**arrays, **moved}), moving, has_aux=True)
    finite = [jnp.where(jnp.isfinite(r), w, 0).astype(r.dtype) for r, w in zip(results, ct, strict=True)]
    return results, pull_back(tuple(finite))[0], beside


def inputs(registry: Registry, case: Case, draw: int = 0, precise: bool = False) -> dict[str, Any]:
    """The arrays of one draw, as the call takes them."""
    arrays = registry.operation(case.op).arrays
    given = {name: value for name, value in case.arguments(draw).items() if name in arrays and value is not None}
    return {name: _rounded(value, case.dtype, precise) for name, value in given.items()}


def options(registry: Registry, case: Case) -> dict[str, Any]:
    """The static arguments."""
    arrays = registry.operation(case.op).arrays
    return {name: value for name, value in case.arguments(0).items() if name not in arrays}


def weights(name: str, function: Function, arrays: Arrays) -> Results:
    """One random array a result, those of the case of this name."""
    return tuple(
        drawn(name, place, shape=result.shape) for place, result in enumerate(jax.eval_shape(function, arrays))
    )


def drawn(name: str, *purpose: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Normal numbers of few digits, so that they are the same in every dtype."""
    return numbers(name, *purpose).standard_normal(shape).astype(jnp.bfloat16).astype(np.float32)


def numbers(name: str, *purpose: Any) -> np.random.Generator:
    """What is drawn for one purpose in the checks on the case of this name: the same in every process."""
    digest = hashlib.sha256(repr((name, *purpose)).encode()).digest()
    return np.random.default_rng(np.random.SeedSequence([ENTROPY, int.from_bytes(digest, "big")]))


def _rounded(value: Any, dtype: str, precise: bool) -> Any:
    if not isinstance(value, np.ndarray) or not np.issubdtype(value.dtype, np.floating):
        return value
    rounded = value.astype(jnp.dtype(dtype)) if value.dtype == np.float64 else value
    return rounded.astype(np.float64) if precise else rounded
