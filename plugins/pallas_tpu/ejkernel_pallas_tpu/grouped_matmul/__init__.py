"""``grouped_matmul`` on TPUs, in Pallas."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_core import Example, Invocation, hookimpl
from ejkernel_ops.grouped_matmul.axes import AXES
from ejkernel_pallas_tpu.grouped_matmul import _tuning
from ejkernel_pallas_tpu.grouped_matmul._tuning import FORWARD, Config

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
    return _tuning.configs(inv, FORWARD)


@hookimpl
def check_cfg(inv: Invocation, cfg: Config) -> None:
    """Raise for what the kernel does not support; the interpreter runs on any device."""
    _tuning.check_config(inv, cfg, FORWARD)


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> jax.Array:
    """The result, with zeros in rows of no group."""
    return compute(inv, cfg, cfg.interpret)


def compute(inv: Invocation, cfg: Config, interpret: Any) -> jax.Array:
    """The same; ``interpret`` is that of ``pl.pallas_call``."""
    from ejkernel_ops.grouped_matmul.definition import activated
    from ejkernel_ops.grouped_matmul.groups import boundaries
    from ejkernel_pallas_tpu.grouped_matmul._multiply import multiply
    from ejkernel_pallas_tpu.grouped_matmul._visits import by_tiles

    (output,) = AXES.outputs(inv)
    if 0 in output.shape:
        return jnp.zeros(output.shape, output.dtype)
    if inv["lhs"].shape[1] == 0:  # one entry of zeros has the same sum
        lhs, rhs = (_with_an_entry(inv[name]) for name in ("lhs", "rhs"))
        inv = inv.with_arrays({**_arrays(inv), "lhs": lhs, "rhs": rhs})
    is_gated = _tuning.is_gated(inv)
    has_activation = inv["activation"] is not None and not is_gated
    tile = _tuning.forward_tile(inv, cfg)
    visits = by_tiles(boundaries(inv), tile.all_rows, tile.rows)
    launch = multiply(inv, tile, visits, jnp.dtype("float32") if has_activation else output.dtype, is_gated)
    (out,) = launch((visits.table,), interpret, _tuning.vmem_limit(inv))
    return activated(out, inv).astype(output.dtype) if has_activation else out


def _with_an_entry(array: jax.Array) -> jax.Array:
    return jnp.zeros([max(size, 1) for size in array.shape], array.dtype)


def _arrays(inv: Invocation) -> dict[str, jax.Array]:
    return {name: value for name, value in inv.items() if isinstance(value, jax.Array)}


def vmem(inv: Invocation, cfg: Config) -> int:
    """At most how many bytes of vector memory the kernel takes."""
    return FORWARD.vmem(inv, FORWARD.tile_of(inv, cfg))


def examples() -> Iterable[Example]:
    """Calls whose kernels have more in vector memory than those of the layers of the operation."""
    from ejkernel_pallas_tpu.grouped_matmul._examples import forward_examples

    return forward_examples()


def peers(example: Example) -> Iterable[Any]:
    """JAX's own grouped product for TPUs."""
    from ejkernel_pallas_tpu.grouped_matmul._peers import forward_peers

    return forward_peers(example)
