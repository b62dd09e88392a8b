"""Attention over a sequence that is sharded over devices.

``context_attention`` is called inside ``shard_map``, or on arrays on a mesh. ``zigzag`` puts tokens into the order in
which all devices have the same work under a causal mask, ``unzigzag`` puts them back, and ``positions`` are those of a
device's tokens. ``merge`` makes one result of those for parts of the keys.
"""

from __future__ import annotations

import os

from ejkernel_core.extend import hide_frames

from ._attention import context_attention
from ._merge import merge
from .layouts import unzigzag, zigzag
from .positions import positions

__all__ = ["context_attention", "merge", "positions", "unzigzag", "zigzag"]

hide_frames(os.path.dirname(__file__))
