"""How normalizations are called, and what the axes of their arrays mean."""

from __future__ import annotations

import inspect
from typing import Any

import jax.numpy as jnp

from ejkernel_core import Axes

#: By the value of ``quantize``: the dtype of the values, the largest of them, and how many entries share a scale (None:
#: all of a row).
FORMATS: dict[str, tuple[Any, float, int | None]] = {
    "fp8_row": (jnp.float8_e4m3fn, 448.0, None),
    "int8_row": (jnp.int8, 127.0, None),
    "fp8_block128": (jnp.float8_e4m3fn, 448.0, 128),
}


def _call(x, weight=None, *, bias=None, residual=None, epsilon=1e-6, weight_offset=0.0): ...  # type: ignore[no-untyped-def]


SIGNATURE = inspect.signature(_call)
QUANTIZED_SIGNATURE = SIGNATURE.replace(
    parameters=[*SIGNATURE.parameters.values(), inspect.Parameter("quantize", inspect.Parameter.KEYWORD_ONLY)]
)

ARRAYS = {"x": "... dim", "weight": "dim", "bias": "dim", "residual": "... dim"}
SUM = {"sum": lambda arguments: arguments["x" if arguments["residual"] is None else "residual"].dtype}


def axes(*statistics: str) -> Axes:
    """The axes of a normalization whose backward takes these statistics of each row."""
    return Axes(
        ARRAYS,
        # Without a residual the sum is x.
        {"out": "... dim", "sum": "... dim", **dict.fromkeys(statistics, "...")},
        independent="...",
        whole="dim",
        vmap="...",
        counts="...",
        positive="dim",
        statistics=statistics,
        # The gradient of the bias is the sum of the cotangent alone.
        residuals={"out": "", **dict.fromkeys(("sum", *statistics), "x weight residual")},
        dtypes=SUM,
    )


QUANTIZED = Axes(
    ARRAYS,
    {"values": "... dim", "scales": "... 1", "sum": "... dim"},
    independent="...",
    whole="dim",
    vmap="...",
    counts="...",
    positive="dim",
    dtypes={
        "values": lambda arguments: FORMATS[arguments["quantize"]][0],
        "scales": jnp.float32,
        **SUM,
    },
    when={("quantize", "fp8_block128"): {"scales": "... dim/128"}},
)
