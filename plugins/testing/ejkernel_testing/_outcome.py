"""The results of a kernel on an example, and the gradients of their sum with random weights."""

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

from ejkernel_core import Example, Registry, Unsupported
from ejkernel_core.extend import results_and_restore

Arrays = Mapping[str, Any]
Results = tuple[Any, ...]
Function = Callable[[Arrays], Results]

REFERENCE = "reference"

#: The seed of the checks' random numbers. Examples are unlikely to use the same one: a kernel that confuses weights
#: with arguments would pass if both were equal.
ENTROPY = 0x8F4C_21D6_93BE_E705_5A1C_7720_B8D9_346F


def outcome_arrays(
    registry: Registry, backend: str, example: Example, is_float64: bool = False, weights_name: str | None = None
) -> dict[str, np.ndarray]:
    """All results of the kernel on the first draw of the example, and the gradients, in the kernel's dtypes.

    The keys are "result NAME" and "gradient of NAME". Gradients are those of the results that the caller gets. With
    ``is_float64``, all is computed in float64, on inputs that are rounded to the dtype of the example.
    ``weights_name`` is the name of another example, whose weights are used.
    """
    return _cached_outcome(registry, backend, example, is_float64, weights_name).arrays


def computed_arrays(registry: Registry, backend: str, example: Example) -> dict[str, np.ndarray]:
    """The same in the scope of the caller, whose configurations the kernel uses: computed each time."""
    return _evaluate(Computation(registry, backend, example, False, example.name, ())).arrays


def array_alone(registry: Registry, backend: str, example: Example, place: int) -> np.ndarray:
    """The result at this place, computed where no other is needed."""
    with jax.enable_x64(example.dtype == "float64"):
        arrays = inputs(registry, example)
        function = jax.jit(lambda arrays: _visible_and_all_results(registry, backend, example, arrays)[1][place])
        poison_memory([jax.eval_shape(function, arrays)])
        return np.asarray(function(arrays))


def backward_kernels(registry: Registry, backend: str, example: Example) -> tuple[str, ...]:
    """The kernels of the backward operation in that program; none if JAX differentiates the reference."""
    return _cached_outcome(registry, backend, example, False, None).backward_kernels


@attrs.frozen
class Outcome:
    """The results and gradients that one program computes, and the kernels of the backward operation in it."""

    arrays: dict[str, np.ndarray]
    backward_kernels: tuple[str, ...]


@attrs.frozen
class Computation:
    """What to compute. Two computations are equal if everything that the outcome depends on is equal."""

    registry: Registry = attrs.field(eq=False)
    backend: str
    example: Example = attrs.field(eq=False)
    is_float64: bool
    weights_name: str
    #: The operations, the example's call, and the kernels: what is equal in equal computations.
    content: tuple[Any, ...]


def _cached_outcome(
    registry: Registry, backend: str, example: Example, is_float64: bool, weights_name: str | None
) -> Outcome:
    ops = example.op, registry.operation(example.op).backward
    kernels = tuple(kernel for op in ops if op for kernel in registry.kernels(op)[0])
    name = weights_name or example.name
    sources = _reference_sources(registry, example) if backend == REFERENCE else None
    if sources is None:
        # The kernels are part of the content: a corrected kernel is another object.
        return _kernel_outcome(Computation(registry, backend, example, is_float64, name, (registry, example, kernels)))
    example_content = example.name, example.op, example.arguments, example.dtype, example.wrt
    return _reference_outcome(Computation(registry, backend, example, is_float64, name, (*sources, *example_content)))


def _reference_sources(registry: Registry, example: Example) -> tuple[Any, ...] | None:
    """The operations and hooks that the reference's outcome depends on. Registries with the same ones have the same
    outcome. None if it depends on other kernels too.
    """
    operation = registry.operation(example.op)
    if operation.backward is None:
        operations = [operation]
    elif REFERENCE in registry.backends(operation.backward):
        operations = [operation, registry.operation(operation.backward)]
    else:  # the registry chooses the backward kernel
        return None
    if operation.reference != REFERENCE:
        return None
    hook_relays = [registry.kernel(operation.name, REFERENCE)._hooks for operation in operations]
    hooks = [hook for relay in hook_relays for hook in (relay.heuristic_cfg, relay.run_backend)]
    return (*operations, *(implementation.function for hook in hooks for implementation in hook.get_hookimpls()))


