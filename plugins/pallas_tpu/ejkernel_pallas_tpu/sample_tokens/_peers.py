"""The kernel in plain JAX, which the estimated time of this one is compared with."""

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

    def sample(arrays: Mapping[str, Any]) -> Any:
        return ejkernel_core.call(example.op, **arrays, **options, backend="xla")

    yield Peer("XLA", {"": sample})
