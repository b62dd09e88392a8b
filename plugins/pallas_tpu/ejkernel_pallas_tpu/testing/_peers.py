"""Other implementations of an operation, which the estimated time of a kernel is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs


@attrs.frozen(eq=False)
class Peer:
    """An implementation: the quickest of its variants counts."""

    name: str
    #: By a name, such as that of its blocks: the function of the arrays of an example, by name.
    variants: Mapping[str, Callable[[Mapping[str, Any]], Any]]
    #: The least speed of our forward pass, relative to this one, and of our forward and backward passes together.
    minimum_ratio: float = 1.0
    minimum_ratio_with_gradients: float = 1.0
    #: The variants whose forward pass is that of another one.
    only_with_gradients: frozenset[str] = frozenset()
