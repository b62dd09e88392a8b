"""``flash_attention`` on NVIDIA GPUs, in Triton."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import jax
import jax.numpy as jnp
from attrs.validators import in_

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.flash_attention.geometry import block_count
from ejkernel_triton.flash_attention import _problem, _tuning
from ejkernel_triton.flash_attention._refusals import check
from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.launch._cards import capability

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1
#: Where it runs, and how strongly it is preferred there.
PLATFORMS = {"gpu": 50}
#: XLA sees a custom call, which it cannot partition.
OPAQUE = ("gpu",)
COMPILERS = ("triton", "jax-triton")
KERNEL = "ejkernel_triton.flash_attention._forward:attend"


@attrs.frozen
class Config:
    """The queries of a program, the keys of a step, and the warps and stages of each program."""

    q_block: int = attrs.field(default=128, validator=in_((16, 32, 64, 128, 256)))
    k_block: int = attrs.field(default=64, validator=in_((16, 32, 64, 128, 256)))
    num_warps: int = attrs.field(default=8, validator=in_((1, 2, 4, 8, 16)))
    num_stages: int = attrs.field(default=2, validator=in_((1, 2, 3, 4, 5)))


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """The best measured configuration for the head dim and the lengths."""
    check(inv)
    return Config(*_tuning.forward(inv)[0])


@hookimpl
def config_space(inv: Invocation) -> Iterable[Config]:
    """Blocks, warps and stages that fit the card."""
    check(inv)
    return [Config(*shape) for shape in _tuning.forward(inv)]


def shared_memory(inv: Invocation, cfg: Config) -> dict[str, int]:
    """At most how many bytes of shared memory a program takes."""
    return {"attend": _tuning.shared_memory(inv, "forward", attrs.astuple(cfg))}


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array, jax.Array | None]:
    """The output and, if it is needed, the lse of every row."""
    inv = _problem.aligned(inv)
    query, value = inv["query"], inv["value"]
    batch, q_length, heads, _ = query.shape
    k_length = value.shape[1]
    outputs = (
        jax.ShapeDtypeStruct((batch, q_length, heads, value.shape[3]), value.dtype),
        jax.ShapeDtypeStruct((batch, heads, q_length) if inv.needs("lse") else (1,), jnp.float32),
    )
    if 0 in query.shape:
        return jnp.zeros(outputs[0].shape, value.dtype), jnp.zeros(outputs[1].shape, jnp.float32)
    k_blocks = block_count(k_length, cfg.k_block)
    table, table_constants = _problem.key_table(inv, cfg.k_block)
    arrays = (
        *(inv[name] for name in ("query", "key", "value", "bias", "attention_mask", "q_segment_ids", "kv_segment_ids")),
        table,
        *_problem.row_arrays(inv),
        inv["softmax_aux"],
        inv["dropout_seed"],
    )
    out, lse = _jax_triton.call(
        KERNEL,
        _problem.operands(inv, arrays),
        outputs,
        scalars=(*_problem.scalars(inv), k_blocks),
        grid=(block_count(q_length, cfg.q_block) * batch * heads,),
        constants={
            **_problem.constants(inv),
            **_problem.even_blocks(inv, cfg.q_block, cfg.k_block),
            **table_constants,
            # In a cache with positions only full blocks are fetched ahead, so they have a loop of their own.
            "NARROW": _tuning.is_narrow(inv) and inv["kv_positions"] is None,
            "LSE": inv.needs("lse"),
            "BIAS": inv["bias"] is not None,
            **_problem.sink_constants(inv),
            "Q_BLOCK": cfg.q_block,
            "K_BLOCK": cfg.k_block,
        },
        num_warps=cfg.num_warps,
        num_stages=cfg.num_stages,
        compute_capability=capability(inv),
        name="flash_attention",
    )
    return out, lse if inv.needs("lse") else None
