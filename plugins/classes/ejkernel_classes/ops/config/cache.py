"""``ejkernel.ops.config.cache``: configurations in memory."""

from __future__ import annotations

from ejkernel_classes import ConfigCache, overlay_cache

__all__ = ["ConfigCache", "overlay_cache"]
