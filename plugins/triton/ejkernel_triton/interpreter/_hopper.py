"""Gluon kernels for Hopper: the groups of warps of a program take turns, and what the hardware does asynchronously
happens at some time between its start and the wait for it.

What the hardware leaves open is drawn: which group goes on, when the copy engine writes a tile, and whether a product
reads its operands when it starts or when it is waited for. So a tile that is released or read too early has wrong
values, and a barrier that is never reached is found. Layouts do not change values, and are ignored.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from ejkernel_triton.gluon import shared_memory, tma

from . import _ptx
from ._builder import Handle, numpy_dtype
from ._faults import Fault
from ._language import CURRENT, Tensor, block_type, callable_, integer, plain, reduce, replace, truth
from ._memory import Array, poison


class _Stopped(BaseException):
    """Ends a group of warps because another one has failed."""


# -- groups of warps ------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class WarpGroup:
    """A thread, which runs while it has the turn."""

    is_ready: Callable[[], bool] = lambda: True
    turn: threading.Semaphore = attrs.field(factory=lambda: threading.Semaphore(0))
    #: The products that it has not waited for, the oldest first.
    products: list[Accumulator] = attrs.field(factory=list)
    #: The parts of shared memory that it has stored since its last fence.
    unfenced: list[Array] = attrs.field(factory=list)
    #: The tiles that the copy engine has still to read for it.
    stores: int = 0


@attrs.define(eq=False)
class Program:
    """The groups of warps of one program, and the copies that have begun."""

    draw: random.Random
    groups: list[WarpGroup] = attrs.field(factory=lambda: [WarpGroup()])
    copies: list[Callable[[], None]] = attrs.field(factory=list)
    fault: BaseException | None = None

    def run(self, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        """Run the kernel, in this thread."""
        _RUNNING.program, _RUNNING.group = self, self.groups[0]
        function(**arguments)
        while self.copies:
            self.copies.pop()()

    def pause(self, is_ready: Callable[[], bool] = lambda: True) -> None:
        """Let others run, and go on at some time when it is ready."""
        group = _RUNNING.group
        group.is_ready = is_ready
        following = self._next()
        if following is not group:
            following.turn.release()
            group.turn.acquire()
            if self.fault is not None:
                raise _Stopped

    def _next(self) -> WarpGroup:
        """The group that goes on; before, copies may end."""
        while True:
            ready = [group for group in self.groups if group.is_ready()]
            if not ready and not self.copies:
                raise Fault("waits at a barrier, as do all its other groups of warps: a deadlock")
            choice = self.draw.randrange(len(ready) + len(self.copies))
            if choice < len(ready):
                return ready[choice]
            self.copies.pop(choice - len(ready))()

    def fork(self, parts: Sequence[Callable[[], Any]]) -> Any:
        """Run the first part in this group, and the others in groups of their own. Return when all have ended."""
        group, semantic = _RUNNING.group, CURRENT.semantic
        threads = []
        for part in parts[1:]:
            other = WarpGroup()
            threads.append(threading.Thread(target=self._run_part, args=(part, other, semantic), daemon=True))
            self.groups.append(other)
        for thread in threads:
            thread.start()
        try:
            result = parts[0]()
            self.pause(lambda: self.groups == [group])
        except BaseException as fault:
            self._fail(fault)
        for thread in threads:
            thread.join()
        if self.fault is not None:
            raise self.fault
        return result

    def _run_part(self, part: Callable[[], Any], group: WarpGroup, semantic: Any) -> None:
        group.turn.acquire()
        _RUNNING.program, _RUNNING.group, CURRENT.semantic = self, group, semantic
        try:
            if self.fault is None:
                with np.errstate(all="ignore"):
                    part()
            self.groups.remove(group)
            self._next().turn.release()
        except BaseException as fault:
            self._fail(fault)

    def _fail(self, fault: BaseException) -> None:
        """End all groups. The first fault counts."""
        self.fault = self.fault or fault
        for group in self.groups:
            group.turn.release()


class _Running(threading.local):
    """The program and the group of warps of this thread."""

    program: Any = None
    group: Any = None


_RUNNING = _Running()


def _warp_specialize(parts: Any, *sizes: Any, **options: Any) -> Any:
    return _RUNNING.program.fork([partial(callable_(function), *arguments) for function, arguments in parts])


# -- barriers -------------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Barrier:
    """A phase ends when all have arrived and all bytes are there."""

    count: int
    arrivals: int = 0
    #: Those that are still to come.
    bytes: int = 0
    phase: int = 0

    def arrive(self, count: int = 1) -> None:
        self.arrivals += count
        if self.arrivals > self.count:
            raise Fault(f"arrives at a barrier more than {self.count} times in a phase")
        self._end_phase()

    def add_bytes(self, count: int) -> None:
        """Expect bytes, or fewer of them."""
        self.bytes += count
        self._end_phase()

    def _end_phase(self) -> None:
        if self.arrivals == self.count and not self.bytes:
            self.arrivals, self.phase = 0, self.phase + 1


def _barrier(memory: Any) -> Any:
    (barrier,) = memory.data
    if barrier is None:
        raise Fault("uses a barrier that has not been initialised")
    return barrier


def _init(memory: Any, count: Any) -> None:
    memory.data[0] = Barrier(plain(count))


def _expect(memory: Any, size: Any, pred: Any = True) -> None:
    if truth(pred):
        barrier = _barrier(memory)
        barrier.bytes += plain(size)
        barrier.arrive()


def _arrive(memory: Any, *, count: Any = 1, pred: Any = True) -> None:
    if truth(pred):
        _barrier(memory).arrive(plain(count))
        _RUNNING.program.pause()


def _wait(memory: Any, phase: Any, pred: Any = True, deps: Any = ()) -> None:
    barrier, parity = _barrier(memory), integer(phase) & 1
    if truth(pred):
        _RUNNING.program.pause(lambda: barrier.phase & 1 != parity)


# -- shared memory --------------------------------------------------------------------------------------------------


class SharedMemory(gl.shared_memory_descriptor):  # type: ignore[misc, unused-ignore]
    """A view of an array in shared memory, and which of its elements were stored without a fence."""

    def __init__(self, data: Array, unfenced: Array, dtype: Any) -> None:
        self.data, self.unfenced, self.element = data, unfenced, dtype

    @property
    def shape(self) -> Any:
        return [*self.data.shape]

    @property
    def dtype(self) -> Any:
        return self.element

    def _view(self, view: Callable[[Array], Array]) -> SharedMemory:
        return SharedMemory(view(self.data), view(self.unfenced), self.element)

    def index(self, index: Any) -> SharedMemory:
        place = integer(index)
        if not 0 <= place < len(self.data):
            raise Fault(f"takes part {place} of {len(self.data)} in shared memory")
        return self._view(lambda array: array[place])

    def slice(self, start: Any, length: Any, dim: Any = 0) -> SharedMemory:
        first, size, axis = integer(start), integer(length), integer(dim)
        if not 0 <= first <= first + size <= self.data.shape[axis]:
            raise Fault(f"slices {first} to {first + size} of {self.data.shape[axis]} in shared memory")
        part = (slice(None),) * axis + (slice(first, first + size),)
        return self._view(lambda array: array[part])

    def permute(self, order: Any) -> SharedMemory:
        axes = [integer(axis) for axis in plain(order)]
        return self._view(lambda array: array.transpose(axes))

    def reshape(self, shape: Any) -> SharedMemory:
        sizes = [integer(size) for size in plain(shape)]

        def view(array: Array) -> Array:
            array = array.view()
            array.shape = tuple(sizes)  # raises where the elements would have to be copied
            return array

        return self._view(view)

    def load(self, layout: Any = None) -> Any:
        return _tensor(self.data.copy(), self.element)

    def store(self, value: Any) -> None:
        self.data[...] = value.handle.data
        self.unfenced[...] = True
        _RUNNING.group.unfenced.append(self.unfenced)

    def operand(self) -> Array:
        """The values as the matrix units read them."""
        if self.unfenced.any():
            raise Fault("multiplies shared memory that was stored without fence_async_shared after it")
        return np.asarray(self.data.astype(np.float32))


def _allocate(dtype: Any, shape: Any, layout: Any, value: Any = None) -> SharedMemory:
    sizes, element = tuple(integer(size) for size in plain(shape)), plain(dtype)
    if isinstance(plain(layout), hopper.mbarrier.MBarrierLayout):
        return SharedMemory(np.full(sizes, None, object), np.zeros(sizes, bool), element)
    memory = SharedMemory(poison(sizes, numpy_dtype(element)), np.zeros(sizes, bool), element)
    if value is not None:
        memory.store(value)
    return memory


def _reinterpret(memory: Any, dtype: Any, shape: Any, layout: Any) -> Any:
    raise Fault("reinterprets shared memory, whose order depends on its layout: the interpreter has no layouts")


def _words(memory: Any) -> Any:
    """The same bytes: a store into a word is one into its first number."""
    return SharedMemory(memory.data.view(np.int16), memory.unfenced[..., ::2], tl.int16)


def _fence(cluster: Any = False) -> None:
    for unfenced in _RUNNING.group.unfenced:
        unfenced[...] = False
    _RUNNING.group.unfenced.clear()


# -- the copy engine ------------------------------------------------------------------------------------------------


class Descriptor(hopper.tma.tensor_descriptor):  # type: ignore[misc, unused-ignore]
    """An array of which the copy engine reads blocks."""

    layout = None

    def __init__(self, array: Array, dtype: Any, block: tuple[int, ...]) -> None:
        self.array, self.element, self.block = array, dtype, block

    @property
    def dtype(self) -> Any:
        return self.element

    @property
    def block_shape(self) -> Any:
        return [*self.block]

    @property
    def block_type(self) -> Any:
        return SimpleNamespace(nbytes=int(np.prod(self.block)) * numpy_dtype(self.element).itemsize)

    def read(self, first: Sequence[int]) -> Array:
        """A block. What is outside of the array is zero."""
        block = np.zeros(self.block, self.array.dtype)
        own, in_block = self._places(first)
        block[in_block] = self.array[own]
        return block

    def add(self, first: Sequence[int], block: Array) -> None:
        """Add a block, but for what is outside of the array."""
        own, in_block = self._places(first)
        self.array[own] += block[in_block]

    def _places(self, first: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """What of the array is in a block, and its place in the block."""
        own, in_block = [], []
        for start, size, length in zip(first, self.block, self.array.shape, strict=True):
            begin, end = max(start, 0), max(start, 0, min(start + size, length))
            own.append(slice(begin, end))
            in_block.append(slice(begin - start, end - start))
        return tuple(own), tuple(in_block)


def _copy(desc: Any, coordinates: Any, memory: Any, tile: Any, pred: Any = True, **options: Any) -> None:
    """Begin to fetch a tile. Until it is there, what stands in its place is neither the old nor the new one."""
    if not truth(pred):
        return
    barrier, first = _barrier(memory), [integer(place) for place in plain(coordinates)]
    if tile.data.shape != desc.block:
        raise Fault(f"copies a block of {desc.block} into a tile of {tile.data.shape}")
    tile.data[...] = poison(tile.data.shape, tile.data.dtype)
    tile.unfenced[...] = False

    def end() -> None:
        tile.data[...] = desc.read(first)
        barrier.add_bytes(-tile.data.nbytes)

    _RUNNING.program.copies.append(end)
    _RUNNING.program.pause()


def _add(desc: Any, coordinates: Any, tile: Any) -> None:
    """Begin to add a tile to memory. Until `_wait_for_stores`, the tile may still be read."""
    first, group = [integer(place) for place in plain(coordinates)], _RUNNING.group
    if tile.unfenced.any():
        raise Fault("copies from shared memory that was stored without fence_async_shared after it")

    def end() -> None:
        desc.add(first, tile.data)
        group.stores -= 1

    group.stores += 1
    _RUNNING.program.copies.append(end)
    _RUNNING.program.pause()


def _wait_for_stores(pendings: Any = 0) -> None:
    group, most = _RUNNING.group, plain(pendings)
    _RUNNING.program.pause(lambda: group.stores <= most)


# -- products -------------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Accumulator:
    """The result of a product that may not have ended. Nothing can be computed with it before the wait."""

    operands: Any
    total: Any
    result: Any = None

    def end(self) -> None:
        first, second = self.operands() if callable(self.operands) else self.operands
        total = self.total.result if isinstance(self.total, Accumulator) else self.total
        product = first @ second + (0 if total is None else total.handle.data)
        self.result = _tensor(product.astype(np.float32), tl.float32)
        self.operands = self.total = None


def _multiply(
    a: Any, b: Any, acc: Any, *, use_acc: Any = True, precision: Any = None, is_async: Any = False, **options: Any
) -> Any:
    def operands() -> tuple[Array, Array]:
        first = a.operand() if isinstance(a, SharedMemory) else a.handle.data.astype(np.float32)
        return first, b.operand()

    program = _RUNNING.program
    is_early = program.draw.random() < 0.5
    product = Accumulator(operands() if is_early else operands, acc if truth(use_acc) else None)
    _RUNNING.group.products.append(product)
    if not plain(is_async):
        return _wait_for_products(0, [product])
    program.pause()
    return product


def _wait_for_products(num_outstanding: Any = 0, deps: Any = None) -> Any:
    products = _RUNNING.group.products
    while len(products) > plain(num_outstanding):
        products.pop(0).end()
    results = tuple(_ended(dependency) for dependency in deps)
    return results[0] if len(results) == 1 else results


def _ended(value: Any) -> Any:
    return value.result if isinstance(value, Accumulator) and value.result is not None else value


# -- what layouts do not change -------------------------------------------------------------------------------------


def _tensor(data: Array, dtype: Any) -> Tensor:
    return Tensor(Handle(data, dtype), block_type(dtype, data.shape))


def _arange(start: Any, end: Any, layout: Any = None) -> Any:
    return tl.arange(plain(start), plain(end), _semantic=CURRENT.semantic)


def _full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Any:
    sizes = [integer(size) for size in plain(shape)]
    result = CURRENT.semantic.full(sizes, plain(value), plain(dtype))
    return Tensor(result.handle, result.type)


def _zeros(shape: Any, dtype: Any, layout: Any = None) -> Any:
    return _full(shape, 0, dtype)


def _zeros_like(x: Any, **options: Any) -> Any:
    return _full(x.shape, 0, x.dtype)


def _convert_layout(value: Any, layout: Any, assert_trivial: Any = False) -> Any:
    return value


def _inline_asm(asm: Any, constraints: Any, args: Any, dtype: Any, is_pure: Any, pack: Any) -> Any:
    (x,) = args
    if isinstance(plain(dtype), (tuple, tl.tuple)):
        dtypes = [plain(one) for one in plain(dtype)]
        results = _ptx.run_on_words(plain(asm), x.handle.data, [numpy_dtype(one) for one in dtypes])
        return tuple(_tensor(result, one) for result, one in zip(results, dtypes, strict=True))
    values, _ = _ptx.run(plain(asm), x.handle.data.reshape(plain(pack), -1))
    return _tensor(values.reshape(x.handle.data.shape).astype(numpy_dtype(plain(dtype))), plain(dtype))


replace(gl.allocate_shared_memory, _allocate)
replace(gl.arange, _arange)
replace(gl.convert_layout, _convert_layout)
replace(gl.full, _full)
replace(gl.reduce, reduce)
replace(gl.warp_specialize, _warp_specialize)
replace(gl.zeros, _zeros)
replace(gl.zeros_like, _zeros_like)
replace(hopper.fence_async_shared, _fence)
replace(tma.add, _add)
replace(tma.store_wait, _wait_for_stores)
replace(shared_memory.reinterpret, _reinterpret)
replace(shared_memory.words, _words)
replace(gl.inline_asm_elementwise, _inline_asm)
replace(hopper.mbarrier.arrive, _arrive)
replace(hopper.mbarrier.expect, _expect)
replace(hopper.mbarrier.init, _init)
replace(hopper.mbarrier.wait, _wait)
replace(tma.load, _copy)
replace(hopper.warpgroup_mma, _multiply)
replace(hopper.warpgroup_mma_wait, _wait_for_products)
