"""What the kernels have in vector memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import jax.numpy as jnp
import numpy as np

from ejkernel_core import Invocation
from ejkernel_ops.rms_norm.axes import FORMATS
from ejkernel_pallas_tpu.norms._blocks import IN_REGISTERS, LANES, SUBLANES, Blocks, lanes

#: The float32 arrays of a group that are alive at a time. Registers may not hold all of them.
GROUP_ARRAYS = 4


@attrs.frozen
class Traffic:
    """The arrays that a kernel has in vector memory: the dtypes of those of rows, and the number of other ones."""

    by_rows: Sequence[np.dtype[Any]]
    #: (dim,), for all rows, in float32.
    shared: int
    #: One number for each row.
    statistics: int
    #: Sums over rows, in float32.
    sums: int = 0
    #: The scales of each row, in float32.
    scales: int = 0

    @property
    def multiple(self) -> int:
        """The rows in a register of the narrowest dtype."""
        return 32 // min(dtype.itemsize for dtype in self.by_rows)

    def bytes(self, blocks: Blocks) -> int:
        """The most bytes of vector memory. Blocks count twice, because the next ones are fetched early."""
        dim, rows = lanes(blocks.dim), -(-blocks.block // self.multiple) * self.multiple
        moving = sum(rows * dim * dtype.itemsize for dtype in self.by_rows)
        depth = -(-blocks.depth // SUBLANES) * SUBLANES
        moving += 4 * dim * (self.shared + depth * self.sums) + 4 * rows * lanes(self.scales)
        moving += 4 * SUBLANES * lanes(blocks.block) * self.statistics
        columns = self.statistics * 4 * LANES * rows
        return 2 * moving + columns + 4 * GROUP_ARRAYS * IN_REGISTERS


def traffic_of(inv: Invocation) -> Traffic:
    """That of a call, which is one of gradients, of results of 8 bits, or of neither."""
    return _of_gradients(inv) if "wrt" in inv else _of_quantized(inv) if "quantize" in inv else _of_forward(inv)


def is_centered(inv: Invocation) -> bool:
    """Whether the mean of each row is subtracted."""
    return inv.op.startswith("layer_norm")


def _of_forward(inv: Invocation) -> Traffic:
    x, residual = inv["x"], inv["residual"]
    shared = sum(inv[name] is not None for name in ("weight", "bias"))
    by_rows = [x.dtype] * 2 + ([] if residual is None else [residual.dtype] * 2)
    return Traffic(by_rows, shared, 1 + is_centered(inv))


def _of_gradients(inv: Invocation) -> Traffic:
    wrt = inv["wrt"]
    gradients = {inv[name].dtype for name in ("x", "residual") if name in wrt}
    d_sum = [] if inv["d_sum"] is None else [inv["d_sum"].dtype]
    by_rows = [inv["sum"].dtype, inv["x"].dtype, *d_sum, *gradients]
    sums = sum(name in wrt for name in ("weight", "bias"))
    statistics = sum(inv.get(name) is not None for name in ("rstd", "mean", "d_rstd", "d_mean"))
    return Traffic(by_rows, int(inv["weight"] is not None), statistics, sums)


def _of_quantized(inv: Invocation) -> Traffic:
    x, residual = inv["x"], inv["residual"]
    dtype, _, width = FORMATS[inv["quantize"]]
    by_rows = [x.dtype, jnp.dtype(dtype)] + ([] if residual is None else [residual.dtype] * 2)
    shared = sum(inv[name] is not None for name in ("weight", "bias"))
    if width is None:
        return Traffic(by_rows, shared, statistics=1)
    return Traffic(by_rows, shared, statistics=0, scales=-(-x.shape[-1] // width))
