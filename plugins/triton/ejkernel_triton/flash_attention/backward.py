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
from ejkernel_triton.flash_attention import _problem, _tuning
from ejkernel_triton.flash_attention._refusals import check
from ejkernel_triton.flash_attention._rows import Rows, of_sinks
from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.launch._cards import capability

#: Of the kernel and of its Config: what was measured with another one is measured again.
VERSION = 1
PLATFORMS = {"gpu": 50}
COMPILERS = ("triton", "jax-triton")


@attrs.frozen
class Pass:
    """How one of the passes is cut, and how each program is run."""

    q_block: int = attrs.field(validator=in_((16, 32, 64, 128, 256)))
    k_block: int = attrs.field(validator=in_((16, 32, 64, 128, 256)))
    num_warps: int = attrs.field(default=8, validator=in_((1, 2, 4, 8, 16)))
    num_stages: int = attrs.field(default=2, validator=in_((1, 2, 3, 4, 5)))


@attrs.frozen
class Config:
    """The pass for keys and values, that for queries, and that for a bias."""

    keys: Pass = attrs.field(default=Pass(64, 128), validator=instance_of(Pass))
    queries: Pass = attrs.field(default=Pass(128, 64), validator=instance_of(Pass))
    bias: Pass = attrs.field(default=Pass(32, 32, 4, 1), validator=instance_of(Pass))
    #: Have the pass for keys add up the gradient of queries, too, by atomics: five products instead of seven, and sums
    #: in another order every time. Never chosen by itself.
    atomics: bool = attrs.field(default=False, validator=instance_of(bool))


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """The best of what was measured for such heads and lengths."""
    check(inv)
    return Config(*(Pass(*shapes[0]) for shapes in (_tuning.keys(inv), _tuning.queries(inv), _tuning.bias(inv))))


@hookimpl
def config_space(inv: Invocation) -> Iterable[Config]:
    """Every pass cut in every way that fits the card, one pass at a time: what is best for one is so for all."""
    first = heuristic_cfg(inv)
    yield first
    yield from (attrs.evolve(first, keys=Pass(*shape)) for shape in _tuning.keys(inv)[1:])
    yield from (attrs.evolve(first, queries=Pass(*shape)) for shape in _tuning.queries(inv)[1:])


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array, ...]:
    """The gradients that ``wrt`` names, in its order."""
    wrt = inv["wrt"]
    found = {name: jnp.zeros_like(inv[name]) for name in wrt}
    if 0 in inv["query"].shape or (inv["d_out"] is None and inv["d_lse"] is None):
        return tuple(found.values())
    inv = _problem.aligned(inv)
    rows = Rows.of(inv) if inv["bias"] is None or 0 in inv["key"].shape else _biased_rows(inv, cfg.bias)
    if "softmax_aux" in wrt:
        found["softmax_aux"] = of_sinks(inv, rows)
    if 0 in inv["key"].shape:  # the sinks are all there is
        return tuple(found[name].astype(inv[name].dtype) for name in wrt)
    if "query" in wrt and not cfg.atomics:
        found["query"] = of_queries(inv, rows, cfg.queries)
    if "key" in wrt or "value" in wrt or ("query" in wrt and cfg.atomics):
        found |= zip(("key", "value", "query"), _over_queries(inv, rows, cfg.keys, cfg.atomics), strict=False)
    if "bias" in wrt:
        found["bias"] = _bias(inv, rows, cfg.bias)
    return tuple(found[name].astype(inv[name].dtype) for name in wrt)


def _biased_rows(inv: Invocation, cut: Pass) -> Rows:
    """What rows bring with a bias, by which they may be where a log-sum-exp tells nothing of their sum: see
    `ejkernel_ops.flash_attention.far`.

    The factor that their weights lack is given to what arrives at them: gradients are linear in both.
    """
    top, factor = _tops(inv, cut)
    factors = {"d_out": factor.transpose(0, 2, 1)[..., None], "d_lse": factor}
    arriving = {name: inv[name] for name in factors if inv[name] is not None}
    scaled = {name: (array * factors[name]).astype(array.dtype) for name, array in arriving.items()}
    return attrs.evolve(Rows.of(inv.with_arrays(scaled)), top=top)


def _tops(inv: Invocation, cut: Pass) -> tuple[jax.Array, ...]:
    with _jax_triton.importing():
        from ejkernel_triton.flash_attention._backward import find_tops

    batch, length, heads, _ = inv["query"].shape
    count = _problem.blocks(inv["key"].shape[1], cut.k_block)
    ids = inv["kv_segment_ids"]
    arrays = (
        *(inv[name] for name in ("query", "key", "lse", "bias", "attention_mask", "q_segment_ids", "kv_segment_ids")),
        None if ids is None else _problem.extremes(ids, cut.k_block),
        *(_problem.intervals(inv)[:2] if inv["cum_seqlens_q"] is not None else (None, None)),
        inv["softmax_aux"],
    )
    return _jax_triton.call(
        find_tops,
        _problem.operands(inv, arrays),
        (jax.ShapeDtypeStruct((batch, heads, length), jnp.float32),) * 2,
        scalars=(*_problem.numbers(inv), count),
        grid=(_problem.blocks(length, cut.q_block) * batch * heads,),
        constants={
            **_problem.constants(inv),
            **_problem.of_sinks(inv),
            "SEGMENTS": 0 if ids is None else 1 << (count - 1).bit_length(),
            "FAR": FAR,
            "Q_BLOCK": cut.q_block,
            "K_BLOCK": cut.k_block,
        },
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        compute_capability=capability(inv),
        name="flash_attention_bwd_find_tops",
    )


