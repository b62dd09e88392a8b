"""The axes of one array, read from a text such as ``"batch #heads ... 2*dim"``, and their sizes."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import attrs
import jax.numpy as jnp

#: The name for any number of leading axes. All arrays of a call that have them have the same ones.
LEADING = "..."

_WORD = r"(?P<broadcast>#?)(?:(?P<factor>\d+)\*)?(?P<name>[a-z]\w*)(?:/(?P<divisor>\d+))?(?:\+(?P<offset>\d+))?"


@attrs.frozen
class Axis:
    """One axis. Its length is ``factor * size / divisor + offset``, rounded up, with the size of its name.

    The length of an axis without a name is its offset.
    """

    text: str
    name: str = ""
    is_broadcast: bool = False
    factor: int = 1
    divisor: int = 1
    offset: int = 0

    @property
    def is_plain(self) -> bool:
        return self.factor == self.divisor == 1 and self.offset == 0

    def length(self, size: Any) -> Any:
        if self.is_plain:
            return size
        return -(-self.factor * size // self.divisor) + self.offset

    def size(self, length: Any) -> Any:
        """The size of the name, or None where no whole number gives an axis of this length."""
        rest = length - self.offset
        return None if rest < 0 or rest % self.factor else rest // self.factor


@attrs.frozen
class Layout:
    """The axes of an array."""

    axes: tuple[Axis, ...]

    def __str__(self) -> str:
        names = [axis.text.removeprefix("#") for axis in self.axes]
        return f"({names[0]},)" if len(names) == 1 else f"({', '.join(names)})"

    @property
    def names(self) -> frozenset[str]:
        return frozenset(axis.name for axis in self.axes if axis.name)

    @property
    def has_leading(self) -> bool:
        return LEADING in self.names

    def fits(self, rank: int) -> bool:
        return rank >= len(self.axes) - 1 if self.has_leading else rank == len(self.axes)

    def padded(self, shape: tuple[Any, ...]) -> tuple[Any, ...]:
        """The shape, with the leading axes of length 1 that broadcasting adds."""
        missing = len(self.axes) - len(shape)
        may_be_missing = missing > 0 and all(axis.is_broadcast for axis in self.axes[:missing])
        return (1,) * missing + tuple(shape) if may_be_missing else tuple(shape)

    def lengths(self, shape: tuple[Any, ...]) -> list[tuple[Axis, Any]]:
        """Each axis with its length. That of ``...`` is a tuple of lengths."""
        place, pairs = 0, []
        for axis in self.axes:
            count = len(shape) - len(self.axes) + 1 if axis.name == LEADING else 1
            pairs.append((axis, tuple(shape[place : place + count]) if axis.name == LEADING else shape[place]))
            place += count
        return pairs

    def dimensions(self, shape: tuple[Any, ...]) -> list[Axis]:
        """The axis of each dimension of an array of this shape."""
        pairs = self.lengths(shape)
        return [axis for axis, length in pairs for _ in (length if axis.name == LEADING else (length,))]

    def place(self, name: str, rank: int) -> int | None:
        """The dimension of the axis of this name, in an array of this rank; for ``...``, the first one."""
        place = 0
        for axis in self.axes:
            if axis.name == name:
                return place
            place += rank - len(self.axes) + 1 if axis.name == LEADING else 1
        return None

    def shape(self, sizes: Mapping[str, Any]) -> tuple[Any, ...]:
        lengths = [axis.length(sizes[axis.name]) if axis.name else axis.offset for axis in self.axes]
        return tuple(size for length in lengths for size in (length if isinstance(length, tuple) else (length,)))

    def is_shared(self, name: str) -> bool:
        """Whether the array has no axis whose length is always the size of this name."""
        return not any(axis.name == name and axis.is_plain and not axis.is_broadcast for axis in self.axes)


def padded_shapes(layouts: Mapping[str, Layout], arrays: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """The shapes of the arrays, with the leading axes that broadcasting adds."""
    return {name: layouts[name].padded(array.shape) for name, array in arrays.items()}


def dimensions(layouts: Mapping[str, Layout], arrays: Mapping[str, Any]) -> dict[str, list[tuple[Axis, Any]]]:
    """Every dimension of each array: its axis and its size."""
    return {
        name: list(zip(layouts[name].dimensions(array.shape), array.shape, strict=True))
        for name, array in arrays.items()
    }


def result_shapes(
    layouts: Mapping[str, Layout], results: Collection[str], known: Mapping[str, Any]
) -> list[tuple[Any, ...]]:
    """The shapes of results, from the sizes in a call."""
    absent = sorted({axis for name in results for axis in layouts[name].names} - {*known})
    if absent:
        raise ValueError(f"{', '.join(results)}: no array of the call tells how long {absent[0]} is")
    return [layouts[name].shape(known) for name in results]


def layout(array: str, text: str) -> Layout:
    """Read a layout from text. ``array`` is the name of its array, for messages."""
    if not isinstance(text, str):
        raise TypeError(f"axes of {array}: takes a text such as 'batch dim'; got {type(text).__name__} {text!r:.60}")
    axes = tuple(_axis(array, word) for word in text.split())
    if sum(axis.name == LEADING for axis in axes) > 1:
        raise ValueError(f"axes of {array}: takes ... once; got {text!r}")
    return Layout(axes)


def _axis(array: str, word: str) -> Axis:
    if word == LEADING:
        return Axis(word, LEADING)
    if word.isdecimal() and int(word) > 0:
        return Axis(word, factor=0, offset=int(word))
    match = re.fullmatch(_WORD, word)
    if match is None or match["factor"] == "0" or match["divisor"] == "0":
        raise ValueError(
            f"axes of {array}: takes words like batch, #batch, 2*heads, dim/128, sequences+1, 1 and ...; got {word!r}"
        )
    factor, divisor, offset = int(match["factor"] or 1), int(match["divisor"] or 1), int(match["offset"] or 0)
    return Axis(word, match["name"], bool(match["broadcast"]), factor, divisor, offset)


# -- the sizes of names in a call, and errors for wrong shapes ---------------------------------------------------------


Shapes = Mapping[str, tuple[Any, ...]]


def sizes(
    layouts: Mapping[str, Layout], shapes: Shapes, positive: tuple[str, ...], multiples: Mapping[str, str]
) -> dict[str, Any]:
    """The size of each name. The first array with the name has its size, and all others are checked against it."""
    sizes_by_name, owners = dict[str, Any](), dict[str, str]()
    for name, shape in shapes.items():
        for axis, length in _lengths(name, layouts[name], shape):
            if axis.name and axis.divisor == 1 and not axis.is_broadcast:
                _check_size(name, axis, length, sizes_by_name, owners)
    for name, shape in shapes.items():
        _check_others(name, layouts[name], shape, sizes_by_name)
    known = {
        name: size for name, size in sizes_by_name.items() if isinstance(size, int)
    }  # others are symbolic, or several
    for name in positive:
        if known.get(name, 1) < 1:
            raise ValueError(f"{owners[name]}: {name} must be at least 1; got {known[name]}")
    for multiple, base_name in multiples.items():
        if known.get(multiple, 0) % max(known.get(base_name, 1), 1):
            base = f"{base_name}, which is {known[base_name]} in {owners[base_name]}"
            raise ValueError(f"{owners[multiple]}: {multiple} must be a multiple of {base}; got {known[multiple]}")
    return sizes_by_name


def _lengths(name: str, own: Layout, shape: tuple[Any, ...]) -> list[tuple[Axis, Any]]:
    """The axes of an array and their lengths. Raises where the array has another rank."""
    padded = own.padded(shape)
    if own.fits(len(padded)):
        return own.lengths(padded)
    if own.axes and all(axis.is_broadcast for axis in own.axes):
        raise ValueError(f"{name}: takes what broadcasts to {own}; got {shape}")
    raise ValueError(f"{name}: takes {own if own.axes else 'a single number'}; got shape {shape}")


def _check_size(name: str, axis: Axis, length: Any, sizes_by_name: dict[str, Any], owners: dict[str, str]) -> None:
    size = length if axis.is_plain else axis.size(length)
    if size is None:
        raise ValueError(f"{name}: takes {axis.text} entries along an axis; got {length}")
    expected = sizes_by_name.setdefault(axis.name, size)
    owner = owners.setdefault(axis.name, name)
    if size == expected:
        return
    if axis.is_plain:
        word = "leading axes" if axis.name == LEADING else axis.name
        raise ValueError(f"{name}: {word} must be {expected}, as in {owner}; got {size}")
    raise ValueError(
        f"{name}: takes {axis.text} = {axis.length(expected)}, with the {axis.name} of {owner}; got {length}"
    )


def _check_others(name: str, own: Layout, shape: tuple[Any, ...], sizes_by_name: Mapping[str, Any]) -> None:
    """Check the axes that may be of length 1, and those from which no size can be computed."""
    lengths = own.lengths(own.padded(shape))
    full = tuple(
        axis.length(sizes_by_name.get(axis.name, length)) if axis.name else axis.offset for axis, length in lengths
    )
    for (axis, length), expected in zip(lengths, full, strict=True):
        if axis.is_broadcast and length not in (1, expected):
            raise ValueError(f"{name}: takes what broadcasts to {own} = {full}; got {shape}")
        if not axis.is_broadcast and length != expected:
            raise ValueError(f"{name}: takes {own} = {full}; got {shape}")


# -- folding: a mapped axis becomes a part of another axis -------------------------------------------------------------


def fold_axis(value: Any, own: Layout, into: str, mapped: bool, size: int, own_size: Any) -> Any:
    """Merge a mapped axis of this ``size`` into the axis ``into``, in front of its own entries. The mapped axis is the
    first one; an array that is not ``mapped`` is repeated along it.
    """
    place = own.place(into, value.ndim - mapped)
    if place is None:
        return value
    if into != LEADING and value.shape[place + mapped] == 1 and own.is_shared(into):
        if not mapped:
            return value
        value = jnp.repeat(value, own_size, place + 1)  # the merged axis has other entries too, so nothing broadcasts
    stacked = jnp.moveaxis(value if mapped else jnp.broadcast_to(value, (size, *value.shape)), 0, place)
    if into == LEADING:
        return stacked
    return stacked.reshape(*stacked.shape[:place], size * stacked.shape[place + 1], *stacked.shape[place + 2 :])


def unfold_axis(value: Any, own: Layout, into: str, size: int, own_size: Any) -> Any:
    """Split the mapped axis off the axis ``into`` of a result, and move it to the front."""
    place = own.place(into, value.ndim)
    assert place is not None
    if into != LEADING:
        value = value.reshape(*value.shape[:place], size, own_size, *value.shape[place + 1 :])
    return jnp.moveaxis(value, place, 0)
