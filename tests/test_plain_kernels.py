"""Kernels that are one function."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ejkernel_core import Invocation, NoKernel, Operation, PluginError, Registry, Unsupported, plain_kernel

X = np.arange(3.0, dtype=np.float32)


def doubled(inv: Invocation) -> Any:
    return 2 * inv["x"]


def refuse_short(inv: Invocation) -> None:
    if inv["x"].shape[0] < 2:
        raise Unsupported("x has fewer than two entries")


def registry_with(*kernels: Any) -> Registry:
    registry = Registry(plugins="")
    registry.register(Operation(name="double", signature=lambda x: None))
    registry.register(plain_kernel(doubled, 0), "double.reference")
    for place, kernel in enumerate(kernels):
        registry.register(kernel, f"double.mine{place}")
    return registry


def test_the_highest_rank_runs() -> None:
    registry = registry_with(plain_kernel(lambda inv: inv["x"] + inv["x"] + 1, 20), plain_kernel(doubled, {"gpu": 90}))
    np.testing.assert_array_equal(registry.call("double", X), 2 * X + 1)
    np.testing.assert_array_equal(registry_with().call("double", X), 2 * X)


def test_a_refusal_has_the_next_kernel() -> None:
    registry = registry_with(plain_kernel(lambda inv: inv["x"] * 5, 20, check=refuse_short))
    np.testing.assert_array_equal(registry.call("double", X), 5 * X)
    np.testing.assert_array_equal(registry.call("double", X[1:2]), 2 * X[1:2])
    with pytest.raises(NoKernel, match="x has fewer than two entries"):
        registry.call("double", X[1:2], backend="mine0")


def test_another_function_is_another_kernel() -> None:
    """Without a version, a kernel of a notebook is known by its code."""
    first, second = plain_kernel(doubled, 20), plain_kernel(lambda inv: inv["x"] + inv["x"], 20)
    versions = [_version(kernel) for kernel in (first, first, second, plain_kernel(doubled, 20, version=3))]
    assert versions[0] == versions[1] != versions[2]
    assert versions[3] == "3"


def _version(kernel: Any) -> str:
    software: dict[str, str] = registry_with(kernel).kernel("double", "mine0").software
    return software["double.mine0"]


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(PluginError, match=r"VERSION takes a whole number; got '1'"):
        registry_with(plain_kernel(doubled, 20, version="1"))
    with pytest.raises(PluginError, match="PLATFORMS takes"):
        registry_with(plain_kernel(doubled, "high"))
