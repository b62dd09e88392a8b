"""The order of places by their experts, of which blocks are counted already: the last two kernels of routing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_core import Invocation
from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.launch._cards import capability

#: The threads of a warp.
WARP = 32
#: Experts of a program that adds up counts, and the most blocks that it reads at a time.
COLUMNS, HEIGHT = 4, 2048
#: The most counts that a thread of it holds.
MOST_COUNTS = 32
#: Places of a program that orders them.
SLOTS = 512


def ordered(
    inv: Invocation, experts: jax.Array, places: jax.Array, counts: jax.Array, smaller: jax.Array, block: int
) -> tuple[jax.Array, jax.Array]:
    """How many places each expert has, and the places in the order of the experts.

    ``places`` has the number of each place among those of its expert in its block of ``block`` places; ``counts``, for
    each block and expert, how many places the expert has there, and ``smaller`` how many the experts before it have.
    """
    blocks, columns = counts.shape
    of_blocks, of_experts = _integers(blocks, columns), _integers(columns)
    height = min(padded(blocks), HEIGHT)
    starts, firsts, sizes = launch(
        inv,
        "ejkernel_triton.moe_route._kernels:place_blocks",
        [counts, smaller],
        (of_blocks, of_experts, of_experts),
        math.ceil(columns / COLUMNS),
        max(1, height * COLUMNS // (MOST_COUNTS * WARP)),
        {"EXPERTS": columns, "COLUMNS": COLUMNS, "ROWS": height},
        (blocks,),
    )
    (token_order,) = launch(
        inv,
        "ejkernel_triton.moe_route._kernels:order",
        [experts, places, starts, firsts],
        (_integers(places.size),),
        math.ceil(places.size / SLOTS),
        SLOTS // (4 * WARP),
        {"EXPERTS": columns, "BLOCK": block, "SLOTS": SLOTS},
        (places.size,),
    )
    return sizes, token_order


def padded(size: int) -> int:
    """The next power of two."""
    return 1 << max(size - 1, 0).bit_length()


def launch(
    inv: Invocation,
    kernel: str,
    arrays: Sequence[Any],
    results: Sequence[jax.ShapeDtypeStruct],
    programs: int,
    num_warps: int,
    constants: Mapping[str, Any],
    scalars: tuple[int, ...],
) -> tuple[jax.Array, ...]:
    """Launch a kernel, whose name is that of its module and function."""
    module, _, function = kernel.partition(":")
    return _jax_triton.call(
        kernel,
        arrays,
        results,
        scalars=scalars,
        grid=(programs,),
        constants=constants,
        num_warps=num_warps,
        num_stages=1,
        compute_capability=capability(inv),
        name=f"{module.split('.')[1]}_{function}",
    )


def _integers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
