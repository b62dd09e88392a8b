"""The operation ``sample_tokens``, which has no gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_core import Axes, Cost, Example, Operation

from .arguments import prepare, validate

Arguments = dict[str, Any]

_BY_NAME = {
    "key": "rng rng_key prng_key seed seeds keys generator",
    "temperature": "temperatures temp",
    "top_k": "k topk",
    "top_p": "p topp nucleus",
    "min_p": "minp",
    "return_logprobs": "logprobs return_log_probs",
    "backend": "implementation impl platform",
}
OTHER_NAMES = {other: name for name, others in _BY_NAME.items() for other in others.split()}


def signature(  # type: ignore[no-untyped-def]
    logits,
    key,
    *,
    temperature=None,
    top_k=None,
    top_p=None,
    min_p=None,
    return_logprobs=False,
): ...


AXES = Axes(
    {
        "logits": "rows vocabulary",
        "key": "rows words",
        "temperature": "rows",
        "top_k": "rows",
        "top_p": "rows",
        "min_p": "rows",
    },
    {"token": "rows", "logprobs": "rows"},
    independent="rows",
    whole="vocabulary words",
    vmap="rows",
    counts="rows",
    rounded="rows",
    positive="vocabulary",
    dtypes={"token": lambda arguments: jnp.int32},
    statistics="logprobs",
)


def samples(arguments: Mapping[str, Any], key: Any) -> Arguments:
    """Logits as of a model, and filters that keep some of the words."""
    drawn = AXES.samples(arguments, key)
    rows = arguments["logits"].shape[0]
    given: dict[str, Callable[[], jax.Array]] = {
        "logits": lambda: 4 * jax.random.normal(key, arguments["logits"].shape),
        "key": lambda: jax.random.bits(key, (rows, 2), jnp.uint32),
        "temperature": lambda: jnp.full(rows, 0.8),
        "top_k": lambda: jnp.full(rows, 50),
        "top_p": lambda: jnp.full(rows, 0.9),
        "min_p": lambda: jnp.full(rows, 0.05),
    }
    for name, draw in given.items():
        if isinstance(arguments[name], jax.ShapeDtypeStruct):
            drawn[name] = draw().astype(arguments[name].dtype)
    return drawn


def cost(arguments: Mapping[str, Any]) -> Cost:
    """The logits are read twice: to find the least that is kept, and to draw."""
    logits = arguments["logits"]
    return Cost(0.0, 2.0 * logits.size * logits.dtype.itemsize)


def _examples() -> Iterable[Example]:
    from .examples import examples

    return examples()


forward = Operation(
    name="sample_tokens",
    signature=signature,
    axes=AXES,
    differentiable=(),
    prepare=prepare,
    validate=validate,
    samples=samples,
    cost=cost,
    examples=_examples,
    other_names=OTHER_NAMES,
)
