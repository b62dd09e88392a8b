"""The attention problems that are measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

import ejkernel_core
from ejkernel_core import Plan

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
    #: None for as many as there are queries'.
    kv_heads: int | None = None
    soft_cap: float | None = None
    #: A bias for each head and pair of tokens; a sink for each head.
    bias: bool = False
    sinks: bool = False
    #: How many sequences, of lengths drawn at random, are packed; None for one a batch entry.
    sequences: int | None = None

    def __str__(self) -> str:
        heads = f"H{self.heads}" if self.kv_heads is None else f"H{self.heads}/{self.kv_heads}"
        words = ["causal" if self.causal else "full"]
        words += [] if self.window is None else [f"window {self.window}"]
        words += [] if self.soft_cap is None else [f"soft cap {self.soft_cap:g}"]
        words += [name for name in ("bias", "sinks") if getattr(self, name)]
        words += [] if self.sequences is None else [f"{self.sequences} sequences"]
        return f"B{self.batch} S{self.length} {heads} D{self.head_dim} {self.dtype} {', '.join(words)}"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.length, self.heads, self.head_dim

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.length, self.kv_heads or self.heads, self.head_dim

    @property
    def bounds(self) -> Any:
        """Where packed sequences begin and end."""
        drawn = np.random.default_rng(0).choice(self.length - 1, (self.sequences or 1) - 1, replace=False)
        return np.concatenate([[0], np.sort(drawn) + 1, [self.length]]).astype(np.int32)

    def pairs(self) -> int:
        """How many keys all queries of a head see together, one batch entry."""
        total = 0
        for length in np.diff(self.bounds):
            until, behind = np.arange(1, length + 1, dtype=np.int64), np.arange(length, dtype=np.int64)[::-1]
            if self.window is not None:
                until, behind = np.minimum(until, self.window + 1), np.minimum(behind, self.window)
            total += int(until.sum()) + (0 if self.causal else int(behind.sum()))
        return total

    def flops(self, which: str) -> float:
        """The work that has to be done: two products forward, and five more backward. A diagonal counts as half."""
        pairs = self.pairs() - (self.length / 2 if self.causal and self.window is None else 0)
        return 4.0 * self.batch * self.heads * self.head_dim * pairs * (1 if which == "forward" else 3.5)

    @property
    def options(self) -> dict[str, Any]:
        """What an ejkernel call says beside its arrays."""
        given: dict[str, Any] = {"causal": self.causal}
        if self.window is not None:
            given["sliding_window"] = (self.window, 0 if self.causal else self.window)
        if self.soft_cap is not None:
            given["logits_soft_cap"] = self.soft_cap
        return given

    def extras(self) -> dict[str, jax.Array]:
        """The arrays of a call beside query, key and value."""
        given = {}
        if self.bias:
            given["bias"] = self._drawn(7, (1, self.heads, self.length, self.length))
        if self.sinks:
            given["softmax_aux"] = self._drawn(8, (self.heads,))
        if self.sequences is not None:
            given |= dict.fromkeys(("cum_seqlens_q", "cum_seqlens_k"), jnp.asarray(self.bounds))
        return given

    def arrays(self) -> tuple[jax.Array, ...]:
        """Query, key, value and a cotangent of the output, the same at every call."""
        shapes = (self.shape, self.kv_shape, self.kv_shape, self.shape)
        keys = jax.random.split(jax.random.key(0), 4)
        return tuple(
            jax.random.normal(key, shape, jnp.float32).astype(self.dtype)
            for key, shape in zip(keys, shapes, strict=True)
        )

    def _drawn(self, seed: int, shape: tuple[int, ...]) -> jax.Array:
        # The same numbers in every dtype.
        return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16).astype(self.dtype)


def through_core(problem: Problem, backend: str | None = None) -> Attention:
    """Attention by ``ejkernel_core.call``."""
    packed = problem.sequences is not None  # a packed call has no batch

    def attention(query: Any, key: Any, value: Any, **extras: Any) -> Any:
        given = (array[0] if packed else array for array in (query, key, value))
        out = ejkernel_core.call("flash_attention", *given, backend=backend, **problem.options, **extras)
        return out[None] if packed else out

    return attention


def with_gradients(attention: Attention) -> Attention:
    """(query, key, value, d_out) to (out, d_query, d_key, d_value)."""

    def both(query: Any, key: Any, value: Any, d_out: Any) -> tuple[Any, ...]:
        out, pull_back = jax.vjp(attention, query, key, value)
        return (out, *pull_back(d_out))

    return both


def chosen(problem: Problem, backend: str | None) -> str:
    """The kernels that the core takes for the problem, forward and backward."""
    return " and ".join(plan.kernel.name for plan in plans(problem, backend))


def plans(problem: Problem, backend: str | None) -> list[Plan]:
    """What the core would do with the problem: forward and, where somebody does it, backward."""
    packed = problem.sequences is not None
    arrays, extras = jax.eval_shape(problem.arrays)[:3], jax.eval_shape(problem.extras)
    given = [jax.ShapeDtypeStruct(x.shape[1:] if packed else x.shape, x.dtype) for x in arrays]
    explanation = ejkernel_core.explain("flash_attention", *given, backend=backend, **problem.options, **extras)
    both = (explanation.plan, explanation.backward and explanation.backward.plan)
    return [plan for plan in both if plan]
