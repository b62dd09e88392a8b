"""Kernels for JAX, by name: every operation, backend and policy is a plugin.

``call("flash_attention", query, key, value, causal=True)`` runs the best implementation that is installed for the
device at hand. See ``docs/index.md``.
"""

from __future__ import annotations

from typing import Any

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
)
from ._hookspecs import hookimpl
from ._kernel import Invocation
from ._keys import Key, stable_json
from ._loading import config_types
from ._operation import Cost, Operation, gradient_signature
from ._plan import Candidate, Choice, Explanation, Plan, Verdict, fitting
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

__all__ = [
    "AutotunePolicy",
    "Axes",
    "Candidate",
    "Choice",
    "ConfigCache",
    "Cost",
    "EjkernelError",
    "Explanation",
    "Invocation",
    "Key",
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
    "UnknownBackend",
    "UnknownOperation",
    "Unsupported",
    "Verdict",
    "as_record",
    "call",
    "config_type",
    "explain",
    "fitting",
    "from_json",
    "gradient_signature",
    "hookimpl",
    "invocation",
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

#: What is installed, as EJKERNEL_PLUGINS selects it: the registry that the functions below use.
registry = Registry()


def call(op: str, /, *args: Any, backend: str | None = None, cfg: Any = None, **kwargs: Any) -> Any:
    """Run the operation ``op`` by the best installed kernel for the device at hand.

    ``backend`` and ``cfg`` name a kernel or its configuration; they are obeyed, or refused with the reason. Everything
    else is for the operation. The call can be jitted, differentiated, vmapped and sharded. With ``validate=True`` the
    operation looks at the values of arrays first; where one is traced, it has none, and the call is refused.

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

    Nothing is measured: where a call would measure, the plan says so.

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


def config_type(kernel: str) -> type | None:
    """The type of the configurations of a kernel that is installed, or was registered in this process; else None.

    >>> config_type("flash_attention.xla").__name__, config_type("nobodys.kernel")
    ('Config', None)
    """
    op, _, backend = kernel.rpartition(".")
    known = config_types.get(kernel)
    if known is None and backend and backend in registry.backends(op):
        return registry.kernel(op, backend).config_type
    return known


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version_of(CORE)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
