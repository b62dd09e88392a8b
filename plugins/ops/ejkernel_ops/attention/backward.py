"""The operation ``flash_attention_bwd``: the gradients of ``flash_attention`` from its results and their cotangents."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from . import forward
from .axes import BACKWARD
from .bucket import bucket
from .cost import backward_cost
from .fold import fold
from .samples import samples

Arguments = dict[str, Any]

_SAVED = ("out", "lse", "d_out", "d_lse")


def _prepare(arguments: Arguments) -> tuple[Arguments, Callable[[tuple[Any, ...]], Any]]:
    """What the forward returned of a packed call has no batch either."""
    if arguments["cum_seqlens_q"] is None:
        return forward.operation.prepare_gradients(arguments)
    saved = {name: arguments[name] for name in _SAVED if arguments[name] is not None}
    return forward.operation.prepare_gradients({**arguments, **{name: array[None] for name, array in saved.items()}})


operation = forward.operation.gradients(
    prepare=_prepare,
    fold=partial(fold, BACKWARD),
    tuning_key=partial(bucket, BACKWARD),
    samples=samples,
    cost=backward_cost,
)
