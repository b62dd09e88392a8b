"""The operations of Triton's intermediate representation, on NumPy arrays.

Types and rare operations come from Triton's own interpreter. The others are implemented here, because that interpreter
computes bfloat16 wrongly in all versions, and accesses the memory of the process directly. As in the compiler, integer
types have no sign: arrays are signed, and unsigned operations reinterpret their bits. A scalar has the shape (1,).
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

_NUMPY_DTYPES: dict[Any, np.dtype[Any]] = {
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
_SMALL_FLOATS = frozenset(
    {np.dtype(np.float16), *(dtype for dtype in _NUMPY_DTYPES.values() if dtype.kind not in "bif")}
)


class Handle:
    """An array, and the Triton type of its elements."""

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
        """Ignore the attribute: hints do not change results."""


def numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """The NumPy dtype for elements of a Triton type; an address is an integer."""
    scalar = dtype.scalar
    if scalar.is_ptr():
        return np.dtype(np.int64)
    if scalar not in _NUMPY_DTYPES:
        raise Fault(f"uses {scalar}, which the interpreter does not support")
    return _NUMPY_DTYPES[scalar]


def _unsigned_view(data: Array) -> Array:
    return data if data.dtype.kind == "b" else data.view(f"u{data.dtype.itemsize}")


def _promote_small_floats(data: Array) -> Array:
    """Convert small floats to float32, in which their products are exact."""
    return data.astype(np.float32) if data.dtype in _SMALL_FLOATS else data


def _elementwise(function: Callable[..., Any]) -> Callable[..., Handle]:
    """An operation whose result has the type of its first operand."""

    def create(self: Any, first: Any, *rest: Any) -> Handle:
        data = function(first.data, *(other.data for other in rest))
        if data.dtype != first.data.dtype:
            data = data.astype(first.data.dtype)
        return Handle(data, first.dtype.scalar)

    return create


def _unsigned_operation(function: Callable[..., Any]) -> Callable[..., Handle]:
    """An operation on the bits of two integers as unsigned numbers."""

    def create(self: Any, first: Any, second: Any) -> Handle:
        data = function(_unsigned_view(first.data), _unsigned_view(second.data))
        return Handle(data.view(first.data.dtype), first.dtype.scalar)

    return create


def _integer_operation(function: Callable[..., Any]) -> Callable[..., Handle]:
    """Integer arithmetic, modulo 2 for booleans, unlike in NumPy."""

    def create(self: Any, first: Any, second: Any) -> Handle:
        if first.data.dtype.kind == "b":
            data = (function(first.data.view(np.int8), second.data.view(np.int8)) & 1).astype(bool)
        else:
            data = function(first.data, second.data)
        return Handle(data, first.dtype.scalar)

    return create


def _float32_function(function: Callable[..., Any]) -> Callable[..., Handle]:
    """A function that the hardware computes in float32."""

    def create(self: Any, first: Any) -> Handle:
        return Handle(function(_promote_small_floats(first.data)).astype(first.data.dtype), first.dtype.scalar)

    return create


def _comparison(
    function: Callable[..., Any], is_unsigned: bool = False, is_negated: bool = False
) -> Callable[..., Handle]:
    """A comparison, or its negation, in which NaN compares as true."""

    def create(self: Any, first: Any, second: Any) -> Handle:
        a, b = (_unsigned_view(first.data), _unsigned_view(second.data)) if is_unsigned else (first.data, second.data)
        data = function(a, b)
        return Handle(np.asarray(~data if is_negated else data, bool), tl.int1)

    return create


def _truncating_division(a: Array, b: Array) -> Array:
    """Integer division that rounds towards zero."""
    quotient: Array = a // b
    quotient += (quotient < 0) & (quotient * b != a)
    return quotient


def _round_towards_zero(data: Array, dtype: np.dtype[Any]) -> Array:
    """Convert to a smaller float dtype, rounding towards zero."""
    nearest = data.astype(dtype)
    bits = nearest.view(f"i{dtype.itemsize}")
    is_larger = np.abs(nearest.astype(np.float64)) > np.abs(data.astype(np.float64))
    truncated: Array = bits - is_larger.astype(bits.dtype)
    return truncated.view(dtype)


def round_to_tf32(data: Array) -> Array:
    """Round float32 to the ten bits of mantissa of TF32, to nearest even."""
    bits = np.ascontiguousarray(data).view(np.uint32)
    rounded_bits = (bits + (0xFFF + (bits >> 13 & 1))) & 0xFFFFE000
    return np.asarray(np.where(np.isfinite(data), rounded_bits.astype(np.uint32).view(np.float32), data))


class Builder(InterpreterBuilder):  # type: ignore[misc, unused-ignore]
    """Runs the operations of one launch as Triton builds them."""

    def __init__(self, memory: Memory, grid: tuple[int, int, int]) -> None:
        super().__init__()
        # The options for NVIDIA GPUs, without debugging checks.
        self.options = InterpreterOptions(
            sanitize_overflow=False,
            supported_fp8_dtypes=("fp8e5", "fp8e4nv", "fp8e4b15"),
            allowed_dot_input_precisions=("tf32", "tf32x3", "ieee", "bf16x3", "bf16x6"),
        )
        self.codegen_fns["min_dot_size"] = _min_dot_size()
        self.memory = memory
        self.grid_dim = grid
        self.grid_idx = (0, 0, 0)

    # -- constants -----------------------------------------------------------------------------------------------

    def _constant(self, value: Any, dtype: Any) -> Handle:
        np_dtype = numpy_dtype(dtype)
        if np_dtype.kind == "i":  # wraps, as an unsigned number may be too large
            bits = 8 * np_dtype.itemsize
            value = (int(value) + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)
        return Handle(np.array([value], np_dtype), dtype.scalar)

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
    create_add = _integer_operation(np.add)
    create_sub = _integer_operation(np.subtract)
    create_mul = _integer_operation(np.multiply)
    create_sdiv = _elementwise(_truncating_division)
    create_udiv = _unsigned_operation(np.floor_divide)
    create_srem = _elementwise(np.fmod)
    create_urem = _unsigned_operation(np.remainder)
    create_shl = _unsigned_operation(np.left_shift)
    create_lshr = _unsigned_operation(np.right_shift)
    create_ashr = _elementwise(np.right_shift)
    create_and = _elementwise(np.bitwise_and)
    create_or = _elementwise(np.bitwise_or)
    create_xor = _elementwise(np.bitwise_xor)
    create_minsi = _elementwise(np.minimum)
    create_maxsi = _elementwise(np.maximum)
    create_minui = _unsigned_operation(np.minimum)
    create_maxui = _unsigned_operation(np.maximum)
    create_minimumf = _elementwise(np.minimum)
    create_maximumf = _elementwise(np.maximum)
    create_minnumf = _elementwise(np.fmin)
    create_maxnumf = _elementwise(np.fmax)

    create_exp = _float32_function(np.exp)
    create_exp2 = _float32_function(np.exp2)
    create_log = _float32_function(np.log)
    create_log2 = _float32_function(np.log2)
    create_sqrt = create_precise_sqrt = _float32_function(np.sqrt)
    create_rsqrt = _float32_function(lambda data: 1 / np.sqrt(data))
    create_sin = _float32_function(np.sin)
    create_cos = _float32_function(np.cos)
    create_floor = _float32_function(np.floor)
    create_ceil = _float32_function(np.ceil)

    def create_select(self, condition: Any, first: Any, second: Any) -> Handle:
        return Handle(np.where(condition.data, first.data, second.data), first.dtype.scalar)

    def create_fma(self, x: Any, y: Any, z: Any) -> Handle:
        # The product is not rounded: float64 has it exactly.
        exact = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return Handle(exact.astype(z.data.dtype), z.dtype.scalar)

    def create_clampf(self, x: Any, low: Any, high: Any, propagate_nans: Any) -> Handle:
        maximum, minimum = (np.maximum, np.minimum) if propagate_nans == ir.PROPAGATE_NAN.ALL else (np.fmax, np.fmin)
        return Handle(minimum(maximum(x.data, low.data), high.data), x.dtype.scalar)

    def create_umulhi(self, first: Any, second: Any) -> Handle:
        bits = 8 * first.data.dtype.itemsize
        product = _unsigned_view(first.data).astype(object) * _unsigned_view(second.data).astype(object)
        high = (product >> bits).astype(f"u{bits // 8}").view(first.data.dtype)
        return Handle(high, first.dtype.scalar)

    def create_dot(self, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Handle:
        x, y = _promote_small_floats(a.data), _promote_small_floats(b.data)
        if x.dtype.kind == "i":
            x, y = x.astype(np.int32), y.astype(np.int32)
        elif input_precision == ir.INPUT_PRECISION.TF32 and a.data.dtype == np.float32:
            x, y = round_to_tf32(x), round_to_tf32(y)
        sums = x @ y + _promote_small_floats(d.data)
        return Handle(sums.astype(d.data.dtype), d.dtype.scalar)

    # -- casts ---------------------------------------------------------------------------------------------------

    def create_int_cast(self, value: Any, to: Any, is_signed: bool) -> Handle:
        data = value.data
        if data.dtype.kind == "b":
            data = -data.astype(np.int8) if is_signed else data.astype(np.int8)
        elif not is_signed:
            data = _unsigned_view(data)
        np_dtype = numpy_dtype(to)
        return Handle((data & 1).astype(bool) if np_dtype.kind == "b" else data.astype(np_dtype), to.scalar)

    def create_si_to_fp(self, value: Any, to: Any) -> Handle:
        return Handle(self._round_float(value.data, numpy_dtype(to)), to.scalar)

    def create_ui_to_fp(self, value: Any, to: Any) -> Handle:
        return Handle(self._round_float(_unsigned_view(value.data), numpy_dtype(to)), to.scalar)

    def create_fp_to_si(self, value: Any, to: Any) -> Handle:
        return self._float_to_int(value, to, is_unsigned=False)

    def create_fp_to_ui(self, value: Any, to: Any) -> Handle:
        return self._float_to_int(value, to, is_unsigned=True)

    def create_fp_ext(self, value: Any, to: Any) -> Handle:
        return Handle(value.data.astype(numpy_dtype(to)), to.scalar)

    def create_fp_trunc(self, value: Any, to: Any) -> Handle:
        return Handle(self._round_float(value.data, numpy_dtype(to)), to.scalar)

    def create_fp_to_fp(self, value: Any, to: Any, rounding_mode: Any) -> Handle:
        np_dtype = numpy_dtype(to)
        if rounding_mode == ir.ROUNDING_MODE.RTZ and np_dtype.itemsize < value.data.dtype.itemsize:
            return Handle(_round_towards_zero(value.data, np_dtype), to.scalar)
        return Handle(self._round_float(value.data, np_dtype), to.scalar)

    def create_bitcast(self, value: Any, to: Any) -> Handle:
        if value.dtype.scalar.is_ptr() or to.scalar.is_ptr():
            return Handle(value.data.astype(np.int64), to.scalar)
        return Handle(np.ascontiguousarray(value.data).view(numpy_dtype(to)), to.scalar)

    create_int_to_ptr = create_ptr_to_int = create_bitcast

    def _round_float(self, data: Array, np_dtype: np.dtype[Any]) -> Array:
        """Convert, rounding to nearest even. As in hardware, float8 saturates."""
        if data.dtype.kind in "iu" and np_dtype in _SMALL_FLOATS:
            data = data.astype(np.float32)
        if np_dtype.itemsize == 1 and data.dtype.itemsize > 1:
            largest = float(ml_dtypes.finfo(np_dtype).max)
            data = np.clip(_promote_small_floats(data), -largest, largest)
        return data.astype(np_dtype)

    def _float_to_int(self, value: Any, to: Any, is_unsigned: bool) -> Handle:
        """Convert, rounding towards zero. As in hardware, results saturate, and NaN becomes 0."""
        np_dtype = numpy_dtype(to)
        data = np.nan_to_num(value.data.astype(np.float64), nan=0.0, posinf=np.inf, neginf=-np.inf)
        limits = np.iinfo(f"{'u' if is_unsigned else 'i'}{np_dtype.itemsize}")
        clipped = np.clip(data, float(limits.min), float(limits.max))
        is_largest = clipped >= float(limits.max)  # apart, because no float64 is the largest 64-bit integer
        integers = np.where(is_largest, 0, clipped).astype(limits.dtype)
        return Handle(np.where(is_largest, limits.max, integers).astype(limits.dtype).view(np_dtype), to.scalar)

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

    # The last arguments, such as cache hints, differ between versions of Triton.

    def create_load(self, pointer: Any, *_: Any) -> Handle:
        return self._load(pointer, None, None)

    def create_masked_load(self, pointer: Any, mask: Any, other: Any, *_: Any) -> Handle:
        return self._load(pointer, mask.data, None if other is None else other.data)

    def create_store(self, pointer: Any, value: Any, *_: Any) -> None:
        self.memory.write(pointer.data, value.data, None)

    def create_masked_store(self, pointer: Any, value: Any, mask: Any, *_: Any) -> None:
        self.memory.write(pointer.data, value.data, mask.data)

    def create_atomic_rmw(self, op: Any, pointer: Any, value: Any, mask: Any, *_: Any) -> Handle:
        update = _ATOMICS[str(op).rpartition(".")[2]]
        return Handle(self.memory.update(pointer.data, (value.data,), mask.data, update), value.dtype.scalar)

    def create_atomic_cas(self, pointer: Any, expected: Any, value: Any, *_: Any) -> Handle:
        def update(old: Array, new: Array, expected_values: Array) -> Array:
            return np.where(old == expected_values, new, old)

        operands = (value.data, expected.data)
        return Handle(self.memory.update(pointer.data, operands, None, update), value.dtype.scalar)

    def create_atomic_load(self, pointer: Any, mask: Any, *_: Any) -> Handle:
        return self._load(pointer, mask.data, None)

    def create_atomic_store(self, pointer: Any, value: Any, mask: Any, *_: Any) -> None:
        self.memory.update(pointer.data, (value.data,), mask.data, lambda old, new: new)

    def create_atomic_poll(self, pointer: Any, expected: Any, *_: Any) -> Handle:
        is_equal = self._load(pointer, None, None).data == expected.data
        if not is_equal.all():
            raise Fault("waits for another program, but the interpreter runs programs one after the other")
        return Handle(is_equal, tl.int1)

    def _load(self, pointer: Any, mask: Any, other: Any) -> Handle:
        element = pointer.get_element_ty()
        return Handle(self.memory.read(pointer.data, numpy_dtype(element), mask, other), element)

    def create_make_tensor_descriptor(
        self, base: Any, shape: Any, strides: Any, block_shape: Any, is_signed: bool, padding: Any = None
    ) -> Descriptor:
        descriptor = Descriptor(base, shape, strides, block_shape, padding)
        size = numpy_dtype(base.get_element_ty()).itemsize
        if descriptor.strides[-1] != 1 or any(stride * size % 16 for stride in descriptor.strides[:-1]):
            message = f"strides {descriptor.strides} for elements of {size} bytes"
            raise Fault(f"makes a descriptor with {message}: the last must be 1, and the others multiples of 16 bytes")
        return descriptor

    def create_descriptor_load(self, descriptor: Descriptor, offsets: Any, *_: Any) -> Handle:
        addresses, mask = descriptor.addresses_and_mask([offset.data for offset in offsets])
        element = descriptor.base.get_element_ty()
        np_dtype = numpy_dtype(element)
        padding = np.nan if descriptor.padding == ir.PADDING_OPTION.PAD_NAN else 0
        return Handle(self.memory.read(addresses, np_dtype, mask, np.full((), padding).astype(np_dtype)), element)

    def create_descriptor_store(self, descriptor: Descriptor, value: Any, offsets: Any) -> None:
        addresses, mask = descriptor.addresses_and_mask([offset.data for offset in offsets])
        self.memory.write(addresses, value.data, mask)

    def create_descriptor_reduce(self, op: Any, descriptor: Descriptor, value: Any, offsets: Any) -> None:
        addresses, mask = descriptor.addresses_and_mask([offset.data for offset in offsets])
        update = _ATOMICS[str(op).rpartition(".")[2]]
        self.memory.update(addresses, (value.data,), mask, update)

    def create_descriptor_gather(self, descriptor: Descriptor, rows: Any, column: Any, type: Any) -> Handle:
        blocks = [self.create_descriptor_load(descriptor, [Handle(row, tl.int32), column]) for row in rows.data]
        return Handle(np.concatenate([block.data for block in blocks]), descriptor.base.get_element_ty())

    def create_descriptor_scatter(self, descriptor: Descriptor, value: Any, rows: Any, column: Any) -> None:
        for row, data in zip(rows.data, value.data, strict=True):
            self.create_descriptor_store(descriptor, Handle(data[None], value.dtype), [Handle(row, tl.int32), column])

    # Block pointers have their own operations in Triton before 3.8. Since then, they are made of other operations.

    def create_make_block_ptr(
        self, base: Any, shape: Any, strides: Any, offsets: Any, block_shape: Any, order: Any
    ) -> BlockPointer:
        return BlockPointer(Descriptor(base, shape, strides, block_shape, None), [offset.data for offset in offsets])

    def create_advance(self, pointer: BlockPointer, offsets: Any) -> BlockPointer:
        new_offsets = [old + offset.data for old, offset in zip(pointer.offsets, offsets, strict=True)]
        return BlockPointer(pointer.descriptor, new_offsets)

    def create_tensor_pointer_load(self, pointer: BlockPointer, boundary_check: Any, padding: Any, *_: Any) -> Handle:
        addresses, mask = pointer.descriptor.addresses_and_mask(pointer.offsets, boundary_check)
        element = pointer.descriptor.base.get_element_ty()
        np_dtype, other = numpy_dtype(element), None
        if padding is not None:
            other = np.full((), np.nan if padding == ir.PADDING_OPTION.PAD_NAN else 0).astype(np_dtype)
        return Handle(self.memory.read(addresses, np_dtype, mask, other), element)

    def create_tensor_pointer_store(self, pointer: BlockPointer, value: Any, boundary_check: Any, *_: Any) -> None:
        addresses, mask = pointer.descriptor.addresses_and_mask(pointer.offsets, boundary_check)
        self.memory.write(addresses, value.data, mask)

    # -- assertions and barriers ---------------------------------------------------------------------------------

    def create_assume(self, condition: Any) -> None:
        if not condition.data.all():
            raise Fault("has a false assumption (tl.assume)")

    def create_assert(self, condition: Any, message: str) -> None:
        if not condition.data.all():
            raise Fault(f"has a false assertion: {message}")

    def create_barrier(self) -> None:
        """Do nothing: programs run one at a time, so none waits for another."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("create_"):
            raise Fault(f"uses {name.removeprefix('create_')}, which the interpreter does not support")
        raise AttributeError(name)


