"""For ``validate=True``: the values of labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def validate(arguments: Mapping[str, Any]) -> None:
    """Raise for a label that is neither ignored nor a word, and for a negative start of a shard. Where there is a
    start, labels may be those of other shards.
    """
    weight, start = arguments["weight"], arguments["vocab_start"]
    size = weight.shape[0 if arguments["transpose_weight"] else 1]
    labels = np.asarray(arguments["labels"]).astype(object)
    ignored = arguments.get("ignore_index", -100)
    for place in map(tuple, np.argwhere(labels != ignored)):
        label, where = labels[place], f"labels[{', '.join(map(str, place))}]" if place else "labels"
        if label < 0 or (start is None and label >= size):
            most = f"from 0 to {size - 1}" if start is None else "at least 0"
            raise ValueError(f"{where} must be {most}, or {ignored}, which is ignored; got {label}")
    if start is not None and np.asarray(start).item() < 0:
        raise ValueError(f"vocab_start must be at least 0; got {np.asarray(start).item()}")
