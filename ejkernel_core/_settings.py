"""JAX's settings that change what a function computes.

They are a thread's own and hold while JAX traces. A kernel is traced when JAX lowers the call, which may be elsewhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import attrs
import jax


@attrs.frozen
class Settings:
    """What holds in a thread."""

    x64: bool
    precision: Any
    promotion: Any

    @classmethod
    def here(cls) -> Settings:
        """As they are now."""
        config: Any = jax.config
        promotion = config.jax_numpy_dtype_promotion
        precision = config.jax_default_matmul_precision
        return cls(bool(config.jax_enable_x64), precision, getattr(promotion, "value", promotion))

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Have them hold, for a ``with`` block."""
        with (
            jax.enable_x64(self.x64),
            jax.default_matmul_precision(self.precision),
            jax.numpy_dtype_promotion(self.promotion),
        ):
            yield
