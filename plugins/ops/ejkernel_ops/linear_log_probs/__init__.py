"""The typed front door of the log-probabilities of given tokens, without logits in memory.

Beside it: ``operation`` with its axes and checks, ``definition`` in plain JAX, ``examples``. The logits are those of
``fused_linear_cross_entropy``.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import jax
from jax.typing import ArrayLike

import ejkernel_core
from ejkernel_ops.front_door import front_door

#: Arguments that may not be None: an explicit None is passed on, and refused.
NEVER_NONE = ("transpose_weight", "temperature", "return_entropy", "validate")


@overload
def linear_log_probs(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    transpose_weight: bool = False,
    logits_soft_cap: float | None = None,
    temperature: float = 1.0,
    return_entropy: Literal[False] = False,
    backend: str | None = None,
    cfg: Any = None,
    validate: bool = False,
) -> jax.Array: ...


@overload
def linear_log_probs(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    transpose_weight: bool = False,
    logits_soft_cap: float | None = None,
    temperature: float = 1.0,
    return_entropy: Literal[True],
    backend: str | None = None,
    cfg: Any = None,
    validate: bool = False,
) -> tuple[jax.Array, jax.Array]: ...


@front_door
def linear_log_probs(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    transpose_weight: bool = False,
    logits_soft_cap: float | None = None,
    temperature: float = 1.0,
    return_entropy: bool = False,
    backend: str | None = None,
    cfg: Any = None,
    validate: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """The log-probabilities of labels under the softmax of ``(hidden @ weight + bias) / temperature``, whose logits are
    never whole in memory.

    >>> import jax, jax.numpy as jnp
    >>> hidden = jax.random.normal(jax.random.key(0), (2, 50, 64))
    >>> weight = jax.random.normal(jax.random.key(1), (64, 1000)) / 8
    >>> labels = jax.random.randint(jax.random.key(2), (2, 50), 0, 1000)
    >>> log_probs = linear_log_probs(hidden, weight, labels)
    >>> expected = jnp.take_along_axis(jax.nn.log_softmax(hidden @ weight), labels[..., None], -1)[..., 0]
    >>> bool(jnp.allclose(log_probs, expected, atol=1e-4))
    True

    Args:
      hidden: (..., hidden_dim): any number of leading axes.
      weight: (hidden_dim, vocab), or (vocab, hidden_dim) with ``transpose_weight``; in the dtype of ``hidden``.
      labels: Integers (...): a column of ``weight``, or -100, which is ignored. Others are undefined.
      bias: (vocab,), added to the logits.
      transpose_weight: Whether ``weight`` is (vocab, hidden_dim).
      logits_soft_cap: The logits become ``cap * tanh(logits / cap)``, before they are divided.
      temperature: The logits are divided by it.
      return_entropy: Whether the entropy of each row's distribution is returned too.
      backend: Use this kernel, or raise with the reason.
      cfg: Use this configuration (of the kernel whose ``Config`` it is).
      validate: Check the values of ``labels``, outside of ``jax.jit``.

    Returns:
      The log-probabilities (...) in float32 (float64 for float64), with ``return_entropy`` followed by the entropies.
      Both are 0 where the label is ignored. ``hidden``, ``weight`` and ``bias`` are differentiable.
    """
    call = {name: value for name, value in locals().items() if value is not None or name in NEVER_NONE}
    result: jax.Array | tuple[jax.Array, jax.Array] = ejkernel_core.call("linear_log_probs", **call)
    return result
