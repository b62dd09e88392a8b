"""Normalization of rows in plain JAX. ``centered`` rows (``layer_norm``) have their mean subtracted first."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .axes import FORMATS

Arguments = Mapping[str, Any]
Results = tuple[jax.Array, ...]


def upcast(array: jax.Array) -> jax.Array:
    """The array in float32, or in float64 if it is float64."""
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def summed_rows(arguments: Arguments) -> jax.Array:
    """The rows that are normalized, in the dtype of the arithmetic: the sum of x and the residual, rounded to numbers
    of the dtype of the residual. Its cotangents are not rounded.
    """
    x = upcast(arguments["x"])
    residual: jax.Array | None = arguments["residual"]
    if residual is None:
        return x
    dtype = jnp.promote_types(x.dtype, residual.dtype)
    return rounded(x.astype(dtype) + residual.astype(dtype), residual.dtype)


def sum_result(rows: jax.Array, arguments: Arguments) -> jax.Array:
    """The result ``sum``: x itself, or the rows in the dtype of the residual, which holds them exactly."""
    x, residual = arguments["x"], arguments["residual"]
    result: jax.Array = x if residual is None else rows.astype(residual.dtype)
    return result


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def rounded(array: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The array rounded to numbers of a dtype of fewer bits, in its own dtype.

    XLA would remove two conversions, and the statistics would be those of other numbers than the sum that is returned.
    """
    if array.dtype == dtype:
        return array
    info = jnp.finfo(dtype)
    numbers = jax.lax.reduce_precision(array, info.nexp, info.nmant)
    if info.nexp < jnp.finfo(array.dtype).nexp:
        # reduce_precision would set subnormal numbers to zero. They are the multiples of the smallest one.
        smallest = float(info.smallest_subnormal)
        multiples = jnp.rint(array / smallest) * smallest
        numbers = jnp.where(jnp.abs(array) < info.smallest_normal, multiples, numbers)
    return numbers


@rounded.defjvp
def _rounded_jvp(
    dtype: jnp.dtype, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return rounded(*primals, dtype), *tangents


def statistics(rows: jax.Array, epsilon: float, centered: bool) -> Results:
    """The mean of each row if ``centered``, and the reciprocal of its root mean square, less the mean."""
    rows = upcast(rows)
    mean: Results = (rows.mean(-1),) if centered else ()
    rest = rows - mean[0][..., None] if centered else rows
    return (*mean, jax.lax.rsqrt((rest * rest).mean(-1) + epsilon))


def normalized(rows: jax.Array, row_statistics: Results) -> jax.Array:
    """The rows divided by their root mean square, without the weight."""
    *mean, rstd = row_statistics
    rest = upcast(rows) - mean[0][..., None] if mean else upcast(rows)
    return rest * rstd[..., None]


def weighted(unit: jax.Array, arguments: Arguments) -> jax.Array:
    """Normalized rows, times the weight, plus the bias."""
    weight, bias = arguments["weight"], arguments["bias"]
    out = unit if weight is None else unit * (weight.astype(unit.dtype) + arguments["weight_offset"])
    return out if bias is None else out + bias.astype(unit.dtype)


def forward(arguments: Arguments, centered: bool) -> Results:
    """The result, the sum and the statistics of the rows, in the dtypes that the operation declares."""
    rows = summed_rows(arguments)
    row_statistics = statistics(rows, arguments["epsilon"], centered)
    out = weighted(normalized(rows, row_statistics), arguments)
    dtype = jnp.promote_types(arguments["x"].dtype, jnp.float32)
    result_statistics = (array.astype(dtype) for array in row_statistics)
    return out.astype(arguments["x"].dtype), sum_result(rows, arguments), *result_statistics


def quantized(arguments: Arguments, centered: bool) -> Results:
    """The values, their scales, and the sum."""
    rows = summed_rows(arguments)
    out = weighted(normalized(rows, statistics(rows, arguments["epsilon"], centered)), arguments)
    dtype, largest, block = FORMATS[arguments["quantize"]]
    dim = out.shape[-1]
    block = dim if block is None else block
    count = -(-dim // block)  # as the operation's axes have it, where the size is symbolic
    padded = jnp.pad(out, [(0, 0)] * (out.ndim - 1) + [(0, count * block - dim)])
    blocks = padded.reshape(*out.shape[:-1], count, block)
    magnitude = jnp.abs(blocks).max(-1, keepdims=True)
    scales = jnp.where(magnitude == 0, 1, magnitude / largest).astype(jnp.float32)
    ratios = blocks / scales
    values = (jnp.rint(ratios) if dtype == jnp.int8 else ratios).astype(dtype)
    return values.reshape(padded.shape)[..., :dim], scales[..., 0], sum_result(rows, arguments)


def gradients(arguments: Arguments, centered: bool) -> Results:
    """The gradients of the arrays that ``wrt`` names, from the sum and the statistics that the forward saved."""
    rows = arguments["sum"].astype(jnp.promote_types(upcast(arguments["x"]).dtype, arguments["sum"].dtype))
    row_statistics = (*((arguments["mean"],) if centered else ()), arguments["rstd"])
    unit = normalized(rows, row_statistics)
    by_name: dict[str, jax.Array] = {}
    d_out = jnp.zeros_like(unit) if arguments["d_out"] is None else upcast(arguments["d_out"])
    leading = tuple(range(rows.ndim - 1))
    by_name["weight"], by_name["bias"] = (d_out * unit).sum(leading), d_out.sum(leading)
    by_name["x"] = by_name["residual"] = _gradient_of_rows(arguments, unit, d_out, centered)
    return tuple(by_name[name].astype(arguments[name].dtype) for name in arguments["wrt"])


def _gradient_of_rows(arguments: Arguments, unit: jax.Array, d_out: jax.Array, centered: bool) -> jax.Array:
    weight: jax.Array | None = arguments["weight"]
    rstd: jax.Array = arguments["rstd"]
    d_unit = d_out if weight is None else d_out * (weight.astype(d_out.dtype) + arguments["weight_offset"])
    rest = d_unit - unit * (d_unit * unit).mean(-1, keepdims=True)
    if centered:
        rest = rest - d_unit.mean(-1, keepdims=True)
    d_rows = rest * rstd[..., None]
    # Second derivatives also have cotangents of the statistics.
    if arguments["d_rstd"] is not None:
        d_rows -= unit * (arguments["d_rstd"] * rstd * rstd / unit.shape[-1])[..., None]
    if centered and arguments["d_mean"] is not None:
        d_rows += (arguments["d_mean"] / unit.shape[-1])[..., None]
    return d_rows if arguments["d_sum"] is None else d_rows + upcast(arguments["d_sum"])
