"""Launches of the kernels, of ``rms_norm`` and, where rows are centered, of ``layer_norm``.

``interpret`` is that of ``pl.pallas_call``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_core import Invocation
from ejkernel_ops.rms_norm.axes import FORMATS
from ejkernel_pallas_tpu.launch._generations import generation
from ejkernel_pallas_tpu.norms import Config, _tuning
from ejkernel_pallas_tpu.norms._traffic import is_centered


def forward(inv: Invocation, cfg: Config, interpret: Any) -> tuple[jax.Array | None, ...]:
    """The result, the sum and those statistics of the rows that are needed."""
    from ejkernel_pallas_tpu.norms._forward import normalize

    x, residual, centered = inv["x"], inv["residual"], is_centered(inv)
    leading = x.shape[:-1]
    if 0 in leading:
        total = x if residual is None else residual
        return (x, total, *(jnp.zeros(leading, jnp.float32),) * (1 + centered))
    blocks = _tuning.blocks_of(inv, cfg.rows)
    statistics = ("mean", "rstd") if centered else ("rstd",)
    needed = tuple(name for name in statistics if inv.needs(name))
    out, *rest = normalize(inv, blocks, needed, centered)((), interpret, _tuning.vmem_limit(inv))
    total = x if residual is None else rest.pop(0).reshape(x.shape)
    by_name = {name: blocks.statistics(numbers, leading) for name, numbers in zip(needed, rest, strict=True)}
    return (out.reshape(x.shape), total, *map(by_name.get, statistics))


def gradients(inv: Invocation, cfg: Config, interpret: Any) -> tuple[jax.Array, ...]:
    """The gradients that ``wrt`` names, in its order."""
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
    from ejkernel_pallas_tpu.norms._backward import Targets, differentiate

    targets = Targets.of(inv)
    blocks = _tuning.blocks_of(inv, cfg.rows)
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


def quantized(inv: Invocation, cfg: Config, interpret: Any) -> tuple[jax.Array, ...]:
    """The values, their scales, and the sum."""
    from ejkernel_pallas_tpu.norms._forward import quantize

    x, residual = inv["x"], inv["residual"]
    dtype, _, width = FORMATS[inv["quantize"]]
    leading = x.shape[:-1]
    scales_shape = (*leading, 1 if width is None else -(-x.shape[-1] // width))
    if 0 in leading:
        return jnp.zeros(x.shape, dtype), jnp.zeros(scales_shape, jnp.float32), x if residual is None else residual
    blocks = _tuning.blocks_of(inv, cfg.rows)
    values, scales, *total = quantize(inv, blocks, is_centered(inv))((), interpret, _tuning.vmem_limit(inv))
    scales = blocks.statistics(scales, scales_shape) if width is None else scales.reshape(scales_shape)
    return values.reshape(x.shape), scales, total[0].reshape(x.shape) if total else x
