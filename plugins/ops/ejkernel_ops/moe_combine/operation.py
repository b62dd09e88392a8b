"""The operations ``moe_combine`` and ``moe_combine_bwd``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax.numpy as jnp

from ejkernel_core import Axes, Example, Operation
from ejkernel_ops.arrays import check_floats
from ejkernel_ops.moe_permute.order import check_order, check_permutation, samples

Arguments = dict[str, Any]
Restore = Callable[[tuple[Any, ...]], Any]


def _call(y, token_order, weights): ...  # type: ignore[no-untyped-def]


AXES = Axes(
    {"y": "rows dim", "token_order": "rows", "weights": "tokens k"},
    {"out": "tokens dim"},
    independent="dim",
    whole="tokens rows k",
    counts="tokens rows",
    positive="k",
)
OTHER_NAMES = {
    **dict.fromkeys(("x", "expert_out", "hidden_states"), "y"),
    **dict.fromkeys(("sort_indices", "sorted_indices", "permutation", "indices"), "token_order"),
    **dict.fromkeys(("topk_weights", "probs", "scores"), "weights"),
}


def prepare(arguments: Arguments) -> tuple[Arguments, Restore]:
    """Check the arguments."""
    order, weights = arguments["token_order"], arguments["weights"]
    for name in ("y", "weights"):
        check_floats(name, arguments[name])
    check_order(order)
    if weights.ndim == 2 and order.shape != (weights.shape[0] * weights.shape[1],):
        raise ValueError(
            f"token_order: takes a place for each of the {weights.shape[0]} x {weights.shape[1]} weights; "
            f"got shape {order.shape}"
        )
    return {**arguments, "token_order": order.astype(jnp.int32)}, lambda results: results[0]


def _examples() -> Iterable[Example]:
    from ejkernel_ops.moe_permute.examples import combine_examples

    return combine_examples()


forward = Operation(
    name="moe_combine",
    signature=_call,
    axes=AXES,
    differentiable=("y", "weights"),
    prepare=prepare,
    validate=check_permutation,
    backward="moe_combine_bwd",
    samples=partial(samples, AXES),
    examples=_examples,
    other_names=OTHER_NAMES,
)
backward = forward.gradients()
