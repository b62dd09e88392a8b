"""The typed front door of the loss of a language model, without its logits.

Beside it: ``operation`` with its ``axes`` and ``arguments``, ``definition`` in plain JAX, which kernels in plain JAX
share, ``examples`` and ``random_calls``.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import jax
from jax.typing import ArrayLike

import ejkernel_core
from ejkernel_ops.front_door import front_door
from ejkernel_ops.options import brief

Reduction = Literal["mean", "sum", "none"]

#: Arguments that may not be None: an explicit None is passed on, and refused.
NEVER_NONE = ("transpose_weight", "ignore_index", "z_loss", "label_smoothing", "return_lse", "validate")


@overload
def fused_linear_cross_entropy(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    transpose_weight: bool = False,
    ignore_index: int = -100,
    logits_soft_cap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    token_weights: ArrayLike | None = None,
    reduction: Reduction = "mean",
    return_lse: Literal[False] = False,
    vocab_start: ArrayLike = 0,
    backend: str | None = None,
    cfg: Any = None,
    validate: bool = False,
) -> jax.Array: ...


@overload
def fused_linear_cross_entropy(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    transpose_weight: bool = False,
    ignore_index: int = -100,
    logits_soft_cap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    token_weights: ArrayLike | None = None,
    reduction: Reduction = "mean",
    return_lse: Literal[True],
    vocab_start: ArrayLike = 0,
    backend: str | None = None,
    cfg: Any = None,
    validate: bool = False,
) -> tuple[jax.Array, jax.Array]: ...


@front_door
def fused_linear_cross_entropy(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    transpose_weight: bool = False,
    ignore_index: int = -100,
    logits_soft_cap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    token_weights: ArrayLike | None = None,
    reduction: Reduction = "mean",
    return_lse: bool = False,
    vocab_start: ArrayLike = 0,
    backend: str | None = None,
    cfg: Any = None,
    validate: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """The cross entropy of labels under the softmax of ``hidden @ weight + bias``, whose logits are never whole in
    memory.

    >>> import jax, jax.numpy as jnp
    >>> hidden = jax.random.normal(jax.random.key(0), (2, 50, 64), jnp.bfloat16)
    >>> weight = jax.random.normal(jax.random.key(1), (64, 1000), jnp.bfloat16) / 8
    >>> labels = jax.random.randint(jax.random.key(2), (2, 50), 0, 1000)
    >>> loss = fused_linear_cross_entropy(hidden, weight, labels)
    >>> logits = (hidden @ weight).astype(jnp.float32)
    >>> expected = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean()
    >>> bool(jnp.allclose(loss, expected, rtol=1e-2))
    True

    Args:
      hidden: (..., hidden_dim): any number of leading axes.
      weight: (hidden_dim, vocab), or (vocab, hidden_dim) with ``transpose_weight``, as embeddings are; in the dtype of
        ``hidden``.
      labels: Integers (...): a column of ``weight``, or ``ignore_index``. Others are undefined, unless the vocabulary
        is sharded.
      bias: (vocab,), added to the logits.
      transpose_weight: Whether ``weight`` is (vocab, hidden_dim).
      ignore_index: Rows with this label have a loss of 0 and no part in a gradient, whatever they hold.
      logits_soft_cap: The logits become ``cap * tanh(logits / cap)``.
      z_loss: Adds this times the square of the lse to each loss.
      label_smoothing: From 0, below 1: this part of the loss is that of the mean of all labels.
      token_weights: (...): the loss of each row is multiplied with it.
      reduction: "mean" over the labels that count, by their weights; "sum"; "none", the loss of each row. With "mean"
        and "sum" the gradients are made in the forward, with one product less.
      return_lse: Whether the log-sum-exp of the logits of each row is returned too.
      vocab_start: An integer: where the vocabulary is sharded, the first word of ``weight``. Labels of other shards
        have no logit here; see the page of the operation.
      backend: Use this kernel, or raise with the reason.
      cfg: Use this configuration (of the kernel whose ``Config`` it is).
      validate: Check the values of ``labels``, outside of ``jax.jit``.

    Returns:
      The loss in float32 (float64 for float64), with ``return_lse`` followed by the lse (...). ``hidden``, ``weight``,
      ``bias`` and ``token_weights`` are differentiable.
    """
    call = {name: value for name, value in locals().items() if value is not None or name in NEVER_NONE}
    if type(vocab_start) is int and vocab_start == 0:
        del call["vocab_start"]
    name = "fused_linear_cross_entropy"
    if not (isinstance(reduction, str) and reduction in ("mean", "sum", "none")):
        raise ValueError(f"{name}: reduction: takes 'mean', 'sum' or 'none'; got {brief(reduction)}")
    if reduction == "none":
        del call["reduction"]
    else:
        name = f"{name}_sum"
    result: jax.Array | tuple[jax.Array, jax.Array] = ejkernel_core.call(name, **call)
    return result
