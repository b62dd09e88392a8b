"""Kernels for JAX, by name: every operation, backend and policy is a plugin.

``call("flash_attention", query, key, value, causal=True)`` runs the best implementation that is installed for the
device at hand. See ``docs/index.md``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._cache import ConfigCache
from ._devices import device_fingerprint, device_kind, get_device_platform, preferred_backend
from ._errors import (
    EjkernelError,
    NoConfig,
    NoKernel,
    NotDifferentiable,
    PluginError,
    RecordError,
    UnknownBackend,
    UnknownOperation,
    Unsupported,
)
from ._hookspecs import hookimpl
from ._invocation import Invocation, Key
from ._keys import abstractify, sharding_fingerprint, short_hash, stable_json
from ._labels import Label, extract_labels_from_hlo_text, find_labels_in_lowered, label, labels_to_configs
from ._mapped import pmap_with_config, vmap_with_config
from ._operation import Cost, Operation, gradient_signature
from ._plan import Candidate, Choice, Explanation, Plan, Verdict
from ._policies import recall
from ._records import (
    Provenance,
    Record,
    as_record,
    fitting,
    from_json,
    imported_type,
    record_from_json,
    record_to_json,
    successor,
    to_json,
    type_name,
)
from ._registry import Registry
from ._scopes import AutotunePolicy, Scope, overlay_cache, policy_override

if TYPE_CHECKING:
    from ._params import BwdParams, FwdParams, get_safe_hash_int, hash_fn
    from .calibration import (
        estimate_shared_memory_bytes,
        get_shared_memory_limit,
        select_num_stages,
        select_num_warps,
    )
    from .classes import ConfigSelectorChain, Executor, Kernel, default_key_builder_with_sharding
    from .tuning import (
        Timing,
        TuningResult,
        autotune,
        autotune_recorded,
        benchmark,
        clear_invocations,
        get_invocations,
        get_memory_usage,
        record_invocation,
        recording,
        timer,
    )

__all__ = [
    "AutotunePolicy",
    "BwdParams",
    "Candidate",
    "Choice",
    "ConfigCache",
    "ConfigSelectorChain",
    "Cost",
    "EjkernelError",
    "Executor",
    "Explanation",
    "FwdParams",
    "Invocation",
    "Kernel",
    "Key",
    "Label",
    "NoConfig",
    "NoKernel",
    "NotDifferentiable",
    "Operation",
    "Plan",
    "PluginError",
    "Provenance",
    "Record",
    "RecordError",
    "Registry",
    "Scope",
    "Timing",
    "TuningResult",
    "UnknownBackend",
    "UnknownOperation",
    "Unsupported",
    "Verdict",
    "abstractify",
    "as_record",
    "autotune",
    "autotune_recorded",
    "benchmark",
    "call",
    "clear_invocations",
    "default_key_builder_with_sharding",
    "device_fingerprint",
    "device_kind",
    "estimate_shared_memory_bytes",
    "explain",
    "extract_labels_from_hlo_text",
    "find_labels_in_lowered",
    "fitting",
    "from_json",
    "get_device_platform",
    "get_invocations",
    "get_memory_usage",
    "get_safe_hash_int",
    "get_shared_memory_limit",
    "gradient_signature",
    "hash_fn",
    "hookimpl",
    "imported_type",
    "invocation",
    "label",
    "labels_to_configs",
    "overlay_cache",
    "plan",
    "pmap_with_config",
    "policy_override",
    "preferred_backend",
    "recall",
    "record_from_json",
    "record_invocation",
    "record_to_json",
    "recording",
    "registry",
    "select_num_stages",
    "select_num_warps",
    "sharding_fingerprint",
    "short_hash",
    "stable_json",
    "successor",
    "timer",
    "to_json",
    "type_name",
    "vmap_with_config",
]

#: What is installed, as EJKERNEL_PLUGINS selects it: the registry that the functions below use.
registry = Registry()


def call(op: str, /, *args: Any, backend: str | None = None, cfg: Any = None, **kwargs: Any) -> Any:
    """Run the operation ``op`` by the best installed kernel for the device at hand.

    ``backend`` and ``cfg`` name a kernel or its configuration; they are obeyed, or refused with the reason. Everything
    else is for the operation. The call can be jitted, differentiated, vmapped and sharded.

    >>> import jax.numpy as jnp
    >>> query = jnp.ones((1, 4, 2, 8))
    >>> call("flash_attention", query, query, query, causal=True).shape
    (1, 4, 2, 8)
    """
    return registry.call(op, *args, backend=backend, cfg=cfg, **kwargs)


def invocation(op: str, /, *args: Any, **kwargs: Any) -> Invocation:
    """What kernels and policies are told of such a call; its ``key`` is what a configuration is remembered by.

    >>> import jax
    >>> query = jax.ShapeDtypeStruct((1, 4, 2, 8), "float32")
    >>> inv = invocation("flash_attention", query, query, query, causal=True)
    >>> inv["causal"], inv["query"].shape
    (True, (1, 4, 2, 8))
    """
    return registry.invocation(op, *args, **kwargs)


def plan(op: str, /, *args: Any, backend: str | None = None, cfg: Any = None, **kwargs: Any) -> Plan:
    """What ``call`` would run, and why; arrays may be ``jax.ShapeDtypeStruct``. Raises what the call would raise.

    >>> import jax
    >>> query = jax.ShapeDtypeStruct((1, 4, 2, 8), "float32")
    >>> plan("flash_attention", query, query, query, backend="reference").kernel.name
    'flash_attention.reference'
    """
    return registry.plan(op, *args, backend=backend, cfg=cfg, **kwargs)


def explain(op: str, /, *args: Any, backend: str | None = None, cfg: Any = None, **kwargs: Any) -> Explanation:
    """The plan of a call and of its gradients, with every other kernel and its reason; print it.

    >>> import jax
    >>> query = jax.ShapeDtypeStruct((1, 4, 2, 8), "float32")
    >>> explanation = explain("flash_attention", query, query, query)
    >>> explanation.op, explanation.backward.op
    ('flash_attention', 'flash_attention_bwd')
    """
    return registry.explain(op, *args, backend=backend, cfg=cfg, **kwargs)


#: What not every program needs is imported when it is asked for.
_LATER = {
    "_params": ("BwdParams", "FwdParams", "get_safe_hash_int", "hash_fn"),
    "calibration": (
        "estimate_shared_memory_bytes",
        "get_shared_memory_limit",
        "select_num_stages",
        "select_num_warps",
    ),
    "classes": ("ConfigSelectorChain", "Executor", "Kernel", "default_key_builder_with_sharding"),
    "tuning": (
        "Timing",
        "TuningResult",
        "autotune",
        "autotune_recorded",
        "benchmark",
        "clear_invocations",
        "get_invocations",
        "get_memory_usage",
        "record_invocation",
        "recording",
        "timer",
    ),
}


def __getattr__(name: str) -> Any:
    for module, names in _LATER.items():
        if name in names:
            return getattr(importlib.import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
