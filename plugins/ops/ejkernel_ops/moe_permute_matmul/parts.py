"""``moe_permute_matmul`` and its gradients by the operations that it is made of, each with kernels of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_core import Invocation
from ejkernel_ops.grouped_matmul.axes import SIGNATURE

#: The arguments of the product, but for its rows.
OTHERS = tuple(name for name in SIGNATURE.parameters if name != "lhs")


def product_arguments(arguments: Mapping[str, Any], lhs: Any) -> dict[str, Any]:
    """The arguments of ``grouped_matmul`` for the tokens in the order of their experts."""
    return {"lhs": lhs, **{name: arguments[name] for name in OTHERS}}


def forward(inv: Invocation, backend: str | None = None) -> jax.Array:
    """The result, by kernels of this backend if there is one."""
    result: jax.Array = inv.call("grouped_matmul", **product_arguments(inv, _rows(inv, backend)), backend=backend)
    return result


def gradients(inv: Invocation, backend: str | None = None) -> tuple[jax.Array, ...]:
    """The gradients of the arrays that ``wrt`` names, by kernels of this backend if there is one."""
    names = {"x": "lhs", "rhs": "rhs", "rhs_bias": "rhs_bias"}
    results = inv.call(
        "grouped_matmul_bwd",
        **product_arguments(inv, _rows(inv, backend)),
        out=inv["out"],
        d_out=inv["d_out"],
        wrt=tuple(names[name] for name in inv["wrt"]),
        partial_sums=tuple(names[name] for name in inv.get("partial_sums") or ()) or None,
        backend=backend,
    )
    by_name = dict(zip(inv["wrt"], results, strict=True))
    if "x" in by_name:
        # The sum of the rows of each token, in the order of its experts.
        ones = jnp.ones((inv["x"].shape[0], inv["k"]), inv["x"].dtype)
        by_name["x"] = inv.call("moe_combine", by_name["x"], inv["token_order"], ones, backend=backend)
    return tuple(by_name[name] for name in inv["wrt"])


def _rows(inv: Invocation, backend: str | None) -> Any:
    return inv.call("moe_permute", inv["x"], inv["token_order"], inv["k"], backend=backend)
