"""The operation ``flash_attention``."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from ejkernel_core import Operation

from .arguments import prepare
from .axes import AXES
from .bucket import bucket
from .cost import forward_cost
from .fold import fold
from .samples import samples
from .signature import SIGNATURE
from .values import check_values

DIFFERENTIABLE = ("query", "key", "value", "bias", "softmax_aux")


def _cases() -> Iterable[Any]:
    from .cases import forward_cases

    return forward_cases()


operation = Operation(
    name="flash_attention",
    signature=SIGNATURE,
    axes=AXES,
    differentiable=DIFFERENTIABLE,
    prepare=prepare,
    validate=check_values,
    backward="flash_attention_bwd",
    fold=partial(fold, AXES),
    tuning_key=partial(bucket, AXES),
    samples=samples,
    cost=forward_cost,
    cases=_cases,
)
