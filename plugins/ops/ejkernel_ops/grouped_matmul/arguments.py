"""The arguments of ``grouped_matmul`` and ``grouped_matmul_d_rhs``: checked, in the form that kernels see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_ops.arrays import DTYPES, check_floats, check_integers
from ejkernel_ops.options import brief, type_and_value

from .activations import ACTIVATIONS

Arguments = dict[str, Any]
Restore = Callable[[tuple[Any, ...]], Any]

#: The values of ``precision``, by their names in ``jax.lax``.
PRECISIONS = ("highest", "high", "default")
#: Dtypes of weights that other libraries have with scales.
QUANTIZED = ("int8", "uint8", "int4", "uint4", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn")


def prepare(arguments: Arguments) -> tuple[Arguments, Restore]:
    """Check the arguments of ``grouped_matmul``."""
    return product(arguments, {"lhs": "(rows, k)"}), lambda results: results[0]


def product(arguments: Arguments, rows: dict[str, str]) -> Arguments:
    """The checked arguments of a product of groups. ``rows``: the name and the axes of the array that has the rows."""
    (lhs,) = rows
    _check_matrices(arguments, lhs, "rhs")
    canonical = {**arguments, **_options(arguments, arguments[lhs].dtype)}
    matrices = "(groups, n, k)" if canonical["transpose_rhs"] else "(groups, k, n)"
    _check_ranks(arguments, {**rows, "rhs": matrices, "group_sizes": "(groups,)"})
    for name in ("group_sizes", "group_offset"):
        if arguments[name] is not None:
            check_integers(name, arguments[name])
            canonical[name] = arguments[name].astype(jnp.int32)
    if arguments["group_offset"] is not None:
        canonical["group_offset"] = _scalar("group_offset", canonical["group_offset"])
    _check_groups(canonical)
    _check_activation(canonical)
    if arguments["rhs_bias"] is not None:
        check_floats("rhs_bias", arguments["rhs_bias"])
    return canonical


def prepare_d_rhs(arguments: Arguments) -> tuple[Arguments, Restore]:
    """Check the arguments of ``grouped_matmul_d_rhs``."""
    _check_matrices(arguments, "lhs", "d_out")
    _check_ranks(arguments, {"lhs": "(rows, k)", "d_out": "(rows, n)", "boundaries": "(groups + 1,)"})
    check_integers("boundaries", arguments["boundaries"])
    options = _options(arguments, arguments["lhs"].dtype)
    canonical = {**arguments, **options, "boundaries": arguments["boundaries"].astype(jnp.int32)}
    return canonical, lambda results: results[0]


# -- arrays ----------------------------------------------------------------------------------------------------------


def _check_matrices(a: Arguments, first: str, second: str) -> None:
    for name in (first, second):
        if a[name].dtype.name in QUANTIZED:
            raise TypeError(f"{name}: quantized matrices are not taken yet; got {a[name].dtype}")
        check_floats(name, a[name])
    if a[first].dtype != a[second].dtype:
        raise TypeError(f"{second}: takes the dtype of {first}, {a[first].dtype}; got {a[second].dtype}")


def _check_ranks(a: Arguments, shapes: dict[str, str]) -> None:
    for name, shape in shapes.items():
        if a[name].ndim != shape.count(",") + (",)" not in shape):
            raise ValueError(f"{name}: takes {shape}; got shape {a[name].shape}")


def _scalar(name: str, array: Any) -> Any:
    if array.shape not in ((1,), ()):
        raise ValueError(f"{name}: takes one integer, of shape (1,) or (); got shape {array.shape}")
    return array.reshape(1)


def _check_groups(a: Arguments) -> None:
    groups, sizes = a["rhs"].shape[0], a["group_sizes"].shape[0]
    if a["group_offset"] is None and groups != sizes:
        raise ValueError(
            f"group_sizes: takes one size for each of the {groups} groups of rhs; got {sizes}. If rhs has a part of "
            "the groups, group_offset says which"
        )
    if groups > sizes:
        raise ValueError(f"group_sizes: has the sizes of all groups, at least the {groups} of rhs; got {sizes}")


def _check_activation(a: Arguments) -> None:
    columns = a["rhs"].shape[1 if a["transpose_rhs"] else 2]
    if a["activation"] is not None and columns % 2:
        raise ValueError(f"activation: {a['activation']!r} takes gates and values, an even n; rhs has n = {columns}")


# -- options ---------------------------------------------------------------------------------------------------------


def _options(a: Arguments, own: Any) -> Arguments:
    options: Arguments = {"preferred_element_type": _dtype(a, own), "precision": _precision(a, own)}
    if not isinstance(a["transpose_rhs"], (bool, np.bool_)):
        raise TypeError(f"transpose_rhs: takes True or False; got {type_and_value(a['transpose_rhs'])}")
    options["transpose_rhs"] = bool(a["transpose_rhs"])
    activation = a.get("activation")
    if activation is not None and not (isinstance(activation, str) and activation in ACTIVATIONS):
        raise ValueError(f"activation: takes {_one_of(ACTIVATIONS)}, or None; got {brief(activation)}")
    return options


def _dtype(a: Arguments, own: Any) -> Any:
    preferred = a["preferred_element_type"]
    if preferred is None:
        return None
    try:
        dtype = jnp.dtype(preferred)
    except TypeError:
        dtype = preferred  # a numpy dtype is equal to None
    if not isinstance(dtype, jnp.dtype) or dtype not in DTYPES:
        raise TypeError(f"preferred_element_type: takes {_one_of(DTYPES)}, or None; got {brief(preferred)}")
    if dtype == jnp.float64 and own != jnp.float64:
        raise TypeError(f"preferred_element_type: {own} is multiplied in float32; float64 is for float64 arrays")
    return None if dtype == own else dtype


def _precision(a: Arguments, own: Any) -> str | None:
    """In lower case; None, which is full precision, for dtypes with one way to multiply them."""
    precision = a["precision"]
    if isinstance(precision, jax.lax.Precision):
        precision = precision.name.lower()
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"precision: takes {_one_of(PRECISIONS)}, jax.lax.Precision, or None; got {brief(precision)}")
    return None if own != jnp.float32 or precision == "highest" else precision


def _one_of(values: Any) -> str:
    return ", ".join(repr(value) if isinstance(value, str) else str(value) for value in values)
