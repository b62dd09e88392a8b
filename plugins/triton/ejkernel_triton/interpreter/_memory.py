"""The buffers of one launch: every access is checked against them, and remembered for finding races."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np

from ._faults import Fault

Array = np.ndarray[Any, Any]

#: Each buffer has this many bytes of addresses to itself, and starts in the middle: a pointer that leaves a buffer, in
#: either direction, still tells which one it came from.
_ROOM = 44
_START = 1 << (_ROOM - 1)
#: Nobody; several programs; programs that used atomics.
_NONE, _MANY, _ATOMIC = -1, -2, -3


def poison(shape: tuple[int, ...], dtype: Any) -> Array:
    """What memory holds that nobody has written: NaN, or a number that is no one's result."""
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return np.ones(shape, dtype)
    if dtype.kind in "iu":
        odd: Array = np.full(int(np.prod(shape)) * dtype.itemsize, 0xA5, np.uint8)
        return np.asarray(odd.view(dtype).reshape(shape))
    return np.full(shape, np.nan, dtype)


@attrs.define(eq=False)
class Buffer:
    """One array, flat, and who has used which of its elements."""

    name: str
    array: Array
    writable: bool
    base: int
    #: Of each element: the program that wrote it, and the program that read it. Kept only where it can matter.
    writer: Array | None = None
    reader: Array | None = None
    _views: dict[Any, Array] = attrs.field(factory=dict)

    def view(self, dtype: np.dtype[Any]) -> Array:
        found = self._views.get(dtype)
        if found is None:
            whole = self.array.nbytes // dtype.itemsize * dtype.itemsize
            found = self._views[dtype] = self.array.view(np.uint8)[:whole].view(dtype)
        return found


