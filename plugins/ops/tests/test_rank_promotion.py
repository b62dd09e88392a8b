"""Calls compute the same if ``jax_numpy_rank_promotion`` is "raise": it is not in effect where a kernel is traced."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import ejkernel_core
from ejkernel_core import Example
from ejkernel_ops.flash_attention import examples

#: Edge cases of the arguments, and combinations of most of them.
EXAMPLES = [
    example
    for example in (*examples.faults(), *examples.subjects(), *list(examples.grid())[::111])
    if example.dtype == "float32" and not example.name.startswith(("one-", "soft-cap-of-huge"))
]


def program(example: Example, backend: str) -> str:
    """What JAX compiles for the results and gradients."""
    arguments = {
        name: value.astype(np.float32) if getattr(value, "dtype", None) == np.float64 else value
        for name, value in example.arguments(0).items()
    }

    def loss(primals: dict[str, Any]) -> tuple[Any, Any]:
        results = ejkernel_core.call("flash_attention", **{**arguments, **primals}, backend=backend)
        return sum((leaf**2).sum() for leaf in jax.tree.leaves(results)), results

    gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))
    return gradients.lower({name: arguments[name] for name in example.wrt}).as_text()


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_no_rank_is_promoted(example: Example, backend: str) -> None:
    expected = program(example, backend)
    with jax.numpy_rank_promotion("raise"):
        assert program(example, backend) == expected


@pytest.mark.long
def test_no_rank_is_promoted_under_vmap() -> None:
    query, key, value = (jax.random.normal(jax.random.key(i), (3, 2, 5, 4, 8)) for i in range(3))

    def loss(query: Any, key: Any, value: Any, sinks: Any) -> Any:
        options = {"causal": True, "softmax_aux": sinks, "backend": "xla"}
        return ejkernel_core.call("flash_attention", query, key, value, **options).sum()

    sinks = jax.numpy.zeros(4)
    for wrt in ((0, 1, 2), (0, 1, 2, 3)):
        gradients = jax.vmap(jax.grad(loss, wrt), (0, 0, 0, None))
        expected = gradients(query, key, value, sinks)
        with jax.numpy_rank_promotion("raise"):
            jax.tree.map(np.testing.assert_array_equal, gradients(query, key, value, sinks), expected)
