"""``flash_attention_bwd`` on NVIDIA GPUs, in Triton."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from attrs.validators import in_, instance_of

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.flash_attention.far import FAR
from ejkernel_ops.flash_attention.geometry import block_count
from ejkernel_ops.flash_attention.statistics import BackwardRows, sinks_gradient
from ejkernel_triton.flash_attention import _problem, _tuning
from ejkernel_triton.flash_attention._refusals import check
from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.launch._cards import capability

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1
PLATFORMS = {"gpu": 50}
#: XLA sees a custom call, which it cannot partition.
OPAQUE = ("gpu",)
COMPILERS = ("triton", "jax-triton")
KERNELS = "ejkernel_triton.flash_attention._backward"


@attrs.frozen
class Pass:
    """The blocks of one pass, and the warps and stages of each program."""

    q_block: int = attrs.field(validator=in_((16, 32, 64, 128, 256)))
    k_block: int = attrs.field(validator=in_((16, 32, 64, 128, 256)))
    num_warps: int = attrs.field(default=8, validator=in_((1, 2, 4, 8, 16)))
    num_stages: int = attrs.field(default=2, validator=in_((1, 2, 3, 4, 5)))


@attrs.frozen
class Config:
    """The passes for keys and values, for queries, and for a bias."""

    keys: Pass = attrs.field(default=Pass(64, 128), validator=instance_of(Pass))
    queries: Pass = attrs.field(default=Pass(128, 64), validator=instance_of(Pass))
    bias: Pass = attrs.field(default=Pass(32, 32, 4, 1), validator=instance_of(Pass))
    #: Sum the gradient of queries in the pass for keys, by atomics: five products instead of seven, in an order that
    #: differs from run to run. No heuristic chooses it.
    atomics: bool = attrs.field(default=False, validator=instance_of(bool))


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """The best measured configuration for the head dim and the lengths."""
    check(inv)
    keys, queries, bias = (Pass(*shapes(inv)[0]) for shapes in (_tuning.keys, _tuning.queries, _tuning.bias))
    return Config(keys, queries, bias)


@hookimpl
def config_space(inv: Invocation) -> Iterable[Config]:
    """The shapes of each pass that fit the card, one pass at a time: the best of one does not depend on the others."""
    first = heuristic_cfg(inv)
    yield first
    yield from (attrs.evolve(first, keys=Pass(*shape)) for shape in _tuning.keys(inv)[1:])
    yield from (attrs.evolve(first, queries=Pass(*shape)) for shape in _tuning.queries(inv)[1:])


def shared_memory(inv: Invocation, cfg: Config) -> dict[str, int]:
    """At most how many bytes of shared memory a program of each pass takes."""
    passes = {"sum_over_queries": ("keys", cfg.keys), "sum_over_keys": ("queries", cfg.queries)}
    return {
        kernel: _tuning.shared_memory(inv, pass_name, attrs.astuple(shape))
        for kernel, (pass_name, shape) in passes.items()
    }


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array, ...]:
    """The gradients that ``wrt`` names, in its order."""
    wrt = inv["wrt"]
    gradients = {name: jnp.zeros_like(inv[name]) for name in wrt}
    if 0 in inv["query"].shape or (inv["d_out"] is None and inv["d_lse"] is None):
        return tuple(gradients.values())
    inv = _problem.aligned(inv)
    rows = _problem.backward_rows(inv) if inv["bias"] is None or 0 in inv["key"].shape else _biased_rows(inv, cfg.bias)
    if "softmax_aux" in wrt:
        gradients["softmax_aux"] = sinks_gradient(inv["softmax_aux"], rows.lse, rows.delta, base2=True)
    if 0 in inv["key"].shape:  # nothing but sinks has a gradient
        return tuple(gradients[name].astype(inv[name].dtype) for name in wrt)
    if "query" in wrt and not cfg.atomics:
        gradients["query"] = _over_keys(inv, rows, cfg.queries)
    if "key" in wrt or "value" in wrt or ("query" in wrt and cfg.atomics):
        gradients |= zip(("key", "value", "query"), _over_queries(inv, rows, cfg.keys, cfg.atomics), strict=False)
    if "bias" in wrt:
        gradients["bias"] = _bias(inv, rows, cfg.bias)
    return tuple(gradients[name].astype(inv[name].dtype) for name in wrt)


def _biased_rows(inv: Invocation, shape: Pass) -> BackwardRows:
    """The rows of a call with a bias, which may move an lse so far from 0 that weights cannot be computed from it: see
    `ejkernel_ops.flash_attention.far`.

    The kernel returns an lse that float32 holds exactly, and the factor by which the weights from it would have to be
    multiplied. The cotangents are multiplied by it instead: gradients are linear in both.
    """
    lse, factor = _exact_lse(inv, shape)
    factors = {"d_out": factor.transpose(0, 2, 1)[..., None], "d_lse": factor}
    cotangents = {name: inv[name] for name in factors if inv[name] is not None}
    scaled = {name: (array * factors[name]).astype(array.dtype) for name, array in cotangents.items()}
    return attrs.evolve(_problem.backward_rows(inv.with_arrays(scaled)), lse=lse)


def _exact_lse(inv: Invocation, shape: Pass) -> tuple[jax.Array, ...]:
    batch, length, heads, _ = inv["query"].shape
    count = block_count(inv["key"].shape[1], shape.k_block)
    table, table_constants = _problem.key_table(inv, shape.k_block)
    arrays = (
        *(inv[name] for name in ("query", "key", "lse", "bias", "attention_mask", "q_segment_ids", "kv_segment_ids")),
        table,
        *_problem.row_arrays(inv),
        inv["softmax_aux"],
    )
    return _jax_triton.call(
        f"{KERNELS}:exact_lse",
        _problem.operands(inv, arrays),
        (jax.ShapeDtypeStruct((batch, heads, length), jnp.float32),) * 2,
        scalars=(*_problem.scalars(inv), count),
        grid=(block_count(length, shape.q_block) * batch * heads,),
        constants={
            **_problem.constants(inv),
            **_problem.sink_constants(inv),
            **table_constants,
            "FAR": FAR,
            "Q_BLOCK": shape.q_block,
            "K_BLOCK": shape.k_block,
        },
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        compute_capability=capability(inv),
        name="flash_attention_bwd_exact_lse",
    )


def _over_keys(inv: Invocation, rows: BackwardRows, shape: Pass) -> jax.Array:
    """The gradient of queries."""
    query = inv["query"]
    batch, length, heads, _ = query.shape
    count = block_count(inv["key"].shape[1], shape.k_block)
    (d_query,) = _launch(
        "sum_over_keys",
        inv,
        rows,
        shape,
        table=_problem.key_table(inv, shape.k_block),
        count=count,
        intervals=_problem.row_arrays(inv),
        outputs=(jax.ShapeDtypeStruct(query.shape, query.dtype),),
        grid=(block_count(length, shape.q_block) * batch * heads,),
    )
    return d_query


def _over_queries(inv: Invocation, rows: BackwardRows, shape: Pass, atomics: bool) -> tuple[jax.Array, ...]:
    """The gradients of keys and values, and with atomics of queries."""
    key, value = inv["key"], inv["value"]
    batch, length, kv_heads, _ = key.shape
    count = block_count(inv["query"].shape[1], shape.q_block)
    query = jax.ShapeDtypeStruct(inv["query"].shape if atomics else (1,), jnp.float32)
    gradients = _launch(
        "sum_over_queries",
        inv,
        rows,
        shape,
        table=_problem.query_table(inv, shape.q_block),
        count=count,
        intervals=_problem.column_arrays(inv),
        outputs=(jax.ShapeDtypeStruct(key.shape, key.dtype), jax.ShapeDtypeStruct(value.shape, value.dtype), query),
        zeroed_outputs=(2,) if atomics else (),
        ATOMIC=atomics,
        grid=(block_count(length, shape.k_block) * batch * kv_heads,),
        # Where matrix instructions read shared memory, it pays to compute addresses again and to save registers.
        DISABLE_LICM=_tuning.reads_shared_memory(inv),
    )
    return gradients if atomics else gradients[:2]


def _launch(
    kernel: str,
    inv: Invocation,
    rows: BackwardRows,
    shape: Pass,
    table: tuple[jax.Array | None, dict[str, int]],
    count: int,
    intervals: Sequence[Any],
    outputs: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int],
    zeroed_outputs: Sequence[int] = (),
    **constants: Any,
) -> tuple[jax.Array, ...]:
    arrays = (*_common_arrays(inv, rows), table[0], *intervals, inv["dropout_seed"])
    return _jax_triton.call(
        f"{KERNELS}:{kernel}",
        _problem.operands(inv, arrays),
        outputs,
        scalars=(*_problem.scalars(inv), count),
        grid=grid,
        constants={
            **_problem.constants(inv),
            **_problem.even_blocks(inv, shape.q_block, shape.k_block),
            "BIAS": inv["bias"] is not None,
            **table[1],
            "Q_BLOCK": shape.q_block,
            "K_BLOCK": shape.k_block,
            **constants,
        },
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        compute_capability=capability(inv),
        name=f"flash_attention_bwd_{kernel}",
        zeroed_outputs=zeroed_outputs,
    )


def _common_arrays(inv: Invocation, rows: BackwardRows) -> tuple[jax.Array | None, ...]:
    """The first parameters of every pass."""
    return (
        *(inv["query"], inv["key"], inv["value"], rows.d_out, rows.lse, rows.delta),
        *(inv["bias"], inv["attention_mask"], inv["q_segment_ids"], inv["kv_segment_ids"]),
    )


def _bias(inv: Invocation, rows: BackwardRows, shape: Pass) -> jax.Array:
    bias = inv["bias"]
    batch, q_length, heads, _ = inv["query"].shape
    k_length = inv["key"].shape[1]
    b, h, q, _ = bias.shape
    has_q, has_k = int(q > 1), int(bias.shape[3] > 1)
    k = k_length if has_k else 1  # of the gradient: the rows of the bias may be padded
    if not (has_q and has_k):
        # A sum for each head, because otherwise few programs would have all the work; the heads are summed below.
        b, h = batch, heads
    q_blocks, k_blocks = block_count(q_length, shape.q_block), block_count(k_length, shape.k_block)
    arrays = (*_common_arrays(inv, rows), *_problem.row_arrays(inv), inv["dropout_seed"])
    flags = {"SEGMENTS": int(inv["q_segment_ids"] is not None), "SLOTS": int(inv["kv_positions"] is not None)}
    constants = {**_problem.constants(inv), **flags}
    (d_bias,) = _jax_triton.call(
        f"{KERNELS}:sum_into_bias",
        _problem.operands(inv, arrays),
        (jax.ShapeDtypeStruct((b, h, q, k), jnp.float32),),
        scalars=(*_problem.scalars(inv), *(batch, b, h, q_blocks if has_q else 1, k_blocks if has_k else 1)),
        grid=((q_blocks if has_q else 1) * (k_blocks if has_k else 1) * b * h,),
        constants={**constants, "BIAS_Q": has_q, "Q_BLOCK": shape.q_block, "K_BLOCK": shape.k_block},
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        compute_capability=capability(inv),
        name="flash_attention_bwd_bias",
    )
    over = tuple(axis for axis in (0, 1) if d_bias.shape[axis] != bias.shape[axis])
    return d_bias.sum(over, keepdims=True)
