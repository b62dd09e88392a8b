"""The buffers of one launch, which check every access, and record it to find races."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np

from ._faults import Fault

Array = np.ndarray[Any, Any]

#: Each buffer has a range of 2 ** 44 addresses and starts in its middle, so that a pointer outside a buffer, on either
#: side, still shows which one it comes from.
_ROOM = 44
_START = 1 << (_ROOM - 1)
#: No program; several programs; programs that used atomics.
_NONE, _MANY, _ATOMIC = -1, -2, -3


def poison(shape: tuple[int, ...], dtype: Any) -> Array:
    """The content of memory that nothing has written: NaN, or a number that no kernel computes."""
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return np.ones(shape, dtype)
    if dtype.kind in "iu":
        pattern: Array = np.full(int(np.prod(shape)) * dtype.itemsize, 0xA5, np.uint8)
        return np.asarray(pattern.view(dtype).reshape(shape))
    return np.full(shape, np.nan, dtype)


@attrs.define(eq=False)
class Buffer:
    """One flat array, and the programs that have used each of its elements."""

    name: str
    array: Array
    writable: bool
    base: int
    #: For each element, the program that wrote it and the program that read it, if races are checked.
    writer: Array | None = None
    reader: Array | None = None
    _views: dict[Any, Array] = attrs.field(factory=dict)

    def view(self, dtype: np.dtype[Any]) -> Array:
        view = self._views.get(dtype)
        if view is None:
            whole = self.array.nbytes // dtype.itemsize * dtype.itemsize
            view = self._views[dtype] = self.array.view(np.uint8)[:whole].view(dtype)
        return view


class Memory:
    """The addresses that a kernel sees."""

    def __init__(self, races: bool) -> None:
        self._races = races
        self._buffers: list[Buffer] = []
        #: The number of the running program. ``name_of`` names it in messages.
        self.program = 0
        self.name_of: Callable[[int], str] = str

    def add(self, name: str, array: Array, writable: bool) -> int:
        """The address of a buffer."""
        base = (len(self._buffers) + 1 << _ROOM) + _START
        buffer = Buffer(name, array, writable, base)
        if writable and self._races:
            buffer.writer = np.full(array.size, _NONE, np.int32)
            buffer.reader = np.full(array.size, _NONE, np.int32)
        self._buffers.append(buffer)
        return base

    def read(self, addresses: Array, dtype: np.dtype[Any], mask: Array | None, other: Array | None) -> Array:
        """The elements; where the mask is False, ``other``, or poison if there is none."""
        if mask is None or mask.all():
            return self._gather(addresses, dtype)
        result = poison(addresses.shape, dtype)
        if other is not None:
            result[...] = other
        if mask.any():
            result[mask] = self._gather(addresses[mask], dtype)
        return result

    def write(self, addresses: Array, values: Array, mask: Array | None) -> None:
        """Store the values."""
        addresses, values = self._chosen(addresses, values, mask)
        if not addresses.size:
            return
        bits = _bits(values.dtype)
        for buffer, offsets, new in self._parts("stores", addresses, bits.itemsize, values.view(bits)):
            self._owned(buffer)
            view, places = buffer.view(bits), offsets // bits.itemsize
            self._note_write(buffer, offsets, view[places] != new)
            view[places] = new
            differ = view[places] != new
            if differ.any():
                place = int(np.argmax(differ))
                raise Fault(f"stores two values at once into element {places[place]} of {buffer.name!r}")

    def update(
        self, addresses: Array, operands: tuple[Array, ...], mask: Array | None, change: Callable[..., Array]
    ) -> Array:
        """Store ``change(element, *operands)``, lane after lane, and return the elements before."""
        shape, dtype = operands[0].shape, operands[0].dtype
        before = poison(shape, dtype)
        addresses, lanes = self._chosen(np.broadcast_to(addresses, shape), np.arange(before.size).reshape(shape), mask)
        if not addresses.size:
            return before
        values = [operand.reshape(-1) for operand in operands]
        for buffer, offsets, lanes_of_buffer in self._parts("updates", addresses, dtype.itemsize, lanes):
            self._owned(buffer)
            view, places = buffer.view(dtype), offsets // dtype.itemsize
            self._note_atomic(buffer, offsets)
            # Lanes that update the same element do so one after the other.
            is_unique = np.unique(places).size == places.size
            for part in [slice(None)] if is_unique else [slice(i, i + 1) for i in range(places.size)]:
                old = view[places[part]]
                before.flat[lanes_of_buffer[part]] = old
                view[places[part]] = change(old, *(value[lanes_of_buffer[part]] for value in values))
        return before

    # -- addresses ---------------------------------------------------------------------------------

    def _gather(self, addresses: Array, dtype: np.dtype[Any]) -> Array:
        buffer = self._buffer(addresses.flat[0])
        offsets = self._within(buffer, addresses, dtype.itemsize)
        if offsets is not None:
            self._note_read(buffer, offsets)
            return buffer.view(dtype).take(offsets // dtype.itemsize)
        result = np.empty(addresses.shape, dtype)
        lanes = np.arange(addresses.size).reshape(addresses.shape)
        for buffer, offsets, lanes_of_buffer in self._parts("loads", addresses, dtype.itemsize, lanes):
            self._note_read(buffer, offsets)
            result.flat[lanes_of_buffer] = buffer.view(dtype)[offsets // dtype.itemsize]
        return result

    def _chosen(self, addresses: Array, values: Array, mask: Array | None) -> tuple[Array, Array]:
        if mask is None:
            return np.ascontiguousarray(addresses).reshape(-1), np.ascontiguousarray(values).reshape(-1)
        return addresses[mask], values[mask]

    def _parts(self, verb: str, addresses: Array, size: int, lanes: Array) -> list[tuple[Buffer, Array, Array]]:
        """The offsets into each buffer of these addresses, with their part of ``lanes``."""
        first = self._buffer(addresses.flat[0])
        offsets = self._within(first, addresses, size)
        if offsets is not None:
            return [(first, offsets, lanes)]
        parts = []
        for number in np.unique(addresses >> _ROOM):
            lanes_of_buffer = addresses >> _ROOM == number
            buffer = self._buffer(addresses[lanes_of_buffer][0])
            offsets = self._within(buffer, addresses[lanes_of_buffer], size)
            if offsets is None:
                raise self._outside(verb, buffer, addresses[lanes_of_buffer], size)
            parts.append((buffer, offsets, lanes[lanes_of_buffer]))
        return parts

    def _buffer(self, address: Any) -> Buffer:
        number = int(address) >> _ROOM
        if not 0 < number <= len(self._buffers):
            raise Fault(f"uses {int(address):#x} as an address, which comes from no pointer argument")
        return self._buffers[number - 1]

    def _within(self, buffer: Buffer, addresses: Array, size: int) -> Array | None:
        """The offsets in bytes, if all are inside the buffer and aligned; otherwise None."""
        offsets: Array = addresses - buffer.base
        first_offset, last = offsets.min(), offsets.max()
        is_inside = first_offset >= 0 and last <= buffer.array.nbytes - size
        is_aligned = not int(np.bitwise_or.reduce(offsets, axis=None)) & (size - 1)
        return offsets if is_inside and is_aligned else None

    def _outside(self, verb: str, buffer: Buffer, addresses: Array, size: int) -> Fault:
        offsets = addresses.reshape(-1) - buffer.base
        invalid = offsets[(offsets < 0) | (offsets > buffer.array.nbytes - size)]
        if not invalid.size:
            invalid = offsets[offsets % size != 0]
            return Fault(f"{verb} {size} bytes of {buffer.name!r} at byte {invalid[0]}, which is not aligned")
        where = invalid[0] // buffer.array.itemsize
        more = f", and {invalid.size - 1} more" if invalid.size > 1 else ""
        return Fault(f"{verb} element {where} of {buffer.name!r}, which has {buffer.array.size} elements{more}")

    def _owned(self, buffer: Buffer) -> None:
        if not buffer.writable:
            raise Fault(f"stores into {buffer.name!r}, which is an input")

    # -- races ------------------------------------------------------------------------------------

    def _note_read(self, buffer: Buffer, offsets: Array) -> None:
        if buffer.writer is None or buffer.reader is None:
            return
        elements = offsets // buffer.array.itemsize
        writer, reader = buffer.writer[elements], buffer.reader[elements]
        by_others = (writer >= 0) & (writer != self.program)
        if by_others.any():
            raise self._race(buffer, elements, by_others, writer, "loads element {} of {!r}, which {} has stored")
        buffer.reader[elements] = np.where((reader == _NONE) | (reader == self.program), self.program, _MANY)

    def _note_write(self, buffer: Buffer, offsets: Array, changes: Array) -> None:
        if buffer.writer is None or buffer.reader is None:
            return
        elements = offsets // buffer.array.itemsize
        writer, reader = buffer.writer[elements], buffer.reader[elements]
        message = "stores another value into element {} of {!r}, which {} has "
        by_others = changes & (writer != _NONE) & (writer != self.program)
        if by_others.any():
            raise self._race(buffer, elements, by_others, writer, message + "stored")
        by_others = changes & (reader != _NONE) & (reader != self.program)
        if by_others.any():
            raise self._race(buffer, elements, by_others, reader, message + "loaded")
        buffer.writer[elements] = self.program

    def _note_atomic(self, buffer: Buffer, offsets: Array) -> None:
        if buffer.writer is None:
            return
        elements = offsets // buffer.array.itemsize
        writer = buffer.writer[elements]
        by_others = (writer >= 0) & (writer != self.program)
        if by_others.any():
            raise self._race(buffer, elements, by_others, writer, "updates element {} of {!r}, which {} has stored")
        buffer.writer[elements] = _ATOMIC

    def _race(self, buffer: Buffer, elements: Array, by_others: Array, programs: Array, message: str) -> Fault:
        place = int(np.argmax(by_others))
        other = int(programs.reshape(-1)[place])
        names = {_MANY: "another program", _ATOMIC: "an atomic operation"}
        name = names.get(other) or f"program {self.name_of(other)}"
        return Fault(message.format(elements.reshape(-1)[place], buffer.name, name) + ": a race")


def _bits(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Integers of the same size, to compare NaN bit by bit."""
    return np.dtype(f"u{dtype.itemsize}")
