"""What stores, tuners and tools use of the core, beside the names of ``ejkernel_core``.

A name is imported when it is first used, as in the package itself.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._content import TAG as TAG
    from ._content import abstractify as abstractify
    from ._content import canonical_json as canonical_json
    from ._content import content as content
    from ._content import content_json as content_json
    from ._content import import_path as import_path
    from ._content import short_hash as short_hash
    from ._devices import Target as Target
    from ._devices import absent_target as absent_target
    from ._devices import device_fingerprint as device_fingerprint
    from ._devices import device_name as device_name
    from ._devices import device_or_default as device_or_default
    from ._devices import processor as processor
    from ._devices import target_of as target_of
    from ._devices import target_of_device as target_of_device
    from ._discovery import KERNELS as KERNELS
    from ._discovery import OPERATIONS as OPERATIONS
    from ._discovery import POLICIES as POLICIES
    from ._discovery import Broken as Broken
    from ._discovery import PluginEntry as PluginEntry
    from ._discovery import conflict as conflict
    from ._discovery import version_of as version_of
    from ._display import brief as brief
    from ._display import config_text as config_text
    from ._display import html_table as html_table
    from ._display import html_text as html_text
    from ._display import one_line as one_line
    from ._display import quantity as quantity
    from ._display import suggestion as suggestion
    from ._display import text_of as text_of
    from ._errors import message as message
    from ._errors import plugin_faults as plugin_faults
    from ._errors import printable as printable
    from ._explain import AbstractCall as AbstractCall
    from ._explain import abstract_call as abstract_call
    from ._explain import results_and_restore as results_and_restore
    from ._hooks import BUILT_IN_PREFIX as BUILT_IN_PREFIX
    from ._jax_versions import Primitive as Primitive
    from ._jax_versions import ends_at_caller as ends_at_caller
    from ._jax_versions import hide_frames as hide_frames
    from ._jax_versions import line_of_call as line_of_call
    from ._jax_versions import mapped_mesh_axes as mapped_mesh_axes
    from ._jax_versions import vary_alike as vary_alike
    from ._json import SCHEMA as SCHEMA
    from ._json import check_characters as check_characters
    from ._json import check_time as check_time
    from ._json import type_name as type_name
    from ._kernel import MAX_CONFIGURATIONS as MAX_CONFIGURATIONS
    from ._kernel import LoadedKernel as LoadedKernel
    from ._kernel import why_mutable as why_mutable
    from ._labels import digest_label as digest_label
    from ._labels import field_types as field_types
    from ._labels import nested_class as nested_class
    from ._labels import value_text as value_text
    from ._layout import Axis as Axis
    from ._layout import Layout as Layout
    from ._loading import check_plugin as check_plugin
    from ._loading import config_types as config_types
    from ._measurement import Earlier as Earlier
    from ._measurement import Entry as Entry
    from ._measurement import Progress as Progress
    from ._measurement import Trial as Trial
    from ._plugins import Plugins as Plugins
    from ._policies import Selection as Selection
    from ._policies import ask_policies as ask_policies
    from ._policies import is_incomplete as is_incomplete
    from ._processes import processes_in_words as processes_in_words
    from ._recall import StorePolicy as StorePolicy
    from ._records import Reason as Reason
    from ._records import Shortfall as Shortfall
    from ._request import Numerics as Numerics
    from ._scopes import EMPTY as EMPTY
    from ._scopes import ScopeChange as ScopeChange
    from ._scopes import current_scope as current_scope
    from ._tuning import exclusive_measurement as exclusive_measurement
    from ._tuning import remember_records as remember_records

#: The names of each module.
_NAMES = {
    "_content": "TAG abstractify canonical_json content content_json import_path short_hash",
    "_devices": "Target absent_target device_fingerprint device_name device_or_default processor target_of "
    "target_of_device",
    "_discovery": "Broken KERNELS OPERATIONS POLICIES PluginEntry conflict version_of",
    "_display": "brief config_text html_table html_text one_line quantity suggestion text_of",
    "_errors": "message plugin_faults printable",
    "_explain": "AbstractCall abstract_call results_and_restore",
    "_hooks": "BUILT_IN_PREFIX",
    "_jax_versions": "Primitive ends_at_caller hide_frames line_of_call mapped_mesh_axes vary_alike",
    "_json": "SCHEMA check_characters check_time type_name",
    "_kernel": "LoadedKernel MAX_CONFIGURATIONS why_mutable",
    "_labels": "digest_label field_types nested_class value_text",
    "_layout": "Axis Layout",
    "_loading": "check_plugin config_types",
    "_measurement": "Earlier Entry Progress Trial",
    "_plugins": "Plugins",
    "_policies": "Selection ask_policies is_incomplete",
    "_processes": "processes_in_words",
    "_recall": "StorePolicy",
    "_records": "Reason Shortfall",
    "_request": "Numerics",
    "_scopes": "EMPTY ScopeChange current_scope",
    "_tuning": "exclusive_measurement remember_records",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULES[name]}", __package__), name)
    globals()[name] = value  # so that the next use does not come here
    return value


def __dir__() -> list[str]:
    return __all__
