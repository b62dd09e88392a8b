"""JAX's own grouped product for TPUs, which the estimated times of these kernels are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import jax.numpy as jnp

from ejkernel_core import Example
from ejkernel_pallas_tpu.testing import Peer

#: The most entries of a tile of matrices that are tried, in vector memory twice.
LARGEST = 2**23
MOST_ROWS = (128, 256, 512)


def forward_peers(example: Example) -> Iterator[Peer]:
    """With tiles of its own kind and of ours, of which the quickest counts."""
    arguments = example.abstract()
    rhs, is_transposed = arguments["rhs"].shape, arguments["transpose_rhs"]
    k, n = (rhs[2], rhs[1]) if is_transposed else rhs[1:]
    variants = {}
    for tiling in _tilings(k, n, (k, 2048)):

        def multiply(arrays: Mapping[str, Any], tiling: Any = tiling) -> Any:
            lhs, rhs, sizes = (arrays[name] for name in ("lhs", "rhs", "group_sizes"))
            return _module().gmm(lhs, rhs, sizes, lhs.dtype, tiling, transpose_rhs=is_transposed)

        variants[_name(tiling)] = multiply
    yield Peer("megablox", variants, 1 / 1.05)


def d_rhs_peers(example: Example) -> Iterator[Peer]:
    """The same. Its first array is transposed, and the time of this is not counted."""
    arguments = example.abstract()
    variants = {}
    for tiling in _tilings(arguments["lhs"].shape[1], arguments["d_out"].shape[1], (2048, 1024)):

        def contract(arrays: Mapping[str, Any], tiling: Any = tiling) -> Any:
            lhs, d_out, ends = (arrays[name] for name in ("lhs", "d_out", "boundaries"))
            return _module().tgmm(jnp.swapaxes(lhs, 0, 1), d_out, jnp.diff(ends), lhs.dtype, tiling)

        variants[_name(tiling)] = contract
    yield Peer("megablox", variants, 1 / 1.05)


def _module() -> Any:
    # The package has a function of this name.
    return import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")


def _tilings(k: int, n: int, depths: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(rows, k, n). A tile has a divisor of n if there is a large one."""
    columns = [size for size in range(128, min(n, 2048) + 1, 128) if n % size == 0][-2:] or [min(n, 2048)]
    depths = tuple(dict.fromkeys(min(k, depth) for depth in depths))
    tilings = [(rows, depth, width) for rows in MOST_ROWS for depth in depths for width in columns[-1:]]
    return [tiling for tiling in tilings if tiling[1] * tiling[2] <= LARGEST]


def _name(tiling: tuple[int, int, int]) -> str:
    return " x ".join(map(str, tiling))
