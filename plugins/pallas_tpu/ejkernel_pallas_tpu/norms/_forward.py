"""The forward kernels: sums of x and the residual, statistics of rows, and rows normalized, as they are or in 8 bits.

A row is read from vector memory once for each step: for the sum (and the mean), for the mean square, for the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel_ops.rms_norm.axes import FORMATS
from ejkernel_ops.rms_norm.definition import upcast
from ejkernel_pallas_tpu.launch import Launch, Operand, Output, Scratch
from ejkernel_pallas_tpu.norms._blocks import LANES, Blocks, add_lanes, into_lanes, max_lanes

Arguments = Mapping[str, Any]


def normalize(a: Arguments, blocks: Blocks, statistics: tuple[str, ...], centered: bool) -> Launch:
    """The launch that computes the result, the sum if there is a residual, and these statistics."""

    def kernel(refs: Any) -> None:
        def group(rows: Any) -> None:
            mean, rstd = _statistics(a, blocks, refs, rows, centered)
            numbers = {"mean": mean, "rstd": rstd}
            for name in statistics:
                getattr(refs, f"{name}_column")[rows] = jnp.broadcast_to(numbers[name], (blocks.group, LANES))

            def write(columns: Any, _: None) -> None:
                out = _normalized(a, refs, rows, columns, mean, rstd)
                refs.out[rows, columns] = out.astype(refs.out.dtype)

            blocks.over_chunks(write)

        blocks.for_each_group(group)
        for name in statistics:
            into_lanes(blocks, getattr(refs, name), getattr(refs, f"{name}_column"))

    return _launch(
        a,
        blocks,
        "normalize",
        kernel,
        {"out": blocks.output_by_rows(a["x"].dtype)},
        {name: blocks.output_of_statistics() for name in statistics},
        {f"{name}_column": blocks.column for name in statistics},
    )


def quantize(a: Arguments, blocks: Blocks, centered: bool) -> Launch:
    """The launch that computes values of 8 bits, their scales, and the sum if there is a residual."""
    dtype, largest, width = FORMATS[a["quantize"]]

    def scale_of(magnitude: jax.Array) -> jax.Array:
        return jnp.where(magnitude == 0, 1.0, magnitude / largest)

    def write(refs: Any, rows: Any, columns: Any, out: jax.Array, scale: jax.Array) -> None:
        ratios = out / scale
        refs.values[rows, columns] = (jnp.rint(ratios) if dtype == jnp.int8 else ratios).astype(dtype)

    def scale_rows(refs: Any, rows: Any, mean: Any, rstd: Any) -> None:
        def measure(columns: Any, greatest: jax.Array) -> jax.Array:
            return max_lanes(greatest, jnp.abs(_normalized(a, refs, rows, columns, mean, rstd)))

        magnitude = blocks.over_chunks(measure, blocks.lane_zeros()).max(1, keepdims=True)
        scale = scale_of(magnitude)
        refs.scales_column[rows] = jnp.broadcast_to(scale, (blocks.group, LANES))

        def chunk(columns: Any, _: None) -> None:
            write(refs, rows, columns, _normalized(a, refs, rows, columns, mean, rstd), scale)

        blocks.over_chunks(chunk)

    def scale_parts(refs: Any, rows: Any, mean: Any, rstd: Any) -> None:
        count = refs.scales.shape[1]
        lane = jax.lax.broadcasted_iota(jnp.int32, (blocks.group, count), 1)

        def chunk(columns: Any, scales: jax.Array) -> jax.Array:
            out = _normalized(a, refs, rows, columns, mean, rstd)
            for start in range(0, columns.size, LANES):
                part = out[:, start : start + LANES]
                scale = scale_of(jnp.abs(part).max(1, keepdims=True))
                part_columns = pl.ds(pl.multiple_of(columns.start + start, LANES), part.shape[1])
                write(refs, rows, part_columns, part, scale)
                scales = jnp.where(lane == part_columns.start // LANES, scale, scales)
            return scales

        refs.scales[rows] = blocks.over_chunks(chunk, jnp.ones((blocks.group, count), jnp.float32))

    def kernel(refs: Any) -> None:
        def group(rows: Any) -> None:
            mean, rstd = _statistics(a, blocks, refs, rows, centered)
            (scale_rows if width is None else scale_parts)(refs, rows, mean, rstd)

        blocks.for_each_group(group)
        if width is None:
            into_lanes(blocks, refs.scales, refs.scales_column)

    scales = (
        blocks.output_of_statistics() if width is None else blocks.output_by_rows(jnp.float32, -(-blocks.dim // width))
    )
    return _launch(
        a,
        blocks,
        "normalize_in_8_bits",
        kernel,
        {"values": blocks.output_by_rows(dtype), "scales": scales},
        {},
        {"scales_column": blocks.column} if width is None else {},
    )


def _launch(
    a: Arguments,
    blocks: Blocks,
    name: str,
    kernel: Any,
    first: Mapping[str, Output],
    last: Mapping[str, Output],
    scratch: Mapping[str, Scratch],
) -> Launch:
    """A step for each block, with the arrays of the call; the sum is written between the other outputs."""
    by_rows = {name: blocks.by_rows(a[name]) for name in ("x", "residual") if a[name] is not None}
    bias = {} if a["bias"] is None else {"bias": blocks.of_all_rows(a["bias"])}
    operands: dict[str, Operand] = {**by_rows, **blocks.weight(a), **bias}
    total = {} if a["residual"] is None else {"sum": blocks.output_by_rows(a["residual"].dtype)}
    return Launch(
        name=name,
        kernel=kernel,
        grid=(blocks.count,),
        semantics=("parallel",),
        tile_map=lambda i: (i,),
        operands=operands,
        outputs={**first, **total, **last},
        scratch=scratch,
    )


# -- the steps -------------------------------------------------------------------------------------------------------


def _statistics(a: Arguments, blocks: Blocks, refs: Any, rows: Any, centered: bool) -> tuple[Any, Any]:
    """The mean, None where it is not subtracted, and one over the root mean square. The sum is written on the way."""

    def add(columns: Any, sums: jax.Array) -> jax.Array:
        total = upcast(refs.x[rows, columns])
        if a["residual"] is not None:
            rounded = (total + upcast(refs.residual[rows, columns])).astype(refs.sum.dtype)
            refs.sum[rows, columns] = rounded
            total = upcast(rounded)
        return add_lanes(sums, total if centered else total * total)

    mean = None
    sums = _mean(blocks.over_chunks(add, blocks.lane_zeros()), blocks)
    if centered:
        mean = sums

        def add_squares(columns: Any, squares: jax.Array) -> jax.Array:
            rest = _total(a, refs, rows, columns) - mean
            return add_lanes(squares, rest * rest)

        sums = _mean(blocks.over_chunks(add_squares, blocks.lane_zeros()), blocks)
    return mean, jax.lax.rsqrt(sums + a["epsilon"])


def _mean(sums: jax.Array, blocks: Blocks) -> jax.Array:
    return sums.sum(1, keepdims=True) * (1 / blocks.dim)


def _normalized(a: Arguments, refs: Any, rows: Any, columns: Any, mean: Any, rstd: jax.Array) -> jax.Array:
    """A part of the result, in float32."""
    total = _total(a, refs, rows, columns)
    out = (total if mean is None else total - mean) * rstd
    if a["weight"] is not None:
        out *= refs.weight[:, columns]
    return out if a["bias"] is None else out + refs.bias[:, columns]


def _total(a: Arguments, refs: Any, rows: Any, columns: Any) -> jax.Array:
    return upcast((refs.x if a["residual"] is None else refs.sum)[rows, columns])
