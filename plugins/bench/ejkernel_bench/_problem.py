"""The attention problems that are measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import jax
import jax.numpy as jnp

import ejkernel_core

Attention = Callable[..., Any]

GRADIENTS = ("d_query", "d_key", "d_value")


@attrs.frozen
class Problem:
    """Self attention of one size."""

    batch: int
    length: int
    heads: int
    head_dim: int
    dtype: str = "float32"
    causal: bool = True
    #: How many keys to the left of its own a query sees; None for all.
    window: int | None = None

    def __str__(self) -> str:
        kind = "causal" if self.causal else "full"
        window = "" if self.window is None else f", window {self.window}"
        return f"B{self.batch} S{self.length} H{self.heads} D{self.head_dim} {self.dtype} {kind}{window}"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.length, self.heads, self.head_dim

    @property
    def options(self) -> dict[str, Any]:
        """What an ejkernel call says beside its arrays."""
        window = None if self.window is None else (self.window, 0 if self.causal else self.window)
        return {"causal": self.causal} if window is None else {"causal": self.causal, "sliding_window": window}

    def arrays(self) -> tuple[jax.Array, ...]:
        """Query, key, value and a cotangent of the output, the same at every call."""
        keys = jax.random.split(jax.random.key(0), 4)
        return tuple(jax.random.normal(key, self.shape, jnp.float32).astype(self.dtype) for key in keys)


def through_core(problem: Problem, backend: str | None = None) -> Attention:
    """Attention by ``ejkernel_core.call``."""

    def attention(query: Any, key: Any, value: Any) -> Any:
        return ejkernel_core.call("flash_attention", query, key, value, backend=backend, **problem.options)

    return attention


def with_gradients(attention: Attention) -> Attention:
    """(query, key, value, d_out) to (out, d_query, d_key, d_value)."""

    def both(query: Any, key: Any, value: Any, d_out: Any) -> tuple[Any, ...]:
        out, pull_back = jax.vjp(attention, query, key, value)
        return (out, *pull_back(d_out))

    return both


def chosen(problem: Problem, backend: str | None) -> str:
    """The kernels that the core takes for the problem, forward and backward."""
    arrays = [jax.ShapeDtypeStruct(problem.shape, jnp.dtype(problem.dtype))] * 3
    explanation = ejkernel_core.explain("flash_attention", *arrays, backend=backend, **problem.options)
    plans = (explanation.plan, explanation.backward and explanation.backward.plan)
    return " and ".join(plan.kernel.name for plan in plans if plan)
