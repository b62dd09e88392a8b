"""``ConfigSelectorChain``, which selects configurations of kernels, and ``Executor``, which runs kernels with it."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from ejkernel_core import AutotunePolicy, ConfigCache, Scope
from ejkernel_core.extend import BUILT_IN_PREFIX, EMPTY, POLICIES, PluginEntry, ScopeChange, StorePolicy, check_plugin

from ._named import call
from ._other_names import other_names


class _Store(StorePolicy):
    """A store of a chain. It is asked before the chain's other policies, at any rank."""

    RANK = sys.maxsize


class ConfigSelectorChain:
    """Selects the configurations of an ``Executor``: from a cache, then a store, then other policies.

    An explicit ``cfg`` and the overlays of the scope come first, and the heuristic comes last. The registry's own
    stores are not asked. With ``autotune``, the tuner measures where there is no record; see ``AutotunePolicy``.
    """

    _numbers = itertools.count(1)

    @other_names(tuner="autotune=True measures, as long as policy=AutotunePolicy('on_miss', budget_s=60) says")
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
        #: The scope in which this chain was last entered, its state then, and the scope with the chain.
        self._last: tuple[Scope | None, str, Scope] = (None, "", EMPTY)
        stores = {} if persistent is None else {"persistent": persistent}
        # pluggy asks the last one first.
        self._policies = (*_check_policies(policies or {}), *_stores({**stores, "cache": self.cache}))

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """Use this chain for a ``with`` block."""
        # The state identifies the chain and the content of its stores.
        state = f"{self._number}:{self._generation(self.cache)}:{self._generation(self.persistent)}"

        def change(scope: Scope) -> Scope:
            last_scope, last_state, scope_of_chain = self._last
            if last_scope is not scope or last_state != state:
                # ``policy_override`` makes a new object, even for an equal policy. It overrides the chain's policy.
                policy = self.policy if scope.policy is EMPTY.policy else scope.policy
                scope_of_chain = attrs.evolve(scope, policies=self._policies, policy=policy, state=state)
                self._last = scope, state, scope_of_chain
            return scope_of_chain

        return ScopeChange(change)

    @staticmethod
    def _generation(store: Any) -> int:
        return getattr(store, "generation", 0)


#: What chooses for an ``Executor``, by the name that it has in ejKernel's documents.
ConfigChooser = ConfigSelectorChain


def _check_selector(selector: ConfigSelectorChain) -> ConfigSelectorChain:
    if not isinstance(selector, ConfigSelectorChain) or hasattr(selector, "choose"):
        raise TypeError(
            "selector: takes a ConfigSelectorChain; a choice of your own is a policy with the hook select_config: "
            f"ConfigSelectorChain(policies={{'mine': policy}}); got {type(selector).__name__}"
        )
    return selector


def _check_policies(policies: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for name, policy in policies.items():
        check_plugin(PluginEntry(POLICIES, name), policy)
        yield name, policy


def _stores(stores: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for name, store in stores.items():
        if not (hasattr(store, "find") and hasattr(store, "put")):
            raise TypeError(f"{name}: takes a ConfigCache, or what has find and put too; got {type(store).__name__}")
        yield f"{BUILT_IN_PREFIX}{name}", _Store(store, name)


class Executor:
    """Runs kernels with the configurations that its chain selects."""

    @other_names(chooser="selector= takes a ConfigSelectorChain")
    def __init__(self, selector: ConfigSelectorChain | None = None) -> None:
        self.selector = ConfigSelectorChain() if selector is None else _check_selector(selector)

    @other_names(_cfg="cfg= takes the configuration")
    def __call__(self, kernel: Any, *args: Any, cfg: Any = None, **kwargs: Any) -> Any:
        """The results of a ``Kernel`` object, or of an operation given by name."""
        with self.selector.entered():
            if isinstance(kernel, str):
                return call(kernel, *args, cfg=cfg, **kwargs)
            return kernel(*args, cfg=cfg, **kwargs)
