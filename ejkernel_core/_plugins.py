"""The plugins that are installed or registered: listed from metadata, loaded on first use, looked up by name."""

from __future__ import annotations

import functools
import operator
import os
import threading
import weakref
from collections.abc import Hashable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import attrs

from . import _discovery
from ._cache import ConfigCache
from ._choice import candidates_for, choose
from ._discovery import KERNELS, OPERATIONS, POLICIES, Broken, PluginEntry
from ._display import brief, quantity
from ._errors import NoKernel, PluginError, UnknownBackend, UnknownOperation
from ._hints import Hints
from ._hooks import BUILT_IN_PREFIX
from ._invocation import Invocation
from ._kernel import Candidate, LoadedKernel
from ._keys import Key
from ._loading import check_plugin, load
from ._operation import Operation
from ._plan import Plan, Verdict
from ._policies import Policies, Selection, chain
from ._recall import StorePolicy
from ._scopes import Scope


class _State(NamedTuple):
    """The plugins of a registry. It is replaced as a whole, so that readers need no lock."""

    #: By group and name: the entries.
    entries: Mapping[tuple[str, str], tuple[PluginEntry, ...]]
    #: By group and name: the plugins that are loaded.
    plugins: Mapping[tuple[str, str], Any] = MappingProxyType({})


@runtime_checkable
class HasPlugins(Protocol):
    """An object that makes several plugins, such as a ``Kernel`` of ejkernel-classes."""

    def as_plugins(self) -> Mapping[str, Any]:
        """The operations and kernels, by the names to register them with."""
        ...


