"""The operation ``flash_attention_bwd``: the gradients of ``flash_attention`` from its results and their cotangents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from ejkernel_core import Operation, gradient_signature

from .arguments import prepare
from .bucket import bucket
from .cost import backward_cost
from .fold import fold
from .forward import ARRAYS, DIFFERENTIABLE, RESULTS, like_axes
from .samples import samples
from .signature import SIGNATURE

Arguments = dict[str, Any]

_SAVED = ("out", "lse", "d_out", "d_lse")


def _prepare(arguments: Arguments) -> tuple[Arguments, Callable[[tuple[Any, ...]], Any]]:
    """The forward's checks; results, cotangents and gradients in the layout of what they belong to."""
    canonical, _ = prepare(arguments)
    wrt = _check_wrt(arguments)
    packed = arguments["query"].ndim == 3
    for name in _SAVED:
        if canonical[name] is not None and packed:
            canonical[name] = canonical[name][None]
    _check_saved(canonical)
    shapes = [arguments[name].shape for name in wrt]
    return canonical, lambda gradients: tuple(g.reshape(s) for g, s in zip(gradients, shapes, strict=True))


def _check_wrt(arguments: Arguments) -> tuple[str, ...]:
    wrt = arguments["wrt"]
    if not isinstance(wrt, tuple) or not set(wrt) <= set(DIFFERENTIABLE):
        raise ValueError(f"wrt: takes a tuple of names among {DIFFERENTIABLE}; got {wrt!r}")
    absent = [name for name in wrt if arguments[name] is None]
    if absent:
        raise ValueError(f"wrt: names {', '.join(absent)}, which the call does not have")
    return wrt


def _check_saved(a: Arguments) -> None:
    (batch, length, heads, _), value_dim = a["query"].shape, a["value"].shape[3]
    shapes = {"out": (batch, length, heads, value_dim), "lse": (batch, heads, length)}
    for name in _SAVED:
        wanted = shapes[name.removeprefix("d_")]
        if a[name] is not None and a[name].shape != wanted:
            raise ValueError(f"{name}: takes the forward's shape {wanted}; got {a[name].shape}")


def _outputs(arguments: Mapping[str, Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    wanted = (arguments[name] for name in arguments["wrt"])
    return tuple(like_axes(array, tuple(range(array.ndim)), array.shape, array.dtype) for array in wanted)


operation = Operation(
    name="flash_attention_bwd",
    signature=gradient_signature(SIGNATURE, RESULTS),
    arrays=(*ARRAYS, *_SAVED),
    differentiable=(*DIFFERENTIABLE, *_SAVED),
    prepare=_prepare,
    outputs=_outputs,
    fold=fold,
    tuning_key=bucket,
    samples=samples,
    cost=backward_cost,
)
