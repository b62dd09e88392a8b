"""A launch of a kernel: its arguments, and its programs, which run one after the other."""

from __future__ import annotations

import linecache
import random
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs
import numpy as np
import triton.language as tl

from . import _hopper
from ._builder import Builder, Handle
from ._faults import Fault, KernelError
from ._language import CURRENT, Semantic, Tensor, interpreted_function
from ._memory import Array, Memory, poison
from ._rewriting import MARK

Order = Literal["forward", "reverse", "shuffled"]

TYPES: dict[str, Any] = {
    "i1": tl.int1,
    "B": tl.int1,
    **{str(dtype): dtype for dtype in (tl.float16, tl.bfloat16, tl.float32, tl.float64)},
    "i8": tl.int8,
    "i16": tl.int16,
    "i32": tl.int32,
    "i64": tl.int64,
    "u8": tl.uint8,
    "u16": tl.uint16,
    "u32": tl.uint32,
    "u64": tl.uint64,
    "fp8e5": tl.float8e5,
    "fp8e4nv": tl.float8e4nv,
    "fp8e5b16": tl.float8e5b16,
    "fp8e4b8": tl.float8e4b8,
}


#: The limit of CUDA along the second and the third axis of a grid.
MOST_PROGRAMS = 65_535


@attrs.frozen
class Settings:
    """How kernels run here."""

    order: Order = "shuffled"
    #: For the shuffled order.
    seed: int = 0
    #: Whether it is an error if programs store different values into an element, or load what another one has stored.
    races: bool = True


@attrs.frozen
class Operand:
    """An array argument, by its position among the inputs, and that of the output that aliases it."""

    position: int
    output: int | None = None


@attrs.frozen
class Result:
    """An output, by its position."""

    position: int


@attrs.frozen
class Scalar:
    """A number and the name of its type."""

    value: Any
    type: str


@attrs.frozen
class Described:
    """A tensor descriptor made on the host."""

    base: Operand
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block_shape: tuple[int, ...]
    padding: str


