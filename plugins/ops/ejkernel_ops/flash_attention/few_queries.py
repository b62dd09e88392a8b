"""The examples of attention as a kernel for decoding takes them: of each the first queries, without what it refuses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from ejkernel_core import Example

from . import examples as flash_attention

REFUSED_ARGUMENTS = {"bias", "attention_mask", "dropout_prob", "dropout_seed", "q_segment_ids", "kv_segment_ids"}

#: The terms of the gradient of a sink cancel here, to a tenth and less, so that one rounding of weights shows in it.
CANCELLING = "grid08-float16-257x172-d16-b2-g2-segments-bias-sinks-cap"


def few_queries(examples: Sequence[Example], most: int) -> Iterator[Example]:
    """Those that are not packed, have elements, and are not of float64, with at most so many queries."""
    for one in examples:
        shapes = [one.abstract()[name].shape for name in ("query", "key")]
        if len(shapes[0]) == 4 and not any(0 in shape for shape in shapes) and one.dtype != "float64":
            yield _shortened(one, most)


def _shortened(long: Example, most: int) -> Example:
    def arguments(draw: int) -> dict[str, Any]:
        rest = {name: x for name, x in long.arguments(draw).items() if name not in REFUSED_ARGUMENTS}
        return rest | {"query": rest["query"][:, :most]}

    sets = tuple(names for names in long.wrt_sets if not REFUSED_ARGUMENTS & {*names})
    shared = {"long": long.long, "batched": long.batched, "wrt_sets": sets}
    short = flash_attention.example(long.name, arguments, long.checks, dtype=long.dtype, **shared)
    varied = [one for one in long.variations if not REFUSED_ARGUMENTS & {*one.arguments(0)}]
    wrt = tuple(name for name in short.wrt if not (name == "softmax_aux" and long.name == CANCELLING))
    return attrs.evolve(short, wrt=wrt, variations=tuple(_shortened(one, most) for one in varied))
