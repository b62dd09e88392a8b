"""A configuration with an extreme value is refused in words, or right: for every kernel that is installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import jax
import numpy as np
import pytest

import ejkernel_core
from ejkernel_core import NoKernel, Unsupported
from ejkernel_core.extend import KERNELS, abstract_call

REGISTRY = ejkernel_core.registry
EXTREMES: tuple[Any, ...] = (0, -1, 2**31 - 1, 2**31, 2**63, True, 1.5, "128")
#: Those that are nothing but a size out of all proportion, or no whole number.
NEVER_RIGHT = (-1, 2**31 - 1, 2**31, 2**63, 1.5, "128")
#: Devices for kernels that do not run here, whose checks alone are made.
DEVICES = {"gpu": ("NVIDIA H100 80GB HBM3", (9, 0)), "tpu": ("TPU v5e", None)}
NAMES = [name for name in REGISTRY.names(KERNELS) if not name.startswith("context_attention")]


def forward_of(op: str) -> str:
    return op.removesuffix("_bwd")


def calls(op: str) -> Iterator[dict[str, Any]]:
    """Small calls with few arguments."""
    examples = [e for e in REGISTRY.operation(forward_of(op)).examples() if not (e.uses or e.long)]
    for example in sorted(examples, key=lambda e: (not e.wrt, e.dtype != "float32", len(e.arguments(0))))[:12]:
        yield {name: example.rounded(value) for name, value in example.arguments(0).items()}


def accepted(name: str) -> tuple[Any, dict[str, Any], list[Any]] | None:
    """A kernel, a call that it can run, and the configurations with an extreme value that it accepts for the call."""
    op, _, backend = name.rpartition(".")
    kernel = REGISTRY.kernel(op, backend)
    platform = next((p for p in ("cpu", *DEVICES) if kernel.rank_on(p) is not None), "cpu")
    for call in calls(op) if kernel.config_type is not None else ():
        abstract = abstract_call(REGISTRY, forward_of(op), (), call)
        request, avals = (abstract.request, abstract.avals) if op == forward_of(op) else abstract.backward()
        inv = request.invocation(avals, abstract.target)
        if platform in DEVICES:
            kind, capability = DEVICES[platform]
            inv = attrs.evolve(inv, platform=platform, device_kind=kind, compute_capability=capability)
        try:
            cfg = kernel.heuristic_cfg(inv)
        except Unsupported:
            continue
        return kernel, call, [extreme for extreme in extremes_of(cfg) if is_accepted(kernel, inv, extreme[-1])]
    return None


def extremes_of(cfg: Any) -> Iterator[tuple[str, Any, Any]]:
    """The field, the value, and the configuration with it, of all that the class takes."""
    for field in attrs.fields(type(cfg)):
        for value in EXTREMES:
            try:
                yield field.name, value, attrs.evolve(cfg, **{field.name: value})
            except (TypeError, ValueError, Unsupported):
                continue


def is_accepted(kernel: Any, inv: Any, cfg: Any) -> bool:
    try:
        kernel.check_cfg(inv, cfg)
    except Unsupported:
        return False
    return True


def results(op: str, call: dict[str, Any], **options: Any) -> list[Any]:
    """The results of a call, or for a backward operation the gradients of their sum."""
    forward = REGISTRY.operation(forward_of(op))
    arrays = {n: v for n, v in call.items() if n in forward.arrays and v is not None}
    differentiated = {n: v for n, v in arrays.items() if n in forward.differentiable}

    def run(values: Any) -> list[Any]:
        return jax.tree.leaves(REGISTRY.call(forward.name, **{**call, **values}, **options))

    def total(values: Any) -> Any:
        return sum(r.sum() for r in run(values) if np.issubdtype(r.dtype, np.floating))

    found = run({}) if op == forward.name else jax.tree.leaves(jax.grad(total)(differentiated))
    return [np.asarray(array, np.float64) for array in found]


@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_with_an_extreme_value_is_refused_or_right(name: str) -> None:
    found = accepted(name)
    if found is None:
        return
    kernel, call, configurations = found
    if kernel.rank_on("cpu") is None:
        assert [(field, value) for field, value, _ in configurations if value in NEVER_RIGHT] == []
        return
    op = name.rpartition(".")[0]
    for field, value, cfg in configurations:
        try:
            actual = results(op, call, cfg=cfg)
        except NoKernel:  # a backward configuration is for the backward alone
            continue
        for one, other in zip(actual, results(op, call, backend="reference"), strict=True):
            np.testing.assert_allclose(one, other, 1e-4, 1e-4, err_msg=f"{field}={value}")


def test_the_extremes_are_tried() -> None:
    """What was wrong in silence: the places in a tile are counted in 32 bits."""
    found = accepted("grouped_matmul.xla")
    assert found is not None
    assert [(field, value) for field, value, _ in found[-1]] == []
    config = found[0].config_type
    with pytest.raises(ValueError, match="'rows' must be <= 1048576"):
        config(2**31 - 1)
