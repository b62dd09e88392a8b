"""What a kernel makes of a case: its results, and the gradients of a random weighted sum of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_core._errors import Unsupported
from ejkernel_core._registry import Registry

from ._case import Case

Arrays = Mapping[str, Any]
Results = tuple[Any, ...]
Function = Callable[[Arrays], Results]

REFERENCE = "reference"


@lru_cache(maxsize=512)
def outcome(registry: Registry, backend: str, case: Case, precise: bool = False) -> dict[str, np.ndarray]:
    """Results and gradients of the first draw, named for messages, of the dtypes that came back.

    ``precise``: of the same inputs, rounded to the case's dtype, as float64.
    """
    with jax.enable_x64(precise or case.dtype == "float64"):
        arrays = inputs(registry, case, precise=precise)
        function = partial(called, registry, backend, case)
        try:
            results, gradients = jax.jit(partial(pulled, function, case.wrt))(arrays, weights(function, arrays))
        except Unsupported as late:
            told = f"refusals: {case.op}.{backend} on {case.name}: refused in run_backend, not in heuristic_cfg: {late}"
            raise AssertionError(told) from late
        named = {f"result {place}": result for place, result in enumerate(results)}
        named |= {f"gradient of {name}": gradient for name, gradient in gradients.items()}
        return {name: np.asarray(array) for name, array in named.items()}


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
        given = [half * weight for half, weight in zip(halves, weights(function, arrays), strict=True)]

        def gradients(key: jax.Array) -> dict[str, jax.Array]:
            keys = jax.random.split(key, len(given))
            off = (w * jax.random.uniform(k, w.shape, minval=-1) for k, w in zip(keys, given, strict=True))
            return pulled(function, case.wrt, arrays, tuple(off))[1]  # linear in them: of what is off alone

        found = jax.lax.map(gradients, jax.random.split(jax.random.key(0), 32))
        return {f"gradient of {name}": np.asarray(moved) for name, moved in found.items()}


def called(registry: Registry, backend: str, case: Case, arrays: Arrays) -> Results:
    """The case's call on these arrays, by one kernel; the results as a tuple."""
    return tuple(jax.tree.leaves(registry.call(case.op, **arrays, **options(registry, case), backend=backend)))


def pulled(function: Function, wrt: Sequence[str], arrays: Arrays, ct: Results) -> tuple[Results, dict[str, Any]]:
    """The results, and the gradients of their sum weighted by ``ct``, in which only finite results count."""
    results, pull_back = jax.vjp(lambda moving: function({**arrays, **moving}), {name: arrays[name] for name in wrt})
    finite = [jnp.where(jnp.isfinite(r), w, 0).astype(r.dtype) for r, w in zip(results, ct, strict=True)]
    return results, pull_back(tuple(finite))[0]


def inputs(registry: Registry, case: Case, draw: int = 0, precise: bool = False) -> dict[str, Any]:
    """The arrays of one draw, as the call takes them."""
    arrays = registry.operation(case.op).arrays
    given = {name: value for name, value in case.arguments(draw).items() if name in arrays and value is not None}
    return {name: _rounded(value, case.dtype, precise) for name, value in given.items()}


def options(registry: Registry, case: Case) -> dict[str, Any]:
    """The static arguments."""
    arrays = registry.operation(case.op).arrays
    return {name: value for name, value in case.arguments(0).items() if name not in arrays}


def weights(function: Function, arrays: Arrays) -> Results:
    """One random array a result: numbers of few digits, so that they are the same in every dtype."""
    shapes = [result.shape for result in jax.eval_shape(function, arrays)]
    draws = [np.random.default_rng(place).standard_normal(shape) for place, shape in enumerate(shapes)]
    return tuple(np.asarray(draw, jnp.bfloat16).astype(np.float32) for draw in draws)


def _rounded(value: Any, dtype: str, precise: bool) -> Any:
    if not isinstance(value, np.ndarray) or not np.issubdtype(value.dtype, np.floating):
        return value
    rounded = value.astype(jnp.dtype(dtype)) if value.dtype == np.float64 else value
    return rounded.astype(np.float64) if precise else rounded
