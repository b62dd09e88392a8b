"""What the kernels of a call get in scalar memory before their first step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

Words = list[list[int]]


def prefetched_scalars(function: Callable[[Any], Any], arrays: Mapping[str, Any]) -> dict[str, Words]:
    """For each ``pallas_call`` of a call, by its name, its scalars in words of 32 bits, after those of its grid.

    Arrays of which only the shape is known are zeros. Nothing but these scalars is computed.
    """
    scalars: dict[str, Words] = {}

    def record(kernel: Any, out_shape: Any, *, grid_spec: Any = None, name: str | None = None, **options: Any) -> Any:
        def run(*operands: Any) -> Any:
            count = getattr(grid_spec, "num_scalar_prefetch", 0)
            sizes = [size for size in getattr(grid_spec, "grid", ()) if not isinstance(size, int)]
            values = jax.tree.leaves((sizes, operands[:count]))
            scalars[str(name)] = [words(np.asarray(value)) for value in values]
            return jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), out_shape)

        return run

    with _replaced_pallas_call(record), jax.disable_jit():
        function({name: _concrete(array) for name, array in arrays.items()})
    return scalars


def _concrete(array: Any) -> Any:
    return jnp.zeros(array.shape, array.dtype) if isinstance(array, jax.ShapeDtypeStruct) else array


@contextlib.contextmanager
def _replaced_pallas_call(replacement: Any) -> Iterator[None]:
    original = pl.pallas_call
    pl.pallas_call = replacement
    try:
        yield
    finally:
        pl.pallas_call = original


def words(scalars: np.ndarray) -> list[int]:
    """Numbers as they are laid out in scalar memory: four rows of bytes share the words of 128 columns."""
    if scalars.dtype.itemsize == 4:
        return [int(x) for x in scalars.ravel()]
    rows, columns = scalars.shape[-2:]
    high, wide = -(-rows // 4), -(-columns // 128)
    padded = np.zeros((*scalars.shape[:-2], 4 * high, 128 * wide), np.uint8)
    padded[..., :rows, :columns] = scalars.view(np.uint8)
    parts = padded.reshape(-1, high, 4, wide, 128).transpose(0, 1, 3, 4, 2)
    return [int(x) for x in np.ascontiguousarray(parts).view("<u4").ravel()]
