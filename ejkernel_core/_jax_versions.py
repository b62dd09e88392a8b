"""Code that relies on undocumented behaviour of JAX. Each function says on which, and in which versions."""

from __future__ import annotations

import contextlib
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
    "lower_with_devices",
    "reshard_leading",
    "reshard_like",
    "unchecked_varying",
    "vary_alike",
]


def vary_alike(arrays: Sequence[Any]) -> list[Any]:
    """Cast the arrays so that each varies over every mesh axis that any of them varies over.

    Inside ``shard_map``, the gradient of a replicated array is a sum over the devices. JAX adds that sum where a
    replicated value is cast to a varying one, so the cast has to come before a custom gradient.
    ``aval.mat.varying`` holds the axes (in 0.10.2, 0.11.2 and 0.12.0.1).
    """
    axes = [_varying(array) for array in arrays]
    varying = frozenset[str]().union(*axes)
    return [
        jax.lax.pcast(array, tuple(sorted(varying - axes_of_array)), to="varying") if varying - axes_of_array else array
        for array, axes_of_array in zip(arrays, axes, strict=True)
    ]


def unchecked_varying() -> contextlib.AbstractContextManager[None]:
    """Turn off ``check_vma`` of ``shard_map`` for a ``with`` block.

    A kernel computes on its shard, and its arrays do not vary over a mesh. With the check on, ``pallas_call`` would
    demand to know how each of its outputs varies (``jax._src.config._check_vma``, in 0.10.2, 0.11.2 and 0.12.0.1).
    """
    from jax._src import config

    check: contextlib.AbstractContextManager[None] = config._check_vma(False)
    return check


def avals_like(aval: Any, results: Sequence[jax.ShapeDtypeStruct]) -> list[Any]:
    """The abstract values of results that vary over the mesh axes that ``aval`` varies over.

    Under a mesh with explicit axes, each has the sharding of its result; without a sharding it is replicated.
    """
    avals = []
    for result in results:
        spec = result.sharding.spec if isinstance(result.sharding, NamedSharding) else (None,) * len(result.shape)
        sharding = aval.sharding.update(spec=PartitionSpec(*spec))
        avals.append(aval.update(shape=result.shape, dtype=result.dtype, weak_type=False, sharding=sharding))
    return avals


def explicit_spec(array: Any) -> tuple[Any, ...]:
    """The mesh axes that each axis of the array is sharded over. Its type has the explicit ones only."""
    spec = jax.typeof(array).sharding.spec
    return (*spec, *(None,) * (array.ndim - len(spec)))


def is_sharded(array: Any) -> bool:
    """Whether the array is sharded over explicit mesh axes."""
    return any(axes is not None for axes in explicit_spec(array))


def reshard_leading(array: Any, mesh: Any, mesh_axes: Any, leading: bool) -> Any:
    """Reshard an array for ``shard_map`` over ``mesh_axes``: its first axis has them where it is a ``leading`` mapped
    axis, and no other axis does. ``shard_map`` takes arrays whose types agree with its specs.
    """
    names = {mesh_axes} if isinstance(mesh_axes, str) else set(mesh_axes)
    spec = [_without(axes, names) for axes in explicit_spec(array)]
    spec[:1] = [mesh_axes] if leading else spec[:1]
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    current = jax.typeof(array).sharding
    is_outside = current.mesh.empty and not leading  # an array from outside of any mesh has no sharding to change
    return array if is_outside or sharding == current else jax.sharding.reshard(array, sharding)


def _without(axes: Any, names: set[str]) -> Any:
    rest = tuple(axis for axis in ((axes,) if isinstance(axes, str) else axes or ()) if axis not in names)
    return rest if len(rest) > 1 else next(iter(rest), None)


def reshard_like(array: Any, other: Any) -> Any:
    """Give an array the sharding of ``other``, where shardings are part of the type (explicit mesh axes).

    Where ``other`` comes from outside of any mesh, the array stays as it is.
    """
    sharding = jax.typeof(other).sharding
    if sharding.mesh.empty or jax.typeof(array).sharding == sharding:
        return array
    return jax.sharding.reshard(array, sharding)


def lower_with_devices(primitive: Any) -> None:
    """Have JAX pass the devices when it lowers this primitive: callbacks and custom partitionings in kernels need them.

    JAX searches the jaxpr that it compiles for primitives that need devices, and cannot see into this one
    (``prim_requires_devices_during_lowering``, in 0.10.2, 0.11.2 and 0.12.0.1).
    """
    from jax._src import dispatch

    dispatch.prim_requires_devices_during_lowering.add(primitive)


def _varying(array: Any) -> frozenset[str]:
    kind = getattr(jax.typeof(array), "mat", None)
    return frozenset(kind.varying) if kind is not None else frozenset()
