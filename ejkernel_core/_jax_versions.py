"""What JAX does not offer in public, said once: each function tells what it relies on, and since when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

try:
    # ``jax.extend.core`` is its public home, but importing anything of ``jax.extend`` imports Pallas: 15 to 20 ms.
    from jax._src.core import Primitive
except ImportError:
    from jax.extend.core import Primitive

__all__ = ["Primitive", "aval_like", "is_sharded", "lower_with_devices", "sharded_like", "vary_alike"]


def vary_alike(arrays: Sequence[Any]) -> list[Any]:
    """The arrays, each varying over every mesh axis that any of them varies over.

    Inside ``shard_map``, the gradient of what is replicated is a sum over the devices. JAX adds that sum where a
    replicated value is cast to a varying one, so the cast has to be made before a custom gradient.
    ``aval.mat.varying`` holds the axes (seen on 0.10.2, 0.11.2, 0.12.0.1).
    """
    axes = [_varying(array) for array in arrays]
    every = frozenset[str]().union(*axes)
    return [
        jax.lax.pcast(array, tuple(sorted(every - own)), to="varying") if every - own else array
        for array, own in zip(arrays, axes, strict=True)
    ]


def aval_like(aval: Any, result: jax.ShapeDtypeStruct) -> Any:
    """The abstract value of a result that varies over the mesh axes ``aval`` varies over.

    Under a mesh with explicit axes it is sharded as the result says; a result that does not say is replicated.
    """
    spec = result.sharding.spec if isinstance(result.sharding, NamedSharding) else (None,) * len(result.shape)
    sharding = aval.sharding.update(spec=PartitionSpec(*spec))
    return aval.update(shape=result.shape, dtype=result.dtype, weak_type=False, sharding=sharding)


def is_sharded(array: Any) -> bool:
    """Whether the array's type says that it is cut: only explicit mesh axes are a part of types."""
    return any(axes is not None for axes in jax.typeof(array).sharding.spec)


def sharded_like(array: Any, other: Any) -> Any:
    """``array`` with the sharding of ``other``, where shardings are part of the type (explicit mesh axes)."""
    wanted = jax.typeof(other).sharding
    return array if jax.typeof(array).sharding == wanted else jax.sharding.reshard(array, wanted)


def lower_with_devices(primitive: Any) -> None:
    """Have JAX say for which devices it lowers: callbacks and custom partitionings inside a kernel need to know.

    JAX looks for such primitives in the jaxpr it compiles, and cannot see into ours
    (``prim_requires_devices_during_lowering``, seen on 0.10.2, 0.11.2, 0.12.0.1).
    """
    from jax._src import dispatch

    dispatch.prim_requires_devices_during_lowering.add(primitive)


def _varying(array: Any) -> frozenset[str]:
    kind = getattr(jax.typeof(array), "mat", None)
    return frozenset(kind.varying) if kind is not None else frozenset()
