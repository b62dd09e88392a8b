"""The sizes that the arrays of a call give to the names of their axes; or what is wrong with their shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ._layout import LEADING, Axis, Layout

Shapes = Mapping[str, tuple[Any, ...]]


def sizes(
    layouts: Mapping[str, Layout], shapes: Shapes, positive: tuple[str, ...], multiples: Mapping[str, str]
) -> dict[str, Any]:
    """The size of each name. The first array that has an axis says how long it is, and is held against all others."""
    found, owners = dict[str, Any](), dict[str, str]()
    for name, shape in shapes.items():
        for axis, length in _lengths(name, layouts[name], shape):
            if axis.name and axis.divisor == 1 and not axis.is_broadcast:
                _agree(name, axis, length, found, owners)
    for name, shape in shapes.items():
        _check_others(name, layouts[name], shape, found)
    known = {name: size for name, size in found.items() if isinstance(size, int)}  # others are symbolic, or several
    for name in positive:
        if known.get(name, 1) < 1:
            raise ValueError(f"{owners[name]}: takes a {name} of at least 1; got {known[name]}")
    for many, one in multiples.items():
        if known.get(many, 0) % max(known.get(one, 1), 1):
            told = f"a multiple of the {owners[one]}'s {one} {known[one]}"
            raise ValueError(f"{owners[many]}: takes {many} that are {told}; got {known[many]}")
    return found


def _lengths(name: str, own: Layout, shape: tuple[Any, ...]) -> Iterator[tuple[Axis, Any]]:
    """The axes and their lengths, of a shape that has the rank."""
    padded = own.padded(shape)
    if own.fits(len(padded)):
        return own.lengths(padded)
    if own.axes and all(axis.is_broadcast for axis in own.axes):
        raise ValueError(f"{name}: takes what broadcasts to {own}; got {shape}")
    raise ValueError(f"{name}: takes {own if own.axes else 'a single number'}; got shape {shape}")


def _agree(name: str, axis: Axis, length: Any, found: dict[str, Any], owners: dict[str, str]) -> None:
    size = length if axis.is_plain else axis.size(length)
    if size is None:
        raise ValueError(f"{name}: takes {axis.text} entries along an axis; got {length}")
    wanted = found.setdefault(axis.name, size)
    owner = owners.setdefault(axis.name, name)
    if size == wanted:
        return
    if axis.is_plain:
        word = "leading axes" if axis.name == LEADING else axis.name
        raise ValueError(f"{name}: takes the {owner}'s {word} {wanted}; got {size}")
    raise ValueError(
        f"{name}: takes {axis.text} = {axis.length(wanted)}, with the {axis.name} of {owner}; got {length}"
    )


def _check_others(name: str, own: Layout, shape: tuple[Any, ...], found: Mapping[str, Any]) -> None:
    """The axes that may be 1, and those that give their names no size."""
    lengths = list(own.lengths(own.padded(shape)))
    full = tuple(axis.length(found.get(axis.name, length)) if axis.name else axis.offset for axis, length in lengths)
    for (axis, length), wanted in zip(lengths, full, strict=True):
        if axis.is_broadcast and length not in (1, wanted):
            raise ValueError(f"{name}: takes what broadcasts to {own} = {full}; got {shape}")
        if not axis.is_broadcast and length != wanted:
            raise ValueError(f"{name}: takes {own} = {full}; got {shape}")
