"""``flash_attention_bwd`` on TPUs, in Pallas."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from attrs.validators import in_, instance_of, optional

from ejkernel_core import Invocation, hookimpl
from ejkernel_pallas_tpu.flash_attention import _tuning
from ejkernel_pallas_tpu.flash_attention._refusals import check, check_arguments

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1
PLATFORMS = {"tpu": 50}
#: XLA sees a custom call, which it cannot partition.
OPAQUE = ("tpu",)
COMPILERS = ("jaxlib",)


@attrs.frozen
class Pass:
    """The sizes of the blocks of one pass."""

    q_block: int = attrs.field(default=512, validator=in_(_tuning.BLOCKS))
    k_block: int = attrs.field(default=512, validator=in_(_tuning.BLOCKS))


@attrs.frozen
class Config:
    """One pass for queries, keys and values, or two, for queries and for keys and values; and one for a bias."""

    #: None for two passes, each of which computes the weights again.
    fused: Pass | None = attrs.field(default=None, validator=optional(instance_of(Pass)))
    queries: Pass = attrs.field(default=Pass(), validator=instance_of(Pass))
    keys: Pass = attrs.field(default=Pass(), validator=instance_of(Pass))
    bias: Pass = attrs.field(default=Pass(256, 256), validator=instance_of(Pass))
    #: Run in the interpreter of Pallas, on any device, for debugging.
    interpret: bool = attrs.field(default=False, validator=instance_of(bool))


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """The blocks that are best on this generation of TPUs."""
    check(inv)
    queries, keys, bias = (Pass(*_tuning.block_shapes(inv, name)[0]) for name in ("queries", "keys", "bias"))
    return Config(next(iter(_fused(inv)), None), queries, keys, bias)


@hookimpl
def config_space(inv: Invocation) -> Iterable[Config]:
    """The blocks of each pass that fit, one pass at a time: the best of one do not depend on the others."""
    first = heuristic_cfg(inv)
    yield first
    if first.fused is not None:
        yield from (attrs.evolve(first, fused=fused) for fused in _fused(inv)[1:])
        first = attrs.evolve(first, fused=None)
        yield first
    yield from (attrs.evolve(first, queries=Pass(*shape)) for shape in _tuning.block_shapes(inv, "queries")[1:])
    yield from (attrs.evolve(first, keys=Pass(*shape)) for shape in _tuning.block_shapes(inv, "keys")[1:])


def _fused(inv: Invocation) -> list[Pass]:
    """The blocks of a single pass, if there may be one."""
    return [Pass(*shape) for shape in _tuning.block_shapes(inv, "fused")] if _has_both_passes(inv) else []


def _has_both_passes(inv: Invocation) -> bool:
    return "query" in inv["wrt"] and not {"key", "value"}.isdisjoint(inv["wrt"])


@hookimpl
def check_cfg(inv: Invocation, cfg: Config) -> None:
    """Raise for what the kernels do not support; the interpreter runs on any device."""
    (check_arguments if cfg.interpret else check)(inv)


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array, ...]:
    """The gradients that ``wrt`` names, in its order."""
    return compute(inv, cfg, cfg.interpret)


def compute(inv: Invocation, cfg: Config, interpret: Any) -> tuple[jax.Array, ...]:
    """The same; ``interpret`` is that of ``pl.pallas_call``."""
    from ejkernel_ops.flash_attention.far import near_and_far

    return near_and_far(inv, lambda inv: _gradients(inv, cfg, interpret))


def _gradients(inv: Invocation, cfg: Config, interpret: Any) -> tuple[jax.Array, ...]:
    from ejkernel_ops.flash_attention.statistics import BackwardRows, sinks_gradient

    wrt = inv["wrt"]
    if 0 in inv["query"].shape[:2] or (inv["d_out"] is None and inv["d_lse"] is None):
        return tuple(jnp.zeros_like(inv[name]) for name in wrt)
    rows = BackwardRows.of(inv)
    gradients: dict[str, jax.Array] = {}
    if "softmax_aux" in wrt:
        gradients["softmax_aux"] = sinks_gradient(inv["softmax_aux"], rows.lse, rows.delta, base2=True)
    if inv["key"].shape[1] == 0:
        gradients |= {name: jnp.zeros_like(inv[name]) for name in wrt if name != "softmax_aux"}
    else:
        gradients |= _run_passes(inv, cfg, rows, interpret)
    return tuple(gradients[name].astype(inv[name].dtype) for name in wrt)


def _run_passes(inv: Invocation, cfg: Config, rows: Any, interpret: Any) -> dict[str, jax.Array]:
    from ejkernel_pallas_tpu.flash_attention._backward import key_pass, query_pass
    from ejkernel_pallas_tpu.flash_attention._bias import bias_pass
    from ejkernel_pallas_tpu.flash_attention._fused import fused_pass
    from ejkernel_pallas_tpu.flash_attention._steps import Pairs

    q_length, k_length = inv["query"].shape[1], inv["key"].shape[1]
    gradients: dict[str, jax.Array] = {}
    if cfg.fused is not None and _has_both_passes(inv):
        arrays = _launch(fused_pass, inv, cfg.fused, rows, interpret, Pairs.query_steps)
        lengths = (q_length, k_length, k_length)
        gradients = {
            name: jnp.swapaxes(x, 1, 2)[:, :length]
            for name, x, length in zip(("query", "key", "value"), arrays, lengths, strict=True)
        }
    elif "query" in inv["wrt"]:
        (d_query,) = _launch(query_pass, inv, cfg.queries, rows, interpret, Pairs.query_steps)
        gradients["query"] = jnp.swapaxes(d_query, 1, 2)[:, :q_length]
    if "key" not in gradients and {"key", "value"} & {*inv["wrt"]}:
        d_key, d_value = _launch(key_pass, inv, cfg.keys, rows, interpret, Pairs.key_steps)
        gradients["key"], gradients["value"] = (jnp.swapaxes(x, 1, 2)[:, :k_length] for x in (d_key, d_value))
    if "bias" in inv["wrt"]:
        (d_bias,) = _launch(bias_pass, inv, cfg.bias, rows, interpret, Pairs.table)
        gradients["bias"] = _in_shape_of_bias(d_bias, inv["bias"].shape, q_length, k_length)
    return gradients


def _launch(
    launch: Callable[..., Any], inv: Invocation, blocks: Pass, rows: Any, interpret: Any, order: Callable[[Any], Any]
) -> list[jax.Array]:
    from ejkernel_pallas_tpu.flash_attention._problem import problem
    from ejkernel_pallas_tpu.flash_attention._scalars import scalars
    from ejkernel_pallas_tpu.flash_attention._steps import pairs

    p = problem(inv, blocks.q_block, blocks.k_block)
    steps = order(pairs(inv, p))
    return list(launch(inv, p, rows, steps)((steps.table, scalars(inv)), interpret, _tuning.vmem_limit(inv)))


def _in_shape_of_bias(d_bias: jax.Array, shape: tuple[int, ...], q_length: int, k_length: int) -> jax.Array:
    """The gradient of a bias without padding, in its own shape where the kernel has a row of queries or keys."""
    if shape[2] > 1 and shape[3] == 1:
        return jnp.swapaxes(d_bias, 2, 3)[:, :, :q_length]
    d_bias = d_bias[:, :, : max(shape[2], 1), :k_length]
    return d_bias.sum(3, keepdims=True) if shape[3] == 1 else d_bias


def vmem(inv: Invocation, cfg: Config) -> dict[str, int]:
    """At most how many bytes of vector memory each of the passes takes."""
    passes = {"queries": cfg.queries, "keys": cfg.keys, "bias": cfg.bias}
    if cfg.fused is not None:
        passes["fused"] = cfg.fused
    return {
        f"flash_attention_bwd_{name}": _tuning.vmem_bytes(inv, name, (blocks.q_block, blocks.k_block))
        for name, blocks in passes.items()
    }
