"""Attention, for programs that were written for ejKernel."""

from __future__ import annotations

import ejkernel_ops

from ._named import front_door

flash_attention = front_door(ejkernel_ops.flash_attention)
