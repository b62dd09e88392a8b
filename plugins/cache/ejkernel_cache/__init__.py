"""Configurations on disk: a cache that processes share, and records that are installed with a package.

Importing this module reads and writes no files. A name is imported when it is used, so that the command ``ejkernel
cache`` starts without JAX. See ``docs/stores.md``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._packaged import PackagedRecords
    from ._store import PersistentCache, default_cache
    from ._trust import CacheWarning

__all__ = ["CacheWarning", "PackagedRecords", "PersistentCache", "default_cache"]

#: The names of each module, as above.
_NAMES = {
    "ejkernel_cache._packaged": ("PackagedRecords",),
    "ejkernel_cache._store": ("PersistentCache", "default_cache"),
    "ejkernel_cache._trust": ("CacheWarning",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
