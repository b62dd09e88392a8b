"""Calls of attention over pages that tests share."""

from __future__ import annotations

from typing import Any

import numpy as np


def alone(given: dict[str, Any], place: int) -> dict[str, Any]:
    """A sequence of a call, with a table that has no more pages than it needs."""
    starts, lengths = given["query_start_loc"], given["kv_lens"]
    pages = -(-int(lengths[place]) // given["kv_pages"].shape[1])
    return given | {
        "query": given["query"][starts[place] : starts[place + 1]],
        "kv_lens": lengths[place : place + 1],
        "block_tables": given["block_tables"][place : place + 1, :pages],
        "query_start_loc": np.array([0, starts[place + 1] - starts[place]], np.int32),
    }
