"""jax-triton's primitive on a CPU: a call back to Python, which runs the kernel."""

from __future__ import annotations

import inspect
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from ejkernel_triton.launch import _jax_triton

from ._launch import TYPES, Described, Launch, Operand, Order, Result, Scalar, Settings

_LOCK = threading.Lock()
#: The settings of those who are inside ``interpreted``, innermost last.
_ACTIVE: list[Settings] = []


@contextmanager
def interpreted(order: Order = "shuffled", seed: int = 0, races: bool = True) -> Iterator[None]:
    """Inside, Triton kernels run on the CPU, wherever JAX puts what calls them: in jit, in gradients, in loops.

    Nothing else changes: what is lowered for a GPU meanwhile is compiled as ever. ``order``: in which the programs of a
    launch run, one after the other. ``races``: whether it is an error that programs disagree about what an element
    holds, or that one uses what another has stored; kernels that synchronise their programs need it to be False.

    It holds for all threads. What was compiled inside keeps running here afterwards.
    """
    if order not in ("forward", "reverse", "shuffled"):
        raise ValueError(f"order: takes 'forward', 'reverse' or 'shuffled'; got {order!r}")
    settings = Settings(order, seed, races)
    with _LOCK:
        if not _ACTIVE:
            _install()
        _ACTIVE.append(settings)
    try:
        yield
    finally:
        with _LOCK:
            _ACTIVE.remove(settings)
            if not _ACTIVE:
                _remove()


def _install() -> None:
    from jax._src import dispatch
    from jax.interpreters import mlir

    primitive = _primitive()
    mlir.register_lowering(primitive, _lower, platform="cpu", cacheable=False)
    # A callback has to know the devices that it is lowered for, and JAX sees primitives only.
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def _remove() -> None:
    from jax._src import dispatch
    from jax._src.interpreters import mlir

    primitive = _primitive()
    mlir._platform_specific_lowerings["cpu"].pop(primitive, None)
    dispatch.prim_requires_devices_during_lowering.discard(primitive)


def _primitive() -> Any:
    return _library().triton_kernel_call_p


def _library() -> Any:
    missing = _jax_triton.missing()
    if missing is not None:
        raise ImportError(missing)
    _jax_triton.load()
    import jax_triton.triton_lib as library

    return library


def _lower(ctx: Any, *operands: Any, **params: Any) -> Any:
    """The rule. NumPy arrays come and go; no JAX in the callback, for that could wait for the thread that it is in."""
    from jax._src import callback

    launch = launch_of(params, ctx.avals_in, ctx.avals_out)
    settings = _ACTIVE[-1] if _ACTIVE else Settings()
    sharding = callback._callback_op_sharding(ctx.module_context.axis_context, None, ctx.avals_out)
    results, _, _ = callback.emit_python_callback(
        ctx,
        partial(_run, launch, settings),
        None,
        list(operands),
        ctx.avals_in,
        ctx.avals_out,
        has_side_effect=False,
        returns_token=False,
        sharding=sharding,
    )
    return results


def _run(launch: Launch, settings: Settings, *arrays: Any) -> tuple[np.ndarray[Any, Any], ...]:
    active = _ACTIVE[-1:]  # one look: another thread may leave meanwhile
    return launch.run([np.asarray(array) for array in arrays], active[0] if active else settings)


# -- from the primitive's parameters to a launch -----------------------------------------------------------------


