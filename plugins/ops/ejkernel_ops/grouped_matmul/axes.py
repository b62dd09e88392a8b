"""How ``grouped_matmul`` and its parts are called, and what the axes of their arrays mean."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from ejkernel_core import Axes

from .activations import ACTIVATIONS


def _call(  # type: ignore[no-untyped-def]
    lhs,
    rhs,
    group_sizes,
    *,
    group_offset=None,
    transpose_rhs=False,
    rhs_bias=None,
    activation=None,
    preferred_element_type=None,
    precision=None,
): ...


SIGNATURE = inspect.signature(_call)


def _d_rhs_call(  # type: ignore[no-untyped-def]
    lhs, d_out, boundaries, *, transpose_rhs=False, preferred_element_type=None, precision=None
): ...


D_RHS_SIGNATURE = inspect.signature(_d_rhs_call)


def result_dtype(arguments: Mapping[str, Any], rows: str = "lhs") -> Any:
    """The dtype of the result: the preferred one, or that of the array with the rows."""
    preferred = arguments["preferred_element_type"]
    return arguments[rows].dtype if preferred is None else preferred


_COUNTS = ("rows", "groups", "all_groups")

# Which rows belong to a group depends on values, so neither rows nor groups are independent.
AXES = Axes(
    {
        "lhs": "rows k",
        "rhs": "groups k n",
        "group_sizes": "all_groups",
        "group_offset": "1",
        "rhs_bias": "groups n",
    },
    {"out": "rows n"},
    independent="n",
    summed="k",
    dtype_option="preferred_element_type",
    added="rhs_bias",
    nonlinear="activation",
    whole="rows groups all_groups",
    counts=_COUNTS,
    rounded="rows",
    positive="groups all_groups",
    dtypes={"out": result_dtype},
    when={
        ("transpose_rhs", True): {"rhs": "groups n k"},
        **{("activation", name): {"out": "rows n/2"} for name in ACTIVATIONS},
    },
)

BACKWARD = AXES.backward()
D_RHS_AXES = Axes(
    {"lhs": "rows k", "d_out": "rows n", "boundaries": "groups+1"},
    {"d_rhs": "groups k n"},
    independent="k n",
    whole="rows groups",
    counts=("rows", "groups"),
    rounded="rows",
    positive="groups",
    dtypes={"d_rhs": result_dtype},
    when={("transpose_rhs", True): {"d_rhs": "groups n k"}},
)
