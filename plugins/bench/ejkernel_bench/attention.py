"""Attention against jax.nn.dot_product_attention, S 4096, causal and full."""

from __future__ import annotations

from collections.abc import Sequence

from ejkernel_core import Example
from ejkernel_ops.flash_attention.sizes import self_attention

from . import suite
from ._attention import by_jax_nn, work

EXAMPLES = tuple(self_attention(1, 4096, 8, 64, causal=causal) for causal in (True, False))
PEER = "jax.nn"
MINIMA = tuple(suite.Minimum(pass_name, PEER, 1.0) for pass_name in suite.PASSES)
ROUNDS = 7


def run(backend: str | None = None, rounds: int = ROUNDS) -> suite.Report:
    """Against ``implementation="xla"``."""
    return compare(EXAMPLES, backend, rounds)


def compare(examples: Sequence[Example], backend: str | None, rounds: int) -> suite.Report:
    """Both are compared with our XLA kernel in a wider dtype."""
    return suite.run(
        "flash_attention",
        {PEER: by_jax_nn},
        MINIMA,
        examples=examples,
        names={example.name for example in examples},
        backend=backend,
        backends=(),
        reference="xla",
        work=work,
        rounds=rounds,
    )
