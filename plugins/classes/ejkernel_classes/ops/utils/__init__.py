"""``ejkernel.ops.utils``: the two modules in it."""

from __future__ import annotations

from .datacarrier import BwdParams, FwdParams, get_safe_hash_int, hash_fn
from .fingerprint import (
    abstractify,
    device_fingerprint,
    device_kind,
    get_device_platform,
    sharding_fingerprint,
    short_hash,
    stable_json,
)

__all__ = [
    "BwdParams",
    "FwdParams",
    "abstractify",
    "device_fingerprint",
    "device_kind",
    "get_device_platform",
    "get_safe_hash_int",
    "hash_fn",
    "sharding_fingerprint",
    "short_hash",
    "stable_json",
]
