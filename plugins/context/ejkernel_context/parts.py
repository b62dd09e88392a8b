"""Attention of some queries to some keys, by the best kernel of ``flash_attention`` here, and how parts are merged."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp

from ejkernel_core import Invocation

#: What every part has of the call.
OPTIONS = ("softmax_scale", "logits_soft_cap")


@attrs.frozen(eq=False)
class Part:
    """The results for some queries and some keys, in float32 or better. The lse is (batch, length, heads, 1)."""

    out: jax.Array
    lse: jax.Array

    @classmethod
    def of(cls, results: tuple[jax.Array, jax.Array]) -> Part:
        """The results of a call."""
        out, lse = results
        return cls(out.astype(lse.dtype), lse.swapaxes(1, 2)[..., None])

    def where(self, condition: Any) -> Part:
        """The part where the condition holds, else one that has seen no keys."""
        return Part(self.out, jnp.where(condition, self.lse, -jnp.inf))

    def results(self, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """The results as a kernel returns them."""
        return self.out.astype(dtype), self.lse[..., 0].swapaxes(1, 2)


def attention(inv: Invocation, **arguments: Any) -> tuple[jax.Array, jax.Array]:
    """The out and the lse of a call of ``flash_attention``, with the options of ``inv``."""
    options = {name: inv[name] for name in OPTIONS if inv[name] is not None}
    out, lse = inv.call("flash_attention", **options, **_given(arguments), return_lse=True)
    return out, lse


def gradients(inv: Invocation, wrt: Sequence[str], **arguments: Any) -> dict[str, jax.Array]:
    """The gradients of a call of ``flash_attention`` by name, in float32 or better."""
    if not wrt:
        return {}
    results = inv.call("flash_attention_bwd", **gradient_call(inv, wrt, **arguments))
    return {name: wide(gradient) for name, gradient in zip(wrt, results, strict=True)}


def gradient_call(inv: Mapping[str, Any], wrt: Sequence[str], **arguments: Any) -> dict[str, Any]:
    """The arguments of that call."""
    options = {name: inv[name] for name in OPTIONS if inv[name] is not None}
    return {**options, **_given(arguments), "wrt": tuple(wrt), "return_lse": True}


def _given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}


def wide(array: jax.Array) -> jax.Array:
    """The array in the dtype of sums."""
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def plain_attention(inv: Invocation) -> tuple[jax.Array, jax.Array]:
    """The results where the sequence is on one device."""
    names = ("query", "key", "value", "q_segment_ids", "kv_segment_ids", "softmax_aux", "causal", "sliding_window")
    return attention(inv, **{name: inv[name] for name in names})


def plain_gradients(inv: Invocation) -> tuple[jax.Array, ...]:
    """The gradients where the sequence is on one device."""
    names = ("query", "key", "value", "q_segment_ids", "kv_segment_ids", "softmax_aux", "causal", "sliding_window")
    results = ("out", "lse", "d_out", "d_lse")
    return in_order(inv, gradients(inv, inv["wrt"], **{name: inv[name] for name in (*names, *results)}))


def in_order(inv: Invocation, by_name: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
    """The gradients as a kernel returns them: those of ``wrt``, in the dtypes of the arrays."""
    return tuple(by_name[name].astype(inv[name].dtype) for name in inv["wrt"])


def merged(*parts: Part) -> Part:
    """The results for the keys of all parts. A row that has seen no key in any has an lse of -inf."""
    lse = functools.reduce(jnp.logaddexp, (part.lse for part in parts))
    finite = jnp.where(jnp.isneginf(lse), 0, lse)
    # A part that a row has not seen has no weight there, even if its numbers are infinite.
    terms = (jnp.where(jnp.isneginf(part.lse), 0, part.out * jnp.exp(part.lse - finite)) for part in parts)
    return Part(functools.reduce(jnp.add, terms), lse)


def with_sinks(part: Part, sinks: jax.Array | None) -> Part:
    """The results with sinks, (heads, n), in the softmax."""
    if sinks is None:
        return part
    of_heads = jax.nn.logsumexp(sinks.astype(part.lse.dtype), axis=-1)
    lse = jnp.broadcast_to(of_heads[:, None], part.lse.shape)
    return merged(part, Part(jnp.zeros_like(part.out), lse))


def sink_gradients(inv: Invocation) -> jax.Array:
    """The gradient of the sinks, summed over the rows of this device."""
    lse = inv["lse"]
    delta = jnp.zeros_like(lse)
    if inv["d_out"] is not None:
        delta = jnp.einsum("bthe,bthe->bht", inv["d_out"].astype(lse.dtype), inv["out"].astype(lse.dtype))
    if inv["d_lse"] is not None:
        delta = delta - inv["d_lse"]
    sinks = inv["softmax_aux"].astype(lse.dtype)
    finite = jnp.where(jnp.isneginf(lse), 0, lse)
    weights = jnp.exp(sinks[:, :, None, None] - finite.swapaxes(0, 1)[:, None])
    return -(weights * delta.swapaxes(0, 1)[:, None]).sum((2, 3))


def apart(*arrays: Any) -> Any:
    """The arrays, of which XLA does not know that the forward has them too.

    Otherwise it would reuse in the backward what the forward has received from other devices, and keep that until then.
    """
    return jax.lax.optimization_barrier(arrays)
