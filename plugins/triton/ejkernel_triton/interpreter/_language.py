"""Triton's language, carried out at once: tensors with values, and what calls and operators inside a kernel mean."""

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
    """What this thread runs a kernel with."""

    semantic: Any = None


CURRENT = _Current()


class Tensor(tl.tensor):  # type: ignore[misc, unused-ignore]
    """A tensor of Triton's with the values in its handle. Its methods know what they are carried out with."""

    __array_ufunc__ = None  # NumPy's numbers leave the operation to us
    __hash__ = object.__hash__

    def __init__(self, handle: Any, type: Any) -> None:
        # As Triton's own, which makes all of this anew each time: most of what an operation would cost.
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


def _block(scalar: Any, shape: tuple[int, ...]) -> Any:
    """Triton's type of such blocks. Types of pointers have no hash, but names that tell them apart."""
    found = _BLOCKS.get((scalar.name, shape))
    if found is None:
        found = _BLOCKS[scalar.name, shape] = tl.block_type(scalar, list(shape))
    return found


def _with_semantic(method: Callable[..., Any]) -> Callable[..., Any]:
    def called(self: Any, *args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        return _adopted(method(self, *args, _semantic=_semantic or CURRENT.semantic, **kwargs))

    return called


def _kernel_method(function: Any) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: interpreted_function(function)(self, *args, **kwargs)


for _name in dir(tl.tensor):
    _member = inspect.getattr_static(tl.tensor, _name)
    if isinstance(_member, JITFunction):
        setattr(Tensor, _name, _kernel_method(_member))
    elif tl.core.is_builtin(_member) and _name != "T":
        setattr(Tensor, _name, _with_semantic(_member))


#: Two of the same of these make another of it, whatever the operation.
_STEADY = (tl.int32, tl.int64, tl.float32)


class Semantic(TritonSemantic):  # type: ignore[misc, type-arg, unused-ignore]
    """Triton's rules for types and shapes, which it applies while it compiles."""

    tensor = Tensor

    def to_tensor(self, x: Any, check_type: bool = True) -> Any:
        return super().to_tensor(_adopted(x), check_type)

    # Three of Triton's own, done with less: they are a part of nearly every operation.

    def binary_op_type_checking_impl(self, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
        kinds = getattr(lhs, "dtype", None), getattr(rhs, "dtype", None)
        if kinds[0] is kinds[1] and kinds[0] in _STEADY:
            return self.broadcast_impl_value(lhs, rhs)
        if kinds[0] is tl.float32 and type(rhs) in (int, float):
            return self.broadcast_impl_value(lhs, self._float32(rhs))
        if kinds[1] is tl.float32 and type(lhs) in (int, float):
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
        return self._spread(lhs, shape), self._spread(rhs, shape)

    def _spread(self, x: Any, shape: tuple[int, ...]) -> Any:
        if x.type.is_block() and x.handle.data.shape == shape:
            return x
        return Tensor(Handle(np.broadcast_to(x.handle.data, shape), x.handle.dtype), _block(x.dtype, shape))

    def expand_dims(self, input: Any, axis: int) -> Any:
        data = input.handle.data
        if not input.type.is_block() or not 0 <= axis <= data.ndim:
            return super().expand_dims(input, axis)
        data = data.reshape(*data.shape[:axis], 1, *data.shape[axis:])
        return Tensor(Handle(data, input.handle.dtype), _block(input.dtype, data.shape))


# -- reductions and scans ----------------------------------------------------------------------------------------


def _wrapped(data: Any, dtype: Any) -> Any:
    data = np.asarray(data)
    if data.ndim:
        return Tensor(Handle(data, dtype), _block(dtype, data.shape))
    return Tensor(Handle(data.reshape(1), dtype), dtype)


def _reduce(
    input: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, _semantic: Any = None, _generator: Any = None
) -> Any:
    if isinstance(input, tl.tensor):
        return _reduce((input,), axis, combine_fn, keep_dims)[0]
    axis, keep_dims = plain(axis), plain(keep_dims)
    rank = len(input[0].shape)
    arrays = [x.handle.data for x in input]
    if axis is None:
        arrays = [array.reshape(-1) for array in arrays]
    elif not -rank <= axis < rank:
        raise Fault(f"reduces over axis {axis} of a tensor of rank {rank}")
    place = 0 if axis is None else axis % rank
    quick = _QUICK.get(combine_fn.fn) if len(arrays) == 1 else None
    if quick in _BY_SIZE and input[0].dtype.is_int_unsigned():
        quick = None  # the array has signs that the numbers do not have
    if quick is not None:
        results = [quick(arrays[0], place)]
    else:
        results = _folded([np.moveaxis(array, place, 0) for array in arrays], [x.dtype for x in input], combine_fn)
    if keep_dims:
        results = [r.reshape((1,) * rank) if axis is None else np.expand_dims(r, place) for r in results]
    return tuple(_wrapped(result, x.dtype) for result, x in zip(results, input, strict=True))


def _sum(data: Array, axis: int) -> Array:
    """Of small floats in float32: the hardware adds in some order of its own, and rounds less often than one by one."""
    if data.dtype.kind == "b":
        return np.asarray(np.bitwise_xor.reduce(data, axis=axis))
    wide = data.astype(np.float32) if data.dtype.itemsize < 4 and data.dtype.kind != "i" else data
    return np.asarray(np.sum(wide, axis=axis, dtype=wide.dtype)).astype(data.dtype)


def _greatest(data: Array, axis: int) -> Array:
    """Like the hardware's, it passes over NaN."""
    return np.asarray((np.maximum if data.dtype.kind in "ib" else np.fmax).reduce(data, axis=axis))


def _least(data: Array, axis: int) -> Array:
    return np.asarray((np.minimum if data.dtype.kind in "ib" else np.fmin).reduce(data, axis=axis))


#: What nearly every kernel reduces by.
_QUICK: dict[Any, Callable[[Array, int], Array]] = {
    tl.standard._sum_combine.fn: _sum,
    tl.standard._elementwise_max.fn: _greatest,
    tl.standard._elementwise_min.fn: _least,
}
_BY_SIZE = (_greatest, _least)


def _folded(arrays: list[Array], dtypes: list[Any], combine_fn: Any) -> list[Array]:
    """Neighbours combined with neighbours, until one is left. What works on scalars works on tensors."""
    combine = interpreted_function(combine_fn)
    while (length := arrays[0].shape[0]) > 1:
        even = length - length % 2
        merged = _merged(combine, [a[:even:2] for a in arrays], [a[1:even:2] for a in arrays], dtypes)
        arrays = [np.concatenate([new, array[even:]]) for new, array in zip(merged, arrays, strict=True)]
    return [array[0] for array in arrays]


def _merged(combine: Any, first: list[Array], second: list[Array], dtypes: list[Any]) -> list[Array]:
    operands = [_wrapped(array, dtype) for part in (first, second) for array, dtype in zip(part, dtypes, strict=True)]
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
        # Whole tensors, since only lengths that are powers of two make one; what came around the end is left out.
        merged = _merged(combine, [np.roll(array, step, 0) for array in arrays], arrays, dtypes)
        arrays = [np.concatenate([array[:step], new[step:]]) for new, array in zip(merged, arrays, strict=True)]
        step *= 2
    results = [np.moveaxis(array[:: -1 if reverse else 1], 0, place) for array in arrays]
    return tuple(_wrapped(result, dtype) for result, dtype in zip(results, dtypes, strict=True))


def _reduce_with_indices(
    input: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, _semantic: Any = None, _generator: Any = None
) -> Any:
    shape, axis = input.handle.data.shape, plain(axis)
    sizes = [-1 if place == axis % len(shape) else 1 for place in range(len(shape))]
    along = np.arange(shape[axis], dtype=np.int32).reshape(sizes)
    return _reduce((input, _wrapped(np.broadcast_to(along, shape), tl.int32)), axis, combine_fn, keep_dims)


# -- what the rewritten source calls -----------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Without the wrapper for constants."""
    return value.value if isinstance(value, tl.constexpr) else value


def assigned(value: Any) -> Any:
    """A number that is assigned or returned becomes a tensor."""
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
    """What is declared as a constant is known while the kernel is compiled."""
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
    """``and`` and ``or``: constants decide alone, tensors are combined bit by bit."""
    found: Any = None
    value: Any = None
    for later in values:
        value = plain(later())
        if not isinstance(value, tl.tensor):
            if bool(value) == (word == "or"):
                return value
        else:
            found = value if found is None else getattr(found, f"logical_{word}")(value)
    return value if found is None else found


def asserted(condition: Any, told: Any = "", mask: Any = None) -> None:
    """``assert``, ``tl.static_assert`` and ``tl.device_assert``."""
    condition = plain(condition)
    if isinstance(condition, tl.tensor):
        data = condition.handle.data
        condition = bool((data | ~mask.handle.data if mask is not None else data).all())
    if not condition:
        raise Fault(f"asserts what is not so: {plain(told)}")


def _range(first: Any, last: Any = None, step: Any = 1, **hints: Any) -> Iterator[Any]:
    """A loop of the kernel: its variable is a tensor."""
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
    for value in range(*(_whole(bound) for bound in bounds)):
        yield Tensor(Handle(np.array([value], kind), dtype), dtype)


def _whole(bound: Any) -> int:
    return int(bound.handle.data.reshape(-1)[0]) if isinstance(bound, tl.tensor) else int(bound)


def _static_range(first: Any, last: Any = None, step: Any = 1, **hints: Any) -> range:
    """A loop that the compiler unrolls: its variable is a constant."""
    bounds = (0, first, step) if last is None else (first, last, step)
    return range(*(constant("tl.static_range", bound) for bound in bounds))


def _multiple_of(x: Any, values: Any) -> Any:
    """A hint: of a tensor, only the first of neighbours need be a multiple, so nothing can be said of those."""
    values = plain(values)
    if isinstance(x, tl.tensor) and not x.type.is_block() and _whole(x) % plain(values):
        raise Fault(f"says that {_whole(x)} is a multiple of {values}")
    return x


def _hint(x: Any, values: Any) -> Any:
    """What is said of how values lie does not change them."""
    return x


def _print(prefix: Any, *values: Any, **hints: Any) -> None:
    place = CURRENT.semantic.builder.grid_idx
    print(f"{place} {plain(prefix)}", *(v.handle.data if isinstance(v, tl.tensor) else plain(v) for v in values))


def _static_print(*values: Any, **options: Any) -> None:
    print(*(plain(value) for value in values))


#: What means something else inside a kernel.
_MEANINGS: dict[Any, Callable[..., Any]] = {
    builtins.range: _range,
    tl.range: _range,
    tl.static_range: _static_range,
    tl.constexpr: plain,
    tl.reduce: _reduce,
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
    """What to call where a kernel calls this."""
    function = plain(function)
    if isinstance(function, JITFunction):
        return interpreted_function(function)
    try:
        meaning = _MEANINGS.get(function)
    except TypeError:  # not hashable
        meaning = None
    if meaning is None and function in (builtins.min, builtins.max):
        meaning = CodeGenerator.builtin_namespace[function.__name__]
    found = meaning or function
    return partial(_builtin, found) if tl.core.is_builtin(found) else found


def _builtin(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _adopted(function(*args, _semantic=CURRENT.semantic, **kwargs))


def _adopted(value: Any) -> Any:
    """Some of Triton's functions, those of mathematics, make tensors past the semantics."""
    if type(value) is tl.tensor:
        return Tensor(value.handle, value.type)
    return tuple(_adopted(part) for part in value) if type(value) is tuple else value


_HELPERS: dict[str, Callable[..., Any]] = {
    "callable": callable_,
    "plain": plain,
    "truth": truth,
    "negation": negation,
    "logical": logical,
    "assigned": assigned,
    "constant": constant,
    "asserted": asserted,
}


#: By identity, with the function itself so that it lives on: the hash of one is that of all its source.
_FUNCTIONS: dict[int, tuple[Any, Callable[..., Any]]] = {}


def interpreted_function(function: Any) -> Callable[..., Any]:
    """A ``triton.jit`` function as Python runs it."""
    known = _FUNCTIONS.get(id(function))
    if known is None:
        known = _FUNCTIONS[id(function)] = function, _made(function)
    return known[1]


def _made(function: Any) -> Callable[..., Any]:
    if "gluon" in type(function).__module__:
        raise Fault(f"calls {function.fn.__name__}, which is written in Gluon: that can be compiled, but not run here")
    return rewritten(function, _HELPERS)
