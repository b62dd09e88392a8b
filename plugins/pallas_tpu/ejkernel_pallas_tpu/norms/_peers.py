"""Normalizations in plain JAX, which the estimated times of these kernels are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax

import ejkernel_core
from ejkernel_core import Example
from ejkernel_pallas_tpu.testing import Peer


def peers(example: Example) -> Iterator[Peer]:
    """The same call, compiled by XLA alone."""
    options = {name: value for name, value in example.abstract().items() if not isinstance(value, jax.ShapeDtypeStruct)}

    def normalize(arrays: Mapping[str, Any]) -> Any:
        return ejkernel_core.call(example.op, **arrays, **options, backend="xla")

    # The cotangents of an estimate are ones, which XLA does not read from memory.
    yield Peer("XLA", {"": normalize}, minimum_ratio_with_gradients=0.8)
