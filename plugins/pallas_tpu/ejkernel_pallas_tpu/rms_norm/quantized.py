"""``rms_norm_quantized`` on TPUs, in Pallas."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_core import Example, Invocation, hookimpl
from ejkernel_ops.rms_norm.axes import FORMATS
from ejkernel_pallas_tpu.rms_norm import _tuning
from ejkernel_pallas_tpu.rms_norm._tuning import Config, Traffic, is_centered

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1
COMPILERS = ("jaxlib",)


def rank(inv: Invocation) -> int:
    """Before plain JAX with a scale for each 128 entries, for which XLA copies the array several times."""
    return 15 if inv["quantize"] == "fp8_block128" else 5


#: Where it runs, and how strongly it is preferred there.
PLATFORMS = {"tpu": rank}
#: XLA sees a custom call, which it cannot partition.
OPAQUE = ("tpu",)


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
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array, ...]:
    """The values, their scales, and the sum."""
    return compute(inv, cfg, cfg.interpret)


def compute(inv: Invocation, cfg: Config, interpret: Any) -> tuple[jax.Array, ...]:
    """The same; ``interpret`` is that of ``pl.pallas_call``."""
    from ejkernel_pallas_tpu.rms_norm._forward import quantize

    x, residual = inv["x"], inv["residual"]
    dtype, _, width = FORMATS[inv["quantize"]]
    leading = x.shape[:-1]
    scales_shape = (*leading, 1 if width is None else -(-x.shape[-1] // width))
    if 0 in leading:
        return jnp.zeros(x.shape, dtype), jnp.zeros(scales_shape, jnp.float32), x if residual is None else residual
    blocks = _tuning.blocks_of(inv, traffic(inv), cfg.rows)
    values, scales, *total = quantize(inv, blocks, is_centered(inv))((), interpret, _tuning.vmem_limit(inv))
    scales = blocks.statistics(scales, scales_shape) if width is None else scales.reshape(scales_shape)
    return values.reshape(x.shape), scales, total[0].reshape(x.shape) if total else x


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
    dtype, _, width = FORMATS[inv["quantize"]]
    by_rows = [x.dtype, jnp.dtype(dtype)] + ([] if residual is None else [residual.dtype] * 2)
    shared = sum(inv[name] is not None for name in ("weight", "bias"))
    if width is None:
        return Traffic(by_rows, shared, statistics=1)
    return Traffic(by_rows, shared, statistics=0, scales=-(-x.shape[-1] // width))
