"""Triton's language, executed eagerly: tensors with values, and the meaning of calls and operators in a kernel."""

from __future__ import annotations

import builtins
import inspect
import math
import numbers
import threading
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import triton.language as tl
from triton.compiler.code_generator import CodeGenerator
from triton.language.semantic import TritonSemantic
from triton.runtime.jit import JITFunction

from ._builder import Handle, numpy_dtype
from ._faults import Fault
from ._memory import Array
from ._rewriting import rewritten


class _Current(threading.local):
    """The state of the kernel that this thread runs."""

    semantic: Any = None


CURRENT = _Current()


class Tensor(tl.tensor):  # type: ignore[misc, unused-ignore]
    """A tensor of Triton with the values in its handle. Its methods use the semantics of the running kernel."""

    __array_ufunc__ = None  # NumPy's numbers use the operators of this class
    __hash__ = object.__hash__

    def __init__(self, handle: Any, type: Any) -> None:
        # Like Triton's own initializer, which computes all of this each time: most of the time of an operation.
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = _extent(tuple(handle.data.shape) if type.is_block() else ())

    @property
    def T(self) -> Any:  # noqa: N802 - Triton's name
        order = [*range(len(self.shape) - 2), len(self.shape) - 1, len(self.shape) - 2]
        return tl.permute(self, order, _semantic=CURRENT.semantic)

    def __repr__(self) -> str:
        return f"{self.type}: {self.handle.data}"

    __str__ = __repr__


@cache
def _extent(shape: tuple[int, ...]) -> tuple[Any, Any]:
    return tl.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))


_BLOCKS: dict[tuple[str, tuple[int, ...]], Any] = {}


def block_type(scalar: Any, shape: tuple[int, ...]) -> Any:
    """Triton's type of blocks of this shape. Types of pointers have no hash, but unique names."""
    block = _BLOCKS.get((scalar.name, shape))
    if block is None:
        block = _BLOCKS[scalar.name, shape] = tl.block_type(scalar, list(shape))
    return block


