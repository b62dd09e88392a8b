"""``ejkernel.ops.utils.fingerprint``: content as text, and devices."""

from __future__ import annotations

from ejkernel_classes import (
    abstractify,
    device_fingerprint,
    device_kind,
    get_device_platform,
    sharding_fingerprint,
    short_hash,
    stable_json,
)

__all__ = [
    "abstractify",
    "device_fingerprint",
    "device_kind",
    "get_device_platform",
    "sharding_fingerprint",
    "short_hash",
    "stable_json",
]
