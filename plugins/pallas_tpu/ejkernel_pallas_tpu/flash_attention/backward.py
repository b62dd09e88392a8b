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

#: Of the kernel and of its Config: what was measured with another one is measured again.
VERSION = 1
PLATFORMS = {"tpu": 50}
COMPILERS = ("jaxlib",)


@attrs.frozen
class Pass:
    """How one of the passes is cut."""

    q_block: int = attrs.field(default=512, validator=in_(_tuning.BLOCKS))
    k_block: int = attrs.field(default=512, validator=in_(_tuning.BLOCKS))


@attrs.frozen
class Config:
    """One pass for queries, keys and values, or one for queries and one for keys and values; and that for a bias."""

    #: None: in two passes, of which each computes the weights anew.
    fused: Pass | None = attrs.field(default=None, validator=optional(instance_of(Pass)))
    queries: Pass = attrs.field(default=Pass(), validator=instance_of(Pass))
    keys: Pass = attrs.field(default=Pass(), validator=instance_of(Pass))
    bias: Pass = attrs.field(default=Pass(256, 256), validator=instance_of(Pass))
    #: Run in Pallas' interpreter, wherever it is: for debugging.
    interpret: bool = attrs.field(default=False, validator=instance_of(bool))


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """The blocks for this generation of TPUs."""
    check(inv)
    queries, keys, bias = (Pass(*_tuning.fitting(inv, which)[0]) for which in ("queries", "keys", "bias"))
    return Config(next(iter(_fused(inv)), None), queries, keys, bias)


@hookimpl
def config_space(inv: Invocation) -> Iterable[Config]:
    """Every pass cut in every way that fits, one pass at a time: what is best for one is so for all."""
    first = heuristic_cfg(inv)
    yield first
    if first.fused is not None:
        yield from (attrs.evolve(first, fused=fused) for fused in _fused(inv)[1:])
        first = attrs.evolve(first, fused=None)
        yield first
    yield from (attrs.evolve(first, queries=Pass(*shape)) for shape in _tuning.fitting(inv, "queries")[1:])
    yield from (attrs.evolve(first, keys=Pass(*shape)) for shape in _tuning.fitting(inv, "keys")[1:])


def _fused(inv: Invocation) -> list[Pass]:
    """How the passes may be cut if they are one."""
    return [Pass(*shape) for shape in _tuning.fitting(inv, "fused")] if _has_both_passes(inv) else []


def _has_both_passes(inv: Invocation) -> bool:
    return "query" in inv["wrt"] and not {"key", "value"}.isdisjoint(inv["wrt"])


@hookimpl
def check_cfg(inv: Invocation, cfg: Config) -> None:
    """Raise where these kernels do not do the call: in the interpreter they run anywhere."""
    (check_arguments if cfg.interpret else check)(inv)


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array, ...]:
    """The gradients that ``wrt`` names, in its order."""
    return compute(inv, cfg, cfg.interpret)


def compute(inv: Invocation, cfg: Config, interpret: Any) -> tuple[jax.Array, ...]:
    """The same, ``interpret`` being Pallas' own word."""
    from ejkernel_ops.flash_attention.far import near_and_far

    return near_and_far(inv, lambda inv: _gradients(inv, cfg, interpret))


def _gradients(inv: Invocation, cfg: Config, interpret: Any) -> tuple[jax.Array, ...]:
    from ejkernel_pallas_tpu.flash_attention._rows import of_sinks, rows

    wrt = inv["wrt"]
    if 0 in inv["query"].shape[:2] or (inv["d_out"] is None and inv["d_lse"] is None):
        return tuple(jnp.zeros_like(inv[name]) for name in wrt)
    of = rows(inv)
    found: dict[str, jax.Array] = {}
    if "softmax_aux" in wrt:
        found["softmax_aux"] = of_sinks(inv, of)
    if inv["key"].shape[1] == 0:
        found |= {name: jnp.zeros_like(inv[name]) for name in wrt if name != "softmax_aux"}
    else:
        found |= _by_kernels(inv, cfg, of, interpret)
    return tuple(found[name].astype(inv[name].dtype) for name in wrt)


def _by_kernels(inv: Invocation, cfg: Config, of: Any, interpret: Any) -> dict[str, jax.Array]:
    from ejkernel_pallas_tpu.flash_attention._backward import over_keys, over_queries
    from ejkernel_pallas_tpu.flash_attention._bias import into_bias
    from ejkernel_pallas_tpu.flash_attention._fused import fused
    from ejkernel_pallas_tpu.flash_attention._sight import Meetings

    q_length, k_length = inv["query"].shape[1], inv["key"].shape[1]
    found: dict[str, jax.Array] = {}
    if cfg.fused is not None and _has_both_passes(inv):
        launched = _launched(fused, inv, cfg.fused, of, interpret, Meetings.from_queries)
        lengths = (q_length, k_length, k_length)
        found = {
            name: jnp.swapaxes(x, 1, 2)[:, :length]
            for name, x, length in zip(("query", "key", "value"), launched, lengths, strict=True)
        }
    elif "query" in inv["wrt"]:
        (d_query,) = _launched(over_keys, inv, cfg.queries, of, interpret, Meetings.from_queries)
        found["query"] = jnp.swapaxes(d_query, 1, 2)[:, :q_length]
    if "key" not in found and {"key", "value"} & {*inv["wrt"]}:
        d_key, d_value = _launched(over_queries, inv, cfg.keys, of, interpret, Meetings.from_keys)
        found["key"], found["value"] = (jnp.swapaxes(x, 1, 2)[:, :k_length] for x in (d_key, d_value))
    if "bias" in inv["wrt"]:
        (d_bias,) = _launched(into_bias, inv, cfg.bias, of, interpret, Meetings.everywhere)
        found["bias"] = _of_its_shape(d_bias, inv["bias"].shape, q_length, k_length)
    return found


def _launched(
    make: Callable[..., Any], inv: Invocation, cut: Pass, of: Any, interpret: Any, walk: Callable[[Any], Any]
) -> list[jax.Array]:
    from ejkernel_pallas_tpu.flash_attention._operands import seed
    from ejkernel_pallas_tpu.flash_attention._problem import problem
    from ejkernel_pallas_tpu.flash_attention._sight import meetings

    p = problem(inv, cut.q_block, cut.k_block)
    sight = walk(meetings(inv, p))
    return list(make(inv, p, of, sight)((sight.table, seed(inv)), interpret, _tuning.vmem(inv)))


def _of_its_shape(found: jax.Array, shape: tuple[int, ...], q_length: int, k_length: int) -> jax.Array:
    """The gradient of a bias without what fills blocks up, from a row of queries or keys where it came as one."""
    if shape[2] > 1 and shape[3] == 1:
        return jnp.swapaxes(found, 2, 3)[:, :, :q_length]
    found = found[:, :, : max(shape[2], 1), :k_length]
    return found.sum(3, keepdims=True) if shape[3] == 1 else found