@lru_cache(maxsize=64)
def _kernel_outcome(computation: Computation) -> Outcome:
    """Cached while an example and its variations are checked."""
    return _evaluate(computation)


@lru_cache(maxsize=512)
def _reference_outcome(computation: Computation) -> Outcome:
    """Cached longer, because all kernels of the operation are compared with it."""
    return _evaluate(computation)


def _evaluate(computation: Computation) -> Outcome:
    registry, backend, example = computation.registry, computation.backend, computation.example
    with jax.enable_x64(computation.is_float64 or example.dtype == "float64"):
        arrays = inputs(registry, example, is_float64=computation.is_float64)
        function = partial(example_results, registry, backend, example)
        ct = weights(computation.weights_name, function, arrays)
        with_gradients = partial(
            _results_gradients_and_aux, partial(_visible_and_all_results, registry, backend, example), example.wrt
        )
        try:
            program = jax.jit(with_gradients).lower(arrays, ct)
            poison_memory(jax.tree.leaves(program.out_info))
            _, gradients, results = program.compile()(arrays, ct)
        except Unsupported as error:
            kernel = f"{example.op}.{backend}"
            message = f"refusals: {kernel} on {example.name}: refused in run_backend, not in heuristic_cfg: {error}"
            raise AssertionError(message) from error
        names = registry.operation(example.op).results
        outputs = {f"result {name}": result for name, result in zip(names, results, strict=True)}
        outputs |= {f"gradient of {name}": gradient for name, gradient in gradients.items()}
        outputs = {name: np.asarray(array) for name, array in outputs.items()}
        return Outcome(outputs, _backward_kernels(registry, example, program))


def _backward_kernels(registry: Registry, example: Example, program: jax.stages.Lowered) -> tuple[str, ...]:
    backward = registry.operation(example.op).backward
    names = [] if backward is None else [f"{backward}.{backend}" for backend in registry.backends(backward)]
    text = program.as_text(debug_info=True) if names else ""
    # Calls are labelled with the quoted names of their kernels.
    return tuple(name for name in names if f"{quote(name, safe='')}(" in text)


def poison_memory(results: Sequence[Any]) -> None:
    """Leave NaN, and the least integers, in memory of the device that results like these may get. A kernel that does
    not write all of a result is found then: fresh memory is often 0.
    """
    if jax.default_backend() == "cpu":  # where the interpreters of kernels poison their outputs
        return
    is_float = [jnp.issubdtype(result.dtype, jnp.inexact) for result in results]
    jax.block_until_ready(
        [
            jnp.full(result.shape, jnp.nan if has_nan else jnp.iinfo(result.dtype).min, result.dtype)
            for result, has_nan in zip(results, is_float, strict=True)
            if result.dtype != bool
        ]
    )


def machine_epsilon(dtype: Any) -> float:
    """The relative distance between neighbouring numbers."""
    return float(jax.numpy.finfo(dtype).eps)


def rounding_errors_of_gradients(registry: Registry, example: Example) -> dict[str, np.ndarray]:
    """32 random samples of each gradient's error, in float64, for weights with errors of up to half a unit in the last
    place.

    Kernels have such errors, because they compute gradients from rounded results, times these weights.
    """
    function = partial(example_results, registry, REFERENCE, example)
    half_units = [machine_epsilon(result.dtype) / 2 for result in jax.eval_shape(function, inputs(registry, example))]
    with jax.enable_x64(True):
        arrays = inputs(registry, example, is_float64=True)
        ct = weights(example.name, function, arrays)
        bounds = [half_unit * weight for half_unit, weight in zip(half_units, ct, strict=True)]

        seed = generator(example.name, "moved by rounding").integers(2**31)

        def gradients(key: jax.Array) -> dict[str, jax.Array]:
            keys = jax.random.split(key, len(bounds))
            errors = (b * jax.random.uniform(k, b.shape, minval=-1) for k, b in zip(keys, bounds, strict=True))
            # Gradients are linear in the weights: with errors as weights, they are the errors of the gradients.
            return results_and_gradients(function, example.wrt, arrays, tuple(errors))[1]

        errors = jax.lax.map(gradients, jax.random.split(jax.random.key(seed), 32))
        return {f"gradient of {name}": np.asarray(error) for name, error in errors.items()}


