"""vmap_with_config and pmap_with_config have the results of a call for each element, with one choice for all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_classes import Kernel, pmap_with_config, vmap_with_config
from ejkernel_core import hookimpl, registry

A = jax.random.normal(jax.random.key(0), (4, 5, 3))
B = jax.random.normal(jax.random.key(1), (4, 3, 6))


@attrs.frozen
class Config:
    """A configuration without fields."""


class Product(Kernel[Config, jax.Array]):
    def __init__(self) -> None:
        super().__init__(name="product")
        self.shapes: list[Any] = []

    def run(self, a: Any, b: Any, *, cfg: Any, scale: Any = 1.0, mode: str = "dot", shift: Any = None) -> Any:
        product = a @ b if mode == "dot" else a @ jnp.abs(b)
        return product * scale + (0 if shift is None else shift)

    def heuristic_cfg(self, inv: Any) -> Any:
        self.shapes.append([arg.shape for arg in inv.args])
        return Config()


AXES = {
    "both": ((0, 0), (A, B)),
    "one number": (0, (A, B)),
    "another axis": ((1, 2), (jnp.moveaxis(A, 0, 1), jnp.moveaxis(B, 0, 2))),
    "from the end": ((-3, -1), (A, jnp.moveaxis(B, 0, 2))),
    "one alone": ((0, None), (A, B[0])),
    "the other alone": ((None, 0), (A[0], B)),
}
KEYWORDS: dict[str, dict[str, Any]] = {
    "none": {},
    "a scalar": {"scale": 2.5},
    "a string": {"mode": "absolute"},
    "None": {"shift": None},
    "an array": {"shift": jnp.arange(6.0)},
    "all": {"scale": 2, "mode": "absolute", "shift": jnp.arange(6.0)},
}


def expected(in_axes: Any, args: Any, **keywords: Any) -> np.ndarray:
    axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * 2
    rows = []
    for i in range(4):
        element = [
            np.asarray(a) if axis is None else np.take(np.asarray(a), i, axis)
            for a, axis in zip(args, axes, strict=True)
        ]
        b = np.abs(element[1]) if keywords.get("mode") == "absolute" else element[1]
        shift = keywords.get("shift")
        rows.append(element[0] @ b * keywords.get("scale", 1) + (0 if shift is None else np.asarray(shift)))
    return np.stack(rows)


@pytest.mark.parametrize("keywords", KEYWORDS)
@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("mapped", [vmap_with_config, pmap_with_config])
def test_every_element_has_the_result_of_a_call(mapped: Any, axes: str, keywords: str) -> None:
    in_axes, args = AXES[axes]
    result = mapped(Product(), in_axes=in_axes)(*args, **KEYWORDS[keywords])
    np.testing.assert_allclose(result, expected(in_axes, args, **KEYWORDS[keywords]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mapped", [vmap_with_config, pmap_with_config])
def test_out_axes(mapped: Any) -> None:
    for axis in (1, 2, -1, -2):
        result = mapped(Product(), out_axes=axis)(A, B)
        np.testing.assert_allclose(result, np.moveaxis(expected(0, (A, B)), 0, axis), rtol=1e-5, atol=1e-6)


def test_one_choice_is_made_for_all_elements() -> None:
    ops = []

    @hookimpl(tryfirst=True)
    def select_config(inv):
        ops.append(inv.op)

    product = Product()
    registry.register(SimpleNamespace(select_config=select_config), "listener")
    try:
        jax.jit(vmap_with_config(product))(A, B)
    finally:
        registry.register(SimpleNamespace(select_config=_no_choice), "listener")
    assert ops == ["product"]
    assert set(map(tuple, product.shapes)) == {((5, 3), (3, 6))}  # by the shapes of one element


@hookimpl
def _no_choice(inv):
    return None


@pytest.mark.parametrize("mapped", [vmap_with_config, pmap_with_config])
def test_gradients_of_mapped_calls(mapped: Any) -> None:
    def loss(a: Any, b: Any) -> Any:
        return (mapped(Product(), in_axes=(0, None))(a, b, scale=2.0) ** 2).sum()

    def reference_loss(a: Any, b: Any) -> Any:
        return ((a @ b * 2.0) ** 2).sum()

    gradients, expected_gradients = (jax.grad(f, argnums=(0, 1))(A, B[0]) for f in (loss, reference_loss))
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mapped", [vmap_with_config, pmap_with_config])
def test_an_operation_can_be_mapped_by_name(mapped: Any) -> None:
    q = jax.random.normal(jax.random.key(2), (4, 1, 24, 2, 8))
    k, v = jax.random.normal(jax.random.key(3), (2, 1, 24, 2, 8))
    result = mapped("flash_attention", in_axes=(0, None, None))(q, k, v, causal=True, bias=None)
    rows = [registry.call("flash_attention", element, k, v, causal=True) for element in q]
    np.testing.assert_allclose(result, np.stack(rows), atol=1e-5)


def test_pmap_puts_each_element_on_its_own_device() -> None:
    result = pmap_with_config(Product())(A, B)
    assert len(result.sharding.device_set) == 4
    sums = pmap_with_config(CrossDeviceSum(), axis_name="i")(A)
    np.testing.assert_allclose(sums, np.broadcast_to(A.sum(0), A.shape), rtol=1e-5, atol=1e-5)


class CrossDeviceSum(Kernel[Config, jax.Array]):
    def run(self, a: Any, *, cfg: Any) -> Any:
        return a * 1

    def __call__(self, a: Any, **kwargs: Any) -> Any:
        return jax.lax.psum(super().__call__(a, **kwargs), "i")

    def heuristic_cfg(self, inv: Any) -> Any:
        return Config()


@pytest.mark.parametrize(
    ("in_axes", "args", "message"),
    [
        ((0,), (A, B), "in_axes: takes an int or None for each of the 2 arguments"),
        ((0, 0), (A, B[:3]), r"the mapped axes have the sizes \[3, 4\]"),
        ((0, None), (jnp.ones((9, 5, 3)), B[0]), "9 elements take 9 devices; there are 8"),
    ],
)
def test_invalid_arguments_of_pmap_are_refused(in_axes: Any, args: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pmap_with_config(Product(), in_axes=in_axes)(*args)
