"""The typed front door of the most probable token, without logits in memory. Beside it: ``operation`` with its axes and
checks, the reference and ``examples``.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.typing import ArrayLike

import ejkernel_core
from ejkernel_ops.front_door import front_door

#: Arguments that may not be None: an explicit None is passed on, and refused.
NEVER_NONE = ("transpose_weight", "validate")


@front_door
def linear_argmax(
    hidden: ArrayLike,
    weight: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    transpose_weight: bool = False,
    logits_soft_cap: float | None = None,
    backend: str | None = None,
    cfg: Any = None,
    validate: bool = False,
) -> jax.Array:
    """The column of the largest logit of ``hidden @ weight + bias``, the lowest of several: greedy decoding, and the
    accuracy of a model, whose logits are never whole in memory.

    >>> import jax, jax.numpy as jnp
    >>> hidden = jax.random.normal(jax.random.key(0), (2, 50, 64))
    >>> weight = jax.random.normal(jax.random.key(1), (64, 1000))
    >>> bool((linear_argmax(hidden, weight) == jnp.argmax(hidden @ weight, -1)).mean() > 0.95)
    True

    Args:
      hidden: (..., hidden_dim): any number of leading axes.
      weight: (hidden_dim, vocab), or (vocab, hidden_dim) with ``transpose_weight``; in the dtype of ``hidden``.
      bias: (vocab,), added to the logits.
      transpose_weight: Whether ``weight`` is (vocab, hidden_dim).
      logits_soft_cap: The logits become ``cap * tanh(logits / cap)``, by which logits far above the cap are equal.
      backend: Use this kernel, or raise with the reason.
      cfg: Use this configuration (of the kernel whose ``Config`` it is).
      validate: Accepted, as by every operation; all values are valid.

    Returns:
      int32 (...), without gradient. NaN is the largest of all, as in ``jax.numpy.argmax``.
    """
    call = {name: value for name, value in locals().items() if value is not None or name in NEVER_NONE}
    result: jax.Array = ejkernel_core.call("linear_argmax", **call)
    return result
