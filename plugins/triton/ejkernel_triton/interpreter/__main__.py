"""``python -m ejkernel_triton.interpreter [--card NAME ...]``: what every shape that is offered takes of a card.

No GPU is needed: each is compiled by Triton and by ptxas for that card.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence

import attrs
import jax
import jax.numpy as jnp

import ejkernel_core
from ejkernel_core import Invocation
from ejkernel_triton import flash_attention
from ejkernel_triton.flash_attention import _tuning
from ejkernel_triton.flash_attention import backward as flash_attention_bwd

from ._compiled import Compiled, compiled_for

CARDS = {
    "NVIDIA H200": (9, 0),
    "NVIDIA A100-SXM4-80GB": (8, 0),
    "NVIDIA L40S": (8, 9),
    "NVIDIA GB200": (10, 0),
}
HEAD_DIMS = (64, 96, 128, 192, 256)
#: Each pass with what chooses its shapes.
PASSES = {"forward": _tuning.forward, "keys": _tuning.keys, "queries": _tuning.queries}
LENGTH, HEADS = 4096, 16


@attrs.frozen
class Case:
    """One pass of causal attention on one card, cut in one way."""

    card: str
    which: str
    head_dim: int
    shape: _tuning.Shape
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        return f"{self.card}, {self.which}, {self.dtype}, head dim {self.head_dim}, {self.shape}"

    @property
    def promised(self) -> int:
        """The shared memory that the shape was let through for."""
        return _tuning.shared_memory(_invocation(self.card, self.head_dim, self.dtype), self.which, self.shape)

    def compiled(self) -> Compiled:
        """The one kernel that the pass is."""
        array = _array(self.head_dim, self.dtype)
        cut = flash_attention_bwd.Pass(*self.shape)
        if self.which == "forward":
            given: dict[str, jax.ShapeDtypeStruct] = {"query": array, "key": array, "value": array}
            more: dict[str, object] = {"cfg": flash_attention.Config(*self.shape)}
        else:
            lse = jax.ShapeDtypeStruct((1, HEADS, LENGTH), jnp.float32)
            given = {"query": array, "key": array, "value": array, "out": array, "lse": lse, "d_out": array}
            wrt = ("key", "value") if self.which == "keys" else ("query",)
            more = {"cfg": flash_attention_bwd.Config(keys=cut, queries=cut), "wrt": wrt}
        operation = "flash_attention" if self.which == "forward" else "flash_attention_bwd"

        def called(arrays: dict[str, jax.Array]) -> object:
            return ejkernel_core.call(operation, **arrays, **more, causal=True, backend="triton")

        (found,) = compiled_for(self.card, called, given)
        return found


def cases(
    cards: Iterable[str] = tuple(CARDS),
    head_dims: Iterable[int] = HEAD_DIMS,
    passes: Iterable[str] = tuple(PASSES),
    dtype: str = "bfloat16",
) -> Iterator[Case]:
    """Every shape that these cards are offered for long inputs."""
    head_dims, passes = tuple(head_dims), tuple(passes)
    for card in cards:
        for which in passes:
            for head_dim in head_dims:
                for shape in PASSES[which](_invocation(card, head_dim, dtype)):
                    yield Case(card, which, head_dim, shape, dtype)


def rows(chosen: Iterable[Case]) -> Iterator[str]:
    """A table in Markdown, line by line."""
    yield "| card | pass | head dim | queries, keys, warps, stages | shared KiB | registers | spilled bytes |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for case in chosen:
        found = case.compiled()
        shape = ", ".join(map(str, case.shape))
        shared = f"{found.shared_memory / 1024:.1f}"
        cells = (case.card, case.which, case.head_dim, shape, shared, found.registers, found.spilled)
        yield f"| {' | '.join(map(str, cells))} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser("python -m ejkernel_triton.interpreter", description=rows.__doc__)
    several = {"action": "append", "metavar": "NAME"}
    parser.add_argument("--card", choices=CARDS, help="of this card alone", **several)  # type: ignore[arg-type]
    parser.add_argument("--head-dim", type=int, choices=HEAD_DIMS, action="append", help="of this head dim alone")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    asked = parser.parse_args(arguments)
    for row in rows(cases(asked.card or CARDS, asked.head_dim or HEAD_DIMS, dtype=asked.dtype)):
        print(row, flush=True)
    return 0


def _invocation(card: str, head_dim: int, dtype: str) -> Invocation:
    array = _array(head_dim, dtype)
    inv = ejkernel_core.invocation("flash_attention", array, array, array, causal=True)
    return attrs.evolve(inv, platform="gpu", device_kind=card, compute_capability=CARDS[card])


def _array(head_dim: int, dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, LENGTH, HEADS, head_dim), jnp.dtype(dtype))


if __name__ == "__main__":
    sys.exit(main())
