"""The mesh axes over which the sequence is sharded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax

Names = tuple[str, ...]


def axis_names(axis: Any) -> Names:
    """The argument ``axis`` as names.

    >>> axis_names("seq"), axis_names(("node", "card")), axis_names(())
    (('seq',), ('node', 'card'), ())
    """
    names = (axis,) if isinstance(axis, str) else axis
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        kind = type(axis).__name__
        raise TypeError(f"axis: takes the name of a mesh axis, or a tuple of names; got {kind} {axis!r:.60}")
    if len(set(names)) < len(names):
        raise ValueError(f"axis: takes each name once; got {names}")
    return names


def in_words(names: Names) -> str:
    """The names for messages.

    >>> in_words(("node", "card"))
    "'node', 'card'"
    """
    return ", ".join(map(repr, names)) or "no axis"


def check_names(names: Names, mesh: Any) -> None:
    """Raise for a name that is not an axis of the mesh."""
    for name in names:
        if name not in mesh.axis_names:
            raise ValueError(f"axis: takes axes of the mesh, {in_words(tuple(mesh.axis_names))}; got {name!r}")


def is_manual(names: Names) -> bool:
    """Whether the code being traced is inside a ``shard_map`` over all of these axes."""
    return set(names) <= set(jax.sharding.get_abstract_mesh().manual_axes)


def num_shards(names: Names, mesh: Any) -> int:
    """The number of devices along the axes."""
    return math.prod(mesh.shape[name] for name in names)


def check_inside(inv: Mapping[str, Any]) -> None:
    """Raise where a call outside of ``shard_map`` would run: its arrays are not shards. ``axis_size=`` is for plans."""
    if not inv["is_inside"]:
        raise ValueError(
            f"axis: {in_words(inv['axis'])} is not an axis of a shard_map around this call. Call it inside "
            "jax.shard_map, or call ejkernel_context.context_attention with mesh="
        )


def shards_here(names: Names) -> int | None:
    """The number of shards inside ``shard_map``. None outside of it, where nothing says so."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes:
        check_names(names, mesh)
    return num_shards(names, mesh) if is_manual(names) else None
