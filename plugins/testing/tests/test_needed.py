"""The check of results that nobody needs: a kernel may leave them out, and the others stay the same."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_testing as testing
from ejkernel_core import Axes, Example, Operation, Registry, hookimpl

RNG = np.random.default_rng(12)
AXES = Axes(
    {"x": "rows dim"}, {"out": "rows dim", "norm": "rows"}, independent="rows", whole="dim", residuals={"out": ""}
)


def results(inv: Any) -> tuple[Any, Any]:
    norm = jnp.sqrt((inv["x"] ** 2).sum(-1))
    return inv["x"] / norm[:, None], norm


def right(inv: Any) -> Any:
    return tuple(value if inv.needs(name) else None for name, value in zip(("out", "norm"), results(inv), strict=True))


def wrong_alone(inv: Any) -> Any:
    """It takes the norm from the wrong place where it does not store it."""
    out, norm = results(inv)
    return (out, norm) if inv.needs("norm") else (inv["x"] / norm[::-1, None], None)


def gradient(inv: Any) -> Any:
    d_out = inv["d_out"]
    out = inv["x"] / inv["norm"][:, None]
    return ((d_out - out * (d_out * out).sum(-1, keepdims=True)) / inv["norm"][:, None],)


def gradient_from_out(inv: Any) -> Any:
    """It reads a result that the axes say is not read."""
    d_out, out = inv["d_out"], inv["out"]
    return ((d_out - out * (d_out * out).sum(-1, keepdims=True)) / inv["norm"][:, None],)


def kernel_of(compute: Callable[[Any], Any]) -> SimpleNamespace:
    @hookimpl
    def run_backend(inv: Any, cfg: Any) -> Any:
        return compute(inv)

    return SimpleNamespace(run_backend=run_backend)


def make_proofs(run: Callable[[Any], Any], backward: Callable[[Any], Any] = gradient) -> Any:
    registry = Registry(plugins="")
    draw = lambda number: {"x": np.random.default_rng([number, 3]).normal(size=(5, 7))}
    example = Example("five", "normalize", draw, wrt=("x",))
    operation = Operation(
        name="normalize",
        signature=lambda x: None,
        axes=AXES,
        prepare=lambda arguments: (arguments, lambda results: results[0]),
        backward="normalize_bwd",
        examples=lambda: [example],
    )
    registry.register(operation)
    registry.register(operation.gradients())
    for name, compute in (("reference", results), ("plain", run)):
        registry.register(kernel_of(compute), f"normalize.{name}")
    registry.register(kernel_of(backward), "normalize_bwd.plain")
    fields = {"registry": registry, "kernel": "normalize.plain", "example": example}
    return type("Proofs", (testing.KernelProofs,), fields)


def test_a_right_kernel_passes() -> None:
    proofs = make_proofs(right)
    proofs().test_example(proofs.example)
    proofs().test_needed(proofs.example)
    assert [row.values for row in proofs.parameters("test_needed")] == [(proofs.example,)]


def test_a_kernel_that_is_wrong_where_it_leaves_a_result_out_is_found() -> None:
    proofs = make_proofs(wrong_alone)
    proofs().test_example(proofs.example)
    with pytest.raises(
        AssertionError, match="^needed: normalize.plain on five: result out is off by .*no other result"
    ):
        proofs().test_needed(proofs.example)


def test_a_gradient_from_a_result_that_is_not_read_is_found() -> None:
    proofs = make_proofs(right, gradient_from_out)
    with pytest.raises(AssertionError, match="^gradients: normalize.plain on five: gradient of x is off by"):
        proofs().test_example(proofs.example)
