"""A call on the shards of four devices, and the same on the whole sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel_context import context_attention, unzigzag, zigzag
from ejkernel_ops import flash_attention

Arrays = dict[str, Any]
#: The dimension of each array that is the sequence.
DIMS = {"query": 1, "key": 1, "value": 1, "q_segment_ids": 1, "kv_segment_ids": 1, "out": 1, "lse": 2}


@attrs.frozen(kw_only=True)
class Case:
    """A call, on a sequence that is sharded over some devices."""

    backend: str | None = None
    length: int = 56
    kv_length: int | None = None
    heads: tuple[int, int] = (8, 4)
    dims: tuple[int, int] = (8, 8)
    devices: int = 4
    layout: str = "zigzag"
    kind: AxisType = AxisType.Auto
    check_vma: bool = True
    dtype: str = "float32"
    sinks: int | None = None
    has_ids: bool = False
    options: dict[str, Any] = attrs.field(factory=dict)

    @property
    def mesh(self) -> Any:
        return jax.make_mesh((self.devices,), ("seq",), axis_types=(self.kind,), devices=jax.devices()[: self.devices])

    def arrays(self) -> Arrays:
        """The whole arrays, all of them different."""
        numbers = np.random.default_rng(5)
        (heads, kv_heads), (dim, value_dim) = self.heads, self.dims
        kv_length = self.kv_length or self.length

        def draw(*shape: int) -> Any:
            return jnp.asarray(numbers.standard_normal(shape), self.dtype)

        arrays = {
            "query": draw(2, self.length, heads, dim),
            "key": draw(2, kv_length, kv_heads, dim),
            "value": draw(2, kv_length, kv_heads, value_dim),
        }
        if self.sinks is not None:
            arrays["softmax_aux"] = draw(heads, self.sinks)
        if self.has_ids:  # the second row has padding at the end
            ids = np.stack([np.arange(self.length) // 13 + 1, np.where(np.arange(self.length) < 37, 1, 0)])
            arrays["q_segment_ids"] = arrays["kv_segment_ids"] = jnp.asarray(ids)
        return arrays

    def cotangents(self) -> Arrays:
        numbers = np.random.default_rng(6)
        out, lse = (2, self.length, self.heads[0], self.dims[1]), (2, self.heads[0], self.length)
        return {"out": jnp.asarray(numbers.standard_normal(out)), "lse": jnp.asarray(numbers.standard_normal(lse))}

    def in_order(self, arrays: Arrays) -> Arrays:
        """Whole arrays as this layout has them, on the mesh."""
        return {name: self._placed(array, DIMS.get(name)) for name, array in arrays.items()}

    def _placed(self, array: Any, dim: int | None) -> Any:
        if dim is None:
            return jax.device_put(array, NamedSharding(self.mesh, P()))
        if self.layout == "zigzag":
            return zigzag(array, "seq", mesh=self.mesh, dim=dim)
        return jax.device_put(array, NamedSharding(self.mesh, P(*(None,) * dim, "seq")))

    def in_sequence(self, array: Any, name: str) -> Any:
        """The inverse."""
        if self.layout == "contiguous" or name not in DIMS:
            return array
        return unzigzag(array, "seq", mesh=self.mesh, dim=DIMS[name])

    def call(self, shards: Arrays) -> Any:
        """The call on shards, inside ``shard_map``."""
        options = {**self.options, "backend": self.backend, "layout": self.layout}
        return context_attention(**shards, axis="seq", return_lse=True, **options)

    def on_shards(self, arrays: Arrays) -> Any:
        """The call on whole arrays in the order of the layout."""
        specs = {name: P(None, "seq") if name in DIMS else P() for name in arrays}
        run = jax.shard_map(
            self.call,
            mesh=self.mesh,
            in_specs=(specs,),
            out_specs=(P(None, "seq"), P(None, None, "seq")),
            check_vma=self.check_vma,
        )
        return run(arrays)

    def whole(self, arrays: Arrays) -> Any:
        """Attention over the whole sequence by its definition."""
        return flash_attention(**arrays, return_lse=True, backend="reference", **self.options)


def with_gradients(call: Callable[[Arrays], Any]) -> Callable[[Arrays, Arrays], tuple[Any, Arrays]]:
    """The results of a call, and the gradients of all its floats for these cotangents."""

    def run(arrays: Arrays, cotangents: Arrays) -> tuple[Any, Arrays]:
        floats = {name: array for name, array in arrays.items() if jnp.issubdtype(array.dtype, jnp.floating)}

        def loss(floats: Arrays) -> Any:
            out, lse = call({**arrays, **floats})
            seen = jnp.where(jnp.isneginf(lse), 0, lse)
            return (out * cotangents["out"]).sum() + (seen * cotangents["lse"]).sum(), (out, lse)

        (_, results), gradients = jax.value_and_grad(loss, has_aux=True)(floats)
        return results, gradients

    return run


@pytest.fixture(scope="session")
def compare() -> Callable[..., None]:
    """``compare(case)``: the results and gradients on shards are those on the whole sequence."""

    def run(case: Case, tolerance: float = 1e-5) -> None:
        arrays, cotangents = case.arrays(), case.cotangents()
        expected, expected_gradients = jax.jit(with_gradients(case.whole))(arrays, cotangents)
        results, gradients = jax.jit(with_gradients(case.on_shards))(case.in_order(arrays), case.in_order(cotangents))
        for name, result, value in zip(("out", "lse"), results, expected, strict=True):
            close(case.in_sequence(result, name), value, tolerance, name)
        for name, value in expected_gradients.items():
            close(case.in_sequence(gradients[name], name), value, tolerance, f"the gradient of {name}")

    return run


def close(actual: Any, expected: Any, tolerance: float, name: str) -> None:
    actual, expected = (np.asarray(array, np.float64) for array in (actual, expected))
    assert np.abs(np.where(np.isneginf(expected), 0, expected)).max() > 0.05, f"{name} has nothing to compare"
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.fixture(scope="session")
def make_case() -> type[Case]:
    return Case
