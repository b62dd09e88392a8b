"""The contract: the hooks of kernels and of policies. ``docs/hooks.md`` has an example of each hook."""
# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

from ._discovery import Broken
from ._invocation import Invocation
from ._kernel import Candidate, LoadedKernel
from ._plan import Choice, Verdict
from ._records import Record
from ._scopes import Scope

if TYPE_CHECKING:  # imported when something is measured, which most programs do not need
    from ._measurement import Earlier, Progress

PROJECT = "ejkernel"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec(firstresult=True)
def heuristic_cfg(inv: Invocation) -> Any:
    """Return a good configuration without measuring, or ``raise Unsupported("why")``. It is also the capability check.

    ``inv`` has shapes, not values. It is called for every kernel before one is chosen. Optional for a kernel without
    ``Config``, whose configuration is None then.
    """


@hookspec(firstresult=True)
def config_space(inv: Invocation) -> Iterable[Any]:
    """Return the configurations that are worth measuring and fit the device. Optional: without it, the heuristic's."""


@hookspec(firstresult=True)
def check_cfg(inv: Invocation, cfg: Any) -> None:
    """``raise Unsupported("why")`` where the kernel cannot run the call with this configuration. It is the caller's
    ``cfg``, or a policy has chosen it. Optional.

    For a call with a ``cfg`` it is the only capability check, on every platform: ``heuristic_cfg`` is not called.
    """


@hookspec(firstresult=True)
def run_backend(inv: Invocation, cfg: Any) -> Any:
    """Compute the operation's results as JAX arrays, with this configuration. JAX traces it: ``inv`` has tracers."""


@hookspec(firstresult=True)
def select_config(inv: Invocation, candidates: Sequence[Candidate], scope: Scope) -> Choice | None:
    """Choose one of the candidates and its configuration. They are in order of rank, the highest first. None leaves the
    choice to other policies.

    ``raise Unsupported("why")`` leaves it to them too, and explanations show the reason.
    """


@hookspec
def config_selected(inv: Invocation, choice: Choice) -> None:
    """Store what was measured for this call: ``choice.record``. Optional. It is called for measured results only."""


@hookspec(firstresult=True)
def tuning_started(inv: Invocation, scope: Scope) -> Earlier | None:
    """Return what is stored of an unfinished measurement of this call. Optional, for a store that processes share: it
    waits here while another process measures the same call, or raises ``Unsupported`` where the policy does not wait.
    ``select_config`` of the stores is called again afterwards.
    """


@hookspec
def tuning_progress(inv: Invocation, progress: Progress) -> None:
    """Show the progress of a measurement, or store its results so far and what it is about to try. Optional. The last
    call has ``progress.finished``, however the measurement ends. By then the records are stored.
    """


@hookspec(firstresult=True)
def measure(
    inv: Invocation,
    candidates: Sequence[Candidate],
    reference: LoadedKernel | Broken | None,
    scope: Scope,
    earlier: Earlier,
    record: Record | None,
    report: Callable[[Progress], None],
) -> tuple[Record, ...]:
    """Measure the candidates, and return the best record of each measured kernel, the fastest first. Optional, for a
    tuner: it is called where no store has a record and the scope's policy is to measure.

    ``reference`` is the kernel that results are compared with, ``earlier`` has results of an unfinished measurement,
    and ``record`` is the best record of one whose budget was too short. ``report`` passes progress on to the stores.
    ``raise Unsupported("why")`` where nothing can be measured.
    """


@hookspec(firstresult=True)
def settle(
    inv: Invocation,
    candidates: Sequence[Candidate],
    verdicts: Sequence[Verdict],
    backend: str | None,
    scope: Scope,
    choose: Callable[[], Choice],
) -> Choice | None:
    """Return the choice that all processes of a program make. Optional: it is called where ``inv.processes`` has
    several, around the whole choice, if the caller gave no ``cfg``.

    ``choose`` makes this process's own choice, and measures where the scope's policy says so. What it raises, and what
    this hook raises, ends the call. ``candidates`` are the kernels that can run the call here, maybe none, ``verdicts``
    has a reason for each other one, and ``backend`` is the caller's. None leaves the choice to records that are the
    same in every process, and the heuristic. ``plan`` and ``explain`` call it too, in a scope with ``may_measure``
    False: it must not wait for others then.
    """


class KernelHooks:
    """The hooks of a kernel. Only ``run_backend`` is required, and with a ``Config`` also ``heuristic_cfg``."""

    heuristic_cfg = heuristic_cfg
    config_space = config_space
    check_cfg = check_cfg
    run_backend = run_backend


class PolicyHooks:
    """The hooks of a policy: ``select_config``, ``measure`` or ``settle`` is required, the others are optional."""

    select_config = select_config
    config_selected = config_selected
    tuning_started = tuning_started
    tuning_progress = tuning_progress
    measure = measure
    settle = settle


#: A policy with ``measure`` or ``settle`` needs no ``select_config``, and a kernel without ``Config`` no
#: ``heuristic_cfg``.
REQUIRED_HOOKS = frozenset({"heuristic_cfg", "run_backend", "select_config"})
#: The names of the core's own policies begin with this.
BUILT_IN_PREFIX = "built-in "


def specifications(hooks: type) -> dict[str, Callable[..., Any]]:
    """The hooks of one of the two classes, by name."""
    return {name: hook for name, hook in vars(hooks).items() if not name.startswith("_")}
