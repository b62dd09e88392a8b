"""How the operations of the loss are called, and what the axes of their arrays mean."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from ejkernel_core import Axes

if TYPE_CHECKING:  # imported when arrays are sharded, which most programs do not need
    from ejkernel_core import PartialSums, Partitioning


def _call(  # type: ignore[no-untyped-def]
    hidden,
    weight,
    labels,
    *,
    bias=None,
    transpose_weight=False,
    ignore_index=-100,
    logits_soft_cap=None,
    z_loss=0.0,
    label_smoothing=0.0,
    token_weights=None,
    return_lse=False,
    vocab_start=None,
): ...


SIGNATURE = inspect.signature(_call)
SUM_SIGNATURE = SIGNATURE.replace(
    parameters=[
        *SIGNATURE.parameters.values(),
        inspect.Parameter("reduction", inspect.Parameter.KEYWORD_ONLY, default="sum"),
    ]
)

ARRAYS = {
    "hidden": "... hidden_dim",
    "weight": "hidden_dim vocab",
    "labels": "...",
    "bias": "vocab",
    "token_weights": "...",
    "vocab_start": "1",
}
#: What a gradient of the arrays of a product is computed from.
PRODUCT = "hidden weight bias"
DIFFERENTIABLE = ("hidden", "weight", "bias", "token_weights")

AXES = Axes(
    ARRAYS,
    {"loss": "...", "lse": "...", "row_losses": "..."},
    independent="...",
    whole="hidden_dim vocab",
    vmap="...",
    counts="...",
    positive="hidden_dim vocab",
    statistics="loss lse row_losses",
    # Those are without the weights of the tokens.
    residuals={"loss": "", "lse": PRODUCT, "row_losses": "token_weights"},
    when={("transpose_weight", True): {"weight": "vocab hidden_dim"}},
)
BACKWARD = AXES.backward()

#: By result of the sum: the array of which it is the gradient, for a cotangent of 1.
GRADIENTS = {
    "row_losses": "token_weights",
    "hidden_gradient": "hidden",
    "weight_gradient": "weight",
    "bias_gradient": "bias",
}
SUM_AXES = Axes(
    ARRAYS,
    {
        "loss": "",
        "lse": "...",
        "row_losses": "...",
        "hidden_gradient": "... hidden_dim",
        "weight_gradient": "hidden_dim vocab",
        "bias_gradient": "vocab",
    },
    independent="...",
    whole="hidden_dim vocab",
    counts="...",
    positive="hidden_dim vocab",
    statistics=("loss", "lse", *GRADIENTS),
    residuals={"loss": "", "lse": PRODUCT, **GRADIENTS},
    when={("transpose_weight", True): {"weight": "vocab hidden_dim", "weight_gradient": "vocab hidden_dim"}},
)
SUM_BACKWARD = SUM_AXES.backward()


# -- sharded rows ------------------------------------------------------------------------------------------------------


def with_partial_sums(axes: Axes, arguments: Mapping[str, Any]) -> Partitioning:
    """The rule of a backward operation whose rows may be sharded: the gradients of arrays without rows are sums over
    the shards, in float32 or wider.
    """
    rule = _with_free_rows(axes.partitioning(arguments))
    return attrs.evolve(rule, partial=_partial_sums(axes, arguments))


def partitioning_of_sum(arguments: Mapping[str, Any]) -> Partitioning:
    """The rows may be sharded, although the sum has none: it is that of the sums of the shards, and so are the
    gradients of arrays without rows. All of these results have float32 or more.
    """
    return _with_free_rows(SUM_AXES.partitioning(arguments))


def partitioning_of_sum_bwd(arguments: Mapping[str, Any]) -> Partitioning:
    """The rows may be sharded. Where the gradients are those that the forward made, times a number, each shard has all
    of those of arrays without rows.
    """
    if not is_of_sum_alone(arguments):
        return with_partial_sums(SUM_BACKWARD, arguments)
    rule = _with_free_rows(SUM_BACKWARD.partitioning(arguments))
    rows = frozenset(factor for factor in rule.sizes if factor not in rule.whole)
    # As that of a bias, which is added once: no sum over the shards. Nothing reads the arrays themselves.
    partial = _partial_sums(SUM_BACKWARD, arguments)
    return attrs.evolve(rule, partial=attrs.evolve(partial, factors=rows, added=("weight", "bias")))


def is_of_sum_alone(arguments: Mapping[str, Any]) -> bool:
    """Whether nothing but the sum has a cotangent: the gradients are then those of the forward, times a number."""
    return all(arguments[f"d_{name}"] is None for name in SUM_AXES.results if name != "loss")


def _with_free_rows(rule: Partitioning) -> Partitioning:
    return attrs.evolve(rule, whole=frozenset(factor for factor in rule.whole if not factor.startswith("...")))


def _partial_sums(axes: Axes, arguments: Mapping[str, Any]) -> PartialSums:
    from ejkernel_core import PartialSums

    dtypes = dict(zip(arguments["wrt"], (out.dtype for out in axes.outputs(arguments)), strict=True))
    return PartialSums(frozenset(), (), lambda names: {"partial_sums": names}, dtypes)
