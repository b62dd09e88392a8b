"""Clear errors for wrong arguments of a call, and ``validate=True``, which checks the values of arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from ._display import brief
from ._operation import Arguments, Operation


def clearer_error(operation: Operation, arrays: Mapping[str, Any], error: Exception) -> Exception | None:
    """A clearer error for the one that JAX raised; None where there is none."""
    try:
        operation.check_arrays(arrays)
    except TypeError as clearer:
        return clearer
    for name, array in arrays.items():
        if isinstance(array, jax.ShapeDtypeStruct) and "ShapeDtypeStruct" in str(error):  # not one of plan and explain
            return TypeError(
                f"{operation.name}: {name} has a shape and no values: a call takes arrays; plan and explain take shapes"
            )
    if isinstance(error, TypeError):
        return None
    from ._donation import deleted_argument

    if (deleted := deleted_argument(operation, arrays)) is not None:
        return deleted
    return _too_large(operation.name, arrays) or on_other_mesh(operation.name, arrays)


def _too_large(op: str, arrays: Mapping[str, Any]) -> ValueError | None:
    """The error for a Python int that does not fit JAX's default integer dtype; None where all fit."""
    bits = 8 * jax.dtypes.canonicalize_dtype(int).itemsize
    for name, value in arrays.items():
        if type(value) is int and not -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
            return ValueError(
                f"{op}: {name} takes an int from -2**{bits - 1} to 2**{bits - 1} - 1, as JAX does, "
                f"or a number with a dtype, as jnp.uint32 is; got one of {value.bit_length()} bits"
            )
    return None


def on_other_mesh(op: str, arrays: Mapping[str, Any]) -> ValueError | None:
    """The error for an array that is sharded over another mesh than the first sharded array; None where all are on one.

    Two meshes are the same if they have the same devices and axes.
    """
    shardings = {name: getattr(array, "sharding", None) for name, array in arrays.items()}
    meshes = {name: s.mesh for name, s in shardings.items() if isinstance(s, jax.sharding.NamedSharding)}
    for name, mesh in meshes.items():
        first, first_mesh = next(iter(meshes.items()))
        if mesh != first_mesh and isinstance(mesh, jax.sharding.Mesh) and isinstance(first_mesh, jax.sharding.Mesh):
            return ValueError(
                f"{op}: {name} is on a mesh of {_mesh_text(mesh)}, and {first} on one of {_mesh_text(first_mesh)}; put "
                f"all arrays on one mesh: jax.device_put({name}, NamedSharding(mesh, spec))"
            )
    return None


def _mesh_text(mesh: jax.sharding.Mesh) -> str:
    axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    ids = [device.id for device in mesh.devices.flat]
    return f"({axes}) over the devices {brief(ids)}"


def not_static(op: str, name: str, value: Any) -> TypeError:
    """The error for an array as a static option."""
    article = "a traced" if isinstance(value, jax.core.Tracer) else "an"
    return TypeError(
        f"{op}: {name} is a static option and takes a plain Python value, known while tracing; "
        f"got {article} array of shape {value.shape}"
    )


def unhashable(op: str, options: Mapping[str, Any], kernels: Callable[[], Iterable[Any]]) -> TypeError:
    """The error for the first option that is not hashable. ``kernels`` gives those of the operation."""
    for name, value in options.items():
        for leaf in jax.tree.leaves(value):
            if isinstance(leaf, (jax.Array, np.ndarray)):
                return not_static(op, name, leaf)
        try:
            hash(value)
        except Exception:  # of any type: the class of an option may be a user's own
            return TypeError(
                f"{op}: {name} is a static option and takes a hashable value; "
                f"got {type(value).__name__} {brief(value)}" + _advice(options, name, kernels)
            )
    return TypeError(f"{op}: an option is not hashable")


def _advice(options: Mapping[str, Any], name: str, kernels: Callable[[], Iterable[Any]]) -> str:
    if name == "cfg":
        configs = [
            f"{kernel.backend!r} takes {kernel.config_name}"
            for kernel in kernels()
            if kernel.config_type is not None and options["backend"] in (None, kernel.backend)
        ]
        return f" (a kernel takes its own frozen Config: {', '.join(configs)})" if configs else ""
    return " (give a tuple)" if isinstance(options[name], list) and name != "backend" else ""


def check_values(operation: Operation, arguments: Arguments, validate: Any, check_shapes: Callable[[], object]) -> None:
    """Check shapes and dtypes, then raise for an array with a value that the operation does not accept."""
    if not isinstance(validate, (bool, np.bool_)):
        raise TypeError(f"{operation.name}: validate takes True or False; got {type(validate).__name__}")
    if not validate:
        return
    if operation.validate is None:
        raise TypeError(f"{operation.name}: validate=True has nothing to check, because the operation has no validate")
    for name in operation.arrays:
        if isinstance(arguments.get(name), (jax.core.Tracer, jax.ShapeDtypeStruct)):
            raise TypeError(
                f"{operation.name}: validate=True looks at values, and {name} has none while it is traced (jit, grad, "
                "vmap, scan): leave it out there, and make such a call once with it outside"
            )
    check_shapes()
    try:
        operation.validate(operation.complete(arguments))
    except ValueError as error:
        raise ValueError(f"{operation.name}: {error}") from error
