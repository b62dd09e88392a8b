"""The operations ``linear_log_probs`` and ``linear_log_probs_bwd``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from ejkernel_core import Axes, Cost, Example, Operation, gradient_signature
from ejkernel_ops.attention_options import flag
from ejkernel_ops.fused_linear_cross_entropy import operation as loss
from ejkernel_ops.fused_linear_cross_entropy.arguments import label_array, product
from ejkernel_ops.fused_linear_cross_entropy.axes import with_partial_sums
from ejkernel_ops.fused_linear_cross_entropy.samples import samples
from ejkernel_ops.fused_linear_cross_entropy.values import validate
from ejkernel_ops.options import finite

Arguments = dict[str, Any]
Restore = Callable[[tuple[Any, ...]], Any]

#: The label of rows that do not count.
IGNORED = -100


def _call(  # type: ignore[no-untyped-def]
    hidden,
    weight,
    labels,
    *,
    bias=None,
    transpose_weight=False,
    logits_soft_cap=None,
    temperature=1.0,
    return_entropy=False,
): ...


AXES = Axes(
    {"hidden": "... hidden_dim", "weight": "hidden_dim vocab", "labels": "...", "bias": "vocab"},
    {"log_probs": "...", "entropy": "..."},
    independent="...",
    whole="hidden_dim vocab",
    vmap="...",
    counts="...",
    positive="hidden_dim vocab",
    statistics="log_probs entropy",
    residuals={"log_probs": "", "entropy": ""},
    when={("transpose_weight", True): {"weight": "vocab hidden_dim"}},
)
BACKWARD = AXES.backward()


def prepare(arguments: Arguments) -> tuple[Arguments, Restore]:
    """Check the arguments. Callers get the log-probabilities, and the entropies if they want them."""
    canonical = {**arguments, **product(arguments), "labels": label_array(arguments["labels"])}
    temperature = finite("temperature", arguments["temperature"], arguments["hidden"].dtype)
    if temperature <= 0:
        raise ValueError(f"temperature: takes a number above 0; got {temperature}")
    has_entropy = flag("return_entropy", arguments["return_entropy"])
    canonical |= {"temperature": temperature, "return_entropy": False}
    return canonical, lambda results: results if has_entropy else results[0]


def check_values(arguments: Mapping[str, Any]) -> None:
    """Raise for labels that are neither ignored nor words, for ``validate=True``."""
    validate({**arguments, "vocab_start": None, "ignore_index": IGNORED})


def bucket(op_axes: Axes, arguments: Mapping[str, Any]) -> Arguments:
    """The key that calls with the same tuning records share: of the numbers, only whether there is one matters."""
    numbers = {"temperature": arguments["temperature"] != 1.0, "logits_soft_cap": bool(arguments["logits_soft_cap"])}
    return {**op_axes.bucket(arguments), **numbers}


def cost(arguments: Mapping[str, Any]) -> Cost:
    """The product of the logits, and each array once."""
    return Cost(loss.one_product(arguments), AXES.bytes(arguments))


def backward_cost(arguments: Mapping[str, Any]) -> Cost:
    """The logits again, and a product for each gradient of a matrix."""
    products = 1 + len({"hidden", "weight"} & {*arguments["wrt"]})
    return Cost(products * loss.one_product(arguments), BACKWARD.bytes(arguments))


def _examples() -> Iterable[Example]:
    from .examples import examples

    return examples()


forward = Operation(
    name="linear_log_probs",
    signature=inspect.signature(_call),
    axes=AXES,
    differentiable=("hidden", "weight", "bias"),
    prepare=prepare,
    validate=check_values,
    backward="linear_log_probs_bwd",
    tuning_key=partial(bucket, AXES),
    samples=samples,
    cost=cost,
    examples=_examples,
    other_names={**loss.OTHER_NAMES_OF_LOGITS, **dict.fromkeys(("tokens", "target", "targets"), "labels")},
)
_DERIVED = gradient_signature(forward.signature, forward.results)
_PARTIAL_SUMS = inspect.Parameter("partial_sums", inspect.Parameter.KEYWORD_ONLY, default=None)
backward = forward.gradients(
    signature=_DERIVED.replace(parameters=[*_DERIVED.parameters.values(), _PARTIAL_SUMS]),
    tuning_key=partial(bucket, BACKWARD),
    cost=backward_cost,
    partitioning=partial(with_partial_sums, BACKWARD),
)
