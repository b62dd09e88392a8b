"""What is installed and registered: found by metadata, loaded on first use, and asked by name."""

from __future__ import annotations

import difflib
import operator
import os
import threading
from collections.abc import Hashable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

from . import _discovery
from ._cache import ConfigCache
from ._choice import choose
from ._discovery import KERNELS, OPERATIONS, POLICIES, Broken, Entry
from ._display import counted
from ._errors import NoKernel, PluginError, UnknownBackend, UnknownOperation
from ._hookspecs import BUILT_IN_PREFIX
from ._kernel import Invocation, LoadedKernel
from ._keys import Key
from ._loading import checked, load
from ._operation import Operation
from ._plan import Plan, Verdict
from ._policies import Policies, Remembered, chain
from ._scopes import Scope


class _State(NamedTuple):
    """Everything known, replaced as a whole so that readers need no lock."""

    entries: Mapping[tuple[str, str], tuple[Entry, ...]]
    loaded: Mapping[tuple[str, str], Any] = MappingProxyType({})


@runtime_checkable
class HasPlugins(Protocol):
    """One object that makes several plugins, as a ``Kernel`` object of ejkernel-classes does."""

    def as_plugins(self) -> Mapping[str, Any]:
        """The operations and kernels, by the names they are registered with."""
        ...


