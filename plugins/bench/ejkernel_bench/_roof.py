"""The least time of an attention on a card: that of its matrix products, its memory, or its exponentials."""

from __future__ import annotations

import attrs

from ejkernel_core import Example

from ._attention import bytes_moved, exponentials, flops


@attrs.frozen
class Card:
    """The rates of a card, in a second, by its data sheet."""

    #: Multiplications and additions of matrices of 16 bits.
    flops: float
    bytes: float
    exponentials: float


#: 132 multiprocessors at 1.83 GHz: 4,096 operations of products each, and 16 exponentials.
CARDS = {
    "NVIDIA H200": Card(flops=989e12, bytes=4.8e12, exponentials=132 * 16 * 1.83e9),
    "NVIDIA H100 80GB HBM3": Card(flops=989e12, bytes=3.35e12, exponentials=132 * 16 * 1.83e9),
}


def least_seconds(example: Example, pass_name: str, card: Card) -> dict[str, float]:
    """By what limits it; the greatest of them is the roof.

    >>> from ejkernel_ops.flash_attention.sizes import self_attention
    >>> least = least_seconds(self_attention(1, 16384, 16, 128, "bfloat16"), "forward", CARDS["NVIDIA H200"])
    >>> {name: f"{1e3 * seconds:.2f} ms" for name, seconds in least.items()}
    {'products': '1.11 ms', 'memory': '0.06 ms', 'exponentials': '0.56 ms'}
    """
    return {
        "products": flops(example, pass_name) / card.flops,
        "memory": bytes_moved(example, pass_name) / card.bytes,
        "exponentials": exponentials(example, pass_name) / card.exponentials,
    }
