"""The typed front door of ``rms_norm``.

Beside it: ``operation`` with its ``axes``, ``definition`` in plain JAX, which the references and the XLA kernels share,
and ``examples``. ``layer_norm`` subtracts the mean of each row first, and uses all of this.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import jax
from jax.typing import ArrayLike

import ejkernel_core
from ejkernel_ops.front_door import front_door

#: What ``quantize`` takes.
Format = Literal["fp8_row", "int8_row", "fp8_block128"]

#: Arguments that may not be None: an explicit None is passed on, and refused.
NEVER_NONE = ("epsilon", "weight_offset", "validate")


@overload
def rms_norm(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    bias: ArrayLike | None = None,
    residual: None = None,
    epsilon: float = 1e-6,
    weight_offset: float = 0.0,
    quantize: None = None,
    backend: str | None = None,
    cfg: Any = None,
    validate: bool = False,
) -> jax.Array: ...


@overload
def rms_norm(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    bias: ArrayLike | None = None,
    residual: ArrayLike,
    epsilon: float = 1e-6,
    weight_offset: float = 0.0,
    quantize: None = None,
    backend: str | None = None,
    cfg: Any = None,
    validate: bool = False,
) -> tuple[jax.Array, jax.Array]: ...


@overload
def rms_norm(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    bias: ArrayLike | None = None,
    residual: None = None,
    epsilon: float = 1e-6,
    weight_offset: float = 0.0,
    quantize: Format,
    backend: str | None = None,
    cfg: Any = None,
    validate: bool = False,
) -> tuple[jax.Array, jax.Array]: ...


@overload
def rms_norm(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    bias: ArrayLike | None = None,
    residual: ArrayLike,
    epsilon: float = 1e-6,
    weight_offset: float = 0.0,
    quantize: Format,
    backend: str | None = None,
    cfg: Any = None,
    validate: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]: ...


@front_door
def rms_norm(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    bias: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    epsilon: float = 1e-6,
    weight_offset: float = 0.0,
    quantize: Format | None = None,
    backend: str | None = None,
    cfg: Any = None,
    validate: bool = False,
) -> jax.Array | tuple[jax.Array, ...]:
    """Root mean square normalization of the last axis, by the best installed kernel for the device at hand.

    ``x / sqrt(mean(x ** 2) + epsilon) * (weight + weight_offset) + bias``. All arithmetic is float32,
    or float64 where ``x`` or the residual has it; the result is rounded once.

    >>> import jax, jax.numpy as jnp
    >>> x = jax.random.normal(jax.random.key(0), (2, 100, 64), jnp.bfloat16)
    >>> rms_norm(x, jnp.ones(64)).shape
    (2, 100, 64)

    With a residual the sum of both is normalized and returned too, as each block of a transformer needs it:

    >>> y, total = rms_norm(x, jnp.ones(64), residual=jnp.ones_like(x))
    >>> bool((total == x + 1).all())
    True

    With ``quantize`` the result is in 8 bits, for a matrix product in 8 bits, with one scale for each row or for each
    128 entries of a row:

    >>> values, scales = rms_norm(x, jnp.ones(64), quantize="int8_row")
    >>> values.dtype, values.shape, scales.shape
    (dtype('int8'), (2, 100, 64), (2, 100, 1))

    Args:
      x: (..., dim): any number of leading axes, of any length.
      weight: (dim,); by default ones.
      bias: (dim,); by default zeros.
      residual: Like ``x``, of any floating dtype; added before normalizing. The sum is rounded to its dtype, and the
        rounded sum is normalized.
      epsilon: Added to the mean of the squares.
      weight_offset: Added to the weight: 1.0 for models that store the weight minus one.
      quantize: "fp8_row" or "int8_row", with a scale for each row; "fp8_block128", with one for each 128 entries. A
        scale is the largest magnitude it covers, over 448 (float8_e4m3fn) or 127 (int8); it is 1 where all are 0.
        Without gradients.
      backend: Use this kernel, or raise with the reason.
      cfg: Use this configuration (of the kernel whose ``Config`` it is).
      validate: Accepted, as by every operation; all values are valid.

    Returns:
      The result, in the shape and dtype of ``x``. With ``residual`` a pair of it and ``x + residual``. With
      ``quantize`` the values and the scales, (..., 1) or (..., dim / 128 rounded up) in float32, followed by the sum if
      there is one. The result, ``x`` and the arrays of the gradients are differentiable.
    """
    results: jax.Array | tuple[jax.Array, ...] = call("rms_norm", locals())
    return results


def call(name: str, arguments: dict[str, Any]) -> Any:
    """Call the operation, or its quantized form, with the arguments of its front door."""
    present = {key: value for key, value in arguments.items() if value is not None or key in NEVER_NONE}
    return ejkernel_core.call(f"{name}_quantized" if "quantize" in present else name, **present)
