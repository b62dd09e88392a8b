"""The sharding of an array as text, as in ejKernel's documents."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import AxisType


def sharding_fingerprint(array: Any) -> str:
    """How an array is sharded: the number of shards along each axis, and of devices; "" for one device, or unknown.

    The names of mesh axes are not part of it.

    >>> sharding_fingerprint(jax.numpy.zeros((4, 2)))
    ''
    """
    sharding = _known_sharding(array)
    if sharding is None or sharding.num_devices <= 1:
        return ""
    if AxisType.Manual in getattr(getattr(sharding, "mesh", None), "axis_types", ()):
        return _fingerprint_in_shard_map(array, sharding)
    shard_shape = sharding.shard_shape(array.shape)
    shards = [size // max(shard_size, 1) for size, shard_size in zip(array.shape, shard_shape, strict=True)]
    return f"{'x'.join(map(str, shards))} on {sharding.num_devices}"


def _fingerprint_in_shard_map(array: Any, sharding: Any) -> str:
    """The fingerprint inside ``shard_map`` over some mesh axes, for the others. JAX has no ``shard_shape`` there."""
    mesh = sharding.mesh
    sizes = dict(mesh.shape)
    others = {n: sizes[n] for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Manual}
    mesh_axes: list[Any] = [(axes,) if isinstance(axes, str) else axes or () for axes in sharding.spec]
    mesh_axes += [()] * (array.ndim - len(mesh_axes))
    count = math.prod(others.values())
    shards = [math.prod(others.get(name, 1) for name in axes) for axes in mesh_axes]
    return f"{'x'.join(map(str, shards))} on {count}" if count > 1 else ""


def _known_sharding(array: Any) -> Any:
    """The sharding of an array. A tracer has one where the mesh has explicit axes: it is a part of the type there."""
    if not isinstance(array, jax.core.Tracer):
        return getattr(array, "sharding", None)
    sharding = jax.typeof(array).sharding
    return sharding if AxisType.Explicit in sharding.mesh.axis_types else None
