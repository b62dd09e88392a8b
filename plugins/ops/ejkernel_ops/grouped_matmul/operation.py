"""The operations ``grouped_matmul``, ``grouped_matmul_bwd`` with its gradients, and ``grouped_matmul_d_rhs``, by which
that one computes the gradient of ``rhs``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from ejkernel_core import Cost, Example, Operation

from . import samples
from .arguments import prepare, prepare_d_rhs
from .axes import AXES, BACKWARD, D_RHS_AXES, D_RHS_SIGNATURE, SIGNATURE
from .values import check_boundaries, check_values

Arguments = Mapping[str, Any]

_AXIS = "the sizes of the groups are group_sizes: jnp.diff of the ends, with prepend=0"
#: What other libraries call the arguments, for the error of an unknown argument.
OTHER_NAMES = {
    **dict.fromkeys(("a", "x", "input", "inputs", "mat_a", "tokens"), "lhs"),
    **dict.fromkeys(("b", "w", "weight", "weights", "kernel", "mat_b"), "rhs"),
    **dict.fromkeys(("m_sizes", "batch_sizes", "sizes", "tokens_per_expert"), "group_sizes"),
    **dict.fromkeys(("offs", "offsets", "group_ends"), _AXIS),
    **dict.fromkeys(("bias", "b_bias"), "rhs_bias"),
    **dict.fromkeys(("trans_b", "transpose_b", "rhs_transpose"), "transpose_rhs"),
    **dict.fromkeys(("out_dtype", "preferred_dtype", "dtype"), "preferred_element_type"),
    **dict.fromkeys(("act", "activation_fn", "fused_activation"), "activation"),
    **dict.fromkeys(("implementation", "impl", "platform"), "backend"),
    **dict.fromkeys(("rhs_scale", "b_scale"), "quantized matrices are not taken yet"),
}


def cost(arguments: Arguments) -> Cost:
    """One product of every row, and each array once."""
    rhs = arguments["rhs"]
    return Cost(2.0 * arguments["lhs"].shape[0] * rhs.shape[1] * rhs.shape[2], AXES.bytes(arguments))


def backward_cost(arguments: Arguments) -> Cost:
    """One product of every row for each gradient, and for the activation's the forward's again."""
    products = len({"lhs", "rhs"} & {*arguments["wrt"]}) + (arguments["activation"] is not None)
    return Cost(products * cost(arguments).flops, BACKWARD.bytes(arguments))


def d_rhs_cost(arguments: Arguments) -> Cost:
    """One product of every row, and each array once."""
    lhs, d_out = arguments["lhs"], arguments["d_out"]
    return Cost(2.0 * lhs.shape[0] * lhs.shape[1] * d_out.shape[1], D_RHS_AXES.bytes(arguments))


def _examples(kind: str) -> Iterable[Example]:
    from . import examples

    return getattr(examples, kind)()  # type: ignore[no-any-return]


forward = Operation(
    name="grouped_matmul",
    signature=SIGNATURE,
    axes=AXES,
    differentiable=("lhs", "rhs", "rhs_bias"),
    prepare=prepare,
    validate=check_values,
    backward="grouped_matmul_bwd",
    samples=samples.samples,
    cost=cost,
    examples=partial(_examples, "examples"),
    other_names=OTHER_NAMES,
)
backward = forward.gradients(cost=backward_cost)
d_rhs = Operation(
    name="grouped_matmul_d_rhs",
    signature=D_RHS_SIGNATURE,
    axes=D_RHS_AXES,
    differentiable=("lhs", "d_out"),
    prepare=prepare_d_rhs,
    validate=check_boundaries,
    samples=samples.d_rhs_samples,
    cost=d_rhs_cost,
    examples=partial(_examples, "d_rhs_examples"),
)