def _with_semantic(method: Callable[..., Any]) -> Callable[..., Any]:
    def method_with_semantic(self: Any, *args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        return _as_tensor(method(self, *args, _semantic=_semantic or CURRENT.semantic, **kwargs))

    return method_with_semantic


def _kernel_method(function: Any) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: interpreted_function(function)(self, *args, **kwargs)


for _name in dir(tl.tensor):
    _member = inspect.getattr_static(tl.tensor, _name)
    if isinstance(_member, JITFunction):
        setattr(Tensor, _name, _kernel_method(_member))
    elif tl.core.is_builtin(_member) and _name != "T":
        setattr(Tensor, _name, _with_semantic(_member))


#: For two operands of the same dtype of these, each operation has a result of this dtype.
_CLOSED_DTYPES = (tl.int32, tl.int64, tl.float32)


class Semantic(TritonSemantic):  # type: ignore[misc, type-arg, unused-ignore]
    """Triton's rules for types and shapes."""

    tensor = Tensor

    def to_tensor(self, x: Any, check_type: bool = True) -> Any:
        return super().to_tensor(_as_tensor(x), check_type)

    # Faster forms of three methods that nearly every operation calls.

    def binary_op_type_checking_impl(self, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
        dtypes = getattr(lhs, "dtype", None), getattr(rhs, "dtype", None)
        if dtypes[0] is dtypes[1] and dtypes[0] in _CLOSED_DTYPES:
            return self.broadcast_impl_value(lhs, rhs)
        if dtypes[0] is tl.float32 and type(rhs) in (int, float):
            return self.broadcast_impl_value(lhs, self._float32(rhs))
        if dtypes[1] is tl.float32 and type(lhs) in (int, float):
            return self.broadcast_impl_value(self._float32(lhs), rhs)
        return super().binary_op_type_checking_impl(lhs, rhs, *args, **kwargs)

    def _float32(self, value: Any) -> Any:
        return Tensor(Handle(np.array([value], np.float32), tl.float32), tl.float32)

    def broadcast_impl_value(self, lhs: Any, rhs: Any) -> Any:
        blocks = lhs.type.is_block(), rhs.type.is_block()
        if blocks == (False, False):
            return lhs, rhs
        shapes = [x.handle.data.shape if block else () for x, block in zip((lhs, rhs), blocks, strict=True)]
        if shapes[0] == shapes[1]:
            return lhs, rhs
        try:
            shape = np.broadcast_shapes(*shapes)
        except ValueError:
            raise ValueError(f"a tensor {lhs.type} does not go with one of {rhs.type}") from None
        return self._broadcast(lhs, shape), self._broadcast(rhs, shape)

    def _broadcast(self, x: Any, shape: tuple[int, ...]) -> Any:
        if x.type.is_block() and x.handle.data.shape == shape:
            return x
        return Tensor(Handle(np.broadcast_to(x.handle.data, shape), x.handle.dtype), block_type(x.dtype, shape))

    def expand_dims(self, input: Any, axis: int) -> Any:
        data = input.handle.data
        if not input.type.is_block() or not 0 <= axis <= data.ndim:
            return super().expand_dims(input, axis)
        data = data.reshape(*data.shape[:axis], 1, *data.shape[axis:])
        return Tensor(Handle(data, input.handle.dtype), block_type(input.dtype, data.shape))


# -- reductions and scans ----------------------------------------------------------------------------------------


def _tensor_of(data: Any, dtype: Any) -> Any:
    data = np.asarray(data)
    if data.ndim:
        return Tensor(Handle(data, dtype), block_type(dtype, data.shape))
    return Tensor(Handle(data.reshape(1), dtype), dtype)


def reduce(
    input: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, _semantic: Any = None, _generator: Any = None
) -> Any:
    if isinstance(input, tl.tensor):
        return reduce((input,), axis, combine_fn, keep_dims)[0]
    axis, keep_dims = plain(axis), plain(keep_dims)
    rank = len(input[0].shape)
    arrays = [x.handle.data for x in input]
    if axis is None:
        arrays = [array.reshape(-1) for array in arrays]
    elif not -rank <= axis < rank:
        raise Fault(f"reduces over axis {axis} of a tensor of rank {rank}")
    place = 0 if axis is None else axis % rank
    reduction = _REDUCTIONS.get(combine_fn.fn) if len(arrays) == 1 else None
    if reduction in _ORDERED_REDUCTIONS and input[0].dtype.is_int_unsigned():
        reduction = None  # the array is signed, and the numbers are not
    if reduction is not None:
        results = [reduction(arrays[0], place)]
    else:
        results = _reduce_pairwise(
            [np.moveaxis(array, place, 0) for array in arrays], [x.dtype for x in input], combine_fn
        )
    if keep_dims:
        results = [r.reshape((1,) * rank) if axis is None else np.expand_dims(r, place) for r in results]
    return tuple(_tensor_of(result, x.dtype) for result, x in zip(results, input, strict=True))


def _sum(data: Array, axis: int) -> Array:
    """The sum, of small floats in float32: the hardware does not round after each addition either."""
    if data.dtype.kind == "b":
        return np.asarray(np.bitwise_xor.reduce(data, axis=axis))
    wide = data.astype(np.float32) if data.dtype.itemsize < 4 and data.dtype.kind != "i" else data
    return np.asarray(np.sum(wide, axis=axis, dtype=wide.dtype)).astype(data.dtype)


def _max(data: Array, axis: int) -> Array:
    """The maximum, without NaN, as in the hardware."""
    return np.asarray((np.maximum if data.dtype.kind in "ib" else np.fmax).reduce(data, axis=axis))


def _min(data: Array, axis: int) -> Array:
    return np.asarray((np.minimum if data.dtype.kind in "ib" else np.fmin).reduce(data, axis=axis))


#: The reductions of nearly every kernel.
_REDUCTIONS: dict[Any, Callable[[Array, int], Array]] = {
    tl.standard._sum_combine.fn: _sum,
    tl.standard._elementwise_max.fn: _max,
    tl.standard._elementwise_min.fn: _min,
}
_ORDERED_REDUCTIONS = (_max, _min)


def _reduce_pairwise(arrays: list[Array], dtypes: list[Any], combine_fn: Any) -> list[Array]:
    """Combine neighbours until one entry is left. A function of scalars works on tensors, too."""
    combine = interpreted_function(combine_fn)
    while (length := arrays[0].shape[0]) > 1:
        even = length - length % 2
        combined = _combine_arrays(combine, [a[:even:2] for a in arrays], [a[1:even:2] for a in arrays], dtypes)
        arrays = [np.concatenate([new, array[even:]]) for new, array in zip(combined, arrays, strict=True)]
    return [array[0] for array in arrays]


def _combine_arrays(combine: Any, first: list[Array], second: list[Array], dtypes: list[Any]) -> list[Array]:
    operands = [_tensor_of(array, dtype) for part in (first, second) for array, dtype in zip(part, dtypes, strict=True)]
    results = combine(*operands)
    results = tuple(results) if isinstance(results, (tuple, tl.tuple)) else (results,)
    return [np.broadcast_to(r.handle.data, a.shape).astype(a.dtype) for r, a in zip(results, first, strict=True)]


def _associative_scan(
    input: Any, axis: Any, combine_fn: Any, reverse: Any = False, _semantic: Any = None, _generator: Any = None
) -> Any:
    if isinstance(input, tl.tensor):
        return _associative_scan((input,), axis, combine_fn, reverse)[0]
    place, reverse = plain(axis) % len(input[0].shape), plain(reverse)
    arrays = [np.moveaxis(x.handle.data, place, 0)[:: -1 if reverse else 1] for x in input]
    dtypes = [x.dtype for x in input]
    combine, length, step = interpreted_function(combine_fn), arrays[0].shape[0], 1
    while step < length:
        # Whole tensors, because the length of a tensor is a power of two; the entries that wrap around are not used.
        combined = _combine_arrays(combine, [np.roll(array, step, 0) for array in arrays], arrays, dtypes)
        arrays = [np.concatenate([array[:step], new[step:]]) for new, array in zip(combined, arrays, strict=True)]
        step *= 2
    results = [np.moveaxis(array[:: -1 if reverse else 1], 0, place) for array in arrays]
    return tuple(_tensor_of(result, dtype) for result, dtype in zip(results, dtypes, strict=True))


def _reduce_with_indices(
    input: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, _semantic: Any = None, _generator: Any = None
) -> Any:
    shape, axis = input.handle.data.shape, plain(axis)
    sizes = [-1 if place == axis % len(shape) else 1 for place in range(len(shape))]
    along = np.arange(shape[axis], dtype=np.int32).reshape(sizes)
    return reduce((input, _tensor_of(np.broadcast_to(along, shape), tl.int32)), axis, combine_fn, keep_dims)


# -- helpers of rewritten kernels -----------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """The value without the wrapper of constants."""
    return value.value if isinstance(value, tl.constexpr) else value


def assigned(value: Any) -> Any:
    """A value that is assigned or returned: a number becomes a tensor."""
    value = plain(value)
    if isinstance(value, Tensor):
        return value
    if isinstance(value, numbers.Number):
        return CURRENT.semantic.to_tensor(value)
    if isinstance(value, tl.tuple):
        value = tuple(value)
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(assigned(part) for part in value)
    return value


def constant(name: str, value: Any) -> Any:
    """The value of a constant, which cannot be a tensor."""
    value = plain(value)
    if isinstance(value, tl.tensor):
        raise Fault(f"gives a tensor to {name!r}, which is a tl.constexpr")
    return value


def truth(value: Any) -> bool:
    """The condition of an ``if`` or a ``while``."""
    value = plain(value)
    if not isinstance(value, tl.tensor):
        return bool(value)
    if value.type.is_block():
        raise Fault(f"takes a whole tensor {value.type} for a condition")
    return bool(value.handle.data.reshape(-1)[0])


def negation(value: Any) -> Any:
    """``not``"""
    value = plain(value)
    return value.__not__() if isinstance(value, tl.tensor) else not value


def logical(word: str, *values: Callable[[], Any]) -> Any:
    """``and`` and ``or``: a constant may decide, and tensors are combined bit by bit."""
    result: Any = None
    value: Any = None
    for thunk in values:
        value = plain(thunk())
        if not isinstance(value, tl.tensor):
            if bool(value) == (word == "or"):
                return value
        else:
            result = value if result is None else getattr(result, f"logical_{word}")(value)
    return value if result is None else result


def asserted(condition: Any, message: Any = "", mask: Any = None) -> None:
    """``assert``, ``tl.static_assert`` and ``tl.device_assert``."""
    condition = plain(condition)
    if isinstance(condition, tl.tensor):
        data = condition.handle.data
        condition = bool((data | ~mask.handle.data if mask is not None else data).all())
    if not condition:
        raise Fault(f"has a false assertion: {plain(message)}")


def _range(first: Any, last: Any = None, step: Any = 1, **hints: Any) -> Iterator[Any]:
    """A loop of the kernel, whose variable is a tensor."""
    bounds = [plain(bound) for bound in ((0, first, step) if last is None else (first, last, step))]
    semantic, dtypes = CURRENT.semantic, []
    for bound in bounds:
        tensor = semantic.to_tensor(bound)
        if tensor.type.is_block() or not tensor.dtype.is_int():
            raise Fault(f"loops over a range of {tensor.type}")
        dtypes.append(tensor.dtype)
    dtype = dtypes[0]
    for other in dtypes[1:]:
        dtype = semantic.integer_promote_impl(dtype, other)
    kind = numpy_dtype(dtype)
    for value in range(*(integer(bound) for bound in bounds)):
        yield Tensor(Handle(np.array([value], kind), dtype), dtype)


def integer(value: Any) -> int:
    """The value of a scalar: a number, a constant, or a tensor."""
    value = plain(value)
    return int(value.handle.data.reshape(-1)[0]) if isinstance(value, tl.tensor) else int(value)


def _static_range(first: Any, last: Any = None, step: Any = 1, **hints: Any) -> range:
    """A loop that the compiler unrolls, whose variable is a constant."""
    bounds = (0, first, step) if last is None else (first, last, step)
    return range(*(constant("tl.static_range", bound) for bound in bounds))


def _multiple_of(x: Any, values: Any) -> Any:
    """A hint, which is checked for scalars: of a tensor only the first of some neighbours has to be a multiple."""
    values = plain(values)
    if isinstance(x, tl.tensor) and not x.type.is_block() and integer(x) % plain(values):
        raise Fault(f"says that {integer(x)} is a multiple of {values}")
    return x


def _hint(x: Any, values: Any) -> Any:
    """Hints about layouts do not change the values."""
    return x


def _print(prefix: Any, *values: Any, **hints: Any) -> None:
    place = CURRENT.semantic.builder.grid_idx
    print(f"{place} {plain(prefix)}", *(v.handle.data if isinstance(v, tl.tensor) else plain(v) for v in values))


def _static_print(*values: Any, **options: Any) -> None:
    print(*(plain(value) for value in values))


#: The functions that are replaced in a kernel.
_REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    builtins.range: _range,
    tl.range: _range,
    tl.static_range: _static_range,
    tl.constexpr: plain,
    tl.reduce: reduce,
    tl.associative_scan: _associative_scan,
    tl.core._reduce_with_indices: _reduce_with_indices,
    tl.multiple_of: _multiple_of,
    tl.max_contiguous: _hint,
    tl.max_constancy: _hint,
    tl.static_assert: asserted,
    tl.device_assert: asserted,
    tl.static_print: _static_print,
    tl.device_print: _print,
    builtins.print: _print,
}


def callable_(function: Any) -> Callable[..., Any]:
    """The function that runs where a kernel calls this one."""
    function = plain(function)
    if isinstance(function, JITFunction):
        return _REPLACEMENTS.get(function.fn) or interpreted_function(function)
    try:
        replacement = _REPLACEMENTS.get(function)
    except TypeError:  # not hashable
        replacement = None
    if replacement is None and function in (builtins.min, builtins.max):
        replacement = CodeGenerator.builtin_namespace[function.__name__]
    result = replacement or function
    return partial(_builtin, result) if tl.core.is_builtin(result) else result


def replace(function: Any, replacement: Callable[..., Any]) -> None:
    """Replace a function in kernels."""
    # The hash of a Triton function covers its whole source; that of the Python function in it does not.
    _REPLACEMENTS[getattr(function, "fn", function)] = replacement


def method(owner: Any, name: str) -> Callable[..., Any]:
    """The function that runs where a kernel calls this method. Those of an aggregate get the aggregate."""
    function = getattr(owner, name)
    if isinstance(function, JITFunction) and isinstance(owner, tl.core.base_value):
        return partial(interpreted_function(function), owner)
    return callable_(function)


class _Layout:
    """Any layout: they do not change values."""

    @property
    def parent(self) -> _Layout:
        return self


def layout(value: Any) -> Any:
    """The layout of a type of Gluon. Those of the interpreter have none."""
    return getattr(value, "layout", _Layout())


def _builtin(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _as_tensor(function(*args, _semantic=CURRENT.semantic, **kwargs))


def _as_tensor(value: Any) -> Any:
    """The tensor with values: some mathematical functions of Triton create tensors without the semantics."""
    if type(value) is tl.tensor:
        return Tensor(value.handle, value.type)
    return tuple(_as_tensor(part) for part in value) if type(value) is tuple else value


_HELPERS: dict[str, Callable[..., Any]] = {
    "callable": callable_,
    "method": method,
    "layout": layout,
    "plain": plain,
    "truth": truth,
    "negation": negation,
    "logical": logical,
    "assigned": assigned,
    "constant": constant,
    "asserted": asserted,
}


#: By identity, because the hash of a Triton function covers its whole source. The entry keeps the function alive.
_FUNCTIONS: dict[int, tuple[Any, Callable[..., Any]]] = {}


def interpreted_function(function: Any) -> Callable[..., Any]:
    """A ``triton.jit`` function as a Python function."""
    entry = _FUNCTIONS.get(id(function))
    if entry is None:
        entry = _FUNCTIONS[id(function)] = function, _rewrite(function)
    return entry[1]


def _rewrite(function: Any) -> Callable[..., Any]:
    return rewritten(function, _HELPERS)
