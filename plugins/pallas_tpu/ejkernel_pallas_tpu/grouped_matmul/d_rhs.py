"""``grouped_matmul_d_rhs`` on TPUs, in Pallas."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_core import Example, Invocation, hookimpl
from ejkernel_ops.grouped_matmul.axes import D_RHS_AXES
from ejkernel_pallas_tpu.grouped_matmul import _tuning
from ejkernel_pallas_tpu.grouped_matmul._tuning import D_RHS, Config

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1
#: Where it runs, and how strongly it is preferred there.
PLATFORMS = {"tpu": 50}
#: XLA sees a custom call, which it cannot partition.
OPAQUE = ("tpu",)
COMPILERS = ("jaxlib",)


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """The tile that takes the least time, by the bytes that it moves and the products that it makes."""
    return next(iter(config_space(inv)))


@hookimpl
def config_space(inv: Invocation) -> Iterable[Config]:
    """The tiles that fit into vector memory."""
    _tuning.check(inv)
    return _tuning.configs(inv, D_RHS)


@hookimpl
def check_cfg(inv: Invocation, cfg: Config) -> None:
    """Raise for what the kernel does not support; the interpreter runs on any device."""
    _tuning.check_config(inv, cfg, D_RHS)


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> jax.Array:
    """The gradient of the matrices: exactly 0 for a group without rows."""
    return compute(inv, cfg, cfg.interpret)


def compute(inv: Invocation, cfg: Config, interpret: Any) -> jax.Array:
    """The same; ``interpret`` is that of ``pl.pallas_call``."""
    from ejkernel_pallas_tpu.grouped_matmul._contract import contract
    from ejkernel_pallas_tpu.grouped_matmul._visits import by_groups

    (output,) = D_RHS_AXES.outputs(inv)
    if 0 in output.shape or inv["lhs"].shape[0] == 0:
        return jnp.zeros(output.shape, output.dtype)
    tile = _tuning.d_rhs_tile(inv, cfg)
    visits = by_groups(inv["boundaries"], tile.all_rows, tile.rows)
    launch = contract(inv, tile, visits, output.dtype, output.shape[0])
    (out,) = launch((visits.table,), interpret, _tuning.vmem_limit(inv))
    return out


def vmem(inv: Invocation, cfg: Config) -> int:
    """At most how many bytes of vector memory the kernel takes."""
    return D_RHS.vmem(inv, D_RHS.tile_of(inv, cfg))


def examples() -> Iterable[Example]:
    """Calls whose kernel has more in vector memory than those of the layers of the operation."""
    from ejkernel_pallas_tpu.grouped_matmul._examples import d_rhs_examples

    return d_rhs_examples()


def peers(example: Example) -> Iterable[Any]:
    """JAX's own grouped product for TPUs."""
    from ejkernel_pallas_tpu.grouped_matmul._peers import d_rhs_peers

    return d_rhs_peers(example)
