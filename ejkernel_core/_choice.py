"""The choice of a kernel and its configuration for one invocation.

This module has the order, and no policy calls another one: an explicit ``cfg``; the overlays of the scope; the memory;
the policies (stores and models, by RANK, which pluggy's ``tryfirst`` and ``trylast`` change); the tuner, if the scope's
policy is to measure; the record of the nearest call; and last the heuristic. ``_processes`` is around all of this where
a program has several processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs

from ._errors import NoConfig, NoKernel, PluginError, Unsupported, description, message, plugin_faults
from ._invocation import Invocation
from ._kernel import Candidate, LoadedKernel, why_mutable, with_versions
from ._plan import EXPLICIT, HEURISTIC, Choice, Plan, Verdict
from ._policies import Selection, ask_policies, is_incomplete, kernel_of, remember, tuner_name

#: How many configurations of a space an explanation checks. Faults mostly show in the first ones, and a space may be
#: infinite.
SPACE_SAMPLE = 16


def choose(
    selection: Selection, kernels: Sequence[LoadedKernel], broken: Sequence[Verdict], check: Callable[[], object]
) -> Plan:
    """The plan of an invocation: ask every kernel, in order of its rank on the platform, and then the policies.

    ``broken`` has verdicts on the kernels that do not load. ``check`` raises where the scope has what cannot be used.
    Raises ``NoKernel``, with the reason of every kernel, where none can run the invocation.
    """
    inv, policies = selection.inv, selection.policies
    candidates, verdicts_on_loaded = candidates_for(inv, kernels, selection.backend, selection.cfg)
    verdicts = (*broken, *verdicts_on_loaded)

    def select_for(inv: Invocation) -> tuple[Choice, list[Verdict]]:
        check()
        if not candidates:
            raise _no_kernel(inv, verdicts, selection.backend)
        return select(attrs.evolve(selection, inv=inv), candidates)

    if selection.cfg is None and inv.has_several_processes:
        from ._processes import settled_choice  # imported here, because most programs have one process

        choice, policy_verdicts = settled_choice(selection, candidates, verdicts, select_for)
    else:
        choice, policy_verdicts = select_for(inv)
    chosen = kernel_of(choice, candidates)
    with_choice = (attrs.evolve(v, status="chosen") if v.name == chosen.name else v for v in verdicts)
    return Plan(inv, chosen, choice, (*with_choice, *policies.verdicts, *policy_verdicts))


# -- the kernels -----------------------------------------------------------------------------------------------------


def candidates_for(
    inv: Invocation, kernels: Sequence[LoadedKernel], backend: str | None, cfg: Any
) -> tuple[tuple[Candidate, ...], list[Verdict]]:
    """The kernels that can run the invocation, the highest rank first, and a verdict on every kernel."""
    reason = None if cfg is None else why_mutable(cfg)
    if reason is not None:
        raise TypeError(f"{inv.op}: cfg takes a value that cannot be changed; {reason}")
    answers = [(kernel, *_ask_kernel(kernel, inv, backend, cfg)) for kernel in kernels]
    answers.sort(key=lambda answer: -answer[1])
    verdicts = [verdict for *_, verdict in answers]
    candidates = [
        Candidate(kernel, heuristic if cfg is None else cfg, cfg is not None)
        for kernel, _, heuristic, verdict in answers
        if verdict.status == "able"
    ]
    software = {name: version for candidate in candidates for name, version in candidate.kernel.software.items()}
    return tuple(attrs.evolve(candidate, software=software) for candidate in candidates), verdicts


def _ask_kernel(kernel: LoadedKernel, inv: Invocation, backend: str | None, cfg: Any) -> tuple[int, Any, Verdict]:
    """The rank of the kernel for the invocation, its heuristic's configuration, and the verdict on it."""
    rank = kernel.rank_on(inv.platform)
    heuristic, verdict = _verdict(kernel, rank is not None, inv, backend, cfg)
    if rank is None or (callable(rank) and verdict.status != "able"):
        return 0, heuristic, verdict
    try:
        return kernel.rank(inv), heuristic, verdict
    except plugin_faults() as fault:
        reason = f"its rank in PLATFORMS raised {description(fault)}"
        return 0, None, attrs.evolve(verdict, status="broken", reason=reason)


