"""The axes of one array, read from a text such as ``"batch #heads ... 2*dim"``, and their sizes."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import attrs
import jax.numpy as jnp

from ._display import brief

#: The name of any number of leading axes. They are the same in all arrays of a call that have them.
LEADING = "..."

_WORD = r"(?P<broadcast>#?)(?:(?P<factor>\d+)\*)?(?P<name>[a-z]\w*)(?:/(?P<divisor>\d+))?(?:\+(?P<offset>\d+))?"


@attrs.frozen
class Axis:
    """One axis. Its length is ``ceil(factor * size / divisor) + offset``, where ``size`` is the size of its name.

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

    @property
    def is_divisible(self) -> bool:
        """Whether a part of its size is a part of its length: the entries of a size's index stand together."""
        return bool(self.name) and self.divisor == 1 and self.offset == 0

    def length(self, size: Any) -> Any:
        if self.is_plain:
            return size
        return -(-self.factor * size // self.divisor) + self.offset

    def size(self, length: Any) -> Any:
        """The size of the name, or None where no size gives this length. The axis has no divisor."""
        factor_times_size = length - self.offset
        return None if factor_times_size < 0 or factor_times_size % self.factor else factor_times_size // self.factor


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

    def padded_shape(self, shape: tuple[Any, ...]) -> tuple[Any, ...]:
        """The shape, with the leading axes of length 1 that broadcasting adds."""
        num_missing = len(self.axes) - len(shape)
        is_padded = num_missing > 0 and all(axis.is_broadcast for axis in self.axes[:num_missing])
        return (1,) * num_missing + tuple(shape) if is_padded else tuple(shape)

    def lengths(self, shape: tuple[Any, ...]) -> list[tuple[Axis, Any]]:
        """Each axis with its length. The length of ``...`` is a tuple."""
        dimension, pairs = 0, []
        for axis in self.axes:
            count = len(shape) - len(self.axes) + 1 if axis.name == LEADING else 1
            lengths = tuple(shape[dimension : dimension + count])
            pairs.append((axis, lengths if axis.name == LEADING else lengths[0]))
            dimension += count
        return pairs

    def dimension(self, name: str, rank: int) -> int | None:
        """The dimension of the axis of this name, in an array of this rank; for ``...``, the first one."""
        dimension = 0
        for axis in self.axes:
            if axis.name == name:
                return dimension
            dimension += rank - len(self.axes) + 1 if axis.name == LEADING else 1
        return None

    def shape(self, sizes: Mapping[str, Any]) -> tuple[Any, ...]:
        lengths = [axis.length(sizes[axis.name]) if axis.name else axis.offset for axis in self.axes]
        return tuple(size for length in lengths for size in (length if isinstance(length, tuple) else (length,)))

    def is_shared(self, name: str) -> bool:
        """Whether all indices of this name share the array's entries: no axis is certain to have one entry for each."""
        return not any(axis.name == name and axis.is_plain and not axis.is_broadcast for axis in self.axes)


def padded_shapes(layouts: Mapping[str, Layout], arrays: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """The shapes of the arrays, with the leading axes that broadcasting adds."""
    return {name: layouts[name].padded_shape(array.shape) for name, array in arrays.items()}


def result_shapes(
    layouts: Mapping[str, Layout], results: Collection[str], sizes_by_name: Mapping[str, Any]
) -> list[tuple[Any, ...]]:
    """The shapes of results, from the sizes in a call."""
    unknown_names = sorted({axis_name for name in results for axis_name in layouts[name].names} - {*sizes_by_name})
    if unknown_names:
        raise ValueError(f"{', '.join(results)}: no array of the call has the size of {unknown_names[0]}")
    return [layouts[name].shape(sizes_by_name) for name in results]


def layout(array: str, text: str) -> Layout:
    """Parse a layout. ``array`` is the name of its array, for messages."""
    if not isinstance(text, str):
        raise TypeError(f"axes of {array}: takes a string such as 'batch dim'; got {type(text).__name__} {brief(text)}")
    axes = tuple(_axis(array, word) for word in text.split())
    if sum(axis.name == LEADING for axis in axes) > 1:
        raise ValueError(f"axes of {array}: '...' may appear once; got {text!r}")
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
    """The size of each name: the size that the first array with the name has. All other arrays are checked against it.

    The sizes of the names in ``positive`` must be at least 1, and those in ``multiples`` divisible by that of another
    name.
    """
    sizes_by_name, owners = dict[str, Any](), dict[str, str]()
    for name, shape in shapes.items():
        for axis, length in _lengths(name, layouts[name], shape):
            if axis.name and axis.divisor == 1 and not axis.is_broadcast:
                _check_size(name, axis, length, sizes_by_name, owners)
    for name, shape in shapes.items():
        _check_lengths(name, layouts[name], shape, sizes_by_name)
    # The other sizes are symbolic, or a tuple of those of leading axes.
    int_sizes = {name: size for name, size in sizes_by_name.items() if isinstance(size, int)}
    for name in positive:
        if int_sizes.get(name, 1) < 1:
            raise ValueError(f"{owners[name]}: {name} must be at least 1; got {int_sizes[name]}")
    for multiple, base_name in multiples.items():
        if int_sizes.get(multiple, 0) % max(int_sizes.get(base_name, 1), 1):
            base = f"{base_name}, which is {int_sizes[base_name]} in {owners[base_name]}"
            raise ValueError(f"{owners[multiple]}: {multiple} must be a multiple of {base}; got {int_sizes[multiple]}")
    return sizes_by_name


def _lengths(name: str, array_layout: Layout, shape: tuple[Any, ...]) -> list[tuple[Axis, Any]]:
    """The axes of an array and their lengths. Raises for an array of the wrong rank."""
    padded = array_layout.padded_shape(shape)
    if array_layout.fits(len(padded)):
        return array_layout.lengths(padded)
    if array_layout.axes and all(axis.is_broadcast for axis in array_layout.axes):
        raise ValueError(f"{name}: must broadcast to {array_layout}; got shape {shape}")
    raise ValueError(f"{name}: takes {array_layout if array_layout.axes else 'a single number'}; got shape {shape}")


def _check_size(name: str, axis: Axis, length: Any, sizes_by_name: dict[str, Any], owners: dict[str, str]) -> None:
    size = length if axis.is_plain else axis.size(length)
    if size is None:
        raise ValueError(f"{name}: an axis must have {axis.text} entries; got {length}")
    expected = sizes_by_name.setdefault(axis.name, size)
    owner = owners.setdefault(axis.name, name)
    if size == expected:
        return
    if axis.is_plain:
        axis_name = "leading axes" if axis.name == LEADING else axis.name
        raise ValueError(f"{name}: {axis_name} must be {expected}, as in {owner}; got {size}")
    raise ValueError(
        f"{name}: takes {axis.text} = {axis.length(expected)}, with the {axis.name} of {owner}; got {length}"
    )


def _check_lengths(name: str, array_layout: Layout, shape: tuple[Any, ...], sizes_by_name: Mapping[str, Any]) -> None:
    """Check the lengths against the sizes, for axes that broadcast or have a divisor too."""
    lengths = array_layout.lengths(array_layout.padded_shape(shape))
    expected_shape = tuple(
        axis.length(sizes_by_name.get(axis.name, length)) if axis.name else axis.offset for axis, length in lengths
    )
    for (axis, length), expected in zip(lengths, expected_shape, strict=True):
        if axis.is_broadcast and length not in (1, expected):
            raise ValueError(f"{name}: must broadcast to {array_layout} = {expected_shape}; got {shape}")
        if not axis.is_broadcast and length != expected:
            raise ValueError(f"{name}: takes {array_layout} = {expected_shape}; got {shape}")


# -- folding: a mapped axis is merged into another axis ----------------------------------------------------------------


def fold_axis(value: Any, array_layout: Layout, into: str, is_mapped: bool, size: int, own_size: Any) -> Any:
    """Merge the mapped axis, of this ``size``, into the axis ``into``, of size ``own_size``, which varies faster.

    The mapped axis is the first one. An array without it (``is_mapped`` is False) is repeated ``size`` times.
    """
    dimension = array_layout.dimension(into, value.ndim - is_mapped)
    if dimension is None:
        return value
    if into != LEADING and value.shape[dimension + is_mapped] == 1 and array_layout.is_shared(into):
        if not is_mapped:
            return value
        value = jnp.repeat(value, own_size, dimension + 1)  # the merged axis is longer than 1, so it cannot broadcast
    array = jnp.moveaxis(value if is_mapped else jnp.broadcast_to(value, (size, *value.shape)), 0, dimension)
    if into == LEADING:
        return array
    return array.reshape(*array.shape[:dimension], size * array.shape[dimension + 1], *array.shape[dimension + 2 :])


def unfold_axis(value: Any, array_layout: Layout, into: str, size: int, own_size: Any) -> Any:
    """Split the mapped axis off the axis ``into`` of a result, and move it to the front."""
    dimension = array_layout.dimension(into, value.ndim)
    assert dimension is not None
    if into != LEADING:
        value = value.reshape(*value.shape[:dimension], size, own_size, *value.shape[dimension + 1 :])
    return jnp.moveaxis(value, dimension, 0)


def sum_axis(gradient: Any, array_layout: Layout, into: str, shape: tuple[int, ...]) -> Any:
    """Add up a gradient over the mapped axis, for an array of this shape that is the same for all its indices. Where
    the folded call had the array as it is, its gradient is that sum already.
    """
    if gradient.shape == shape:
        return gradient
    dimension = array_layout.dimension(into, len(shape))
    assert dimension is not None
    if into != LEADING:
        own = shape[dimension]
        gradient = gradient.reshape(*shape[:dimension], gradient.shape[dimension] // own, own, *shape[dimension + 1 :])
    return gradient.sum(dimension)
