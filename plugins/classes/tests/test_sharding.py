"""The text of a sharding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel_classes import sharding_fingerprint


def test_the_fingerprint_of_a_sharding_is_its_partition() -> None:
    def fingerprint(axes: tuple[int, ...], names: str, spec: P) -> str:
        mesh = jax.make_mesh(axes, tuple(names), axis_types=(AxisType.Auto,) * len(axes))
        return sharding_fingerprint(jax.device_put(jnp.zeros((8, 4)), NamedSharding(mesh, spec)))

    assert sharding_fingerprint(jnp.zeros(3)) == ""
    assert sharding_fingerprint(np.zeros(3)) == ""
    assert fingerprint((1,), "a", P("a")) == ""
    assert fingerprint((4, 2), "ab", P("a")) == "4x1 on 8"
    assert fingerprint((4, 2), "xy", P("x", None)) == "4x1 on 8"
    assert fingerprint((4, 2), "ab", P("a", "b")) == "4x2 on 8"
    assert fingerprint((4, 2), "ab", P(("a", "b"))) == "8x1 on 8"
    assert fingerprint((4, 2), "ab", P()) == "1x1 on 8"
    assert fingerprint((4,), "a", P("a")) == "4x1 on 4"


def test_explicit_shardings_have_a_fingerprint_under_jit() -> None:
    for axis_type, expected in ((AxisType.Explicit, "4x2 on 8"), (AxisType.Auto, "")):
        mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(axis_type, axis_type))
        fingerprints: list[str] = []
        with jax.set_mesh(mesh):
            array = jax.device_put(jnp.zeros((8, 4)), NamedSharding(mesh, P("a", "b")))
            jax.jit(lambda x: fingerprints.append(sharding_fingerprint(x)))(array)  # noqa: B023
        assert fingerprints == [expected]
