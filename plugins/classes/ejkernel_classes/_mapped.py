"""One call for many elements, over an axis or over devices, with one choice for all."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from ejkernel_core.extend import ends_at_caller

from ._named import call


def vmap_with_config(
    kernel: Any, in_axes: Any = 0, out_axes: Any = 0, cfg: Any = None, backend: str | None = None
) -> Callable[..., Any]:
    """``jax.vmap`` of a ``Kernel`` object or of an operation given by name, with one configuration for all elements.

    ``in_axes`` is for the positional arguments, as in ``jax.vmap``. Keyword arguments are the same for all elements,
    and may be anything that the kernel takes.

    >>> rows = jnp.ones((3, 1, 4, 2, 8))
    >>> attention = vmap_with_config("flash_attention", in_axes=(0, None, None), backend="reference")
    >>> attention(rows, rows[0], rows[0], causal=True).shape
    (3, 1, 4, 2, 8)
    """
    run = _bind_options(kernel, cfg, backend)

    @ends_at_caller
    def mapped(*args: Any, **kwargs: Any) -> Any:
        return jax.vmap(lambda *mapped_args: run(*mapped_args, **kwargs), in_axes, out_axes)(*args)

    return mapped


def pmap_with_config(
    kernel: Any,
    axis_name: str = "devices",
    in_axes: Any = 0,
    out_axes: int = 0,
    devices: Sequence[Any] | None = None,
    cfg: Any = None,
    backend: str | None = None,
) -> Callable[..., Any]:
    """Like ``jax.pmap``: run one element of the mapped axes on each device, by ``jax.shard_map``.

    Inside, collectives can use ``axis_name``. There may be fewer elements than devices. ``in_axes`` is an int for all
    arguments, or an int or None for each one; ``out_axes`` is an int.

    >>> rows = jnp.ones((1, 1, 4, 2, 8))  # one element, which one device is enough for
    >>> attention = pmap_with_config("flash_attention", in_axes=(0, None, None), backend="reference")
    >>> attention(rows, rows[0], rows[0], causal=True).shape
    (1, 1, 4, 2, 8)
    """
    run = _bind_options(kernel, cfg, backend)

    def mapped(*args: Any, **kwargs: Any) -> Any:
        axes = in_axes if isinstance(in_axes, (tuple, list)) else (in_axes,) * len(args)
        if len(axes) != len(args) or not all(axis is None or isinstance(axis, int) for axis in axes):
            raise ValueError(f"in_axes: takes an int or None for each of the {len(args)} arguments; got {in_axes!r}")
        mesh = _mesh(args, axes, axis_name, devices)

        def run_shard(*shards: Any) -> Any:
            # A shard is a slice of length one.
            elements = (_map_leaves(shard, axis, jnp.squeeze) for shard, axis in zip(shards, axes, strict=True))
            return _map_leaves(run(*elements, **kwargs), 0, jnp.expand_dims)

        specs = tuple(
            jax.tree.map(lambda leaf, axis=axis: _spec(axis, np.ndim(leaf), axis_name), arg)
            for arg, axis in zip(args, axes, strict=True)
        )
        results = jax.shard_map(run_shard, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(axis_name))(*args)
        return _map_leaves(results, out_axes, lambda leaf, axis: jnp.moveaxis(leaf, 0, axis))

    return mapped


def _bind_options(kernel: Any, cfg: Any, backend: str | None) -> Callable[..., Any]:
    run = functools.partial(call, kernel) if isinstance(kernel, str) else kernel
    return functools.partial(run, cfg=cfg, backend=backend)


def _map_leaves(tree: Any, axis: int | None, change: Callable[[Any, int], Any]) -> Any:
    return tree if axis is None else jax.tree.map(lambda leaf: change(leaf, axis), tree)


def _spec(axis: int | None, rank: int, name: str) -> PartitionSpec:
    return PartitionSpec() if axis is None else PartitionSpec(*(None,) * (axis % max(rank, 1)), name)


def _mesh(args: Sequence[Any], axes: Sequence[int | None], name: str, devices: Sequence[Any] | None) -> Mesh:
    """A mesh with one device for each element."""
    pairs = [
        (leaf, axis) for arg, axis in zip(args, axes, strict=True) if axis is not None for leaf in jax.tree.leaves(arg)
    ]
    sizes = {np.shape(leaf)[axis] for leaf, axis in pairs}
    if len(sizes) != 1:
        raise ValueError(
            f"pmap_with_config: the mapped axes have the sizes {sorted(sizes)}; they have to be of one size"
        )
    (count,) = sizes
    available = list(jax.local_devices() if devices is None else devices)
    if count > len(available):
        raise ValueError(f"pmap_with_config: {count} elements take {count} devices; there are {len(available)}")
    return Mesh(np.array(available[:count]), (name,), axis_types=(AxisType.Auto,))
