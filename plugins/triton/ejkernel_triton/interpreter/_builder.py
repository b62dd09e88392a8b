"""The operations that Triton's language is made of, on NumPy arrays.

Triton's own interpreter has the frame: types, constants, and what is seldom used. The numbers are done anew here. Its
bfloat16 is wrong in all versions, and its memory is the process's own. As in the compiler, integers have no sign:
arrays are signed, and operations for unsigned numbers look at the same bits. A scalar has the shape (1,).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime.interpreter import InterpreterBuilder, InterpreterOptions

from ._faults import Fault
from ._memory import Array, Memory

_NUMPY: dict[Any, np.dtype[Any]] = {
    tl.int1: np.dtype(bool),
    tl.int8: np.dtype(np.int8),
    tl.uint8: np.dtype(np.int8),
    tl.int16: np.dtype(np.int16),
    tl.uint16: np.dtype(np.int16),
    tl.int32: np.dtype(np.int32),
    tl.uint32: np.dtype(np.int32),
    tl.int64: np.dtype(np.int64),
    tl.uint64: np.dtype(np.int64),
    tl.float16: np.dtype(np.float16),
    tl.float32: np.dtype(np.float32),
    tl.float64: np.dtype(np.float64),
    tl.bfloat16: np.dtype(ml_dtypes.bfloat16),
    tl.float8e5: np.dtype(ml_dtypes.float8_e5m2),
    tl.float8e4nv: np.dtype(ml_dtypes.float8_e4m3fn),
    tl.float8e5b16: np.dtype(ml_dtypes.float8_e5m2fnuz),
    tl.float8e4b8: np.dtype(ml_dtypes.float8_e4m3fnuz),
}
_NARROW = frozenset({np.dtype(np.float16), *(kind for kind in _NUMPY.values() if kind.kind not in "bif")})


class Handle:
    """An array and Triton's type of its elements."""

    __slots__ = ("attr", "data", "dtype")

    def __init__(self, data: Array, dtype: Any) -> None:
        self.data = data
        self.dtype = dtype
        self.attr: dict[str, Any] = {}

    def get_element_ty(self) -> Any:
        dtype = self.dtype
        while hasattr(dtype, "element_ty"):
            dtype = dtype.element_ty
        return dtype

    def clone(self) -> Handle:
        return Handle(self.data.copy(), self.dtype)

    def set_attr(self, key: str, value: Any) -> None:
        """Hints do not change what is computed."""


def numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """How the elements of a Triton type are held; an address is a whole number."""
    scalar = dtype.scalar
    if scalar.is_ptr():
        return np.dtype(np.int64)
    if scalar not in _NUMPY:
        raise Fault(f"uses {scalar}, which cannot be computed with here")
    return _NUMPY[scalar]


def _unsigned(data: Array) -> Array:
    return data if data.dtype.kind == "b" else data.view(f"u{data.dtype.itemsize}")


def _wide(data: Array) -> Array:
    """Small floats as float32, in which a sum of their products loses nothing that counts."""
    return data.astype(np.float32) if data.dtype in _NARROW else data


def _elementwise(function: Callable[..., Any]) -> Callable[..., Handle]:
    """An operation whose result has the type of its first operand."""

    def create(self: Any, first: Any, *rest: Any) -> Handle:
        data = function(first.data, *(other.data for other in rest))
        if data.dtype != first.data.dtype:
            data = data.astype(first.data.dtype)
        return Handle(data, first.dtype.scalar)

    return create


def _of_bits(function: Callable[..., Any]) -> Callable[..., Handle]:
    """The same on unsigned numbers."""

    def create(self: Any, first: Any, second: Any) -> Handle:
        data = function(_unsigned(first.data), _unsigned(second.data))
        return Handle(data.view(first.data.dtype), first.dtype.scalar)

    return create


