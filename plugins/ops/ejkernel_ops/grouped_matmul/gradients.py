"""The gradients of ``grouped_matmul`` by products of groups, which are calls of operations with kernels of their own:

- of ``lhs``: ``grouped_matmul`` with ``rhs`` transposed;
- of ``rhs``: ``grouped_matmul_d_rhs``;
- of ``rhs_bias``: the same, of columns of ones.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_core import Invocation

from .definition import activated, arithmetic_dtype
from .groups import boundaries

#: The columns of ones, of which one would do: kernels may take only multiples of 16 bytes.
ONES = 8


def gradients(inv: Invocation, backend: str | None = None) -> tuple[jax.Array, ...]:
    """The gradients of the arrays that ``wrt`` names, all by kernels of this backend if there is one."""
    lhs, rhs, wrt = inv["lhs"], inv["rhs"], inv["wrt"]
    d_hidden = _d_hidden(inv, backend)
    options = {"precision": inv["precision"], "backend": backend}
    by_name: dict[str, jax.Array] = {}
    if "lhs" in wrt:
        by_name["lhs"] = inv.call(
            "grouped_matmul",
            d_hidden,
            rhs,
            inv["group_sizes"],
            group_offset=inv["group_offset"],
            transpose_rhs=not inv["transpose_rhs"],
            preferred_element_type=_dtype(inv, "lhs"),
            **options,
        )
    if "rhs" in wrt:
        of_rhs = {"transpose_rhs": inv["transpose_rhs"], "preferred_element_type": _dtype(inv, "rhs")}
        by_name["rhs"] = _contracted(lhs, d_hidden, inv, **of_rhs, **options)
    if "rhs_bias" in wrt:
        ones = jnp.ones((lhs.shape[0], ONES), lhs.dtype)
        dtype = arithmetic_dtype(lhs)
        by_name["rhs_bias"] = _contracted(ones, d_hidden, inv, preferred_element_type=dtype, **options)[:, 0]
    return tuple(by_name[name].astype(_dtype(inv, name)) for name in wrt)


def _dtype(inv: Invocation, name: str) -> Any:
    """The dtype of a gradient: that of its array, or a wider one if it is a partial sum on one device of several."""
    is_partial = name in (inv.get("partial_sums") or ())
    return arithmetic_dtype(inv[name]) if is_partial else inv[name].dtype


def _contracted(lhs: Any, d_hidden: Any, inv: Invocation, **options: Any) -> Any:
    return inv.call("grouped_matmul_d_rhs", lhs, d_hidden, boundaries(inv), **options)


def _d_hidden(inv: Invocation, backend: str | None) -> Any:
    """The cotangent of the products, in the dtype in which they are multiplied."""
    d_out, dtype = inv["d_out"], inv["lhs"].dtype
    if inv["activation"] is None:
        return d_out.astype(dtype)
    names = ("lhs", "rhs", "group_sizes", "group_offset", "transpose_rhs", "rhs_bias", "precision")
    wide = arithmetic_dtype(inv["lhs"])
    call = {name: inv[name] for name in names}
    hidden = inv.call("grouped_matmul", **call, preferred_element_type=wide, backend=backend)
    (d_hidden,) = jax.vjp(lambda hidden: activated(hidden, inv), hidden)[1](d_out.astype(wide))
    return d_hidden.astype(dtype)
