"""What is installed and registered: found by metadata, loaded on first use, and asked by name."""

from __future__ import annotations

import difflib
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import attrs
import jax
import pluggy

from . import _call, _discovery
from ._cache import ConfigCache
from ._discovery import KERNELS, OPERATIONS, POLICIES, Entry
from ._errors import EjkernelError, PluginError, UnknownBackend, UnknownOperation
from ._hookspecs import PolicyHooks
from ._invocation import Invocation, Key
from ._kernel import LoadedKernel, hook_manager, load_kernel
from ._operation import Operation
from ._plan import Candidate, Choice, Explanation, Plan, Verdict
from ._policies import first_answer, policy_chain, tell
from ._scopes import Scope


@attrs.frozen
class Broken:
    """A plugin that cannot be used, and why."""

    entry: Entry
    reason: str


@attrs.frozen
class _State:
    """Everything known, replaced as a whole so that readers need no lock."""

    entries: Mapping[tuple[str, str], tuple[Entry, ...]]
    loaded: Mapping[tuple[str, str], Any] = MappingProxyType({})


@runtime_checkable
class HasPlugins(Protocol):
    """One object that makes several plugins, as ``ejkernel_core.classes.Kernel`` does."""

    def as_plugins(self) -> Mapping[str, Any]:
        """The operations and kernels, by the names they are registered with."""
        ...


