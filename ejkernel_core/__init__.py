"""Kernels for JAX, by name: every operation, backend and policy is a plugin.

``call("flash_attention", query, key, value, causal=True)`` runs the best implementation that is installed for the
device at hand. See ``docs/index.md``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Now, because it adds to JAX's keys: what was compiled before would be compiled again.
from ._scopes import AutotunePolicy as AutotunePolicy
from ._scopes import Scope as Scope
from ._scopes import overlay_cache as overlay_cache
from ._scopes import policy_override as policy_override

# What type checkers and editors see. At run time each name is imported when it is first used.
if TYPE_CHECKING:
    from ._axes import Axes as Axes
    from ._cache import ConfigCache as ConfigCache
    from ._call import Registry as Registry
    from ._content import stable_json as stable_json
    from ._default import call as call
    from ._default import config_type as config_type
    from ._default import explain as explain
    from ._default import invocation as invocation
    from ._default import plan as plan
    from ._default import registry as registry
    from ._errors import EjkernelError as EjkernelError
    from ._errors import NoConfig as NoConfig
    from ._errors import NoKernel as NoKernel
    from ._errors import NotDifferentiable as NotDifferentiable
    from ._errors import PluginError as PluginError
    from ._errors import RecordError as RecordError
    from ._errors import UnknownBackend as UnknownBackend
    from ._errors import UnknownOperation as UnknownOperation
    from ._errors import Unsupported as Unsupported
    from ._errors import UntrustedFolder as UntrustedFolder
    from ._example import Example as Example
    from ._hooks import hookimpl as hookimpl
    from ._invocation import Invocation as Invocation
    from ._json import from_json as from_json
    from ._json import record_from_json as record_from_json
    from ._json import record_to_json as record_to_json
    from ._json import to_json as to_json
    from ._kernel import Candidate as Candidate
    from ._kernel import matching_record as matching_record
    from ._keys import Key as Key
    from ._operation import Cost as Cost
    from ._operation import Operation as Operation
    from ._operation import gradient_signature as gradient_signature
    from ._partitioning import PartialSums as PartialSums
    from ._partitioning import Partitioning as Partitioning
    from ._plain import plain_kernel as plain_kernel
    from ._plan import Choice as Choice
    from ._plan import Explanation as Explanation
    from ._plan import Plan as Plan
    from ._plan import Verdict as Verdict
    from ._recall import recall as recall
    from ._records import Provenance as Provenance
    from ._records import Record as Record
    from ._records import as_record as as_record
    from ._records import successor as successor

#: The modules of the other public names.
_MODULES = {
    "Axes": "_axes",
    "Candidate": "_kernel",
    "Choice": "_plan",
    "ConfigCache": "_cache",
    "Cost": "_operation",
    "EjkernelError": "_errors",
    "Example": "_example",
    "Explanation": "_plan",
    "Invocation": "_invocation",
    "Key": "_keys",
    "NoConfig": "_errors",
    "NoKernel": "_errors",
    "NotDifferentiable": "_errors",
    "Operation": "_operation",
    "PartialSums": "_partitioning",
    "Partitioning": "_partitioning",
    "Plan": "_plan",
    "PluginError": "_errors",
    "Provenance": "_records",
    "Record": "_records",
    "RecordError": "_errors",
    "Registry": "_call",
    "UnknownBackend": "_errors",
    "UnknownOperation": "_errors",
    "Unsupported": "_errors",
    "UntrustedFolder": "_errors",
    "Verdict": "_plan",
    "as_record": "_records",
    "call": "_default",
    "config_type": "_default",
    "explain": "_default",
    "from_json": "_json",
    "gradient_signature": "_operation",
    "hookimpl": "_hooks",
    "invocation": "_default",
    "matching_record": "_kernel",
    "plain_kernel": "_plain",
    "plan": "_default",
    "recall": "_recall",
    "record_from_json": "_json",
    "record_to_json": "_json",
    "registry": "_default",
    "stable_json": "_content",
    "successor": "_records",
    "to_json": "_json",
}

__all__ = sorted([*_MODULES, "AutotunePolicy", "Scope", "overlay_cache", "policy_override"])


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from ._discovery import CORE, version_of

        return version_of(CORE)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_hint(name)}")
    value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value  # so that the next use does not come here
    return value


def _hint(name: str) -> str:
    """The end of a sentence about a name that is not here: how the operation of that name is called."""
    if name.startswith("_"):  # Python and tools ask for many of these
        return ""
    from ._discovery import OPERATIONS, all_entries

    values = [entry.value for entry in all_entries() if (entry.group, entry.name) == (OPERATIONS, name)]
    modules = {value.replace(":", ".").partition(".")[0] for value in values}
    typed = "".join(f", or {module}.{name}(...)" for module in modules if name in _names_in(module))
    return f"; it is an operation: {__name__}.call({name!r}, ...){typed}" if modules else ""


def _names_in(module: str) -> list[str]:
    try:
        return dir(importlib.import_module(module))
    except Exception:  # a broken plugin must not make `hasattr` raise
        return []


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
