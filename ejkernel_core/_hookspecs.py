"""The contract: what makes a kernel, and what makes a policy. ``docs/hooks.md`` has an example of each hook."""
# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

from ._discovery import Broken
from ._kernel import Candidate, Invocation, LoadedKernel
from ._plan import Choice
from ._records import Record
from ._scopes import Scope

if TYPE_CHECKING:  # most programs measure nothing
    from ._measurement import Earlier, Progress

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
def check_cfg(inv: Invocation, cfg: Any) -> None:
    """``raise Unsupported("why")`` where this configuration, given or remembered, cannot do the call. Optional.

    Of a call with a ``cfg`` it is the whole capability check, whatever the platform: ``heuristic_cfg`` is not asked.
    """


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
    """Give what is known of a measurement of this call that did not come to its end. Optional, for a store that
    processes share: it waits here while another process measures the same, or raises ``Unsupported`` where the policy
    does not wait. The stores are asked again afterwards.
    """


@hookspec
def tuning_progress(inv: Invocation, progress: Progress) -> None:
    """Show how far a measurement is, or keep what it has found out so far and is about to try. Optional.
    ``progress.finished`` is its last word, however it ends: its records are stored by then.
    """


@hookspec(firstresult=True)
def measure(
    inv: Invocation,
    candidates: Sequence[Candidate],
    judge: LoadedKernel | Broken | None,
    scope: Scope,
    earlier: Earlier,
    record: Record | None,
    report: Callable[[Progress], None],
) -> tuple[Record, ...]:
    """Measure the candidates: the best record of each kernel that was measured, the fastest first. Optional, for a
    tuner: it is asked where nothing is remembered and the scope's policy says to measure.

    ``judge`` is the kernel whose results the others have to have, ``earlier`` what need not be measured again, and
    ``record`` the winner of a measurement whose budget was too short. The stores hear what is given to ``report``.
    ``raise Unsupported("why")`` where nothing can be measured.
    """


class KernelHooks:
    """What a kernel implements; ``config_space`` and ``check_cfg`` are optional."""

    heuristic_cfg = heuristic_cfg
    config_space = config_space
    check_cfg = check_cfg
    run_backend = run_backend


class PolicyHooks:
    """What a policy implements: ``select_config`` or ``measure``, and of the others what it needs."""

    select_config = select_config
    config_selected = config_selected
    tuning_started = tuning_started
    tuning_progress = tuning_progress
    measure = measure


#: A policy that measures needs no ``select_config``.
REQUIRED_HOOKS = frozenset({"heuristic_cfg", "run_backend", "select_config"})
#: What the names of the core's own policies begin with.
BUILT_IN_PREFIX = "built-in "


def specifications(hooks: type) -> dict[str, Callable[..., Any]]:
    """The hooks of one of the two classes, by name."""
    return {name: hook for name, hook in vars(hooks).items() if not name.startswith("_")}
