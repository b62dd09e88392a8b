"""All names in ejKernel's documents, in one place, as a thin layer over the core and its plugins.

It is for users of ejKernel, and for kernels in scripts: a ``Kernel`` needs no registration. ``docs/kernel-classes.md``
describes the classes, and ``docs/from-ejkernel.md`` all names.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from ejkernel_core import (
    AutotunePolicy,
    ConfigCache,
    from_json,
    overlay_cache,
    policy_override,
    to_json,
)
from ejkernel_core.extend import hide_frames

from ._content import abstractify, short_hash, stable_json
from ._devices import device_fingerprint, device_kind, get_device_platform, preferred_backend
from ._executor import ConfigChooser, ConfigSelectorChain, Executor
from ._invocation import Invocation, default_key_builder_with_sharding
from ._kernel import Cfg, Kernel, Out
from ._mapped import pmap_with_config, vmap_with_config
from ._params import BwdParams, FwdParams, get_safe_hash_int, hash_fn
from ._recording import get_invocations, record_invocation, stop_recording
from ._sharding import sharding_fingerprint
from ._submodules import submodule

if TYPE_CHECKING:
    from ejkernel_classes._autotuner import Autotuner
    from ejkernel_classes._persistent import PersistentCache
    from ejkernel_ops import flash_attention
    from ejkernel_ops.calibration import (
        estimate_shared_memory_bytes,
        get_shared_memory_limit,
        select_num_stages,
        select_num_warps,
    )
    from ejkernel_ops.numerics import log_sum_exp, safe_divide
    from ejkernel_ops.testing import generate_attention_inputs
    from ejkernel_packed import (
        cdiv,
        chunk_array,
        identity_dtype_convert,
        mask_to_segment_ids,
        prepare_chunk_indices,
        prepare_chunk_offsets,
        prepare_cu_seqlens_from_mask,
        prepare_lens,
        prepare_lens_from_mask,
        prepare_position_ids,
        prepare_sequence_ids,
        prepare_token_indices,
        segment_ids_to_mask,
        unchunk_array,
    )
    from ejkernel_testing import assert_allclose
    from ejkernel_tuning import (
        autotune,
        autotune_recorded,
        benchmark,
        extract_labels_from_hlo_text,
        find_labels_in_lowered,
        get_memory_usage,
        label,
        labels_to_configs,
        timer,
    )

hide_frames(os.path.dirname(__file__))

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
    "assert_allclose",
    "autotune",
    "autotune_recorded",
    "benchmark",
    "cdiv",
    "chunk_array",
    "default_key_builder_with_sharding",
    "device_fingerprint",
    "device_kind",
    "estimate_shared_memory_bytes",
    "extract_labels_from_hlo_text",
    "find_labels_in_lowered",
    "flash_attention",
    "from_json",
    "generate_attention_inputs",
    "get_device_platform",
    "get_invocations",
    "get_memory_usage",
    "get_safe_hash_int",
    "get_shared_memory_limit",
    "hash_fn",
    "identity_dtype_convert",
    "label",
    "labels_to_configs",
    "log_sum_exp",
    "mask_to_segment_ids",
    "overlay_cache",
    "pmap_with_config",
    "policy_override",
    "preferred_backend",
    "prepare_chunk_indices",
    "prepare_chunk_offsets",
    "prepare_cu_seqlens_from_mask",
    "prepare_lens",
    "prepare_lens_from_mask",
    "prepare_position_ids",
    "prepare_sequence_ids",
    "prepare_token_indices",
    "record_invocation",
    "safe_divide",
    "segment_ids_to_mask",
    "select_num_stages",
    "select_num_warps",
    "sharding_fingerprint",
    "short_hash",
    "stable_json",
    "stop_recording",
    "timer",
    "to_json",
    "unchunk_array",
    "vmap_with_config",
]

#: By module: the names that are imported on first use, because most programs do not need them.
_LATER = {
    "ejkernel_classes._persistent": ("PersistentCache",),
    "ejkernel_tuning": (
        "autotune",
        "autotune_recorded",
        "benchmark",
        "extract_labels_from_hlo_text",
        "find_labels_in_lowered",
        "get_memory_usage",
        "label",
        "labels_to_configs",
        "timer",
    ),
    "ejkernel_classes._autotuner": ("Autotuner",),
    "ejkernel_classes.modules": ("flash_attention",),
    "ejkernel_ops.calibration": (
        "estimate_shared_memory_bytes",
        "get_shared_memory_limit",
        "select_num_stages",
        "select_num_warps",
    ),
    "ejkernel_ops.numerics": (
        "log_sum_exp",
        "safe_divide",
    ),
    "ejkernel_ops.testing": ("generate_attention_inputs",),
    "ejkernel_packed": (
        "cdiv",
        "chunk_array",
        "identity_dtype_convert",
        "mask_to_segment_ids",
        "prepare_chunk_indices",
        "prepare_chunk_offsets",
        "prepare_cu_seqlens_from_mask",
        "prepare_lens",
        "prepare_lens_from_mask",
        "prepare_position_ids",
        "prepare_sequence_ids",
        "prepare_token_indices",
        "segment_ids_to_mask",
        "unchunk_array",
    ),
    "ejkernel_testing": ("assert_allclose",),
}


def __getattr__(name: str) -> Any:
    for module, names in _LATER.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    return submodule(__name__, name, ("callib", "modules", "ops", "xla_utils"))