_COMPARISONS: dict[str, Callable[..., Any]] = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}
#: The negation of each comparison. With NaN, ordered comparisons are false, and unordered ones true.
_NEGATIONS = {"LT": "GE", "LE": "GT", "GT": "LE", "GE": "LT"}

for _name in ("EQ", "NE"):
    setattr(Builder, f"create_icmp{_name}", _comparison(_COMPARISONS[_name]))
for _name, _negation in _NEGATIONS.items():
    setattr(Builder, f"create_icmpS{_name}", _comparison(_COMPARISONS[_name]))
    setattr(Builder, f"create_icmpU{_name}", _comparison(_COMPARISONS[_name], is_unsigned=True))
    setattr(Builder, f"create_fcmpO{_name}", _comparison(_COMPARISONS[_name]))
    setattr(Builder, f"create_fcmpU{_name}", _comparison(_COMPARISONS[_negation], is_negated=True))
Builder.create_fcmpOEQ = _comparison(np.equal)
Builder.create_fcmpUNE = _comparison(np.not_equal)
Builder.create_fcmpONE = _comparison(lambda a, b: (a < b) | (a > b))
Builder.create_fcmpUEQ = _comparison(lambda a, b: (a < b) | (a > b), is_negated=True)


class Descriptor:
    """A tensor descriptor: an array in memory of which blocks are loaded and stored."""

    def __init__(self, base: Any, shape: Any, strides: Any, block_shape: Any, padding: Any) -> None:
        self.base = base
        self.shape = [int(size.data.item()) for size in shape]
        self.strides = [int(stride.data.item()) for stride in strides]
        self.block_shape = [int(size) for size in block_shape]
        self.padding = padding

    def addresses_and_mask(
        self, offsets: Sequence[Array], boundary_check: Sequence[int] | None = None
    ) -> tuple[Array, Array]:
        """The addresses of the block at these offsets, and which of them are inside the array.

        ``boundary_check`` has the axes along which the mask is computed; all by default.
        """
        size, rank = numpy_dtype(self.base.get_element_ty()).itemsize, len(self.block_shape)
        addresses = np.full((1,) * rank, int(self.base.data.reshape(-1)[0]), np.int64)
        mask = np.ones((1,) * rank, bool)
        for axis, (extent, stride, length) in enumerate(zip(self.shape, self.strides, self.block_shape, strict=True)):
            shape = [length if other == axis else 1 for other in range(rank)]
            indices = (int(offsets[axis].reshape(-1)[0]) + np.arange(length, dtype=np.int64)).reshape(shape)
            addresses = addresses + indices * (stride * size)
            if boundary_check is None or axis in boundary_check:
                mask = mask & (indices >= 0) & (indices < extent)
        return addresses, np.broadcast_to(mask, addresses.shape)


class BlockPointer:
    """A block pointer: a tensor descriptor, and the offsets of a block."""

    def __init__(self, descriptor: Descriptor, offsets: Sequence[Array]) -> None:
        self.descriptor = descriptor
        self.offsets = offsets


def _unsigned_atomic(function: Callable[..., Any]) -> Callable[[Array, Array], Array]:
    return lambda old, new: function(_unsigned_view(old), _unsigned_view(new)).view(old.dtype)


_ATOMICS: dict[str, Callable[[Array, Array], Array]] = {
    "ADD": np.add,
    "FADD": np.add,
    "AND": np.bitwise_and,
    "OR": np.bitwise_or,
    "XOR": np.bitwise_xor,
    "MAX": np.maximum,
    "MIN": np.minimum,
    "UMAX": _unsigned_atomic(np.maximum),
    "UMIN": _unsigned_atomic(np.minimum),
    "XCHG": lambda old, new: new,
}


@functools.cache
def _min_dot_size() -> Callable[[Any, Any], tuple[int, int, int]]:
    """Triton's smallest shapes for ``tl.dot`` on NVIDIA GPUs."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import min_dot_size

    return min_dot_size(GPUTarget("cuda", 90, 32))  # type: ignore[no-any-return, unused-ignore]