def launch_of(params: Mapping[str, Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> Launch:
    """The launch that jax-triton would make of them."""
    if _jax_triton.version() >= (0, 4):
        bound, constants = _bound(params, inputs)
    else:
        bound, constants = _bound_by_0_3(params, inputs, outputs)
    kernel, constants = _unwrapped(params["fn"], bound, constants, [*inputs], [*outputs])
    grid = params["grid"]
    grid = grid(constants) if callable(grid) else grid
    x, y, z = (*((grid,) if isinstance(grid, int) else grid), 1, 1)[:3]
    zeroed = params["zeroed_outputs"]
    zeroed = zeroed(constants) if callable(zeroed) else zeroed
    return Launch(
        kernel,
        params["name"],
        {**{name: _specialised(value) for name, value in bound.items()}, **constants},
        (int(x), int(y), int(z)),
        tuple(outputs),
        frozenset(zeroed),
    )


def _specialised(argument: Any) -> Any:
    """A number that is 1 is compiled in as a constant."""
    if isinstance(argument, Scalar) and argument.value == 1:
        return 1
    return argument


def _bound(params: Mapping[str, Any], inputs: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """jax-triton 0.4: a tree of operands for the parameters that are no constants, in order."""
    library = _library()
    kernel = library.TritonFunction(params["fn"])
    names = kernel.non_constexpr_param_names
    places, numbers = itertools.count(), itertools.count()
    shared = dict(params["input_output_aliases"])

    def argument(part: Any) -> Any:
        if isinstance(part, library._OutputPlaceholder):
            return Result(part.ordinal)
        if isinstance(part, library.TensorDescriptor):
            base = argument(part.base)
            return Described(base, part.shape, part.strides, tuple(part.block_shape), part.padding)
        if isinstance(part, (tuple, list)):
            return tuple(argument(inner) for inner in part)
        number = next(numbers)
        if isinstance(part, library._StaticArg):
            return _scalar(part.value, library.get_type_id)
        return Operand(next(places), shared.get(number))

    tree = params["in_tree"].unflatten(list(inputs))
    return {name: argument(part) for name, part in zip(names, tree, strict=True)}, dict(params["metaparams"])


def _bound_by_0_3(
    params: Mapping[str, Any], inputs: Sequence[Any], outputs: Sequence[Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """jax-triton 0.3: arrays with numbers between them, then the outputs; what remains of the parameters is constant.

    An output that shares an input's memory has a parameter of its own.
    """
    shared = dict(params["input_output_aliases"])
    arguments: list[Any] = [Operand(place, shared.get(place)) for place in range(len(inputs))]
    for place, kind, value in params["scalar_args"]:
        arguments.insert(place, _scalar(value, lambda _, kind=kind: kind))
    arguments += [Result(place) for place in range(len(outputs))]
    own = inspect.signature(_library().triton_kernel_call_lowering).parameters
    constants = {name: value for name, value in params.items() if name not in own}
    return dict(zip(params["fn"].arg_names, arguments, strict=False)), constants


def _scalar(value: Any, kind_of: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    kind = kind_of(value)
    return Scalar(value, kind) if kind in TYPES else value


def _unwrapped(
    function: Any, bound: Mapping[str, Any], constants: Mapping[str, Any], inputs: Any, outputs: Any
) -> tuple[Any, dict[str, Any]]:
    """The kernel inside its decorators, and the constants they bring: of an autotuner, its first configuration."""
    import triton

    found = dict(constants)

    def value(argument: Any) -> Any:
        if isinstance(argument, Operand):
            return inputs[argument.place]
        if isinstance(argument, Result):
            return outputs[argument.place]
        return argument.value if isinstance(argument, Scalar) else argument

    named = {name: value(argument) for name, argument in bound.items()}
    if isinstance(function, triton.runtime.Autotuner):
        fitting = [c for c in function.configs if all(found.get(k, v) == v for k, v in c.kwargs.items())]
        if not fitting:
            raise ValueError(f"no configuration of {function.fn} has the constants {found}")
        if fitting[0].pre_hook is not None:
            raise NotImplementedError("a configuration with a pre_hook, which jax-triton does not run either")
        found, function = {**found, **fitting[0].kwargs}, function.fn
    while isinstance(function, triton.runtime.Heuristics):
        for name, heuristic in function.values.items():
            found[name] = heuristic({**named, **found})
        function = function.fn
    if "gluon" in type(function).__module__:
        raise NotImplementedError(f"{function.fn.__name__} is written in Gluon: that can be compiled, but not run here")
    defaults = {p.name: p.default for p in function.params if p.is_constexpr and p.has_default}
    return function, {**defaults, **found}
