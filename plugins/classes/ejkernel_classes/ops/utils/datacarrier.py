"""``ejkernel.ops.utils.datacarrier``: parameters that kernels have in common, and hashes."""

from __future__ import annotations

from ejkernel_classes import BwdParams, FwdParams, get_safe_hash_int, hash_fn

__all__ = ["BwdParams", "FwdParams", "get_safe_hash_int", "hash_fn"]
