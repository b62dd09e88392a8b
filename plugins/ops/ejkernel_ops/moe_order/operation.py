"""The operation ``moe_order``, which has no gradients: its arrays are integers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_core import Cost, Example, Operation
from ejkernel_ops.arrays import accept, check_integers
from ejkernel_ops.options import integer

Arguments = dict[str, Any]
Restore = Callable[[tuple[Any, ...]], Any]

#: The number of a place without an expert is that of the experts, an int32.
MOST_EXPERTS = 2**31 - 1
OTHER_NAMES = {
    **dict.fromkeys(("topk_ids", "topk_idx", "topk_indices", "expert_ids", "selected_experts", "indices"), "experts"),
    **dict.fromkeys(("n_experts", "num_groups", "n_routed_experts", "num_local_experts", "length"), "num_experts"),
    **dict.fromkeys(("implementation", "impl", "platform"), "backend"),
}


def _call(experts, num_experts): ...  # type: ignore[no-untyped-def]


def prepare(arguments: Arguments) -> tuple[Arguments, Restore]:
    """Check the arguments. Kernels get int32 from 0 to ``num_experts``, which is a place without an expert."""
    experts = arguments["experts"]
    check_integers("experts", experts)
    if experts.ndim != 2:
        raise ValueError(f"experts: takes (tokens, k); got shape {experts.shape}")
    count = integer("num_experts", arguments["num_experts"], MOST_EXPERTS, "the largest int32")
    return {"experts": _in_range(experts, count), "num_experts": count}, lambda results: tuple(results)


def _in_range(experts: Any, count: int) -> jax.Array:
    # An int8 cannot be compared with 300. A uint32 beyond int32 becomes negative, which is not an expert either.
    wide = experts if experts.dtype.itemsize > 4 else experts.astype(jnp.int32)
    is_expert = (wide >= 0) & (wide < count)
    return jnp.where(is_expert, wide, count).astype(jnp.int32)


def outputs(arguments: Mapping[str, Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The shapes and dtypes of the results."""
    shapes = ((arguments["num_experts"],), (arguments["experts"].size,))
    return tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)


def bucket(arguments: Mapping[str, Any]) -> Arguments:
    """The arguments as tuning distinguishes them: the number of places is rounded up to a power of two."""
    places = 1 << max(arguments["experts"].size - 1, 0).bit_length()
    return {**arguments, "experts": jax.ShapeDtypeStruct((places,), jnp.int32)}


def samples(arguments: Mapping[str, Any], key: Any) -> Arguments:
    """Experts that are equally probable."""
    experts, count = arguments["experts"], arguments["num_experts"]
    if not isinstance(experts, jax.ShapeDtypeStruct):
        return {**arguments}
    return {**arguments, "experts": jax.random.randint(key, experts.shape, 0, count, experts.dtype)}


def cost(arguments: Mapping[str, Any]) -> Cost:
    """The experts are read, and the results written."""
    arrays = (arguments["experts"], *outputs(arguments))
    return Cost(0.0, float(sum(array.size * array.dtype.itemsize for array in arrays)))


def _examples() -> Iterable[Example]:
    from .examples import examples

    return examples()


forward = Operation(
    name="moe_order",
    signature=_call,
    arrays=("experts",),
    differentiable=(),
    results=("group_sizes", "token_order"),
    prepare=prepare,
    validate=accept,
    outputs=outputs,
    tuning_key=bucket,
    samples=samples,
    cost=cost,
    examples=_examples,
    other_names=OTHER_NAMES,
)
