"""A call outside of ``shard_map``, on arrays on a mesh."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import ejkernel_core
from ejkernel_core.extend import mapped_mesh_axes

from .arguments import check_layout
from .mesh import Names, axis_names, check_names, in_words, num_shards

Arguments = dict[str, Any]

ARRAYS = ("query", "key", "value", "q_segment_ids", "kv_segment_ids", "softmax_aux")


@attrs.frozen
class Division:
    """How the arrays of a call are divided among the devices of a mesh. It is hashable."""

    mesh: Any
    #: The axes of the sequence, the batch, the query heads and the key heads.
    sequence: Names
    batch: Names
    heads: Names
    kv_heads: Names
    #: The explicit axes over which a surrounding ``jax.vmap`` maps the call.
    mapped: frozenset[str] = frozenset()

    def spec(self, name: str) -> PartitionSpec:
        """That of an array or a result."""
        if name == "softmax_aux":
            return PartitionSpec(_entry(self.heads))
        batch, sequence = _entry(self.batch), _entry(self.sequence)
        if name == "lse":
            return PartitionSpec(batch, _entry(self.heads), sequence)
        heads = {"query": self.heads, "out": self.heads, "key": self.kv_heads, "value": self.kv_heads}
        return PartitionSpec(batch, sequence, *((_entry(heads[name]),) if name in heads else ()))

    @property
    def manual_axes(self) -> set[str]:
        """Those of the ``shard_map``. Automatic axes that divide nothing here are left to XLA, mapped ones to JAX."""
        types = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        explicit = {name for name, kind in types.items() if kind == AxisType.Explicit}
        return {*self.sequence, *self.batch, *self.heads, *explicit} - self.mapped

    def placed(self, array: Any, name: str) -> Any:
        """An array, where types have shardings: ``shard_map`` takes it as its spec says."""
        types = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        if AxisType.Explicit not in types.values():
            return array
        entries = [
            tuple(axis for axis in _names(entry) if types[axis] == AxisType.Explicit) for entry in self.spec(name)
        ]
        return jax.sharding.reshard(array, NamedSharding(self.mesh, PartitionSpec(*map(_entry, entries))))


def call_on_mesh(arguments: Arguments, mesh: Any, spec: Any) -> Any:
    """The call, inside a ``shard_map`` over the axes that the arrays are divided by."""
    names = axis_names(arguments["axis"])
    check_layout(arguments["layout"])
    arrays = {name: jnp.asarray(arguments[name]) for name in ARRAYS if name in arguments}
    options = {name: value for name, value in arguments.items() if name not in ARRAYS}
    mesh = _mesh(mesh, arrays, names)
    division = _division(mesh, names, arrays, spec)
    _check_division(division, arrays, options["layout"])
    run = _compiled(division, tuple(arrays), tuple(options.items()))
    return run(*(division.placed(array, name) for name, array in arrays.items()))


@functools.lru_cache(maxsize=256)
def _compiled(division: Division, arrays: tuple[str, ...], options: tuple[tuple[str, Any], ...]) -> Any:
    """The jitted function of these arrays."""
    by_name = dict(options)

    def context_attention(*shards: Any) -> Any:
        return ejkernel_core.call("context_attention", **dict(zip(arrays, shards, strict=True)), **by_name)

    specs = tuple(map(division.spec, arrays))
    results = (division.spec("out"), division.spec("lse")) if by_name["return_lse"] else division.spec("out")
    return jax.jit(
        jax.shard_map(
            context_attention, mesh=division.mesh, in_specs=specs, out_specs=results, axis_names=division.manual_axes
        )
    )


def _mesh(mesh: Any, arrays: Mapping[str, Any], names: Names) -> Any:
    """The mesh of the call: that which is given, that of ``jax.set_mesh``, or that of the arrays."""
    shardings = {name: _sharding(array) for name, array in arrays.items()}
    known = {name: sharding.mesh for name, sharding in shardings.items() if sharding is not None}
    context = jax.sharding.get_abstract_mesh()
    if mesh is None:
        mesh = next(iter(known.values()), None) if context.empty else context
    if mesh is None:
        axis = in_words(names)
        raise ValueError(
            f"axis: {axis} is not an axis of a shard_map around this call, and the arrays are on no mesh. Call it "
            f"inside jax.shard_map(..., in_specs=P(None, {axis})), or pass mesh= with this axis"
        )
    check_names(names, mesh)
    for name, of_array in known.items():
        if of_array.axis_names != mesh.axis_names or of_array.shape != mesh.shape:
            raise ValueError(
                f"{name}: takes an array on the mesh of the call, {_mesh_in_words(mesh)}; got one on "
                f"{_mesh_in_words(of_array)}: move it there with jax.device_put"
            )
    return mesh


def _mesh_in_words(mesh: Any) -> str:
    return "(" + ", ".join(f"{name}: {size}" for name, size in mesh.shape.items()) + ")"


def _sharding(array: Any) -> NamedSharding | None:
    """The sharding of an array on a mesh, as far as it is known: that of a traced array is in its type."""
    sharding = jax.typeof(array).sharding if isinstance(array, jax.core.Tracer) else array.sharding
    return sharding if isinstance(sharding, NamedSharding) and not sharding.mesh.empty else None


def _division(mesh: Any, names: Names, arrays: Mapping[str, Any], spec: Any) -> Division:
    """By ``spec``, or as the query is sharded."""
    sharding = _sharding(arrays["query"])
    entries = _entries(spec, sharding.spec if sharding is not None else ())
    if spec is not None and entries[1] not in ((), names):
        raise ValueError(f"spec: its second entry is the sequence, which axis={in_words(names)} divides; got {spec}")
    mapped = mapped_mesh_axes()
    if shared := tuple(name for name in names if name in mapped):
        raise ValueError(
            f"axis: {in_words(shared)} cannot divide the sequence, because a jax.vmap around this call maps over an "
            "axis that is sharded over it: shard that axis over another one, or over none, with jax.sharding.reshard"
        )
    batch, heads = (tuple(a for a in entries[place] if a not in names and a not in mapped) for place in (0, 2))
    check_names((*batch, *heads), mesh)
    has_one_head = arrays["key"].ndim == 4 and arrays["key"].shape[2] == 1
    return Division(mesh, names, batch, heads, () if has_one_head else heads, mapped)


def _entries(spec: Any, default: Any) -> list[Names]:
    """The axes of each of the query's four dimensions."""
    entries: Sequence[Any] = tuple(default if spec is None else spec)
    return [*map(_names, entries), *((),) * 4][:4]


def _names(entry: Any) -> Names:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _entry(names: Names) -> Any:
    return names if len(names) > 1 else next(iter(names), None)


def _check_division(division: Division, arrays: Mapping[str, Any], layout: str) -> None:
    """Raise where the devices do not divide an array."""
    chunks = 2 if layout == "zigzag" and num_shards(division.sequence, division.mesh) > 1 else 1
    for name in ("query", "key"):
        if arrays[name].ndim != 4:
            raise ValueError(f"{name}: takes (batch, length, heads, head_dim); got shape {arrays[name].shape}")
        heads = division.heads if name == "query" else division.kv_heads
        for what, dim, axes, parts in (
            ("batch", 0, division.batch, 1),
            ("length", 1, division.sequence, chunks),
            ("heads", 2, heads, 1),
        ):
            size, count = arrays[name].shape[dim], num_shards(axes, division.mesh)
            if size % (count * parts):
                layout_words = f" in two chunks each, by layout={layout!r}" if parts > 1 else ""
                raise ValueError(
                    f"{name}: its {what} of {size} cannot be divided among the {count} devices of "
                    f"{in_words(axes)}{layout_words}; it takes a multiple of {count * parts}"
                )
