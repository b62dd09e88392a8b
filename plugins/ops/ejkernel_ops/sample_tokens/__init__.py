"""The typed front door of ``sample_tokens``."""

from __future__ import annotations

from typing import Any, Literal, overload

import jax
from jax.typing import ArrayLike

import ejkernel_core
from ejkernel_ops.front_door import front_door


@overload
def sample_tokens(
    logits: ArrayLike,
    key: ArrayLike,
    *,
    return_logprobs: Literal[False] = False,
    temperature: ArrayLike | None = None,
    top_k: ArrayLike | None = None,
    top_p: ArrayLike | None = None,
    min_p: ArrayLike | None = None,
    backend: str | None = None,
    cfg: Any = None,
    validate: bool = False,
) -> jax.Array: ...


@overload
def sample_tokens(
    logits: ArrayLike,
    key: ArrayLike,
    *,
    return_logprobs: Literal[True],
    temperature: ArrayLike | None = None,
    top_k: ArrayLike | None = None,
    top_p: ArrayLike | None = None,
    min_p: ArrayLike | None = None,
    backend: str | None = None,
    cfg: Any = None,
    validate: bool = False,
) -> tuple[jax.Array, jax.Array]: ...


@front_door
def sample_tokens(
    logits: ArrayLike,
    key: ArrayLike,
    *,
    temperature: ArrayLike | None = None,
    top_k: ArrayLike | None = None,
    top_p: ArrayLike | None = None,
    min_p: ArrayLike | None = None,
    return_logprobs: bool = False,
    backend: str | None = None,
    cfg: Any = None,
    validate: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Draw a token for each row of logits.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> logits = jnp.array([[0.0, 9.0, 1.0], [2.0, 0.0, 2.0]])
    >>> sample_tokens(logits, jax.random.key(0), temperature=0.0)
    Array([1, 0], dtype=int32)

    The filters come in the order of the arguments: the temperature, then ``top_k``, ``top_p`` of what it keeps, and
    ``min_p``. Each number may be one for all rows, or one for each, and may be traced.

    Args:
      logits: (rows, vocabulary). NaN counts as -inf, and inf as the largest number.
      key: A key of ``jax.random``, of which row b takes ``fold_in(key, b)``, or a key for each row. The token of a row
        depends on its key, its logits and its numbers alone.
      temperature: What logits are divided by. With 0 the best token is taken, the first of equal ones.
      top_k: Only so many of the best are drawn, and those that equal the last of them. All for 0 or less.
      top_p: Only the fewest of the best are drawn whose probabilities have this sum, at least one, and those that equal
        the last of them. All for 1 or more.
      min_p: Only tokens are drawn that have this share of the best one's probability. All for 0 or less.
      return_logprobs: Return (tokens, logprobs), with the log-probability of each under the logits as they are given.
      backend: Use this kernel, or raise with the reason.
      cfg: Use this configuration (of the kernel whose ``Config`` it is).
      validate: Check that the temperature and the filters are in range.

    Returns:
      (rows,), int32; -1 for a row without a finite logit. There are no gradients.
    """
    call = {name: value for name, value in locals().items() if value is not None}
    result: jax.Array | tuple[jax.Array, jax.Array] = ejkernel_core.call("sample_tokens", **call)
    return result
