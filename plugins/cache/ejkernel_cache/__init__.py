"""Configurations on disk: what was measured here is found by the next process, and what comes with a package too.

Importing this reads nothing and makes nothing. See ``docs/stores.md``.
"""

from ._packaged import PackagedRecords
from ._store import CacheWarning, PersistentCache, default_cache

__all__ = ["CacheWarning", "PackagedRecords", "PersistentCache", "default_cache"]
