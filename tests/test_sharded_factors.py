"""Results whose axes have a factor or an offset, on a mesh: values of arrays on one device, and what is gathered."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel_core import Axes, Operation, Registry, hookimpl

RNG = np.random.default_rng(3)
KEY, VALUE = RNG.normal(size=(2, 4, 6, 4, 3))
#: The key and the value of a head stand together, so that a device has both of its heads.
AXES = Axes(
    {"key": "batch rows heads dim", "value": "batch rows heads dim"},
    {"pairs": "batch rows 2*heads dim", "sums": "batch rows+1 heads"},
    independent="batch heads",
    whole="rows dim",
    vmap="batch",
)


def compute(a: Any) -> Any:
    key, value = a["key"], a["value"]
    pairs = jnp.stack([key, value], 3).reshape(*key.shape[:2], -1, key.shape[-1])
    sums = jnp.pad(jnp.cumsum((key * value).sum(-1), 1), ((0, 0), (1, 0), (0, 0)))
    return pairs, sums


@pytest.fixture(scope="module")
def registry() -> Registry:
    """Each operation has a kernel that the compiler cannot partition, beside its reference."""

    def kernel(run: Any, rank: int) -> Any:
        @hookimpl
        def run_backend(inv: Any, cfg: Any) -> Any:
            return run(inv)

        return SimpleNamespace(run_backend=run_backend, PLATFORMS={"cpu": rank}, OPAQUE=("cpu",) * rank)

    registry = Registry(plugins="")
    operation = Operation(name="pairs", signature=lambda key, value: None, axes=AXES, backward="pairs_bwd")
    registry.register(operation)
    registry.register(operation.gradients())
    for backend, rank in (("reference", 0), ("plain", 1)):
        registry.register(kernel(compute, rank), f"pairs.{backend}")
        registry.register(kernel(lambda inv: operation.gradients_by_jax(compute, inv), rank), f"pairs_bwd.{backend}")
    return registry


def gradients(call: Any) -> Any:
    return jax.grad(lambda key, value: sum(jnp.sin(out).sum() for out in call(key, value)), (0, 1))


def mapped(call: Any) -> Any:
    return lambda *arrays: jax.vmap(call)(*(jnp.stack([x, 2 * x]) for x in arrays))


#: How the arrays are sharded, and how the two results are: as the arrays along each axis that they share with them.
SPECS = {
    "heads": (P(None, None, "a"), [P(None, None, "a"), P(None, None, "a")]),
    "batch and heads": (P("b", None, "a"), [P("b", None, "a"), P("b", None, "a")]),
    "heads over both": (P(None, None, ("a", "b")), [P(None, None, ("a", "b")), P(None, None, ("a", "b"))]),
    "rows": (P(None, "a", "b"), [P(None, None, "b"), P(None, None, "b")]),
}


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["automatic", "explicit"])
def test_a_result_with_a_factor_is_sharded_as_its_axis(registry: Registry, kind: AxisType, spec: str) -> None:
    call = lambda key, value: registry.call("pairs", key, value)
    spec_of_arrays, specs_of_results = SPECS[spec]
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind, kind), devices=jax.devices()[:4])
    arrays = jax.device_put((KEY, VALUE), NamedSharding(mesh, spec_of_arrays))
    with jax.set_mesh(mesh):
        for program in (call, gradients(call), mapped(call), gradients(mapped(call))):
            expected = jax.jit(program)(KEY, VALUE)
            jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, 1e-5, 1e-6), jax.jit(program)(*arrays), expected)
        results = jax.jit(call)(*arrays)
        compiled = jax.jit(call).lower(*arrays).compile().as_text()
    for result, spec_of_result in zip(results, specs_of_results, strict=True):
        expected_sharding = NamedSharding(mesh, spec_of_result)
        # XLA may leave a gathered axis sharded in the result.
        is_free = kind is AxisType.Auto and spec == "rows"
        assert is_free or result.sharding.is_equivalent_to(expected_sharding, result.ndim)
    gathers = len(re.findall(r" all-gather(?:-start)?\(", compiled))
    assert (gathers > 0) is (spec == "rows")
