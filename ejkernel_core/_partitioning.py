"""How a call is sharded over devices: the rule by which it may be, and how that rule divides it over a mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp

from ._layout import LEADING, Axis, Layout

Factors = tuple[str, ...]
MeshAxes = tuple[str, ...]
#: For each dimension of an array: the mesh axes that it is sharded over.
Spec = tuple[MeshAxes, ...]


def spec_of(spec: Iterable[Any], rank: int) -> Spec:
    """The mesh axes of each dimension, from a ``PartitionSpec``.

    >>> from jax.sharding import PartitionSpec
    >>> spec_of(PartitionSpec("x", None, ("y", "z")), 4)
    (('x',), (), ('y', 'z'), ())
    """
    axes = [(names,) if isinstance(names, str) else tuple(names or ()) for names in spec]
    return (*axes, *((),) * (rank - len(axes)))


@attrs.frozen
class PartialSums:
    """How a shard computes its part of results that are sums over a sharded factor."""

    factors: frozenset[str]
    #: The arrays that are added to the sums. The first shard has them, and all others have zeros.
    added: tuple[str, ...]
    #: From the names of the results that are partial sums to the options with which those are at least float32.
    options: Callable[[tuple[str, ...]], Mapping[str, Any]]
    #: The dtypes of the sums, by result.
    dtypes: Mapping[str, Any]

    def is_added(self, array: str) -> bool:
        """Whether this array is added to the sums. Tangents and cotangents of it have its name before a dot."""
        return array.partition(".")[0] in self.added


@attrs.frozen
class Partitioning:
    """The rule by which a call may be sharded, in Shardy's terms: every dimension is a product of factors.

    A factor is sharded in all arrays and results that have it. The call on a shard then gives the shard of the results.
    A result that lacks a sharded factor is the exception: every shard has a part of a sum over that factor.
    """

    arrays: Mapping[str, tuple[Factors, ...]]
    results: Mapping[str, tuple[Factors, ...]]
    #: The size of each factor.
    sizes: Mapping[str, Any]
    #: The factors that are never sharded.
    whole: frozenset[str]
    #: Why all factors of the operation are whole; "" where only those are that its axes name.
    reason: str = ""
    #: By axis: why its factors are whole, where its operation has a reason.
    reasons: Mapping[str, str] = attrs.field(factory=dict)
    #: Where factors may be sharded over which all results are sums.
    partial: PartialSums | None = None

    @property
    def sums(self) -> dict[str, Factors]:
        """By result: the factors that it is a sum over."""
        shardable = [factor for factor, size in self.sizes.items() if factor not in self.whole and size != 1]
        sums = {
            name: tuple(
                factor
                for factor in shardable
                if not any(factor in factors for factors in dimensions) and not self._is_same(name, factor)
            )
            for name, dimensions in self.results.items()
        }
        return {name: factors for name, factors in sums.items() if factors}

    def _is_same(self, result: str, factor: str) -> bool:
        """Whether a result is the same on all shards of a factor: the gradient of what is added to sums over it."""
        return self.partial is not None and factor in self.partial.factors and self.partial.is_added(result)

    def with_mapped_axis(self, factor: str, size: int, arrays: Iterable[str], sums: Iterable[str] = ()) -> Partitioning:
        """The rule for a call over which ``jax.vmap`` maps: these arrays, and all results that are no ``sums`` over the
        mapped axis, have one more leading axis.
        """
        return attrs.evolve(
            self,
            arrays={n: ((factor,), *dims) if n in arrays else dims for n, dims in self.arrays.items()},
            results={n: dims if n in sums else ((factor,), *dims) for n, dims in self.results.items()},
            sizes={factor: size, **self.sizes},
        )

    def shards(self, mesh: Mapping[str, int], specs: Sequence[Spec]) -> Shards:
        """Divide the call over a mesh, given as the sizes of its axes. ``specs`` has the shardings of the arrays, and
        possibly those of the results. A factor has the sharding of the first array that has one for it.
        """
        search = _Search(self, mesh, self._needed_elsewhere(specs))
        for dimensions, spec in zip((*self.arrays.values(), *self.results.values()), specs, strict=False):
            for factors, mesh_axes in zip(dimensions, spec, strict=True):
                search.add(factors, mesh_axes)
        return Shards(self, dict(mesh), search.mesh_axes, search.finer)

    def options(self, sums: Iterable[str]) -> Mapping[str, Any]:
        """The options of a call whose results with these names are partial sums."""
        names = tuple(sums)
        return self.partial.options(names) if self.partial is not None and names else {}

    @property
    def summed(self) -> frozenset[str]:
        """The factors over which all results are sums."""
        return frozenset() if self.partial is None else self.partial.factors

    def _needed_elsewhere(self, specs: Sequence[Spec]) -> frozenset[str]:
        """The mesh axes that shard another factor of an array with a summed one: a summed factor does not take them,
        for the array would be moved to other devices.
        """
        return frozenset(
            mesh_axis
            for dimensions, spec in zip(self.arrays.values(), specs, strict=False)
            if any(self.summed & {*factors} for factors in dimensions)
            for factors, mesh_axes in zip(dimensions, spec, strict=True)
            if {*factors} - self.whole - self.summed
            for mesh_axis in mesh_axes
        )


def whole_partitioning(arrays: Mapping[str, Any], results: Mapping[str, Any], reason: str) -> Partitioning:
    """The rule of a call that may not be sharded, by the ranks of its arrays and results."""
    sizes: dict[str, Any] = {}

    def dimensions(name: str, array: Any) -> tuple[Factors, ...]:
        factors = {f"{name}.{dimension}": size for dimension, size in enumerate(array.shape)}
        sizes.update(factors)
        return tuple((factor,) for factor in factors)

    return Partitioning(
        {name: dimensions(name, array) for name, array in arrays.items()},
        {name: dimensions(f"{name} (result)", array) for name, array in results.items()},
        sizes,
        frozenset(sizes),
        reason,
    )


@attrs.frozen
class Factoring:
    """Converts axes to factors, for the sizes of one call."""

    sizes: Mapping[str, Any]
    #: By the name of an axis: the axis that it is a multiple of.
    multiples: Mapping[str, str]
    independent: frozenset[str]
    factors: dict[str, Any] = attrs.field(factory=dict)
    free: set[str] = attrs.field(factory=set)

    def dimensions(self, array: str, layout: Layout, shape: Sequence[Any]) -> tuple[Factors, ...]:
        factors: list[Factors] = []
        for axis, length in layout.lengths(tuple(shape)):
            if axis.name == LEADING:
                factors += [self._add(axis, (f"{LEADING}{i}", size)) for i, size in enumerate(length)]
            elif not axis.is_divisible or (axis.is_broadcast and length != self.sizes.get(axis.name)):
                factors.append(self._add(Axis(""), (f"{array}.{len(factors)}", length)))  # a factor of its own
            else:
                factor_of_axis = ((axis.text, axis.factor),) if axis.factor > 1 else ()
                factors.append(self._add(axis, *self._parts(axis.name), *factor_of_axis))
        return tuple(factors)

    def _parts(self, name: str) -> tuple[tuple[str, Any], ...]:
        """The factors of an axis. Query heads are a multiple of key heads, so the key heads are a factor of both."""
        base = self.multiples.get(name)
        size, group = self.sizes[name], self.sizes.get(base or "", 1)
        if base is None or group == 1:
            return ((name, size),)
        return ((base, group), *(((f"{name}/{base}", size // group),) if size != group else ()))

    def factors_of(self, axes: Iterable[str]) -> frozenset[str]:
        """The factors of all of these axes that the call has."""
        return frozenset(factor for axis in axes if axis in self.sizes for factor, _ in self._parts(axis))

    def _add(self, axis: Axis, *parts: tuple[str, Any]) -> Factors:
        self.factors.update(parts)
        if axis.name in self.independent:
            self.free.update(name for name, _ in parts if name != axis.text or axis.factor == 1)
        return tuple(name for name, _ in parts)

    def partitioning(
        self, arrays: Mapping[str, tuple[Factors, ...]], results: Mapping[str, tuple[Factors, ...]]
    ) -> Partitioning:
        return Partitioning(arrays, results, dict(self.factors), frozenset(self.factors) - self.free)


class _Search:
    """The mesh axes of each factor so far, while the shardings of one array after the other are read."""

    def __init__(self, rule: Partitioning, mesh: Mapping[str, int], needed_elsewhere: frozenset[str]) -> None:
        self.mesh_axes: dict[str, MeshAxes] = {}
        self.finer: dict[str, tuple[str, MeshAxes]] = {}
        self._rule = rule
        self._mesh = mesh
        self._needed_elsewhere = needed_elsewhere
        #: By factor: the number of entries of a shard.
        self._lengths = dict(rule.sizes)

    def add(self, factors: Factors, mesh_axes: MeshAxes) -> None:
        """Read the sharding of one dimension. The first factor varies slowest, so it is sharded first."""
        rest = list(mesh_axes)
        for factor, next_factor in zip(factors, (*factors[1:], ""), strict=True):
            if factor in self.mesh_axes:
                known = (*self.mesh_axes[factor], *self._finer_axes(factor, next_factor))
                if tuple(rest[: len(known)]) != known:
                    return
                del rest[: len(known)]
            else:
                while rest and self._is_shardable(factor, rest[0]):
                    self._shard(factor, rest.pop(0))
                if rest and next_factor and self._is_finer(factor, next_factor, rest[0]):
                    self._shard_product(factor, next_factor, rest.pop(0))
            if not rest or self._lengths[factor] != 1:  # the next factor is sharded only where this one is divided up
                return

    def _finer_axes(self, factor: str, next_factor: str) -> MeshAxes:
        product, mesh_axes = self.finer.get(factor, ("", ()))
        return mesh_axes if product == next_factor else ()

    @property
    def _used(self) -> set[str]:
        finer = (mesh_axes for _, mesh_axes in self.finer.values())
        return {name for mesh_axes in (*self.mesh_axes.values(), *finer) for name in mesh_axes}

    def _is_shardable(self, factor: str, mesh_axis: str) -> bool:
        length = self._lengths[factor]
        return (
            self._is_free(factor, mesh_axis)
            and type(length) is int
            and length > 0
            and length % self._mesh[mesh_axis] == 0
        )

    def _is_free(self, factor: str, mesh_axis: str) -> bool:
        is_kept = factor in self._rule.summed and mesh_axis in self._needed_elsewhere
        return factor not in self._rule.whole and mesh_axis not in self._used and not is_kept

    def _shard(self, factor: str, mesh_axis: str) -> None:
        self._lengths[factor] //= self._mesh[mesh_axis]
        self.mesh_axes[factor] = (*self.mesh_axes.get(factor, ()), mesh_axis)

    def _is_finer(self, factor: str, next_factor: str, mesh_axis: str) -> bool:
        """Whether the mesh axis shards the product of two factors more finely than the first of them."""
        count, length, next_length = self._mesh[mesh_axis], self._lengths[factor], self._lengths[next_factor]
        if not all(self._is_free(f, mesh_axis) for f in (factor, next_factor)) or next_factor in self.mesh_axes:
            return False
        is_divisible = type(length) is int and type(next_length) is int and length > 1 and count % length == 0
        return is_divisible and (length * next_length) % count == 0

    def _shard_product(self, factor: str, next_factor: str, mesh_axis: str) -> None:
        count, length = self._mesh[mesh_axis], self._lengths[factor]
        self.finer[factor] = next_factor, (mesh_axis,)
        self.mesh_axes.setdefault(factor, ())
        self._lengths[next_factor] //= count // length
        self._lengths[factor] = 1


@attrs.frozen
class Gather:
    """An axis of an array that is sharded, and that every device gets whole."""

    array: str
    #: Its number in the array, from 0, and its name.
    dimension: int
    axis: str
    mesh_axes: MeshAxes
    reason: str

    def __str__(self) -> str:
        over = ", ".join(map(repr, self.mesh_axes))
        name = f" ({self.axis})" if self.axis else ""
        return f"gathered: axis {self.dimension}{name} of {self.array}, sharded over {over}: {self.reason}"


@attrs.frozen
class Shards:
    """The division of a call over the devices of a mesh."""

    rule: Partitioning
    #: The sizes of the axes of the mesh.
    mesh: Mapping[str, int]
    #: By factor: the mesh axes that it is sharded over.
    mesh_axes: Mapping[str, MeshAxes]
    #: By factor: the next factor, and the mesh axes over which the product of both is sharded, where they are more than
    #: the first factor has entries. An array that has the first factor alone is not sharded over them, and each shard
    #: takes the entry that it needs: with 2 key heads and 8 query heads on 4 devices, two devices share a key head.
    finer: Mapping[str, tuple[str, MeshAxes]] = attrs.field(factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is sharded."""
        return not any(self.mesh_axes.values()) and not self.finer

    def spec(self, dimensions: Sequence[Factors]) -> Spec:
        """The mesh axes of each dimension."""
        return tuple(tuple(name for f in factors for name in self._axes_in(f, factors)) for factors in dimensions)

    def _axes_in(self, factor: str, factors: Factors) -> MeshAxes:
        next_factor, finer = self.finer.get(factor, ("", ()))
        return (*self.mesh_axes.get(factor, ()), *(finer if next_factor in factors else ()))

    @property
    def specs_of_arrays(self) -> tuple[Spec, ...]:
        return tuple(map(self.spec, self.rule.arrays.values()))

    @property
    def specs_of_results(self) -> tuple[Spec, ...]:
        return tuple(map(self.spec, self.rule.results.values()))

    # -- on one shard ----------------------------------------------------------------------------------------------

    def shapes(self, arrays: Iterable[Any]) -> list[jax.ShapeDtypeStruct]:
        """The shapes of the arrays that the call on one shard gets."""
        return [
            jax.ShapeDtypeStruct(
                [
                    length // math.prod(self.mesh[name] for name in axes) // self._split(factors)
                    for length, axes, factors in zip(array.shape, self.spec(dimensions), dimensions, strict=True)
                ],
                array.dtype,
            )
            for array, dimensions in zip(arrays, self.rule.arrays.values(), strict=True)
        ]

    def _split(self, factors: Factors) -> int:
        """The number of parts of a dimension of which a shard takes one."""
        return math.prod(self.parts(factor) for factor in factors if self._is_shared(factor, factors))

    def _is_shared(self, factor: str, factors: Factors) -> bool:
        """Whether several devices have the same entries of a dimension, although each computes with one of them."""
        return factor in self.finer and self.finer[factor][0] not in factors

    def parts(self, factor: str) -> int:
        """The number of entries of a factor that a device of its mesh axes has, before it is sharded more finely."""
        sharded = math.prod(self.mesh[name] for name in self.mesh_axes.get(factor, ()))
        return int(self.rule.sizes[factor]) // sharded

    def operands(self, arrays: Sequence[Any]) -> list[Any]:
        """The arrays for the call on this shard: of those that several shards share, the part that it needs."""
        return [
            self._on_one_shard(name, self._map_shared(array, dimensions, self._part))
            for array, (name, dimensions) in zip(arrays, self.rule.arrays.items(), strict=True)
        ]

    def _on_one_shard(self, name: str, array: Any) -> Any:
        """The array, with zeros on all shards but the first if it is added to sums over shards."""
        partial = self.rule.partial
        mesh_axes = () if partial is None or not partial.is_added(name) else self._axes_of(partial.factors)
        return jnp.where(jax.lax.axis_index(mesh_axes) == 0, array, jnp.zeros_like(array)) if mesh_axes else array

    def _axes_of(self, factors: Iterable[str]) -> MeshAxes:
        """The mesh axes that these factors are sharded over, alone or as a product with another one."""
        alone = [axis for factor in factors for axis in self.mesh_axes.get(factor, ())]
        finer = [axis for next_factor, axes in self.finer.values() if next_factor in factors for axis in axes]
        return (*alone, *finer)

    @property
    def summed_over(self) -> dict[str, MeshAxes]:
        """By result: the mesh axes over which the results of the shards are added up."""
        axes = {name: self._axes_of(factors) for name, factors in self.rule.sums.items()}
        return {name: mesh_axes for name, mesh_axes in axes.items() if mesh_axes}

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of the call on a shard that are not those of the whole call."""
        return self.rule.options(self.summed_over)

    def totals(self, results: Sequence[Any]) -> list[Any]:
        """The results of the call on all shards, as this shard has them: parts of a sum are added up."""
        dtypes = {} if self.rule.partial is None else self.rule.partial.dtypes
        summed_over, totals = self.summed_over, []
        for (name, dimensions), result in zip(self.rule.results.items(), results, strict=True):
            over = summed_over.get(name, ())
            whole = self._map_shared(result, dimensions, self._among_zeros)
            total = jax.lax.psum(whole, over) if over else whole
            totals.append(total.astype(dtypes.get(name, total.dtype)))
        return totals

    def _map_shared(self, array: Any, dimensions: Sequence[Factors], change: Any) -> Any:
        for dimension, factors in enumerate(dimensions):
            for factor in factors:
                if self._is_shared(factor, factors):
                    array = change(array, dimension, factor)
        return array

    def _index(self, factor: str) -> Any:
        """Which part of a shared dimension is that of this shard."""
        mesh_axes = self.finer[factor][1]
        count = math.prod(self.mesh[name] for name in mesh_axes)
        return jax.lax.axis_index(mesh_axes) // (count // self.parts(factor))

    def _part(self, array: Any, dimension: int, factor: str) -> Any:
        length = array.shape[dimension] // self.parts(factor)
        return jax.lax.dynamic_slice_in_dim(array, self._index(factor) * length, length, dimension)

    def _among_zeros(self, array: Any, dimension: int, factor: str) -> Any:
        length, parts = array.shape[dimension], self.parts(factor)
        shape = (*array.shape[:dimension], length * parts, *array.shape[dimension + 1 :])
        zeros = jnp.zeros(shape, array.dtype)
        return jax.lax.dynamic_update_slice_in_dim(zeros, array, self._index(factor) * length, dimension)

    # -- explanations ----------------------------------------------------------------------------------------------

    def gathers(self, specs: Sequence[Spec]) -> tuple[Gather, ...]:
        """What is gathered, where the arrays have these shardings."""
        gathers = []
        for (name, dimensions), spec in zip(self.rule.arrays.items(), specs, strict=False):
            for dimension, (factors, given) in enumerate(zip(dimensions, spec, strict=True)):
                lost = tuple(axis for axis in given if axis not in self.spec(dimensions)[dimension])
                if lost:
                    gathers.append(Gather(name, dimension, _axis_name(factors), lost, self._reason(factors, lost)))
        return tuple(gathers)

    def _reason(self, factors: Factors, lost: MeshAxes) -> str:
        if {*factors} <= self.rule.whole:
            return self.rule.reason or self.rule.reasons.get(_axis_name(factors)) or "each device needs it whole"
        users = [f for f, axes in self.mesh_axes.items() if {*axes} & {*lost}]
        if users and not {*users} & {*factors}:
            return f"{lost[0]!r} shards {_axis_name((users[0],)) or users[0]} here"
        size = math.prod(self.rule.sizes[factor] for factor in factors)
        count = math.prod(self.mesh[name] for name in lost)
        if size % count:
            return f"{count} devices do not divide its length {size}"
        return "other arrays are sharded otherwise along it"

    def __str__(self) -> str:
        names = {factor: mesh_axes for factor, mesh_axes in self.mesh_axes.items() if mesh_axes}
        for factor, (product, mesh_axes) in self.finer.items():
            names[product] = (*names.pop(factor, ()), *mesh_axes, *names.pop(product, ()))
        return ", ".join(f"{_axis_name((f,)) or f} over {', '.join(map(repr, axes))}" for f, axes in names.items())


@attrs.frozen
class Division:
    """How a call on sharded arrays is divided over devices."""

    devices: int
    #: The shards that the plan is for; None where it is for the whole arrays.
    shards: Shards | None = None
    #: The axes of arrays that every device gets whole, and why.
    gathers: tuple[Gather, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        what = f"each computes its shard, {self.shards}{self._sums}" if self.shards else "each computes the whole call"
        return "\n  ".join([f"on {self.devices} devices: {self.note or what}", *map(str, self.gathers)])

    @property
    def _sums(self) -> str:
        sums = {} if self.shards is None else self.shards.summed_over
        return "".join(f"; {name} is added up over {', '.join(map(repr, axes))}" for name, axes in sums.items())


def _axis_name(factors: Factors) -> str:
    """The name of the axis that has these factors; "" for one without a name."""
    name = factors[-1].partition("/")[0] if factors else ""
    if name.startswith(LEADING):
        return f"leading axis {name.removeprefix(LEADING)}"
    return "" if "." in name else name