@attrs.frozen(eq=False)
class Launch:
    """A launch without the values of its arrays."""

    kernel: Any
    name: str
    #: By the names of the parameters: Operand, Result, Scalar, Described, or a constant.
    arguments: Mapping[str, Any]
    grid: tuple[int, int, int]
    #: Their shapes and dtypes.
    outputs: Sequence[Any]
    #: The outputs that contain zeros at first.
    zeroed: frozenset[int]

    def run(self, inputs: Sequence[Array], settings: Settings) -> tuple[Array, ...]:
        """The outputs."""
        if max(self.grid[1:]) > MOST_PROGRAMS:
            raise KernelError(
                self._message(Fault(f"is launched on more than {MOST_PROGRAMS} programs along y or z"), None)
            )
        programs = [(x, y, z) for x in range(self.grid[0]) for y in range(self.grid[1]) for z in range(self.grid[2])]
        memory = Memory(races=settings.races and len(programs) > 1)
        memory.name_of = lambda number: str(programs[number])
        outputs = self._outputs(inputs)
        builder = Builder(memory, self.grid)
        outer, CURRENT.semantic = CURRENT.semantic, Semantic(builder)
        number: int | None = None
        try:
            with np.errstate(all="ignore"):
                arguments = self._arguments(memory, inputs, outputs)
                function = interpreted_function(self.kernel)
                draw = random.Random(settings.seed)
                for number in _ordered(len(programs), settings):
                    memory.program, builder.grid_idx = number, programs[number]
                    if is_gluon(self.kernel):
                        _hopper.Program(draw).run(function, arguments)
                    else:
                        function(**arguments)
        except Exception as fault:
            raise KernelError(self._message(fault, None if number is None else programs[number])) from fault
        finally:
            CURRENT.semantic = outer
        return tuple(outputs)

    def _outputs(self, inputs: Sequence[Array]) -> list[Array]:
        outputs = [poison(tuple(output.shape), output.dtype) for output in self.outputs]
        for argument in self.arguments.values():
            operand = argument.base if isinstance(argument, Described) else argument
            if isinstance(operand, Operand) and operand.output is not None:
                outputs[operand.output] = np.array(inputs[operand.position])
        for position in self.zeroed:
            outputs[position][...] = 0
        return outputs

    def _arguments(self, memory: Memory, inputs: Sequence[Array], outputs: Sequence[Array]) -> dict[str, Any]:
        addresses: dict[Any, int] = {}

        def pointer(name: str, argument: Operand | Result) -> Any:
            position = argument.output if isinstance(argument, Operand) else argument.position
            is_output = position is not None
            array = outputs[position] if position is not None else inputs[argument.position]
            # In jax-triton 0.3 two parameters of an alias have the same address.
            key = ("output", position) if is_output else ("input", name)
            if key not in addresses:
                addresses[key] = memory.add(name, np.ascontiguousarray(array).reshape(-1), is_output)
            kind = tl.pointer_type(type_of(array.dtype))
            return Tensor(Handle(np.array([addresses[key]], np.int64), kind), kind)

        def argument_of(name: str, argument: Any) -> Any:
            if isinstance(argument, (Operand, Result)):
                return pointer(name, argument)
            if isinstance(argument, Scalar):
                kind = TYPES[argument.type]
                return Tensor(CURRENT.semantic.builder._constant(argument.value, kind), kind)
            if isinstance(argument, Described) and is_gluon(self.kernel):
                output = argument.base.output
                array = inputs[argument.base.position] if output is None else outputs[output]
                return _hopper.Descriptor(array, type_of(array.dtype), argument.block_shape)
            if isinstance(argument, Described):
                numbers = [CURRENT.semantic.to_tensor(size) for size in argument.shape]
                strides = [CURRENT.semantic.to_tensor(stride) for stride in argument.strides[:-1]]
                block = [tl.constexpr(size) for size in argument.block_shape]
                return CURRENT.semantic.make_tensor_descriptor(
                    pointer(name, argument.base), numbers, [*strides, tl.constexpr(1)], block, argument.padding
                )
            if isinstance(argument, tuple):
                return tl.tuple([argument_of(f"{name}[{position}]", part) for position, part in enumerate(argument)])
            return argument

        return {name: argument_of(name, argument) for name, argument in self.arguments.items()}

    def _message(self, fault: Exception, program: tuple[int, ...] | None) -> str:
        place = "" if program is None else f", program {program} of {self.grid}"
        launch_name = f" ({self.name})" if self.name and self.name != self.kernel.fn.__name__ else ""
        description = f" {fault}" if isinstance(fault, Fault) else f": {type(fault).__name__}: {fault}"
        line = _line(fault)
        return f"kernel {self.kernel.fn.__name__!r}{launch_name}{place}{description}{line}"


def is_gluon(kernel: Any) -> bool:
    return "gluon" in type(kernel).__module__


def type_of(dtype: Any) -> Any:
    """Triton's type of the elements of an array."""
    name = np.dtype(dtype).name
    triton_type = _BY_NAME.get(name)
    if triton_type is None:
        raise Fault(f"gets an array of {name}, which Triton does not have")
    return triton_type


_BY_NAME: dict[str, Any] = {
    "bool": tl.int1,
    **{f"{sign}int{bits}": getattr(tl, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{name: getattr(tl, name) for name in ("float16", "bfloat16", "float32", "float64")},
    "float8_e5m2": tl.float8e5,
    "float8_e4m3fn": tl.float8e4nv,
    "float8_e5m2fnuz": tl.float8e5b16,
    "float8_e4m3fnuz": tl.float8e4b8,
}


def _ordered(count: int, settings: Settings) -> Sequence[int]:
    if settings.order == "forward":
        return range(count)
    if settings.order == "reverse":
        return range(count)[::-1]
    numbers = list(range(count))
    random.Random(settings.seed).shuffle(numbers)
    return numbers


def _line(fault: BaseException) -> str:
    """The innermost line of the user's kernels: rewritten code has the line numbers of its source."""
    position = None
    for frame, number in traceback.walk_tb(fault.__traceback__):
        code, module = frame.f_code, str(frame.f_globals.get("__name__"))
        if any(name.startswith(MARK) for name in code.co_freevars) and not module.startswith("triton."):
            position = code.co_filename, number
    return f"\n  {position[0]}:{position[1]}: {linecache.getline(*position).strip()}" if position else ""
