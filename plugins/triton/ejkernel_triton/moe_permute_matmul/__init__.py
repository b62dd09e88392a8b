"""``moe_permute_matmul`` in Triton: the portable product of groups, which reads tokens where they are."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import jax

from ejkernel_core import Invocation, Unsupported, hookimpl
from ejkernel_ops.moe_permute_matmul.parts import product_arguments
from ejkernel_triton import grouped_matmul, grouped_matmul_sm90
from ejkernel_triton.grouped_matmul import Config, _tiling
from ejkernel_triton.grouped_matmul._launch import Tokens, forward

__all__ = ["COMPILERS", "OPAQUE", "PLATFORMS", "VERSION", "Config"]

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1
#: The product alone may have a faster kernel. With more columns than these that outweighs the writing of the rows.
MANY_COLUMNS = 8192


def rank(inv: Invocation) -> int:
    """Before the parts, unless the product has many columns and a faster kernel."""
    columns = inv["rhs"].shape[1 if inv["transpose_rhs"] else 2]
    return 45 if columns > MANY_COLUMNS and _is_faster_alone(inv) else 55


def _is_faster_alone(inv: Invocation) -> bool:
    """Whether the kernel for Hopper takes the product, and comes before the portable one."""
    try:
        product = _product(inv)
        grouped_matmul_sm90.heuristic_cfg(product)
    except Unsupported:
        return False
    return grouped_matmul_sm90.rank(product) > grouped_matmul.PLATFORMS["gpu"]


#: Where it runs, and how strongly it is preferred there.
PLATFORMS = {"gpu": rank}
#: XLA sees a custom call, which it cannot partition.
OPAQUE = ("gpu",)
COMPILERS = ("triton", "jax-triton")


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """That of the product."""
    return grouped_matmul.heuristic_cfg(_product(inv))


@hookimpl
def config_space(inv: Invocation) -> Iterable[Config]:
    """That of the product."""
    return grouped_matmul.config_space(_product(inv))


@hookimpl
def check_cfg(inv: Invocation, cfg: Config) -> None:
    """The tiles have to fit into shared memory."""
    grouped_matmul.check_cfg(_product(inv), cfg)


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> jax.Array:
    """The result."""
    return forward(_product(inv), cfg, Tokens(inv["x"], inv["token_order"], inv["k"]))


def _product(inv: Invocation) -> Invocation:
    """The call of ``grouped_matmul`` on the permuted rows, which are not there: they have only a shape."""
    _tiling.check(inv, inv["rhs"].shape[0])  # by the names of these arguments
    x = inv["x"]
    rows = jax.ShapeDtypeStruct((inv["token_order"].shape[0], x.shape[1]), x.dtype)
    return attrs.evolve(inv, arguments=product_arguments(inv, rows))
