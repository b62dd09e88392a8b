"""The typed front door of ``context_attention``."""

from __future__ import annotations

from typing import Any, Literal, overload

import jax
from jax.typing import ArrayLike

import ejkernel_core
from ejkernel_ops.front_door import front_door

from .arguments import NOT_HERE
from .mesh import axis_names, is_manual
from .on_mesh import call_on_mesh
from .operation import forward

#: Why an argument of attention is not one of this operation.
REASONS = {
    **dict.fromkeys(("bias", "attention_mask"), "it has a column for each key of the whole sequence"),
    **dict.fromkeys(("cum_seqlens_q", "cum_seqlens_k"), "boundaries are of the whole sequence: use segment ids"),
    **dict.fromkeys(
        ("q_start", "kv_lengths", "kv_positions"), "its queries and keys are all of one sequence, in order"
    ),
    **dict.fromkeys(("dropout_prob", "dropout_seed"), "what is dropped depends on places in the whole sequence"),
}


@overload
def context_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    axis: str | tuple[str, ...],
    layout: str = "zigzag",
    causal: bool = False,
    q_segment_ids: ArrayLike | None = None,
    kv_segment_ids: ArrayLike | None = None,
    softmax_aux: ArrayLike | None = None,
    softmax_scale: float | None = None,
    sliding_window: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    return_lse: Literal[False] = False,
    mesh: Any = None,
    spec: Any = None,
    backend: str | None = None,
    cfg: Any = None,
) -> jax.Array: ...


@overload
def context_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    axis: str | tuple[str, ...],
    layout: str = "zigzag",
    causal: bool = False,
    q_segment_ids: ArrayLike | None = None,
    kv_segment_ids: ArrayLike | None = None,
    softmax_aux: ArrayLike | None = None,
    softmax_scale: float | None = None,
    sliding_window: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    return_lse: Literal[True],
    mesh: Any = None,
    spec: Any = None,
    backend: str | None = None,
    cfg: Any = None,
) -> tuple[jax.Array, jax.Array]: ...


@overload
def context_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    axis: str | tuple[str, ...],
    layout: str = "zigzag",
    causal: bool = False,
    q_segment_ids: ArrayLike | None = None,
    kv_segment_ids: ArrayLike | None = None,
    softmax_aux: ArrayLike | None = None,
    softmax_scale: float | None = None,
    sliding_window: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    return_lse: bool,
    mesh: Any = None,
    spec: Any = None,
    backend: str | None = None,
    cfg: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


@front_door
def context_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    axis: str | tuple[str, ...],
    layout: str = "zigzag",
    causal: bool = False,
    q_segment_ids: ArrayLike | None = None,
    kv_segment_ids: ArrayLike | None = None,
    softmax_aux: ArrayLike | None = None,
    softmax_scale: float | None = None,
    sliding_window: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    return_lse: bool = False,
    mesh: Any = None,
    spec: Any = None,
    backend: str | None = None,
    cfg: Any = None,
    **others: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Softmax attention over a sequence that is sharded over the mesh axis ``axis``.

    It is called inside ``shard_map`` on the shards of this device. Outside of it, on arrays on a mesh, it makes the
    ``shard_map`` itself.

    >>> import jax
    >>> from ejkernel_context import zigzag
    >>> mesh = jax.make_mesh((1,), ("seq",))
    >>> query, key, value = zigzag(jax.random.normal(jax.random.key(0), (3, 2, 128, 4, 64)), "seq", mesh=mesh, dim=2)
    >>> context_attention(query, key, value, axis="seq", causal=True).shape
    (2, 128, 4, 64)

    Args:
      query: (batch, local length, heads, head_dim).
      key: (batch, local length, kv heads, head_dim).
      value: Like ``key``; its head_dim may be another one.
      axis: The name of the mesh axis over which the sequence is sharded, or a tuple of names.
      layout: "zigzag", the order of ``zigzag``, or "contiguous".
      causal: A query sees no key after its own in the sequence.
      q_segment_ids, kv_segment_ids: Integers (batch, local length): tokens see each other where their ids are equal
        and above 0.
      softmax_aux: Sink logits, (heads,) or (heads, n), the same on all devices of the axis. The gradient of a device is
        its part of the sum.
      softmax_scale: Default ``head_dim ** -0.5``.
      sliding_window: (left, right): how many keys before and after its own a query sees; an int is both.
      logits_soft_cap: Bound of the logits.
      return_lse: Also return the log-sum-exp of each row, (batch, heads, local length), over the whole sequence.
      mesh: Outside of ``shard_map``, the mesh with the axis. By default that of the arrays, or of ``jax.set_mesh``.
      spec: Outside of ``shard_map``, how the query is sharded: its batch and heads. By default as its array is, or its
        type says.
      backend: Use this kernel, "gather", "ulysses" or "ring", or raise with the reason.
      cfg: Use this configuration (of the kernel whose ``Config`` it is).

    Returns:
      (batch, local length, heads, value's head_dim), in the inputs' dtype; with ``return_lse`` a pair.
    """
    _refuse(others)
    arguments = {
        "query": query,
        "key": key,
        "value": value,
        "q_segment_ids": q_segment_ids,
        "kv_segment_ids": kv_segment_ids,
        "softmax_aux": softmax_aux,
        "softmax_scale": softmax_scale,
        "sliding_window": sliding_window,
        "logits_soft_cap": logits_soft_cap,
        "backend": backend,
        "cfg": cfg,
    }
    given = {name: argument for name, argument in arguments.items() if argument is not None}
    given |= {"axis": axis, "layout": layout, "causal": causal, "return_lse": return_lse}
    if is_manual(axis_names(axis)):
        if mesh is not None or spec is not None:
            raise TypeError("mesh, spec: take None inside shard_map, which has both")
        inside: jax.Array | tuple[jax.Array, jax.Array] = ejkernel_core.call("context_attention", **given)
        return inside
    outside: jax.Array | tuple[jax.Array, jax.Array] = call_on_mesh(given, mesh, spec)
    return outside


def _refuse(others: dict[str, Any]) -> None:
    """Raise for arguments that this operation does not have, with the reason."""
    for name, value in others.items():
        if name not in NOT_HERE:
            # It raises for the name, with the most similar one.
            forward.bind((None, None, None), {"axis": None, name: value})
        if value is not None and not (name == "dropout_prob" and value == 0.0):
            raise TypeError(f"{name}: flash_attention takes it, and context_attention does not: {REASONS[name]}")
