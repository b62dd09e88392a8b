"""What a card could do at most: an attention takes at least the time of its products, its memory, its exponentials."""

from __future__ import annotations

import attrs

from ._problem import Problem


@attrs.frozen
class Card:
    """What it does a second, by its maker's word."""

    #: Multiplications and additions of matrices of 16 bits.
    flops: float
    bytes: float
    exponentials: float


#: 132 multiprocessors at 1.83 GHz: 4,096 operations of products each, and 16 exponentials.
CARDS = {"NVIDIA H200": Card(flops=989e12, bytes=4.8e12, exponentials=132 * 16 * 1.83e9)}


def least_seconds(problem: Problem, which: str, card: Card) -> dict[str, float]:
    """By what limits it; the greatest of them is the roof.

    >>> least = least_seconds(Problem(1, 16384, 16, 128, "bfloat16"), "forward", CARDS["NVIDIA H200"])
    >>> {name: f"{1e3 * seconds:.2f} ms" for name, seconds in least.items()}
    {'products': '1.11 ms', 'memory': '0.06 ms', 'exponentials': '0.56 ms'}
    """
    passes = 1 if which == "forward" else 2
    return {
        "products": problem.flops(which) / card.flops,
        "memory": _bytes(problem, which) / card.bytes,
        "exponentials": passes * problem.batch * problem.heads * problem.pairs() / card.exponentials,
    }


def _bytes(problem: Problem, which: str) -> int:
    """Everything once: forward it reads query, key, value and writes the output; backward it reads these and the
    output's gradient, and writes three gradients. The log-sum-exp is float32.
    """
    tokens = problem.batch * problem.length
    own = 2 * tokens * problem.heads * problem.head_dim
    others = 2 * tokens * (problem.kv_heads or problem.heads) * problem.head_dim
    lse = 4 * tokens * problem.heads
    forward = 2 * own + 2 * others + lse
    return forward if which == "forward" else forward + 4 * own + 4 * others + lse