def example_results(registry: Registry, backend: str, example: Example, arrays: Arrays) -> Results:
    """The results of the example's call on these arrays by one kernel, as a tuple."""
    if _is_reference_of_proofs_only(registry, backend, example):
        return _visible_and_all_results(registry, backend, example, arrays)[0]
    return tuple(jax.tree.leaves(registry.call(example.op, **arrays, **options(registry, example), backend=backend)))


def results_and_gradients(
    function: Function, wrt: Sequence[str], arrays: Arrays, ct: Results
) -> tuple[Results, dict[str, Any]]:
    """The results, and the gradients of the sum of the finite results, weighted by ``ct``."""
    results, gradients, _ = _results_gradients_and_aux(lambda arrays: (function(arrays), None), wrt, arrays, ct)
    return results, gradients


def _visible_and_all_results(
    registry: Registry, backend: str, example: Example, arrays: Arrays
) -> tuple[Results, Results]:
    """The results that ``example_results`` returns, and all results of the kernel, with those that only its backward
    uses.
    """
    arguments = {**arrays, **options(registry, example)}
    by_jax = _is_reference_of_proofs_only(registry, backend, example)
    results, restore = results_and_restore(registry, example.op, arguments, backend, by_jax=by_jax)
    return tuple(jax.tree.leaves(restore(results))), results


def _is_reference_of_proofs_only(registry: Registry, backend: str, example: Example) -> bool:
    """Whether the kernel is the reference of the proofs, but not of the operation, as for a kernel class with its own
    ``custom_vjp``. A call would have the very gradients that are to be proved, so JAX differentiates the kernel itself.
    """
    return backend == REFERENCE != registry.operation(example.op).reference


def _results_gradients_and_aux(
    function: Callable[[Arrays], tuple[Results, Any]], wrt: Sequence[str], arrays: Arrays, ct: Results
) -> tuple[Results, dict[str, Any], Any]:
    """``results_and_gradients`` for a function with an auxiliary output, which is returned last."""
    primals = {name: arrays[name] for name in wrt}
    results, pullback, aux = jax.vjp(lambda primals: function({**arrays, **primals}), primals, has_aux=True)
    finite_ct = [jnp.where(jnp.isfinite(r), w, 0).astype(r.dtype) for r, w in zip(results, ct, strict=True)]
    return results, pullback(tuple(finite_ct))[0], aux


def inputs(registry: Registry, example: Example, draw: int = 0, is_float64: bool = False) -> dict[str, Any]:
    """The arrays of one draw, rounded to the example's dtype; with ``is_float64``, those are float64 again. An array
    that the example gives a dtype of its own, such as weights of 8 bits, keeps it.
    """
    names = registry.operation(example.op).arrays
    arrays = {name: value for name, value in example.arguments(draw).items() if name in names and value is not None}
    rounded = {name: example.rounded(value) for name, value in arrays.items()}
    if not is_float64:
        return rounded
    return {name: value if value is arrays[name] else value.astype(np.float64) for name, value in rounded.items()}


def options(registry: Registry, example: Example) -> dict[str, Any]:
    """The static arguments of the example's call."""
    arrays = registry.operation(example.op).arrays
    return {name: value for name, value in example.arguments(0).items() if name not in arrays}


def arguments(registry: Registry, example: Example) -> dict[str, Any]:
    """The arguments of the example's call, its arrays rounded to its dtype."""
    return {**inputs(registry, example), **options(registry, example)}


def weights(name: str, function: Function, arrays: Arrays) -> Results:
    """One random array for each result, the same for every example of this name."""
    return tuple(
        random_array(name, index, shape=result.shape) for index, result in enumerate(jax.eval_shape(function, arrays))
    )


def random_array(name: str, *purpose: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Normally distributed numbers that bfloat16 represents exactly, so that they are the same in every dtype."""
    return generator(name, *purpose).standard_normal(shape).astype(jnp.bfloat16).astype(np.float32)


def generator(name: str, *purpose: Any) -> np.random.Generator:
    """A generator for one purpose in the checks of the example with this name, the same in every process."""
    digest = hashlib.sha256(repr((name, *purpose)).encode()).digest()
    return np.random.default_rng(np.random.SeedSequence([ENTROPY, int.from_bytes(digest, "big")]))
