"""``rms_norm`` and ``layer_norm``, their gradients and their results of 8 bits, on TPUs, in Pallas."""

from __future__ import annotations

import attrs
from attrs.validators import in_, instance_of

#: Rows of a block.
BLOCKS = tuple(2**power for power in range(3, 14))


@attrs.frozen
class Config:
    """How many rows are in vector memory at a time."""

    rows: int = attrs.field(default=256, validator=in_(BLOCKS))
    #: Run in the interpreter of Pallas, on any device, for debugging.
    interpret: bool = attrs.field(default=False, validator=instance_of(bool))
