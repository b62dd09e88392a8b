"""Kernels for JAX, by name: every operation, backend and policy is a plugin.

``call("flash_attention", query, key, value, causal=True)`` runs the best implementation that is installed for the
device at hand. See ``docs/index.md``.
"""

from __future__ import annotations

from typing import Any

from ._devices import device_fingerprint
from ._errors import (
    EjkernelError,
    NoKernel,
    NotDifferentiable,
    PluginError,
    UnknownBackend,
    UnknownOperation,
    Unsupported,
)
from ._hookspecs import hookimpl
from ._invocation import Invocation
from ._keys import abstractify, sharding_fingerprint, short_hash, stable_json
from ._operation import Cost, Operation, gradient_signature
from ._plan import Candidate, Choice, Explanation, Plan, Verdict
from ._registry import Registry

__all__ = [
    "Candidate",
    "Choice",
    "Cost",
    "EjkernelError",
    "Explanation",
    "Invocation",
    "NoKernel",
    "NotDifferentiable",
    "Operation",
    "Plan",
    "PluginError",
    "Registry",
    "UnknownBackend",
    "UnknownOperation",
    "Unsupported",
    "Verdict",
    "abstractify",
    "call",
    "device_fingerprint",
    "explain",
    "gradient_signature",
    "hookimpl",
    "plan",
    "registry",
    "sharding_fingerprint",
    "short_hash",
    "stable_json",
]

#: What is installed, as EJKERNEL_PLUGINS selects it: the registry that the functions below use.
registry = Registry()


def call(op: str, /, *args: Any, backend: str | None = None, cfg: Any = None, **kwargs: Any) -> Any:
    """Run the operation ``op`` by the best installed kernel for the device at hand.

    ``backend`` and ``cfg`` name a kernel or its configuration; they are obeyed, or refused with the reason. Everything
    else is for the operation. The call can be jitted, differentiated, vmapped and sharded.
    """
    return registry.call(op, *args, backend=backend, cfg=cfg, **kwargs)


def plan(op: str, /, *args: Any, backend: str | None = None, cfg: Any = None, **kwargs: Any) -> Plan:
    """What ``call`` would run, and why; arrays may be ``jax.ShapeDtypeStruct``. Raises what the call would raise."""
    return registry.plan(op, *args, backend=backend, cfg=cfg, **kwargs)


def explain(op: str, /, *args: Any, backend: str | None = None, cfg: Any = None, **kwargs: Any) -> Explanation:
    """The plan of a call and of its gradients, with every other kernel and its reason; print it."""
    return registry.explain(op, *args, backend=backend, cfg=cfg, **kwargs)
