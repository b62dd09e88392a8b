"""What jaxlib's CUDA plugin makes of a compiled Triton kernel, in plain Python: for a machine that has no such plugin.

A launch is written into a program as a protocol buffer (`jaxlib/gpu/triton.proto` of JAX), which is read on the GPU
that runs it. Writing it takes no GPU, only the native extension that comes with one. These classes have its names and
arguments, and write the same bytes (seen equal to those of the plugins for jaxlib 0.10.2, 0.11.2 and 0.12.0.1), so
that what is lowered or exported here runs there.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import attrs

#: The number and the wire type of each kind of scalar in the message for a parameter.
_INTEGERS = {"B": 2, "i1": 2, "i32": 3, "u32": 4, "i64": 5, "u64": 6}
_FLOATS = {"fp32": (7, "<f", 5), "fp64": (8, "<d", 1)}


@attrs.frozen
class TritonKernel:
    """The compiled code of a kernel, and what launching it takes."""

    kernel_name: str
    num_warps: int
    num_ctas: int
    shared_mem_bytes: int
    ptx: str
    ttir: str
    compute_capability: int
    global_scratch_size: int | None = None
    global_scratch_align: int | None = None

    def serialized(self) -> bytes:
        parts = [
            _text(1, self.kernel_name),
            _number(2, self.num_warps),
            _number(3, self.shared_mem_bytes),
            _text(4, self.ptx),
            _text(5, self.ttir),
            _number(6, self.compute_capability),
            _number(10, self.num_ctas, always=True),
        ]
        if self.global_scratch_size is not None:
            parts += [_number(12, self.global_scratch_size, always=True)]
        if self.global_scratch_align is not None:
            parts += [_number(13, self.global_scratch_align, always=True)]
        return b"".join(parts)


@attrs.frozen
class TritonParameter:
    """One parameter of a launch, as bytes."""

    serialized: bytes


def create_array_parameter(bytes_to_zero: int, ptr_divisibility: int) -> TritonParameter:
    """A pointer to a buffer."""
    return TritonParameter(_message(1, _number(1, bytes_to_zero) + _number(2, ptr_divisibility)))


def create_scalar_parameter(value: bool | int | float, dtype: str) -> TritonParameter:
    """A number."""
    if dtype in _FLOATS:
        number, form, wire = _FLOATS[dtype]
        return TritonParameter(_varint(number << 3 | wire) + struct.pack(form, value))
    if dtype not in _INTEGERS:
        raise ValueError(f"a scalar parameter of type {dtype!r} cannot be passed to a Triton kernel")
    return TritonParameter(_number(_INTEGERS[dtype], int(value), always=True))


def create_tma_descriptor_parameter(
    elem_type: int,
    swizzle: int,
    shape: Sequence[int],
    strides: Sequence[int],
    block_shape: Sequence[int],
    oob_fill: int,
) -> TritonParameter:
    """A buffer, and how the copy engine takes blocks of it."""
    parts = [_number(1, elem_type), _number(2, swizzle)]
    parts += [_numbers(field, numbers) for field, numbers in ((3, shape), (4, strides), (5, block_shape))]
    return TritonParameter(_message(9, _message(1, b"".join([*parts, _number(6, oob_fill)]))))


@attrs.frozen
class TritonKernelCall:
    """One launch."""

    kernel: TritonKernel
    grid_0: int
    grid_1: int
    grid_2: int
    parameters: Sequence[TritonParameter]

    def serialized(self) -> bytes:
        head = _message(1, self.kernel.serialized())
        grid = b"".join(_number(2 + axis, size) for axis, size in enumerate((self.grid_0, self.grid_1, self.grid_2)))
        return head + grid + b"".join(_message(5, parameter.serialized) for parameter in self.parameters)

    def to_proto(self, name: str, metadata: bytes) -> bytes:
        return _any_call(1, self.serialized(), name, metadata)


@attrs.frozen
class TritonAutotunedKernelCall:
    """Several launches, of which the GPU is to find the fastest; with the buffers that trying them out would spoil."""

    name: str
    calls: Sequence[tuple[TritonKernelCall, str]]
    aliases: Sequence[tuple[int, int, int]]

    def to_proto(self, name: str, metadata: bytes) -> bytes:
        parts = [_text(1, self.name)]
        parts += [_message(2, _message(1, call.serialized()) + _text(2, told)) for call, told in self.calls]
        parts += [_message(3, b"".join(_number(1 + i, n) for i, n in enumerate(alias))) for alias in self.aliases]
        return _any_call(2, b"".join(parts), name, metadata)


def get_compute_capability(device: int) -> int:
    """Of the GPU that is not here."""
    raise RuntimeError("there is no GPU here: pass compute_capability= to say which one the kernel is compiled for")


def get_serialized_metadata(opaque: bytes) -> bytes:
    """Of a launch that is in a program."""
    raise RuntimeError("reading a launch back takes jaxlib's CUDA plugin")


def _any_call(kind: int, call: bytes, name: str, metadata: bytes) -> bytes:
    return _message(kind, call) + (_message(3, metadata) if metadata else b"") + _text(4, name)


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # a negative number is written as its two's complement in 64 bits
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _number(field: int, value: int, always: bool = False) -> bytes:
    return _varint(field << 3) + _varint(value) if value or always else b""


def _numbers(field: int, values: Sequence[int]) -> bytes:
    return _message(field, b"".join(map(_varint, values)))


def _text(field: int, value: str) -> bytes:
    return _message(field, value.encode()) if value else b""


def _message(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value
