"""Calls of the decode kernels, and their comparison with NumPy in float64."""

from __future__ import annotations

from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_core import Registry
from ejkernel_ops.flash_attention.random_calls import expected
from ejkernel_triton.launch._cards import capability_by_name


def normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def call(batch: int = 2, queries: int = 1, slots: int = 70, group: int = 2, **options: Any) -> dict[str, Any]:
    """Two key heads, whose values have another head dim."""
    query, key = normal(0, batch, queries, 2 * group, 24), normal(1, batch, slots, 2, 24)
    absent = dict.fromkeys(("causal", "sliding_window", "logits_soft_cap"))
    arrays = {"query": query, "key": key, "value": normal(2, batch, slots, 2, 40)}
    return {**arrays, **absent, "causal": False, **options}


def cache(batch: int, slots: int, heads: int, kv_heads: int, queries: int = 1, dim: int = 128) -> dict[str, Any]:
    """The shapes of a call in bfloat16."""
    shapes = {"query": (batch, queries, heads, dim), **dict.fromkeys(("key", "value"), (batch, slots, kv_heads, dim))}
    return {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}


@attrs.frozen
class Kernel:
    """A decode kernel in an interpreter."""

    registry: Registry
    backend: str
    #: The dtype of queries, keys and values, and the largest error of an output.
    dtype: str = "float32"
    tolerance: float = 2e-6

    def compute(self, given: dict[str, Any], cfg: Any) -> tuple[Any, Any]:
        """The output and the lse."""
        results = self.registry.call("flash_attention", **given, return_lse=True, backend=self.backend, cfg=cfg)
        return np.asarray(results[0]), np.asarray(results[1])

    def rounded(self, given: dict[str, Any]) -> dict[str, Any]:
        """The same call in the kernel's dtype."""
        return given | {name: jnp.asarray(given[name], self.dtype) for name in ("query", "key", "value")}

    def compare(self, given: dict[str, Any], cfg: Any, tolerance: float = 2e-6) -> None:
        """The results with those of NumPy, which sees only the slots that hold a key."""
        given = self.rounded(given)
        out, lse = self.compute(given, cfg)
        right = expected(given, np.zeros(out.shape), None)
        of_out = max(tolerance, self.tolerance)
        np.testing.assert_allclose(out.astype(np.float32), right["out"], rtol=of_out, atol=of_out)
        np.testing.assert_allclose(lse, right["lse"], rtol=tolerance, atol=tolerance)

    def on_card(self, given: dict[str, Any], card: str = "NVIDIA H200") -> Any:
        """The invocation that the kernel gets on a card."""
        inv = self.registry.invocation("flash_attention", **given)
        return attrs.evolve(inv, platform="gpu", device_kind=card, compute_capability=capability_by_name(card))
