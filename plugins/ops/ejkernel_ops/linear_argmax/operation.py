"""The operation ``linear_argmax``, which has no gradient."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_core import Axes, Cost, Example, Operation
from ejkernel_ops.arrays import accept
from ejkernel_ops.fused_linear_cross_entropy import operation as loss
from ejkernel_ops.fused_linear_cross_entropy.arguments import product

Arguments = dict[str, Any]
Restore = Callable[[tuple[Any, ...]], Any]


def _call(hidden, weight, *, bias=None, transpose_weight=False, logits_soft_cap=None): ...  # type: ignore[no-untyped-def]


AXES = Axes(
    {"hidden": "... hidden_dim", "weight": "hidden_dim vocab", "bias": "vocab"},
    {"token": "..."},
    independent="...",
    whole="hidden_dim vocab",
    vmap="...",
    counts="...",
    positive="hidden_dim vocab",
    dtypes={"token": jnp.int32},
    when={("transpose_weight", True): {"weight": "vocab hidden_dim"}},
)


def prepare(arguments: Arguments) -> tuple[Arguments, Restore]:
    """Check the arguments. They are constants to a derivative, so that a loss may count what is right."""
    canonical = {**arguments, **product(arguments)}
    for name in ("hidden", "weight", "bias"):
        if arguments[name] is not None:
            canonical[name] = jax.lax.stop_gradient(arguments[name])
    return canonical, lambda results: results[0]


def bucket(arguments: Mapping[str, Any]) -> Arguments:
    """The key that calls with the same tuning records share: of the cap, only whether there is one matters."""
    return {**AXES.bucket(arguments), "logits_soft_cap": bool(arguments["logits_soft_cap"])}


def cost(arguments: Mapping[str, Any]) -> Cost:
    """The product of the logits, and each array once."""
    return Cost(loss.one_product(arguments), AXES.bytes(arguments))


def _examples() -> Iterable[Example]:
    from .examples import examples

    return examples()


forward = Operation(
    name="linear_argmax",
    signature=inspect.signature(_call),
    axes=AXES,
    differentiable=(),
    prepare=prepare,
    validate=accept,
    tuning_key=bucket,
    cost=cost,
    examples=_examples,
    other_names=loss.OTHER_NAMES_OF_LOGITS,
)
