"""How a call is sharded over devices: the rule by which it may be, and the shardings of its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from jax.sharding import NamedSharding, PartitionSpec

from ._layout import LEADING, Axis, Layout

Factors = tuple[str, ...]
Layouts = Mapping[str, Layout]


@attrs.frozen
class Partitioning:
    """The rule by which a call may be sharded, in Shardy's terms: every dimension is a product of factors.

    A factor is sharded in all arrays and results that have it. The call on a shard then gives the shard of the results.
    A result in ``sums`` is the exception: every shard has a part of a sum over these factors.
    """

    arrays: Mapping[str, tuple[Factors, ...]]
    results: Mapping[str, tuple[Factors, ...]]
    #: The size of each factor.
    sizes: Mapping[str, Any]
    #: The factors that are never sharded.
    whole: frozenset[str]
    sums: Mapping[str, Factors]


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
            elif axis.offset or axis.divisor > 1 or (axis.is_broadcast and length != self.sizes.get(axis.name)):
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

    def _add(self, axis: Axis, *parts: tuple[str, Any]) -> Factors:
        self.factors.update(parts)
        if axis.name in self.independent:
            self.free.update(name for name, _ in parts if name != axis.text or axis.factor == 1)
        return tuple(name for name, _ in parts)

    def partitioning(
        self, arrays: Mapping[str, tuple[Factors, ...]], results: Mapping[str, tuple[Factors, ...]]
    ) -> Partitioning:
        shardable = [factor for factor, size in self.factors.items() if factor in self.free and size != 1]
        sums = {
            name: tuple(
                factor
                for factor in shardable
                if all(factor not in factors_of_dimension for factors_of_dimension in dimensions)
            )
            for name, dimensions in results.items()
        }
        whole = frozenset(self.factors) - self.free
        return Partitioning(arrays, results, dict(self.factors), whole, {n: over for n, over in sums.items() if over})


@attrs.frozen
class Shardings:
    """The shardings of the arrays of a call by axis, where shardings are a part of types (explicit mesh axes)."""

    first: NamedSharding | None
    mesh_axes_by_name: Mapping[str, tuple[Any, ...]]

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], layouts: Layouts, independent: Sequence[str]) -> Shardings:
        """Take the sharding of each axis from the first array that has it. For an axis that is not independent, only
        the first array of the call counts.
        """
        first: NamedSharding | None = None
        mesh_axes_by_name: dict[str, tuple[Any, ...]] = {}
        for name, array in arrays.items():
            sharding = getattr(array, "sharding", None)
            if not isinstance(sharding, NamedSharding):
                continue
            first = first or sharding
            for axis, names in layouts[name].lengths(spec_of(array)):
                is_explicit = sharding is first or (sharding.mesh == first.mesh and axis.name in independent)
                if axis.is_plain and not axis.is_broadcast:
                    names_of_axes = names if axis.name == LEADING else (names,)
                    mesh_axes_by_name.setdefault(
                        axis.name, tuple(mesh_axes if is_explicit else None for mesh_axes in names_of_axes)
                    )
        return cls(first, mesh_axes_by_name)

    def sharding(self, result: Layout, sizes: Mapping[str, Any]) -> NamedSharding | None:
        if self.first is None:
            return None
        spec: list[Any] = []
        used: set[str] = set()
        for axis in result.axes:
            unsharded: tuple[Any, ...] = (None,) * (len(sizes[LEADING]) if axis.name == LEADING else 1)
            for names in self.mesh_axes_by_name.get(axis.name, unsharded) if axis.is_plain else unsharded:
                axes_of_mesh = {*names} if isinstance(names, tuple) else {names} - {None}
                spec.append(None if axes_of_mesh & used else names)  # a mesh axis shards one axis of an array
                used |= axes_of_mesh
        return self.first.update(spec=PartitionSpec(*spec))


def spec_of(array: Any) -> tuple[Any, ...]:
    """The mesh axes that each axis is sharded over."""
    spec = array.sharding.spec
    return (*spec, *(None,) * (len(array.shape) - len(spec)))
