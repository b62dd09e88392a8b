"""Results and gradients on four devices are those of the whole sequence on one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from jax.sharding import AxisType

BACKENDS = ("gather", "ulysses", "ring", "reference")
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit

#: One case for each way in which a kernel differs from the others. Each is quick with one kernel, and each kernel with
#: one of them.
SUBJECTS: dict[str, dict[str, Any]] = {
    "causal": {"options": {"causal": True}},
    "full, keys of another length": {"kv_length": 40, "dims": (8, 12), "kind": EXPLICIT, "check_vma": False},
    "sinks, ids": {"options": {"causal": True}, "sinks": 2, "has_ids": True},
}


QUICK = {("causal", "ring"), ("full, keys of another length", "gather"), ("sinks, ids", "ulysses")}


@pytest.mark.parametrize(
    ("subject", "backend"),
    [
        pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.long)
        for pair in itertools.product(SUBJECTS, BACKENDS[:3])
    ],
)
def test_subjects(compare: Callable[..., None], make_case: Any, subject: str, backend: str) -> None:
    compare(make_case(backend=backend, **SUBJECTS[subject]))


CASES: dict[str, dict[str, Any]] = {
    f"{causal}, {heads[1]} of {heads[0]} heads, {layout}, {kind}, {vma}": {
        "options": {"causal": causal == "causal"},
        "heads": heads,
        "layout": layout,
        "kind": kind,
        "check_vma": vma == "checked",
        "length": length,
    }
    for causal in ("causal", "full")
    for heads, length in (((8, 8), 56), ((8, 4), 8), ((4, 1), 40))
    for layout in ("zigzag", "contiguous")
    for kind, vma in ((AUTO, "checked"), (EXPLICIT, "unchecked"))
} | {
    "odd shards": {"options": {"causal": True}, "layout": "contiguous", "length": 52},
    "window": {"options": {"causal": True, "sliding_window": (17, 0)}},
    "a wide window": {"options": {"causal": True, "sliding_window": (49, 0)}},
    "a window to both sides": {"options": {"sliding_window": (17, 5)}},
    "a window, contiguous": {"options": {"causal": True, "sliding_window": 20}, "layout": "contiguous"},
    "a window, ids, sinks": {
        "options": {"causal": True, "sliding_window": (17, 0)},
        "has_ids": True,
        "sinks": 1,
    },
    "full, ids, sinks": {"has_ids": True, "sinks": 3},
    "full, ids, contiguous": {"has_ids": True, "layout": "contiguous"},
    "causal, ids, another head_dim": {"options": {"causal": True}, "has_ids": True, "dims": (8, 24)},
    "scale and cap": {"options": {"causal": True, "softmax_scale": 0.7, "logits_soft_cap": 1.5}, "sinks": 1},
    "one device": {"options": {"causal": True}, "devices": 1, "length": 7},
    "two devices": {"options": {"causal": True}, "devices": 2, "dims": (8, 12)},
    "eight devices": {"options": {"causal": True}, "devices": 8, "length": 48, "heads": (8, 8)},
    "one key of each chunk": {"options": {"causal": True}, "length": 8},
}


def is_refused(backend: str, case: dict[str, Any]) -> bool:
    """What the kernels refuse by name, which test_arguments shows."""
    options, devices = case.get("options", {}), case.get("devices", 4)
    if devices == 1:
        return False
    if backend == "ulysses":
        return any(heads % devices for heads in case.get("heads", (8, 4)))
    has_window = "sliding_window" in options
    if backend == "ring":
        return has_window or (options.get("causal", False) and case.get("layout") == "contiguous")
    return backend == "gather" and has_window and not options.get("causal", False)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, backend) for name, case in CASES.items() for backend in BACKENDS if not is_refused(backend, case)],
)
def test_cases(compare: Callable[..., None], make_case: Any, name: str, backend: str) -> None:
    compare(make_case(backend=backend, **CASES[name]))


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_low_precision(compare: Callable[..., None], make_case: Any, backend: str, dtype: str) -> None:
    compare(
        make_case(backend=backend, dtype=dtype, options={"causal": True}), {"bfloat16": 0.06, "float16": 8e-3}[dtype]
    )
