"""The operations ``moe_route`` and ``moe_route_bwd``, which computes the gradient of the logits."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_core import Cost, Example, Operation, gradient_signature
from ejkernel_ops.arrays import accept, check_floats
from ejkernel_ops.options import brief, finite, integer, type_and_value

Arguments = dict[str, Any]
Restore = Callable[[tuple[Any, ...]], Any]

SCORES = ("softmax", "sigmoid", "softmax_after")
RESULTS = ("weights", "experts", "group_sizes", "token_order")
#: What other libraries call the arguments, for the error of an unknown argument.
OTHER_NAMES = {
    **dict.fromkeys(("logits", "gating_output", "gate_logits", "router_scores"), "router_logits"),
    **dict.fromkeys(("topk", "top_k", "num_experts_per_tok"), "k"),
    **dict.fromkeys(("scoring_func", "score_function", "score_func"), "score"),
    **dict.fromkeys(("e_score_correction_bias", "correction_bias", "bias"), "expert_bias"),
    **dict.fromkeys(("n_group", "num_expert_group", "n_groups"), "num_groups"),
    **dict.fromkeys(("topk_group", "topk_groups"), "group_topk"),
    **dict.fromkeys(("norm_topk_prob", "normalize"), "renormalize"),
    **dict.fromkeys(("routed_scaling_factor", "scale"), "scaling_factor"),
    **dict.fromkeys(("implementation", "impl", "platform"), "backend"),
}


def _call(  # type: ignore[no-untyped-def]
    router_logits,
    k,
    *,
    score="softmax",
    expert_bias=None,
    num_groups=None,
    group_topk=None,
    renormalize=True,
    scaling_factor=1.0,
): ...


SIGNATURE = inspect.signature(_call)


# -- checks ----------------------------------------------------------------------------------------------------------


def prepare(arguments: Arguments) -> tuple[Arguments, Restore]:
    """Check the arguments."""
    logits, bias = arguments["router_logits"], arguments["expert_bias"]
    for name, array in (("router_logits", logits), ("expert_bias", bias)):
        if array is not None:
            check_floats(name, array)
    if logits.ndim != 2:
        raise ValueError(f"router_logits: takes (tokens, experts); got shape {logits.shape}")
    experts = logits.shape[1]
    if bias is not None and bias.shape != (experts,):
        raise ValueError(f"expert_bias: takes one number for each of the {experts} experts; got shape {bias.shape}")
    if arguments["score"] not in SCORES:
        raise ValueError(f"score: takes {', '.join(map(repr, SCORES))}; got {brief(arguments['score'])}")
    if not isinstance(arguments["renormalize"], bool):
        raise TypeError(f"renormalize: takes True or False; got {type_and_value(arguments['renormalize'])}")
    k = integer("k", arguments["k"], experts, "the number of experts")
    options = {"k": k, "scaling_factor": finite("scaling_factor", arguments["scaling_factor"], logits.dtype)}
    return {**arguments, **options, **_groups(arguments, experts, k)}, lambda results: tuple(results)


def _groups(arguments: Arguments, experts: int, k: int) -> Arguments:
    count, chosen = arguments["num_groups"], arguments["group_topk"]
    if count is None and chosen is None:
        return {}
    if count is None or chosen is None:
        missing = "num_groups" if count is None else "group_topk"
        raise ValueError(f"{missing}: num_groups and group_topk must be passed together")
    count = integer("num_groups", count, experts, "the number of experts")
    if experts % count:
        raise ValueError(f"num_groups: takes a divisor of the number of experts, {experts}; got {count}")
    chosen = integer("group_topk", chosen, count, "num_groups")
    if k > chosen * (experts // count):
        raise ValueError(
            f"k: {chosen} groups of {experts // count} experts have {chosen * (experts // count)} to choose; got {k}"
        )
    return {"num_groups": count, "group_topk": chosen}


def prepare_gradients(arguments: Arguments) -> tuple[Arguments, Restore]:
    """Check the arguments of the backward operation, whose results have the shapes of the arrays."""
    canonical, _ = prepare(arguments)
    for name, declared in zip(RESULTS, outputs(canonical), strict=True):
        for array in (arguments[name], arguments[f"d_{name}"]):
            if array is not None and array.shape != declared.shape:
                raise ValueError(f"{name}: takes the forward's shape {declared.shape}; got {array.shape}")
    return canonical, lambda gradients: tuple(gradients)


# -- results, tuning and cost ------------------------------------------------------------------------------------------


def outputs(arguments: Mapping[str, Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The shapes and dtypes of the results."""
    (tokens, experts), k = arguments["router_logits"].shape, arguments["k"]
    dtype = np.promote_types(arguments["router_logits"].dtype, np.float32)  # JAX's own fails under strict promotion
    shapes = ((tokens, k), (tokens, k), (experts,), (tokens * k,))
    dtypes = (dtype, jnp.int32, jnp.int32, jnp.int32)
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True))


def bucket(arguments: Mapping[str, Any]) -> Arguments:
    """The arguments as tuning distinguishes them: the number of tokens is rounded up to a power of two."""
    logits = arguments["router_logits"]
    tokens, experts = logits.shape
    rounded = jax.ShapeDtypeStruct((1 << max(tokens - 1, 0).bit_length(), experts), logits.dtype)
    names = ("k", "score", "expert_bias", "num_groups", "group_topk")
    return {"router_logits": rounded, **{name: arguments[name] for name in names}}


def cost(arguments: Mapping[str, Any]) -> Cost:
    """The logits are read, and the results written."""
    arrays = (arguments["router_logits"], *outputs(arguments))
    return Cost(0.0, float(sum(array.size * array.dtype.itemsize for array in arrays)))


def _examples() -> Iterable[Example]:
    from .examples import examples

    return examples()


forward = Operation(
    name="moe_route",
    signature=SIGNATURE,
    arrays=("router_logits", "expert_bias"),
    differentiable=("router_logits", "expert_bias"),
    results=RESULTS,
    prepare=prepare,
    validate=accept,
    outputs=outputs,
    backward="moe_route_bwd",
    tuning_key=bucket,
    cost=cost,
    examples=_examples,
    other_names=OTHER_NAMES,
)
_SAVED = (*RESULTS, *(f"d_{name}" for name in RESULTS))
backward = Operation(
    name="moe_route_bwd",
    signature=gradient_signature(SIGNATURE, RESULTS),
    arrays=("router_logits", "expert_bias", *_SAVED),
    differentiable=("router_logits", "expert_bias", "weights", "d_weights"),
    results=("gradients",),
    prepare=prepare_gradients,
    validate=accept,
    outputs=lambda arguments: tuple(
        jax.ShapeDtypeStruct(arguments[name].shape, arguments[name].dtype) for name in arguments["wrt"]
    ),
    tuning_key=None,
    cost=cost,
)
