"""The operations ``fused_linear_cross_entropy``, the loss of each row, and ``fused_linear_cross_entropy_sum``, that of
all rows, which makes the gradients in the forward. Each has an operation for its gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from ejkernel_core import Axes, Cost, Example, Operation, gradient_signature

from . import axes
from .arguments import prepare, prepare_sum
from .axes import AXES, BACKWARD, DIFFERENTIABLE, SUM_AXES, SUM_BACKWARD
from .definition import rows, vocab
from .samples import samples
from .values import validate

Arguments = Mapping[str, Any]

#: What other libraries call the arguments, for the error of an unknown argument: those of the logits, and all.
OTHER_NAMES_OF_LOGITS = {
    **dict.fromkeys(("x", "input", "_input", "hidden_states", "embeddings", "e"), "hidden"),
    **dict.fromkeys(("w", "kernel", "lm_head", "lin_weight", "c", "weights"), "weight"),
    **dict.fromkeys(("softcap", "logit_soft_cap", "soft_cap", "logits_soft_cap_value"), "logits_soft_cap"),
    **dict.fromkeys(("implementation", "impl", "platform"), "backend"),
}
OTHER_NAMES = {
    **OTHER_NAMES_OF_LOGITS,
    **dict.fromkeys(("target", "targets", "y"), "labels"),
    **dict.fromkeys(("lse_square_scale", "z_loss_multiplier", "logsumexp_weight"), "z_loss"),
    **dict.fromkeys(("loss_weights", "sample_weight"), "token_weights"),
}


# -- tuning and cost ---------------------------------------------------------------------------------------------------


def bucket(op_axes: Axes, arguments: Arguments) -> dict[str, Any]:
    """The key that calls with the same tuning records share: of the numbers, only whether they are 0 matters.

    >>> import jax
    >>> array = jax.ShapeDtypeStruct((1000, 64), "float32")
    >>> arrays = {"hidden": array, "weight": jax.ShapeDtypeStruct((64, 99), "float32"), "labels": None}
    >>> options = {"ignore_index": -100, "z_loss": 1e-4, "label_smoothing": 0.0, "logits_soft_cap": 30.0}
    >>> bucket(AXES, {**arrays, **options})["z_loss"]
    True
    """
    rounded = op_axes.bucket(arguments)
    relevant = {name: value for name, value in rounded.items() if name != "ignore_index"}
    return {**relevant, **{name: bool(arguments[name]) for name in ("z_loss", "label_smoothing", "logits_soft_cap")}}


def one_product(arguments: Arguments) -> float:
    """The operations of one product of all rows."""
    return 2.0 * rows(arguments) * int(arguments["hidden"].shape[-1]) * vocab(arguments)


def cost(arguments: Arguments) -> Cost:
    """The product of the logits, and each array once."""
    return Cost(one_product(arguments), AXES.bytes(arguments))


def backward_cost(arguments: Arguments) -> Cost:
    """The logits again, and a product for each gradient of a matrix."""
    products = 1 + len({"hidden", "weight"} & {*arguments["wrt"]})
    return Cost(products * one_product(arguments), BACKWARD.bytes(arguments))


def sum_cost(arguments: Arguments) -> Cost:
    """The logits, and the products of both gradients."""
    return Cost(3 * one_product(arguments), SUM_AXES.bytes(arguments))


def sum_backward_cost(arguments: Arguments) -> Cost:
    """The gradients of the forward are read, and those of the arrays written."""
    read = sum(arguments[name].size * 4.0 for name, array in axes.GRADIENTS.items() if array in arguments["wrt"])
    return Cost(0.0, read + sum(out.size * out.dtype.itemsize for out in SUM_BACKWARD.outputs(arguments)))


# -- the operations ----------------------------------------------------------------------------------------------------


def _examples(kind: str) -> Iterable[Example]:
    from . import examples

    return getattr(examples, kind)()  # type: ignore[no-any-return]


def _signature_of_gradients(signature: inspect.Signature, results: Iterable[str]) -> inspect.Signature:
    """That of a backward operation, with the names of the gradients that are partial sums."""
    derived = gradient_signature(signature, results)
    partial_sums = inspect.Parameter("partial_sums", inspect.Parameter.KEYWORD_ONLY, default=None)
    return derived.replace(parameters=[*derived.parameters.values(), partial_sums])


def _with_backward(forward: Operation, **fields: Any) -> Operation:
    signature = _signature_of_gradients(forward.signature, forward.results)
    return forward.gradients(signature=signature, **fields)


COMMON: dict[str, Any] = {"validate": validate, "samples": samples, "other_names": OTHER_NAMES}

forward = Operation(
    name="fused_linear_cross_entropy",
    signature=axes.SIGNATURE,
    axes=AXES,
    differentiable=DIFFERENTIABLE,
    prepare=prepare,
    backward="fused_linear_cross_entropy_bwd",
    tuning_key=partial(bucket, AXES),
    cost=cost,
    examples=partial(_examples, "examples"),
    **COMMON,
)
backward = _with_backward(
    forward,
    tuning_key=partial(bucket, BACKWARD),
    cost=backward_cost,
    partitioning=partial(axes.with_partial_sums, BACKWARD),
)
total = Operation(
    name="fused_linear_cross_entropy_sum",
    signature=axes.SUM_SIGNATURE,
    axes=SUM_AXES,
    differentiable=DIFFERENTIABLE,
    prepare=prepare_sum,
    backward="fused_linear_cross_entropy_sum_bwd",
    tuning_key=partial(bucket, SUM_AXES),
    partitioning=axes.partitioning_of_sum,
    cost=sum_cost,
    examples=partial(_examples, "sum_examples"),
    **COMMON,
)
total_backward = _with_backward(
    total,
    tuning_key=partial(bucket, SUM_BACKWARD),
    cost=sum_backward_cost,
    partitioning=axes.partitioning_of_sum_bwd,
)