class Plugins:
    """Operations, kernels and policies by name, and the choice among them; see ``Registry``."""

    def __init__(self, plugins: str | None = None, policies_of: Plugins | None = None) -> None:
        self._is_selected_by_environment = plugins is None
        self.plugins = os.environ.get("EJKERNEL_PLUGINS") if plugins is None else plugins
        self._lock = threading.Lock()
        self._policies_of = policies_of
        self._state = _State({} if policies_of else _by_name(_discovery.installed(self.plugins)))
        #: Compiled calls; see ``_call``. Emptied whenever a plugin is registered.
        self.calls: dict[Any, Any] = {}
        #: Grows whenever a call may choose otherwise than it did...
        self.changes = 0
        #: ...and how large it was when the keys of a kind last changed.
        self._changed: dict[tuple[str, str], int] = {}
        self.memory = policies_of.memory if policies_of else ConfigCache()
        #: By policy and hook: what a policy failed at when it was last told of something.
        self._failures: dict[tuple[str, str], str] = {}
        #: What the chain of policies was made of, and the chain.
        self._chain: tuple[tuple[Any, ...], Policies | None] = ((None, None, None), None)

    def __repr__(self) -> str:
        groups = ((OPERATIONS, "operation", ""), (KERNELS, "kernel", ""), (POLICIES, "policy", "policies"))
        counts = ", ".join(counted(len(self.names(group)), *noun) for group, *noun in groups)
        return f"Registry(plugins={self.plugins!r}, {counts})"

    # -- registration --------------------------------------------------------------------------------------------

    def register(self, plugin: Any, name: str | None = None) -> Any:
        """Add an operation, a kernel called ``<operation>.<backend>``, or a policy, in this registry alone.

        What has that name already is replaced, so that a notebook cell can be run again. Returns ``plugin``.
        """
        if isinstance(plugin, HasPlugins):
            for part, what in plugin.as_plugins().items():
                self.register(what, part)
        elif isinstance(plugin, Operation):
            self._add(Entry(OPERATIONS, name or plugin.name), plugin)
        elif name is None:
            raise TypeError(
                "register(plugin, name): a kernel needs its name, '<operation>.<backend>', and a policy any"
            )
        else:
            is_policy = hasattr(plugin, "select_config") or hasattr(plugin, "measure")
            entry = Entry(POLICIES if is_policy else KERNELS, name)
            self._add(entry, checked(entry, plugin))
        return plugin

    @property
    def memory(self) -> ConfigCache:
        """What is remembered in this process: the policy "memory". Calls choose anew when one of their kind changes."""
        return self._memory

    @memory.setter
    def memory(self, memory: ConfigCache) -> None:
        self._memory = memory
        memory.notify(self._forget_kind)
        self._forget_calls()

    def remember(self, key: Key, value: Any) -> None:
        """Put a configuration, or a ``Record`` of one, into this registry's memory."""
        self.memory.put(key, value)

    def forget(self) -> None:
        """Empty this registry's memory."""
        self.memory.clear()

    def _forget_calls(self) -> None:
        # A new dictionary: a call that is being made at this moment keeps what it read to itself.
        self.calls = {}
        self.changes += 1

    def _forget_kind(self, key: Hashable) -> None:
        """Have the calls choose anew that have chosen by keys of this kind: of the same operation and options."""
        self.changes += 1
        if isinstance(key, Key):
            kind = key.op, key.kind
            self._changed[kind] = self.changes
            for layout in list(self.calls.values()):
                layout.forget(kind)

    def is_unchanged(self, kinds: Iterable[tuple[str, str]], since: int) -> bool:
        """Whether what was chosen by keys of these kinds, since ``changes`` was this, would be chosen again."""
        return all(self._changed.get(kind, 0) <= since for kind in kinds)

    def _add(self, entry: Entry, loaded: Any) -> None:
        key = (entry.group, entry.name)
        with self._lock:
            state = self._state
            self._state = _State({**state.entries, key: (entry,)}, {**state.loaded, key: loaded})
        for known in [known for known in self._failures if known[0] == entry.name]:
            self._failures.pop(known, None)
        self._forget_calls()

    # -- choice --------------------------------------------------------------------------------------------------

    def choose(self, inv: Invocation, backend: str | None, cfg: Any, scope: Scope) -> Plan:
        """The plan of an invocation by what is here; ``NoKernel`` says what to install, too."""
        kernels, broken = self.kernels(inv.op)
        for listener in scope.listeners:
            listener(inv, self)
        try:
            plan = choose(inv, kernels, broken, self.judge(inv), self.policies(scope), backend, cfg, scope)
        except NoKernel as refusal:
            raise NoKernel(f"{refusal}\n{self.how_to_install()}", refusal.verdicts) from None
        if plan.choice.measured:
            self.choose_anew(inv)
        return plan

    def judge(self, inv: Invocation) -> LoadedKernel | Broken | None:
        """The reference, whose results all other kernels have to have."""
        if inv.operation is None or inv.operation.reference not in self.backends(inv.op):
            return None
        kernel: LoadedKernel | Broken = self._load(KERNELS, f"{inv.op}.{inv.operation.reference}")
        return kernel

    def policies(self, scope: Scope) -> Policies:
        """Whoever has a say in this scope."""
        if self._policies_of is not None:
            return self._policies_of.policies(scope)
        made_of = self._state.entries, self.memory, scope.policies
        parts, policies = self._chain
        if not all(map(operator.is_, parts, made_of)):
            policies = self._made_policies(scope.policies)
            self._chain = made_of, policies
        assert policies is not None
        return policies

    def _made_policies(self, own: tuple[tuple[str, Any], ...] | None) -> Policies:
        loaded = [(name, self._load(POLICIES, name)) for name in self.names(POLICIES)]
        sound = [(name, policy) for name, policy in loaded if not isinstance(policy, Broken)]
        broken = [policy for _, policy in loaded if isinstance(policy, Broken)]
        memory = () if own is not None else ((f"{BUILT_IN_PREFIX}memory", Remembered(self.memory, "memory")),)
        return Policies(
            chain(sound if own is None else own, memory),
            chain((name, policy) for name, policy in sound if hasattr(policy, "measure")),
            tuple(Verdict(one.entry.name, one.entry.provider, "broken", one.reason) for one in broken),
            {name: self._state.entries[POLICIES, name][0] for name, _ in loaded},
            self._failures,
        )

    def choose_anew(self, inv: Invocation) -> None:
        """Have every call of this kind choose again, here and where the policies are."""
        for key in inv.tuning_keys:
            self._forget_kind(key)
        if self._policies_of is not None:
            self._policies_of.choose_anew(inv)

    # -- questions -----------------------------------------------------------------------------------------------

    def operation(self, name: str) -> Operation:
        """The operation of this name."""
        if not isinstance(name, str):
            raise TypeError(
                f"op: takes the name of an operation, as 'flash_attention'; got {type(name).__name__} {name!r:.60}"
            )
        if (OPERATIONS, name) not in self._state.entries:
            raise UnknownOperation(self._no_operation(name))
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
        if not backend or backend not in self.backends(op):
            raise UnknownBackend(self._no_backend(op, backend))
        found = self._load(KERNELS, f"{op}.{backend}")
        if isinstance(found, Broken):
            raise PluginError(found.reason)
        assert isinstance(found, LoadedKernel)
        return found

    def backends(self, op: str) -> tuple[str, ...]:
        """The backends that an operation has kernels of, loaded or not."""
        kernels = (name.rpartition(".") for name in self.names(KERNELS))
        return tuple(backend for owner, _, backend in kernels if owner == op)

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

    def is_local(self, kernel: LoadedKernel) -> bool:
        """Whether it was registered at run time."""
        return all(entry.is_local for entry in self._state.entries[KERNELS, kernel.name])

    def what_to_install(self) -> str:
        """What would bring the standard plugins that are not here; "" where they are, or nothing is known of any."""
        names = [extra for extra, absent in self._absent().items() if absent]
        others = f" (or {', '.join(names[1:])})" if names[1:] else ""
        return f"'pip install \"{_discovery.CORE}[{names[0]}]\"'{others} brings the standard ones" if names else ""

    def how_to_look(self) -> str:
        """The sentence that tells how to see what is here."""
        cause = "EJKERNEL_PLUGINS is " if self._is_selected_by_environment else "this registry has plugins="
        filtered = f" ({cause}{self.plugins!r})" if self.plugins is not None else ""
        return f"'python -m ejkernel_core' lists what is installed{filtered}"

    def how_to_install(self) -> str:
        """Both sentences."""
        return "; ".join(filter(None, (self.what_to_install(), self.how_to_look())))

    def _absent(self) -> dict[str, list[str]]:
        """The plugins that each extra of the core would bring, and that are not here."""
        here = {_discovery.normal(entry.distribution) for entries in self._state.entries.values() for entry in entries}

        def is_absent(name: str) -> bool:
            return name not in here and (self.plugins is not None or _discovery.version_of(name) == "not installed")

        return {extra: [*filter(is_absent, names)] for extra, names in _discovery.extras().items()}

    # -- loading -------------------------------------------------------------------------------------------------

    def _load(self, group: str, name: str) -> Any:
        key = (group, name)
        found = self._state.loaded.get(key)
        if found is None:
            # Without the lock: importing takes Python's own locks, and a plugin may call us while it is imported.
            fresh = load(self._state.entries[key])
            with self._lock:
                found = self._state.loaded.get(key, fresh)
                self._state = self._state._replace(loaded={**self._state.loaded, key: found})
        return found

    def _no_operation(self, name: str) -> str:
        known = self.names(OPERATIONS)
        near = _nearest(name, known)
        # Who brings an operation that is not installed is not known.
        more = self.how_to_look() if known else self.how_to_install()
        meant = f"; did you mean {near!r}?" if near else "."
        return f"no operation {name!r} is installed{meant} Known: {', '.join(known) or 'none'}. {more}"

    def _no_backend(self, op: str, backend: str) -> str:
        known = [name for name in self.backends(op) if name]
        end = f"Known: {', '.join(known) or 'none'}. {self.how_to_look()}"
        if not backend:
            return f"{op}: backend='' is no name. {end}"
        return f"no backend {backend!r} of {op!r} is installed{self._meant_backend(backend, known)} {end}"

    def _meant_backend(self, backend: str, known: Iterable[str]) -> str:
        """The end of a sentence about a backend that is not here: which one is like it, and what brings it."""
        brings = {_discovery.backend_of(name): name for names in self._absent().values() for name in names}
        near = backend if backend in brings else _nearest(backend, [*known, *brings])
        install = f"'pip install {brings[near]}' brings that backend." if near in brings else ""
        if near is None or near == backend:
            return f"; {install}" if install else "."
        return f"; did you mean {near!r}? {install}".rstrip()


def _nearest(name: str, known: Iterable[str]) -> str | None:
    by_lower = {each.lower(): each for each in known}
    return next((by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, 1)), None)


def _by_name(entries: Iterable[Entry]) -> dict[tuple[str, str], tuple[Entry, ...]]:
    names: dict[tuple[str, str], tuple[Entry, ...]] = {}
    for entry in entries:
        key = (entry.group, entry.name)
        names[key] = (*names.get(key, ()), entry)
    return names
