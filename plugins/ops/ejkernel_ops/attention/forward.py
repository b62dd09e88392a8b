"""The operation ``flash_attention``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ejkernel_core import Operation

from .arguments import prepare
from .bucket import bucket
from .cost import forward_cost
from .fold import fold
from .samples import samples
from .signature import SIGNATURE

ARRAYS = (
    "query",
    "key",
    "value",
    "bias",
    "attention_mask",
    "q_segment_ids",
    "kv_segment_ids",
    "cum_seqlens_q",
    "cum_seqlens_k",
    "softmax_aux",
    "dropout_seed",
)
DIFFERENTIABLE = ("query", "key", "value", "bias", "softmax_aux")
RESULTS = ("out", "lse")


def lse_dtype(dtype: Any) -> Any:
    """Log-sum-exps are float32, and float64 for float64 inputs."""
    return jnp.promote_types(dtype, jnp.float32)


def _outputs(arguments: Mapping[str, Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    query, value = arguments["query"], arguments["value"]
    batch, length, heads, _ = query.shape
    return (
        like_axes(query, (0, 1, 2, None), (batch, length, heads, value.shape[3]), value.dtype),
        like_axes(query, (0, 2, 1), (batch, heads, length), lse_dtype(query.dtype)),
    )


def like_axes(array: Any, axes: tuple[int | None, ...], shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """A result whose axes are these axes of ``array``, and sharded like them where shardings are part of the type."""
    sharding = getattr(array, "sharding", None)
    if isinstance(sharding, NamedSharding):
        spec = (*sharding.spec, *(None,) * array.ndim)
        sharding = sharding.update(spec=PartitionSpec(*(None if axis is None else spec[axis] for axis in axes)))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    return jax.ShapeDtypeStruct(shape, dtype)


def _cases() -> Iterable[Any]:
    from .cases import forward_cases

    return forward_cases()


operation = Operation(
    name="flash_attention",
    signature=SIGNATURE,
    arrays=ARRAYS,
    differentiable=DIFFERENTIABLE,
    results=RESULTS,
    prepare=prepare,
    outputs=_outputs,
    backward="flash_attention_bwd",
    fold=fold,
    tuning_key=bucket,
    samples=samples,
    cost=forward_cost,
    cases=_cases,
)
