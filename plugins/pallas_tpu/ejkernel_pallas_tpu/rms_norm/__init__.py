"""``rms_norm`` on TPUs, in Pallas; and ``layer_norm``, whose kernels are these with the mean subtracted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_core import Example, Invocation, hookimpl
from ejkernel_pallas_tpu.rms_norm import _tuning
from ejkernel_pallas_tpu.rms_norm._tuning import Config, Traffic, is_centered

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1
#: Behind plain JAX, which XLA fuses into the matrix product that follows: see docs/pallas-tpu.md.
PLATFORMS = {"tpu": 5}
#: XLA sees a custom call, which it cannot partition.
OPAQUE = ("tpu",)
COMPILERS = ("jaxlib",)


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """The rows for this generation of TPUs."""
    return next(iter(config_space(inv)))


@hookimpl
def config_space(inv: Invocation) -> Iterable[Config]:
    """The rows that fit into vector memory."""
    _tuning.check(inv)
    return [Config(rows) for rows in _tuning.block_rows(inv, traffic(inv))]


@hookimpl
def check_cfg(inv: Invocation, cfg: Config) -> None:
    """Raise for what the kernel does not support; the interpreter runs on any device."""
    _tuning.check_config(inv, cfg, traffic)


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array | None, ...]:
    """The result, the sum and those statistics of the rows that are needed."""
    return compute(inv, cfg, cfg.interpret)


def compute(inv: Invocation, cfg: Config, interpret: Any) -> tuple[jax.Array | None, ...]:
    """The same; ``interpret`` is that of ``pl.pallas_call``."""
    from ejkernel_pallas_tpu.rms_norm._forward import normalize

    x, residual, centered = inv["x"], inv["residual"], is_centered(inv)
    leading = x.shape[:-1]
    if 0 in leading:
        total = x if residual is None else residual
        return (x, total, *(jnp.zeros(leading, jnp.float32),) * (1 + centered))
    blocks = _tuning.blocks_of(inv, traffic(inv), cfg.rows)
    statistics = ("mean", "rstd") if centered else ("rstd",)
    needed = tuple(name for name in statistics if inv.needs(name))
    out, *rest = normalize(inv, blocks, needed, centered)((), interpret, _tuning.vmem_limit(inv))
    total = x if residual is None else rest.pop(0).reshape(x.shape)
    by_name = {name: blocks.statistics(numbers, leading) for name, numbers in zip(needed, rest, strict=True)}
    return (out.reshape(x.shape), total, *map(by_name.get, statistics))


def vmem(inv: Invocation, cfg: Config) -> int:
    """At most how many bytes of vector memory the kernel takes."""
    return traffic(inv).bytes(_tuning.blocks_of(inv, traffic(inv), cfg.rows))


def peers(example: Example) -> Iterable[Any]:
    """Plain JAX."""
    from ejkernel_pallas_tpu.rms_norm._peers import peers

    return peers(example)


def traffic(inv: Invocation) -> Traffic:
    """What the kernel has in vector memory."""
    x, residual = inv["x"], inv["residual"]
    shared = sum(inv[name] is not None for name in ("weight", "bias"))
    by_rows = [x.dtype] * 2 + ([] if residual is None else [residual.dtype] * 2)
    return Traffic(by_rows, shared, 1 + is_centered(inv))