def _verdict(
    kernel: LoadedKernel, runs_here: bool, inv: Invocation, backend: str | None, cfg: Any
) -> tuple[Any, Verdict]:
    def verdict(status: str, reason: str = "") -> Verdict:
        return Verdict(kernel.name, kernel.provider, status, reason)

    if backend is not None and kernel.backend != backend:
        return None, verdict("left out", f"backend={backend!r} was asked for")
    if cfg is not None:
        if kernel.config_type is None:
            return None, verdict("left out", f"cfg is {_type_in_words(cfg)}; the kernel has no Config")
        if not isinstance(cfg, kernel.config_type):
            return None, verdict("left out", f"cfg is {_type_in_words(cfg)}, not its Config ({kernel.config_name})")
    is_checked = cfg is not None and kernel.checks_cfg
    if not runs_here and not is_checked:
        return None, verdict("refused", f"it runs on {', '.join(kernel.platforms or ())}; this is {inv.platform}")
    try:
        if is_checked:
            kernel.check_cfg(inv, cfg)
            return None, verdict("able")
        heuristic = kernel.heuristic_cfg(inv)
        reason = kernel.config_fault(heuristic) if cfg is None else None
        if reason is not None:
            return None, verdict("broken", f"heuristic_cfg gives {reason}")
        return heuristic, verdict("able")
    except Unsupported as refusal:
        return None, verdict("refused", message(refusal))
    except plugin_faults() as fault:  # a broken plugin must not break calls that other kernels can run
        hook = "check_cfg" if is_checked else "heuristic_cfg"
        return None, verdict("broken", f"{hook} raised {description(fault)}")


def _type_in_words(cfg: Any) -> str:
    kind = cfg if isinstance(cfg, type) else type(cfg)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    return f"the class {name} itself" if cfg is kind else f"of type {name}"


def _no_kernel(inv: Invocation, verdicts: Sequence[Verdict], backend: str | None) -> Exception:
    broken = [v for v in verdicts if v.status == "broken" and v.name == f"{inv.op}.{backend}"]
    if broken:
        return PluginError(str(broken[0]))
    reasons = "\n".join(f"  {verdict}" for verdict in verdicts) or "  no kernel is installed"
    return NoKernel(f"no kernel can do {inv}\n{reasons}", verdicts)


def explained(plan: Plan, kernels: Iterable[LoadedKernel]) -> Plan:
    """The plan, with the reason why each able kernel was not chosen, and with the faults in the configuration spaces of
    all candidates, as far as a few configurations show.
    """
    by_name = {kernel.name: kernel for kernel in kernels}

    def with_reasons(verdict: Verdict) -> Verdict:
        if verdict.status not in ("chosen", "able"):
            return verdict
        reason = plan.why_not(verdict) if verdict.status == "able" else ""
        # With the caller's cfg, the kernel was not asked for its heuristic, so it may not have a space for the call.
        faults = "" if plan.origin == EXPLICIT else _space_faults(by_name[verdict.name], plan.invocation)
        return attrs.evolve(verdict, reason="; ".join(filter(None, (reason, faults))))

    return attrs.evolve(plan, verdicts=tuple(map(with_reasons, plan.verdicts)))


def _space_faults(kernel: LoadedKernel, inv: Invocation) -> str:
    faults: list[str] = []
    for _ in kernel.configurations(inv, faults.append, SPACE_SAMPLE):
        pass
    return "; ".join(dict.fromkeys(faults))


# -- the policies ----------------------------------------------------------------------------------------------------


def select(selection: Selection, candidates: Sequence[Candidate]) -> tuple[Choice, list[Verdict]]:
    """The choice among the candidates, and a verdict on each policy that is broken or has a reason for no choice."""
    inv, policies, scope, best = selection.inv, selection.policies, selection.scope, candidates[0]
    if best.explicit:
        return Choice(best.backend, best.cfg, EXPLICIT), []
    choice, nearest, policy_verdicts = ask_policies(selection, candidates)
    if choice is not None and choice.measured and choice.record is not None:
        choice = attrs.evolve(choice, record=with_versions(choice.record, candidates))
        remember(policies, inv, choice)
    is_continuing = choice is not None and is_incomplete(choice, scope.policy) and tuner_name(policies) is not None
    is_measuring = is_continuing or (choice is None and scope.policy.mode == "on_miss")
    if is_measuring and not inv.has_several_processes:
        from ._tuning import measure_once  # imported here, because most programs measure nothing

        tuner = tuner_name(policies)
        try:
            choice = measure_once(selection, candidates, choice.record if choice else None)
            policies.failures.pop((str(tuner), "measure"), None)
            return choice, policy_verdicts
        except Unsupported as reason:
            policy_verdicts.append(Verdict(str(tuner), policies.provider(str(tuner)), "no answer", message(reason)))
        except NoConfig:
            raise
        except plugin_faults() as fault:  # a broken tuner must not break calls either
            policies.failures[str(tuner), "measure"] = f"measure raised {description(fault)}"
    if choice is not None:
        return choice, policy_verdicts
    has_alternatives = len(candidates) > 1 or best.kernel.config_type is not None
    if scope.policy.mode == "error_on_miss" and has_alternatives:
        reasons = "".join(f"\n  {v.name}: {v.status}, {v.reason}" for v in policy_verdicts)
        raise NoConfig(
            f"no configuration is remembered for {inv}{_key_text(inv)}, and the policy is error_on_miss: tune the call "
            f"(ejkernel_tuning.autotune, or 'ejkernel tune'), or enter policy_override(mode='on_miss'){reasons}"
        )
    return nearest or Choice(best.backend, best.cfg, HEURISTIC), policy_verdicts


def _key_text(inv: Invocation) -> str:
    try:
        return f" (key {inv.key})"
    except TypeError:  # an option without content, so there is no key
        return ""
