"""The launch of a compiled kernel as a protocol buffer, in Python, for machines without JAX's CUDA plugin.

A launch is written into a program as a protocol buffer (`jaxlib/gpu/triton.proto` of JAX), and read when the program
runs on a GPU. JAX writes it with a native extension of the CUDA plugin. These classes have the same names and
arguments as that extension, and write the same bytes (compared with the plugins for jaxlib 0.10.2, 0.11.2 and
0.12.0.1). So a program that is lowered or exported without a GPU runs on one.
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
    """The compiled code of a kernel, with its number of warps and its memory."""

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
            _number(10, self.num_ctas, is_required=True),
        ]
        if self.global_scratch_size is not None:
            parts += [_number(12, self.global_scratch_size, is_required=True)]
        if self.global_scratch_align is not None:
            parts += [_number(13, self.global_scratch_align, is_required=True)]
        return b"".join(parts)


@attrs.frozen
class TritonParameter:
    """The bytes of one parameter of a launch."""

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
    return TritonParameter(_number(_INTEGERS[dtype], int(value), is_required=True))


def create_tma_descriptor_parameter(
    elem_type: int,
    swizzle: int,
    shape: Sequence[int],
    strides: Sequence[int],
    block_shape: Sequence[int],
    oob_fill: int,
) -> TritonParameter:
    """A buffer with a descriptor for the copy engine."""
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
    """Several launches, of which the GPU finds the fastest, and the buffers that are restored between the trials."""

    name: str
    calls: Sequence[tuple[TritonKernelCall, str]]
    aliases: Sequence[tuple[int, int, int]]

    def to_proto(self, name: str, metadata: bytes) -> bytes:
        parts = [_text(1, self.name)]
        parts += [_message(2, _message(1, call.serialized()) + _text(2, label)) for call, label in self.calls]
        parts += [_message(3, b"".join(_number(1 + i, n) for i, n in enumerate(alias))) for alias in self.aliases]
        return _any_call(2, b"".join(parts), name, metadata)


def get_compute_capability(device: int) -> int:
    """An error, because there is no GPU."""
    raise RuntimeError("this machine has no GPU: pass the compute capability of the card as compute_capability=")


def get_serialized_metadata(opaque: bytes) -> bytes:
    """An error, because only the plugin can read a launch."""
    raise RuntimeError("reading the metadata of a launch needs jaxlib's CUDA plugin")


def _any_call(kind: int, call: bytes, name: str, metadata: bytes) -> bytes:
    return _message(kind, call) + (_message(3, metadata) if metadata else b"") + _text(4, name)


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # a negative number is written as its two's complement in 64 bits
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _number(field: int, value: int, is_required: bool = False) -> bytes:
    return _varint(field << 3) + _varint(value) if value or is_required else b""


def _numbers(field: int, values: Sequence[int]) -> bytes:
    return _message(field, b"".join(map(_varint, values)))


def _text(field: int, value: str) -> bytes:
    return _message(field, value.encode()) if value else b""


def _message(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value
