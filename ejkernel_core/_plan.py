"""How the installed kernels and one invocation become a choice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from ._errors import NoKernel, PluginError, Unsupported
from ._invocation import Invocation, Key
from ._kernel import LoadedKernel
from ._records import Record

if TYPE_CHECKING:
    from ._registry import Registry
    from ._scopes import Scope


@attrs.frozen
class Candidate:
    """A kernel that can do the invocation, with its heuristic configuration, or the one that the caller gave."""

    kernel: LoadedKernel
    cfg: Any
    explicit: bool = False

    @property
    def backend(self) -> str:
        return self.kernel.backend

    @property
    def config_type(self) -> type | None:
        """The type of its configurations: as the kernel says, or as its heuristic does."""
        return self.kernel.config_type or (None if self.cfg is None else type(self.cfg))


@attrs.frozen
class Choice:
    """What a policy answers: which candidate, with which configuration, and where the answer came from."""

    backend: str
    cfg: Any
    origin: str
    #: What it was remembered by, and how it was found out.
    key: Key | None = attrs.field(default=None, repr=str)
    record: Record | None = None
    #: True for what was measured just now: those who remember are told.
    measured: bool = False

    def __str__(self) -> str:
        found = f"\n  remembered as {self.key}" if self.key else ""
        provenance = self.record.provenance if self.record else None
        return f"{self.origin}{found}" + (f", {provenance}" if provenance else ", put there by hand" if found else "")


@attrs.frozen
class Verdict:
    """What became of one installed kernel or policy, and why."""

    name: str
    provider: str
    #: "chosen", "able" (and not chosen), "refused" (Unsupported), "left out" (not asked for), "broken"; of a policy,
    #: "no answer" (Unsupported) or "broken".
    status: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.provider}): {self.status}" + (f", {self.reason}" if self.reason else "")


@attrs.frozen
class Plan:
    """The outcome for one invocation: the kernel, its configuration, where they came from, and all the others."""

    invocation: Invocation
    kernel: LoadedKernel
    choice: Choice
    verdicts: tuple[Verdict, ...]

    @property
    def cfg(self) -> Any:
        """The configuration that was chosen."""
        return self.choice.cfg

    @property
    def origin(self) -> str:
        """Who chose it."""
        return self.choice.origin

    def run(self, inv: Invocation) -> tuple[Any, ...]:
        """Run the chosen kernel, and nobody else."""
        return self.kernel.run_backend(inv, self.cfg)

    def __str__(self) -> str:
        lines = [f"{self.kernel.name} with {self.cfg}, by {self.choice}", f"  for {self.invocation}"]
        return "\n".join([*lines, *(f"  {verdict}" for verdict in self.verdicts)])


@attrs.frozen
class Explanation:
    """Why a call does what it does: its plan (or why it has none), and that of its backward operation."""

    op: str
    plan: Plan | None
    error: str | None
    backward: Explanation | None = None
    note: str = "a function that JAX has already compiled keeps its choice until it is traced again"

    def __str__(self) -> str:
        own = str(self.plan) if self.plan else self.error or ""
        return own + (f"\n{self.backward}" if self.backward else f"\n  ({self.note})")


def make_plan(registry: Registry, inv: Invocation, backend: str | None, cfg: Any, scope: Scope) -> Plan:
    """Ask every installed kernel in order of its rank on the platform, then the policies."""
    candidates, verdicts = ask_all(registry, inv, backend, cfg)
    if not candidates:
        raise _nobody(inv, verdicts, registry, backend)
    for listener in scope.listeners:
        listener(inv)
    choice, policies = registry.select_config(inv, candidates, scope)
    chosen = next(c.kernel for c in candidates if c.backend == choice.backend)
    return Plan(inv, chosen, choice, (*_with_choice(verdicts, chosen.name), *policies))


def ask_all(
    registry: Registry, inv: Invocation, backend: str | None, cfg: Any
) -> tuple[list[Candidate], list[Verdict]]:
    kernels, verdicts = registry.kernels(inv.op)
    candidates = []
    for kernel in sorted(kernels, key=lambda kernel: -(kernel.rank(inv.platform) or 0)):
        heuristic, verdict = _ask(kernel, inv, backend, cfg)
        verdicts.append(verdict)
        if verdict.status == "able":
            candidates.append(Candidate(kernel, heuristic if cfg is None else cfg, cfg is not None))
    return candidates, verdicts


def _ask(kernel: LoadedKernel, inv: Invocation, backend: str | None, cfg: Any) -> tuple[Any, Verdict]:
    def verdict(status: str, reason: str = "") -> Verdict:
        return Verdict(kernel.name, kernel.provider, status, reason)

    if backend is not None and kernel.backend != backend:
        return None, verdict("left out", f"backend={backend!r} was asked for")
    if cfg is not None and (kernel.config_type is None or not isinstance(cfg, kernel.config_type)):
        return None, verdict(
            "left out", f"the given cfg is a {type(cfg).__module__}.{type(cfg).__qualname__}, not its Config"
        )
    if getattr(cfg, "interpret", False):
        return None, verdict("able")  # the heuristic knows nothing of such a platform, and is not needed
    if kernel.rank(inv.platform) is None:
        return None, verdict("refused", f"it runs on {', '.join(kernel.platforms or ())}; this is {inv.platform}")
    try:
        heuristic = kernel.heuristic_cfg(inv)
        if cfg is None and kernel.config_type is not None and not isinstance(heuristic, kernel.config_type):
            return None, verdict("broken", f"heuristic_cfg gives a {type(heuristic).__qualname__}, not its Config")
        return heuristic, verdict("able")
    except Unsupported as refusal:
        return None, verdict("refused", str(refusal))
    except Exception as fault:  # one broken plugin must not break the others' calls; it is named in every explanation
        return None, verdict("broken", f"heuristic_cfg raised {type(fault).__name__}: {fault}")


def misfit(choice: Any, candidates: Sequence[Candidate]) -> str | None:
    """What is wrong with a policy's answer."""
    if choice is None:
        return None
    if not isinstance(choice, Choice):
        return f"select_config returned a {type(choice).__name__}, no Choice"
    if choice.measured and (choice.record is None or choice.record.provenance is None):
        return f"{choice.origin} measured, and gives no record with a provenance"
    chosen = next((c for c in candidates if c.backend == choice.backend), None)
    if chosen is None:
        return f"{choice.origin} chose backend {choice.backend!r}, which is not among the candidates"
    kind = chosen.kernel.config_type  # not the heuristic's type: a kernel that does not say may take several
    if kind is not None and not isinstance(choice.cfg, kind):
        return f"{choice.origin} chose a {type(choice.cfg).__name__} for {chosen.kernel.name}, not its Config"
    return None


def _with_choice(verdicts: Iterable[Verdict], chosen: str) -> tuple[Verdict, ...]:
    return tuple(attrs.evolve(v, status="chosen") if v.name == chosen else v for v in verdicts)


def _nobody(inv: Invocation, verdicts: Sequence[Verdict], registry: Registry, backend: str | None) -> Exception:
    told = "\n".join(f"  {verdict}" for verdict in verdicts) or "  no kernel is installed"
    broken = [v for v in verdicts if v.status == "broken" and v.name == f"{inv.op}.{backend}"]
    if broken:
        return PluginError(str(broken[0]))
    return NoKernel(f"no kernel can do {inv}\n{told}\n{registry.how_to_install()}")
