"""How a call is cut over devices: what the types of its arrays say, and by which rule it may be."""

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
    """The rule by which a call may be cut, in words that Shardy has: every dimension is a product of factors.

    Where a factor is cut, it is cut in everything that has it. What a call has for a shard is then the shard of what it
    has for all; but a result in ``sums`` is a sum over these factors, and every shard has a part of the sum.
    """

    arrays: Mapping[str, tuple[Factors, ...]]
    results: Mapping[str, tuple[Factors, ...]]
    #: How large each factor is.
    sizes: Mapping[str, Any]
    #: The factors that are never cut.
    whole: frozenset[str]
    sums: Mapping[str, Factors]


@attrs.frozen
class Factoring:
    """From axes to factors, for the sizes of one call."""

    sizes: Mapping[str, Any]
    #: Of two axes, the first is a multiple of the second.
    multiples: Mapping[str, str]
    independent: frozenset[str]
    factors: dict[str, Any] = attrs.field(factory=dict)
    free: set[str] = attrs.field(factory=set)

    def dimensions(self, array: str, layout: Layout, shape: Sequence[Any]) -> tuple[Factors, ...]:
        found: list[Factors] = []
        for axis, length in layout.lengths(tuple(shape)):
            if axis.name == LEADING:
                found += [self._add(axis, (f"{LEADING}{i}", size)) for i, size in enumerate(length)]
            elif axis.offset or axis.divisor > 1 or (axis.is_broadcast and length != self.sizes.get(axis.name)):
                found.append(self._add(Axis(""), (f"{array}.{len(found)}", length)))  # like no other
            else:
                pair = ((axis.text, axis.factor),) if axis.factor > 1 else ()
                found.append(self._add(axis, *self._parts(axis.name), *pair))
        return tuple(found)

    def _parts(self, name: str) -> tuple[tuple[str, Any], ...]:
        """Query heads are so many for each key head: the key heads are a factor of both."""
        one = self.multiples.get(name)
        size, group = self.sizes[name], self.sizes.get(one or "", 1)
        if one is None or group == 1:
            return ((name, size),)
        return ((one, group), *(((f"{name}/{one}", size // group),) if size != group else ()))

    def _add(self, axis: Axis, *parts: tuple[str, Any]) -> Factors:
        self.factors.update(parts)
        if axis.name in self.independent:
            self.free.update(name for name, _ in parts if name != axis.text or axis.factor == 1)
        return tuple(name for name, _ in parts)

    def partitioning(
        self, arrays: Mapping[str, tuple[Factors, ...]], results: Mapping[str, tuple[Factors, ...]]
    ) -> Partitioning:
        cut = [factor for factor, size in self.factors.items() if factor in self.free and size != 1]
        sums = {
            name: tuple(factor for factor in cut if all(factor not in each for each in dimensions))
            for name, dimensions in results.items()
        }
        whole = frozenset(self.factors) - self.free
        return Partitioning(arrays, results, dict(self.factors), whole, {n: over for n, over in sums.items() if over})


@attrs.frozen
class Shardings:
    """What the arrays of a call say about how each axis is cut, where shardings are a part of types."""

    first: NamedSharding | None
    over: Mapping[str, tuple[Any, ...]]

    @classmethod
    def of(cls, given: Mapping[str, Any], layouts: Layouts, independent: Sequence[str]) -> Shardings:
        """The first array that has an axis tells; of an axis that is not independent, only the first array of all."""
        first: NamedSharding | None = None
        over: dict[str, tuple[Any, ...]] = {}
        for name, array in given.items():
            sharding = getattr(array, "sharding", None)
            if not isinstance(sharding, NamedSharding):
                continue
            first = first or sharding
            for axis, names in layouts[name].lengths(spec_of(array)):
                is_told = sharding is first or (sharding.mesh == first.mesh and axis.name in independent)
                if axis.is_plain and not axis.is_broadcast:
                    each = names if axis.name == LEADING else (names,)
                    over.setdefault(axis.name, tuple(own if is_told else None for own in each))
        return cls(first, over)

    def sharding(self, result: Layout, sizes: Mapping[str, Any]) -> NamedSharding | None:
        if self.first is None:
            return None
        spec: list[Any] = []
        used: set[str] = set()
        for axis in result.axes:
            nothing: tuple[Any, ...] = (None,) * (len(sizes[LEADING]) if axis.name == LEADING else 1)
            for names in self.over.get(axis.name, nothing) if axis.is_plain else nothing:
                own = {*names} if isinstance(names, tuple) else {names} - {None}
                spec.append(None if own & used else names)  # a mesh axis cuts one axis of an array
                used |= own
        return self.first.update(spec=PartitionSpec(*spec))


def spec_of(array: Any) -> tuple[Any, ...]:
    """What each axis is cut over."""
    spec = array.sharding.spec
    return (*spec, *(None,) * (len(array.shape) - len(spec)))
