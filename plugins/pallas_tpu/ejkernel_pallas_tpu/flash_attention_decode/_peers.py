"""The general kernel, which the estimated time of the decode kernel is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ejkernel_core
from ejkernel_core import Example
from ejkernel_pallas_tpu.testing import Peer

BLOCKS = (512, 1024)


def peers(example: Example) -> Iterator[Peer]:
    """Its best block of keys; it pads the queries to 128."""
    options = {name: value for name, value in example.abstract().items() if not hasattr(value, "dtype")}
    yield Peer("general", {str(block): _general(block, options) for block in BLOCKS})


def _general(block: int, options: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:
    from ejkernel_pallas_tpu import flash_attention

    def run(arrays: Mapping[str, Any]) -> Any:
        inv = ejkernel_core.invocation("flash_attention", **arrays, **options)
        # As the operation brings the call into canonical form.
        start = arrays["kv_lengths"] - arrays["query"].shape[1]
        inv = inv.with_arrays({**arrays, "q_start": start})
        return flash_attention.compute(inv, flash_attention.Config(128, block), False)

    return run
