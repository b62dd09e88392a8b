"""jax-triton's primitive on the CPU: a callback to Python, which runs the kernel."""

from __future__ import annotations

import inspect
import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.launch._launch import launch_p, lower_by_jax_triton

from ._launch import TYPES, Described, Launch, Operand, Order, Result, Scalar, Settings, is_gluon

_LOCK = threading.Lock()
#: The settings of the active ``interpreted`` blocks, the innermost last.
_ACTIVE: list[Settings] = []


@contextmanager
def interpreted(order: Order = "shuffled", seed: int = 0, races: bool = True) -> Iterator[None]:
    """Inside, Triton kernels run on the CPU, also in jit, in gradients and in loops.

    Nothing else changes: programs that are lowered for a GPU are compiled as usual. ``order`` is the order in which the
    programs of a launch run, one after the other. ``races``: whether it is an error if programs store different values
    into an element, or if one loads an element that another has stored. Kernels that synchronise their programs need
    ``races=False``.

    It applies to all threads. Functions that are compiled inside run on the CPU afterwards, too.
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

    mlir.register_lowering(_primitive(), _lower, platform="cpu", cacheable=False)
    mlir.register_lowering(launch_p, _lower_launch, platform="cpu", cacheable=False)
    # JAX tells a lowering rule the devices only for primitives that require it, and a callback needs them.
    dispatch.prim_requires_devices_during_lowering.update((_primitive(), launch_p))


def _remove() -> None:
    from jax._src import dispatch
    from jax._src.interpreters import mlir

    for primitive in (_primitive(), launch_p):
        mlir._platform_specific_lowerings["cpu"].pop(primitive, None)
    dispatch.prim_requires_devices_during_lowering.difference_update((_primitive(), launch_p))


def _primitive() -> Any:
    return _library().triton_kernel_call_p


def _library() -> Any:
    reason = _jax_triton.unavailable_reason()
    if reason is not None:
        raise ImportError(reason)
    _jax_triton.load()
    import jax_triton.triton_lib as library

    return library


def _lower_launch(ctx: Any, *operands: Any, launch: _jax_triton.Launch) -> Any:
    """Gluon kernels do not pass through jax-triton, which takes them only from 0.4 on."""
    kernel = _jax_triton.import_kernel(launch.kernel)
    if not is_gluon(kernel):
        return lower_by_jax_triton(ctx, *operands, launch=launch)
    return _lower_callback(ctx, operands, _gluon_launch(kernel, launch, ctx.avals_out))


def _lower(ctx: Any, *operands: Any, **params: Any) -> Any:
    return _lower_callback(ctx, operands, launch_of(params, ctx.avals_in, ctx.avals_out))


def _lower_callback(ctx: Any, operands: Sequence[Any], launch: Launch) -> Any:
    """The callback uses NumPy and not JAX, which could wait for the thread that runs it."""
    from jax._src import callback

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
    active = _ACTIVE[-1:]  # read once: another thread may leave its block meanwhile
    return launch.run([np.asarray(array) for array in arrays], active[0] if active else settings)


# -- launches ------------------------------------------------------------------------------------------------------


def _gluon_launch(kernel: Any, launch: _jax_triton.Launch, outputs: Sequence[Any]) -> Launch:
    aliases = dict(launch.aliases)
    operands = [Operand(position, aliases.get(position)) for position in range(len(launch.descriptors))]
    arrays = [
        operand if descriptor is None else Described(operand, (), (), descriptor.block, "zero")
        for operand, descriptor in zip(operands, launch.descriptors, strict=True)
    ]
    scalars = [Scalar(scalar, "i32") for scalar in launch.scalars]
    results = [Result(position) for position in range(len(outputs)) if position not in aliases.values()]
    _check_order_of_results(results)
    arguments = dict(zip(kernel.arg_names, [*arrays, *scalars, *results], strict=False))
    x, y, z = (*launch.grid, 1, 1)[:3]
    return Launch(
        kernel,
        launch.name,
        {**{name: _specialised(value) for name, value in arguments.items()}, **dict(launch.constants)},
        (x, y, z),
        tuple(outputs),
        frozenset(launch.zeroed_outputs),
    )


def launch_of(params: Mapping[str, Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> Launch:
    """The launch of the primitive with these parameters."""
    if _jax_triton.version() >= (0, 4):
        arguments, constants = _bound(params, inputs)
    else:
        arguments, constants = _bound_by_0_3(params, inputs, outputs)
    kernel, constants = _unwrapped(params["fn"], arguments, constants, [*inputs], [*outputs])
    grid = params["grid"]
    grid = grid(constants) if callable(grid) else grid
    x, y, z = (*((grid,) if isinstance(grid, int) else grid), 1, 1)[:3]
    zeroed = params["zeroed_outputs"]
    zeroed = zeroed(constants) if callable(zeroed) else zeroed
    return Launch(
        kernel,
        params["name"],
        {**{name: _specialised(value) for name, value in arguments.items()}, **constants},
        (int(x), int(y), int(z)),
        tuple(outputs),
        frozenset(zeroed),
    )


def _specialised(argument: Any) -> Any:
    """The argument; the number 1 is a constant, as in Triton."""
    if isinstance(argument, Scalar) and argument.value == 1:
        return 1
    return argument


def _bound(params: Mapping[str, Any], inputs: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """jax-triton 0.4 has a tree of operands for the parameters that are not constants, in their order."""
    library = _library()
    kernel = library.TritonFunction(params["fn"])
    names = kernel.non_constexpr_param_names
    positions, numbers = itertools.count(), itertools.count()
    aliases = dict(params["input_output_aliases"])

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
        return Operand(next(positions), aliases.get(number))

    tree = params["in_tree"].unflatten(list(inputs))
    arguments = {name: argument(part) for name, part in zip(names, tree, strict=True)}
    _check_order_of_results(arguments.values())
    return arguments, dict(params["metaparams"])


def _check_order_of_results(arguments: Iterable[Any]) -> None:
    """On a device, parameters for results get the first results, whichever they are for: see `_jax_triton`."""
    results = [argument.position for argument in arguments if isinstance(argument, Result)]
    if results != [*range(len(results))]:
        raise NotImplementedError(
            "jax-triton 0.4 passes the wrong arrays to a kernel unless the outputs that alias inputs are its last ones"
        )


def _bound_by_0_3(
    params: Mapping[str, Any], inputs: Sequence[Any], outputs: Sequence[Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """jax-triton 0.3 has arrays with numbers between them, then the outputs; the other parameters are constants.

    An output that aliases an input has its own parameter.
    """
    aliases = dict(params["input_output_aliases"])
    arguments: list[Any] = [Operand(position, aliases.get(position)) for position in range(len(inputs))]
    for position, kind, value in params["scalar_args"]:
        arguments.insert(position, _scalar(value, lambda _, kind=kind: kind))
    arguments += [Result(position) for position in range(len(outputs))]
    parameters = inspect.signature(_library().triton_kernel_call_lowering).parameters
    constants = {name: value for name, value in params.items() if name not in parameters}
    return dict(zip(params["fn"].arg_names, arguments, strict=False)), constants


def _scalar(value: Any, kind_of: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    kind = kind_of(value)
    return Scalar(value, kind) if kind in TYPES else value


def _unwrapped(
    function: Any, arguments: Mapping[str, Any], constants: Mapping[str, Any], inputs: Any, outputs: Any
) -> tuple[Any, dict[str, Any]]:
    """The kernel without its decorators, and their constants; those of an autotuner are of its first configuration."""
    import triton

    values = dict(constants)

    def value(argument: Any) -> Any:
        if isinstance(argument, Operand):
            return inputs[argument.position]
        if isinstance(argument, Result):
            return outputs[argument.position]
        return argument.value if isinstance(argument, Scalar) else argument

    values_by_name = {name: value(argument) for name, argument in arguments.items()}
    if isinstance(function, triton.runtime.Autotuner):
        configurations = [c for c in function.configs if all(values.get(k, v) == v for k, v in c.kwargs.items())]
        if not configurations:
            raise ValueError(f"no configuration of {function.fn} has the constants {values}")
        if configurations[0].pre_hook is not None:
            raise NotImplementedError("a configuration with a pre_hook, which jax-triton does not run either")
        values, function = {**values, **configurations[0].kwargs}, function.fn
    while isinstance(function, triton.runtime.Heuristics):
        for name, heuristic in function.values.items():
            values[name] = heuristic({**values_by_name, **values})
        function = function.fn
    defaults = {p.name: p.default for p in function.params if p.is_constexpr and p.has_default}
    return function, {**defaults, **values}
