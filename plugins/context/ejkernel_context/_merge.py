"""Results of attention to parts of the keys, as the result of attention to all of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def merge(outs: jax.Array, lses: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The out and the lse over all keys, from those of each part, as ``flash_attention(..., return_lse=True)`` returns.

    Inside ``shard_map``, ``merge(*jax.lax.all_gather((out, lse), axis, to="invarying"))`` merges those of all devices.
    Sinks belong to one part alone.

    >>> from ejkernel_ops import flash_attention
    >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 6, 2, 8))
    >>> parts = [flash_attention(query, key[:, i], value[:, i], return_lse=True) for i in (slice(0, 4), slice(4, 6))]
    >>> out, lse = merge(*map(jnp.stack, zip(*parts)))
    >>> bool(jnp.allclose(out, flash_attention(query, key, value), atol=1e-6))
    True

    Args:
      outs: (parts, batch, length, heads, head_dim).
      lses: (parts, batch, heads, length). It is -inf where a row sees no key of a part, whose ``out`` is not used then.

    Returns:
      (batch, length, heads, head_dim), in the dtype of ``outs``, and (batch, heads, length). A row that sees no key of
      any part gives 0 and -inf. Both have gradients.
    """
    for name, parts in (("outs", outs), ("lses", lses)):
        if isinstance(parts, (list, tuple)):
            raise TypeError(
                f"{name}: takes one array with the parts in front, such as jnp.stack({name}); got a sequence"
            )
    if outs.ndim != 5 or lses.shape != (*outs.shape[:2], outs.shape[3], outs.shape[2]):
        raise ValueError(
            "lses: takes (parts, batch, heads, length) for outs, (parts, batch, length, heads, head_dim); got "
            f"{lses.shape} and {outs.shape}"
        )
    is_seen = lses > -jnp.inf
    highest = jax.lax.stop_gradient(lses.max(0))
    finite = jnp.where(highest > -jnp.inf, highest, 0)
    weights = jnp.where(is_seen, jnp.exp(jnp.where(is_seen, lses, finite) - finite), 0)
    total = weights.sum(0)
    is_any = total > 0
    divisor = jnp.where(is_any, total, 1)
    shares = (weights / divisor).mT[..., None]
    terms = jnp.where(is_seen.mT[..., None], outs.astype(shares.dtype), 0) * shares
    return terms.sum(0).astype(outs.dtype), jnp.where(is_any, finite + jnp.log(divisor), -jnp.inf)