def of_queries(inv: Invocation, rows: Rows, cut: Pass) -> jax.Array:
    """The gradient of queries."""
    with _jax_triton.importing():
        from ejkernel_triton.flash_attention._backward import sum_over_keys

    query = inv["query"]
    batch, length, heads, _ = query.shape
    count = _problem.blocks(inv["key"].shape[1], cut.k_block)
    ids = inv["kv_segment_ids"]
    found = _launch(
        sum_over_keys,
        inv,
        rows,
        cut,
        extremes=None if ids is None else _problem.extremes(ids, cut.k_block),
        count=count,
        intervals=_problem.intervals(inv)[:2] if inv["cum_seqlens_q"] is not None else (None, None),
        outputs=(jax.ShapeDtypeStruct(query.shape, query.dtype),),
        grid=(_problem.blocks(length, cut.q_block) * batch * heads,),
    )
    return found[0]


def _over_queries(inv: Invocation, rows: Rows, cut: Pass, atomics: bool) -> tuple[jax.Array, ...]:
    """The gradients of keys and values, and by atomics of queries."""
    with _jax_triton.importing():
        from ejkernel_triton.flash_attention._backward import sum_over_queries

    key, value = inv["key"], inv["value"]
    batch, length, kv_heads, _ = key.shape
    count = _problem.blocks(inv["query"].shape[1], cut.q_block)
    ids = inv["q_segment_ids"]
    query = jax.ShapeDtypeStruct(inv["query"].shape if atomics else (1,), jnp.float32)
    found = _launch(
        sum_over_queries,
        inv,
        rows,
        cut,
        extremes=None if ids is None else _problem.extremes(ids, cut.q_block),
        count=count,
        intervals=_problem.intervals(inv)[2:] if inv["cum_seqlens_q"] is not None else (None, None),
        outputs=(jax.ShapeDtypeStruct(key.shape, key.dtype), jax.ShapeDtypeStruct(value.shape, value.dtype), query),
        zeroed=(2,) if atomics else (),
        ATOMIC=atomics,
        grid=(_problem.blocks(length, cut.k_block) * batch * kv_heads,),
        # Where matrix instructions read shared memory, recomputing an address is cheap, and registers are not.
        LEAN=_tuning.reads_shared_memory(inv),
    )
    return found if atomics else found[:2]


def _launch(
    kernel: Any,
    inv: Invocation,
    rows: Rows,
    cut: Pass,
    extremes: Any,
    count: int,
    intervals: Sequence[Any],
    outputs: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int],
    zeroed: Sequence[int] = (),
    **more: Any,
) -> tuple[jax.Array, ...]:
    arrays = (*_shared(inv, rows), extremes, *intervals, inv["dropout_seed"])
    return _jax_triton.call(
        kernel,
        _problem.operands(inv, arrays),
        outputs,
        scalars=(*_problem.numbers(inv), count),
        grid=grid,
        constants={
            **_problem.constants(inv),
            **_problem.evenness(inv, cut.q_block, cut.k_block),
            "BIAS": inv["bias"] is not None,
            "SEGMENTS": 1 << (count - 1).bit_length() if extremes is not None else 0,
            "Q_BLOCK": cut.q_block,
            "K_BLOCK": cut.k_block,
            **more,
        },
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        compute_capability=capability(inv),
        name=f"flash_attention_bwd_{kernel.__name__}",
        zeroed=zeroed,
    )


def _shared(inv: Invocation, rows: Rows) -> tuple[jax.Array | None, ...]:
    """What every pass begins with."""
    return (
        *(inv["query"], inv["key"], inv["value"], rows.d_out, rows.top, rows.shift),
        *(inv["bias"], inv["attention_mask"], inv["q_segment_ids"], inv["kv_segment_ids"]),
    )


def _bias(inv: Invocation, rows: Rows, cut: Pass) -> jax.Array:
    with _jax_triton.importing():
        from ejkernel_triton.flash_attention._backward import sum_into_bias

    bias = inv["bias"]
    batch, q_length, heads, _ = inv["query"].shape
    k_length = inv["key"].shape[1]
    b, h, q, _ = bias.shape
    of_q, of_k = int(q > 1), int(bias.shape[3] > 1)
    k = k_length if of_k else 1  # of the gradient; the rows of the bias may be longer
    if not (of_q and of_k):
        # Few programs would have all the work: a part a head is made, and added up behind.
        b, h = batch, heads
    q_blocks, k_blocks = _problem.blocks(q_length, cut.q_block), _problem.blocks(k_length, cut.k_block)
    intervals = _problem.intervals(inv)[:2] if inv["cum_seqlens_q"] is not None else (None, None)
    arrays = (*_shared(inv, rows), *intervals, inv["dropout_seed"])
    constants = {**_problem.constants(inv), "SEGMENTS": int(inv["q_segment_ids"] is not None)}
    (found,) = _jax_triton.call(
        sum_into_bias,
        _problem.operands(inv, arrays),
        (jax.ShapeDtypeStruct((b, h, q, k), jnp.float32),),
        scalars=(
            *_problem.numbers(inv),
            *(batch, b, h, q_blocks if of_q else 1, k_blocks if of_k else 1),
            *(h * q * k, q * k, k),
        ),
        grid=((q_blocks if of_q else 1) * (k_blocks if of_k else 1) * b * h,),
        constants={**constants, "BIAS_Q": of_q, "Q_BLOCK": cut.q_block, "K_BLOCK": cut.k_block},
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        compute_capability=capability(inv),
        name="flash_attention_bwd_bias",
    )
    over = tuple(axis for axis in (0, 1) if found.shape[axis] != bias.shape[axis])
    return found.sum(over, keepdims=True)
