"""Where the configurations of kernels come from, as an object, and what runs kernels with them."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from ejkernel_core import AutotunePolicy, ConfigCache, Scope
from ejkernel_core._discovery import POLICIES, Entry
from ejkernel_core._hooks import BUILT_IN_PREFIX, PolicyHooks
from ejkernel_core._loading import hook_manager
from ejkernel_core._policies import StorePolicy
from ejkernel_core._scopes import EMPTY, ScopeChange

from ._named import call


class _Store(StorePolicy):
    """A store of a chain: it is asked before the chain's other policies, whatever their rank."""

    RANK = sys.maxsize


class ConfigSelectorChain:
    """Where an ``Executor`` has its configurations from: a cache, then a store, then other policies.

    An explicit ``cfg`` and the overlays of the scope go before, the heuristic comes last. What the registry's own
    policies remember is not asked. ``autotune`` is for the policies that can measure; see ``AutotunePolicy``.
    """

    _numbers = itertools.count(1)

    def __init__(
        self,
        cache: Any = None,
        persistent: Any = None,
        autotune: bool = False,
        policy: AutotunePolicy | None = None,
        policies: Mapping[str, Any] | None = None,
    ) -> None:
        self.cache = ConfigCache() if cache is None else cache
        self.persistent = persistent
        self.policy = policy or AutotunePolicy("on_miss" if autotune else "off")
        self._number = next(self._numbers)
        #: What was entered last: where, in which state, and the scope that it made.
        self._last: tuple[Scope | None, str, Scope] = (None, "", EMPTY)
        stores = {} if persistent is None else {"persistent": persistent}
        # pluggy asks the last one first.
        self._policies = (*_checked(policies or {}), *_stores({**stores, "cache": self.cache}))

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """Choose by this chain for the ``with`` block."""
        # A chain is itself and no other; once something is put into its stores, it is another.
        state = f"{self._number}:{self._generation(self.cache)}:{self._generation(self.persistent)}"

        def change(scope: Scope) -> Scope:
            outer, before, own = self._last
            if outer is not scope or before != state:
                # ``policy_override`` makes a new policy, even an equal one: it goes before what the chain says.
                policy = self.policy if scope.policy is EMPTY.policy else scope.policy
                own = attrs.evolve(scope, policies=self._policies, policy=policy, state=state)
                self._last = scope, state, own
            return own

        return ScopeChange(change)

    @staticmethod
    def _generation(store: Any) -> int:
        return getattr(store, "generation", 0)


def _checked(policies: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for name, policy in policies.items():
        hook_manager(Entry(POLICIES, name), policy, PolicyHooks)
        yield name, policy


def _stores(stores: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for name, store in stores.items():
        if not (hasattr(store, "find") and hasattr(store, "put")):
            raise TypeError(f"{name}: takes a ConfigCache, or what has find and put too; got {type(store).__name__}")
        yield f"{BUILT_IN_PREFIX}{name}", _Store(store, name)


class Executor:
    """Runs kernels with configurations from its own chain."""

    def __init__(self, selector: ConfigSelectorChain | None = None) -> None:
        self.selector = ConfigSelectorChain() if selector is None else selector

    def __call__(self, kernel: Any, *args: Any, cfg: Any = None, **kwargs: Any) -> Any:
        """The results of a ``Kernel`` object, or of an operation by its name."""
        with self.selector.entered():
            if isinstance(kernel, str):
                return call(kernel, *args, cfg=cfg, **kwargs)
            return kernel(*args, cfg=cfg, **kwargs)
