"""``ejkernel.ops.execution.batch``: one choice for many elements."""

from __future__ import annotations

from ejkernel_classes import pmap_with_config, vmap_with_config

__all__ = ["pmap_with_config", "vmap_with_config"]