def _wrapping(function: Callable[..., Any]) -> Callable[..., Handle]:
    """Arithmetic on whole numbers; that on single bits is modulo two, which NumPy's is not."""

    def create(self: Any, first: Any, second: Any) -> Handle:
        if first.data.dtype.kind == "b":
            data = (function(first.data.view(np.int8), second.data.view(np.int8)) & 1).astype(bool)
        else:
            data = function(first.data, second.data)
        return Handle(data, first.dtype.scalar)

    return create


def _in_float32(function: Callable[..., Any]) -> Callable[..., Handle]:
    """A function that the hardware computes in float32."""

    def create(self: Any, first: Any) -> Handle:
        return Handle(function(_wide(first.data)).astype(first.data.dtype), first.dtype.scalar)

    return create


def _comparison(function: Callable[..., Any], unsigned: bool = False, unordered: bool = False) -> Callable[..., Handle]:
    def create(self: Any, first: Any, second: Any) -> Handle:
        a, b = (_unsigned(first.data), _unsigned(second.data)) if unsigned else (first.data, second.data)
        data = function(a, b)
        return Handle(np.asarray(~data if unordered else data, bool), tl.int1)

    return create


def _divided(a: Array, b: Array) -> Array:
    """Towards zero, as machines do."""
    quotient: Array = a // b
    quotient += (quotient < 0) & (quotient * b != a)
    return quotient


def _towards_zero(data: Array, dtype: np.dtype[Any]) -> Array:
    """Rounded by cutting off."""
    nearest = data.astype(dtype)
    bits = nearest.view(f"i{dtype.itemsize}")
    over = np.abs(nearest.astype(np.float64)) > np.abs(data.astype(np.float64))
    cut: Array = bits - over.astype(bits.dtype)
    return cut.view(dtype)


def round_to_tf32(data: Array) -> Array:
    """Ten bits of mantissa, to nearest even."""
    bits = np.ascontiguousarray(data).view(np.uint32)
    rounded = (bits + (0xFFF + (bits >> 13 & 1))) & 0xFFFFE000
    return np.asarray(np.where(np.isfinite(data), rounded.astype(np.uint32).view(np.float32), data))


