"""The object that users and plugins hold: what is installed, and the calls made with it."""

from __future__ import annotations

from typing import Any

from . import _call
from ._invocation import Invocation
from ._plan import Explanation, Plan
from ._plugins import Plugins


class Registry(Plugins):
    """Operations, kernels and policies, and the calls made with them.

    A new registry knows what is installed (``plugins`` as in EJKERNEL_PLUGINS chooses among it) and what is registered
    with it afterwards. One that takes the ``policies_of`` another, and what that one remembers, starts with these.
    """

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
