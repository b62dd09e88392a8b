"""How the installed kernels and one invocation become a choice.

The order is this module's, and nobody's answer asks for another's: an explicit ``cfg``, the overlays of the scope, what
is in memory, the policies (stores and models, by RANK, which pluggy's ``tryfirst`` and ``trylast`` change), then what
measures, if the scope's policy says so, then what is remembered of the nearest call, and last the heuristic.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from ._discovery import Broken
from ._errors import PASSING, NoConfig, NoKernel, PluginError, Unsupported, described, message
from ._kernel import Candidate, Invocation, LoadedKernel, changeable, of_here
from ._plan import Choice, Plan, Verdict
from ._policies import Policies, is_short, learn, recalled, tuner_name
from ._scopes import Scope

#: How many configurations of a space an explanation looks at: its faults mostly show there, and it may have no end.
FEW = 16
#: The rank of a kernel that does not say: it was installed to be used, so it goes before the general ones.
DEFAULT_RANK = 50
#: The origin of what the caller gave.
EXPLICIT = "explicit cfg"


def choose(
    inv: Invocation,
    kernels: Sequence[LoadedKernel],
    broken: Sequence[Verdict],
    judge: LoadedKernel | Broken | None,
    policies: Policies,
    backend: str | None,
    cfg: Any,
    scope: Scope,
) -> Plan:
    """Ask every kernel in order of its rank on the platform, then the policies.

    ``broken`` has the kernels that do not load; ``judge`` is the one whose results all others have to have. Raises
    ``NoKernel`` with every kernel's reason.
    """
    candidates, verdicts = able(inv, kernels, backend, cfg)
    verdicts = [*broken, *verdicts]
    if not candidates:
        raise _nobody(inv, verdicts, backend)
    choice, passed = selected(inv, candidates, judge, policies, scope)
    chosen = next(c.kernel for c in candidates if c.backend == choice.backend)
    with_choice = (attrs.evolve(v, status="chosen") if v.name == chosen.name else v for v in verdicts)
    return Plan(inv, chosen, choice, (*with_choice, *policies.verdicts, *passed))


# -- the kernels -----------------------------------------------------------------------------------------------------


def able(
    inv: Invocation, kernels: Sequence[LoadedKernel], backend: str | None, cfg: Any
) -> tuple[list[Candidate], list[Verdict]]:
    """Those that can do the invocation, the best first, and the verdict on each."""
    reason = None if cfg is None else changeable(cfg)
    if reason is not None:
        raise TypeError(f"{inv.op}: cfg takes a value that cannot be changed; {reason}")
    candidates, verdicts = [], []
    ranks = {kernel: _rank(kernel, inv.platform) for kernel in kernels}
    for kernel in sorted(kernels, key=lambda kernel: -(ranks[kernel] or 0)):
        heuristic, verdict = _ask(kernel, ranks[kernel] is not None, inv, backend, cfg)
        verdicts.append(verdict)
        if verdict.status == "able":
            candidates.append(Candidate(kernel, heuristic if cfg is None else cfg, cfg is not None))
    software = {name: version for candidate in candidates for name, version in candidate.kernel.software.items()}
    return [attrs.evolve(candidate, software=software) for candidate in candidates], verdicts


def _rank(kernel: LoadedKernel, platform: str) -> int | None:
    """How strongly it is preferred on this platform; None where it does not run."""
    return DEFAULT_RANK if kernel.platforms is None else kernel.platforms.get(platform)


def _ask(kernel: LoadedKernel, runs_here: bool, inv: Invocation, backend: str | None, cfg: Any) -> tuple[Any, Verdict]:
    def verdict(status: str, reason: str = "") -> Verdict:
        return Verdict(kernel.name, kernel.provider, status, reason)

    if backend is not None and kernel.backend != backend:
        return None, verdict("left out", f"backend={backend!r} was asked for")
    if cfg is not None and (kernel.config_type is None or not isinstance(cfg, kernel.config_type)):
        return None, verdict("left out", f"cfg is {_type_in_words(cfg)}, not its Config")
    is_checked = cfg is not None and kernel.checks_cfg
    if not runs_here and not is_checked:
        return None, verdict("refused", f"it runs on {', '.join(kernel.platforms or ())}; this is {inv.platform}")
    try:
        if is_checked:
            kernel.check_cfg(inv, cfg)
            return None, verdict("able")
        heuristic = kernel.heuristic_cfg(inv)
        unfit = kernel.unfit(heuristic) if cfg is None else None
        if unfit is not None:
            return None, verdict("broken", f"heuristic_cfg gives {unfit}")
        return heuristic, verdict("able")
    except Unsupported as refusal:
        return None, verdict("refused", message(refusal))
    except PASSING:
        raise
    except BaseException as fault:  # one broken plugin must not break the others' calls; every explanation names it
        hook = "check_cfg" if is_checked else "heuristic_cfg"
        return None, verdict("broken", f"{hook} raised {described(fault)}")


def _type_in_words(cfg: Any) -> str:
    kind = cfg if isinstance(cfg, type) else type(cfg)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    return f"the class {name} itself" if cfg is kind else f"of type {name}"


def _nobody(inv: Invocation, verdicts: Sequence[Verdict], backend: str | None) -> Exception:
    broken = [v for v in verdicts if v.status == "broken" and v.name == f"{inv.op}.{backend}"]
    if broken:
        return PluginError(str(broken[0]))
    reasons = "\n".join(f"  {verdict}" for verdict in verdicts) or "  no kernel is installed"
    return NoKernel(f"no kernel can do {inv}\n{reasons}", verdicts)


def with_space_faults(plan: Plan, kernels: Iterable[LoadedKernel]) -> Plan:
    """The plan, with what is wrong with the configuration spaces of the kernels that are able, as a few show."""
    if plan.origin == EXPLICIT:  # nobody has asked whether the kernel's heuristic is able
        return plan
    by_name = {kernel.name: kernel for kernel in kernels}

    def with_faults(verdict: Verdict) -> Verdict:
        if verdict.status not in ("chosen", "able"):
            return verdict
        return attrs.evolve(verdict, reason=_space_faults(by_name[verdict.name], plan.invocation))

    return attrs.evolve(plan, verdicts=tuple(map(with_faults, plan.verdicts)))


def _space_faults(kernel: LoadedKernel, inv: Invocation) -> str:
    faults: list[str] = []
    for _ in kernel.configurations(inv, faults.append, FEW):
        pass
    return "; ".join(dict.fromkeys(faults))


# -- the policies ----------------------------------------------------------------------------------------------------


def selected(
    inv: Invocation,
    candidates: Sequence[Candidate],
    judge: LoadedKernel | Broken | None,
    policies: Policies,
    scope: Scope,
) -> tuple[Choice, list[Verdict]]:
    """The choice among the candidates, and the verdict on each policy that is broken or says why it has none."""
    best = candidates[0]
    if best.explicit:
        return Choice(best.backend, best.cfg, EXPLICIT), []
    choice, near, passed = recalled(inv, candidates, policies, scope)
    if choice is not None and choice.measured and choice.record is not None:
        choice = attrs.evolve(choice, record=of_here(choice.record, candidates))
        learn(policies, inv, choice)
    is_further = choice is not None and is_short(choice, scope.policy) and tuner_name(policies) is not None
    if is_further or (choice is None and scope.policy.mode == "on_miss"):
        from ._turns import measured  # most programs measure nothing

        tuner = tuner_name(policies)
        try:
            choice = measured(inv, candidates, judge, policies, scope, choice.record if choice else None)
            policies.failures.pop((str(tuner), "measure"), None)
            return choice, passed
        except Unsupported as reason:
            passed.append(Verdict(str(tuner), policies.provider(str(tuner)), "no answer", message(reason)))
        except (*PASSING, NoConfig):
            raise
        except BaseException as fault:  # as for kernels: one broken plugin must not break everybody's calls
            policies.failures[str(tuner), "measure"] = f"measure raised {described(fault)}"
    if choice is not None:
        return choice, passed
    if scope.policy.mode == "error_on_miss":
        reasons = "".join(f"\n  {v.name}: {v.status}, {v.reason}" for v in passed)
        raise NoConfig(
            f"no configuration is remembered for {inv}{_keyed(inv)}, and the policy is error_on_miss: tune the call "
            f"(ejkernel_tuning.autotune), or enter policy_override(mode='on_miss'){reasons}"
        )
    return near or Choice(best.backend, best.cfg, "heuristic"), passed


def _keyed(inv: Invocation) -> str:
    try:
        return f" (key {inv.key})"
    except TypeError:  # an option that has no content to be remembered by
        return ""
