"""What JAX does not offer in public, said once: each function tells what it relies on, and since when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec


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


def aval_like(aval: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """An abstract value of another shape that varies over the same mesh axes and is otherwise replicated."""
    replicated = aval.sharding.update(spec=PartitionSpec(*(None,) * len(shape)))
    return aval.update(shape=shape, dtype=dtype, weak_type=False, sharding=replicated)


def _varying(array: Any) -> frozenset[str]:
    kind = getattr(jax.typeof(array), "mat", None)
    return frozenset(kind.varying) if kind is not None else frozenset()
