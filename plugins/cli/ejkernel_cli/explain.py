"""Explain which kernel a call runs, why the others do not, and what was measured.

Nothing runs: the choice is made from shapes, as a call on this machine would make it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from ._calls import CALL_SETTINGS, CallCommand, call_options, clear_refusals, matching_backends, parse_call
from ._output import Failure, config_text, json_option, print_json, print_line, print_table

if TYPE_CHECKING:
    from ejkernel_core import Explanation, Plan, Provenance, Verdict

#: How many measured configurations are shown; --json has all of them.
MOST_TIMES = 8


@click.command("explain", cls=CallCommand, context_settings=CALL_SETTINGS)
@call_options
@click.option("--backend", shell_complete=matching_backends, help="Explain the choice for this backend alone.")
@json_option
def command(operation: str, words: tuple[str, ...], backend: str | None, as_json: bool) -> None:
    """Explain which kernel a call of OPERATION runs on this machine.

    --shape is the shape of the first array. Other arrays are given by their names (--key 4x4096x2x128); the shapes of
    those that every call needs follow from the first where they are not given. --dtype is that of all arrays of
    floating-point numbers, by default float32 on a CPU and bfloat16 elsewhere. All other options are those of the
    operation.

    \b
    ejkernel explain flash_attention --shape 4x4096x16x128 --causal
    ejkernel explain flash_attention --shape 1x1x32x128 --key 1x8192x8x128
    ejkernel explain rms_norm --shape 4096x1024 --weight 1024
    """  # noqa: D301  (click reads the character, after which it keeps the lines)
    explanation = _explanation(operation, words, backend)
    if as_json:
        print_json(as_dict(explanation))
    else:
        _print(explanation)
    if explanation.plan is None:
        reasons = "; the table has each kernel's reason" if explanation.verdicts else ""
        raise Failure(f"no kernel runs this call of {operation}{reasons}")


def _explanation(operation: str, words: tuple[str, ...], backend: str | None) -> Explanation:
    call = parse_call(operation, words)
    import ejkernel_core

    try:
        with clear_refusals(operation):
            return ejkernel_core.registry.explain(operation, backend=backend, **call.arguments)
    except ejkernel_core.UnknownBackend as error:
        raise click.UsageError(str(error)) from None


# -- tables ------------------------------------------------------------------------------------------------------------


def _print(explanation: Explanation) -> None:
    plan = explanation.plan
    print_line(f"{plan.invocation}" if plan else str(explanation.error).partition("\n")[0])
    if plan:
        print_line(f"{plan.kernel.name} runs, chosen by {origin_of(plan)}")
    print_line()
    # The heading has the operation. A policy has its whole name.
    prefix = f"{explanation.op}."
    rows = [(v.name.removeprefix(prefix), v.status, _configuration(v, plan), v.reason) for v in explanation.verdicts]
    if rows:
        print_table(("backend", "verdict", "configuration", "reason"), rows)
    if plan and plan.choice.record and plan.choice.record.provenance:
        _print_times(plan.choice.record.provenance, f"{plan.kernel.name.rpartition('.')[2]} {plan.cfg}")
    if explanation.parts:
        print_line()
        print_table(("part", "backend", "configuration", "chosen by"), map(_part_row, _all_parts(explanation)))
    if explanation.division:
        print_line(str(explanation.division))
    if explanation.backward:
        print_line()
        _print(explanation.backward)
    for remark in explanation.remarks:
        print_line(f"\n{remark}")


def _all_parts(explanation: Explanation) -> Iterator[Explanation]:
    """The parts, each followed by its own."""
    for part in explanation.parts:
        yield part
        yield from _all_parts(part)


def _part_row(part: Explanation) -> tuple[str, str, str, str]:
    plan = part.plan
    if plan is None:
        return part.op, "", "", str(part.error).partition("\n")[0]
    return plan.invocation.call_text, plan.kernel.name.rpartition(".")[2], config_text(plan.cfg), origin_of(plan)


def origin_of(plan: Plan) -> str:
    """What chose the kernel, with the remark of the choice."""
    return f"{plan.origin} ({plan.choice.note})" if plan.choice.note else plan.origin


def _configuration(verdict: Verdict, plan: Plan | None) -> str:
    """The configuration of the chosen kernel, and that which another one would take by its heuristic."""
    import ejkernel_core

    if plan is None or verdict.status not in ("chosen", "able"):
        return ""
    if verdict.status == "chosen":
        cfg = plan.cfg
    else:
        operation, _, backend = verdict.name.rpartition(".")
        cfg = ejkernel_core.registry.kernel(operation, backend).heuristic_cfg(plan.invocation)
    return config_text(cfg)


def _print_times(provenance: Provenance, chosen: str) -> None:
    from ejkernel_core.extend import Reason

    times = measured_times(provenance)
    print_line()
    print_line(str(provenance))
    if times:
        fastest = times[0][1]
        shown = [(*text.partition(" ")[::2], ms) for text, ms in times[:MOST_TIMES]]
        rows = [(name, config_text(cfg), f"{ms:.4g}", f"{ms / fastest:.2f}x") for name, cfg, ms in shown]
        print_table(("measured", "configuration", "ms", "of the fastest"), rows)
        print_line(_lead(times))
        if chosen in dict(times) and chosen != times[0][0]:
            print_line(
                "the chosen one was ahead when both were last measured side by side, or is that of the heuristic, "
                "which stays unless another one is more than 2 % faster"
            )
    reasons = [reason for _, reason in provenance.tried if isinstance(reason, str)]
    # The line of the measurement counts those that it did not reach, and crashes have lines of their own.
    failures = sum(not reason.startswith(Reason.OUT_OF_TIME) for reason in reasons) - len(provenance.crashes)
    rest = [f"{len(times) - MOST_TIMES} more were slower"] if len(times) > MOST_TIMES else []
    rest += [f"{failures} {'was' if failures == 1 else 'were'} left out or failed"] if failures else []
    if rest:
        print_line(f"{' and '.join(rest)}; --json has all")
    for crash in provenance.crashes:
        print_line(crash)


def measured_times(provenance: Provenance) -> list[tuple[str, float]]:
    """The configurations that have a time, with their milliseconds, the fastest first."""
    return sorted(((text, ms) for text, ms in provenance.tried if not isinstance(ms, str)), key=lambda row: row[1])


def _lead(times: list[tuple[str, float]]) -> str:
    """By how much the winner won: against the next configuration, and against the next kernel."""
    if len(times) < 2:
        return "nothing else was measured"
    fastest = max(times[0][1], 1e-9)
    text = f"the fastest is {times[1][1] / fastest:.2f}x as fast as the next configuration"
    winner = times[0][0].partition(" ")[0]
    other = next(((name, ms) for name, ms in times if name.partition(" ")[0] != winner), None)
    if other is not None:
        text += f", and {other[1] / fastest:.2f}x as fast as {other[0].partition(' ')[0]}"
    return text


# -- JSON --------------------------------------------------------------------------------------------------------------


def as_dict(explanation: Explanation) -> dict[str, Any]:
    """An explanation as JSON has it."""
    plan = explanation.plan
    provenance = plan.choice.record.provenance if plan and plan.choice.record else None
    return {
        "operation": explanation.op,
        "call": str(plan.invocation) if plan else None,
        "error": explanation.error,
        "kernel": plan.kernel.name if plan else None,
        "config": _fields(plan.cfg) if plan else None,
        "origin": plan.origin if plan else None,
        "note": plan.choice.note if plan else "",
        "measured": None if provenance is None else _provenance(provenance),
        "verdicts": [
            {
                "name": v.name,
                "distribution": v.provider,
                "verdict": v.status,
                "config": _configuration(v, plan),
                "reason": v.reason,
            }
            for v in explanation.verdicts
        ],
        "parts": [as_dict(part) for part in explanation.parts],
        "backward": as_dict(explanation.backward) if explanation.backward else None,
        "remarks": list(explanation.remarks),
    }


def _fields(cfg: Any) -> Any:
    import attrs

    from ejkernel_core.extend import text_of

    return attrs.asdict(cfg) if attrs.has(type(cfg)) else None if cfg is None else text_of(cfg)


def _provenance(provenance: Provenance) -> dict[str, Any]:
    import attrs

    return {**attrs.asdict(provenance), "tried": [list(entry) for entry in provenance.tried]}
