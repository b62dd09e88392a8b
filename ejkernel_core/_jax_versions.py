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

__all__ = [
    "Primitive",
    "avals_like",
    "explicit_spec",
    "is_sharded",
    "leading_over",
    "lower_with_devices",
    "sharded_like",
    "vary_alike",
]


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


def avals_like(aval: Any, results: Sequence[jax.ShapeDtypeStruct]) -> list[Any]:
    """The abstract values of results that vary over the mesh axes ``aval`` varies over.

    Under a mesh with explicit axes they are sharded as the results say; one that does not say is replicated.
    """
    every = []
    for result in results:
        spec = result.sharding.spec if isinstance(result.sharding, NamedSharding) else (None,) * len(result.shape)
        sharding = aval.sharding.update(spec=PartitionSpec(*spec))
        every.append(aval.update(shape=result.shape, dtype=result.dtype, weak_type=False, sharding=sharding))
    return every


def explicit_spec(array: Any) -> tuple[Any, ...]:
    """What each axis of the array is sharded over, as its type says: only explicit mesh axes are a part of types."""
    spec = jax.typeof(array).sharding.spec
    return (*spec, *(None,) * (array.ndim - len(spec)))


def is_sharded(array: Any) -> bool:
    """Whether the array's type says that it is cut."""
    return any(axes is not None for axes in explicit_spec(array))


def leading_over(array: Any, mesh: Any, over: Any, leading: bool) -> Any:
    """``array`` with its first axis sharded over these mesh axes, or none of its axes, where it has no ``leading``
    axis that is mapped. The types of what ``shard_map`` is given have to say what its specs say.
    """
    names = {over} if isinstance(over, str) else set(over)
    spec = [_without(axes, names) for axes in explicit_spec(array)]
    spec[:1] = [over] if leading else spec[:1]
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    own = jax.typeof(array).sharding
    is_outside = own.mesh.empty and not leading  # it has no sharding that could be another one
    return array if is_outside or sharding == own else jax.sharding.reshard(array, sharding)


def _without(axes: Any, names: set[str]) -> Any:
    kept = tuple(axis for axis in ((axes,) if isinstance(axes, str) else axes or ()) if axis not in names)
    return kept if len(kept) > 1 else next(iter(kept), None)


def sharded_like(array: Any, other: Any) -> Any:
    """``array`` with the sharding of ``other``, where shardings are part of the type (explicit mesh axes).

    What comes from outside of every mesh has none to be brought to.
    """
    wanted = jax.typeof(other).sharding
    if wanted.mesh.empty or jax.typeof(array).sharding == wanted:
        return array
    return jax.sharding.reshard(array, wanted)


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
