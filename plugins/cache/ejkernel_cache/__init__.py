"""Configurations on disk: a cache that processes share, and records that are installed with a package.

Importing this module reads and writes no files. See ``docs/stores.md``.
"""

from ._packaged import PackagedRecords
from ._store import CacheWarning, PersistentCache, default_cache

__all__ = ["CacheWarning", "PackagedRecords", "PersistentCache", "default_cache"]
