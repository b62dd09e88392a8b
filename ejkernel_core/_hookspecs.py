"""The contract: three hooks make a kernel, four make a policy. ``docs/hooks.md`` has an example of each."""
# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from ._invocation import Invocation
    from ._plan import Candidate, Choice
    from ._scopes import Scope
    from .tuning import Earlier, Progress

PROJECT = "ejkernel"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec(firstresult=True)
def heuristic_cfg(inv: Invocation) -> Any:
    """A good configuration without measuring, or ``raise Unsupported("why")``: this is the capability check too.

    ``inv`` holds shapes, not values. Nothing is committed before every kernel has answered.
    """


@hookspec(firstresult=True)
def config_space(inv: Invocation) -> Iterable[Any]:
    """The configurations worth measuring, pruned to what fits the device. Optional: else the heuristic's alone."""


@hookspec(firstresult=True)
def run_backend(inv: Invocation, cfg: Any) -> Any:
    """Compute the operation's results, as JAX arrays, with this configuration. JAX traces it; ``inv`` holds tracers."""


@hookspec(firstresult=True)
def select_config(inv: Invocation, candidates: Sequence[Candidate], scope: Scope) -> Choice | None:
    """Choose a kernel and its configuration among the able ones, best by heuristic first; None leaves it to others.

    ``raise Unsupported("why")`` leaves it to others too, and has the reason told.
    """


@hookspec
def config_selected(inv: Invocation, choice: Choice) -> None:
    """Remember what was measured for this call: ``choice.record``. Optional. Nothing else is ever told."""


@hookspec(firstresult=True)
def tuning_started(inv: Invocation, scope: Scope) -> Earlier | None:
    """Give what is known of an interrupted measurement of this call. Optional, for a store that processes share: it
    waits here while another process measures the same. The stores are asked again afterwards.
    """


@hookspec
def tuning_progress(inv: Invocation, progress: Progress) -> None:
    """Show how far a measurement is, or keep what it has found out so far. Optional. ``progress.finished`` ends it."""


class KernelHooks:
    """What a kernel implements; ``config_space`` is optional."""

    heuristic_cfg = heuristic_cfg
    config_space = config_space
    run_backend = run_backend


class PolicyHooks:
    """What a policy implements; all but ``select_config`` is optional."""

    select_config = select_config
    config_selected = config_selected
    tuning_started = tuning_started
    tuning_progress = tuning_progress


OPTIONAL_HOOKS = frozenset({"config_space", "config_selected", "tuning_started", "tuning_progress"})


def specifications(hooks: type) -> dict[str, Callable[..., Any]]:
    """The hooks of one of the two classes, by name."""
    return {name: hook for name, hook in vars(hooks).items() if not name.startswith("_")}
