"""The operations ``moe_permute`` and ``moe_permute_bwd``."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax.numpy as jnp

from ejkernel_core import Axes, Example, Operation
from ejkernel_ops.arrays import check_floats
from ejkernel_ops.options import brief, type_and_value

from .order import check_order, check_permutation, samples

Arguments = dict[str, Any]
Restore = Callable[[tuple[Any, ...]], Any]


def _call(x, token_order, k): ...  # type: ignore[no-untyped-def]


AXES = Axes(
    {"x": "tokens dim", "token_order": "rows"},
    {"out": "rows dim"},
    independent="dim",
    whole="tokens rows",
    counts="tokens rows",
)
OTHER_NAMES = {
    **dict.fromkeys(("tokens", "hidden_states", "inputs"), "x"),
    **dict.fromkeys(("sort_indices", "sorted_indices", "permutation", "indices"), "token_order"),
    **dict.fromkeys(("topk", "top_k"), "k"),
}


def prepare(arguments: Arguments) -> tuple[Arguments, Restore]:
    """Check the arguments."""
    x, order, k = (arguments[name] for name in ("x", "token_order", "k"))
    check_floats("x", x)
    check_order(order)
    if isinstance(k, bool) or not isinstance(k, numbers.Integral):
        raise TypeError(f"k: takes an int, known while tracing; got {type_and_value(k)}")
    if k < 1:
        raise ValueError(f"k: must be at least 1; got {brief(k)}")
    if x.ndim == 2 and order.shape != (x.shape[0] * k,):
        raise ValueError(
            f"token_order: takes {k} places for each of the {x.shape[0]} tokens, ({x.shape[0] * k},); "
            f"got shape {order.shape}"
        )
    return {**arguments, "token_order": order.astype(jnp.int32), "k": int(k)}, lambda results: results[0]


def _examples() -> Iterable[Example]:
    from .examples import permute_examples

    return permute_examples()


forward = Operation(
    name="moe_permute",
    signature=_call,
    axes=AXES,
    differentiable=("x",),
    prepare=prepare,
    validate=check_permutation,
    backward="moe_permute_bwd",
    samples=partial(samples, AXES),
    examples=_examples,
    other_names=OTHER_NAMES,
)
backward = forward.gradients()
