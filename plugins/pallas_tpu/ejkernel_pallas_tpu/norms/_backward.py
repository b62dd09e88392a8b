"""The backward kernel: the gradients of rows, of the weight and of the bias, in one pass over the rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel_ops.rms_norm.definition import upcast
from ejkernel_pallas_tpu.launch import Launch, Output, grid_indices
from ejkernel_pallas_tpu.norms._blocks import Blocks, add_lanes, from_lanes

Arguments = Mapping[str, Any]


@attrs.frozen
class Targets:
    """The gradients that a call needs."""

    #: The dtypes of the gradient of rows: those of x and the residual, one if they are the same.
    rows: tuple[str, ...]
    weight: bool
    bias: bool

    @classmethod
    def of(cls, a: Arguments) -> Targets:
        by_rows = [str(a[name].dtype) for name in ("x", "residual") if name in a["wrt"]]
        return cls(tuple(dict.fromkeys(by_rows)), "weight" in a["wrt"], "bias" in a["wrt"])

    @property
    def needs_unit(self) -> bool:
        """Whether normalized rows are needed: not for the bias alone."""
        return bool(self.rows) or self.weight

    @property
    def sums(self) -> tuple[str, ...]:
        """The outputs that are sums over rows."""
        return (*(("d_weight",) if self.weight else ()), *(("d_bias",) if self.bias else ()))


def differentiate(a: Arguments, blocks: Blocks, targets: Targets, cores: int, centered: bool) -> Launch:
    """The launch that computes the gradients of rows, and for each core the sums for the weight and the bias.

    Each core has its own part of the blocks and adds them up one after the other, in vector memory.
    """
    cores = min(cores, blocks.count)
    steps = -(-blocks.count // cores)
    statistics: tuple[str, ...] = (("mean", "rstd") if centered else ("rstd",)) if targets.needs_unit else ()
    if targets.rows:
        statistics += tuple(name for name in ("d_mean", "d_rstd") if a.get(name) is not None)

    def kernel(refs: Any) -> None:
        core, step = grid_indices(2)

        @pl.when(step == 0)
        def _() -> None:
            for name in targets.sums:
                sums = getattr(refs, name)

                def clear(columns: Any, _: None, sums: Any = sums) -> None:
                    sums[:, columns] = jnp.zeros((blocks.depth, columns.size), jnp.float32)

                blocks.over_chunks(clear)

        for name in statistics:
            from_lanes(blocks, getattr(refs, name), getattr(refs, f"{name}_column"))
        first = (core * steps + step) * blocks.block
        blocks.for_each_group(lambda rows: group(refs, rows, first))

    def group(refs: Any, rows: Any, first: Any) -> None:
        def column(name: str) -> Any:
            return getattr(refs, f"{name}_column")[rows, :1] if name in statistics else None

        mean, rstd, d_mean, d_rstd = map(column, ("mean", "rstd", "d_mean", "d_rstd"))
        row = first + rows.start + jax.lax.broadcasted_iota(jnp.int32, (blocks.group, 1), 0)

        def unit_of(columns: Any) -> jax.Array:
            total = upcast(refs.sum[rows, columns])
            unit: jax.Array = (total if mean is None else total - mean) * rstd
            return unit

        def d_unit_of(columns: Any, d_out: jax.Array) -> jax.Array:
            return d_out if a["weight"] is None else d_out * refs.weight[:, columns]

        def add(columns: Any, sums: Any) -> Any:
            d_out = upcast(refs.d_out[rows, columns])
            unit = unit_of(columns) if targets.needs_unit else None
            for name, terms in (("d_weight", unit), ("d_bias", None)):
                if name in targets.sums:
                    terms = d_out if terms is None else d_out * terms
                    # Rows past the end are undefined, and the second time that a core gets the last block, it counts
                    # as past the end.
                    if cores * steps * blocks.block > blocks.rows:
                        terms = jnp.where(row < blocks.rows, terms, 0.0)
                    getattr(refs, name)[:, columns] += _fold_rows(terms, blocks.depth)
            if not targets.rows:
                return sums
            assert unit is not None  # gradients of rows need it
            d_unit = d_unit_of(columns, d_out)
            products, *means = sums
            return add_lanes(products, d_unit * unit), *(add_lanes(mean_sums, d_unit) for mean_sums in means)

        zeros = (blocks.lane_zeros(),) * (1 + centered) if targets.rows else None
        sums = blocks.over_chunks(add, zeros)
        if not targets.rows:
            return
        product, *means = (lane_sums.sum(1, keepdims=True) * (1 / blocks.dim) for lane_sums in sums)
        if d_rstd is not None:
            product += d_rstd * rstd * (1 / blocks.dim)

        def write(columns: Any, _: None) -> None:
            rest = d_unit_of(columns, upcast(refs.d_out[rows, columns])) - unit_of(columns) * product
            d_rows = (rest - means[0] if means else rest) * rstd
            if d_mean is not None:
                d_rows += d_mean * (1 / blocks.dim)
            if a["d_sum"] is not None:
                d_rows += upcast(refs.d_sum[rows, columns])
            for dtype in targets.rows:
                getattr(refs, f"d_rows_{dtype}")[rows, columns] = d_rows.astype(dtype)

        blocks.over_chunks(write)

    def tile_map(core: Any, step: Any) -> tuple[Any, Any]:
        """The block and the core. Past the end it is the last block again, with the same gradients of rows."""
        return jnp.minimum(core * steps + step, blocks.count - 1), core

    d_out = jnp.zeros(a["x"].shape, a["x"].dtype) if a["d_out"] is None else a["d_out"]
    operands = {"d_out": blocks.by_rows(d_out)}
    if targets.needs_unit:
        operands["sum"] = blocks.by_rows(a["sum"])
        operands |= {name: blocks.by_statistics(a[name]) for name in statistics}
    if targets.rows:
        operands |= blocks.weight(a)
    if targets.rows and a["d_sum"] is not None:
        operands["d_sum"] = blocks.by_rows(a["d_sum"])
    shape = (blocks.depth, blocks.dim)
    sums_of_cores = Output((cores, *shape), jnp.float32, (None, *shape), lambda i, core: (core, 0, 0))
    by_rows = {f"d_rows_{dtype}": _by_block(blocks.output_by_rows(jnp.dtype(dtype))) for dtype in targets.rows}
    return Launch(
        name="differentiate_normalization",
        kernel=kernel,
        grid=(cores, steps),
        semantics=("parallel", "arbitrary"),
        tile_map=tile_map,
        operands={name: _by_block(operand) for name, operand in operands.items()},
        outputs={**by_rows, **dict.fromkeys(targets.sums, sums_of_cores)},
        scratch={f"{name}_column": blocks.column for name in statistics},
    )


def _by_block(array: Any) -> Any:
    """An operand or output whose index map depends on the block alone."""
    index_map = array.index_map
    return attrs.evolve(array, index_map=lambda i, core: index_map(i))


def _fold_rows(values: jax.Array, depth: int) -> jax.Array:
    """The sum of values (rows, n) over all rows that are ``depth`` apart."""
    total = values[:depth]
    for start in range(depth, values.shape[0], depth):
        total += values[start : start + depth]
    return total
