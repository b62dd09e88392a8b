"""How the installed kernels and one invocation become a choice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from ._errors import NoKernel, PluginError, Unsupported
from ._invocation import Invocation
from ._kernel import LoadedKernel

if TYPE_CHECKING:
    from ._registry import Registry


@attrs.frozen
class Candidate:
    """A kernel that can do the invocation, with its heuristic configuration."""

    kernel: LoadedKernel
    cfg: Any

    @property
    def backend(self) -> str:
        return self.kernel.backend


@attrs.frozen
class Choice:
    """What a policy answers: which candidate, with which configuration, and where the answer came from."""

    backend: str
    cfg: Any
    origin: str


@attrs.frozen
class Verdict:
    """What became of one installed kernel, and why."""

    kernel: str
    provider: str
    #: "chosen", "able" (and not chosen), "refused" (Unsupported), "left out" (not asked for), "broken".
    status: str
    reason: str

    def __str__(self) -> str:
        return f"{self.kernel} ({self.provider}): {self.status}" + (f", {self.reason}" if self.reason else "")


@attrs.frozen
class Plan:
    """The outcome for one invocation: the kernel, its configuration, where they came from, and all the others."""

    invocation: Invocation
    kernel: LoadedKernel
    cfg: Any
    origin: str
    verdicts: tuple[Verdict, ...]

    def run(self, inv: Invocation) -> tuple[Any, ...]:
        """Run the chosen kernel, and nobody else."""
        return self.kernel.run_backend(inv, self.cfg)

    def __str__(self) -> str:
        lines = [f"{self.kernel.name} with {self.cfg}, by {self.origin}", f"  for {self.invocation}"]
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


def make_plan(registry: Registry, inv: Invocation, backend: str | None, cfg: Any) -> Plan:
    """Ask every installed kernel in order of its rank on the platform, then the policies."""
    candidates, verdicts = _ask_all(registry, inv, backend, cfg)
    if not candidates:
        raise _nobody(inv, verdicts, registry, backend)
    explicit = _explicit(candidates, backend, cfg)
    choice, broken_policies = (explicit, []) if explicit else registry.select_config(inv, candidates)
    verdicts += broken_policies
    chosen = next(c for c in candidates if c.backend == choice.backend)
    return Plan(inv, chosen.kernel, choice.cfg, choice.origin, _with_choice(verdicts, chosen.kernel.name))


def _ask_all(
    registry: Registry, inv: Invocation, backend: str | None, cfg: Any
) -> tuple[list[Candidate], list[Verdict]]:
    kernels, verdicts = registry.kernels(inv.op)
    candidates = []
    for kernel in sorted(kernels, key=lambda kernel: -(kernel.rank(inv.platform) or 0)):
        heuristic, verdict = _ask(kernel, inv, backend, cfg)
        verdicts.append(verdict)
        if verdict.status == "able":
            candidates.append(Candidate(kernel, heuristic))
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
    if kernel.rank(inv.platform) is None:
        return None, verdict("refused", f"it runs on {', '.join(kernel.platforms or ())}; this is {inv.platform}")
    try:
        return kernel.heuristic_cfg(inv), verdict("able")
    except Unsupported as refusal:
        return None, verdict("refused", str(refusal))
    except Exception as fault:  # one broken plugin must not break the others' calls; it is named in every explanation
        return None, verdict("broken", f"heuristic_cfg raised {type(fault).__name__}: {fault}")


def _explicit(candidates: Sequence[Candidate], backend: str | None, cfg: Any) -> Choice | None:
    if cfg is not None:
        return Choice(candidates[0].backend, cfg, "explicit cfg")
    if backend is not None:
        return Choice(backend, candidates[0].cfg, "explicit backend, heuristic")
    return None


def misfit(choice: Any, candidates: Sequence[Candidate]) -> str | None:
    """What is wrong with a policy's answer."""
    if choice is None:
        return None
    if not isinstance(choice, Choice):
        return f"select_config returned a {type(choice).__name__}, no Choice"
    chosen = next((c for c in candidates if c.backend == choice.backend), None)
    if chosen is None:
        return f"{choice.origin} chose backend {choice.backend!r}, which is not among the candidates"
    kind = chosen.kernel.config_type
    if kind is not None and not isinstance(choice.cfg, kind):
        return f"{choice.origin} chose a {type(choice.cfg).__name__} for {chosen.kernel.name}, not its Config"
    return None


def _with_choice(verdicts: Iterable[Verdict], chosen: str) -> tuple[Verdict, ...]:
    return tuple(attrs.evolve(v, status="chosen") if v.kernel == chosen else v for v in verdicts)


def _nobody(inv: Invocation, verdicts: Sequence[Verdict], registry: Registry, backend: str | None) -> Exception:
    told = "\n".join(f"  {verdict}" for verdict in verdicts) or "  no kernel is installed"
    broken = [v for v in verdicts if v.status == "broken" and v.kernel == f"{inv.op}.{backend}"]
    if broken:
        return PluginError(str(broken[0]))
    return NoKernel(f"no kernel can do {inv}\n{told}\n{registry.how_to_install(inv.op)}")
