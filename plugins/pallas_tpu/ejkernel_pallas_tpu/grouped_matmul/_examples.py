"""What the compiler for TPUs checks beside the layers of the operation: calls that take more vector memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from ejkernel_core import Example

USES = frozenset({"vmem"})


def forward_examples() -> Iterator[Example]:
    """float32, activations inside of the kernel and behind it, biases, a part of the groups, sizes that are odd."""
    sizes, options = (4001, 2049, 2816, 64), {"activation": "silu_gated", "transpose_rhs": True}
    yield _product("float32, odd, silu_gated, bias", *sizes, dtype="float32", bias=True, options=options)
    yield _product("odd", 16001, 7001, 9001, 8)
    yield _product("swiglu_oai, bias", 16384, 2880, 5760, 32, bias=True, options={"activation": "swiglu_oai"})
    options = {"activation": "gelu_gated"}
    yield _product("gelu_gated, part", 65536, 4096, 3072, 16, all_groups=128, options=options)


def d_rhs_examples() -> Iterator[Example]:
    """float32 of odd sizes, and a result in float32."""
    yield _gradient("float32, odd", 4001, 2049, 1401, 8, dtype="float32")
    yield _gradient("result in float32", 32768, 2048, 1408, 64, preferred_element_type="float32")


def _product(
    name: str,
    rows: int,
    k: int,
    n: int,
    groups: int,
    *,
    dtype: str = "bfloat16",
    bias: bool = False,
    all_groups: int | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Example:
    matrix = (n, k) if "transpose_rhs" in options else (k, n)

    def arguments(draw: int) -> dict[str, Any]:
        arrays = {
            "lhs": jnp.zeros((rows, k), dtype),
            "rhs": jnp.zeros((groups, *matrix), dtype),
            "group_sizes": jnp.zeros(all_groups or groups, jnp.int32),
        }
        if bias:
            arrays["rhs_bias"] = jnp.zeros((groups, n), dtype)
        if all_groups:
            arrays["group_offset"] = jnp.zeros(1, jnp.int32)
        return {**arrays, **options}

    return Example(name, "grouped_matmul", arguments, dtype, checks=frozenset(), uses=USES)


def _gradient(name: str, rows: int, k: int, n: int, groups: int, *, dtype: str = "bfloat16", **options: Any) -> Example:
    def arguments(draw: int) -> dict[str, Any]:
        arrays = {
            "lhs": jnp.zeros((rows, k), dtype),
            "d_out": jnp.zeros((rows, n), dtype),
            "boundaries": jnp.zeros(groups + 1, jnp.int32),
        }
        return {**arrays, **options}

    return Example(name, "grouped_matmul_d_rhs", arguments, dtype, checks=frozenset(), uses=USES)
