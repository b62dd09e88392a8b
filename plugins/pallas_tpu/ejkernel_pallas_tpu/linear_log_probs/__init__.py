"""``linear_log_probs`` on TPUs, in Pallas: the pass over the logits of ``fused_linear_cross_entropy``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.fused_linear_cross_entropy.definition import labels_of
from ejkernel_pallas_tpu.fused_linear_cross_entropy import _tuning
from ejkernel_pallas_tpu.fused_linear_cross_entropy._tuning import Config
from ejkernel_pallas_tpu.grouped_matmul._tiles import Tile

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1
#: Behind plain JAX, as long as the compiler for TPUs has not estimated its time: see docs/pallas-tpu.md.
PLATFORMS = {"tpu": 5}
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
    return _tuning.configs(inv, _memory)


@hookimpl
def check_cfg(inv: Invocation, cfg: Config) -> None:
    """Raise for what the kernel does not support; the interpreter runs on any device."""
    _tuning.check_config(inv, cfg, _memory)


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array | None, ...]:
    """The log-probability of each label, and the entropy of each row if it is needed."""
    return compute(inv, cfg, cfg.interpret)


def compute(inv: Invocation, cfg: Config, interpret: Any) -> tuple[jax.Array | None, ...]:
    """The same; ``interpret`` is that of ``pl.pallas_call``."""
    from ejkernel_pallas_tpu.fused_linear_cross_entropy._statistics import statistics

    shape, has_entropy = inv["labels"].shape, inv.needs("entropy")
    if not _tuning.has_rows(inv):
        nothing = jnp.zeros(shape, jnp.float32)
        return nothing, nothing if has_entropy else None
    labels, tile = labels_of(inv), _tuning.tile_of(inv, cfg)
    rows = statistics(inv, tile, labels, interpret, has_products=has_entropy)
    log_probs = jnp.where(labels.counts, (rows.own - rows.softmax.top) - rows.softmax.log_sum, 0)
    if rows.mean_product is None:
        return log_probs.reshape(shape), None
    entropy = jnp.where(labels.counts, rows.softmax.log_sum - rows.mean_product, 0)
    return log_probs.reshape(shape), entropy.reshape(shape)


def vmem(inv: Invocation, cfg: Config) -> int:
    """At most how many bytes of vector memory the kernel takes."""
    return _memory(inv, _tuning.tile_of(inv, cfg))


def _memory(inv: Invocation, tile: Tile) -> int:
    return _tuning.statistics_memory(inv, tile, options=1)
