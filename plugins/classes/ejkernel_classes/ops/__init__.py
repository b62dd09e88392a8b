"""``ejkernel.ops``: kernels as classes, the choice of their configurations, and what is said about both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ejkernel_classes
from ejkernel_classes import (
    AutotunePolicy,
    BwdParams,
    Cfg,
    ConfigCache,
    ConfigChooser,
    ConfigSelectorChain,
    Executor,
    FwdParams,
    Invocation,
    Kernel,
    Out,
    abstractify,
    default_key_builder_with_sharding,
    device_fingerprint,
    device_kind,
    from_json,
    get_device_platform,
    get_invocations,
    get_safe_hash_int,
    hash_fn,
    overlay_cache,
    pmap_with_config,
    policy_override,
    record_invocation,
    sharding_fingerprint,
    short_hash,
    stable_json,
    to_json,
    vmap_with_config,
)
from ejkernel_classes._submodules import submodule

if TYPE_CHECKING:
    from ejkernel_classes import (
        Autotuner,
        PersistentCache,
        autotune,
        autotune_recorded,
        benchmark,
        extract_labels_from_hlo_text,
        find_labels_in_lowered,
        label,
        labels_to_configs,
    )

__all__ = [
    "AutotunePolicy",
    "Autotuner",
    "BwdParams",
    "Cfg",
    "ConfigCache",
    "ConfigChooser",
    "ConfigSelectorChain",
    "Executor",
    "FwdParams",
    "Invocation",
    "Kernel",
    "Out",
    "PersistentCache",
    "abstractify",
    "autotune",
    "autotune_recorded",
    "benchmark",
    "default_key_builder_with_sharding",
    "device_fingerprint",
    "device_kind",
    "extract_labels_from_hlo_text",
    "find_labels_in_lowered",
    "from_json",
    "get_device_platform",
    "get_invocations",
    "get_safe_hash_int",
    "hash_fn",
    "label",
    "labels_to_configs",
    "overlay_cache",
    "pmap_with_config",
    "policy_override",
    "record_invocation",
    "sharding_fingerprint",
    "short_hash",
    "stable_json",
    "to_json",
    "vmap_with_config",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(ejkernel_classes, name)
    return submodule(__name__, name, ("config", "core", "execution", "registry", "utils"))