class Builder(InterpreterBuilder):  # type: ignore[misc, unused-ignore]
    """What the semantics of the language are carried out with, for one launch."""

    def __init__(self, memory: Memory, grid: tuple[int, int, int]) -> None:
        super().__init__()
        # The settings that kernels are compiled with for NVIDIA, apart from checks that belong to debugging.
        self.options = InterpreterOptions(
            sanitize_overflow=False,
            supported_fp8_dtypes=("fp8e5", "fp8e4nv", "fp8e4b15"),
            allowed_dot_input_precisions=("tf32", "tf32x3", "ieee", "bf16x3", "bf16x6"),
        )
        self.codegen_fns["min_dot_size"] = _least_dot()
        self.memory = memory
        self.grid_dim = grid
        self.grid_idx = (0, 0, 0)

    # -- constants -----------------------------------------------------------------------------------------------

    def _constant(self, value: Any, dtype: Any) -> Handle:
        kind = numpy_dtype(dtype)
        if kind.kind == "i":  # an unsigned number may be too large for the signed one with its bits
            bits = 8 * kind.itemsize
            value = (int(value) + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)
        return Handle(np.array([value], kind), dtype.scalar)

    def get_int1(self, value: Any) -> Handle:
        return self._constant(value, tl.int1)

    def get_int8(self, value: Any) -> Handle:
        return self._constant(value, tl.int8)

    def get_uint8(self, value: Any) -> Handle:
        return self._constant(value, tl.uint8)

    def get_int16(self, value: Any) -> Handle:
        return self._constant(value, tl.int16)

    def get_uint16(self, value: Any) -> Handle:
        return self._constant(value, tl.uint16)

    def get_int32(self, value: Any) -> Handle:
        return self._constant(value, tl.int32)

    def get_uint32(self, value: Any) -> Handle:
        return self._constant(value, tl.uint32)

    def get_int64(self, value: Any) -> Handle:
        return self._constant(value, tl.int64)

    def get_uint64(self, value: Any) -> Handle:
        return self._constant(value, tl.uint64)

    def get_fp16(self, value: Any) -> Handle:
        return self._constant(value, tl.float16)

    def get_bf16(self, value: Any) -> Handle:
        return self._constant(value, tl.bfloat16)

    def get_fp32(self, value: Any) -> Handle:
        return self._constant(value, tl.float32)

    def get_fp64(self, value: Any) -> Handle:
        return self._constant(value, tl.float64)

    def get_null_value(self, type: Any) -> Handle:
        return Handle(np.zeros(1, numpy_dtype(type)), type.scalar)

    def get_all_ones_value(self, type: Any) -> Handle:
        return Handle(np.full(1, -1, np.int64).astype(numpy_dtype(type)), type.scalar)

    def create_get_program_id(self, axis: int) -> Handle:
        return Handle(np.array([self.grid_idx[axis]], np.int32), tl.int32)

    def create_get_num_programs(self, axis: int) -> Handle:
        return Handle(np.array([self.grid_dim[axis]], np.int32), tl.int32)

    # -- arithmetic ----------------------------------------------------------------------------------------------

    create_fadd = _elementwise(np.add)
    create_fsub = _elementwise(np.subtract)
    create_fmul = _elementwise(np.multiply)
    create_fdiv = _elementwise(np.divide)
    create_precise_divf = _elementwise(np.divide)
    create_approx_divf = _elementwise(np.divide)
    create_frem = _elementwise(np.fmod)
    create_fneg = _elementwise(np.negative)
    create_fabs = _elementwise(np.abs)
    create_iabs = _elementwise(np.abs)
    create_add = _wrapping(np.add)
    create_sub = _wrapping(np.subtract)
    create_mul = _wrapping(np.multiply)
    create_sdiv = _elementwise(_divided)
    create_udiv = _of_bits(np.floor_divide)
    create_srem = _elementwise(np.fmod)
    create_urem = _of_bits(np.remainder)
    create_shl = _of_bits(np.left_shift)
    create_lshr = _of_bits(np.right_shift)
    create_ashr = _elementwise(np.right_shift)
    create_and = _elementwise(np.bitwise_and)
    create_or = _elementwise(np.bitwise_or)
    create_xor = _elementwise(np.bitwise_xor)
    create_minsi = _elementwise(np.minimum)
    create_maxsi = _elementwise(np.maximum)
    create_minui = _of_bits(np.minimum)
    create_maxui = _of_bits(np.maximum)
    create_minimumf = _elementwise(np.minimum)
    create_maximumf = _elementwise(np.maximum)
    create_minnumf = _elementwise(np.fmin)
    create_maxnumf = _elementwise(np.fmax)

    create_exp = _in_float32(np.exp)
    create_exp2 = _in_float32(np.exp2)
    create_log = _in_float32(np.log)
    create_log2 = _in_float32(np.log2)
    create_sqrt = create_precise_sqrt = _in_float32(np.sqrt)
    create_rsqrt = _in_float32(lambda data: 1 / np.sqrt(data))
    create_sin = _in_float32(np.sin)
    create_cos = _in_float32(np.cos)
    create_floor = _in_float32(np.floor)
    create_ceil = _in_float32(np.ceil)

    def create_select(self, condition: Any, first: Any, second: Any) -> Handle:
        return Handle(np.where(condition.data, first.data, second.data), first.dtype.scalar)

    def create_fma(self, x: Any, y: Any, z: Any) -> Handle:
        # Rounded once: float64 holds the product of two float32 exactly.
        exact = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return Handle(exact.astype(z.data.dtype), z.dtype.scalar)

    def create_clampf(self, x: Any, low: Any, high: Any, propagate_nans: Any) -> Handle:
        least, most = (np.maximum, np.minimum) if propagate_nans == ir.PROPAGATE_NAN.ALL else (np.fmax, np.fmin)
        return Handle(most(least(x.data, low.data), high.data), x.dtype.scalar)

    def create_umulhi(self, first: Any, second: Any) -> Handle:
        bits = 8 * first.data.dtype.itemsize
        product = _unsigned(first.data).astype(object) * _unsigned(second.data).astype(object)
        high = (product >> bits).astype(f"u{bits // 8}").view(first.data.dtype)
        return Handle(high, first.dtype.scalar)

    def create_dot(self, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Handle:
        x, y = _wide(a.data), _wide(b.data)
        if x.dtype.kind == "i":
            x, y = x.astype(np.int32), y.astype(np.int32)
        elif input_precision == ir.INPUT_PRECISION.TF32 and a.data.dtype == np.float32:
            x, y = round_to_tf32(x), round_to_tf32(y)
        sums = x @ y + _wide(d.data)
        return Handle(sums.astype(d.data.dtype), d.dtype.scalar)

    # -- casts ---------------------------------------------------------------------------------------------------

    def create_int_cast(self, value: Any, to: Any, is_signed: bool) -> Handle:
        data = value.data
        if data.dtype.kind == "b":
            data = -data.astype(np.int8) if is_signed else data.astype(np.int8)
        elif not is_signed:
            data = _unsigned(data)
        kind = numpy_dtype(to)
        return Handle((data & 1).astype(bool) if kind.kind == "b" else data.astype(kind), to.scalar)

    def create_si_to_fp(self, value: Any, to: Any) -> Handle:
        return Handle(self._float(value.data, numpy_dtype(to)), to.scalar)

    def create_ui_to_fp(self, value: Any, to: Any) -> Handle:
        return Handle(self._float(_unsigned(value.data), numpy_dtype(to)), to.scalar)

    def create_fp_to_si(self, value: Any, to: Any) -> Handle:
        return self._whole(value, to, unsigned=False)

    def create_fp_to_ui(self, value: Any, to: Any) -> Handle:
        return self._whole(value, to, unsigned=True)

    def create_fp_ext(self, value: Any, to: Any) -> Handle:
        return Handle(value.data.astype(numpy_dtype(to)), to.scalar)

    def create_fp_trunc(self, value: Any, to: Any) -> Handle:
        return Handle(self._float(value.data, numpy_dtype(to)), to.scalar)

    def create_fp_to_fp(self, value: Any, to: Any, rounding_mode: Any) -> Handle:
        kind = numpy_dtype(to)
        if rounding_mode == ir.ROUNDING_MODE.RTZ and kind.itemsize < value.data.dtype.itemsize:
            return Handle(_towards_zero(value.data, kind), to.scalar)
        return Handle(self._float(value.data, kind), to.scalar)

    def create_bitcast(self, value: Any, to: Any) -> Handle:
        if value.dtype.scalar.is_ptr() or to.scalar.is_ptr():
            return Handle(value.data.astype(np.int64), to.scalar)
        return Handle(np.ascontiguousarray(value.data).view(numpy_dtype(to)), to.scalar)

    create_int_to_ptr = create_ptr_to_int = create_bitcast

    def _float(self, data: Array, kind: np.dtype[Any]) -> Array:
        """To nearest even; to float8, what is too large becomes the largest, as the hardware has it."""
        if data.dtype.kind in "iu" and kind in _NARROW:
            data = data.astype(np.float32)
        if kind.itemsize == 1 and data.dtype.itemsize > 1:
            most = float(ml_dtypes.finfo(kind).max)  # type: ignore[no-untyped-call]
            data = np.clip(_wide(data), -most, most)
        return data.astype(kind)

    def _whole(self, value: Any, to: Any, unsigned: bool) -> Handle:
        """Towards zero; what is too large becomes the largest, and NaN 0, as the hardware has it."""
        kind = numpy_dtype(to)
        data = np.nan_to_num(value.data.astype(np.float64), nan=0.0, posinf=np.inf, neginf=-np.inf)
        limits = np.iinfo(f"{'u' if unsigned else 'i'}{kind.itemsize}")
        result = np.clip(data, float(limits.min), float(limits.max))
        over = result >= float(limits.max)  # of 64 bits, the largest is no float64
        whole = np.where(over, 0, result).astype(limits.dtype)
        return Handle(np.where(over, limits.max, whole).astype(limits.dtype).view(kind), to.scalar)

    # -- shapes --------------------------------------------------------------------------------------------------

    def create_splat(self, ret_ty: Any, value: Any) -> Handle:
        return Handle(np.broadcast_to(value.data, tuple(ret_ty.shape)), value.dtype.scalar)

    def create_unsplat(self, value: Any) -> Handle:
        return Handle(value.data.reshape(-1)[:1], value.dtype.scalar)

    def create_broadcast(self, value: Any, shape: Sequence[int]) -> Handle:
        return Handle(np.broadcast_to(value.data, tuple(shape)), value.dtype.scalar)

    def create_reshape(self, value: Any, shape: Sequence[int], allow_reorder: bool) -> Handle:
        return Handle(value.data.reshape(shape), value.dtype.scalar)

    def create_expand_dims(self, value: Any, axis: int) -> Handle:
        return Handle(np.expand_dims(value.data, axis), value.dtype.scalar)

    def create_trans(self, value: Any, order: Sequence[int]) -> Handle:
        return Handle(np.transpose(value.data, order), value.dtype.scalar)

    # -- memory --------------------------------------------------------------------------------------------------

    def create_addptr(self, pointer: Any, offset: Any) -> Handle:
        size = numpy_dtype(pointer.get_element_ty()).itemsize
        return Handle(pointer.data + offset.data.astype(np.int64) * size, pointer.dtype)

    # How the last arguments, about caches, are passed differs between versions of Triton.

    def create_load(self, pointer: Any, *_: Any) -> Handle:
        return self._load(pointer, None, None)

    def create_masked_load(self, pointer: Any, mask: Any, other: Any, *_: Any) -> Handle:
        return self._load(pointer, mask.data, None if other is None else other.data)

    def create_store(self, pointer: Any, value: Any, *_: Any) -> None:
        self.memory.write(pointer.data, value.data, None)

    def create_masked_store(self, pointer: Any, value: Any, mask: Any, *_: Any) -> None:
        self.memory.write(pointer.data, value.data, mask.data)

    def create_atomic_rmw(self, kind: Any, pointer: Any, value: Any, mask: Any, *_: Any) -> Handle:
        change = _CHANGES[str(kind).rpartition(".")[2]]
        return Handle(self.memory.update(pointer.data, (value.data,), mask.data, change), value.dtype.scalar)

    def create_atomic_cas(self, pointer: Any, expected: Any, value: Any, *_: Any) -> Handle:
        def change(old: Array, new: Array, wanted: Array) -> Array:
            return np.where(old == wanted, new, old)

        operands = (value.data, expected.data)
        return Handle(self.memory.update(pointer.data, operands, None, change), value.dtype.scalar)

    def create_atomic_load(self, pointer: Any, mask: Any, *_: Any) -> Handle:
        return self._load(pointer, mask.data, None)

    def create_atomic_store(self, pointer: Any, value: Any, mask: Any, *_: Any) -> None:
        self.memory.update(pointer.data, (value.data,), mask.data, lambda old, new: new)

    def create_atomic_poll(self, pointer: Any, expected: Any, *_: Any) -> Handle:
        found = self._load(pointer, None, None).data == expected.data
        if not found.all():
            raise Fault("waits for another program, and programs run one after the other here")
        return Handle(found, tl.int1)

    def _load(self, pointer: Any, mask: Any, other: Any) -> Handle:
        element = pointer.get_element_ty()
        return Handle(self.memory.read(pointer.data, numpy_dtype(element), mask, other), element)

    def create_make_tensor_descriptor(
        self, base: Any, shape: Any, strides: Any, block_shape: Any, is_signed: bool, padding: Any = None
    ) -> Descriptor:
        descriptor = Descriptor(base, shape, strides, block_shape, padding)
        size = numpy_dtype(base.get_element_ty()).itemsize
        if descriptor.strides[-1] != 1 or any(stride * size % 16 for stride in descriptor.strides[:-1]):
            told = f"strides {descriptor.strides} of {size} bytes"
            raise Fault(f"describes a tensor with {told}: the last must be 1, the others multiples of 16 bytes")
        return descriptor

    def create_descriptor_load(self, descriptor: Descriptor, offsets: Any, *_: Any) -> Handle:
        pointers, mask = descriptor.block([offset.data for offset in offsets])
        element = descriptor.base.get_element_ty()
        kind = numpy_dtype(element)
        filler = np.nan if descriptor.padding == ir.PADDING_OPTION.PAD_NAN else 0
        return Handle(self.memory.read(pointers, kind, mask, np.full((), filler).astype(kind)), element)

    def create_descriptor_store(self, descriptor: Descriptor, value: Any, offsets: Any) -> None:
        pointers, mask = descriptor.block([offset.data for offset in offsets])
        self.memory.write(pointers, value.data, mask)

    def create_descriptor_reduce(self, kind: Any, descriptor: Descriptor, value: Any, offsets: Any) -> None:
        pointers, mask = descriptor.block([offset.data for offset in offsets])
        change = _CHANGES[str(kind).rpartition(".")[2]]
        self.memory.update(pointers, (value.data,), mask, change)

    def create_descriptor_gather(self, descriptor: Descriptor, rows: Any, column: Any, type: Any) -> Handle:
        parts = [self.create_descriptor_load(descriptor, [Handle(row, tl.int32), column]) for row in rows.data]
        return Handle(np.concatenate([part.data for part in parts]), descriptor.base.get_element_ty())

    def create_descriptor_scatter(self, descriptor: Descriptor, value: Any, rows: Any, column: Any) -> None:
        for row, data in zip(rows.data, value.data, strict=True):
            self.create_descriptor_store(descriptor, Handle(data[None], value.dtype), [Handle(row, tl.int32), column])

    # Block pointers, which Triton has until 3.8; since 3.8 they are made of the other operations.

    def create_make_block_ptr(
        self, base: Any, shape: Any, strides: Any, offsets: Any, block_shape: Any, order: Any
    ) -> BlockPointer:
        return BlockPointer(Descriptor(base, shape, strides, block_shape, None), [offset.data for offset in offsets])

    def create_advance(self, pointer: BlockPointer, offsets: Any) -> BlockPointer:
        moved = [at + offset.data for at, offset in zip(pointer.offsets, offsets, strict=True)]
        return BlockPointer(pointer.parent, moved)

    def create_tensor_pointer_load(self, pointer: BlockPointer, checked: Any, padding: Any, *_: Any) -> Handle:
        pointers, mask = pointer.parent.block(pointer.offsets, checked)
        element = pointer.parent.base.get_element_ty()
        kind, other = numpy_dtype(element), None
        if padding is not None:
            other = np.full((), np.nan if padding == ir.PADDING_OPTION.PAD_NAN else 0).astype(kind)
        return Handle(self.memory.read(pointers, kind, mask, other), element)

    def create_tensor_pointer_store(self, pointer: BlockPointer, value: Any, checked: Any, *_: Any) -> None:
        pointers, mask = pointer.parent.block(pointer.offsets, checked)
        self.memory.write(pointers, value.data, mask)

    # -- what is said --------------------------------------------------------------------------------------------

    def create_assume(self, condition: Any) -> None:
        if not condition.data.all():
            raise Fault("assumes what is not so (tl.assume)")

    def create_assert(self, condition: Any, message: str) -> None:
        if not condition.data.all():
            raise Fault(f"asserts what is not so: {message}")

    def create_barrier(self) -> None:
        """One program at a time: there is nobody to wait for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("create_"):
            raise Fault(f"uses {name.removeprefix('create_')}, which cannot be run here")
        raise AttributeError(name)


_ORDERS: dict[str, Callable[..., Any]] = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}
#: What is so where the other is not: a comparison with NaN is ordered never, unordered always.
_OPPOSITE = {"LT": "GE", "LE": "GT", "GT": "LE", "GE": "LT"}

for _word in ("EQ", "NE"):
    setattr(Builder, f"create_icmp{_word}", _comparison(_ORDERS[_word]))
for _word, _opposite in _OPPOSITE.items():
    setattr(Builder, f"create_icmpS{_word}", _comparison(_ORDERS[_word]))
    setattr(Builder, f"create_icmpU{_word}", _comparison(_ORDERS[_word], unsigned=True))
    setattr(Builder, f"create_fcmpO{_word}", _comparison(_ORDERS[_word]))
    setattr(Builder, f"create_fcmpU{_word}", _comparison(_ORDERS[_opposite], unordered=True))
Builder.create_fcmpOEQ = _comparison(np.equal)
Builder.create_fcmpUNE = _comparison(np.not_equal)
Builder.create_fcmpONE = _comparison(lambda a, b: (a < b) | (a > b))
Builder.create_fcmpUEQ = _comparison(lambda a, b: (a < b) | (a > b), unordered=True)


class Descriptor:
    """An array in memory of which blocks are loaded and stored."""

    def __init__(self, base: Any, shape: Any, strides: Any, block_shape: Any, padding: Any) -> None:
        self.base = base
        self.shape = [int(size.data.item()) for size in shape]
        self.strides = [int(stride.data.item()) for stride in strides]
        self.block_shape = [int(size) for size in block_shape]
        self.padding = padding

    def block(self, offsets: Sequence[Array], checked: Sequence[int] | None = None) -> tuple[Array, Array]:
        """The addresses of the block that starts there, and which of them are inside the array.

        ``checked``: the axes along which that matters, if not all; along the others, memory itself is the limit.
        """
        size, rank = numpy_dtype(self.base.get_element_ty()).itemsize, len(self.block_shape)
        pointers = np.full((1,) * rank, int(self.base.data.reshape(-1)[0]), np.int64)
        mask = np.ones((1,) * rank, bool)
        for axis, (extent, stride, length) in enumerate(zip(self.shape, self.strides, self.block_shape, strict=True)):
            shape = [length if other == axis else 1 for other in range(rank)]
            at = (int(offsets[axis].reshape(-1)[0]) + np.arange(length, dtype=np.int64)).reshape(shape)
            pointers = pointers + at * (stride * size)
            if checked is None or axis in checked:
                mask = mask & (at >= 0) & (at < extent)
        return pointers, np.broadcast_to(mask, pointers.shape)


class BlockPointer:
    """A place in such an array."""

    def __init__(self, parent: Descriptor, offsets: Sequence[Array]) -> None:
        self.parent = parent
        self.offsets = offsets


def _signless(function: Callable[..., Any]) -> Callable[[Array, Array], Array]:
    return lambda old, new: function(_unsigned(old), _unsigned(new)).view(old.dtype)


_CHANGES: dict[str, Callable[[Array, Array], Array]] = {
    "ADD": np.add,
    "FADD": np.add,
    "AND": np.bitwise_and,
    "OR": np.bitwise_or,
    "XOR": np.bitwise_xor,
    "MAX": np.maximum,
    "MIN": np.minimum,
    "UMAX": _signless(np.maximum),
    "UMIN": _signless(np.minimum),
    "XCHG": lambda old, new: new,
}


@functools.cache
def _least_dot() -> Callable[[Any, Any], tuple[int, int, int]]:
    """The smallest matrices that the tensor cores of a GPU multiply."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import min_dot_size

    return min_dot_size(GPUTarget("cuda", 90, 32))  # type: ignore[no-any-return, unused-ignore]