class Memory:
    """The addresses that a kernel sees."""

    def __init__(self, races: bool) -> None:
        self._races = races
        self._buffers: list[Buffer] = []
        #: The program that runs, as one number; what it is called is up to ``name_of``.
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
        """What is there; where the mask is False, ``other``, or poison: a value that nobody may rely on."""
        if mask is None or mask.all():
            return self._gather(addresses, dtype)
        result = poison(addresses.shape, dtype)
        if other is not None:
            result[...] = other
        if mask.any():
            result[mask] = self._gather(addresses[mask], dtype)
        return result

    def write(self, addresses: Array, values: Array, mask: Array | None) -> None:
        """Put the values there."""
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
        """Put ``change(what was there, *operands)`` there, lane after lane, and return what was there before."""
        shape, dtype = operands[0].shape, operands[0].dtype
        before = poison(shape, dtype)
        addresses, lanes = self._chosen(np.broadcast_to(addresses, shape), np.arange(before.size).reshape(shape), mask)
        if not addresses.size:
            return before
        values = [operand.reshape(-1) for operand in operands]
        for buffer, offsets, here in self._parts("updates", addresses, dtype.itemsize, lanes):
            self._owned(buffer)
            view, places = buffer.view(dtype), offsets // dtype.itemsize
            self._note_atomic(buffer, offsets)
            # Lanes that update the same element take turns.
            alone = np.unique(places).size == places.size
            for part in [slice(None)] if alone else [slice(i, i + 1) for i in range(places.size)]:
                old = view[places[part]]
                before.flat[here[part]] = old
                view[places[part]] = change(old, *(value[here[part]] for value in values))
        return before

    # -- where an address points ---------------------------------------------------------------------------------

    def _gather(self, addresses: Array, dtype: np.dtype[Any]) -> Array:
        buffer = self._buffer(addresses.flat[0])
        offsets = self._within(buffer, addresses, dtype.itemsize)
        if offsets is not None:
            self._note_read(buffer, offsets)
            return buffer.view(dtype).take(offsets // dtype.itemsize)
        result = np.empty(addresses.shape, dtype)
        lanes = np.arange(addresses.size).reshape(addresses.shape)
        for buffer, offsets, here in self._parts("loads", addresses, dtype.itemsize, lanes):
            self._note_read(buffer, offsets)
            result.flat[here] = buffer.view(dtype)[offsets // dtype.itemsize]
        return result

    def _chosen(self, addresses: Array, values: Array, mask: Array | None) -> tuple[Array, Array]:
        if mask is None:
            return np.ascontiguousarray(addresses).reshape(-1), np.ascontiguousarray(values).reshape(-1)
        return addresses[mask], values[mask]

    def _parts(self, verb: str, addresses: Array, size: int, lanes: Array) -> list[tuple[Buffer, Array, Array]]:
        """The offsets into each buffer that is pointed to, with their part of ``lanes``."""
        first = self._buffer(addresses.flat[0])
        offsets = self._within(first, addresses, size)
        if offsets is not None:
            return [(first, offsets, lanes)]
        parts = []
        for number in np.unique(addresses >> _ROOM):
            here = addresses >> _ROOM == number
            buffer = self._buffer(addresses[here][0])
            offsets = self._within(buffer, addresses[here], size)
            if offsets is None:
                raise self._outside(verb, buffer, addresses[here], size)
            parts.append((buffer, offsets, lanes[here]))
        return parts

    def _buffer(self, address: Any) -> Buffer:
        number = int(address) >> _ROOM
        if not 0 < number <= len(self._buffers):
            raise Fault(f"uses {int(address):#x} as an address, which comes from no pointer argument")
        return self._buffers[number - 1]

    def _within(self, buffer: Buffer, addresses: Array, size: int) -> Array | None:
        """The offsets in bytes, if all of them are inside the buffer and aligned."""
        offsets: Array = addresses - buffer.base
        least, most = offsets.min(), offsets.max()
        inside = least >= 0 and most <= buffer.array.nbytes - size
        aligned = not int(np.bitwise_or.reduce(offsets, axis=None)) & (size - 1)
        return offsets if inside and aligned else None

    def _outside(self, verb: str, buffer: Buffer, addresses: Array, size: int) -> Fault:
        offsets = addresses.reshape(-1) - buffer.base
        wrong = offsets[(offsets < 0) | (offsets > buffer.array.nbytes - size)]
        if not wrong.size:
            wrong = offsets[offsets % size != 0]
            return Fault(f"{verb} {size} bytes of {buffer.name!r} at byte {wrong[0]}, which is not aligned")
        where = wrong[0] // buffer.array.itemsize
        more = f", and {wrong.size - 1} more" if wrong.size > 1 else ""
        return Fault(f"{verb} element {where} of {buffer.name!r}, which has {buffer.array.size} elements{more}")

    def _owned(self, buffer: Buffer) -> None:
        if not buffer.writable:
            raise Fault(f"stores into {buffer.name!r}, which is an input")

    # -- who was there before ------------------------------------------------------------------------------------

    def _note_read(self, buffer: Buffer, offsets: Array) -> None:
        if buffer.writer is None or buffer.reader is None:
            return
        elements = offsets // buffer.array.itemsize
        writer, reader = buffer.writer[elements], buffer.reader[elements]
        foreign = (writer >= 0) & (writer != self.program)
        if foreign.any():
            raise self._race(buffer, elements, foreign, writer, "loads element {} of {!r}, which {} has stored")
        buffer.reader[elements] = np.where((reader == _NONE) | (reader == self.program), self.program, _MANY)

    def _note_write(self, buffer: Buffer, offsets: Array, changes: Array) -> None:
        if buffer.writer is None or buffer.reader is None:
            return
        elements = offsets // buffer.array.itemsize
        writer, reader = buffer.writer[elements], buffer.reader[elements]
        told = "stores another value into element {} of {!r}, which {} has "
        foreign = changes & (writer != _NONE) & (writer != self.program)
        if foreign.any():
            raise self._race(buffer, elements, foreign, writer, told + "stored")
        foreign = changes & (reader != _NONE) & (reader != self.program)
        if foreign.any():
            raise self._race(buffer, elements, foreign, reader, told + "loaded")
        buffer.writer[elements] = self.program

    def _note_atomic(self, buffer: Buffer, offsets: Array) -> None:
        if buffer.writer is None:
            return
        elements = offsets // buffer.array.itemsize
        writer = buffer.writer[elements]
        foreign = (writer >= 0) & (writer != self.program)
        if foreign.any():
            raise self._race(buffer, elements, foreign, writer, "updates element {} of {!r}, which {} has stored")
        buffer.writer[elements] = _ATOMIC

    def _race(self, buffer: Buffer, elements: Array, foreign: Array, who: Array, told: str) -> Fault:
        place = int(np.argmax(foreign))
        other = int(who.reshape(-1)[place])
        names = {_MANY: "another program", _ATOMIC: "an atomic operation"}
        named = names.get(other) or f"program {self.name_of(other)}"
        return Fault(told.format(elements.reshape(-1)[place], buffer.name, named) + ": a race")


def _bits(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Integers of the same size: for comparing without regard to what NaN is equal to."""
    return np.dtype(f"u{dtype.itemsize}")
