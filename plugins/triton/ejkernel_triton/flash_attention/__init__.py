"""``flash_attention`` on NVIDIA GPUs, in Triton."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import jax
import jax.numpy as jnp
from attrs.validators import in_

from ejkernel_core import Invocation, hookimpl
from ejkernel_triton.flash_attention import _problem, _tuning
from ejkernel_triton.flash_attention._refusals import check
from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.launch._cards import capability

#: Of the kernel and of its Config: what was measured with another one is measured again.
VERSION = 1
#: Where it runs, and how strongly it is preferred there.
PLATFORMS = {"gpu": 50}
COMPILERS = ("triton", "jax-triton")


@attrs.frozen
class Config:
    """How a forward pass is cut: queries a program, keys a step, and how each program is run."""

    q_block: int = attrs.field(default=128, validator=in_((16, 32, 64, 128, 256)))
    k_block: int = attrs.field(default=64, validator=in_((16, 32, 64, 128, 256)))
    num_warps: int = attrs.field(default=8, validator=in_((1, 2, 4, 8, 16)))
    num_stages: int = attrs.field(default=2, validator=in_((1, 2, 3, 4, 5)))


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """The best of what was measured for such heads and lengths."""
    check(inv)
    return Config(*_tuning.forward(inv)[0])


@hookimpl
def config_space(inv: Invocation) -> Iterable[Config]:
    """Blocks, warps and stages that fit the card."""
    check(inv)
    return [Config(*shape) for shape in _tuning.forward(inv)]


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array, jax.Array]:
    """The output and the log-sum-exp of every row."""
    with _jax_triton.importing():
        from ejkernel_triton.flash_attention._forward import attend

    inv = _problem.aligned(inv)
    query, value = inv["query"], inv["value"]
    batch, q_length, heads, _ = query.shape
    k_length = value.shape[1]
    outputs = (
        jax.ShapeDtypeStruct((batch, q_length, heads, value.shape[3]), value.dtype),
        jax.ShapeDtypeStruct((batch, heads, q_length), jnp.float32),
    )
    if 0 in query.shape:
        return jnp.zeros(outputs[0].shape, value.dtype), jnp.zeros(outputs[1].shape, jnp.float32)
    rows = _problem.intervals(inv)[:2] if inv["cum_seqlens_q"] is not None else (None, None)
    segments = inv["q_segment_ids"] is not None
    k_blocks = _problem.blocks(k_length, cfg.k_block)
    arrays = (
        *(inv[name] for name in ("query", "key", "value", "bias", "attention_mask", "q_segment_ids", "kv_segment_ids")),
        _problem.extremes(inv["kv_segment_ids"], cfg.k_block) if segments else None,
        *rows,
        inv["softmax_aux"],
        inv["dropout_seed"],
    )
    out, lse = _jax_triton.call(
        attend,
        _problem.operands(inv, arrays),
        outputs,
        scalars=(*_problem.numbers(inv), k_blocks),
        grid=(_problem.blocks(q_length, cfg.q_block) * batch * heads,),
        constants={
            **_problem.constants(inv),
            **_problem.evenness(inv, cfg.q_block, cfg.k_block),
            "NARROW": _tuning.is_narrow(inv),
            "BIAS": inv["bias"] is not None,
            "SEGMENTS": 1 << (k_blocks - 1).bit_length() if segments else 0,
            **_problem.of_sinks(inv),
            "Q_BLOCK": cfg.q_block,
            "K_BLOCK": cfg.k_block,
        },
        num_warps=cfg.num_warps,
        num_stages=cfg.num_stages,
        compute_capability=capability(inv),
        name="flash_attention",
    )
    return out, lse
