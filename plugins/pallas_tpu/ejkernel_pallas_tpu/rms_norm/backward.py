"""``rms_norm_bwd`` on TPUs, in Pallas."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_core import Invocation, hookimpl
from ejkernel_pallas_tpu.launch._generations import generation
from ejkernel_pallas_tpu.rms_norm import _tuning
from ejkernel_pallas_tpu.rms_norm._tuning import Config, Traffic, is_centered

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1
#: Behind plain JAX, which XLA fuses into the matrix products around it: see docs/pallas-tpu.md.
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
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array, ...]:
    """The gradients that ``wrt`` names, in its order."""
    return compute(inv, cfg, cfg.interpret)


def compute(inv: Invocation, cfg: Config, interpret: Any) -> tuple[jax.Array, ...]:
    """The same; ``interpret`` is that of ``pl.pallas_call``."""
    has_cotangents = any(inv.get(name) is not None for name in ("d_out", "d_rstd", "d_mean"))
    has_rows = 0 not in inv["x"].shape[:-1]
    by_name = _by_kernel(inv, cfg, interpret) if has_cotangents and has_rows else _without_kernel(inv)
    return tuple(by_name[name] for name in inv["wrt"])


def _without_kernel(inv: Invocation) -> dict[str, jax.Array]:
    """The gradients where there are no rows, or where the only cotangent is that of the sum."""
    gradients = {name: jnp.zeros_like(inv[name]) for name in inv["wrt"]}
    if inv["d_sum"] is not None:
        gradients |= {name: inv["d_sum"].astype(inv[name].dtype) for name in ("x", "residual") if name in gradients}
    return gradients


def _by_kernel(inv: Invocation, cfg: Config, interpret: Any) -> dict[str, jax.Array]:
    from ejkernel_pallas_tpu.rms_norm._backward import Targets, differentiate

    targets = Targets.of(inv)
    blocks = _tuning.blocks_of(inv, traffic(inv), cfg.rows)
    chip = generation(inv.device_kind or "")
    launch = differentiate(inv, blocks, targets, chip.cores if chip else 1, is_centered(inv))
    outputs = dict(zip(launch.outputs, launch((), interpret, _tuning.vmem_limit(inv)), strict=True))
    gradients = {}
    for name in inv["wrt"]:
        array = inv[name]
        if name in ("weight", "bias"):
            gradients[name] = outputs[f"d_{name}"].sum((0, 1)).astype(array.dtype)
        else:
            gradients[name] = outputs[f"d_rows_{array.dtype}"].reshape(array.shape)
    return gradients


def vmem(inv: Invocation, cfg: Config) -> int:
    """At most how many bytes of vector memory the kernel takes."""
    return traffic(inv).bytes(_tuning.blocks_of(inv, traffic(inv), cfg.rows))


def traffic(inv: Invocation) -> Traffic:
    """What the kernel has in vector memory."""
    wrt = inv["wrt"]
    gradients = {inv[name].dtype for name in ("x", "residual") if name in wrt}
    d_sum = [] if inv["d_sum"] is None else [inv["d_sum"].dtype]
    by_rows = [inv["sum"].dtype, inv["x"].dtype, *d_sum, *gradients]
    sums = sum(name in wrt for name in ("weight", "bias"))
    statistics = sum(inv.get(name) is not None for name in ("rstd", "mean", "d_rstd", "d_mean"))
    return Traffic(by_rows, int(inv["weight"] is not None), statistics, sums)
