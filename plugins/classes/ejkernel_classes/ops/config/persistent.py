"""``ejkernel.ops.config.persistent``: configurations on disk."""

from __future__ import annotations

from ejkernel_classes._persistent import PersistentCache

__all__ = ["PersistentCache"]