class Registry:
    """Operations, kernels and policies, and the calls made with them.

    A new registry knows what is installed (``plugins`` as in EJKERNEL_PLUGINS chooses among it) and what is registered
    with it afterwards. One that takes the ``policies_of`` another, and what that one remembers, starts with these.
    """

    def __init__(self, plugins: str | None = None, policies_of: Registry | None = None) -> None:
        self.plugins = os.environ.get("EJKERNEL_PLUGINS") if plugins is None else plugins
        self._lock = threading.Lock()
        self._policies_of = policies_of
        self._state = _State({} if policies_of else _by_name(_discovery.installed(self.plugins)))
        #: Compiled calls; see ``_call``. Emptied whenever a plugin is registered or something new is remembered.
        self.calls: dict[Any, Any] = {}
        #: What is remembered in this process: the policy "memory".
        self.memory = ConfigCache()
        self._software: dict[str, dict[str, str]] = {}

    # -- calls ---------------------------------------------------------------------------------------------------

    def call(self, op: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run an operation by the best kernel there is; see ``ejkernel_core.call``."""
        return _call.call(self, op, args, kwargs)

    def plan(self, op: str, /, *args: Any, **kwargs: Any) -> Plan:
        """The plan of that call; arrays may be abstract. Raises what the call would raise."""
        return _call.plan(self, op, args, kwargs)

    def invocation(self, op: str, /, *args: Any, **kwargs: Any) -> Invocation:
        """The abstract invocation of that call; its ``key`` is what configurations are remembered by."""
        return _call.invocation(self, op, args, kwargs)

    def explain(self, op: str, /, *args: Any, **kwargs: Any) -> Explanation:
        """The plan of that call and of its gradients, or why there is none."""
        return _call.explain(self, op, args, kwargs)

    # -- registration --------------------------------------------------------------------------------------------

    def register(self, plugin: Any, name: str | None = None) -> Any:
        """Add an operation, a kernel called ``<operation>.<backend>``, or a policy, in this registry alone.

        What has that name already is replaced, so that a notebook cell can be run again. Returns ``plugin``.
        """
        if isinstance(plugin, HasPlugins):
            for part, what in plugin.as_plugins().items():
                self.register(what, part)
        elif isinstance(plugin, Operation):
            self._add(_discovery.local_entry(OPERATIONS, name or plugin.name), plugin)
        elif name is None:
            raise TypeError(
                "register(plugin, name): a kernel needs its name, '<operation>.<backend>', and a policy any"
            )
        elif hasattr(plugin, "select_config"):
            entry = _discovery.local_entry(POLICIES, name)
            self._add(entry, _checked(entry, plugin))
        else:
            entry = _discovery.local_entry(KERNELS, name)
            self._add(entry, load_kernel(entry, plugin))
        return plugin

    def remember(self, key: Key, value: Any) -> None:
        """Put a configuration, or a ``Record`` of one, into this registry's memory, and have calls choose anew."""
        self.memory.put(key, value)
        self.calls = {}

    def forget(self) -> None:
        """Empty this registry's memory, and have calls choose anew."""
        self.memory.clear()
        self.calls = {}

    def _add(self, entry: Entry, loaded: Any) -> None:
        key = (entry.group, entry.name)
        with self._lock:
            state = self._state
            self._state = _State({**state.entries, key: (entry,)}, {**state.loaded, key: loaded})
        # A new dictionary: a call that is being made at this moment keeps what it read to itself.
        self.calls, self._software = {}, {}

    # -- questions -----------------------------------------------------------------------------------------------

    def operation(self, name: str) -> Operation:
        """The operation of this name."""
        if (OPERATIONS, name) not in self._state.entries:
            raise UnknownOperation(self._unknown("operation", name, self.names(OPERATIONS)))
        found = self._load(OPERATIONS, name)
        if isinstance(found, Broken):
            raise PluginError(found.reason)
        assert isinstance(found, Operation)
        return found

    def kernels(self, op: str) -> tuple[list[LoadedKernel], list[Verdict]]:
        """The kernels of an operation that load, and the verdict on each that does not."""
        answers = [self._load(KERNELS, f"{op}.{backend}") for backend in self.backends(op)]
        good = [answer for answer in answers if isinstance(answer, LoadedKernel)]
        broken = [answer for answer in answers if isinstance(answer, Broken)]
        return good, [Verdict(b.entry.name, b.entry.provider, "broken", b.reason) for b in broken]

    def kernel(self, op: str, backend: str) -> LoadedKernel:
        """One kernel, by name."""
        if backend not in self.backends(op):
            raise UnknownBackend(self._unknown(f"backend for {op!r}", backend, self.backends(op)))
        found = self._load(KERNELS, f"{op}.{backend}")
        if isinstance(found, Broken):
            raise PluginError(found.reason)
        assert isinstance(found, LoadedKernel)
        return found

    def backends(self, op: str) -> tuple[str, ...]:
        """The backends that an operation has kernels of, loaded or not."""
        kernels = (name.rpartition(".") for name in self.names(KERNELS))
        return tuple(backend for owner, _, backend in kernels if owner == op)

    def select_config(
        self, inv: Invocation, candidates: Sequence[Candidate], scope: Scope
    ) -> tuple[Choice, list[Verdict]]:
        """The answer of the first policy that has one, and the verdict on each that is broken or says why not."""
        choice, passed = first_answer(self.policies(scope), inv, candidates, scope)
        if choice.measured:
            passed += self.learn(inv, choice, scope)
        return choice, [
            *self._broken_policies(),
            *(Verdict(name, self._provider(name), *what) for name, *what in passed),
        ]

    def learn(self, inv: Invocation, choice: Choice, scope: Scope) -> list[tuple[str, str, str]]:
        """Tell everybody who remembers what was measured, and have calls choose anew. The faults of those told."""
        faults = tell(self.policies(scope), "config_selected", inv=inv, choice=choice)
        registry: Registry | None = self
        while registry is not None:  # only now: a call that was made meanwhile has not heard of it
            registry.calls, registry = {}, registry._policies_of
        return faults

    def policies(self, scope: Scope) -> pluggy.PluginManager:
        """The chain that answers in this scope."""
        if self._policies_of is not None:
            return self._policies_of.policies(scope)
        if scope.policies is not None:
            return policy_chain(scope.policies, None, scope)
        loaded = ((name, self._load(POLICIES, name)) for name in self.names(POLICIES))
        return policy_chain([item for item in loaded if not isinstance(item[1], Broken)], self.memory, scope)

    def _broken_policies(self) -> list[Verdict]:
        if self._policies_of is not None:
            return self._policies_of._broken_policies()
        loaded = [self._load(POLICIES, name) for name in self.names(POLICIES)]
        return [Verdict(b.entry.name, b.entry.provider, "broken", b.reason) for b in loaded if isinstance(b, Broken)]

    def software(self, op: str) -> dict[str, str]:
        """The versions of all that could change which configuration is best: see ``Key.software``."""
        known = self._software.get(op)
        if known is None:
            kernels, _ = self.kernels(op)
            versions = {name: version for kernel in kernels for name, version in kernel.software.items()}
            known = {"jax": jax.__version__, "jaxlib": metadata.version("jaxlib"), **versions}
            self._software[op] = known
        return known

    def _provider(self, policy: str) -> str:
        if self._policies_of is not None:
            return self._policies_of._provider(policy)
        entries = self._state.entries.get((POLICIES, policy))
        return entries[0].provider if entries else "built in"

    def names(self, group: str) -> tuple[str, ...]:
        """The names of one group, sorted."""
        return tuple(sorted(name for owner, name in self._state.entries if owner == group))

    def inspect(self) -> tuple[tuple[Entry, Broken | None], ...]:
        """Load everything: every entry, with what is wrong with it."""
        rows = []
        for (group, name), entries in sorted(self._state.entries.items()):
            found = self._load(group, name)
            rows += [(entry, found if isinstance(found, Broken) else None) for entry in entries]
        return tuple(rows)

    def how_to_install(self) -> str:
        """The sentence that tells how to get more."""
        filtered = f" (EJKERNEL_PLUGINS={self.plugins!r} is set)" if self.plugins is not None else ""
        return (
            "Operations and kernels come with plugins: 'pip install ejkernel-ops ejkernel-xla' brings the standard "
            f"ones; 'python -m ejkernel_core' lists what is installed{filtered}"
        )

    # -- loading -------------------------------------------------------------------------------------------------

    def _load(self, group: str, name: str) -> Any:
        key = (group, name)
        found = self._state.loaded.get(key)
        if found is None:
            # Without the lock: importing takes Python's own locks, and a plugin may call us while it is imported.
            fresh = _load_entry(self._state.entries[key])
            with self._lock:
                found = self._state.loaded.get(key, fresh)
                self._state = attrs.evolve(self._state, loaded={**self._state.loaded, key: found})
        return found

    def _unknown(self, what: str, name: str, known: Iterable[str]) -> str:
        known = list(known)
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        return f"no {what} {name!r} is installed{hint} Known: {', '.join(known) or 'none'}. {self.how_to_install()}"


def _by_name(entries: Iterable[Entry]) -> dict[tuple[str, str], tuple[Entry, ...]]:
    names: dict[tuple[str, str], tuple[Entry, ...]] = {}
    for entry in entries:
        key = (entry.group, entry.name)
        names[key] = (*names.get(key, ()), entry)
    return names


def _load_entry(entries: tuple[Entry, ...]) -> Any:
    """The operation, kernel or policy that the entry names, or Broken."""
    entry = entries[0]
    if len(entries) > 1:
        return Broken(entry, f"{entry.name!r} is {_discovery.duplicates(entries)}")
    try:
        return _checked(entry, entry.load())
    except EjkernelError as fault:
        return Broken(entry, str(fault))
    except (Exception, SystemExit) as fault:  # whatever its import raises, it is the plugin that is broken
        reason = f"{entry.name!r} of {entry.provider} ({entry.value}) does not load: {type(fault).__name__}: {fault}"
        return Broken(entry, reason)


def _checked(entry: Entry, plugin: Any) -> Any:
    if entry.group == KERNELS:
        return load_kernel(entry, plugin)
    if entry.group == POLICIES:
        hook_manager(entry, plugin, PolicyHooks)
        return plugin
    if not isinstance(plugin, Operation):
        raise PluginError(
            f"{entry.name!r} of {entry.provider} ({entry.value}) is a {type(plugin).__name__}, no Operation"
        )
    return plugin
