"""A call on arrays that are sharded over the devices of a mesh, outside of ``shard_map``.

Where the axes of the mesh are explicit, shardings are a part of types: the call is divided while JAX traces, and is
lowered as ``shard_map``. Where they are automatic, the compiler decides on shardings, and asks how the call is divided
(``custom_partitioning``). Either way each device computes the call on its shard, and its kernel is chosen for that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ._jax_versions import by_custom_partitioning, mapped_mesh_axes, partitioner_spec, short_locations
from ._partitioning import Partitioning, Shards, Spec, spec_of

#: From the arrays of a shard, and the options that it does not have from the whole call, to its results.
Bind = Callable[[Sequence[Any], Mapping[str, Any]], Sequence[Any]]
#: Puts the settings of JAX with which the call was traced into effect: it may be lowered with others.
InEffect = Callable[[], AbstractContextManager[Any]]


# -- explicit axes -----------------------------------------------------------------------------------------------------


def as_explicit(array: Any) -> Any:
    """The type of an array that is sharded over a mesh, as if the axes of that mesh were explicit. Any other value
    stays as it is.
    """
    sharding = getattr(array, "sharding", None)
    if isinstance(array, jax.core.Tracer) or not isinstance(sharding, NamedSharding) or sharding.mesh.size < 2:
        return array
    mesh = AbstractMesh(
        tuple(sharding.mesh.shape.values()),
        tuple(sharding.mesh.axis_names),
        axis_types=(AxisType.Explicit,) * len(sharding.mesh.axis_names),
    )
    return jax.ShapeDtypeStruct(
        array.shape,
        array.dtype,
        sharding=NamedSharding(mesh, sharding.spec),
        weak_type=getattr(array, "weak_type", False),
    )


def is_explicit(array: Any) -> bool:
    """Whether the sharding of an array is part of its type, as far as it is sharded."""
    sharding = jax.typeof(array).sharding if isinstance(array, jax.core.Tracer) else getattr(array, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return True
    kinds = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
    return all(kinds[name] == AxisType.Explicit for axes in spec_of(sharding.spec, 0) for name in axes)


def shards_of_types(rule: Partitioning, avals: Sequence[Any], mesh: Any) -> Shards:
    """How a call on arrays of these types is divided."""
    return rule.shards(dict(mesh.shape), specs_of_types(avals))


def specs_of_types(avals: Sequence[Any]) -> list[Spec]:
    """The shardings of the types of these arrays, without the mesh axes that a surrounding ``jax.vmap`` maps over."""
    specs = [spec_of(() if aval.sharding is None else aval.sharding.spec, len(aval.shape)) for aval in avals]
    mapped = mapped_mesh_axes()
    return [tuple(tuple(name for name in names if name not in mapped) for names in spec) for spec in specs]


def partition_spec(spec: Spec) -> PartitionSpec:
    """The ``PartitionSpec`` for the mesh axes of each dimension."""
    return PartitionSpec(*(axes if len(axes) > 1 else next(iter(axes), None) for axes in spec))


def by_shard_map(shards: Shards, mesh: Any, axes: Sequence[str], bind: Bind, in_effect: InEffect) -> Callable[..., Any]:
    """The function of whole arrays that binds the call on every shard over these axes of the mesh. It reshards arrays
    as the shards need them.
    """
    specs = [*map(partition_spec, shards.specs_of_arrays)]
    on_shards = jax.shard_map(
        _on_shard(shards, bind, in_effect),
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=tuple(map(partition_spec, shards.specs_of_results)),
        axis_names={*axes},
        check_vma=False,
    )

    def run(*arrays: Any) -> Any:
        return on_shards(*(_reshard(array, mesh, spec) for array, spec in zip(arrays, specs, strict=True)))

    return run


def _reshard(array: Any, mesh: Any, spec: PartitionSpec) -> Any:
    sharding = jax.typeof(array).sharding
    if spec_of(sharding.spec, array.ndim) == spec_of(spec, array.ndim):
        return array
    return jax.sharding.reshard(array, NamedSharding(mesh, spec))


def _on_shard(shards: Shards, bind: Bind, in_effect: InEffect) -> Callable[..., tuple[Any, ...]]:
    def run(*arrays: Any) -> tuple[Any, ...]:
        with in_effect():
            return tuple(shards.totals(bind(shards.operands(arrays), shards.options)))

    return run


# -- automatic axes ----------------------------------------------------------------------------------------------------


def by_partitioner(rule: Partitioning, bind: Bind, in_effect: InEffect) -> Callable[..., Any]:
    """The function of whole arrays that the compiler divides by the rule, and that binds the call on every shard."""

    def partition(mesh: Any, arrays: Sequence[Any], results: Sequence[Any]) -> Any:
        short_locations()
        shards = _shards_by_partitioner(rule, mesh, (*arrays, *results))
        if shards.finer:  # the devices are known here, so a mesh with smaller axes can express what each of them needs
            mesh = _refined_mesh(mesh, shards)
            shards = _shards_by_partitioner(rule, mesh, (*arrays, *results))
        shardings = (_shardings(mesh, specs) for specs in (shards.specs_of_results, shards.specs_of_arrays))
        return mesh, _on_shard(shards, bind, in_effect), *shardings

    partitioned: Callable[..., Any] = by_custom_partitioning(
        lambda *arrays: tuple(bind(arrays, {})), partition, *_rule_text(rule)
    )
    return partitioned


def _shards_by_partitioner(rule: Partitioning, mesh: Any, arrays: Sequence[Any]) -> Shards:
    # An array may come as replicated although others are sharded along the same axes: a factor has one sharding.
    specs = [spec_of(partitioner_spec(array.sharding, mesh), len(array.shape)) for array in arrays]
    return rule.shards(dict(mesh.shape), specs)


def _refined_mesh(mesh: Any, shards: Shards) -> Mesh:
    """The mesh, with two axes in the place of one that shards the product of two factors."""
    sizes: dict[str, int] = {}
    lengths = {axis: shards.parts(factor) for factor, (_, mesh_axes) in shards.finer.items() for axis in mesh_axes}
    for axis, size in mesh.shape.items():
        length = lengths.get(axis)
        sizes |= {axis: size} if length is None else {f"{axis}/0": length, f"{axis}/1": size // length}
    return Mesh(mesh.devices.reshape([*sizes.values()]), [*sizes])


def _shardings(mesh: Any, specs: Sequence[Spec]) -> tuple[NamedSharding, ...]:
    return tuple(NamedSharding(mesh, partition_spec(spec)) for spec in specs)


def _rule_text(rule: Partitioning) -> tuple[str, tuple[str, ...], dict[str, int]]:
    """The rule in the words of ``custom_partitioning``: its text, the factors that stay whole, in the order in which
    they stand in it, and the sizes of the factors that stand in products only.
    """
    free: dict[str, str] = {}
    whole: list[str] = []
    sizes: dict[str, int] = {}
    single: set[str] = set()

    def word(factor: str) -> str:
        if factor in rule.whole:  # a word of its own: such a factor may stand in one array twice
            whole.append(f"w{len(whole)}")
            name = whole[-1]
        else:
            name = free.setdefault(factor, f"f{len(free)}")
        sizes[name] = rule.sizes[factor]
        return name

    def dimension(factors: tuple[str, ...]) -> str:
        words = [word(factor) for factor in factors]
        single.update(words if len(words) == 1 else ())
        return words[0] if len(words) == 1 else f"({' '.join(words)})"

    sides = [
        ", ".join(" ".join(map(dimension, dimensions)) for dimensions in arrays.values())
        for arrays in (rule.arrays, rule.results)
    ]
    return " -> ".join(sides), tuple(whole), {name: size for name, size in sizes.items() if name not in single}
