"""The operations ``flash_attention`` and ``flash_attention_bwd``, which computes the gradients of the first from its
results and their cotangents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from ejkernel_core import Axes, Operation, Partitioning, Unsupported

from .arguments import prepare
from .axes import AXES, BACKWARD, SIGNATURE
from .cost import backward_cost, forward_cost
from .fold import fold
from .other_names import OTHER_NAMES
from .samples import samples
from .values import check_values

Arguments = dict[str, Any]

DIFFERENTIABLE = ("query", "key", "value", "bias", "softmax_aux")
#: The results of the forward and their cotangents, which have no batch in a packed call.
SAVED = ("out", "lse", "d_out", "d_lse")


def bucket(axes: Axes, arguments: Mapping[str, Any]) -> Arguments:
    """The key that calls with the same tuning records share: the arguments, with every batch and length rounded up to a
    power of two, and numbers replaced by whether they have an effect.

    >>> import jax
    >>> query = jax.ShapeDtypeStruct((3, 1000, 8, 64), "float32")
    >>> bucket(AXES, {"query": query, "softmax_scale": 0.1, "logits_soft_cap": 30.0, "return_lse": True})
    {'query': ShapeDtypeStruct(shape=(4, 1024, 8, 64), dtype=float32), 'logits_soft_cap': True}
    """
    rounded = axes.bucket(arguments)
    relevant = {name: value for name, value in rounded.items() if name not in ("softmax_scale", "return_lse")}
    return {name: bool(v) if name in ("logits_soft_cap", "dropout_prob") else v for name, v in relevant.items()}


def partitioning(axes: Axes, arguments: Mapping[str, Any]) -> Partitioning:
    """The rule by which a call may be sharded. Its queries may be too, where each of them sees all keys."""
    if arguments["cum_seqlens_q"] is not None:
        raise Unsupported("the boundaries of packed sequences count tokens of the whole row")
    if arguments["dropout_prob"] > 0:
        raise Unsupported("which weights are dropped depends on their place in the whole call")
    has_places = arguments["causal"] or arguments["sliding_window"] is not None
    return axes.partitioning(arguments, () if has_places else ("q_len",))


def _examples() -> Iterable[Any]:
    from .examples import examples
    from .sizes import sizes

    return (*examples(), *sizes())


forward = Operation(
    name="flash_attention",
    signature=SIGNATURE,
    axes=AXES,
    differentiable=DIFFERENTIABLE,
    prepare=prepare,
    validate=check_values,
    backward="flash_attention_bwd",
    fold=partial(fold, AXES),
    partitioning=partial(partitioning, AXES),
    tuning_key=partial(bucket, AXES),
    samples=samples,
    cost=forward_cost,
    examples=_examples,
    other_names=OTHER_NAMES,
)


def _prepare_gradients(arguments: Arguments) -> tuple[Arguments, Callable[[tuple[Any, ...]], Any]]:
    if arguments["cum_seqlens_q"] is None:
        return forward.prepare_gradients(arguments)
    saved = {name: arguments[name] for name in SAVED if arguments[name] is not None}
    return forward.prepare_gradients({**arguments, **{name: array[None] for name, array in saved.items()}})


backward = forward.gradients(
    prepare=_prepare_gradients,
    fold=partial(fold, BACKWARD),
    partitioning=partial(partitioning, BACKWARD),
    tuning_key=partial(bucket, BACKWARD),
    cost=backward_cost,
)