class Plugins:
    """Operations, kernels and policies by name, and the choice among them; see ``Registry``."""

    #: The registry of these plugins. It alone has the compiled calls, and is freed with its last reference.
    _registry: weakref.ref[Any]

    def __init__(self, plugins: str | None = None, policies_of: Plugins | None = None) -> None:
        if not isinstance(plugins, str | None):
            raise TypeError(f"plugins: takes a text of names, with commas; got {type(plugins).__name__}")
        self._is_selected_by_environment = plugins is None
        self.plugins = os.environ.get("EJKERNEL_PLUGINS") if plugins is None else plugins
        fault = None if policies_of else _discovery.selection_fault(self.plugins)
        if fault and not self._is_selected_by_environment:
            raise ValueError(f"plugins: {fault}")
        #: The fault of EJKERNEL_PLUGINS, or "". It is raised at the first use, so that the core can be imported.
        self.selection_fault = f"EJKERNEL_PLUGINS: {fault}" if fault else ""
        self._lock = threading.Lock()
        self._policies_of = policies_of
        self._state = _State({} if policies_of else _by_name(_discovery.installed_entries(self.plugins)))
        #: The number of changes that may change the choice of a call.
        self.changes = 0
        #: By kind of keys: the value of ``changes`` at its last change.
        self._last_changes: dict[tuple[str, str], int] = {}
        self.memory = policies_of.memory if policies_of else ConfigCache()
        #: By policy and hook: how the policy failed when it was last notified.
        self._failures: dict[tuple[str, str], str] = {}
        #: The sources of the chain of policies, and the chain.
        self._chain: tuple[tuple[Any, ...], Policies | None] = ((None, None, None), None)

    def __repr__(self) -> str:
        groups = ((OPERATIONS, "operation", ""), (KERNELS, "kernel", ""), (POLICIES, "policy", "policies"))
        counts = ", ".join(quantity(len(self.names(group)), *noun) for group, *noun in groups)
        return f"Registry(plugins={self.plugins!r}, {counts})"

    # -- registration --------------------------------------------------------------------------------------------

    def register(self, plugin: Any, name: str | None = None) -> Any:
        """Add an operation, a kernel called ``<operation>.<backend>``, or a policy, in this registry alone.

        It replaces a plugin of the same name, so that a notebook cell can be run again. Returns ``plugin``.
        """
        if not isinstance(name, str | None):
            raise TypeError(f"register(plugin, name): the name takes a text; got {type(name).__name__}")
        if isinstance(plugin, HasPlugins):
            for part_name, part in plugin.as_plugins().items():
                self.register(part, part_name)
        elif isinstance(plugin, Operation):
            self._add(PluginEntry(OPERATIONS, name or plugin.name), plugin)
        elif name is None:
            raise TypeError(
                "register(plugin, name): a kernel needs its name, '<operation>.<backend>', and a policy any"
            )
        else:
            is_policy = any(hasattr(plugin, hook) for hook in ("select_config", "measure", "settle"))
            entry = PluginEntry(POLICIES if is_policy else KERNELS, name)
            self._add(entry, check_plugin(entry, plugin))
        return plugin

    @property
    def memory(self) -> ConfigCache:
        """The configurations of the policy "memory". A change of one drops the compiled functions of its kind."""
        return self._memory

    @memory.setter
    def memory(self, memory: ConfigCache) -> None:
        self._memory = memory
        memory.notify(self._forget_kind)
        self._forget_calls()

    def remember(self, key: Key, value: Any) -> None:
        """Store a configuration, or a ``Record`` of one, in this registry's memory."""
        self.memory.put(key, value)

    def forget(self) -> None:
        """Empty this registry's memory."""
        self.memory.clear()

    def _forget_calls(self) -> None:
        self.changes += 1
        if (registry := self._registry()) is not None:
            # A new dictionary, so that a call that is being made now does not store its function in it.
            registry.calls = {}

    def _forget_kind(self, key: Hashable) -> None:
        """Drop the compiled functions that have chosen by keys of this kind: of the same operation and options."""
        self.changes += 1
        if isinstance(key, Key):
            kind = key.op, key.kind
            self._last_changes[kind] = self.changes
            registry = self._registry()
            for form in [] if registry is None else list(registry.calls.values()):
                form.forget(kind)

    def is_unchanged(self, kinds: Mapping[tuple[str, str], int]) -> bool:
        """Whether no key of these kinds has changed since ``changes`` had these values."""
        return all(
            self._last_changes.get(kind, 0) <= since for kind, since in list(kinds.items())
        )  # which other threads add to

    def _add(self, entry: PluginEntry, plugin: Any) -> None:
        key = (entry.group, entry.name)
        with self._lock:
            state = self._state
            self._state = _State({**state.entries, key: (entry,)}, {**state.plugins, key: plugin})
        for policy, hook in [failure for failure in self._failures if failure[0] == entry.name]:
            self._failures.pop((policy, hook), None)
        self._forget_calls()

    # -- choice --------------------------------------------------------------------------------------------------

    def choose(self, inv: Invocation, backend: str | None, cfg: Any, scope: Scope) -> Plan:
        """The plan of an invocation. ``NoKernel`` also says what to install."""
        kernels, broken = self.kernels(inv.op)
        for listener in scope.listeners:
            # Each is this process's own: what a listener measures, or looks up, no other process has to choose alike.
            listener(attrs.evolve(inv, processes=()) if inv.has_several_processes else inv, self)
        check = functools.partial(self._check_overlays, inv, scope)
        selection = self.selection(inv, scope, backend, cfg)
        try:
            plan = choose(selection, kernels, broken, check)
        except NoKernel as refusal:
            hints = self.hints.no_kernel(inv.op, is_restricted=(backend, cfg) != (None, None))
            raise NoKernel(f"{refusal}\n{hints}", refusal.verdicts) from None
        if plan.choice.measured:
            self.invalidate(inv)
        return plan

    def selection(self, inv: Invocation, scope: Scope, backend: str | None = None, cfg: Any = None) -> Selection:
        """What a configuration is selected for in this scope, and by what."""
        return Selection(inv, self.policies(scope), scope, backend, cfg, self.reference(inv))

    def candidates(self, inv: Invocation, backend: str | None = None) -> tuple[tuple[Candidate, ...], list[Verdict]]:
        """The kernels that can run an invocation, the highest rank first, and a verdict on every kernel, loaded or not.

        With ``backend``, those of that backend alone.
        """
        kernels, broken = self.kernels(inv.op)
        candidates, verdicts = candidates_for(inv, kernels, backend, None)
        return candidates, [*(v for v in broken if backend in (None, v.name.rpartition(".")[2])), *verdicts]

    def reference(self, inv: Invocation) -> LoadedKernel | Broken | None:
        """The reference, with which the tuner compares the results of other kernels; None where there is none."""
        if inv.operation is None or inv.operation.reference not in self.backends(inv.op):
            return None
        kernel: LoadedKernel | Broken = self._load(KERNELS, f"{inv.op}.{inv.operation.reference}")
        return kernel

    def policies(self, scope: Scope) -> Policies:
        """The policies in this scope."""
        if self._policies_of is not None:
            return self._policies_of.policies(scope)
        self._check_selection()
        sources = self._state.entries, self.memory, scope.policies
        previous, policies = self._chain
        if not all(map(operator.is_, previous, sources)):
            policies = self._build_policies(scope.policies)
            self._chain = sources, policies
        assert policies is not None
        return policies

    def _build_policies(self, policies_of_scope: tuple[tuple[str, Any], ...] | None) -> Policies:
        all_policies = [(name, self._load(POLICIES, name)) for name in self.names(POLICIES)]
        working = [(name, policy) for name, policy in all_policies if not isinstance(policy, Broken)]
        broken = [policy for _, policy in all_policies if isinstance(policy, Broken)]
        memory = (
            [] if policies_of_scope is not None else [(f"{BUILT_IN_PREFIX}memory", StorePolicy(self.memory, "memory"))]
        )
        return Policies(
            chain(working if policies_of_scope is None else policies_of_scope, memory),
            chain((name, policy) for name, policy in working if hasattr(policy, "measure")),
            chain((name, policy) for name, policy in working if hasattr(policy, "settle")),
            tuple(Verdict(plugin.entry.name, plugin.entry.provider, "broken", plugin.reason) for plugin in broken),
            {name: self._state.entries[POLICIES, name][0] for name, _ in all_policies},
            self._failures,
        )

    def invalidate(self, inv: Invocation) -> None:
        """Drop the compiled functions for calls of this kind, here and in the registry that has the policies."""
        for key in inv.tuning_keys:
            self._forget_kind(key)
        if self._policies_of is not None:
            self._policies_of.invalidate(inv)

    # -- questions -----------------------------------------------------------------------------------------------

    def operation(self, name: str) -> Operation:
        """The operation of this name."""
        self._check_selection()
        if not isinstance(name, str):
            raise TypeError(
                f"op: takes the name of an operation, as 'flash_attention'; got {type(name).__name__} {brief(name)}"
            )
        if (OPERATIONS, name) not in self._state.entries:
            raise UnknownOperation(self.hints.no_operation(name))
        plugin = self._load(OPERATIONS, name)
        if isinstance(plugin, Broken):
            raise PluginError(plugin.reason)
        assert isinstance(plugin, Operation)
        return plugin

    def forward_of(self, inv: Invocation) -> Operation | None:
        """The operation whose gradients this call computes; None where it computes none."""
        plugins = [self._load(OPERATIONS, name) for name in self.names(OPERATIONS)]
        forwards = (plugin for plugin in plugins if isinstance(plugin, Operation) and plugin.backward == inv.op)
        return next((f for f in forwards if {*f.signature.parameters, *f.results} <= {*inv.arguments}), None)

    def kernels(self, op: str) -> tuple[list[LoadedKernel], list[Verdict]]:
        """The kernels of an operation that load, and a verdict on each that does not."""
        plugins = [self._load(KERNELS, f"{op}.{backend}") for backend in self.backends(op)]
        kernels = [plugin for plugin in plugins if isinstance(plugin, LoadedKernel)]
        broken = [plugin for plugin in plugins if isinstance(plugin, Broken)]
        return kernels, [Verdict(b.entry.name, b.entry.provider, "broken", b.reason) for b in broken]

    def kernel(self, op: str, backend: str) -> LoadedKernel:
        """The kernel of an operation and a backend."""
        if not backend or backend not in self.backends(op):
            raise UnknownBackend(self.hints.no_backend(op, backend))
        kernel = self._load(KERNELS, f"{op}.{backend}")
        if isinstance(kernel, Broken):
            raise PluginError(kernel.reason)
        assert isinstance(kernel, LoadedKernel)
        return kernel

    def backends(self, op: str) -> tuple[str, ...]:
        """The backends for which an operation has kernels, loaded or not."""
        kernels = (name.rpartition(".") for name in self.names(KERNELS))
        return tuple(backend for op_of_kernel, _, backend in kernels if op_of_kernel == op)

    def names(self, group: str) -> tuple[str, ...]:
        """The names of one group, sorted."""
        return tuple(sorted(name for group_of_name, name in self._state.entries if group_of_name == group))

    def inspect(self) -> tuple[tuple[PluginEntry, Broken | None], ...]:
        """Load all plugins: every entry, with ``Broken`` where it cannot be used."""
        self._check_selection()
        rows = []
        for (group, name), entries in sorted(self._state.entries.items()):
            plugin = self._load(group, name)
            rows += [(entry, plugin if isinstance(plugin, Broken) else None) for entry in entries]
        return tuple(rows)

    def is_local(self, kernel: LoadedKernel) -> bool:
        """Whether the kernel was registered at run time."""
        return all(entry.is_local for entry in self._state.entries[KERNELS, kernel.name])

    @property
    def hints(self) -> Hints:
        """The sentences that say what could be installed, and how."""
        return Hints(self._state.entries, self.plugins, self._is_selected_by_environment)

    def _check_overlays(self, inv: Invocation, scope: Scope) -> None:
        """Raise for a configuration that was put into an overlay for a backend without a kernel."""
        try:
            keys = inv.tuning_keys if scope.overlays else ()
        except TypeError:  # an option without content, so there is no key
            return
        for backend in (name for overlay in scope.overlays for key in keys for name in overlay.backends_by_hand(key)):
            if backend not in self.backends(inv.op):
                raise UnknownBackend(f"overlay_cache: {self.hints.no_backend(inv.op, backend)}")

    def _check_selection(self) -> None:
        if self.selection_fault:
            raise ValueError(self.selection_fault)

    # -- loading -------------------------------------------------------------------------------------------------

    def _load(self, group: str, name: str) -> Any:
        key = (group, name)
        plugin = self._state.plugins.get(key)
        if plugin is None:
            # Without the lock: importing takes Python's own locks, and a plugin may call the core while it is imported.
            new = load(self._state.entries[key])
            with self._lock:
                plugin = self._state.plugins.get(key, new)
                self._state = self._state._replace(plugins={**self._state.plugins, key: plugin})
        return plugin


def _by_name(entries: Iterable[PluginEntry]) -> dict[tuple[str, str], tuple[PluginEntry, ...]]:
    names: dict[tuple[str, str], tuple[PluginEntry, ...]] = {}
    for entry in entries:
        key = (entry.group, entry.name)
        names[key] = (*names.get(key, ()), entry)
    return names
