"""Where measurements store records: in a folder of their own, so that the user's stay as they are."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import ejkernel_core
from ejkernel_cache import default_cache


@contextmanager
def temporary_store() -> Iterator[None]:
    """Records are stored in a new folder, which is removed at the end."""
    with tempfile.TemporaryDirectory() as folder, store_in(folder):
        yield


@contextmanager
def store_in(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Records are stored in this folder, and nowhere else."""
    previous_folder = os.environ.get("EJKERNEL_CACHE_DIR")
    os.environ["EJKERNEL_CACHE_DIR"] = os.fspath(folder)
    default_cache.cache_clear()  # another benchmark may have used the user's
    try:
        yield
    finally:
        ejkernel_core.registry.forget()
        default_cache.cache_clear()
        os.environ.pop("EJKERNEL_CACHE_DIR")
        os.environ.update({} if previous_folder is None else {"EJKERNEL_CACHE_DIR": previous_folder})
