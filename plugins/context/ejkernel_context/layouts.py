"""The order in which a sequence is divided among devices.

With n devices, the layout "zigzag" divides the sequence into 2n chunks, and device r has the chunks r and 2n - 1 - r.
So under a causal mask all devices have the same work. With "contiguous", device r has the r-th of n equal parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .mesh import Names, axis_names, check_names, in_words, num_shards

LAYOUTS = ("zigzag", "contiguous")


def chunk_order(shards: int) -> list[int]:
    """The chunks of the sequence in the order of the devices.

    >>> chunk_order(2)
    [0, 3, 1, 2]
    """
    return [chunk for shard in range(shards) for chunk in (shard, 2 * shards - 1 - shard)]


def chunk_places(shards: int) -> list[int]:
    """For each chunk of the sequence, its place in the order of the devices."""
    return [int(place) for place in np.argsort(chunk_order(shards))]


def in_sequence(array: Any, shards: int, dim: int) -> Any:
    """An array whose chunks are in the order of the devices, in the order of the sequence."""
    return _reordered(array, chunk_places(shards), dim)


def by_device(array: Any, shards: int, dim: int) -> Any:
    """The inverse of ``in_sequence``."""
    return _reordered(array, chunk_order(shards), dim)


def _reordered(array: Any, order: Sequence[int], dim: int) -> Any:
    if len(order) == 2:  # on one device, all orders are one
        return array
    chunks = np if isinstance(array, np.ndarray) else jnp
    parts = chunks.split(array, len(order), dim)
    return chunks.concatenate([parts[chunk] for chunk in order], dim)


def zigzag(tree: Any, axis: Any = None, *, mesh: Any = None, shards: int | None = None, dim: int = 1) -> Any:
    """Whole arrays in the zigzag order: tokens, positions and labels, before they are sharded.

    >>> tokens = np.arange(8)[None]
    >>> zigzag(tokens, shards=2)
    array([[0, 1, 6, 7, 2, 3, 4, 5]])

    With ``axis``, the results are also sharded over it, and over the other mesh axes as before:

    >>> mesh = jax.make_mesh((1,), ("seq",))
    >>> tuple(zigzag(jnp.arange(8)[None], "seq", mesh=mesh).sharding.spec)
    (None, 'seq')

    Labels have to be shifted before, because the next token may be on another device.

    Args:
      tree: An array, or any pytree of arrays. NumPy arrays stay on the host where only ``shards`` is given.
      axis: The name of the mesh axis that the sequence is sharded over, or a tuple of names.
      mesh: The mesh with this axis; by default that of ``jax.set_mesh``.
      shards: The number of devices, instead of ``axis``.
      dim: The dimension of the arrays that is the sequence.
    """
    return _arranged(tree, axis, mesh, shards, dim, by_device)


def unzigzag(tree: Any, axis: Any = None, *, mesh: Any = None, shards: int | None = None, dim: int = 1) -> Any:
    """The inverse of ``zigzag``, with the same arguments: whole arrays in the order of the sequence.

    >>> unzigzag(zigzag(np.arange(8)[None], shards=2), shards=2)
    array([[0, 1, 2, 3, 4, 5, 6, 7]])
    """
    return _arranged(tree, axis, mesh, shards, dim, in_sequence)


def _arranged(tree: Any, axis: Any, mesh: Any, shards: int | None, dim: int, arrange: Any) -> Any:
    if (axis is None) == (shards is None):
        raise TypeError("axis, shards: takes one of the two, a mesh axis or a number of devices")
    if axis is None:
        return jax.tree.map(lambda leaf: arrange(*_checked(leaf, shards, dim)), tree)
    names = axis_names(axis)
    mesh = _mesh(mesh, names)
    count = num_shards(names, mesh)

    def on_mesh(leaf: Any) -> Any:
        array, _, place = _checked(leaf, count, dim)
        whole = _sharded(array, mesh, names, place, is_whole=True)
        return _sharded(arrange(whole, count, place), mesh, names, place, is_whole=False)

    return jax.tree.map(on_mesh, tree)


def _mesh(mesh: Any, names: Names) -> Any:
    if mesh is None:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            raise ValueError(f"mesh: takes the mesh with {in_words(names)}, by default that of jax.set_mesh; got None")
    check_names(names, mesh)
    return mesh


def _checked(leaf: Any, shards: Any, dim: int) -> tuple[Any, int, int]:
    """An array, the number of devices, and its dimension that is the sequence."""
    if isinstance(shards, bool) or not isinstance(shards, int) or shards < 1:
        raise ValueError(f"shards: takes a number of devices, at least 1; got {shards!r}")
    array = leaf if isinstance(leaf, (jax.Array, np.ndarray)) else jnp.asarray(leaf)
    if not -array.ndim <= dim < array.ndim:
        raise ValueError(f"dim: takes a dimension of every array; got {dim} for an array of shape {array.shape}")
    length = array.shape[dim]
    if length % (2 * shards) and shards > 1:
        raise ValueError(
            f"zigzag: takes a sequence of a multiple of 2 * {shards} = {2 * shards} tokens, two chunks for each "
            f"device; got {length} in dimension {dim} of an array of shape {array.shape}: pad it"
        )
    return array, shards, dim % array.ndim


def _sharded(array: Any, mesh: Any, names: Names, dim: int, is_whole: bool) -> Any:
    """The array with its sequence on all of the devices, or divided among them; its other dimensions stay as they are.

    Where shardings are part of types, chunks can only be reordered while the sequence is whole.
    """
    is_traced = isinstance(array, jax.core.Tracer)
    has_types = AxisType.Explicit in mesh.axis_types
    if is_whole and not has_types:
        return array
    spec = _spec(array, is_traced and not has_types)
    spec[dim] = None if is_whole else (names if len(names) > 1 else next(iter(names), None))
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    if is_traced:
        return jax.sharding.reshard(array, sharding) if has_types else jax.lax.with_sharding_constraint(array, sharding)
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return jax.jit(jax.sharding.reshard if has_types else jax.lax.with_sharding_constraint, static_argnums=1)(
            array, sharding
        )
    return jax.device_put(array, sharding)


def _spec(array: Any, is_unknown: bool) -> list[Any]:
    """The mesh axes of each dimension."""
    if is_unknown:  # automatic axes, while tracing
        return [PartitionSpec.UNCONSTRAINED] * array.ndim
    sharding = getattr(jax.typeof(array) if isinstance(array, jax.core.Tracer) else array, "sharding", None)
    spec = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
    return [*spec, *(None,) * (array.ndim - len(spec))]
