"""Where JAX is told to raise on shapes of different rank, kernels in plain JAX compute the same."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import ejkernel_core
from ejkernel_ops.flash_attention import examples
from ejkernel_testing import Case

#: The corners of the arguments, and what crosses most of them.
CASES = [
    case
    for case in (*examples.faults(), *examples.subjects(), *list(examples.grid())[::37])
    if case.dtype == "float32" and not case.name.startswith(("one-", "soft-cap-of-huge"))
]


def results_and_gradients(case: Case, backend: str) -> Any:
    arguments = {
        name: value.astype(np.float32) if getattr(value, "dtype", None) == np.float64 else value
        for name, value in case.arguments(0).items()
    }

    def loss(moving: dict[str, Any]) -> tuple[Any, Any]:
        results = ejkernel_core.call("flash_attention", **{**arguments, **moving}, backend=backend)
        return sum((leaf**2).sum() for leaf in jax.tree.leaves(results)), results

    return jax.value_and_grad(loss, has_aux=True)({name: arguments[name] for name in case.wrt})


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_rank_is_promoted(case: Case, backend: str) -> None:
    wanted = results_and_gradients(case, backend)
    with jax.numpy_rank_promotion("raise"):
        got = results_and_gradients(case, backend)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


def test_nor_where_a_mapped_axis_is_folded_or_looped_over() -> None:
    query, key, value = (jax.random.normal(jax.random.key(i), (3, 2, 5, 4, 8)) for i in range(3))

    def loss(query: Any, key: Any, value: Any, sinks: Any) -> Any:
        options = {"causal": True, "softmax_aux": sinks, "backend": "xla"}
        return ejkernel_core.call("flash_attention", query, key, value, **options).sum()

    sinks = jax.numpy.zeros(4)
    for wrt in ((0, 1, 2), (0, 1, 2, 3)):
        mapped = jax.vmap(jax.grad(loss, wrt), (0, 0, 0, None))
        wanted = mapped(query, key, value, sinks)
        with jax.numpy_rank_promotion("raise"):
            jax.tree.map(np.testing.assert_array_equal, mapped(query, key, value, sinks), wanted)
