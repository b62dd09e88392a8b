"""Kernels for JAX, by name: every operation, backend and policy is a plugin.

``call("flash_attention", query, key, value, causal=True)`` runs the best implementation that is installed for the
device at hand. See ``docs/index.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._axes import Axes
from ._cache import ConfigCache
from ._call import Registry
from ._discovery import CORE, version_of
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
    UntrustedFolder,
)
from ._example import Example
from ._hooks import hookimpl
from ._kernel import Candidate, Invocation, matching_record
from ._keys import Key, stable_json
from ._loading import config_types
from ._operation import Cost, Operation, gradient_signature
from ._plan import Choice, Explanation, Plan, Verdict
from ._policies import recall
from ._records import (
    Provenance,
    Record,
    as_record,
    from_json,
    record_from_json,
    record_to_json,
    successor,
    to_json,
)
from ._scopes import AutotunePolicy, Scope, overlay_cache, policy_override

if TYPE_CHECKING:
    from ._partitioning import Partitioning

__all__ = [
    "AutotunePolicy",
    "Axes",
    "Candidate",
    "Choice",
    "ConfigCache",
    "Cost",
    "EjkernelError",
    "Example",
    "Explanation",
    "Invocation",
    "Key",
    "NoConfig",
    "NoKernel",
    "NotDifferentiable",
    "Operation",
    "Partitioning",
    "Plan",
    "PluginError",
    "Provenance",
    "Record",
    "RecordError",
    "Registry",
    "Scope",
    "UnknownBackend",
    "UnknownOperation",
    "Unsupported",
    "UntrustedFolder",
    "Verdict",
    "as_record",
    "call",
    "config_type",
    "explain",
    "from_json",
    "gradient_signature",
    "hookimpl",
    "invocation",
    "matching_record",
    "overlay_cache",
    "plan",
    "policy_override",
    "recall",
    "record_from_json",
    "record_to_json",
    "registry",
    "stable_json",
    "successor",
    "to_json",
]

#: The registry that the functions below use. It has the installed plugins that EJKERNEL_PLUGINS selects.
registry = Registry()


call = registry.call
invocation = registry.invocation
plan = registry.plan
explain = registry.explain


def config_type(kernel: str) -> type | None:
    """The type of a kernel's configurations; None unless it is installed or was registered in this process.

    >>> config_type("flash_attention.xla").__name__, config_type("nobodys.kernel")
    ('Config', None)
    """
    op, _, backend = kernel.rpartition(".")
    kind = config_types.get(kernel)
    if kind is None and backend and backend in registry.backends(op):
        return registry.kernel(op, backend).config_type
    return kind


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version_of(CORE)
    if name == "Partitioning":  # imported when it is used, which most programs do not
        from ._partitioning import Partitioning

        return Partitioning
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
