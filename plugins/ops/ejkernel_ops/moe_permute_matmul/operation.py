"""The operations ``moe_permute_matmul`` and ``moe_permute_matmul_bwd``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_core import Axes, Cost, Example, Operation
from ejkernel_ops.grouped_matmul import operation as grouped_matmul
from ejkernel_ops.grouped_matmul.activations import ACTIVATIONS
from ejkernel_ops.grouped_matmul.arguments import product
from ejkernel_ops.grouped_matmul.axes import result_dtype
from ejkernel_ops.grouped_matmul.samples import group_sizes
from ejkernel_ops.grouped_matmul.values import check_values
from ejkernel_ops.moe_permute import operation as moe_permute
from ejkernel_ops.moe_permute.order import check_permutation

Arguments = dict[str, Any]
Restore = Callable[[tuple[Any, ...]], Any]


def _call(  # type: ignore[no-untyped-def]
    x,
    token_order,
    rhs,
    group_sizes,
    k,
    *,
    group_offset=None,
    transpose_rhs=False,
    rhs_bias=None,
    activation=None,
    preferred_element_type=None,
    precision=None,
): ...


AXES = Axes(
    {
        "x": "tokens dim",
        "token_order": "rows",
        "rhs": "groups dim n",
        "group_sizes": "all_groups",
        "group_offset": "1",
        "rhs_bias": "groups n",
    },
    {"out": "rows n"},
    independent="n",
    summed="dim",
    dtype_option="preferred_element_type",
    added="rhs_bias",
    nonlinear="activation",
    whole="tokens rows groups all_groups",
    counts=("tokens", "rows", "groups", "all_groups"),
    rounded="tokens rows",
    positive="groups all_groups",
    dtypes={"out": partial(result_dtype, rows="x")},
    when={
        ("transpose_rhs", True): {"rhs": "groups n dim"},
        **{("activation", name): {"out": "rows n/2"} for name in ACTIVATIONS},
    },
)
BACKWARD = AXES.backward()


def prepare(arguments: Arguments) -> tuple[Arguments, Restore]:
    """Check the arguments: those of the order as ``moe_permute``, the others as ``grouped_matmul``."""
    order, restore = moe_permute.prepare({name: arguments[name] for name in ("x", "token_order", "k")})
    return product({**arguments, **order}, {"x": "(tokens, dim)"}), restore


def check(arguments: Mapping[str, Any]) -> None:
    """Raise for values that are none of an order, of sizes or of an offset, for ``validate=True``."""
    check_permutation(arguments)
    check_values(arguments, rows_of="token_order")


def samples(arguments: Mapping[str, Any], key: Any) -> Arguments:
    """The derived samples, with an order as a router makes it: by group, and in each group by token."""
    sizes_key, order_key, key = jax.random.split(key, 3)
    concrete = AXES.samples(arguments, key)  # an offset is 0
    order, sizes = arguments["token_order"], arguments["group_sizes"]
    if isinstance(sizes, jax.ShapeDtypeStruct):
        concrete["group_sizes"] = group_sizes(sizes_key, order.shape[0], sizes.shape[0])
    if isinstance(order, jax.ShapeDtypeStruct):
        concrete["token_order"] = routed_order(order_key, concrete["group_sizes"], order.shape[0])
    return concrete


def routed_order(key: Any, sizes: jax.Array, rows: int) -> jax.Array:
    """An order of this many rows, in which each group has tokens from anywhere."""
    groups = jnp.repeat(jnp.arange(sizes.shape[0]), sizes, total_repeat_length=rows)
    experts = jax.random.permutation(key, groups)
    return jnp.argsort(experts, stable=True).astype(jnp.int32)


def cost(arguments: Mapping[str, Any]) -> Cost:
    """One product of every row, and each array once."""
    rhs = arguments["rhs"]
    return Cost(2.0 * arguments["token_order"].shape[0] * rhs.shape[1] * rhs.shape[2], AXES.bytes(arguments))


def backward_cost(arguments: Mapping[str, Any]) -> Cost:
    """One product of every row for each gradient, and for the activation's the forward's again."""
    products = len({"x", "rhs"} & {*arguments["wrt"]}) + (arguments["activation"] is not None)
    return Cost(products * cost(arguments).flops, BACKWARD.bytes(arguments))


def _examples() -> Iterable[Example]:
    from .examples import examples

    return examples()


forward = Operation(
    name="moe_permute_matmul",
    signature=inspect.signature(_call),
    axes=AXES,
    differentiable=("x", "rhs", "rhs_bias"),
    prepare=prepare,
    validate=check,
    backward="moe_permute_matmul_bwd",
    samples=samples,
    cost=cost,
    examples=_examples,
    other_names={
        **{name: own for name, own in grouped_matmul.OTHER_NAMES.items() if own != "lhs"},
        **moe_permute.OTHER_NAMES,
        "lhs": "x",
    },
)
backward = forward.gradients(cost=backward_cost)
