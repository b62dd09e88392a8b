"""Grouped products by others: ``jax.lax``, tokamax, PyTorch and quack. Each takes the forward and both gradients.

The gradient of the rows is a ``grouped_matmul`` with the matrices transposed; that of the matrices is a
``grouped_matmul_d_rhs``.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ._calls import Function
from ._peers import TorchFunction

#: By operation and ``transpose_rhs``: the contracted axes, and the axis of the groups, as ``jax.lax`` writes them.
DIMENSIONS = {
    ("grouped_matmul", False): jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,)),
    ("grouped_matmul", True): jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,)),
    ("grouped_matmul_d_rhs", False): jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ()),
}


#: The arguments of the calls that others have, too.
PLAIN = {"lhs", "rhs", "d_out", "group_sizes", "boundaries", "transpose_rhs"}


def is_plain(arguments: Mapping[str, Any]) -> bool:
    """Whether the call has no bias, no activation, and all groups."""
    return {name for name, value in arguments.items() if value is not None and value is not False} <= PLAIN


def _dimensions(arguments: Mapping[str, Any]) -> Any:
    operation = "grouped_matmul_d_rhs" if "boundaries" in arguments else "grouped_matmul"
    return DIMENSIONS[operation, bool(arguments.get("transpose_rhs", False))]


def by_ragged_dot(arguments: Mapping[str, Any]) -> Function | None:
    """By XLA through ``jax.lax``: the products that it also differentiates its ``ragged_dot`` into."""
    if not is_plain(arguments):
        return None
    return _by(jax.lax.ragged_dot_general, _dimensions(arguments))


def by_tokamax(arguments: Mapping[str, Any]) -> Function | None:
    """By the implementation that tokamax prefers on this device."""
    if not is_plain(arguments):
        return None
    tokamax = importlib.import_module("tokamax")

    def ragged_dot(lhs: Any, right: Any, group_sizes: Any, **options: Any) -> Any:
        # With the number of rows, its tuning can draw sizes that add up to it.
        sizes = tokamax.RaggedDotGroupSizes(group_sizes, lhs.shape[0])
        return tokamax.ragged_dot_general(lhs, right, group_sizes=sizes, **options)

    return _by(ragged_dot, _dimensions(arguments))


def _by(ragged_dot: Callable[..., Any], dimensions: Any) -> Function:
    """From the arrays of a call by name. Sizes of groups are differences of their boundaries."""

    def product(lhs: Any, **others: Any) -> Any:
        right = others["rhs"] if "rhs" in others else others["d_out"]
        sizes = others["group_sizes"] if "group_sizes" in others else jnp.diff(others["boundaries"])
        return ragged_dot(lhs, right, group_sizes=sizes, ragged_dot_dimension_numbers=dimensions)

    return product


def by_torch(arguments: Mapping[str, Any]) -> TorchFunction | None:
    """By CUTLASS through PyTorch. The ends of the groups are computed once, because a layer's products share them."""
    if not is_plain(arguments):
        return None
    ends: list[Any] = []

    def ends_of(others: Mapping[str, Any]) -> Any:
        import torch

        if not ends:
            is_known = "boundaries" in others
            end = others["boundaries"][1:].clone() if is_known else torch.cumsum(others["group_sizes"], 0)
            ends.append(end.to(torch.int32))
        return ends[0]

    def product(lhs: Any, **others: Any) -> Any:
        import torch

        if "d_out" in others:
            return torch._grouped_mm(lhs.t(), others["d_out"], offs=ends_of(others))
        rhs = others["rhs"].transpose(1, 2) if arguments.get("transpose_rhs", False) else others["rhs"]
        return torch._grouped_mm(lhs, rhs, offs=ends_of(others))

    return TorchFunction(product)


def by_quack(arguments: Mapping[str, Any], is_tuned: bool = True) -> TorchFunction | None:
    """By CuTe through quack, which tunes each shape when it first runs. The ends of the groups are computed once."""
    if not is_plain(arguments):
        return None
    starts: list[Any] = []

    def starts_of(others: Mapping[str, Any]) -> Any:
        import torch

        if not starts:
            known = others.get("boundaries")
            ends = torch.cumsum(others["group_sizes"], 0) if known is None else known
            starts.append((torch.nn.functional.pad(ends, (1, 0)) if known is None else ends).to(torch.int32))
        return starts[0]

    def product(lhs: Any, **others: Any) -> Any:
        gemm = importlib.import_module("quack.gemm_interface").gemm
        if "d_out" in others:
            return gemm(lhs.t(), others["d_out"], cu_seqlens_k=starts_of(others), tuned=is_tuned)
        rhs = others["rhs"].transpose(1, 2) if arguments.get("transpose_rhs", False) else others["rhs"]
        return gemm(lhs, rhs, cu_seqlens_m=starts_of(others), tuned=is_tuned)

    return TorchFunction(product)


# -- tokamax's own tuning ----------------------------------------------------------------------------------------------


class NotTuned(Exception):
    """Why tokamax's tuning has no result."""


def tuning_of_tokamax(lowered: Any, deadline: float) -> Any:
    """The result of tuning all of tokamax's calls in a program: a context in which they are traced again.

    Raises ``NotTuned`` where the deadline, by ``time.monotonic``, passes before the last of them begins.
    """
    tokamax = importlib.import_module("tokamax")
    calls = tokamax.autotuning.get_bound_args(lowered)
    if not calls:
        raise NotTuned("the program has no calls of tokamax")
    result: Any = None
    for number, call in enumerate(calls):
        if time.monotonic() > deadline:
            raise NotTuned(f"its tuning took too long: {number} of {len(calls)} calls are tuned")
        tuned = tokamax.autotune([call], progress_bar=False)
        if not tuned.data and call.cached_autotuning_data is None:
            raise NotTuned(f"its tuning failed for {type(call.op).__name__}")
        result = tuned if result is None else result | tuned
    return result
